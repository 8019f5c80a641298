"""The cross-device operations that there are, and which one is the default."""

from __future__ import annotations

import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from pycollective import array_backend, nccl
from pycollective.array_backend import Array
from pycollective.communicator import Communicator, all_reduce_together, local_group, on_device
from pycollective.communicator.packing import packs
from pycollective.distribute.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from pycollective.distribute.cross_device_ops import (
    CrossDeviceOps,
    check_alike,
    devices_of,
    joined_slices,
    log_few,
    on_destinations,
    placed_on,
)
from pycollective.distribute.devices import Device, parse_device
from pycollective.distribute.reduce_op import ReduceOp, finished, work_dtype
from pycollective.distribute.reducer import Bucket, Plan, parts_of
from pycollective.distribute.values import Mirrored, PerReplica
from pycollective.errors import NcclNotFoundError
from pycollective.tensor import IndexedSlices, Tensor, as_tensor

__all__ = [
    "CollectiveAllReduce",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "RingAllReduce",
    "ScheduledOps",
    "default_cross_device_ops",
    "log_place",
    "sum_in_order",
]


class ReductionToOneDevice(CrossDeviceOps):
    """Bring all values to one device, reduce them there in replica order, and give the result out.

    Between GPUs, where the core has kernels for them, that is a schedule of its device executor, which
    reads the others' memory where it reaches it, and joins values in a pack.

    Parameters
    ----------
    reduce_to_device : str, optional
        The device that reduces; by default the first destination.
    accumulation_fn : callable, optional
        Takes the list of the replicas' tensors and returns their sum; by default they are added in
        replica order.

    Raises
    ------
    ValueError
        If this machine has no such device.
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[list[Tensor]], Any] | None = None,
    ) -> None:
        if reduce_to_device is not None:
            parse_device(reduce_to_device)
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn
        self._between_gpus: CrossDeviceOps | None = None

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce one value, by the user's accumulation if there is one."""
        if self._goes_between_gpus(per_replica_value, destinations):
            pairs = [(per_replica_value, destinations)]
            return self._reduced_between_gpus(reduce_op, pairs, options)[0]
        values = per_replica_value.values
        devices = devices_of(destinations)
        here = devices[0] if self.reduce_to_device is None else parse_device(self.reduce_to_device)
        log_place(here, destinations)
        total: Any
        if any(isinstance(v, IndexedSlices) for v in values):
            return on_destinations(joined_slices(values, reduce_op), destinations)
        with here.in_use():
            tensors = [placed_on(as_tensor(v), here) for v in values]
            if self.accumulation_fn is None:
                total = Tensor(sum_in_order([t.array for t in tensors], reduce_op))
            else:
                total = as_tensor(self.accumulation_fn(tensors))
                if reduce_op is ReduceOp.MEAN:
                    total = total / len(values)
        return on_destinations(total, destinations)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values: in a pack between GPUs, one after the other elsewhere."""
        pairs = value_destination_pairs
        own = type(self).reduce_implementation is not ReductionToOneDevice.reduce_implementation
        results: list[Any] = [None] * len(pairs)
        packs: defaultdict[tuple[Device, ...], list[int]] = defaultdict(list)
        for i, (value, destinations) in enumerate(pairs):
            if not own and self._goes_between_gpus(value, destinations):
                packs[devices_of(value)].append(i)
            else:
                results[i] = self.reduce_implementation(reduce_op, value, destinations, options)
        for places in packs.values():
            reduced = self._reduced_between_gpus(reduce_op, [pairs[i] for i in places], options)
            for i, result in zip(places, reduced, strict=True):
                results[i] = result
        return results

    def _goes_between_gpus(self, value: PerReplica, destinations: Any) -> bool:
        """Whether the core's device executor can do it: from GPUs to the same ones, by one of them."""
        if self.accumulation_fn is not None or len(value.values) < 2 or on_device.runtime() is None:
            return False
        devices = devices_of(value)
        if {device.kind for device in devices} != {"GPU"} or devices_of(destinations) != devices:
            return False
        there = self.reduce_to_device
        return (there is None or parse_device(there).memory == devices[0]) and not any(
            isinstance(v, IndexedSlices) for v in value.values
        )

    def _reduced_between_gpus(
        self,
        reduce_op: ReduceOp,
        pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        if self._between_gpus is None:
            self._between_gpus = ToOneGpu()
        for _, destinations in pairs:
            log_place(devices_of(destinations)[0], destinations)
        return self._between_gpus.batch_reduce_implementation(reduce_op, pairs, options)

    def describe(self) -> str:
        """Name the device that reduces, if it was chosen."""
        device = "" if self.reduce_to_device is None else f" {self.reduce_to_device}"
        return type(self).__name__ + device


class ScheduledOps(CrossDeviceOps):
    """Cross-device operations that run an all-reduce of the core, in buckets.

    In replica context a `GradientReducer` runs it, by what is said here of buckets. Values whose
    destinations are not the replicas themselves, and `IndexedSlices`, are brought together on one
    device.
    """

    algorithm: str
    called: str  # in messages

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(f"{self.called} requires num_packs >= 0, but {num_packs} is specified")
        self.num_packs = num_packs
        self._groups: dict[int, list[Communicator]] = {}
        self._groups_lock = threading.Lock()
        self._one_device = ReductionToOneDevice()

    # What a reducer asks ------------------------------------------------------------------------

    def takes_part_from_replicas(self) -> bool:
        """Return True unless a subclass has its own hooks, which must then be called."""
        mine, base = type(self), ScheduledOps
        return (
            mine.reduce_implementation is base.reduce_implementation
            and mine.batch_reduce_implementation is base.batch_reduce_implementation
            and mine._all_reduce is base._all_reduce
        )

    def buckets(self, likes: Sequence[Array], options: CommunicationOptions) -> list[list[int]]:
        """Return the places of the arrays of each bucket."""
        if self.num_packs == 0:
            return [[i] for i in range(len(likes))]
        return packs(likes, sys.maxsize)

    def algorithm_on(self, gpu: bool, options: CommunicationOptions) -> str:
        """Return the algorithm of the core that runs on the host, or on GPUs."""
        return self.algorithm

    def stays_on_gpus(self, communicator: Communicator, options: CommunicationOptions) -> bool:
        """Return True if GPU arrays are reduced where they lie; the log says it if they are not."""
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

    def log_buckets(
        self, arrays: int, buckets: int, ranks: int, options: CommunicationOptions
    ) -> None:
        """Write TensorFlow's line to the log."""
        log_few(
            "batch_all_reduce: %d all-reduces with algorithm = %s, num_packs = %d",
            arrays,
            self.algorithm_on(False, options),
            self.num_packs or arrays,
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
        """Reduce several values, in buckets."""
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
            reduced = self._reduce_rows(rows, reduce_op, options)
            for i, parts in zip(together, zip(*reduced, strict=True), strict=True):
                results[i] = Mirrored(parts) if len(parts) > 1 else parts[0]
        return results

    def _reduce_rows(
        self, rows: list[list[Array]], reduce_op: ReduceOp, options: CommunicationOptions
    ) -> list[list[Tensor]]:
        """Return for each replica its results, given the replicas' arrays of each value."""
        replicas = len(rows[0])
        for row in rows:
            if len(row) != replicas:
                raise ValueError(
                    "the values of one batch_reduce come from different numbers of replicas"
                )
            check_alike(row)
        likes = [row[0] for row in rows]
        mixed = not all(array_backend.is_on_gpu(x) for row in rows for x in row)
        results: list[list[Any]] = [[None] * len(rows) for _ in range(replicas)]
        with self._groups_lock:  # reductions of several user threads must not mix
            group = self._groups.get(replicas)
            if group is None:
                group = self._groups[replicas] = local_group(replicas)
            plan = Plan(self, likes, reduce_op, options, group[0], replicas, mixed)
            for bucket in plan.buckets:
                flats = []
                for r in range(replicas):
                    arrays = [plan.prepared(rows[i][r]) for i in bucket.places]
                    with array_backend.beside(arrays[0]):
                        flats.append(bucket.joined(arrays)[0])
                totals = self._totals(group, bucket, flats)
                for total, found in zip(totals, results, strict=True):
                    with array_backend.beside(total):
                        bucket.results(total, reduce_op, replicas, found)
        return [
            [
                Tensor(array_backend.asarray(x, like=row[r]))
                for x, row in zip(found, rows, strict=True)
            ]
            for r, found in enumerate(results)
        ]

    def _algorithm_among(self, bucket: Bucket, arrays: Sequence[Array]) -> str:
        """Return the algorithm by which the replicas' arrays are reduced, all at once."""
        return bucket.algorithm

    def _totals(
        self, group: Sequence[Communicator], bucket: Bucket, flats: Sequence[Array]
    ) -> list[Array]:
        """Return every replica's total of the replicas' buckets, each reduced in its parts.

        On GPUs by a thread for each replica, whose calls wait for the others.
        """
        algorithm = self._algorithm_among(bucket, flats)
        on_gpus = array_backend.is_on_gpu(flats[0])
        parts = parts_of(flats[0].size, bucket.parts)
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
            for first, last in parts:
                inputs, outputs = ([x[first:last] for x in arrays] for arrays in (flats, totals))
                all_reduce_together(group, inputs, bucket.op, algorithm, outputs)
            return totals

        def reduce(communicator: Communicator, flat: Array, total: Array, stream: Any) -> None:
            try:
                with array_backend.beside(flat), stream:
                    for first, last in parts:
                        communicator.all_reduce(
                            flat[first:last], bucket.op, out=total[first:last], algorithm=algorithm
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


class CollectiveAllReduce(ScheduledOps):
    """The core's all-reduce, by the algorithm that is fastest for the size: the default on CPUs.

    What TensorFlow calls its RING implementation. `CommunicationOptions` choose: with
    ``bytes_per_pack`` gradients are joined in packs of that size, from the last to the first; with
    ``implementation="RING"`` it really is a ring.
    """

    algorithm = "auto"
    called = "Collective all-reduce"

    def __init__(self) -> None:
        super().__init__()

    def algorithm_on(self, gpu: bool, options: CommunicationOptions) -> str:
        """Return the table's choice, or the ring if that is asked for."""
        return "ring" if _is_ring(options) else self.algorithm

    def buckets(self, likes: Sequence[Array], options: CommunicationOptions) -> list[list[int]]:
        """Return buckets of the bytes that the options say; the first one can begin early."""
        return _buckets_from_the_end(likes, options.bytes_per_pack or sys.maxsize)

    def log_buckets(
        self, arrays: int, buckets: int, ranks: int, options: CommunicationOptions
    ) -> None:
        """Write TensorFlow's line to the log."""
        log_few(
            "Collective all_reduce tensors: %d all_reduces, num_devices = %d, group_size = %d, "
            "implementation = %s, num_packs = %d",
            arrays,
            ranks,
            ranks,
            options.implementation.value,
            buckets,
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


class RingAllReduce(ScheduledOps):
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


class _OfDevices(ScheduledOps):
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


class ToOneGpu(ScheduledOps):
    """What `ReductionToOneDevice` is between GPUs: the core's schedule of that name, in one pack."""

    algorithm = "reduce_to_one"
    called = "Reduction to one device"

    def _algorithm_among(self, bucket: Bucket, arrays: Sequence[Array]) -> str:
        """Return the schedule; where all are on the one device, one launch adds them in its order."""
        places = {array_backend.device_of(array) for array in arrays}
        return self.algorithm if len(places) > 1 else "auto"

    def log_buckets(self, *_: Any) -> None:
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

    def algorithm_on(self, gpu: bool, options: CommunicationOptions) -> str:
        """Return NCCL's choice on GPUs, which "auto" means there; what the core runs elsewhere."""
        if _is_ring(options):
            return "ring"
        return "auto" if gpu else self.algorithm

    def buckets(self, likes: Sequence[Array], options: CommunicationOptions) -> list[list[int]]:
        """Return the places of the arrays of each bucket, of which the first can begin early."""
        if self.num_packs == 1 and options.bytes_per_pack:
            return _buckets_from_the_end(likes, options.bytes_per_pack)
        return super().buckets(likes, options)

    def stays_on_gpus(self, communicator: Communicator, options: CommunicationOptions) -> bool:
        """Return True, unless a ring is asked for that the GPUs' executor is not there for."""
        return not _is_ring(options) or super().stays_on_gpus(communicator, options)


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


def _is_ring(options: CommunicationOptions) -> bool:
    return options.implementation is CommunicationImplementation.RING


def _buckets_from_the_end(likes: Sequence[Array], bytes_per_pack: int) -> list[list[int]]:
    """Return buckets of so many bytes, made from the end: the last gradients are ready first."""
    last = len(likes) - 1
    return [sorted([last - i for i in pack]) for pack in packs(likes[::-1], bytes_per_pack)]


def log_place(here: Device, destinations: Any) -> None:
    """Write to the log where values are reduced, in TensorFlow's words."""
    log_few(
        "Reduce to %s then broadcast to %r.",
        here,
        lambda: tuple(map(str, devices_of(destinations))),
    )


def sum_in_order(arrays: list[Array], reduce_op: ReduceOp) -> Array:
    """Return the sum or mean of equal arrays of one device, added in replica order."""
    check_alike(arrays)
    dtype = arrays[0].dtype
    work = work_dtype(dtype, reduce_op)
    total = np.add(*arrays[:2], dtype=work) if len(arrays) > 1 else arrays[0].astype(work)
    total = array_backend.asarray(total)
    for array in arrays[2:]:
        np.add(total, array, out=total)
    if reduce_op is ReduceOp.MEAN and dtype.kind not in "iub":
        total /= len(arrays)
    return finished(total, dtype, reduce_op, len(arrays))
