"""`MirroredStrategy`: a replica, and a copy of each variable, on each device of one machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycollective import _core
from pycollective.array_backend import Array
from pycollective.cluster.tf_config import TFConfigClusterResolver
from pycollective.comm import Communicator, local_group
from pycollective.distribute.all_reduce_ops import (
    CollectiveAllReduce,
    ReductionToOneDevice,
    default_cross_device_ops,
)
from pycollective.distribute.communication import CommunicationOptions
from pycollective.distribute.creation import mirrored_creator
from pycollective.distribute.cross_device_ops import (
    CrossDeviceOps,
    devices_of,
    log_place,
    sum_in_order,
)
from pycollective.distribute.devices import Device, parse_devices
from pycollective.distribute.extended import StrategyExtended
from pycollective.distribute.interfaces import AnyContext
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.reducer import GradientReducer, GradientReduction
from pycollective.distribute.replica_threads import ReplicaThreads
from pycollective.distribute.scheduled_ops import ScheduledOps
from pycollective.distribute.strategy import Strategy
from pycollective.distribute.values import DistributedValues, PerReplica
from pycollective.distribute.workers import Workers
from pycollective.errors import MismatchError
from pycollective.tensor import Tensor, Variable, as_tensor

_HOST = Device("CPU", 0)
_log = logging.getLogger("pycollective")


class MirroredExtended(StrategyExtended):
    """Replicas as threads, with collectives for gradients and a component of each variable."""

    input_per_replica = True

    def __init__(
        self,
        devices: Sequence[Device],
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        check_cross_device_ops(cross_device_ops)
        chosen, why = default_cross_device_ops(devices)
        if cross_device_ops is not None:
            chosen, why = cross_device_ops, "an argument of the strategy"
        super().__init__(devices, chosen)
        self.why_these_ops = why
        #: The rules of reducers. Operations with their own hooks use reducers among workers only.
        self._rules = chosen if isinstance(chosen, ScheduledOps) else CollectiveAllReduce()
        self._has_own_hooks = self._rules is not chosen or self._rules.has_own_hooks()
        self._options = communication_options or CommunicationOptions()
        self.gradient_options = self.gradient_options.merge(communication_options)
        self._one_device = ReductionToOneDevice()
        self._mixed = len({device.kind for device in devices}) > 1

    def start_afresh(self) -> None:
        """Create the locks, threads and communicators, also in a copy or in a forked process."""
        super().start_afresh()
        #: The reducer of a single replica.
        self._reducer_of_one: GradientReducer | None = None

    def train_with(self, workers: Workers) -> None:
        """Set the processes that train together from now on, and drop the reducers."""
        super().train_with(workers)
        self._reducer_of_one = None
        if self._threads is not None:
            self._threads.communicators, self._threads.reducers = [], []

    def create_variable(self, next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        """Make a mirrored variable, or an ``ON_READ`` variable."""
        return mirrored_creator(self.strategy)(next_creator, **kwargs)

    def begin_run(self, threads: ReplicaThreads) -> None:
        """Create the communicators if there are none, and set their timeout."""
        if not threads.communicators:
            threads.communicators = local_group(self.num_local_replicas)
            threads.reducers = [self._reducer(replica) for replica in threads.communicators]
        for communicator in threads.communicators:
            communicator.timeout = self._timeout

    def _reducer(self, replicas: Communicator | None) -> GradientReducer:
        """Return the reducer of a replica with a communicator of this process's replicas."""
        workers = self.workers.communicator
        return GradientReducer(self._rules, replicas, workers, self._options, self._mixed)

    def _reducer_of(self, context: AnyContext) -> GradientReducer:
        if context.threads is None:
            if self._reducer_of_one is None:
                self._reducer_of_one = self._reducer(None)
            return self._reducer_of_one
        reducers = context.threads.reducers
        if not reducers:
            raise RuntimeError("another replica failed, so this one must end")
        return reducers[context.local_replica_id]

    def abort_collectives(self, reason: str, threads: ReplicaThreads | None = None) -> None:
        """Abort the communicators of a run, by default the last one; the next run makes new ones.

        If the workers wait for buckets of this step, their communicator is aborted, too.
        """
        self._reducer_of_one, threads = None, threads or self._threads
        reducers: list[GradientReducer] = []
        if threads is not None:
            communicators, threads.communicators = threads.communicators, []
            reducers, threads.reducers = threads.reducers, []
            if communicators:
                communicators[0].abort(reason)
        if self.num_local_replicas == 1 or any(r.has_reached_workers for r in reducers):
            self.workers.abort(reason)

    def cross_device_ops_for(self, value: Any, destinations: Any = None) -> CrossDeviceOps:
        """Return the operations that reduce a value to destinations, or gather it.

        As in TensorFlow, int32 values, and values with destinations on other devices, are reduced on
        one device.
        """
        values = value.values if isinstance(value, DistributedValues) else (value,)
        if any(getattr(v, "dtype", None) == np.int32 for v in values):
            return self._one_device
        if destinations is not None and devices_of(destinations) != devices_of(value):
            return self._one_device
        return self.cross_device_ops

    def reduced_on_host(self, op: ReduceOp, value: Any) -> Tensor | None:
        """Return the sum or mean of the replicas' arrays if they are on the host, else None.

        The destination differs from the replicas' devices, so the strategy's operations are not used.
        """
        if value.__class__ is not PerReplica:
            return super().reduced_on_host(op, value)
        arrays: list[Any] = [getattr(part, "array", None) for part in value._values]
        if len(arrays) < 2 or any([array.__class__ is not np.ndarray for array in arrays]):
            return None
        log_place(_HOST, "cpu:0")
        total = Tensor(sum_in_order(arrays, op))
        return total if self.workers.count == 1 else as_tensor(self._over_workers(op, total))

    def reduce_in_replica(
        self,
        context: AnyContext,
        reduce_op: ReduceOp,
        arrays: list[Array],
        options: CommunicationOptions,
    ) -> list[Array]:
        """Take part in an all-reduce: in this replica's thread, or at a merge point."""
        if self.num_replicas_in_sync == 1 or not arrays:
            return arrays
        has_ints = np.int32 in [array.dtype for array in arrays]
        if self.workers.count > 1 or not (self._has_own_hooks or has_ints):
            with context.collective():
                reducer = self._reducer_of(context)
                return reducer.all_reduce(arrays, reduce_op, options, context.merge)
        results: list[Any] = [None] * len(arrays)
        ints = [i for i, array in enumerate(arrays) if array.dtype == np.int32]
        others = [i for i, array in enumerate(arrays) if array.dtype != np.int32]
        for ops, indices in ((self._one_device, ints), (self.cross_device_ops, others)):
            if indices:
                selected = [arrays[i] for i in indices]
                reduced = self._reduce_by(ops, context, reduce_op, selected, options)
                for i, array in zip(indices, reduced, strict=True):
                    results[i] = array
        return results

    def _reduce_by(
        self,
        ops: CrossDeviceOps,
        context: AnyContext,
        reduce_op: ReduceOp,
        arrays: list[Array],
        options: CommunicationOptions,
    ) -> list[Array]:
        """Reduce arrays by a reducer, or by the hooks of cross-device operations."""
        if ops is self.cross_device_ops and not self._has_own_hooks:
            return self.reduce_in_replica(context, reduce_op, arrays, options)
        options = self._options.merge(options)
        tensors = [Tensor(array) for array in arrays]
        if type(ops)._all_reduce is not CrossDeviceOps._all_reduce:
            with context.collective():
                reduced = ops._all_reduce(reduce_op, tensors, context.local_replica_id, options)
            return [as_tensor(r).array for r in reduced]

        def reduce(_strategy: Strategy, op: Any, *values: DistributedValues) -> list[Any]:
            if isinstance(op, PerReplica):
                raise MismatchError(f"all_reduce: the replicas ask for {list(op.values)}")
            return ops.batch_reduce(op, [(value, value) for value in values], options)

        return [r.array for r in context.merge_call(reduce, args=[reduce_op, *tensors])]

    def begin_reduction(
        self,
        context: AnyContext,
        likes: Sequence[Array],
        reduce_op: ReduceOp,
        options: CommunicationOptions,
    ) -> GradientReduction | None:
        """Begin an all-reduce whose arrays follow one by one, if a bucket can begin early.

        Several replicas begin early only if overlap saves time, and all are on one kind of device.
        """
        alone = self.num_local_replicas == 1
        if alone and self.workers.count == 1:
            return None
        if not alone:
            early = (
                self._can_sum_during_backward()
                if self.sums_during_backward is None
                else self.sums_during_backward
            )
            if (
                not early
                or self._mixed
                or self._has_own_hooks
                or any(like.dtype == np.int32 for like in likes)
            ):
                return None
        return self._reducer_of(context).begin(likes, reduce_op, options, context.merge)

    def _can_sum_during_backward(self) -> bool:
        on_cpus = sum([device.kind == "CPU" for device in self.devices])
        return on_cpus < self.num_local_replicas or on_cpus < _core.usable_cores()


