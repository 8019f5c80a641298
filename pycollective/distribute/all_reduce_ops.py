"""The cross-device operations, and the choice of the default."""

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


class ReductionToOneDevice(CrossDeviceOps):
    """Copy all values to one device, reduce them there in replica order, and copy the result back.

    Between GPUs, if the core has CUDA kernels, a schedule of the device executor does so, with values
    joined in a bucket.

    Parameters
    ----------
    reduce_to_device : str, optional
        The device of the reduction; by default the first destination.
    accumulation_fn : callable, optional
        Returns the sum of a list of the replicas' tensors; by default they are added in order.

    Raises
    ------
    ValueError
        This machine has no such device.
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
        """Reduce one value, with ``accumulation_fn`` if given."""
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
        """Reduce several values: in a bucket between GPUs, one after the other elsewhere."""
        pairs = value_destination_pairs
        overridden = (
            type(self).reduce_implementation is not ReductionToOneDevice.reduce_implementation
        )
        results: list[Any] = [None] * len(pairs)
        by_devices: defaultdict[tuple[Device, ...], list[int]] = defaultdict(list)
        for i, (value, destinations) in enumerate(pairs):
            if not overridden and self._goes_between_gpus(value, destinations):
                by_devices[devices_of(value)].append(i)
            else:
                results[i] = self.reduce_implementation(reduce_op, value, destinations, options)
        for indices in by_devices.values():
            reduced = self._reduced_between_gpus(reduce_op, [pairs[i] for i in indices], options)
            for i, result in zip(indices, reduced, strict=True):
                results[i] = result
        return results

    def _goes_between_gpus(self, value: PerReplica, destinations: Any) -> bool:
        """Return True if the device executor can reduce: from GPUs to the same GPUs, on one of them."""
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
        """Return the class's name, and the device if one was given."""
        device = "" if self.reduce_to_device is None else f" {self.reduce_to_device}"
        return type(self).__name__ + device


class CollectiveAllReduce(ScheduledOps):
    """The core's all-reduce by the fastest algorithm for the size: the default on CPUs.

    TensorFlow calls it the RING implementation. With `CommunicationOptions.bytes_per_pack`, gradients
    are joined in buckets of that size, from the last to the first. With ``implementation="RING"`` the
    algorithm is a ring.
    """

    algorithm = "auto"
    called = "Collective all-reduce"

    def __init__(self) -> None:
        super().__init__()

    def algorithm_on(self, gpu: bool, options: CommunicationOptions) -> str:
        """Return the table's choice, or the ring if the options name it."""
        return "ring" if _is_ring(options) else self.algorithm

    def buckets(self, likes: Sequence[Array], options: CommunicationOptions) -> list[list[int]]:
        """Return buckets of `bytes_per_pack`, the last gradients first."""
        return _buckets_from_the_end(likes, options.bytes_per_pack or sys.maxsize)

    def log_buckets(
        self, arrays: int, buckets: int, ranks: int, options: CommunicationOptions
    ) -> None:
        """Log TensorFlow's line."""
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
    """All-reduce in a ring of the replicas, which moves the least data.

    Parameters
    ----------
    num_packs : int
        The arrays of one call are joined, and reduced in this number of equal parts; 0: arrays are
        not joined.

    Raises
    ------
    ValueError
        ``num_packs`` is negative.
    """

    algorithm = "ring"
    called = "Ring all-reduce"


class _OfDevices(ScheduledOps):
    """Base class of TensorFlow's operations between GPUs, which do not gather."""

    def _gather_implementation(
        self,
        per_replica_value: PerReplica,
        destinations: Any,
        axis: int,
        options: CommunicationOptions,
    ) -> Any:
        """Concatenate the components on one device, and log a warning."""
        log_few(
            "gather/all_gather with NCCL or HierarchicalCopy is not supported. Falling back to gather "
            "on one device and then broadcast.",
            level=logging.WARNING,
            times=3,
        )
        return super()._gather_implementation(per_replica_value, destinations, axis, options)


