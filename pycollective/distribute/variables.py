"""Variables with a component for each replica."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pycollective import nest
from pycollective.array_backend import Array, asarray, beside, to_numpy
from pycollective.distribute.context import (
    current_mode,
    has_strategy,
    in_variable_sync_on_read_context,
    mixing_message,
    replica_context_of,
    state,
)
from pycollective.distribute.interfaces import AnyContext, AnyStrategy
from pycollective.distribute.reduce_op import ReduceOp, work_dtype
from pycollective.distribute.values import DistributedValues, Mirrored, PerReplica
from pycollective.tensor import (
    IndexedSlices,
    Tensor,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    as_tensor,
)


class AggregateInitialValue:
    """An initial value, such as a checkpoint's, that a variable divides among its components."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        """Return the value."""
        return self._value


class DistributedVariable(Variable, DistributedValues):
    """A variable of a strategy, with a plain variable for each replica.

    In a replica function, and in `StrategyExtended.update`, reads and assignments use that replica's
    component. Elsewhere they use all components.

    Attributes
    ----------
    values : tuple of Variable
        The components, in replica order.
    """

    def __init__(
        self,
        strategy: AnyStrategy,
        values: Sequence[Variable],
        trainable: bool | None,
        name: str | None,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
    ) -> None:
        self.set_attributes(trainable, name, synchronization, aggregation)
        DistributedValues.__init__(self, values)
        self._distribute_strategy = strategy
        container = weakref.ref(self)
        for component in values:
            component._distributed_container = container

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Copy the values, for the same strategy."""
        copied: Variable = type(self)(
            self._distribute_strategy,
            [copy.deepcopy(component, memo) for component in self._values],
            self._trainable,
            self._name,
            self._synchronization,
            self._aggregation,
        )
        copied.constraint = self.constraint
        memo[id(self)] = copied
        return copied

    def component(self, replica: int) -> Any:
        """Return the variable itself, which uses the replica's component."""
        return self

    def _replica(self) -> int | None:
        """Return the replica of this variable's strategy that runs this code, or None."""
        mode = current_mode()
        if mode is None or mode.strategy is not self._distribute_strategy:
            return None
        return mode.replica

    def _assigning_replica(self) -> int | None:
        """Return the replica as `_replica`; raise a `RuntimeError` under another strategy."""
        mode, strategy = current_mode(), self._distribute_strategy
        if mode is not None and mode.strategy is not strategy and has_strategy():
            raise RuntimeError(mixing_message(mode.strategy, strategy))
        return self._replica()

    @property
    def handle(self) -> Variable:
        """The component of this replica, or of this update.

        Raises
        ------
        ValueError
            This is neither a replica function nor an update.
        """
        if self._replica() is None:
            raise ValueError(
                "DistributedVariable.handle is not available outside the replica context or a "
                "`tf.distribute.Strategy.update()` call."
            )
        return self.local()

    def _replica_context(self) -> AnyContext | None:
        """Return the context if this code runs in a replica function of this variable's strategy."""
        return replica_context_of(self._distribute_strategy)

    def local(self) -> Variable:
        values, modes, replica = self._values, state.modes, 0
        if modes and len(values) > 1:
            # A call of `_replica` would double the time of a read.
            mode = modes[-1]
            if mode.replica and mode.strategy is self._distribute_strategy:
                replica = mode.replica
        found: Variable = values[replica]
        return found

    def current(self) -> Tensor:
        return self.local().current()

    def _read(self) -> Tensor:
        # A call of `local` would cost time for each variable in each step.
        values, modes = self._values, state.modes
        component: Variable = values[0]
        if modes and len(values) > 1:
            mode = modes[-1]
            if mode.replica and mode.strategy is self._distribute_strategy:
                component = values[mode.replica]
        return component._read()

    def update_inplace(self, update: Callable[[Array], Any]) -> None:
        """Update the replica's component, or all components, in place."""
        if len(self._values) == 1 or self._replica() is not None:
            self.local().update_inplace(update)
        else:
            with self._lock:
                for component in self._values:
                    component.update_inplace(update)

    def _scatter(self, method: str, slices: Any) -> Variable:
        return self._write(method, slices)

    def _write_all(self, method: str, value: Any) -> Variable:
        """Make the same assignment to every component."""
        if isinstance(
            value, Variable
        ):  # read it once: it can be this variable, or change meanwhile
            value = as_tensor(value)
        with self._lock:  # assignments of several threads change all components in the same order
            for replica, component in enumerate(self._values):
                part = value.values[replica] if isinstance(value, Mirrored) else value
                getattr(component, method)(part)
        return self

    __repr__ = DistributedValues.__repr__


