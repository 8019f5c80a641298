"""Variables of strategies with several replicas, as they are created."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycollective.distribute.context import (
    get_replica_context,
    is_creating_once,
)
from pycollective.distribute.variables import (
    AggregateInitialValue,
    DistributedVariable,
    MirroredVariable,
    SyncOnReadVariable,
)
from pycollective.tensor import (
    Tensor,
    Variable,
    VariableAggregation,
    VariableSynchronization,
)

if TYPE_CHECKING:
    from pycollective.distribute.strategy import Strategy

__all__ = ["mirrored_creator"]


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
    """Make a variable with a component for each replica; the initial value is evaluated once."""
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
    if not on_read:
        synchronization = VariableSynchronization.ON_WRITE
    components: list[Variable] = []
    workers = strategy.extended.workers
    for replica in range(strategy.extended.num_local_replicas):
        component = strategy.extended.variable_on(
            strategy.extended._devices[replica],
            next_creator,
            initial_value=value if replica == 0 else components[0].numpy(),
            trainable=trainable,
            name=name if replica == 0 else f"{name}/replica_{replica}",
            dtype=dtype,
            shape=shape,
            synchronization=synchronization,
            aggregation=aggregation,
        )
        if replica == 0 and workers.count > 1:
            component.assign(Tensor(workers.from_first(component._current().array)))
        components.append(component)
    if aggregation is VariableAggregation.MEAN and components[0].dtype.kind not in "fV":
        raise ValueError(
            "creating distributed tf.Variable with aggregation=MEAN and a non-floating dtype is not "
            "supported, please use a different aggregation or dtype"
        )
    kind = SyncOnReadVariable if on_read else MirroredVariable
    made = kind(strategy, components, trainable, name, synchronization, aggregation)
    if (
        isinstance(made, SyncOnReadVariable)
        and isinstance(initial_value, AggregateInitialValue)
        and aggregation is VariableAggregation.SUM
    ):
        made.share_out(components[0].numpy())
    return made
