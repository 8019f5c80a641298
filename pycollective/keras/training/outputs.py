"""The names of a model's outputs, and each output's part of losses, targets and other arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pycollective import nest


def names_of(outputs: Any, known: Any = None) -> Any:
    """Return a name for each output, in the structure of the outputs.

    The name of an output in a dict is its key. The name of any other output is its layer's name in
    ``known``, a nest of the same structure, or else ``output_1``, ``output_2``, …. As in Keras, the
    name of a nested output begins with the outer keys and indices, joined by ``/``.
    """
    return _named(outputs, known, ())


def _named(outputs: Any, known: Any, path: tuple[Any, ...]) -> Any:
    mapping = isinstance(outputs, Mapping)
    if not mapping and not nest.is_nested(outputs):
        layer = known if isinstance(known, str) else None
        *before, last = path or (0,)
        if isinstance(last, int):
            last = f"output_{last + 1}" if layer is None else layer
        return "/".join(map(str, (*before, last)))
    if mapping:
        inside = known if isinstance(known, Mapping) else {}
        return {key: _named(outputs[key], inside.get(key), (*path, str(key))) for key in outputs}
    fits = isinstance(known, (list, tuple)) and len(known) == len(outputs)
    return [
        _named(output, known[place] if fits else None, (*path, place))
        for place, output in enumerate(outputs)
    ]


def parts_of(what: str, value: Any, names: Any, lists: bool = False) -> list[Any]:
    """Return a list with each output's part of the nest ``value``; the parts of None are None.

    ``names`` is the result of `names_of`. As in Keras, a list has the parts of a dict of outputs in the
    order of the sorted keys. With ``lists``, an output's part may be a list. Raise
    ``ValueError``, which names the argument ``what``, if the number or names of the parts do not fit.
    """
    leaves = nest.flatten(names)
    if value is None:
        return [None] * len(leaves)
    if not nest.is_nested(value):
        if len(leaves) == 1:
            return [value]
    elif len(leaves) == 1 and len(value) == 1:
        (only,) = value.values() if isinstance(value, Mapping) else value
        own_names = _items(names)[0] if nest.is_nested(names) else names
        return _parts_of_items(what, [only], [own_names], lists)
    elif nest.is_nested(names):
        if isinstance(value, Mapping):
            keyed = names if isinstance(names, Mapping) else {name: name for name in leaves}
            unknown = [key for key in value if key not in keyed]
            if unknown:
                raise ValueError(f"{what} names {unknown}; the outputs are {list(keyed)}")
            return _parts_of_items(what, map(value.get, keyed), keyed.values(), lists)
        items = _items(names)
        if len(value) == len(items):
            if isinstance(names, Mapping):
                found = dict(zip(_by_key(names), value, strict=True))
                value = [found[key] for key in names]
            return _parts_of_items(what, value, items, lists)
        if len(value) == len(leaves) and not any(map(nest.is_nested, value)):
            ordered = nest.flatten(names, by_key=True)
            return list(value) if ordered == leaves else [value[ordered.index(n)] for n in leaves]
    got = f"{len(value)} in a {type(value).__name__}" if nest.is_nested(value) else "one"
    count = len(leaves)
    outputs = "one output" if count == 1 else f"{count} outputs ({', '.join(leaves)})"
    raise ValueError(f"the model has {outputs}, but {what} has {got}")


def _by_key(names: Mapping[Any, Any]) -> list[Any]:
    return sorted(names, key=repr)


def _items(names: Any) -> list[Any]:
    return list(names.values() if isinstance(names, Mapping) else names)


def _parts_of_items(
    what: str, values: Iterable[Any], names: Iterable[Any], lists: bool
) -> list[Any]:
    """Return the parts of all outputs, given the value and the names for each item of the outputs.

    An item is one output, or a nest of outputs.
    """
    parts: list[Any] = []
    for value, own_names in zip(values, names, strict=True):
        if nest.is_nested(own_names):
            parts += parts_of(what, value, own_names, lists)
        elif nest.is_nested(value) and not lists:
            raise ValueError(
                f"output {own_names!r} is one tensor, but {what} has a {type(value).__name__} of "
                f"{len(value)} for it"
            )
        else:
            parts.append(value)
    return parts


def with_missing_targets(y: Any, wanted: list[bool]) -> Any:
    """Insert None for the outputs without a target, if ``y`` has targets for the others only."""
    given = list(y) if isinstance(y, (list, tuple)) else [y]
    if y is None or isinstance(y, Mapping) or len(given) in (0, len(wanted)):
        return y
    if len(given) != sum(wanted):
        return y
    targets = iter(given)
    return [next(targets) if needed else None for needed in wanted]
