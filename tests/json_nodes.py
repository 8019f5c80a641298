"""Damage to JSON values: a value of a wrong type in the place of a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WRONG = [None, True, -1, 10**30, 0.5, "", "x", "\ud800", [], [[]], {}, {"a": {}}]

NodePath = tuple[Any, ...]


def wrong_copies(value: Any, *, each: bool = True) -> Iterator[tuple[NodePath, Any, Any]]:
    """Yield the path of a node, a value of `WRONG`, and a copy with that value at the node.

    With `each` every node gets every value, else every node gets one value, in turn.
    """
    for number, path in enumerate(_paths(value)):
        for wrong in WRONG if each else [WRONG[number % len(WRONG)]]:
            yield path, wrong, _replaced(value, path, wrong)


def _paths(value: Any, path: NodePath = ()) -> Iterator[NodePath]:
    yield path
    keys = value if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    for key in keys:
        yield from _paths(value[key], (*path, key))


def _replaced(value: Any, path: NodePath, new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copy
