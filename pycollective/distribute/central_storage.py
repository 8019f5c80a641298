"""`CentralStorageStrategy`: replicas on several devices, variables on one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pycollective import array_backend, nest
from pycollective.array_backend import Array
from pycollective.distribute.context import get_replica_context, is_creating_once
from pycollective.distribute.devices import Device, parse_device, parse_devices
from pycollective.distribute.mirrored import MirroredExtended
from pycollective.distribute.strategy import Strategy
from pycollective.distribute.values import DistributedValues
from pycollective.distribute.variables import (
    aggregated,
    check_rows_in_replica,
    mirrored_creator,
)
from pycollective.tensor import (
    Tensor,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    as_tensor,
)

__all__ = ["AggregatingVariable", "CentralStorageStrategy"]

_log = logging.getLogger("pycollective")


class AggregatingVariable(Variable):
    """A variable that the replicas share: what they assign is aggregated and applied once.

    Reads see the one value. In cross-replica context assignments go to the variable as they are.
    In a replica every replica must make them; they meet, and the values' sum or mean, or the first
    one's value, by the variable's aggregation, is assigned.
    """

    def __init__(self, strategy: Strategy, variable: Variable) -> None:
        self._set_attributes(
            variable.trainable, variable.name, variable.synchronization, variable.aggregation
        )
        self._variable = variable
        self._distribute_strategy = strategy

    def get(self) -> Variable:
        """Return the plain variable that holds the value."""
        return self._variable

    def _local(self) -> Variable:
        return self._variable

    def _current(self) -> Tensor:
        return self._variable._current()

    def _read(self) -> Tensor:
        return self._variable._read()

    def update_inplace(self, update: Callable[[Array], Any]) -> None:
        """Update the value in place, in the replica or wherever this is called."""
        self._variable.update_inplace(update)

    def assign(self, value: Any, read_value: bool = True) -> Variable:
        """Set the value; in a replica, to what the replicas' values are aggregated to."""
        return self._write("assign", value)

    def assign_add(self, value: Any, read_value: bool = True) -> Variable:
        """Add to the value; as `assign`."""
        return self._write("assign_add", value)

    def assign_sub(self, value: Any, read_value: bool = True) -> Variable:
        """Subtract from the value; as `assign`."""
        return self._write("assign_sub", value)

    def _scatter(self, method: str, slices: Any) -> Variable:
        return self._write(method, slices)

    def _write(self, method: str, value: Any) -> Variable:
        context = get_replica_context()
        if context is None or context.strategy is not self._distribute_strategy:
            getattr(self._variable, method)(value)
            return self
        aggregation = self._aggregation
        if aggregation is VariableAggregation.NONE:
            raise ValueError(
                "You must specify an aggregation method to update a AggregatingVariable in Replica "
                f"Context. You can do so by passing an explicit value for argument `aggregation` to "
                f"tf.Variable(..). e.g. `tf.Variable(..., aggregation=tf.VariableAggregation.SUM)`. "
                f"The variable is {self._name!r}"
            )
        check_rows_in_replica(method, aggregation)
        if nest.is_nested(value) or isinstance(value, DistributedValues):
            value = as_tensor(value, like=self._current())

        def merge(strategy: Strategy, merged: Any) -> None:
            copies = [self._variable] * strategy.extended.num_local_replicas
            merged = aggregated(strategy, self, copies, method, merged)
            getattr(self._variable, method)(merged)

        context.merge_call(merge, args=(value,))
        return self


class _CentralStorageExtended(MirroredExtended):
    updates_variables_once = True
    input_per_replica = False

    def __init__(self, devices: Sequence[Device], parameter_device: Device) -> None:
        super().__init__(devices)
        self._parameter_device = parameter_device

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return (str(self._parameter_device),)

    def create_variable(self, next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        """Make one variable for all replicas; one with sums of each replica if it is ``ON_READ``."""
        if kwargs.get("synchronization") in (
            VariableSynchronization.ON_READ,
            VariableSynchronization.NONE,
        ):
            return mirrored_creator(self.strategy)(next_creator, **kwargs)
        context = get_replica_context()
        if context is None or context.strategy is not self.strategy or is_creating_once():
            return self._make(next_creator, **kwargs)
        return context.created_by_first(lambda: self._make(next_creator, **kwargs))

    def _make(self, next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        device = self._parameter_device
        with array_backend.on_device(device.kind, device.index):
            variable = next_creator(**kwargs)
        variable._distribute_strategy = self.strategy
        if self.num_local_replicas == 1:
            return variable
        return AggregatingVariable(self.strategy, variable)

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn`` once, with the variable that holds the value."""
        plain = var.get() if isinstance(var, AggregatingVariable) else var
        return super().update(plain, fn, args, kwargs, group)


class CentralStorageStrategy(Strategy):
    """Synchronous training on several devices of one machine, with the variables on one of them.

    Replicas are threads that run at the same time. What they assign to a variable is aggregated
    before it is applied, once; `Optimizer.apply_gradients` sums the gradients and updates once.

    Parameters
    ----------
    compute_devices : list of str, optional
        A replica runs on each; by default all visible GPUs, or the CPU as one replica.
    parameter_device : str, optional
        Where variables are; by default the CPU, or the one compute device if there is only one.

    Raises
    ------
    AssertionError
        If a device is named twice.
    ValueError
        If this machine has no such device.
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
    ) -> None:
        devices = parse_devices(compute_devices)
        if parameter_device is not None:
            parameters = parse_device(parameter_device)
        else:
            parameters = devices[0] if len(devices) == 1 else Device("CPU", 0)
        super().__init__(_CentralStorageExtended(devices, parameters))
        _log.info(
            "ParameterServerStrategy (CentralStorageStrategy if you are using a single machine) with "
            "compute_devices = %r, variable_device = %r",
            self.extended.worker_devices,
            self.extended.parameter_devices[0],
        )
