"""Nested structures: lists, tuples, named tuples and mappings of values.

Mappings keep their own type and the first structure's order of keys. ``None`` is a leaf. The rules are
those of ``tf.nest`` as far as this package needs them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

__all__ = ["flatten", "is_nested", "map_structure", "pack_as", "rebuild"]


def is_nested(value: Any) -> bool:
    """Return True if ``value`` is a container whose elements these functions visit."""
    return _is_container(value.__class__)


@functools.lru_cache(maxsize=1024)
def _is_container(kind: type) -> bool:
    # `issubclass` with Mapping is slow, and the test is made for every leaf: cache its results.
    return issubclass(kind, (list, tuple, Mapping)) and not getattr(kind, "is_leaf_of_nests", False)


@functools.lru_cache(maxsize=1024)
def _is_mapping(kind: type) -> bool:
    return issubclass(kind, Mapping)


def rebuild(like: Any, items: Iterable[Any]) -> Any:
    """Make a container of the kind of ``like`` from new items, in order."""
    if _is_mapping(like.__class__):
        pairs = dict(zip(like, items, strict=True))
        if type(like) is dict:
            return pairs
        if isinstance(like, dict):
            # A subclass's constructor may have other parameters, as defaultdict's does.
            same = copy.copy(like)
            for key, item in pairs.items():  # not update(), which adds in a Counter
                same[key] = item
            return same
        return type(like)(pairs)
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*items)
    return type(like)(items)


def children(value: Any) -> Iterable[Any]:
    """Return the items of a container, or the values of a mapping."""
    found: Iterable[Any] = value.values() if _is_mapping(value.__class__) else value
    return found


def flatten(structure: Any, by_key: bool = False) -> list[Any]:
    """Return the leaves of ``structure`` in order.

    With ``by_key``, mappings are visited by sorted keys, so that mappings with equal keys give their
    leaves in the same order.
    """
    if by_key:
        structure = _sorted(structure)
    if not _is_container(structure.__class__):
        return [structure]
    leaves: list[Any] = []
    for child in children(structure):
        if _is_container(child.__class__):
            leaves += flatten(child)
        else:
            leaves.append(child)
    return leaves


def _sorted(structure: Any) -> Any:
    """Return the structure as lists and dicts with sorted keys."""
    if not _is_container(structure.__class__):
        return structure
    if _is_mapping(structure.__class__):
        return {key: _sorted(structure[key]) for key in sorted(structure, key=repr)}
    return list(map(_sorted, structure))


def map_structure(function: Callable[..., Any], *structures: Any) -> Any:
    """Apply ``function`` to the corresponding leaves of structures, and return the same structure.

    Raises
    ------
    ValueError
        The first structure has a mapping, and another has no mapping with the same keys there. Or
        the first has a list or tuple, and another has no list or tuple of the same length there.
    """
    first, *others = structures
    if not _is_container(first.__class__):
        return function(*structures)
    for other in others:
        if _is_mapping(first.__class__):
            if not isinstance(other, Mapping) or set(first) != set(other):
                raise ValueError(f"structures have different keys: {first!r} and {other!r}")
        elif not isinstance(other, (list, tuple)) or len(first) != len(other):
            raise ValueError(f"structures differ: {first!r} and {other!r}")
    if _is_mapping(first.__class__):
        rows: Iterable[tuple[Any, ...]] = [tuple(s[key] for s in structures) for key in first]
    else:
        rows = zip(*structures, strict=True)
    items = [
        map_structure(function, *row) if _is_container(row[0].__class__) else function(*row)
        for row in rows
    ]
    return rebuild(first, items)


def pack_as(structure: Any, leaves: Iterable[Any], by_key: bool = False) -> Any:
    """Return ``leaves`` in the shape of ``structure``; their order is that of `flatten`."""
    if by_key:
        packed = pack_as(_sorted(structure), leaves)
        return map_structure(lambda _, leaf: leaf, structure, packed)
    source = iter(leaves)
    packed = _pack(structure, source)
    if next(source, source) is not source:
        raise ValueError(f"more values than places in {structure!r}")
    return packed


def _pack(structure: Any, leaves: Iterator[Any]) -> Any:
    try:
        if not _is_container(structure.__class__):
            return next(leaves)
        items = [
            _pack(child, leaves) if _is_container(child.__class__) else next(leaves)
            for child in children(structure)
        ]
    except StopIteration:
        raise ValueError("fewer values than places in the structure") from None
    return rebuild(structure, items)
