"""Cross-device operations that run an all-reduce of the core, in buckets."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pycollective import array_backend, nccl
from pycollective.algorithms import Algorithm
from pycollective.array_backend import Array
from pycollective.comm import Communicator, all_reduce_together, local_group, on_device
from pycollective.comm.packing import packs
from pycollective.distribute.communication import CommunicationOptions
from pycollective.distribute.cross_device_ops import (
    CrossDeviceOps,
    check_alike,
    devices_of,
    joined_slices,
    log_few,
    on_destinations,
    reduced_on,
)
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.reducer import Bucket, BucketPlan, parts_of
from pycollective.distribute.values import Mirrored, PerReplica
from pycollective.tensor import IndexedSlices, Tensor, as_tensor


class ScheduledOps(CrossDeviceOps):
    """Cross-device operations that run an all-reduce of the core, in buckets.

    In replica context, a `GradientReducer` runs the all-reduce by these buckets. Values with other
    destinations than the replicas, and `IndexedSlices`, are reduced on one device.
    """

    algorithm: str | Algorithm
    called: str  # the name in messages

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(f"{self.called} requires num_packs >= 0, but {num_packs} is specified")
        self.num_packs = num_packs
        self._groups: dict[int, list[Communicator]] = {}
        self._groups_lock = threading.Lock()

    # Rules for a reducer ------------------------------------------------------------------------

    def has_own_hooks(self) -> bool:
        """Return True if a subclass overrides hooks, which replace the reducer."""
        kind, base = type(self), ScheduledOps
        return not (
            kind.reduce_implementation is base.reduce_implementation
            and kind.batch_reduce_implementation is base.batch_reduce_implementation
            and kind._all_reduce is base._all_reduce
        )

    def buckets(self, likes: Sequence[Array], options: CommunicationOptions) -> list[list[int]]:
        """Return the indices of the arrays of each bucket."""
        if self.num_packs == 0:
            return [[i] for i in range(len(likes))]
        return packs(likes, sys.maxsize)

    def algorithm_on(self, gpu: bool, options: CommunicationOptions) -> str | Algorithm:
        """Return the core's algorithm on the host, or on GPUs."""
        return self.algorithm

    def stays_on_gpus(self, communicator: Communicator, options: CommunicationOptions) -> bool:
        """Return True if GPU arrays are reduced on the GPUs; log a warning otherwise."""
        if on_device.is_possible(communicator):
            return True
        log_few(
            "%s copies GPU arrays through host memory, which is slow: %s",
            self.called,
            on_device.why_not(communicator),
            level=logging.WARNING,
            times=1,
        )
        return False

    def log_buckets(
        self, arrays: int, buckets: int, ranks: int, options: CommunicationOptions
    ) -> None:
        """Log TensorFlow's line."""
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
        """Return the class's name and the algorithm."""
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
        """Reduce several values in buckets."""
        results: list[Any] = [None] * len(value_destination_pairs)
        together: list[int] = []
        sparse = 0
        for i, (value, destinations) in enumerate(value_destination_pairs):
            if any(isinstance(v, IndexedSlices) for v in value.values):
                sparse += 1
                results[i] = on_destinations(joined_slices(value.values, reduce_op), destinations)
            elif devices_of(destinations) != devices_of(value):
                here = devices_of(destinations)[0]
                results[i] = reduced_on(here, reduce_op, value.values, destinations)
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
        """Return the results of each replica, from the replicas' arrays of each value."""
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
        with self._groups_lock:  # reductions of several user threads use the same groups
            group = self._groups.get(replicas)
            if group is None:
                group = self._groups[replicas] = local_group(replicas)
            plan = BucketPlan(self, likes, reduce_op, options, group[0], replicas, mixed)
            for bucket in plan.buckets:
                flats = []
                for r in range(replicas):
                    arrays = [plan.prepared(rows[i][r]) for i in bucket.indices]
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

    def _algorithm_among(self, bucket: Bucket, arrays: Sequence[Array]) -> str | Algorithm:
        """Return the algorithm for the replicas' arrays of a bucket."""
        return bucket.algorithm

    def _totals(
        self, group: Sequence[Communicator], bucket: Bucket, flats: Sequence[Array]
    ) -> list[Array]:
        """Return every replica's total of the replicas' buckets.

        On GPUs each replica has a thread, because the calls wait for each other.
        """
        algorithm = self._algorithm_among(bucket, flats)
        on_gpus = array_backend.is_on_gpu(flats[0])
        parts = parts_of(flats[0].size, bucket.parts)
        if (
            on_gpus
            and algorithm == "auto"
            and len({array_backend.device_of(x) for x in flats}) == 1
        ):
            # Results never change, so replicas with one memory share one array.
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
                self._groups.pop(len(group), None)  # a failed group cannot be used again
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