class HierarchicalCopyAllReduce(_OfDevices):
    """All-reduce in two halves that exchange their sums, for every number of devices.

    Unlike TensorFlow's operation, it also runs between CPU replicas, and an odd number of devices
    gives the right sum.

    Parameters
    ----------
    num_packs : int
        As in `RingAllReduce`.
    """

    algorithm = "hierarchical_copy"
    called = "HierarchicalCopy"


class ToOneGpu(ScheduledOps):
    """`ReductionToOneDevice` between GPUs: the core's schedule of that name, in one bucket."""

    algorithm = "reduce_to_one"
    called = "Reduction to one device"

    def _algorithm_among(self, bucket: Bucket, arrays: Sequence[Array]) -> str:
        """Return the schedule, or "auto" for one GPU, where one kernel adds all in replica order."""
        places = {array_backend.device_of(array) for array in arrays}
        return self.algorithm if len(places) > 1 else "auto"

    def log_buckets(self, *_: Any) -> None:
        """Log nothing, because `ReductionToOneDevice` does."""


class NcclAllReduce(_OfDevices):
    """All-reduce by NVIDIA's NCCL between GPUs, each replica from its own thread.

    Without NCCL, or with several replicas on one GPU, the core's device executor reduces GPU arrays. A
    core without CUDA reduces them in the host's memory, and logs a warning. Arrays on CPUs are reduced
    as by `ReductionToOneDevice`. With ``implementation="RING"`` in the options, the core's ring reduces
    all arrays.

    Parameters
    ----------
    num_packs : int
        As in `RingAllReduce`. With 1, the options' ``bytes_per_pack`` is used if it is set.
        `Optimizer.minimize` sets it, so that reductions overlap with the computation of other gradients.

    Raises
    ------
    ValueError
        ``num_packs`` is negative.
    """

    algorithm = "reduce_to_one"
    called = "NCCL all-reduce"

    def describe(self) -> str:
        """Return the class's name, and NCCL's version or its replacement."""
        try:
            what = f"NCCL {nccl.library().version_text}"
        except NcclNotFoundError:
            where = (
                "in the host's memory" if on_device.runtime() is None else "by the core's kernels"
            )
            what = f"NCCL is not installed: {where}"
        return f"{type(self).__name__} ({what})"

    def algorithm_on(self, gpu: bool, options: CommunicationOptions) -> str:
        """Return "auto" on GPUs, which leaves the choice to NCCL; elsewhere the core's algorithm."""
        if _is_ring(options):
            return "ring"
        return "auto" if gpu else self.algorithm

    def buckets(self, likes: Sequence[Array], options: CommunicationOptions) -> list[list[int]]:
        """Return the indices of the arrays of each bucket, the last gradients first."""
        if self.num_packs == 1 and options.bytes_per_pack:
            return _buckets_from_the_end(likes, options.bytes_per_pack)
        return super().buckets(likes, options)

    def stays_on_gpus(self, communicator: Communicator, options: CommunicationOptions) -> bool:
        """Return True, unless the options name a ring and there is no device executor."""
        return not _is_ring(options) or super().stays_on_gpus(communicator, options)


def default_cross_device_ops(devices: Sequence[Device]) -> tuple[CrossDeviceOps, str]:
    """Return the cross-device operations for replicas on these devices, and the reason."""
    kinds = {device.kind for device in devices}
    if kinds == {"CPU"}:
        return CollectiveAllReduce(), "the default if all devices are CPUs"
    if kinds == {"GPU"}:
        shared = len({device.memory for device in devices}) < len(devices)
        besides = "; some are on one GPU, so NCCL is not used" * shared
        return NcclAllReduce(), f"the default if all devices are GPUs{besides}"
    return ReductionToOneDevice(), "the default if CPUs and GPUs are mixed"


def _is_ring(options: CommunicationOptions) -> bool:
    return options.implementation is CommunicationImplementation.RING


def _buckets_from_the_end(likes: Sequence[Array], bytes_per_pack: int) -> list[list[int]]:
    """Return buckets of a size in bytes, from the end: tapes compute the last gradients first."""
    last = len(likes) - 1
    return [sorted([last - i for i in pack]) for pack in packs(likes[::-1], bytes_per_pack)]
