"""Variables with a component for each replica."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pycollective.array_backend import Array
from pycollective.distribute.context import get_replica_context, is_creating_once
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.values import DistributedValues
from pycollective.tensor import (
    Tensor,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    as_tensor,
)

if TYPE_CHECKING:
    from pycollective.distribute.replica_context import ReplicaContext
    from pycollective.distribute.strategy import Strategy

__all__ = ["DistributedVariable", "MirroredVariable", "SyncOnReadVariable", "mirrored_creator"]


class DistributedVariable(Variable, DistributedValues):
    """A variable of a strategy: a plain variable for each replica.

    In a replica function it stands for that replica's component, elsewhere for all of them.

    Attributes
    ----------
    values : tuple of Variable
        The components, in replica order.
    """

    def __init__(
        self,
        strategy: Strategy,
        values: Sequence[Variable],
        trainable: bool | None,
        name: str | None,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
    ) -> None:
        self._set_attributes(trainable, name, synchronization, aggregation)
        DistributedValues.__init__(self, values)
        self._distribute_strategy = strategy
        container = weakref.ref(self)
        for component in values:
            component._distributed_container = container  # type: ignore[attr-defined]

    def component(self, replica: int) -> Any:
        """Return the variable itself: it resolves to the replica's component when it is used."""
        return self

    def _replica_context(self) -> ReplicaContext | None:
        """Return the context if this code runs in a replica of this variable's strategy."""
        context = get_replica_context()
        if context is None or context.strategy is not self._distribute_strategy:
            return None
        return context

    def _local(self) -> Variable:
        context = self._replica_context()
        found: Variable = self._values[context.local_replica_id if context else 0]
        return found

    def _current(self) -> Tensor:
        return self._local()._current()

    def _read(self) -> Tensor:
        return self._local()._read()

    def update_inplace(self, update: Callable[[Array], Any]) -> None:
        """Update the replica's component, or all components, in place."""
        if self._replica_context() is not None:
            self._local().update_inplace(update)
        else:
            for component in self._values:
                component.update_inplace(update)

    def assign(self, value: Any, read_value: bool = True) -> Variable:
        """Set the value; what that means for the components is the variable's kind's to say."""
        return self._write("assign", value)

    def assign_add(self, value: Any, read_value: bool = True) -> Variable:
        """Add to the value; as `assign`."""
        return self._write("assign_add", value)

    def assign_sub(self, value: Any, read_value: bool = True) -> Variable:
        """Subtract from the value; as `assign`."""
        return self._write("assign_sub", value)

    def _write(self, method: str, value: Any) -> Variable:
        raise NotImplementedError

    def _write_all(self, method: str, value: Any) -> Variable:
        for component in self._values:
            getattr(component, method)(value)
        return self

    def __repr__(self) -> str:
        lines = ",\n".join(f"  {i}: {v!r}" for i, v in enumerate(self._values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"


class MirroredVariable(DistributedVariable):
    """A variable whose components are kept equal: ``ON_WRITE``.

    In cross-replica context an assignment goes to every component. In a replica it is aggregated first
    (SUM, MEAN, ONLY_FIRST_REPLICA), and every replica must make it; with aggregation NONE it goes to
    that replica's component only, as in TensorFlow.
    """

    def _write(self, method: str, value: Any) -> Variable:
        context = self._replica_context()
        if context is None:
            return self._write_all(method, value)
        if self._aggregation is not VariableAggregation.NONE:
            value = self._aggregate(context, value)
        getattr(self._local(), method)(value)
        return self

    def _aggregate(self, context: ReplicaContext, value: Any) -> Any:
        own = self._current()
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return context.merge_call(_first_component, args=(as_tensor(value, like=own),))
        op = ReduceOp.SUM if self._aggregation is VariableAggregation.SUM else ReduceOp.MEAN
        if op is ReduceOp.MEAN and own.dtype.kind not in "fV":
            raise ValueError(
                "Cannot update non-float variables with tf.VariableAggregation.MEAN aggregation in "
                f"replica context. Variable {self._name!r} has dtype {own.dtype}: use another "
                "aggregation or a float dtype"
            )
        return context.all_reduce(op, as_tensor(value, like=own))


def _first_component(_strategy: Strategy, value: Any) -> Any:
    return value.values[0] if isinstance(value, DistributedValues) else value


class SyncOnReadVariable(DistributedVariable):
    """A variable whose components each replica writes by itself: ``ON_READ``.

    In a replica, reads and writes are local. In cross-replica context a read aggregates the
    components, and an assignment makes the aggregate the value: with SUM each component gets its
    share.
    """

    def aggregate(self) -> Tensor:
        """Return the components' sum or mean, or the first one, by the aggregation.

        Raises
        ------
        ValueError
            With aggregation NONE.
        """
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return Tensor(self._values[0]._current().array)
        if self._aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Could not convert from {self._aggregation} to a reduction: variable "
                f"{self._name!r} has a value for each replica and no aggregation; create it with one, "
                "or read it in a replica"
            )
        total = self._values[0]._current().array
        for component in self._values[1:]:
            total = total + component._current().array
        if self._aggregation is VariableAggregation.MEAN:
            total = total / len(self._values)
        return as_tensor(total)

    def _current(self) -> Tensor:
        return self.aggregate() if self._replica_context() is None else self._local()._current()

    def _read(self) -> Tensor:
        return self.aggregate() if self._replica_context() is None else self._local()._read()

    def numpy(self) -> Any:
        """Return a copy of the value: the replica's, or the aggregate."""
        return self._current().array.copy()[()]

    def __len__(self) -> int:
        return len(self._current())

    def __float__(self) -> float:
        return float(self._current())

    def __int__(self) -> int:
        return int(self._current())

    def __bool__(self) -> bool:
        return bool(self._current())

    def __format__(self, spec: str) -> str:
        return format(self._current(), spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self._current().__array__(dtype, copy)

    def _write(self, method: str, value: Any) -> Variable:
        if self._replica_context() is not None:
            getattr(self._local(), method)(value)
            return self
        if self._aggregation is VariableAggregation.SUM:
            if method != "assign":
                raise ValueError(
                    f"SyncOnReadVariable does not support `{method}` in cross-replica context when "
                    "aggregation is set to `tf.VariableAggregation.SUM`."
                )
            own = self._values[0]._current()
            share = as_tensor(value, like=own).array / len(self._values)
            value = share.astype(own.dtype)
        return self._write_all(method, value)


def mirrored_creator(strategy: Strategy) -> Callable[..., Variable]:
    """Return the creator of a strategy with several replicas: see `Variable`'s creator hooks."""

    def create(next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        context = get_replica_context()
        if context is None or context.strategy is not strategy or is_creating_once():
            return make_distributed(strategy, next_creator, **kwargs)
        # Each replica runs the code that creates; the first one's variable is everyone's.
        return context.created_by_first(lambda: make_distributed(strategy, next_creator, **kwargs))

    return create


def make_distributed(
    strategy: Strategy,
    next_creator: Callable[..., Variable],
    initial_value: Any = None,
    trainable: bool | None = None,
    name: str | None = None,
    dtype: Any = None,
    shape: Any = None,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
) -> DistributedVariable:
    """Make a variable with a component for each replica; the initial value is evaluated once.

    Raises
    ------
    ValueError
        For synchronization NONE, and for a mean of ints.
    """
    name = "Variable" if name is None else name
    if synchronization is VariableSynchronization.NONE:
        raise ValueError(
            "`NONE` variable synchronization mode is not supported with tf.distribute strategy. Please "
            f"change the `synchronization` for variable: {name}"
        )
    if not isinstance(synchronization, VariableSynchronization):
        raise ValueError(
            f"Invalid variable synchronization mode: {synchronization} for variable: {name}"
        )
    if not isinstance(aggregation, VariableAggregation):
        raise ValueError(f"Invalid variable aggregation mode: {aggregation} for variable: {name}")
    value = initial_value() if callable(initial_value) else initial_value
    on_read = synchronization is VariableSynchronization.ON_READ
    if on_read and trainable is None:
        trainable = False
    components: list[Variable] = []
    for replica in range(strategy.extended.num_local_replicas):
        with strategy.extended.replica_device(replica):
            component = next_creator(
                initial_value=value if replica == 0 else components[0].numpy(),
                trainable=trainable,
                name=name if replica == 0 else f"{name}/replica_{replica}",
                dtype=dtype,
                shape=shape,
                synchronization=synchronization,
                aggregation=aggregation,
            )
        components.append(component)
    if aggregation is VariableAggregation.MEAN and components[0].dtype.kind not in "fV":
        raise ValueError(
            "creating distributed tf.Variable with aggregation=MEAN and a non-floating dtype is not "
            "supported, please use a different aggregation or dtype"
        )
    kind = SyncOnReadVariable if on_read else MirroredVariable
    return kind(strategy, components, trainable, name, synchronization, aggregation)
