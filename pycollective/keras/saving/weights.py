"""The HDF5 layout in which Keras 3 stores weights, and how weights are taken from it.

Each layer, and the optimizer, has a group ``<path>/vars`` with its own variables as ``0``, ``1``, …;
the path goes along attributes, in lists by the names of classes. Before anything is assigned,
everything is compared: a file that does not fit changes nothing.
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

#: What Keras stores besides weights and optimizer, or stored once: nothing here takes it.
_ELSEWHERE = ("seed_generator", "random_generator", "metrics", "_metrics", "_loss_tracker")
_MOST_NAMED = 10  # of the differences in a message
_LARGEST_VALUE = 64 << 20  # bytes of a layer's values, or so many times the whole file:
_MOST_EXPANSION = 100


# Which object has which path ----------------------------------------------------------------------


def owners_of(model: Layer) -> Iterator[tuple[str, Any]]:
    """Yield layers and optimizers with their paths, as Keras comes upon them, each once."""
    # The objects themselves are kept too: an id says nothing once its object is gone, such as the
    # list that a property returns.
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
    """Return what belongs to an object: first the layers of a model, private names last."""
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
    """Return the file of a model's weights, and of its optimizer's variables; h5py is needed."""
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
    """Give a built model the weights of a file, and its optimizer the variables; messages say ``where``.

    Layers that do not fit are left as they are, with a warning, if ``skip_mismatch``. Else, and for a
    file that is damaged or has links in it, a CheckpointError is raised, and nothing is changed.
    """
    h5py = _h5py()
    pairs: list[tuple[Variable, Array]] = []
    problems: list[str] = []
    own: list[tuple[Layer, dict[str, Array]]] = []
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
                    own.append((owner, _all_values(h5py, stored, where, len(data))))
                    continue
                found, wrong = _pairs(h5py, owner, stored, path, where)
                pairs += found
                problems += wrong
            problems += _left_over(h5py, file, taken, where)
    except (CheckpointError, ImportError):
        raise
    except Exception as error:  # h5py has no class for all that can be wrong in a file
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
    for layer, values in own:
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
    """Return all that a file has for a layer that says itself what it takes.

    Nothing says which shapes are right: values that would be much larger than the file are refused.
    """
    values = {}
    left = max(_LARGEST_VALUE, _MOST_EXPANSION * size)
    for name in [] if stored is None else stored:
        dataset = _dataset(h5py, stored, name, where)
        left -= dataset.nbytes
        if left < 0:
            raise CheckpointError(
                f"{where} is refused: with {dataset.name!r}, which would have {dataset.nbytes} bytes, "
                f"the values of one layer in it are too large for a file of {size} bytes"
            )
        values[name] = _numbers(dataset, where)
    return values


def _pairs(
    h5py: Any, layer: Layer, stored: Any, path: str, where: str
) -> tuple[list[tuple[Variable, Array]], list[str]]:
    """Return a layer's variables with their values, or what does not fit."""
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
    """Return an optimizer's variables with their values; none if it is another one's file."""
    variables = _variables_of(optimizer)
    keys = [] if stored is None else list(stored.keys())
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    slots = sum(len(kept) for _, kept in inner._slots.values())
    if len(keys) == len(variables) - slots:
        # Saved before its first step: what it keeps for each variable was not there yet.
        variables = variables[: len(keys)]
    datasets = [_dataset(h5py, stored, key, where) for key in map(str, range(len(keys)))]
    shapes = [tuple(dataset.shape) for dataset in datasets]
    if shapes != [variable.shape for variable in variables]:
        warnings.warn(
            f"{where}: the saved optimizer has {len(keys)} variables that do not fit the "
            f"{len(variables)} of {optimizer.name!r} ({path}); it starts anew",
            stacklevel=5,
        )
        return []
    return [(v, _value(d, v, where)) for v, d in zip(variables, datasets, strict=True)]


def _left_over(h5py: Any, file: Any, taken: set[str], where: str) -> list[str]:
    """Return which variables of the file nothing in the model took."""
    left: list[str] = []

    def search(group: Any, path: str) -> None:
        for name in group:
            child = _child(h5py, group, name, where)
            if not isinstance(child, h5py.Group) or name in _ELSEWHERE:
                continue
            inside = _joined(path, name)
            if name != "vars":
                # The optimizer of a model that is not compiled here is nobody's.
                if inside != "optimizer":
                    search(child, inside)
            elif len(child) and path not in taken:
                left.append(f"the file has {len(child)} variables for {path or 'the model itself'}")

    search(file, "")
    return [f"{text}, where the model has no layer" for text in left]


# HDF5, without its ways out of the file -------------------------------------------------------------


def _child(h5py: Any, group: Any, name: str, where: str) -> Any:
    kind = group.get(name, getclass=True, getlink=True)
    if kind is not h5py.HardLink:
        found = getattr(kind, "__name__", "link of no known kind")
        raise CheckpointError(
            f"{where} is refused: {name!r} in its weights is a {found}, and may lead out of the file"
        )
    return group[name]


def _group(h5py: Any, file: Any, path: str, where: str) -> Any:
    """Return the group with a path, or None."""
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
    """Return a stored value in its variable's dtype; it has the variable's shape."""
    return _numbers(dataset, where).astype(np.dtype(variable.dtype))


def _numbers(dataset: Any, where: str) -> Array:
    halves = dataset.dtype.itemsize == 2 and dataset.attrs.get("dtype") == "bfloat16"
    # Before anything is read: one item of another dtype may have gigabytes.
    if dataset.dtype.kind not in "biuf" and not halves:
        raise CheckpointError(
            f"{where}: the values of {dataset.name!r} have dtype {dataset.dtype}, which are no numbers"
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
