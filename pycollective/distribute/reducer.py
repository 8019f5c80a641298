"""`GradientReducer`: the all-reduce of the replicas' gradients, from the tape to the results.

One object for each replica. A step is ``begin``, ``add`` for each gradient, ``finish``; where all
gradients are there already, ``all_reduce`` does the three at once:

1. Gradients of one dtype are joined in **buckets**, which every rank makes alike. The strategy's
   cross-device operations say which gradients share a bucket, and by which algorithm it is reduced.
   Halves are joined as float32 and rounded once, at the end.
2. A bucket is reduced as soon as it is whole, and those before it have begun: so all ranks make the
   same calls in the same order, while the tapes still compute other gradients.
3. There are one or two **levels**: the replicas of this process, which are threads, and the workers.
   With both, the replicas sum a bucket first, and replica 0 reduces the sum over the workers; at the
   end the replicas meet, and all get replica 0's results.
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

__all__ = ["Bucket", "GradientReducer", "BucketPlan", "GradientReduction", "Rules", "parts_of"]

_PLANS = 16


class Rules(Protocol):
    """The part of cross-device operations that a reducer asks about buckets."""

    @property
    def num_packs(self) -> int:
        """In how many equal parts each bucket is reduced; 0 and 1: in one."""

    def buckets(self, likes: Sequence[Array], options: CommunicationOptions) -> list[list[int]]:
        """Return the places of the arrays of each bucket, the first of which is whole first."""

    def algorithm_on(self, gpu: bool, options: CommunicationOptions) -> str | Algorithm:
        """Return the algorithm by which the core reduces a bucket on the host, or on GPUs."""

    def stays_on_gpus(self, communicator: Communicator, options: CommunicationOptions) -> bool:
        """Return True if a bucket of GPU arrays is reduced where it lies, and not on the host."""

    def log_buckets(self, arrays: int, buckets: int, ranks: int, how: CommunicationOptions) -> None:
        """Write to the log that arrays are reduced in buckets."""


@dataclass(frozen=True)
class Bucket:
    """Arrays that are joined for one all-reduce.

    Attributes
    ----------
    places : list of int
        Which of the arrays.
    slices : list of tuple
        Where each of them begins and ends in the bucket, and its shape.
    dtype, work : dtype
        That of the arrays, and that in which they are reduced.
    op : {"sum", "mean"}
        What the core does.
    algorithm : str or Algorithm
        How it does it.
    parts : int
        In how many calls.
    """

    places: list[int]
    slices: list[tuple[int, int, tuple[int, ...]]]
    dtype: np.dtype[Any]
    work: np.dtype[Any]
    op: OpName
    algorithm: str | Algorithm
    parts: int

    def joined(self, arrays: Sequence[Array]) -> tuple[Array, Array]:
        """Return the arrays as a flat one, and where its result goes; it may be the same array."""
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
        later: bool,
    ) -> list[Work[Any]]:
        """All-reduce a flat array into another one; return the calls that are still under way."""
        if self.parts == 1 and timeout is None and not later:
            # These arguments alone: the core takes such a call without any of Python's calls.
            result: Any = communicator.all_reduce(
                source, self.op, out=target, algorithm=self.algorithm
            )
            return [] if result is target else [result]
        under_way = []
        for first, last in parts_of(source.size, self.parts):
            part = target[first:last]
            result = communicator.all_reduce(  # type: ignore[call-overload]  # later is no literal
                source[first:last],
                self.op,
                out=part,
                algorithm=self.algorithm,
                async_op=later,
                timeout=timeout,
            )
            if result is not part:
                under_way.append(result)
        return under_way

    def results(self, total: Array, op: ReduceOp, ranks: int, results: list[Any]) -> None:
        """Put the results into their places, given what the bucket was reduced to."""
        if op is ReduceOp.MEAN and self.op == "sum" and self.dtype.kind not in "iub":
            total = array_backend.asarray(total / total.dtype.type(ranks))
        total = finished(total, self.dtype, op, ranks)
        for place, (begin, end, shape) in zip(self.places, self.slices, strict=True):
            results[place] = total[begin:end].reshape(shape)


def parts_of(size: int, count: int) -> list[tuple[int, int]]:
    """Return the beginning and end of each of ``count`` equal parts; the last takes the rest."""
    bounds = [size // count * k for k in range(count)] + [size]
    return [(a, b) for a, b in itertools.pairwise(bounds) if b > a] or [(0, size)]


def prepared(array: Array, stays: bool) -> Array:
    """Return an array as it is reduced: contiguous, and on the host unless it stays where it lies."""
    array = array if stays else array_backend.to_numpy(array)
    return array if is_fit(array) else array.copy(order="C")


def empty_like(flat: Array) -> Array:
    """Return uninitialised memory beside a flat array; on the host, such as was used before."""
    if array_backend.on_host(flat):
        return workspace.empty(flat.shape, flat.dtype)
    return array_backend.empty(flat.shape, flat.dtype, flat)


class BucketPlan:
    """The buckets for arrays of given shapes and dtypes, alike on every rank.

    Parameters
    ----------
    rules : Rules
        Say which arrays share a bucket.
    likes : sequence of array
        Arrays of these shapes and dtypes.
    op : ReduceOp
        SUM or MEAN.
    options : CommunicationOptions
        Hints.
    communicator : Communicator
        By which the arrays are reduced first.
    ranks : int
        How many ranks there are in all.
    mixed : bool
        Whether arrays of other ranks lie on other kinds of devices, so that the host reduces all.
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
        places = rules.buckets(likes, options)
        if communicator.rank == 0:
            rules.log_buckets(len(likes), len(places), communicator.size, options)
        self.op = op
        self.ranks = ranks
        self.timeout = options.timeout_seconds
        #: Whether results go to GPUs, and whether they are computed there.
        self.on_gpu = array_backend.any_on_gpu(likes)
        self.stays = self.on_gpu and not mixed and rules.stays_on_gpus(communicator, options)
        self.buckets = []
        for members in places:
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
        self.bucket_of = {i: k for k, members in enumerate(places) for i in members}

    def prepared(self, array: Array) -> Array:
        """Return an array as it is reduced."""
        return prepared(array, self.stays)


