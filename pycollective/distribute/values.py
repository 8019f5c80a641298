"""Values that have a component for each replica, and how results are grouped into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycollective import nest
from pycollective.distribute.context import get_replica_context
from pycollective.tensor import Tensor, as_tensor
from pycollective.tensor.tensor import Operators

__all__ = ["DistributedValues", "Mirrored", "PerReplica", "regroup", "select_replica"]


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
    """A value that differs between replicas; use it inside a replica function or reduce it."""

    def __tensor__(self) -> Tensor:
        """Return the current replica's component."""
        context = get_replica_context()
        if context is None or context.num_local_replicas != len(self._values):
            raise ValueError(
                "It looks like you are using a PerReplica object while not inside a replica context, "
                "which is not supported. Try running your op or function inside a replica context by "
                "using `strategy.run`"
            )
        return as_tensor(self._values[context.local_replica_id])


class Mirrored(DistributedValues, Operators):
    """A value that is equal on every replica; it can be used like the value itself."""

    def _get(self) -> Any:
        context = get_replica_context()
        inside = context is not None and context.num_local_replicas == len(self._values)
        return self._values[context.local_replica_id if context is not None and inside else 0]

    def __tensor__(self) -> Tensor:
        """Return the current replica's component, or the first one in cross-replica context."""
        return as_tensor(self._get())

    def numpy(self) -> Any:
        """Return the value as a NumPy array or scalar."""
        return as_tensor(self._get()).numpy()

    def __len__(self) -> int:
        return len(as_tensor(self._get()))

    def __float__(self) -> float:
        return float(self._get())

    def __int__(self) -> int:
        return int(self._get())

    def __bool__(self) -> bool:
        return bool(self._get())


def regroup(values: Sequence[Any], wrap: Callable[[Sequence[Any]], Any] = PerReplica) -> Any:
    """Group the replicas' results into one structure of distributed values.

    Containers are grouped element by element and keep their type; what is one and the same object on
    every replica stays as it is; the components of one distributed variable become that variable;
    everything else is wrapped.

    Parameters
    ----------
    values : sequence
        One result for each replica, in replica order.
    wrap : callable
        Makes a distributed value from the components.

    Raises
    ------
    AssertionError
        If the replicas' containers differ in type, length or keys.
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
        grouped = [regroup([v[key] for v in values], wrap) for key in children]
        return nest.rebuild(first, grouped)
    if all(v is first for v in values[1:]):
        return first
    container = getattr(first, "_distributed_container", None)
    container = container() if container is not None else None
    if container is not None and all(v is c for v, c in zip(values, container.values, strict=True)):
        return container
    return wrap(values)


def select_replica(replica: int, structure: Any) -> Any:
    """Return ``structure`` with distributed values replaced by one replica's components."""
    if nest.is_nested(structure):
        if isinstance(structure, Mapping):
            children = [select_replica(replica, v) for v in structure.values()]
        else:
            children = [select_replica(replica, v) for v in structure]
        return nest.rebuild(structure, children)
    if isinstance(structure, DistributedValues):
        return structure.component(replica)
    return structure