def check_cross_device_ops(cross_device_ops: Any) -> None:
    """Raise an error unless the argument is None or a `CrossDeviceOps` object."""
    if isinstance(cross_device_ops, type) or not isinstance(
        cross_device_ops, (CrossDeviceOps, type(None))
    ):
        raise ValueError(
            "cross_device_ops must be a CrossDeviceOps object such as RingAllReduce(), "
            f"HierarchicalCopyAllReduce() or ReductionToOneDevice(), not {cross_device_ops!r}"
        )


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Each variable has a copy on each device. Gradients are all-reduced, so that every copy gets the same
    updates. Replicas are threads that run at the same time.

    Parameters
    ----------
    devices : list of str, optional
        Devices such as ``"cpu:0"`` or ``"/gpu:1"``; any number of CPU devices is allowed. By default all
        logical devices on visible GPUs; without a GPU all logical CPU devices, one unless configured.
    cross_device_ops : CrossDeviceOps, optional
        The reduction of values; by default the core's all-reduce between CPUs, NCCL between GPUs, and
        `ReductionToOneDevice` if both are mixed. int32 values, and values with other destinations than
        the replicas, are always reduced on one device.

    Raises
    ------
    AssertionError
        A device is named twice.
    RuntimeError
        The devices belong to several machines.
    ValueError
        A device does not exist, ``devices`` is empty, or ``cross_device_ops`` is not a
        `CrossDeviceOps`.

    Notes
    -----
    ``TF_CONFIG`` is ignored, with a line in the log.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        if TFConfigClusterResolver.applies(os.environ):
            _log.info(
                "Initializing local devices since in-graph multi-worker training with "
                "`MirroredStrategy` is not supported in eager mode. TF_CONFIG will be ignored when "
                "initializing `MirroredStrategy`."
            )
        super().__init__(MirroredExtended(parse_devices(devices), cross_device_ops))
        _log.info("Using MirroredStrategy with devices %r", self.extended.worker_devices)
