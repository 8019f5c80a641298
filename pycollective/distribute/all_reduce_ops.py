"""Cross-device operations that run the core's all-reduces, and which one is the default."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pycollective import array_backend, nccl
from pycollective.arguments import OpName
from pycollective.communicator import (
    Communicator,
    Work,
    all_reduce_together,
    local_group,
    on_device,
)
from pycollective.communicator.arrays import is_fit
from pycollective.communicator.packing import PackedReduction, join, packs, split
from pycollective.distribute.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from pycollective.distribute.cross_device_ops import (
    Array,
    CrossDeviceOps,
    ReductionToOneDevice,
    ReplicaReduction,
    check_alike,
    devices_of,
    finished,
    joined_slices,
    log_few,
    on_destinations,
    work_dtype,
)
from pycollective.distribute.devices import Device
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.values import Mirrored, PerReplica
from pycollective.errors import NcclNotFoundError
from pycollective.tensor import IndexedSlices, Tensor, as_tensor

__all__ = [
    "CollectiveAllReduce",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "RingAllReduce",
    "default_cross_device_ops",
]


class _ScheduledOps(CrossDeviceOps):
    """Cross-device operations that run an all-reduce of the core, in packs.

    Values whose destinations are not the replicas themselves, and `IndexedSlices`, are brought
    together on one device.
    """

    algorithm: str
    called: str  # in messages

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(f"{self.called} requires num_packs >= 0, but {num_packs} is specified")
        self._num_packs = num_packs
        self._groups: dict[int, list[Communicator]] = {}
        self._groups_lock = threading.Lock()
        self._one_device = ReductionToOneDevice()

    # In cross-replica context -------------------------------------------------------------------

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce one value."""
        return self.batch_reduce_implementation(
            reduce_op, [(per_replica_value, destinations)], options
        )[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values, in packs."""
        results: list[Any] = [None] * len(value_destination_pairs)
        together: list[int] = []
        sparse = 0
        for i, (value, destinations) in enumerate(value_destination_pairs):
            if any(isinstance(v, IndexedSlices) for v in value.values):
                sparse += 1
                results[i] = on_destinations(joined_slices(value.values, reduce_op), destinations)
            elif devices_of(destinations) != devices_of(value):
                results[i] = self._one_device.reduce_implementation(
                    reduce_op, value, destinations, options
                )
            else:
                together.append(i)
        if sparse:
            self._log_slices(sparse, len(value_destination_pairs[0][0].values), options)
        if together:
            rows = [
                [as_tensor(v).array for v in value_destination_pairs[i][0].values] for i in together
            ]
            for i, components in zip(
                together, self._reduce_rows(rows, reduce_op, options), strict=True
            ):
                results[i] = Mirrored(components) if len(components) > 1 else components[0]
        return results

    def _reduce_rows(
        self, rows: list[list[Array]], reduce_op: ReduceOp, options: CommunicationOptions
    ) -> list[list[Tensor]]:
        """Return the replicas' results for the replicas' arrays of each value."""
        replicas = len(rows[0])
        for row in rows:
            if len(row) != replicas:
                raise ValueError(
                    "the values of one batch_reduce come from different numbers of replicas"
                )
            check_alike(row)
        results: list[list[Tensor]] = [[] for _ in rows]
        likes = [row[0] for row in rows]
        members_of_packs = self._packs_of(likes, options)
        self._log_packs(likes, members_of_packs, replicas, options)
        with self._groups_lock:  # reductions of several user threads must not mix
            group = self._groups.get(replicas)
            if group is None:
                group = self._groups[replicas] = local_group(replicas)
            for members in members_of_packs:
                dtype = likes[members[0]].dtype
                work = work_dtype(dtype, reduce_op)
                stay = all(array_backend.is_on_gpu(x) for x in rows[members[0]]) and (
                    self._reduces_on_gpus(group[0], options)
                )
                flats = [
                    _joined([_prepared(rows[i][r], stay) for i in members], work)
                    for r in range(replicas)
                ]
                totals = self._all_reduce_in_shares(group, flats, reduce_op, options)
                for r, total in enumerate(totals):
                    with array_backend.beside(total):
                        done = finished(total, dtype, reduce_op, replicas)
                    parts = split(done, [likes[i] for i in members])
                    for i, part in zip(members, parts, strict=True):
                        results[i].append(Tensor(array_backend.asarray(part, like=rows[i][r])))
        return results

    def _all_reduce_in_shares(
        self,
        group: Sequence[Communicator],
        flats: Sequence[Array],
        reduce_op: ReduceOp,
        options: CommunicationOptions,
    ) -> list[Array]:
        """Return every replica's total of the replicas' packs, each reduced in so many shares.

        On GPUs by a thread for each replica, whose calls wait for the others.
        """
        op, shares = _core_op(reduce_op, flats[0].dtype), max(1, self._num_packs)
        algorithm = self._algorithm_among(flats, options)
        on_gpus = array_backend.is_on_gpu(flats[0])
        if (
            on_gpus
            and algorithm == "auto"
            and len({array_backend.device_of(x) for x in flats}) == 1
        ):
            # Results never change: replicas of one memory share them, and it is written once.
            totals = [array_backend.empty(flats[0].shape, flats[0].dtype, flats[0])] * len(flats)
        else:
            totals = [array_backend.empty(flat.shape, flat.dtype, flat) for flat in flats]
        if not on_gpus:
            for first, last in _shares(flats[0].size, shares):
                inputs, outputs = ([x[first:last] for x in arrays] for arrays in (flats, totals))
                all_reduce_together(group, inputs, op, algorithm, outputs)
            return totals

        def reduce(communicator: Communicator, flat: Array, total: Array, stream: Any) -> None:
            try:
                with array_backend.beside(flat), stream:
                    for first, last in _shares(flat.size, shares):
                        communicator.all_reduce(
                            flat[first:last], op, out=total[first:last], algorithm=algorithm
                        )
            except BaseException as error:
                self._groups.pop(len(group), None)  # a group that failed is dead
                communicator.abort(f"replica {communicator.rank} failed: {error}")
                raise

        streams = [nccl.device.stream_on(array_backend.device_of(flat)[1]) for flat in flats]
        with ThreadPoolExecutor(len(group)) as threads:
            for done in [
                threads.submit(reduce, *work)
                for work in zip(group, flats, totals, streams, strict=True)
            ]:
                done.result()
        return totals

    # From the replicas --------------------------------------------------------------------------

    def takes_part_from_replicas(self) -> bool:
        """Return True unless a subclass has its own hooks, which must then be called."""
        mine, base = type(self), _ScheduledOps
        return (
            mine.reduce_implementation is base.reduce_implementation
            and mine.batch_reduce_implementation is base.batch_reduce_implementation
            and mine._all_reduce is base._all_reduce
        )

    def begin_all_reduce(
        self,
        communicator: Communicator,
        reduce_op: ReduceOp,
        likes: Sequence[Array],
        options: CommunicationOptions,
        async_op: bool,
    ) -> ReplicaReduction | None:
        """Begin one replica's part, in packs; one pack cannot begin before all arrays are there."""
        members_of_packs = self._packs_of(likes, options)
        if async_op and len(members_of_packs) == 1:
            return None
        if communicator.rank == 0:
            self._log_packs(likes, members_of_packs, communicator.size, options)
        shares = max(1, self._num_packs)
        on_gpus = array_backend.any_on_gpu(likes)
        stay = on_gpus and self._reduces_on_gpus(communicator, options)

        def begin(source: Array, target: Array, is_last: bool) -> list[Work[Any]]:
            under_way = []
            # Nothing is computed while the last pack is reduced: it takes no thread of its own.
            behind = async_op and not is_last
            for first, last in _shares(source.size, shares):
                part = target[first:last]
                result: Any = communicator.all_reduce(  # type: ignore[call-overload]  # no literal
                    source[first:last],
                    _core_op(reduce_op, source.dtype),
                    out=part,
                    algorithm=self._algorithm_of(source, options),
                    async_op=behind,
                    timeout=options.timeout_seconds,
                )
                if result is not part:  # it goes on, also where it was not asked to: among workers
                    under_way.append(result)
            return under_way

        return _PackedReplicaReduction(
            members_of_packs,
            begin,
            partial(_prepared, stays=stay),
            likes,
            reduce_op,
            communicator.size,
        )

    # Packs and algorithms -----------------------------------------------------------------------

    def _packs_of(self, likes: Sequence[Array], options: CommunicationOptions) -> list[list[int]]:
        """Return the places of the arrays of each pack."""
        if self._num_packs == 0:
            return [[i] for i in range(len(likes))]
        return packs(likes, sys.maxsize)

    def _reduces_on_gpus(self, communicator: Communicator, options: CommunicationOptions) -> bool:
        """Whether arrays on GPUs are reduced where they lie; the log says it if they are not."""
        if on_device.is_possible(communicator):
            return True
        log_few(
            "%s of GPU arrays goes over the host's memory, which is slow: %s",
            self.called,
            on_device.why_not(communicator),
            level=logging.WARNING,
            times=1,
        )
        return False

    def _algorithm_of(self, array: Array, options: CommunicationOptions) -> str:
        """Return the algorithm by which an array is reduced."""
        return self.algorithm_for(options)

    def _algorithm_among(self, arrays: Sequence[Array], options: CommunicationOptions) -> str:
        """Return the algorithm by which the replicas' arrays are reduced, all at once."""
        return self._algorithm_of(arrays[0], options)

    def algorithm_for(self, options: CommunicationOptions) -> str:
        """Return the algorithm of the core that runs."""
        return self.algorithm

    def _log_packs(
        self,
        likes: Sequence[Array],
        members_of_packs: list[list[int]],
        replicas: int,
        options: CommunicationOptions,
    ) -> None:
        log_few(
            "batch_all_reduce: %d all-reduces with algorithm = %s, num_packs = %d",
            len(likes),
            self.algorithm_for(options),
            self._num_packs or len(likes),
        )

    def _log_slices(self, count: int, replicas: int, options: CommunicationOptions) -> None:
        log_few(
            "Efficient allreduce is not supported for %d IndexedSlices",
            count,
            level=logging.WARNING,
        )

    def describe(self) -> str:
        """Name the algorithm."""
        return f"{type(self).__name__} (algorithm {self.algorithm!r})"


class _PackedReplicaReduction(ReplicaReduction):
    def __init__(
        self,
        members_of_packs: list[list[int]],
        begin: Any,
        prepared: Callable[[Array], Array],
        likes: Sequence[Array],
        reduce_op: ReduceOp,
        replicas: int,
    ) -> None:
        self._likes = likes
        self._prepared = prepared
        self._op = reduce_op
        self._replicas = replicas
        dtypes = [work_dtype(likes[pack[0]].dtype, reduce_op) for pack in members_of_packs]
        self._packed = PackedReduction(members_of_packs, begin, dtypes, last_waits=True)

    def add(self, place: int, array: Array) -> None:
        self._packed.add(place, self._prepared(array))

    def add_all(self, arrays: Sequence[Array]) -> None:
        self._packed.add_all([self._prepared(array) for array in arrays])

    def flush(self) -> None:
        self._packed.flush()

    def finish(self) -> list[Array]:
        likes = self._likes
        results: list[Array] = [None] * len(likes)
        for members, total in self._packed.totals():
            total = finished(total, likes[members[0]].dtype, self._op, self._replicas)
            parts = split(total, [likes[i] for i in members])
            for i, part in zip(members, parts, strict=True):
                results[i] = array_backend.asarray(part, like=likes[i])
        return results


class CollectiveAllReduce(_ScheduledOps):
    """The core's all-reduce, by the algorithm that is fastest for the size: the default on CPUs.

    What TensorFlow calls its RING implementation. `CommunicationOptions` choose: with
    ``bytes_per_pack`` gradients are joined in packs of that size, from the last to the first; with
    ``implementation="RING"`` it really is a ring.
    """

    algorithm = "auto"
    called = "Collective all-reduce"

    def __init__(self) -> None:
        super().__init__()

    def algorithm_for(self, options: CommunicationOptions) -> str:
        """Return the table's choice, or the ring if that is asked for."""
        return "ring" if _is_ring(options) else self.algorithm

    def _packs_of(self, likes: Sequence[Array], options: CommunicationOptions) -> list[list[int]]:
        return _packs_from_the_end(likes, options.bytes_per_pack or sys.maxsize)

    def _log_packs(
        self,
        likes: Sequence[Array],
        members_of_packs: list[list[int]],
        replicas: int,
        options: CommunicationOptions,
    ) -> None:
        log_few(
            "Collective all_reduce tensors: %d all_reduces, num_devices = %d, group_size = %d, "
            "implementation = %s, num_packs = %d",
            len(likes),
            replicas,
            replicas,
            options.implementation.value,
            len(members_of_packs),
        )

    def _log_slices(self, count: int, replicas: int, options: CommunicationOptions) -> None:
        log_few(
            "Collective all_reduce IndexedSlices: %d all_reduces, num_devices = %d, "
            "group_size = %d, implementation = %s",
            count,
            replicas,
            replicas,
            options.implementation.value,
        )


class RingAllReduce(_ScheduledOps):
    """All-reduce in a ring of the replicas: the least data moved.

    Parameters
    ----------
    num_packs : int
        Into how many packs the arrays of one call are joined; 0: none are joined.

    Raises
    ------
    ValueError
        If ``num_packs`` is negative.
    """

    algorithm = "ring"
    called = "Ring all-reduce"


class _OfDevices(_ScheduledOps):
    """What TensorFlow's operations between GPUs have in common: they do not gather."""

    def _gather_implementation(
        self,
        per_replica_value: PerReplica,
        destinations: Any,
        axis: int,
        options: CommunicationOptions,
    ) -> Any:
        """Join the components on one device, and say so."""
        log_few(
            "gather/all_gather with NCCL or HierarchicalCopy is not supported. Falling back to gather "
            "on one device and then broadcast.",
            level=logging.WARNING,
            times=3,
        )
        return super()._gather_implementation(per_replica_value, destinations, axis, options)


class HierarchicalCopyAllReduce(_OfDevices):
    """All-reduce in two halves that exchange their sums; right for every number of devices.

    Unlike TensorFlow's it also runs between CPU replicas, and reduces the last device of an odd
    number too.

    Parameters
    ----------
    num_packs : int
        Into how many packs the arrays of one call are joined; 0: none are joined.

    Raises
    ------
    ValueError
        If ``num_packs`` is negative.
    """

    algorithm = "hierarchical_copy"
    called = "HierarchicalCopy"


class ToOneGpu(_ScheduledOps):
    """What `ReductionToOneDevice` is between GPUs: the core's schedule of that name, in one pack."""

    algorithm = "reduce_to_one"
    called = "Reduction to one device"

    def _algorithm_among(self, arrays: Sequence[Array], options: CommunicationOptions) -> str:
        """Return the schedule; where all are on the one device, one launch adds them in its order."""
        places = {array_backend.device_of(array) for array in arrays}
        return self.algorithm if len(places) > 1 else "auto"

    def _log_packs(self, *_: Any) -> None:
        """Say nothing: `ReductionToOneDevice` does."""


class NcclAllReduce(_OfDevices):
    """All-reduce by NVIDIA's NCCL between GPUs, each replica from its own thread.

    Where NCCL cannot be used (there is none, or replicas are on one GPU) GPU arrays are reduced by the
    core's own device executor, or in the host's memory if the core has no CUDA part; a line of the log
    says so. What lies on CPUs is brought together on one device, as by `ReductionToOneDevice`. With
    ``implementation="RING"`` in the options all go through a ring of the core.

    Parameters
    ----------
    num_packs : int
        Into how many packs the arrays of one call are joined; 0: none are joined. With 1,
        ``bytes_per_pack`` of the options holds, if it is set: `Optimizer.minimize` sets it, so that
        gradients are reduced while others are computed, on each GPU's stream for that.

    Raises
    ------
    ValueError
        If ``num_packs`` is negative.
    """

    algorithm = "reduce_to_one"
    called = "NCCL all-reduce"

    def describe(self) -> str:
        """Name NCCL's version, or say that it is not what runs."""
        try:
            what = f"NCCL {nccl.library().version_text}"
        except NcclNotFoundError:
            where = (
                "in the host's memory" if on_device.runtime() is None else "by the core's kernels"
            )
            what = f"no NCCL here: {where}"
        return f"{type(self).__name__} ({what})"

    def algorithm_for(self, options: CommunicationOptions) -> str:
        """Return the core's algorithm, for what is not NCCL's."""
        return "ring" if _is_ring(options) else self.algorithm

    def _packs_of(self, likes: Sequence[Array], options: CommunicationOptions) -> list[list[int]]:
        """Return the places of the arrays of each pack, of which the first can begin early."""
        if self._num_packs == 1 and options.bytes_per_pack:
            return _packs_from_the_end(likes, options.bytes_per_pack)
        return super()._packs_of(likes, options)

    def _reduces_on_gpus(self, communicator: Communicator, options: CommunicationOptions) -> bool:
        """Return True, unless a ring is asked for that the GPUs' executor is not there for."""
        return not _is_ring(options) or super()._reduces_on_gpus(communicator, options)

    def _algorithm_of(self, array: Array, options: CommunicationOptions) -> str:
        """Return NCCL's choice on GPUs, which "auto" means there."""
        on_gpus = array_backend.is_on_gpu(array) and not _is_ring(options)
        return "auto" if on_gpus else self.algorithm_for(options)


def default_cross_device_ops(devices: Sequence[Device]) -> tuple[CrossDeviceOps, str]:
    """Return the cross-device operations for replicas on these devices, and why these."""
    kinds = {device.kind for device in devices}
    if kinds == {"CPU"}:
        return CollectiveAllReduce(), "the default where all devices are CPUs"
    if kinds == {"GPU"}:
        shared = len({device.memory for device in devices}) < len(devices)
        besides = ", of which some are on one processor, where NCCL is not used" * shared
        return NcclAllReduce(), f"the default where all devices are GPUs{besides}"
    return ReductionToOneDevice(), "the default where CPUs and GPUs are mixed"


def _core_op(reduce_op: ReduceOp, dtype: Any) -> OpName:
    return "mean" if reduce_op is ReduceOp.MEAN and dtype.kind not in "iub" else "sum"


def _is_ring(options: CommunicationOptions) -> bool:
    return options.implementation is CommunicationImplementation.RING


def _packs_from_the_end(likes: Sequence[Array], bytes_per_pack: int) -> list[list[int]]:
    """Return packs of so many bytes, made from the end: the last gradients are ready first."""
    last = len(likes) - 1
    return [sorted([last - i for i in pack]) for pack in packs(likes[::-1], bytes_per_pack)]


def _prepared(array: Array, stays: bool) -> Array:
    """Return an array as it is reduced: contiguous, and on the host unless it stays where it lies."""
    array = array if stays else array_backend.to_numpy(array)
    return array if is_fit(array) else array.copy(order="C")


def _joined(arrays: list[Array], dtype: Any) -> Array:
    """Return one replica's arrays as a flat one."""
    with array_backend.beside(arrays[0]):
        return join(arrays, dtype)[0]


def _shares(size: int, count: int) -> list[tuple[int, int]]:
    """Return where each of ``count`` equal shares begins and ends; the last takes the rest."""
    bounds = [size // count * k for k in range(count)] + [size]
    return [(a, b) for a, b in itertools.pairwise(bounds) if b > a] or [(0, size)]
