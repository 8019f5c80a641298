"""Writing and reading of weights in the HDF5 layout of Keras 3.

Each layer, and the optimizer, has a group ``<path>/vars`` with its own variables as ``0``, ``1``, ….
The path consists of attribute names, and of class names for the items of lists. `read_weights`
checks all values before the first assignment, so that a file that does not fit changes nothing.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pycollective.array_backend import Array
from pycollective.errors import CheckpointError
from pycollective.keras.backend import name_of_class
from pycollective.keras.layers import Layer
from pycollective.keras.optimizers import Optimizer
from pycollective.tensor import Variable
from pycollective.train.trackable import Trackable, attributes_of

#: Groups in files of Keras, some only in older files, that hold no weights of layers; ignored.
_IGNORED = ("seed_generator", "random_generator", "metrics", "_metrics", "_loss_tracker")
_MOST_NAMED = 10  # the number of differences that a message lists
#: The limit of one layer's values is the larger of this number of bytes, ...
_LARGEST_VALUE = 64 << 20
#: ... and this multiple of the file's size.
_MOST_EXPANSION = 100


# Paths of objects ---------------------------------------------------------------------------------


def owners_of(model: Layer) -> Iterator[tuple[str, Any]]:
    """Yield layers and optimizers with their paths, each once, in Keras's order."""
    # The dict keeps the objects alive, because the id of a freed object, such as a list that a
    # property returned, may be reused.
    seen: dict[int, Any] = {}

    def visit(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if id(value) in seen:
            return
        seen[id(value)] = value
        if isinstance(value, (list, tuple, Mapping)):
            names: Counter[str] = Counter()
            for item in value.values() if isinstance(value, Mapping) else value:
                if isinstance(item, (Layer, Optimizer)):
                    name = name_of_class(type(item))
                elif isinstance(item, (list, tuple, Mapping)):
                    name = "container"
                else:
                    continue
                number = names[name]
                names[name] += 1
                yield from visit(_joined(path, f"{name}_{number}" if number else name), item)
            return
        if not isinstance(value, (Layer, Optimizer)):
            return
        yield path, value
        for name, child in _attributes(value):
            yield from visit(_joined(path, name), child)

    return visit("", model)


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _attributes(value: Trackable) -> Iterable[tuple[str, Any]]:
    """Return an object's tracked attributes by name: public names first, then private names.

    The layers of a functional or sequential model come before all other attributes.
    """
    attributes = attributes_of(value)
    layers = getattr(value, "layers", None) if hasattr(value, "get_layer") else None
    if layers is not None:
        attributes["layers"] = layers
    first = getattr(value, "_graph", None) is not None or hasattr(value, "_stack")

    def order(name: str) -> tuple[bool, bool, str]:
        return not (first and name == "layers"), name.startswith("_"), name

    return [(name, attributes[name]) for name in sorted(attributes, key=order)]


def _variables_of(owner: Any) -> list[Variable]:
    """Return an object's own variables in the order of the file."""
    if isinstance(owner, Optimizer):
        return list(owner.variables)
    variables: list[Variable] = owner.stored_variables()
    return variables


# Writing ------------------------------------------------------------------------------------------


def write_weights(model: Layer) -> bytes:
    """Return the bytes of a file of a model's weights and its optimizer's variables."""
    h5py = _h5py()
    target = io.BytesIO()
    with h5py.File(target, "w") as file:
        for path, owner in owners_of(model):
            group = file.require_group(_joined(path, "vars"))
            group.attrs["name"] = owner.name
            store: dict[str, Any] = {}
            owner.save_own_variables(store)
            for name, array in store.items():
                value = np.asarray(array)
                dataset = group.create_dataset(name, data=value)
                if value.dtype.name == "bfloat16":
                    dataset.attrs["dtype"] = "bfloat16"
    return target.getvalue()


# Reading ------------------------------------------------------------------------------------------


def read_weights(model: Layer, data: bytes, where: str, skip_mismatch: bool = False) -> None:
    """Load the variables of a built model and its optimizer from a file, called ``where`` in messages.

    With ``skip_mismatch``, skip layers that do not fit, with a warning. Otherwise, and for a file
    that is damaged or contains links, raise `CheckpointError` and change nothing. If a layer's own
    ``load_own_variables`` fails, layers that also override this method may have changed.
    """
    h5py = _h5py()
    pairs: list[tuple[Variable, Array]] = []
    problems: list[str] = []
    overriding: list[tuple[Layer, dict[str, Array]]] = []
    taken: set[str] = set()
    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            for path, owner in owners_of(model):
                stored = _group(h5py, file, _joined(path, "vars"), where)
                taken.add(path)
                if isinstance(owner, Optimizer):
                    pairs += _optimizer_pairs(h5py, owner, stored, path, where)
                    continue
                if type(owner).load_own_variables is not Layer.load_own_variables:
                    values = _all_values(h5py, stored, where, len(data))
                    overriding.append((owner, values))
                    continue
                found, wrong = _pairs(h5py, owner, stored, path, where)
                pairs += found
                problems += wrong
            problems += _left_over(h5py, file, taken, where)
    except (CheckpointError, ImportError):
        raise
    except Exception as error:  # h5py has no common base class for all errors of a file
        raise CheckpointError(
            f"{where} is truncated or damaged: its weights cannot be read ({error})"
        ) from None
    if problems:
        most = "\n  ".join(problems[:_MOST_NAMED])
        more = len(problems) - _MOST_NAMED
        text = f"{where} does not fit model {model.name!r}:\n  {most}" + (
            f"\n  and {more} more" if more > 0 else ""
        )
        if not skip_mismatch:
            raise CheckpointError(f"{text}\nNothing was changed")
        warnings.warn(f"{text}\nThese were skipped", stacklevel=4)
    for layer, values in overriding:
        try:
            layer.load_own_variables(values)
        except (ValueError, TypeError, LookupError) as error:
            raise CheckpointError(
                f"{where} does not fit layer {layer.name!r}, whose load_own_variables() raised "
                f"{type(error).__name__}: {error}"
            ) from error
    for variable, value in pairs:
        variable.assign(value)


def _all_values(h5py: Any, stored: Any, where: str, size: int) -> dict[str, Array]:
    """Return all stored values of a layer that overrides ``load_own_variables``.

    The right shapes are unknown, so values much larger than the file are rejected.
    """
    values = {}
    left = max(_LARGEST_VALUE, _MOST_EXPANSION * size)
    for name in [] if stored is None else stored:
        dataset = _dataset(h5py, stored, name, where)
        left -= dataset.nbytes
        if left < 0:
            raise CheckpointError(
                f"{where} is refused: {dataset.name!r} would have {dataset.nbytes} bytes. "
                f"With it, the values of one layer are too large for a file of {size} bytes"
            )
        values[name] = _numbers(dataset, where)
    return values


def _pairs(
    h5py: Any, layer: Layer, stored: Any, path: str, where: str
) -> tuple[list[tuple[Variable, Array]], list[str]]:
    """Return a layer's variables with their values, or a description of the mismatch."""
    variables = _variables_of(layer)
    keys = [] if stored is None else list(stored.keys())
    label = f"layer {layer.name!r} ({path or 'the model itself'})"
    if len(keys) != len(variables):
        shapes = ", ".join(f"{_short(v, layer)} {v.shape}" for v in variables) or "none"
        hint = "" if layer.built else ", which is not built,"
        return [], [
            f"{label}{hint} has {len(variables)} variables ({shapes}), the file {len(keys)}"
        ]
    pairs, problems = [], []
    for number, variable in enumerate(variables):
        dataset = _dataset(h5py, stored, str(number), where)
        if tuple(dataset.shape) != variable.shape:
            problems.append(
                f"{label}: {_short(variable, layer)} has shape {variable.shape}, in the file "
                f"{tuple(dataset.shape)}"
            )
        else:
            pairs.append((variable, _value(dataset, variable, where)))
    return ([], problems) if problems else (pairs, [])


def _short(variable: Variable, layer: Layer) -> str:
    return variable.name.removeprefix(f"{layer.name}/")


def _optimizer_pairs(
    h5py: Any, optimizer: Optimizer, stored: Any, path: str, where: str
) -> list[tuple[Variable, Array]]:
    """Return an optimizer's variables with their values; none if the saved optimizer differs."""
    variables = _variables_of(optimizer)
    keys = [] if stored is None else list(stored.keys())
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if len(keys) == len(variables) - len(inner.slot_variables):
        # The optimizer was saved before its first step, when it had no slot variables.
        variables = variables[: len(keys)]
    datasets = [_dataset(h5py, stored, key, where) for key in map(str, range(len(keys)))]
    shapes = [tuple(dataset.shape) for dataset in datasets]
    if shapes != [variable.shape for variable in variables]:
        warnings.warn(
            f"{where}: the saved optimizer has {len(keys)} variables that do not fit the "
            f"{len(variables)} of {optimizer.name!r} ({path}), which keeps its initial values",
            stacklevel=5,
        )
        return []
    return [(v, _value(d, v, where)) for v, d in zip(variables, datasets, strict=True)]


def _left_over(h5py: Any, file: Any, taken: set[str], where: str) -> list[str]:
    """Return the variables of the file that no part of the model uses."""
    left: list[str] = []
    # Equal groups are one group of the file, which may have several names: a search for each name
    # might never end.
    seen = set()

    def search(group: Any, path: str) -> None:
        for name in group:
            child = _child(h5py, group, name, where)
            if not isinstance(child, h5py.Group) or name in _IGNORED or child in seen:
                continue
            seen.add(child)
            inside = _joined(path, name)
            if name != "vars":
                # The model may be uncompiled, and then does not need the file's optimizer.
                if inside != "optimizer":
                    search(child, inside)
            elif len(child) and path not in taken:
                left.append(f"the file has {len(child)} variables for {path or 'the model itself'}")

    search(file, "")
    return [f"{text}, where the model has no layer" for text in left]


# Access to HDF5 without links and external storage -------------------------------------------------


def _child(h5py: Any, group: Any, name: str, where: str) -> Any:
    kind = group.get(name, getclass=True, getlink=True)
    if kind is not h5py.HardLink:
        found = getattr(kind, "__name__", "link of no known kind")
        raise CheckpointError(
            f"{where} is refused: {name!r} in its weights is a {found}, and may lead out of the file"
        )
    return group[name]


def _group(h5py: Any, file: Any, path: str, where: str) -> Any:
    """Return the group of a path, or None."""
    group = file
    for name in path.split("/"):
        if name not in group:
            return None
        group = _child(h5py, group, name, where)
        if not isinstance(group, h5py.Group):
            raise CheckpointError(f"{where} is damaged: {path!r} in its weights is no group")
    return group


def _dataset(h5py: Any, group: Any, name: str, where: str) -> Any:
    dataset = _child(h5py, group, name, where) if name in group else None
    if not isinstance(dataset, h5py.Dataset):
        raise CheckpointError(
            f"{where} is damaged: there is no variable {name} in {group.name!r} of its weights"
        )
    if dataset.external or dataset.is_virtual:
        raise CheckpointError(
            f"{where} is refused: the values of {dataset.name!r} are in another file"
        )
    return dataset


def _value(dataset: Any, variable: Variable, where: str) -> Array:
    """Return a stored value, whose shape fits, in its variable's dtype."""
    return _numbers(dataset, where).astype(np.dtype(variable.dtype))


def _numbers(dataset: Any, where: str) -> Array:
    halves = dataset.dtype.itemsize == 2 and dataset.attrs.get("dtype") == "bfloat16"
    # The check precedes the read, because one item of another dtype may have gigabytes.
    if dataset.dtype.kind not in "biuf" and not halves:
        raise CheckpointError(
            f"{where}: the values of {dataset.name!r} have dtype {dataset.dtype}, which is not numeric"
        )
    value: Array = np.asarray(dataset[()])
    return value.view("V2").view(_bfloat16()) if halves else value


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            "weights of type bfloat16 need the package ml_dtypes: pip install 'pycollective[bf16]'"
        ) from error
    return ml_dtypes.bfloat16


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            "saving and loading models needs the package h5py: pip install 'pycollective[files]'"
        ) from error
    return h5py
