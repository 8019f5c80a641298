"""`GradientReducer`: the all-reduce of the replicas' gradients.

Each replica has one reducer. A step is ``begin``, ``add`` for each gradient, ``finish``; ``all_reduce``
is the three together.

1. Gradients of one dtype are joined in **buckets**, the same on every rank. The strategy's cross-device
   operations choose the buckets and the algorithm. Halves are joined as float32 and rounded once, at
   the end.
2. The reduction of a bucket begins when the bucket is complete and all earlier buckets have begun. All
   ranks then make the same calls in the same order, while the tapes compute other gradients.
3. There are one or two **levels**: the replicas of this process, which are threads, and the workers.
   With two levels, the replicas sum a bucket, and replica 0 reduces the sum over the workers. At the
   end all replicas get replica 0's results at a merge point.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pycollective import array_backend
from pycollective.algorithms import Algorithm
from pycollective.arguments import OpName
from pycollective.array_backend import Array
from pycollective.comm import Communicator, Work
from pycollective.comm.arrays import is_fit
from pycollective.comm.packing import join
from pycollective.distribute.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from pycollective.distribute.reduce_op import ReduceOp, finished, work_dtype
from pycollective.nccl import device
from pycollective.workspace import workspace

_MAX_PLANS = 16


class Rules(Protocol):
    """The choice of buckets and algorithms, which cross-device operations make for a reducer."""

    @property
    def num_packs(self) -> int:
        """The number of equal parts in which each bucket is reduced; 0 means 1."""

    def buckets(self, likes: Sequence[Array], options: CommunicationOptions) -> list[list[int]]:
        """Return the indices of the arrays of each bucket, in the order in which buckets complete."""

    def algorithm_on(self, gpu: bool, options: CommunicationOptions) -> str | Algorithm:
        """Return the core's algorithm for a bucket on the host, or on GPUs."""

    def stays_on_gpus(self, communicator: Communicator, options: CommunicationOptions) -> bool:
        """Return True if a bucket of GPU arrays is reduced on the GPUs, and not on the host."""

    def log_buckets(self, arrays: int, buckets: int, ranks: int, how: CommunicationOptions) -> None:
        """Log the reduction of arrays in buckets."""


@dataclass(frozen=True)
class Bucket:
    """Arrays that are joined for one all-reduce.

    Attributes
    ----------
    indices : list of int
        The indices of the arrays.
    slices : list of tuple
        For each array its beginning and end in the bucket, and its shape.
    dtype, work : dtype
        The dtype of the arrays, and the dtype in which they are reduced.
    op : {"sum", "mean"}
        The core's operation.
    algorithm : str or Algorithm
        The core's algorithm.
    parts : int
        The number of calls.
    """

    indices: list[int]
    slices: list[tuple[int, int, tuple[int, ...]]]
    dtype: np.dtype[Any]
    work: np.dtype[Any]
    op: OpName
    algorithm: str | Algorithm
    parts: int

    def joined(self, arrays: Sequence[Array]) -> tuple[Array, Array]:
        """Return the arrays as a flat one, and the array for the result, which may be the same."""
        first, base = arrays[0], getattr(arrays[0], "base", None)
        together = len(arrays) == 1 or (base is not None and base is arrays[1].base)
        if together or type(first) is not np.ndarray:
            flat, copied = join(arrays, self.work)
            return flat, flat if copied else empty_like(flat)
        flat = workspace.empty((self.slices[-1][1],), self.work)
        np.concatenate([array.reshape(-1) for array in arrays], out=flat, casting="unsafe")
        return flat, flat

    def reduce(
        self,
        communicator: Communicator,
        source: Array,
        target: Array,
        timeout: float | None,
        asynchronous: bool,
    ) -> list[Work[Any]]:
        """All-reduce a flat array into another one; return the calls that have not finished."""
        if self.parts == 1 and timeout is None and not asynchronous:
            # With these arguments alone the compiled fast path takes the call.
            result: Any = communicator.all_reduce(
                source, self.op, out=target, algorithm=self.algorithm
            )
            return [] if result is target else [result]
        unfinished: list[Work[Any]] = []
        for first, last in parts_of(source.size, self.parts):
            part = target[first:last]
            result = communicator.all_reduce(  # type: ignore[call-overload]  # async_op is not a literal
                source[first:last],
                self.op,
                out=part,
                algorithm=self.algorithm,
                async_op=asynchronous,
                timeout=timeout,
            )
            if result is not part:
                unfinished.append(result)
        return unfinished

    def results(self, total: Array, op: ReduceOp, ranks: int, results: list[Any]) -> None:
        """Store the arrays of the bucket's total in ``results``, by their indices."""
        if op is ReduceOp.MEAN and self.op == "sum" and self.dtype.kind not in "iub":
            total = array_backend.asarray(total / total.dtype.type(ranks))
        total = finished(total, self.dtype, op, ranks)
        for i, (begin, end, shape) in zip(self.indices, self.slices, strict=True):
            results[i] = total[begin:end].reshape(shape)


