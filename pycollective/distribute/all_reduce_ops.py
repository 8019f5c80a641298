"""The cross-device operations that there are, and which one is the default."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from pycollective import array_backend, nccl
from pycollective.array_backend import Array
from pycollective.comm import Communicator, on_device
from pycollective.comm.packing import packs
from pycollective.distribute.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from pycollective.distribute.cross_device_ops import (
    CrossDeviceOps,
    devices_of,
    log_few,
    log_place,
    reduced_on,
)
from pycollective.distribute.devices import Device, parse_device
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.reducer import Bucket
from pycollective.distribute.scheduled_ops import ScheduledOps
from pycollective.distribute.values import PerReplica
from pycollective.errors import NcclNotFoundError
from pycollective.tensor import IndexedSlices, Tensor

__all__ = [
    "CollectiveAllReduce",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "RingAllReduce",
    "default_cross_device_ops",
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
        there = self.reduce_to_device
        here = devices_of(destinations)[0] if there is None else parse_device(there)
        return reduced_on(
            here, reduce_op, per_replica_value.values, destinations, self.accumulation_fn
        )

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
        """Return True if the device executor can do it: from GPUs to the same ones, by one of them."""
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
        As of `RingAllReduce`.
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
    """Return buckets of a size in bytes, made from the end: the last gradients are ready first."""
    last = len(likes) - 1
    return [sorted([last - i for i in pack]) for pack in packs(likes[::-1], bytes_per_pack)]