#: Assignments that use the rows of one replica, and the aggregations that choose one replica.
_SCATTER_OF_ONE = ("scatter_min", "scatter_max", "scatter_update")
_OF_ONE = (VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA)


class MirroredVariable(DistributedVariable):
    """A variable whose components are kept equal: ``ON_WRITE``.

    In cross-replica context an assignment changes every component. In a replica function every replica
    must make the assignment, and the aggregate (SUM, MEAN, ONLY_FIRST_REPLICA) is assigned. With
    aggregation NONE only the replica's component changes, as in TensorFlow. In
    `StrategyExtended.update` the updated component changes.
    """

    def _write(self, method: str, value: Any) -> Variable:
        if self._assigning_replica() is None:
            return self._write_all(method, value)
        context = self._replica_context()
        if context is not None:
            check_rows_in_replica(method, self._aggregation)
        if (
            context is None  # in an update
            or context.num_replicas_in_sync == 1
            or self._aggregation is VariableAggregation.NONE
        ):
            getattr(self.local(), method)(value)
            return self
        if nest.is_nested(value) or isinstance(value, DistributedValues):
            value = as_tensor(value, like=self.current())
        context.merge_call(_write_aggregated, args=(self, method, value))
        return self


def check_rows_in_replica(method: str, aggregation: VariableAggregation) -> None:
    """Raise an error if an assignment of one replica's rows has an aggregation over all."""
    if method in _SCATTER_OF_ONE and aggregation not in _OF_ONE:
        raise NotImplementedError(
            f"{method} is only supported for mirrored variable (variable created within certain "
            "`tf.distribute.Strategy` scope) with NONE or `ONLY_FIRST_REPLICA` aggregation, got: "
            f"{aggregation}."
        )


def aggregated(
    strategy: AnyStrategy,
    variable: Variable,
    components: Sequence[Variable],
    method: str,
    value: Any,
) -> Any:
    """Return the value to assign to a variable, from its replicas' values, grouped.

    Each replica has a component, or all replicas share one.
    """
    workers = strategy.extended.workers
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        first = value.values[0] if isinstance(value, PerReplica) else value
        if workers.count == 1:
            return first
        if isinstance(first, IndexedSlices):
            return workers.slices_from_first(first)
        return Tensor(workers.from_first(components[0].checked(first, method)))
    if workers.count > 1 and not isinstance(value, PerReplica):
        # The value is the same in the replicas of this worker, but other workers' values may differ.
        value = PerReplica([value] * len(components))
    op = ReduceOp.from_variable_aggregation(variable.aggregation)
    if not isinstance(value, PerReplica):
        # The call raises the error for a value that cannot be reduced. Its result is not used, because
        # a Python number takes any dtype.
        strategy.extended.reduce_to(op, value, variable)
        return value
    if op is ReduceOp.MEAN and variable.dtype.kind not in "fV":
        raise ValueError(
            "Cannot update non-float variables with tf.VariableAggregation.MEAN aggregation in "
            "replica context. Either change the variable dtype to float or update it in cross-replica "
            f"context. Variable {variable.name!r} has dtype {variable.dtype}."
        )
    if not any(isinstance(v, IndexedSlices) for v in value.values):
        # Replicas that share a component all assign to it.
        pairs = zip(itertools.cycle(components), value.values, strict=False)
        value = PerReplica([Tensor(c.checked(v, method)) for c, v in pairs])
    return strategy.extended.reduce_to(op, value, variable)


