"""`Replicas`: the part of `StrategyExtended` that runs replicas, and that replicas call."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pycollective import array_backend
from pycollective.array_backend import Array
from pycollective.distribute.blas_threads import shared_among
from pycollective.distribute.communication import CommunicationOptions
from pycollective.distribute.context import (
    Mode,
    entered,
    has_strategy,
    require_cross_replica,
    state,
)
from pycollective.distribute.cross_device_ops import (
    CrossDeviceOps,
    component_of,
    slices_beside,
)
from pycollective.distribute.devices import Device
from pycollective.distribute.interfaces import AnyContext, AnyStrategy
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.reducer import GradientReduction
from pycollective.distribute.replica_context import ReplicaContext
from pycollective.distribute.replica_threads import ReplicaRun, ReplicaThreads
from pycollective.distribute.values import (
    Mirrored,
    PerReplica,
    regroup,
    select_replica,
)
from pycollective.distribute.workers import Workers
from pycollective.errors import MismatchError
from pycollective.tensor import (
    IndexedSlices,
    Tensor,
    Variable,
    VariableAggregation,
    as_tensor,
)
from pycollective.tensor.tape import paused
from pycollective.tensor.variable import creators

#: The default limit, in seconds, of a replica's wait for the others.
DEFAULT_TIMEOUT = 600.0

#: Bytes of a bucket of gradients. Smaller buckets cost more processor time than overlap saves
#: (benchmarks/gradient_overlap.py).
GRADIENT_PACK = 4 << 20


class Replicas:
    """The replicas of a strategy, one on each device, and their collectives."""

    is_default = False
    #: True if values that differ between replicas are wrapped. A strategy for one device wraps none.
    groups_values = True
    #: True if the replicas share variables, which are then updated once.
    updates_variables_once = False
    #: The reason for the cross-device operations, for `Strategy.describe`.
    why_these_ops = ""
    #: Hints for the all-reduce of gradients.
    gradient_options = CommunicationOptions(bytes_per_pack=GRADIENT_PACK)
    #: True if replicas of this process sum gradients while their tapes compute others. None: they do
    #: so unless all cores run replicas (benchmarks/gradient_overlap.py).
    sums_during_backward: bool | None = None
    #: True if `InputReplicationMode.PER_REPLICA` is possible.
    input_per_replica = False
    #: True if replicas without data get batches without rows, while other replicas have data.
    enable_partial_batch_handling = True
    #: True if each of several workers runs the program.
    experimental_between_graph = False
    #: True if this process initializes variables; True if shapes must not change between steps.
    experimental_should_init = True
    experimental_require_static_shapes = False

    def __init__(self, devices: Sequence[Device], cross_device_ops: CrossDeviceOps) -> None:
        self.devices = tuple(devices)
        self.cross_device_ops = cross_device_ops
        # A cycle of references would keep the replicas' threads alive until garbage collection.
        self._strategy: weakref.ref[AnyStrategy] | None = None
        self._timeout = DEFAULT_TIMEOUT
        self.start_afresh()
        self.train_with(Workers())

    def train_with(self, workers: Workers) -> None:
        """Set the processes that train together from now on."""
        self.workers = workers
        #: The number of replicas of this process, and of all processes.
        self.num_local_replicas = len(self.devices)
        self.num_replicas_in_sync = self.num_local_replicas * workers.count
        #: The number of this process's first replica among all.
        self.first_replica = self.num_local_replicas * workers.index
        #: True if this process writes checkpoints and summaries: the chief does.
        self.should_checkpoint = self.should_save_summary = workers.index == 0

    def start_afresh(self) -> None:
        """Create the locks and threads, also in a copy or in a forked process."""
        self._process = os.getpid()
        self._threads: ReplicaThreads | None = None
        self._run_lock = threading.RLock()
        self._runs = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.start_afresh()
        memo[id(self)] = copied
        return copied

    # Hooks of strategies ------------------------------------------------------------------------

    def create_variable(self, next_creator: Callable[..., Variable], **kwargs: Any) -> Variable:
        """Make a variable of this strategy; a plain one unless overridden."""
        return next_creator(**kwargs)

    def variable_on(
        self, device: Device, next_creator: Callable[..., Variable], **kwargs: Any
    ) -> Variable:
        """Make a variable on a device.

        Scalars with aggregation ONLY_FIRST_REPLICA stay on the host: counters and rates, which programs
        read in every step.
        """
        with device.in_use():
            variable = next_creator(**kwargs)
            only_first = variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
            if device.kind == "GPU" and (variable.ndim or not only_first):
                variable.set_array(device.place(variable.current().array))
        return variable

    def begin_run(self, threads: ReplicaThreads) -> None:
        """Prepare a run of several replicas in some threads."""

    def begin_pass(self) -> None:
        """Prepare an iteration over a distributed dataset, or raise an error."""

    def reduce_in_replica(
        self,
        context: AnyContext,
        reduce_op: ReduceOp,
        arrays: list[Array],
        options: CommunicationOptions,
    ) -> list[Array]:
        """Take part in an all-reduce; with one replica, return the arrays."""
        return arrays

    def begin_reduction(
        self,
        context: AnyContext,
        likes: Sequence[Array],
        reduce_op: ReduceOp,
        options: CommunicationOptions,
    ) -> GradientReduction | None:
        """Begin an all-reduce whose arrays follow one by one; None if it cannot begin early."""
        return None

    def reduce_slices_in_replica(
        self,
        context: AnyContext,
        reduce_op: ReduceOp,
        slices: Sequence[IndexedSlices],
        options: CommunicationOptions,
    ) -> list[IndexedSlices]:
        """Take part in an all-reduce of `IndexedSlices`; return all replicas' rows, in order."""

        def gather(all_slices: list[tuple[IndexedSlices, ...]]) -> list[list[IndexedSlices]]:
            values = _by_value(all_slices, "all_reduce: the replicas reduce", "IndexedSlices")
            with self._for_all_replicas("all_reduce of IndexedSlices"):
                sums = self.cross_device_ops.batch_reduce(
                    reduce_op, [(value, value) for value in values], options
                )
            sums = [self._over_workers(reduce_op, total) for total in sums]
            return [
                [
                    slices_beside(own, component_of(total, r))
                    for own, total in zip(slices, sums, strict=True)
                ]
                for r, slices in enumerate(all_slices)
            ]

        result: list[IndexedSlices] = context.merge(
            "all_reduce of IndexedSlices",
            gather,
            *slices,
            key=reduce_op,
            timeout=options.timeout_seconds,
        )
        return result

    def gather_in_replica(
        self,
        context: AnyContext,
        arrays: Sequence[Array],
        axis: int,
        options: CommunicationOptions,
    ) -> list[tuple[Array, int]]:
        """Take part in an all-gather of arrays, whose lengths along ``axis`` may differ.

        Return each result, and the offset of this replica's array in it. Replicas with one memory
        share the result.
        """

        def gather(all_arrays: list[tuple[Array, ...]]) -> list[list[tuple[Array, int]]]:
            tensors = [tuple(map(Tensor, arrays)) for arrays in all_arrays]
            results: list[list[tuple[Array, int]]] = [[] for _ in all_arrays]
            for value in _by_value(tensors, "all_gather: the replicas gather", "tensors"):
                ops = self.cross_device_ops_for(value)
                with self._for_all_replicas("all_gather"):
                    joined = component_of(ops.gather(value, value, axis, options), 0).array
                whole, begin = self.workers.gather(joined, axis)
                for own, result in zip(value.values, results, strict=True):
                    result.append((array_backend.asarray(whole, like=own.array), begin))
                    begin += own.shape[axis]
            return results

        result: list[tuple[Array, int]] = context.merge(
            "all_gather", gather, *arrays, key=axis, timeout=options.timeout_seconds
        )
        return result

    def _over_workers(self, op: ReduceOp, reduced: Any) -> Any:
        """Reduce this process's result over all processes."""
        if self.workers.count == 1:
            return reduced
        if isinstance(reduced, Mirrored):
            total = self._over_workers(op, reduced.values[0])
            return Mirrored([total] * len(reduced.values))
        if isinstance(reduced, IndexedSlices):
            return self.workers.reduce_slices(op, reduced)
        return Tensor(self.workers.reduce(op, as_tensor(reduced).array))

    def cross_device_ops_for(self, value: Any, destinations: Any = None) -> CrossDeviceOps:
        """Return the operations for a reduction, or a gather, in cross-replica context."""
        return self.cross_device_ops

    @contextmanager
    def _for_all_replicas(self, what: str) -> Iterator[None]:
        """Enter cross-replica context without tapes; convert a ValueError to a MismatchError."""
        try:
            with entered(Mode(self.strategy, None)), paused():
                yield
        except ValueError as error:
            raise MismatchError(f"{what}: {error}") from error

    def scope_failed(self, error: BaseException) -> None:
        """Note an error that ended the block of a scope, such as one of a callback in `Model.fit`."""
        self.workers.failed(error)

    def abort_collectives(self, reason: str, threads: ReplicaThreads | None = None) -> None:
        """Abort the collectives of the replicas in some threads, because one has failed."""

    @property
    def input_pipeline(self) -> tuple[int, int]:
        """The number of processes that read input, and the index of this process."""
        return self.workers.count, self.workers.index

    def sum_over_workers(self, count: int) -> int:
        """Return the sum of a number over all processes."""
        return self.workers.total(count)

    # Facts --------------------------------------------------------------------------------------

    @property
    def strategy(self) -> AnyStrategy:
        """The strategy of this object.

        Raises
        ------
        RuntimeError
            The strategy was deleted.
        """
        strategy = None if self._strategy is None else self._strategy()
        if strategy is None:
            raise RuntimeError(
                f"the strategy of this {type(self).__name__} was deleted; keep a reference to the "
                "strategy, because `strategy.extended` does not keep it"
            )
        return strategy

    def belong_to(self, strategy: AnyStrategy) -> None:
        """Set the strategy of this object."""
        self._strategy = weakref.ref(strategy)

    @property
    def timeout(self) -> float:
        """The deadline in seconds at which a missing replica is reported."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {seconds!r}")
        self._timeout = float(seconds)
        self.workers.wait_at_most(self._timeout)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the replicas' devices."""
        return tuple(str(d) for d in self.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold variables."""
        return self.worker_devices

    @property
    def experimental_enable_get_next_as_optional(self) -> bool:
        """The older name of `enable_partial_batch_handling`."""
        return self.enable_partial_batch_handling

    @experimental_enable_get_next_as_optional.setter
    def experimental_enable_get_next_as_optional(self, enable: bool) -> None:
        self.enable_partial_batch_handling = enable

    # Running ------------------------------------------------------------------------------------

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function once for each replica at the same time, and group the results."""
        return self.run(self.strategy, fn, args, kwargs)

    def run(
        self,
        strategy: AnyStrategy,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
    ) -> Any:
        """Do what `Strategy.run` describes."""
        makers = None
        if state.modes:
            require_cross_replica(strategy)
        if not (state.modes and has_strategy()):
            makers = (*creators.stack, self.create_variable)
        if self.workers.failure:
            self.workers.compare_failures()
        if self.num_local_replicas == 1:
            try:
                return self._call(strategy, 0, None, makers, fn, args, kwargs)
            except BaseException as error:
                self.workers.failed(error)
                raise
        if self._process != os.getpid():  # a forked process does not have the threads
            self.start_afresh()
        if makers is None:
            makers = creators.stack

        def replica(number: int, run: ReplicaRun) -> Any:
            return self._call(strategy, number, run, makers, fn, args, kwargs)

        def abort(reason: str) -> None:
            self.abort_collectives(reason, threads)

        with self._threads_of_run() as threads, shared_among(self.num_local_replicas):
            self.begin_run(threads)
            try:
                return regroup(threads.run(replica, abort, self._timeout))
            except BaseException as error:
                self.workers.failed(error)
                raise

    @contextmanager
    def _threads_of_run(self) -> Iterator[ReplicaThreads]:
        """Yield the threads for a run; the runs of several user threads take turns."""
        with self._run_lock:
            if self._runs:
                raise RuntimeError(
                    "strategy.run() was called in a merge function, while the replicas wait for the "
                    "end of that function; call it outside of the replicas"
                )
            self._runs = True
            try:
                if self._threads is None or not self._threads.usable:
                    self._threads = ReplicaThreads(self.num_local_replicas)
                yield self._threads
            finally:
                self._runs = False

    def _call(
        self,
        strategy: AnyStrategy,
        replica: int,
        run: ReplicaRun | None,
        makers: tuple[Callable[..., Any], ...] | None,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
    ) -> Any:
        """Run a function for one replica in this thread; ``makers`` create its variables."""
        mode = Mode(strategy, ReplicaContext(strategy, replica, run), replica)
        device = self.devices[replica]
        with entered(mode, makers):
            args = select_replica(replica, args)
            kwargs = select_replica(replica, kwargs) if kwargs else {}
            if device.kind == "CPU":
                return fn(*args, **kwargs)
            with device.in_use():
                return fn(*args, **kwargs)


def _by_value(replicas: Sequence[tuple[Any, ...]], what: str, kind: str) -> list[PerReplica]:
    """Return the replicas' values as `PerReplica`; raise an error for different numbers of them."""
    counts = [len(values) for values in replicas]
    if len(set(counts)) > 1:
        raise MismatchError(f"{what} {counts} {kind}")
    return [PerReplica(of_one) for of_one in zip(*replicas, strict=True)]