def parts_of(size: int, count: int) -> list[tuple[int, int]]:
    """Return the beginning and end of each of ``count`` equal parts; the last has the remainder."""
    bounds = [size // count * k for k in range(count)] + [size]
    return [(a, b) for a, b in itertools.pairwise(bounds) if b > a] or [(0, size)]


def prepared(array: Array, stays: bool) -> Array:
    """Return an array for the reduction: contiguous, and on the host unless it stays on its GPU."""
    array = array if stays else array_backend.to_numpy(array)
    return array if is_fit(array) else array.copy(order="C")


def empty_like(flat: Array) -> Array:
    """Return uninitialized memory on the device of a flat array; on the host from the workspace."""
    if array_backend.on_host(flat):
        return workspace.empty(flat.shape, flat.dtype)
    return array_backend.empty(flat.shape, flat.dtype, flat)


class BucketPlan:
    """The buckets for arrays with the shapes and dtypes of ``likes``, the same on every rank.

    ``communicator`` is that of the first level, and ``ranks`` the number of ranks of all levels. With
    ``mixed``, ranks have arrays on different kinds of devices, so that the host reduces all.
    """

    def __init__(
        self,
        rules: Rules,
        likes: Sequence[Array],
        op: ReduceOp,
        options: CommunicationOptions,
        communicator: Communicator,
        ranks: int,
        mixed: bool = False,
    ) -> None:
        buckets = rules.buckets(likes, options)
        if communicator.rank == 0:
            rules.log_buckets(len(likes), len(buckets), communicator.size, options)
        self.op = op
        self.ranks = ranks
        self.timeout = options.timeout_seconds
        #: True if results go to GPUs, and if they are computed there.
        self.on_gpu = array_backend.any_on_gpu(likes)
        self.stays = self.on_gpu and not mixed and rules.stays_on_gpus(communicator, options)
        self.buckets = []
        for members in buckets:
            dtype = likes[members[0]].dtype
            work = work_dtype(dtype, op)
            ends = list(itertools.accumulate([likes[i].size for i in members], initial=0))
            shapes = [likes[i].shape for i in members]
            divides = op is ReduceOp.MEAN and work.kind not in "iub" and ranks == communicator.size
            self.buckets.append(
                Bucket(
                    members,
                    list(zip(ends, ends[1:], shapes, strict=False)),
                    dtype,
                    work,
                    "mean" if divides else "sum",
                    rules.algorithm_on(self.stays, options),
                    max(1, rules.num_packs),
                )
            )
        self.bucket_of = {i: k for k, members in enumerate(buckets) for i in members}

    def prepared(self, array: Array) -> Array:
        """Return an array for the reduction."""
        return prepared(array, self.stays)


class GradientReducer:
    """One rank's all-reduces of gradients.

    Parameters
    ----------
    rules : Rules
        The choice of buckets and algorithms.
    replicas : Communicator or None
        This replica's rank among several replicas of the process.
    workers : Communicator or None
        This process's rank among several workers.
    options : CommunicationOptions
        Default hints.
    mixed : bool
        True if replicas are on CPUs and on GPUs: the host reduces all.
    """

    def __init__(
        self,
        rules: Rules,
        replicas: Communicator | None,
        workers: Communicator | None,
        options: CommunicationOptions,
        mixed: bool = False,
    ) -> None:
        first = workers if replicas is None else replicas
        assert first is not None
        self._rules = rules
        self._first = first
        self._second = None if replicas is None else workers
        self._ranks = first.size * (1 if self._second is None else self._second.size)
        self._options = options
        self._mixed = mixed
        self._known: list[tuple[ReduceOp, tuple[Any, ...], tuple[Any, ...], BucketPlan]] = []
        self._streams: dict[int, Any] = {}  # by GPU, for the second level
        #: True if the second level of a bucket of this step has begun.
        self.has_reached_workers = False

    def all_reduce(
        self,
        arrays: Sequence[Array],
        op: ReduceOp,
        options: CommunicationOptions,
        merge: Callable[..., Any],
    ) -> list[Array]:
        """Reduce arrays together; see `begin` and `finish` for arguments and results."""
        reduction = GradientReduction(
            self, self._plan(arrays, op, options), arrays, merge, early=False
        )
        reduction.add_all(arrays)
        return reduction.finish()

    def begin(
        self,
        likes: Sequence[Array],
        op: ReduceOp,
        options: CommunicationOptions,
        merge: Callable[..., Any],
    ) -> GradientReduction | None:
        """Begin an all-reduce whose arrays follow one by one.

        Parameters
        ----------
        likes : sequence of array
            Arrays with the shapes and dtypes of the arrays that will follow, the same on every rank.
            Results are put on the devices of these arrays.
        op : ReduceOp
            SUM or MEAN.
        options : CommunicationOptions
            Hints.
        merge : callable
            `ReplicaContext.merge`, which shares the results of two levels.

        Returns
        -------
        GradientReduction or None
            None if no bucket can begin before the last array.
        """
        plan = self._plan(likes, op, options)
        if len(plan.buckets) < 2 or (plan.on_gpu and not self._follows_streams(options)):
            return None
        return GradientReduction(self, plan, likes, merge, early=True)

    def _plan(
        self, likes: Sequence[Array], op: ReduceOp, options: CommunicationOptions
    ) -> BucketPlan:
        """Return the buckets for arrays with these shapes and dtypes, cached from earlier steps."""
        arrays = tuple([(x.shape, x.dtype, x.__class__) for x in likes])
        hints = (options.bytes_per_pack, options.timeout_seconds, options.implementation)
        for known_op, known_hints, known_arrays, plan in self._known:
            if known_op is op and known_hints == hints and known_arrays == arrays:
                return plan
        merged = self._options.merge(options)
        plan = BucketPlan(self._rules, likes, op, merged, self._first, self._ranks, self._mixed)
        self._known = [(op, hints, arrays, plan), *self._known[: _MAX_PLANS - 1]]
        return plan

    def _follows_streams(self, options: CommunicationOptions) -> bool:
        """Return True unless a call on GPU arrays, on one of two levels, makes the host wait."""
        if self._second is None:
            return True
        is_ring = self._options.merge(options).implementation is CommunicationImplementation.RING
        return not is_ring and self._first.has_gpu_streams and self._second.has_gpu_streams

    @contextlib.contextmanager
    def _beside(self, works: Sequence[Work[Any]], total: Array) -> Iterator[None]:
        """Order the block after calls; on a GPU independently of later computations."""
        if not array_backend.is_on_gpu(total):
            for work in works:
                work.wait()
            yield
            return
        gpu = array_backend.device_of(total)[1]
        with device.on(gpu):
            if gpu not in self._streams:
                self._streams[gpu] = device.stream()
            side = self._streams[gpu]
            if not works:
                device.stream_wait(side, [device.event(device.present_stream())])
            with side:
                for work in works:
                    work.wait()
                yield


class GradientReduction:
    """One all-reduce of one rank: `add` each array, in any order, then `finish`."""

    def __init__(
        self,
        reducer: GradientReducer,
        plan: BucketPlan,
        likes: Sequence[Array],
        merge: Callable[..., Any],
        early: bool,
    ) -> None:
        self._reducer = reducer
        self._plan = plan
        self._likes = likes
        self._merge = merge
        #: True if this rank begins second levels early. Else they begin at the merge point.
        self._leads = early and reducer._second is not None and reducer._first.rank == 0
        self._arrays: list[Any] = [None] * len(likes)
        self._missing = [len(bucket.indices) for bucket in plan.buckets] if early else []
        #: For each bucket that has begun: the array for its result, and the calls.
        self._begun: list[tuple[Array, Sequence[Work[Any]]]] = []
        self._sent = 0  # buckets whose second level has begun

    def add(self, index: int, array: Array) -> None:
        """Add an array, which must not change until `finish` has returned.

        `finish` begins the last bucket, because no computation could overlap with it.
        """
        plan, missing = self._plan, self._missing
        self._arrays[index] = prepared(array, plan.stays)
        missing[plan.bucket_of[index]] -= 1
        while len(self._begun) < len(missing) - 1 and not missing[len(self._begun)]:
            self._begin_next(asynchronous=True)

    def add_all(self, arrays: Sequence[Array]) -> None:
        """Add all arrays, in order, to a reduction without arrays."""
        stays = self._plan.stays
        self._arrays = [
            array
            if array.__class__ is np.ndarray and array.flags.c_contiguous and array.flags.aligned
            else prepared(array, stays)
            for array in arrays
        ]

    def finish(self) -> list[Array]:
        """Wait for all buckets, and return the results in the order of the indices."""
        reducer, buckets = self._reducer, self._plan.buckets
        while len(self._begun) < len(buckets):
            self._begin_next(asynchronous=False)
        if reducer._second is None:
            return self._results()
        if self._leads:
            self._send_on()
        results: list[Array] = self._merge(
            "all_reduce", self._shared, self._likes, timeout=self._plan.timeout
        )
        return results

    def _begin_next(self, asynchronous: bool) -> None:
        """Begin the next bucket."""
        reducer, bucket = self._reducer, self._plan.buckets[len(self._begun)]
        source, target = bucket.joined([self._arrays[i] for i in bucket.indices])
        for i in bucket.indices:
            self._arrays[i] = None
        if self._leads:
            # The order of the calls must not depend on the time at which a sum is complete.
            self._send_on()
        works = bucket.reduce(reducer._first, source, target, self._plan.timeout, asynchronous)
        self._begun.append((target, works))
        if self._leads and array_backend.is_on_gpu(target):
            self._send_on()  # a stream waits for the sum, and not the host

    def _send_on(self) -> None:
        """Begin the second level of the buckets whose first level has begun."""
        second, timeout = self._reducer._second, self._plan.timeout
        assert second is not None
        while self._sent < len(self._begun):
            bucket, (total, works) = self._plan.buckets[self._sent], self._begun[self._sent]
            if self._leads:
                self._reducer.has_reached_workers = True
                with self._reducer._beside(works, total):
                    works = bucket.reduce(second, total, total, timeout, asynchronous=True)
            else:
                works = bucket.reduce(second, total, total, timeout, asynchronous=False)
            self._begun[self._sent] = total, works
            self._sent += 1

    def _results(self) -> list[Array]:
        """Wait for all calls, and return the results."""
        plan = self._plan
        results: list[Array] = [None] * len(self._arrays)  # type: ignore[list-item]
        for bucket, (total, works) in zip(plan.buckets, self._begun, strict=True):
            for work in works:
                work.wait()
            bucket.results(total, plan.op, plan.ranks, results)
        self._begun = []
        if plan.on_gpu:
            return on_devices(results, self._likes)
        return results

    def _shared(self, replicas: list[tuple[Sequence[Array]]]) -> list[list[Array]]:
        """Return this rank's results for each of the replicas, at their merge point.

        Results must be copied here. A replica's later copy would wait for newer work on replica 0's
        GPU, which may wait for that replica in NCCL.
        """
        self._send_on()
        results = self._results()
        self._reducer.has_reached_workers = False
        return [on_devices(results, likes) for (likes,) in replicas]


def on_devices(results: Sequence[Array], likes: Sequence[Array]) -> list[Array]:
    """Return results on the devices of other arrays, copied where the device differs."""
    return [
        array_backend.asarray(result, like=like)
        for result, like in zip(results, likes, strict=True)
    ]