def _write_aggregated(strategy: AnyStrategy, variable: Any, method: Any, value: Any) -> None:
    """Assign the aggregate of all replicas' values to all components."""
    if isinstance(variable, PerReplica) or isinstance(method, PerReplica):
        names = [v.name for v in variable.values] if isinstance(variable, PerReplica) else []
        methods = list(method.values) if isinstance(method, PerReplica) else [method]
        raise RuntimeError(
            f"the replicas make different assignments at the same point: {', '.join(methods)} to "
            f"{', '.join(names or [variable.name])}; every replica must assign to the same variables "
            "in the same order"
        )
    value = aggregated(strategy, variable, variable.values, method, value)
    variable._write_all(method, value)


class SyncOnReadVariable(DistributedVariable):
    """A variable whose components are aggregated when it is read: ``ON_READ``.

    In a replica function, reads and assignments are local. In cross-replica context a read aggregates
    the components. An assignment with SUM divides the value among the components.
    """

    def aggregate(self) -> Tensor:
        """Return the components' sum or mean, or the first one, by the aggregation.

        Raises
        ------
        ValueError
            The aggregation is NONE.
        """
        first = self._values[0].current().array
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:  # of this process
            return Tensor(first)
        op = ReduceOp.from_variable_aggregation(self._aggregation)
        extended = self._distribute_strategy.extended
        with beside(first):
            # Halves are added as float32, and rounded once.
            work = work_dtype(first.dtype, op) if first.dtype.kind in "fV" else first.dtype
            total = first.astype(work, copy=False)
            for component in self._values[1:]:
                total = total + asarray(component.current().array, like=first)
            total = extended.workers.reduce(ReduceOp.SUM, asarray(total, like=first))
            if op is ReduceOp.MEAN:
                total = total / extended.num_replicas_in_sync
            return Tensor(asarray(total).astype(first.dtype, copy=False))

    def is_local(self) -> bool:
        """Return True if a read returns the replica's own value, not the aggregate."""
        if self._replica() is None:
            return False
        return not in_variable_sync_on_read_context() or self._replica_context() is None

    def current(self) -> Tensor:
        """Return the replica's value, or the aggregate."""
        if self.is_local():
            return self.local().current()
        context = self._replica_context()
        if context is None:
            return self.aggregate()
        synced: Tensor = context.merge_call(_aggregated, args=(self,))
        return synced

    def _read(self) -> Tensor:
        return self.current()

    def _scatter(self, method: str, slices: Any) -> Variable:
        raise NotImplementedError(
            f"Variables with `synchronization=ON_READ` doesn't support `{method}`: variable "
            f"{self._name!r}"
        )

    def _write(self, method: str, value: Any) -> Variable:
        if self._assigning_replica() is not None:
            getattr(self.local(), method)(value)
            return self
        if self._aggregation is not VariableAggregation.SUM:
            return self._write_all(method, value)
        if method != "assign":
            raise ValueError(
                f"SyncOnReadVariable does not support `{method}` in cross-replica context when "
                "aggregation is set to `tf.VariableAggregation.SUM`."
            )
        return self.assign_sum(to_numpy(self._values[0].checked(value, method)))

    def assign_sum(self, total: Array) -> Variable:
        """Divide ``total`` among the components of all workers, for the aggregation SUM."""
        extended = self._distribute_strategy.extended
        first = extended.first_replica
        shares = _shares(total, extended.num_replicas_in_sync)[first : first + len(self._values)]
        with self._lock:
            for component, share in zip(self._values, shares, strict=True):
                component.assign(share)
        return self


def _aggregated(_strategy: AnyStrategy, variable: Any) -> Tensor:
    if isinstance(variable, PerReplica):
        names = [v.name for v in variable.values]
        raise RuntimeError(f"the replicas read different variables at the same point: {names}")
    aggregate: Tensor = variable.aggregate()
    return aggregate


def _shares(total: Array, parts: int) -> list[Array]:
    """Return arrays whose sum is ``total``; the first one has the remainder of integers."""
    if total.dtype.kind in "iu":
        share = total // parts
        return [asarray(total - share * (parts - 1), total.dtype), *[share] * (parts - 1)]
    return [asarray(total / parts, total.dtype)] * parts
