"""`MirroredStrategy`: a replica on each device of one machine, variables mirrored on all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pycollective.communicator import Communicator, local_group
from pycollective.distribute.cross_device_ops import (
    CommunicationOptions,
    CrossDeviceOps,
    RingAllReduce,
)
from pycollective.distribute.devices import parse_devices
from pycollective.distribute.extended import StrategyExtended
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.replica_context import ReplicaContext
from pycollective.distribute.strategy import Strategy
from pycollective.distribute.values import DistributedValues
from pycollective.distribute.variables import mirrored_creator
from pycollective.tensor import Tensor, Variable

__all__ = ["MirroredStrategy"]

_log = logging.getLogger("pycollective")


class MirroredExtended(StrategyExtended):
    """Replicas as threads; gradients meet in collectives, variables have a component for each."""

    input_per_replica = True

    def __init__(self, devices: Sequence[Any], cross_device_ops: CrossDeviceOps) -> None:
        super().__init__(devices, cross_device_ops)
        self._communicators: list[Communicator] = []

    def create_variable(self, next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        """Make a mirrored variable, or one that is aggregated when it is read."""
        return mirrored_creator(self.strategy)(next_creator, **kwargs)

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function for each replica, with communicators that work."""
        with self._run_lock:
            size = self.num_local_replicas
            if size > 1 and not self._communicators:
                self._communicators = local_group(size)
            return super().call_for_each_replica(fn, args, kwargs)

    def abort_collectives(self, reason: str) -> None:
        """Fail the communicators of this run; the next run makes new ones."""
        communicators, self._communicators = self._communicators, []
        if communicators:
            communicators[0].abort(reason)

    def all_reduce_in_replica(
        self,
        context: ReplicaContext,
        reduce_op: ReduceOp,
        arrays: list[Any],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Take part in an all-reduce from this replica's thread, or meet and let one reduce."""
        if self.num_local_replicas == 1 or not arrays:
            return arrays
        ops = self.cross_device_ops
        replica = context.local_replica_id
        if not ops.takes_part_from_replicas():
            return self._merge_all_reduce(context, reduce_op, arrays, options)
        with context.collective():
            communicators = self._communicators
            if not communicators:  # another replica has just failed
                raise RuntimeError("the replicas were stopped")
            return ops.all_reduce_replica(communicators[replica], reduce_op, arrays, options)

    def _merge_all_reduce(
        self,
        context: ReplicaContext,
        reduce_op: ReduceOp,
        arrays: list[Any],
        options: CommunicationOptions,
    ) -> list[Any]:
        def reduce(_strategy: Strategy, *values: DistributedValues) -> list[Any]:
            pairs = [(value, value) for value in values]
            return self.cross_device_ops.batch_reduce(reduce_op, pairs, options)

        results = context.merge_call(reduce, args=[Tensor(a) for a in arrays])
        return [r.array for r in results]


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Each variable has a copy on each device, and every copy gets the same updates: gradients are
    all-reduced. Replicas are threads that run at the same time.

    Parameters
    ----------
    devices : list of str, optional
        Devices such as ``"cpu:0"`` (logical: as many as you like), ``"/gpu:1"``. By default all visible
        GPUs, or the CPU as one replica.
    cross_device_ops : CrossDeviceOps, optional
        How gradients are reduced; by default `RingAllReduce`.

    Raises
    ------
    AssertionError
        If a device is named twice.
    ValueError
        If a device does not exist, or ``cross_device_ops`` is no `CrossDeviceOps`.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        if isinstance(cross_device_ops, type) or not isinstance(
            cross_device_ops, (CrossDeviceOps, type(None))
        ):
            raise ValueError(
                "cross_device_ops must be a CrossDeviceOps object such as RingAllReduce(), "
                f"HierarchicalCopyAllReduce() or ReductionToOneDevice(), not {cross_device_ops!r}"
            )
        super().__init__(
            MirroredExtended(parse_devices(devices), cross_device_ops or RingAllReduce())
        )
        _log.info("Using MirroredStrategy with devices %r", self.extended.worker_devices)
