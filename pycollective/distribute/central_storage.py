"""`CentralStorageStrategy`: replicas on several devices, variables on one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

from pycollective.array_backend import asarray
from pycollective.distribute.creation import create_by_first, mirrored_creator
from pycollective.distribute.devices import Device, parse_device, parse_devices
from pycollective.distribute.interfaces import AnyStrategy
from pycollective.distribute.mirrored import MirroredExtended
from pycollective.distribute.strategy import Strategy
from pycollective.distribute.variables import MirroredVariable
from pycollective.tensor import Tensor, Variable, VariableAggregation, VariableSynchronization
from pycollective.tensor.tape import record

_log = logging.getLogger("pycollective")


class AggregatingVariable(MirroredVariable):
    """A variable with one component, which the replicas share.

    In a replica function every replica must make the same assignments. Each assignment is a merge
    point, which assigns the aggregate of the replicas' values once. The replicas add to an ``ON_READ``
    sum one by one.
    """

    def __init__(self, strategy: AnyStrategy, variable: Variable) -> None:
        super().__init__(
            strategy,
            [variable],
            variable.trainable,
            variable.name,
            variable.synchronization,
            variable.aggregation,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        copied = AggregatingVariable(
            self._distribute_strategy, copy.deepcopy(self._values[0], memo)
        )
        copied.constraint = self.constraint
        memo[id(self)] = copied
        return copied

    def get(self) -> Variable:
        """Return the plain variable that holds the value."""
        return self.local()

    def local(self) -> Variable:
        found: Variable = self._values[0]
        return found

    def _read(self) -> Tensor:
        """Return the value on the device of the replica that reads it; counters stay on the host."""
        tensor = super()._read()
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA and not tensor.ndim:
            return tensor
        return self.for_replica(tensor)

    @property
    def _by_rows(self) -> bool:  # type: ignore[override]
        """True if replicas look up rows of the variable on a parameter server."""
        return self.local()._by_rows

    def for_replica(self, tensor: Tensor) -> Tensor:
        """Return a value of this variable on the device of the replica that reads it."""
        context = self._replica_context()
        if context is None:
            return tensor
        central = tensor.array
        array = context.strategy.extended.devices[context.local_replica_id].place(central)
        if array is central:
            return tensor
        return record(array, (tensor,), lambda g, _need: (asarray(g, like=central),))

    def _write(self, method: str, value: Any) -> Variable:
        is_sum = (
            self._synchronization is VariableSynchronization.ON_READ
            and self._aggregation is VariableAggregation.SUM
        )
        if is_sum and method in ("assign_add", "assign_sub"):
            getattr(self.local(), method)(value)  # needs no merge point
            return self
        if self._replica_context() is not None and self._aggregation is VariableAggregation.NONE:
            raise ValueError(
                "You must specify an aggregation method to update a AggregatingVariable in Replica "
                f"Context. You can do so by passing an explicit value for argument `aggregation` to "
                f"tf.Variable(..). e.g. `tf.Variable(..., aggregation=tf.VariableAggregation.SUM)`. "
                f"The variable is {self._name!r}"
            )
        return super()._write(method, value)


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
        """Make one variable for all replicas; a component for each replica if it is ``ON_READ``."""
        if kwargs.get("synchronization") in (
            VariableSynchronization.ON_READ,
            VariableSynchronization.NONE,
        ):
            return mirrored_creator(self.strategy)(next_creator, **kwargs)
        return create_by_first(self.strategy, lambda: self._make(next_creator, **kwargs))

    def _make(self, next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        variable = self.variable_on(self._parameter_device, next_creator, **kwargs)
        if self.num_local_replicas > 1 or self._parameter_device.memory != self.devices[0].memory:
            variable = AggregatingVariable(self.strategy, variable)
        else:
            variable._distribute_strategy = self.strategy
        return variable


class CentralStorageStrategy(Strategy):
    """Synchronous training on several devices of one machine, with the variables on one of them.

    Replicas are threads that run at the same time. Their assignments to a variable are aggregated and
    applied once. `Optimizer.apply_gradients` sums the gradients and updates once.

    Parameters
    ----------
    compute_devices : list of str, optional
        The device of each replica; by default as for `MirroredStrategy`.
    parameter_device : str, optional
        The device of variables; by default the CPU, or a single compute device.

    Raises
    ------
    AssertionError
        A device is named twice.
    RuntimeError
        The devices belong to several machines.
    ValueError
        This machine has no such device.
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