class GradientReducer:
    """One rank's all-reduces of gradients.

    Parameters
    ----------
    rules : Rules
        Say how buckets are made, and how the core reduces them.
    replicas : Communicator or None
        This replica's rank among those of the process, if they are several.
    workers : Communicator or None
        This process's rank among the workers, if they are several.
    options : CommunicationOptions
        Hints that hold where a call says nothing else.
    mixed : bool
        Whether replicas are on CPUs and on GPUs: the host reduces all.
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
        self._streams: dict[int, Any] = {}  # of GPUs: in which sums of the two levels wait
        #: Whether a bucket of the step has been begun among the workers, on the second level.
        self.has_reached_workers = False

    def all_reduce(
        self,
        arrays: Sequence[Array],
        op: ReduceOp,
        options: CommunicationOptions,
        meet: Callable[..., Any],
    ) -> list[Array]:
        """Reduce arrays that are all there; arguments and results as of `begin` and `finish`."""
        reduction = GradientReduction(
            self, self._plan(arrays, op, options), arrays, meet, early=False
        )
        reduction.add_all(arrays)
        return reduction.finish()

    def begin(
        self,
        likes: Sequence[Array],
        op: ReduceOp,
        options: CommunicationOptions,
        meet: Callable[..., Any],
    ) -> GradientReduction | None:
        """Begin an all-reduce whose arrays come one by one, and are reduced as they come.

        Parameters
        ----------
        likes : sequence of array
            Arrays of the shapes and dtypes of those that will come, the same on every rank. The
            results are put where these lie.
        op : ReduceOp
            SUM or MEAN.
        options : CommunicationOptions
            Hints.
        meet : callable
            `ReplicaContext.meet`: shares the results where there are two levels.

        Returns
        -------
        GradientReduction or None
            None if nothing can begin before all arrays are there.
        """
        plan = self._plan(likes, op, options)
        if len(plan.buckets) < 2 or (plan.on_gpu and not self._follows_streams(options)):
            return None
        return GradientReduction(self, plan, likes, meet, early=True)

    def _plan(
        self, likes: Sequence[Array], op: ReduceOp, options: CommunicationOptions
    ) -> BucketPlan:
        """Return the buckets for such arrays, remembered from the steps before."""
        arrays = tuple([(x.shape, x.dtype, x.__class__) for x in likes])
        hints = (options.bytes_per_pack, options.timeout_seconds, options.implementation)
        for known_op, known_hints, known_arrays, plan in self._known:
            if known_op is op and known_hints == hints and known_arrays == arrays:
                return plan
        merged = self._options.merge(options)
        plan = BucketPlan(self._rules, likes, op, merged, self._first, self._ranks, self._mixed)
        self._known = [(op, hints, arrays, plan), *self._known[: _PLANS - 1]]
        return plan

    def _follows_streams(self, options: CommunicationOptions) -> bool:
        """Return True if no call on GPU arrays makes the host wait, on either of two levels."""
        if self._second is None:
            return True
        is_ring = self._options.merge(options).implementation is CommunicationImplementation.RING
        return not is_ring and self._first.has_gpu_streams and self._second.has_gpu_streams

    @contextlib.contextmanager
    def _beside(self, works: Sequence[Work[Any]], total: Array) -> Iterator[None]:
        """Let what is done in the block come after calls; on a GPU not after what is computed since."""
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
    """One all-reduce of one rank: `add` every array, in any order, then `finish`."""

    def __init__(
        self,
        reducer: GradientReducer,
        plan: BucketPlan,
        likes: Sequence[Array],
        meet: Callable[..., Any],
        early: bool,
    ) -> None:
        self._reducer = reducer
        self._plan = plan
        self._likes = likes
        self._meet = meet
        #: Whether this rank takes each bucket on to the workers, as soon as the replicas have summed it.
        self._leads = early and reducer._second is not None and reducer._first.rank == 0
        self._arrays: list[Any] = [None] * len(likes)
        self._missing = [len(bucket.places) for bucket in plan.buckets] if early else []
        #: Of each bucket that has begun: where its result goes, and the calls under way.
        self._begun: list[tuple[Array, Sequence[Work[Any]]]] = []
        self._sent = 0  # to the second level

    def add(self, place: int, array: Array) -> None:
        """Give an array, which must be left alone until `finish` has returned.

        The last bucket is left to `finish`: nothing is computed while it is reduced.
        """
        plan, missing = self._plan, self._missing
        self._arrays[place] = prepared(array, plan.stays)
        missing[plan.bucket_of[place]] -= 1
        while len(self._begun) < len(missing) - 1 and not missing[len(self._begun)]:
            self._begin_next(later=True)

    def add_all(self, arrays: Sequence[Array]) -> None:
        """Give all arrays, in order, of which none was given before."""
        stays = self._plan.stays
        self._arrays = [
            array
            if array.__class__ is np.ndarray and array.flags.c_contiguous and array.flags.aligned
            else prepared(array, stays)
            for array in arrays
        ]

    def finish(self) -> list[Array]:
        """Wait until all is reduced, and return the results in the order of the places."""
        reducer, buckets = self._reducer, self._plan.buckets
        while len(self._begun) < len(buckets):
            self._begin_next(later=False)
        if reducer._second is None:
            return self._results()
        if self._leads:
            self._send_on()
        results: list[Array] = self._meet(
            "all_reduce", self._shared, self._likes, timeout=self._plan.timeout
        )
        return results

    def _begin_next(self, later: bool) -> None:
        """Begin the next bucket, whose arrays are all there; ``later``: behind the computation."""
        reducer, bucket = self._reducer, self._plan.buckets[len(self._begun)]
        source, target = bucket.joined([self._arrays[place] for place in bucket.places])
        for place in bucket.places:
            self._arrays[place] = None
        if self._leads:
            # Only now, in the order of the buckets, which does not depend on when a sum is there.
            self._send_on()
        works = bucket.reduce(reducer._first, source, target, self._plan.timeout, later)
        self._begun.append((target, works))
        if self._leads and array_backend.is_on_gpu(
            target
        ):  # streams wait for the sum, and not the host
            self._send_on()

    def _send_on(self) -> None:
        """Reduce over the workers what was begun among the replicas of this process."""
        second, timeout = self._reducer._second, self._plan.timeout
        assert second is not None
        while self._sent < len(self._begun):
            bucket, (total, works) = self._plan.buckets[self._sent], self._begun[self._sent]
            if self._leads:
                self._reducer.has_reached_workers = True
                with self._reducer._beside(works, total):
                    works = bucket.reduce(second, total, total, timeout, later=True)
            else:
                works = bucket.reduce(second, total, total, timeout, later=False)
            self._begun[self._sent] = total, works
            self._sent += 1

    def _results(self) -> list[Array]:
        """Wait for what is under way, and return the results."""
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
        """Return this rank's results for each of the replicas, which have met.

        Only while the replicas meet may results be copied: a copy that one of them makes later would
        wait for what replica 0 has given its GPU since, which may wait for that replica in NCCL.
        """
        self._send_on()
        results = self._results()
        self._reducer.has_reached_workers = False
        return [on_devices(results, likes) for (likes,) in replicas]


def on_devices(results: Sequence[Array], likes: Sequence[Array]) -> list[Array]:
    """Return results where other arrays lie: themselves, or copies on the GPU of each one's like."""
    return [
        array_backend.asarray(result, like=like)
        for result, like in zip(results, likes, strict=True)
    ]
