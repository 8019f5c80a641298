"""`StrategyExtended`: what differs between strategies, and the lower-level methods."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from pycollective import array_backend
from pycollective.distribute.blas_threads import shared_among
from pycollective.distribute.context import Mode, entered, require_cross_replica
from pycollective.distribute.cross_device_ops import (
    CommunicationOptions,
    CrossDeviceOps,
    ReplicaReduction,
)
from pycollective.distribute.devices import Device
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.replica_context import ReplicaContext
from pycollective.distribute.replica_threads import ReplicaRun, ReplicaThreads
from pycollective.distribute.values import DistributedValues, Mirrored, regroup, select_replica
from pycollective.tensor import Variable, as_tensor, creator_scope

if TYPE_CHECKING:
    from pycollective.distribute.strategy import Strategy

__all__ = ["StrategyExtended"]

#: Bytes of a pack of gradients; see benchmarks/gradient_overlap.py.
GRADIENT_PACK = 1 << 20


class StrategyExtended:
    """What differs between strategies, and the lower-level methods of `Strategy`.

    Parameters
    ----------
    devices : sequence of Device
        A replica runs on each.
    cross_device_ops : CrossDeviceOps
        How values of the replicas are reduced.
    """

    is_default = False
    #: Whether the replicas share variables, which must then be updated once for all of them.
    updates_variables_once = False
    #: Why these cross-device operations, for `Strategy.describe`.
    why_these_ops = ""
    #: Hints for the all-reduce of gradients.
    gradient_options = CommunicationOptions(bytes_per_pack=GRADIENT_PACK)
    #: Whether datasets can be made for each replica: `InputReplicationMode.PER_REPLICA`.
    input_per_replica = False
    #: Whether replicas that have run out of data get batches without rows while others have some.
    enable_partial_batch_handling = True

    def __init__(self, devices: Sequence[Device], cross_device_ops: CrossDeviceOps) -> None:
        self._devices = tuple(devices)
        self.cross_device_ops = cross_device_ops
        self._strategy: Strategy | None = None  # set by Strategy
        self._threads: ReplicaThreads | None = None
        self._run_lock = threading.RLock()

    # What a strategy may override ---------------------------------------------------------------

    def create_variable(self, next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        """Make a variable of this strategy; a plain one unless overridden."""
        return next_creator(**kwargs)

    def all_reduce_in_replica(
        self,
        context: ReplicaContext,
        reduce_op: ReduceOp,
        arrays: list[Any],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Do one replica's part of an all-reduce; with one replica, the arrays are the result."""
        return arrays

    def begin_all_reduce(
        self,
        context: ReplicaContext,
        reduce_op: ReduceOp,
        likes: Sequence[Any],
        options: CommunicationOptions,
    ) -> ReplicaReduction | None:
        """Begin an all-reduce whose arrays come one by one; None where that is not possible."""
        return None

    def cross_device_ops_for(self, value: Any) -> CrossDeviceOps:
        """Return what reduces a value in cross-replica context."""
        return self.cross_device_ops

    def abort_collectives(self, reason: str) -> None:
        """Wake replicas that are in a collective, because another one has failed."""

    def default_replica_context(self) -> ReplicaContext | None:
        """Return the replica context outside every scope; only the default strategy has one."""
        return None

    @property
    def input_pipeline(self) -> tuple[int, int]:
        """The number of processes that read input, and which of them this is."""
        return 1, 0

    def sum_over_workers(self, count: int) -> int:
        """Return the sum of a number over all processes: all make the same calls."""
        return count

    # Facts --------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The strategy this belongs to."""
        assert self._strategy is not None
        return self._strategy

    @property
    def num_local_replicas(self) -> int:
        """How many replicas this process runs."""
        return len(self._devices)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the replicas' devices."""
        return tuple(str(d) for d in self._devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold variables."""
        return self.worker_devices

    def replica_device(self, replica: int) -> AbstractContextManager[Any]:
        """Return the context in which a replica's arrays are made."""
        device = self._devices[replica]
        return array_backend.on_device(device.kind, device.index)

    # Running ------------------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function once for each replica at the same time, and group the results."""
        size = self.num_local_replicas
        if size == 1:
            context = ReplicaContext(self.strategy, 0, None)
            creators = nullcontext() if self.is_default else creator_scope(self.create_variable)
            with entered(Mode(self.strategy, context)), creators, self.replica_device(0):
                return fn(*select_replica(0, tuple(args)), **select_replica(0, kwargs))

        def replica(number: int, run: ReplicaRun) -> Any:
            context = ReplicaContext(self.strategy, number, run)
            with (
                entered(Mode(self.strategy, context)),
                creator_scope(self.create_variable),
                self.replica_device(number),
            ):
                return fn(*select_replica(number, tuple(args)), **select_replica(number, kwargs))

        with self._run_lock, shared_among(size):
            if self._threads is None:
                self._threads = ReplicaThreads(size)
            return regroup(self._threads.run(replica, self.abort_collectives))

    # Reducing, in cross-replica context ---------------------------------------------------------

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce ``value`` to the devices of ``destinations``.

        Returns a tensor, or a Mirrored value when there are several destinations.
        """
        require_cross_replica(self.strategy)
        op = ReduceOp.of(reduce_op)
        if isinstance(destinations, (list, tuple)):
            raise AssertionError("destinations must be one value or device, not a list or tuple")
        if isinstance(value, Mirrored):
            if op is ReduceOp.MEAN:
                return value
            raise AssertionError("a SUM of a Mirrored value would add the same value to itself")
        if not isinstance(value, DistributedValues):
            return self._reduce_plain(op, value)
        return self.cross_device_ops_for(value).reduce(op, value, destinations, options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values in one go; as `reduce_to`."""
        require_cross_replica(self.strategy)
        return self.cross_device_ops.batch_reduce(reduce_op, value_destination_pairs, options)

    def _reduce_plain(self, op: ReduceOp, value: Any) -> Any:
        """Reduce what is not distributed: the same value on every replica."""
        tensor = as_tensor(value)
        if op is ReduceOp.MEAN or self.num_local_replicas == 1 or not np.any(tensor.numpy()):
            return tensor
        raise ValueError(
            f"A non-DistributedValues value {value} cannot be reduced with the given reduce op {op}."
        )

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(component, *args, **kwargs)`` for every component of a variable.

        Distributed arguments are replaced by the replica's component. Returns the grouped results, or
        a list of them with ``group=False``.
        """
        require_cross_replica(self.strategy)
        components = getattr(var, "values", (var,))
        results = []
        for replica, component in enumerate(components):
            with self.replica_device(replica):
                results.append(
                    fn(
                        component,
                        *select_replica(replica, tuple(args)),
                        **select_replica(replica, dict(kwargs or {})),
                    )
                )
        return regroup(results, Mirrored) if group else results

    def value_container(self, value: Any) -> Any:
        """Return the distributed variable that a component belongs to, or the value itself."""
        reference = getattr(value, "_distributed_container", None)
        container = reference() if reference is not None else None
        return value if container is None else container

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether a variable was created under this strategy."""
        return getattr(v, "_distribute_strategy", None) is self.strategy

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints."""
        return True

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries."""
        return True
