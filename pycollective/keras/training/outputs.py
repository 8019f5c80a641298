"""The outputs of a model: their names, and the assignment of losses, targets and so on to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycollective import nest


def names_of(outputs: Any, known: Any = None) -> Any:
    """Return a name for each output, in the structure of the outputs.

    A name is the output's key in a dict, the name of its layer in ``known``, which has the same
    structure, or ``output_1``, …. The name of a nested output begins with its path of keys and
    indices, joined by ``/``, as in Keras.
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
    """Return a list with each output's part of the nest ``value``, or None for each output.

    ``names`` comes from `names_of`. With ``lists``, one output may have several parts in a list.
    Raise ``ValueError``, which names ``what``, if the number of parts or their names do not fit.
    """
    leaves = nest.flatten(names)
    if value is None:
        return [None] * len(leaves)
    if not nest.is_nested(value):
        if len(leaves) == 1:
            return [value]
    elif len(leaves) == 1 and len(value) == 1:
        (only,) = value.values() if isinstance(value, Mapping) else value
        return _inside(what, only, _items(names)[0] if nest.is_nested(names) else names, lists)
    elif nest.is_nested(names):
        if isinstance(value, Mapping):
            keyed = names if isinstance(names, Mapping) else {name: name for name in leaves}
            unknown = [key for key in value if key not in keyed]
            if unknown:
                raise ValueError(f"{what} names {unknown}; the outputs are {list(keyed)}")
            pairs = [(value.get(key), inside) for key, inside in keyed.items()]
            return [part for given, inside in pairs for part in _inside(what, given, inside, lists)]
        items = _items(names)
        if len(value) == len(items):
            pairs = list(zip(value, items, strict=True))
            return [part for given, inside in pairs for part in _inside(what, given, inside, lists)]
        if len(value) == len(leaves) and not any(map(nest.is_nested, value)):
            return list(value)
    got = f"{len(value)} in a {type(value).__name__}" if nest.is_nested(value) else "one"
    count = len(leaves)
    outputs = "one output" if count == 1 else f"{count} outputs ({', '.join(leaves)})"
    raise ValueError(f"the model has {outputs}, but {what} has {got}")


def _items(names: Any) -> list[Any]:
    return list(names.values() if isinstance(names, Mapping) else names)


def _inside(what: str, value: Any, names: Any, lists: bool) -> list[Any]:
    if nest.is_nested(names):
        return parts_of(what, value, names, lists)
    if nest.is_nested(value) and not lists:
        raise ValueError(
            f"output {names!r} is one tensor, but {what} has a {type(value).__name__} of "
            f"{len(value)} for it"
        )
    return [value]


def with_missing_targets(y: Any, wanted: list[bool]) -> Any:
    """Insert None for the outputs without a target, if ``y`` has targets for the others only."""
    given = list(y) if isinstance(y, (list, tuple)) else [y]
    if y is None or isinstance(y, Mapping) or len(given) in (0, len(wanted)):
        return y
    if len(given) != sum(wanted):
        return y
    targets = iter(given)
    return [next(targets) if needed else None for needed in wanted]
