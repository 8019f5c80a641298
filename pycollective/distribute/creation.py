"""Creation of variables: for strategies with several replicas, and on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pycollective.distribute.context import current_mode, is_creating_once, replica_context_of
from pycollective.distribute.devices import parse_device
from pycollective.distribute.interfaces import AnyStrategy
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
    creator_scope,
)


def create_by_first(strategy: AnyStrategy, make: Callable[[], Variable]) -> Variable:
    """Make a variable; in replica functions, which all run the same code, replica 0 makes it."""
    context = replica_context_of(strategy)
    return make() if context is None or is_creating_once() else context.created_by_first(make)


def mirrored_creator(strategy: AnyStrategy) -> Callable[..., Variable]:
    """Return the creator of a strategy with several replicas: see `Variable`'s creator hooks."""

    def create(next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        return create_by_first(strategy, lambda: make_distributed(strategy, next_creator, **kwargs))

    return create


def make_distributed(
    strategy: AnyStrategy,
    next_creator: Callable[..., Variable],
    initial_value: Any = None,
    trainable: bool | None = None,
    name: str | None = None,
    dtype: Any = None,
    shape: Any = None,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
    per_worker_variable: bool = False,
) -> DistributedVariable:
    """Make a variable with a component for each replica; evaluate the initial value once."""
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
            strategy.extended.devices[replica],
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
            component.assign(Tensor(workers.from_first(component.current().array)))
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
        made.assign_sum(components[0].numpy())
    return made


@contextmanager
def device(device_name: Any) -> Iterator[None]:
    """Create variables and arrays in the block on a device, as ``tf.device``.

    A strategy places its own variables, also in the block. Operations run on the device of their
    operands. Operations on a GPU other than the first need such a block.

    Parameters
    ----------
    device_name : str, LogicalDevice or None
        A name as in TensorFlow, such as ``"cpu:0"`` or ``"/GPU:1"``; None changes nothing.

    Raises
    ------
    RuntimeError
        ``device_name`` is a function, as in TensorFlow.
    ValueError
        The name is wrong, or this machine has no such device.
    """
    if callable(device_name):
        raise RuntimeError("tf.device does not support functions.")
    if device_name is None:
        yield
        return
    chosen = parse_device(getattr(device_name, "name", device_name))

    def place(next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        variable = next_creator(**kwargs)
        if current_mode() is None:
            variable.set_array(chosen.place(variable.current().array))
        return variable

    with chosen.in_use(), creator_scope(place):
        yield
