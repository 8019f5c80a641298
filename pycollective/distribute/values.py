"""Values with a component for each replica, and the grouping of results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.array_backend import Array, to_numpy
from pycollective.distribute.context import replica_among
from pycollective.errors import InvalidArgumentError
from pycollective.tensor import Tensor, as_tensor
from pycollective.tensor.tensor import Operators


class DistributedValues:
    """A component for each local replica.

    Attributes
    ----------
    values : tuple
        The components, in replica order.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """Return the components in replica order."""
        return self._values

    def component(self, replica: int) -> Any:
        """Return one replica's component."""
        return self._values[replica]

    def __repr__(self) -> str:
        lines = ",\n".join(f"  {i}: {v!r}" for i, v in enumerate(self._values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"


class PerReplica(DistributedValues):
    """A value that differs between replicas, for use in a replica function or a reduction."""

    def __tensor__(self) -> Tensor:
        """Return the current replica's component."""
        replica = replica_among(len(self._values))
        if replica is None:
            raise ValueError(
                "It looks like you are using a PerReplica object while not inside a replica context, "
                "which is not supported. Try running your op or function inside a replica context by "
                "using `strategy.run`"
            )
        return as_tensor(self._values[replica])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.__tensor__().__array__(dtype, copy)


class Mirrored(DistributedValues, Operators):
    """A value that is equal on every replica, for use like a plain value.

    Operators and other attributes are those of the current replica's component. In cross-replica
    context they are those of the first component.
    """

    def _get(self) -> Any:
        return self._values[replica_among(len(self._values)) or 0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._get(), name)

    def __tensor__(self) -> Tensor:
        """Return the current replica's component, or the first one in cross-replica context."""
        return as_tensor(self._get())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.__tensor__().__array__(dtype, copy)

    def numpy(self) -> Any:
        """Return the value as a NumPy array or scalar."""
        return self.__tensor__().numpy()

    def __len__(self) -> int:
        return len(self.__tensor__())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.__tensor__())

    def __float__(self) -> float:
        return float(self._get())

    def __int__(self) -> int:
        return int(self._get())

    def __bool__(self) -> bool:
        return bool(self._get())

    def __index__(self) -> int:
        return operator.index(self._get())

    def __format__(self, spec: str) -> str:
        return format(self._get(), spec)


def regroup(
    values: Sequence[Any],
    wrap: Callable[[Sequence[Any]], Any] = PerReplica,
    always_wrap: bool = False,
) -> Any:
    """Group the replicas' results into one structure of distributed values.

    Containers are grouped element by element, and keep their type. An object that is the same on every
    replica is returned unchanged, unless ``always_wrap``. The components of a distributed variable
    become that variable. ``wrap`` groups all other values.

    Raises
    ------
    AssertionError
        The replicas' containers differ in type, length or keys.
    """
    first = values[0]
    if nest.is_nested(first):
        for other in values[1:]:
            same = type(other) is type(first) and len(other) == len(first)
            if not same or (isinstance(first, Mapping) and set(other) != set(first)):
                raise AssertionError(
                    f"replicas returned different structures: {first!r} and {other!r}"
                )
        children = list(first.keys()) if isinstance(first, Mapping) else range(len(first))
        grouped = [regroup([v[key] for v in values], wrap, always_wrap) for key in children]
        return nest.rebuild(first, grouped)
    if not always_wrap and _are_same(values, [first] * len(values)):
        return first
    reference = getattr(first, "_distributed_container", None)
    container = reference() if reference is not None else None
    if container is not None and _are_same(values, container.values):
        return container
    return wrap(values)


def _are_same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(values) == len(others) and all(map(operator.is_, values, others))


def select_replica(replica: int, structure: Any) -> Any:
    """Return ``structure`` with distributed values replaced by one replica's components."""
    plain = structure.__class__ is tuple or structure.__class__ is list
    if plain or nest.is_nested(structure):
        children = structure if plain else nest.children(structure)
        # Nearly all arguments have one of these types; a call for each would cost time.
        chosen = [
            v
            if v.__class__ is Tensor
            else v._values[replica]
            if v.__class__ is PerReplica
            else select_replica(replica, v)
            for v in children
        ]
        if structure.__class__ is list:
            return chosen
        return tuple(chosen) if plain else nest.rebuild(structure, chosen)
    if isinstance(structure, DistributedValues):
        return structure.component(replica)
    return structure


def check_gather_axis(axis: Any, rank: int) -> None:
    """Raise an error unless values with ``rank`` axes can be concatenated along ``axis``."""
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an int, not {axis!r}")
    if not -rank <= axis < rank:
        raise ValueError(f"`axis` = {axis} out of range for `value` with rank {rank}")


def _why_not_joined(first: Array, other: Array, axis: int) -> str:
    """Return TensorFlow's error text if two arrays cannot be concatenated, else an empty string."""
    if first.ndim != other.ndim:
        return "Ranks of all input tensors should match"
    for place, (n, m) in enumerate(zip(first.shape, other.shape, strict=True)):
        if n != m and place != axis:
            return f"Dimension {place} in both shapes must be equal"
    return "" if first.dtype == other.dtype else "The dtypes of all input tensors should match"


def concatenated(arrays: Sequence[Array], axis: int) -> Array:
    """Return the replicas' arrays concatenated along an axis, on the host."""
    first = arrays[0]
    check_gather_axis(axis, first.ndim)
    for replica, other in enumerate(arrays):
        problem = _why_not_joined(first, other, axis % first.ndim)
        if problem:
            raise InvalidArgumentError(
                f"{problem}: replica 0 has {first.dtype}{list(first.shape)}, replica {replica} has "
                f"{other.dtype}{list(other.shape)}; the replicas' values may differ in length along "
                f"axis {axis} only"
            )
    return np.concatenate([to_numpy(array) for array in arrays], axis)
