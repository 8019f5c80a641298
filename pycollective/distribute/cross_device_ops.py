"""Cross-device operations: how values of the replicas are reduced, and how to write one's own.

Here are the base class and `ReductionToOneDevice`; those that run schedules of the core are in
`pycollective.distribute.all_reduce_ops`.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pycollective import array_backend
from pycollective.communicator import Communicator
from pycollective.distribute.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from pycollective.distribute.devices import parse_device
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    concatenated,
)
from pycollective.tensor import IndexedSlices, Tensor, Variable, as_tensor
from pycollective.tensor.indexed_slices import concatenated_slices

__all__ = [
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "ReductionToOneDevice",
    "ReplicaReduction",
]

Array = Any

_log = logging.getLogger("pycollective")

# Types that are reduced in the type named here, and cast back: halves, so that they are rounded once
# and not at every rank; bools, which TensorFlow sums as numbers.
_REDUCED_AS = {"float16": "float32", "bfloat16": "float32", "bool": "int32"}

# The mean of ints is a fraction, and their sums must not wrap around.
_REDUCED_FOR_MEAN_AS = _REDUCED_AS | {
    "int8": "int32",
    "int16": "int32",
    "uint8": "int32",
    "uint16": "int32",
    "uint32": "int64",
}


class ReplicaReduction:
    """One replica's part of an all-reduce of several arrays, which may be given one by one."""

    def add(self, place: int, array: Array) -> None:
        """Give one of the arrays, which must be left alone until `finish` has returned."""
        raise NotImplementedError

    def finish(self) -> list[Array]:
        """Wait until all is reduced, and return the results in the order of the places."""
        raise NotImplementedError


class CrossDeviceOps:
    """Base class of cross-device operations.

    One of your own overrides `reduce_implementation` and `batch_reduce_implementation`, and
    `broadcast_implementation` if a copy for each destination is not what you want. The public methods
    check the arguments and call those hooks, in cross-replica context.
    """

    # Public, in cross-replica context -----------------------------------------------------------

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce the replicas' components to the destinations.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN.
        per_replica_value : PerReplica or tensor
            What is reduced.
        destinations : str, variable, tensor or DistributedValues
            The device or devices that get the result.
        options : CommunicationOptions, optional
            Hints.

        Returns
        -------
        Tensor or Mirrored
            The result: Mirrored when there are several destinations. One value that is on its
            destination already is returned as it is, and no hook is called.

        Raises
        ------
        TypeError
            If ``reduce_op`` is no reduction.
        ValueError
            If ``destinations`` is empty or of another kind.
        """
        op = ReduceOp.of(reduce_op)
        value = _as_per_replica(per_replica_value)
        _check_destinations(destinations)
        if _is_there_already(value, destinations):
            return component_of(value, 0)
        return self.reduce_implementation(
            op, value, destinations, options or CommunicationOptions()
        )

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values in one go; arguments and results as those of `reduce`.

        Raises
        ------
        ValueError
            If ``value_destination_pairs`` does not consist of pairs of a value and destinations.
        """
        op = ReduceOp.of(reduce_op)
        pairs = []
        for pair in value_destination_pairs:
            if not isinstance(pair, tuple):
                raise ValueError("Each element of `value_destination_pairs` should be a tuple.")
            if len(pair) != 2:
                raise ValueError(
                    "Each element of `value_destination_pairs` should be a tuple of size 2."
                )
            _check_destinations(pair[1])
            pairs.append((_as_per_replica(pair[0]), pair[1]))
        if all(_is_there_already(value, destinations) for value, destinations in pairs):
            return [component_of(value, 0) for value, _ in pairs]
        return self.batch_reduce_implementation(op, pairs, options or CommunicationOptions())

    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """Copy a tensor to the destinations; the result is always Mirrored."""
        _check_destinations(destinations)
        return self.broadcast_implementation(as_tensor(tensor), destinations)

    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Join the replicas' components along an axis, in replica order.

        Parameters
        ----------
        per_replica_value : PerReplica or tensor
            What is joined; shapes may differ along ``axis``.
        destinations
            As of `reduce`.
        axis : int
            Along which axis.
        options : CommunicationOptions, optional
            Hints.

        Returns
        -------
        Tensor or Mirrored
            The result: Mirrored when there are several destinations.

        Raises
        ------
        NotImplementedError
            For `IndexedSlices`.
        ValueError
            As `reduce`, and if shapes differ along another axis.
        """
        value = _as_per_replica(per_replica_value)
        if any(isinstance(v, IndexedSlices) for v in value.values):
            raise NotImplementedError("gather does not support IndexedSlices")
        _check_destinations(destinations)
        if _is_there_already(value, destinations):
            return component_of(value, 0)
        return self._gather_implementation(
            value, destinations, axis, options or CommunicationOptions()
        )

    # Hooks --------------------------------------------------------------------------------------

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce one value; the arguments are checked."""
        raise NotImplementedError(f"{type(self).__name__} must override reduce_implementation")

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values; the arguments are checked."""
        raise NotImplementedError(
            f"{type(self).__name__} must override batch_reduce_implementation"
        )

    def broadcast_implementation(self, tensor: Tensor, destinations: Any) -> Mirrored:
        """Give a tensor to every destination.

        Tensors never change, so replicas of one memory share it.
        """
        return Mirrored([tensor] * num_destinations(destinations))

    def _gather_implementation(
        self,
        per_replica_value: PerReplica,
        destinations: Any,
        axis: int,
        options: CommunicationOptions,
    ) -> Any:
        """Join the components of one value on one device; the arguments are checked."""
        arrays = [as_tensor(v).array for v in per_replica_value.values]
        joined = array_backend.asarray(concatenated(arrays, axis), like=arrays[0])
        return on_destinations(Tensor(joined), destinations)

    # Collectives of replicas that run at the same time ------------------------------------------

    def takes_part_from_replicas(self) -> bool:
        """Whether each replica can do its part from its own thread, by `all_reduce_replica`.

        Otherwise the replicas meet, and one thread reduces for all of them.
        """
        return False

    def begin_all_reduce(
        self,
        communicator: Communicator,
        reduce_op: ReduceOp,
        likes: Sequence[Array],
        options: CommunicationOptions,
        async_op: bool,
    ) -> ReplicaReduction | None:
        """Begin one replica's part of an all-reduce of several arrays.

        Parameters
        ----------
        communicator : Communicator
            This replica's rank among the replicas.
        reduce_op : ReduceOp
            SUM or MEAN.
        likes : sequence of arrays
            Arrays of the shapes and dtypes of those that will be given, the same in every replica.
        options : CommunicationOptions
            Hints.
        async_op : bool
            Whether arrays are reduced while others are still to come.

        Returns
        -------
        ReplicaReduction or None
            None if ``async_op`` was asked for and nothing could begin before all arrays are there.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Say in a few words what this does, for `Strategy.describe`."""
        return type(self).__name__


class ReductionToOneDevice(CrossDeviceOps):
    """Bring all values to one device, reduce them there in replica order, and give the result out.

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

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce one value, by the user's accumulation if there is one."""
        values = per_replica_value.values
        names = _Names(destinations)
        log_few("Reduce to %s then broadcast to %r.", self.reduce_to_device or names, names)
        total: Any
        if any(isinstance(v, IndexedSlices) for v in values):
            total = joined_slices(values, reduce_op)
        elif self.accumulation_fn is None:
            total = Tensor(_sum_in_order([as_tensor(v).array for v in values], reduce_op))
        else:
            total = as_tensor(self.accumulation_fn([as_tensor(v) for v in values]))
            if reduce_op is ReduceOp.MEAN:
                total = total / len(values)
        return on_destinations(total, destinations)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values, one after the other."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def describe(self) -> str:
        """Name the device that reduces, if it was chosen."""
        device = "" if self.reduce_to_device is None else f" {self.reduce_to_device}"
        return type(self).__name__ + device


def _sum_in_order(arrays: list[Array], reduce_op: ReduceOp) -> Array:
    """Return the sum or mean of equal arrays, added in replica order."""
    check_alike(arrays)
    hosts = [array_backend.to_numpy(a) for a in arrays]
    dtype = hosts[0].dtype
    work = work_dtype(dtype, reduce_op)
    total = np.add(hosts[0], hosts[1], dtype=work) if len(hosts) > 1 else hosts[0].astype(work)
    total = np.asarray(total)
    for host in hosts[2:]:
        np.add(total, host, out=total)
    if reduce_op is ReduceOp.MEAN and dtype.kind not in "iub":
        total /= len(hosts)
    return array_backend.asarray(finished(total, dtype, reduce_op, len(hosts)), like=arrays[0])


def work_dtype(dtype: np.dtype[Any], reduce_op: ReduceOp) -> np.dtype[Any]:
    """Return in which dtype arrays of a dtype are reduced."""
    names = _REDUCED_FOR_MEAN_AS if reduce_op is ReduceOp.MEAN else _REDUCED_AS
    name = names.get(dtype.name)
    return dtype if name is None else np.dtype(name)


def finished(total: Array, dtype: np.dtype[Any], reduce_op: ReduceOp, replicas: int) -> Array:
    """Return the result for arrays of ``dtype``, given what they were reduced to.

    A mean of ints is a fraction: their sum is exact, and divided here.
    """
    if reduce_op is ReduceOp.MEAN and dtype.kind in "iub":
        return array_backend.asarray(total / replicas)
    return total if total.dtype == dtype else total.astype(dtype)


def joined_slices(values: Sequence[Any], reduce_op: ReduceOp) -> IndexedSlices:
    """Return the replicas' slices one after the other; equal indices stay as they are."""
    if not all(isinstance(v, IndexedSlices) for v in values):
        raise ValueError(
            "the replicas' values differ: some are IndexedSlices and some are dense tensors"
        )
    joined = concatenated_slices(values, len(values) if reduce_op is ReduceOp.MEAN else 1)
    return slices_beside(values[0], joined)


def slices_beside(own: IndexedSlices, total: IndexedSlices) -> IndexedSlices:
    """Return ``total`` on the device of a replica's own slices, with the dense shape that it knows."""
    rows = array_backend.asarray(total.values.array, like=own.values.array)
    indices = array_backend.asarray(total.indices.array, like=own.indices.array)
    return IndexedSlices(Tensor(rows), Tensor(indices), own.dense_shape)


def on_destinations(result: Any, destinations: Any) -> Any:
    """Return a result as it is for one destination, Mirrored for several."""
    count = num_destinations(destinations)
    return result if count == 1 else Mirrored([result] * count)


def check_alike(row: Sequence[Array]) -> None:
    """Raise unless the replicas' arrays have one shape and dtype."""
    first = row[0]
    for r, other in enumerate(row):
        if other.shape != first.shape or other.dtype != first.dtype:
            raise ValueError(
                f"the replicas' values differ: replica 0 has {first.dtype}{list(first.shape)}, "
                f"replica {r} has {other.dtype}{list(other.shape)}; reduce needs equal shapes and "
                "dtypes (reduce along an axis first, or gather)"
            )


def _as_per_replica(value: Any) -> PerReplica:
    if isinstance(value, PerReplica):
        return value
    if isinstance(value, DistributedValues):
        return PerReplica(value.values)
    return PerReplica((value if isinstance(value, IndexedSlices) else as_tensor(value),))


def _check_destinations(destinations: Any) -> None:
    if isinstance(destinations, (str, DistributedValues, Variable, Tensor)):
        if isinstance(destinations, str):
            parse_device(destinations)
        elif isinstance(destinations, DistributedValues) and not destinations.values:
            raise ValueError("destinations can not be empty")
        return
    raise ValueError(
        "destinations must be one of a `DistributedValues` object, a tf.Variable object, or a device "
        f"string, not {destinations!r}."
    )


def component_of(value: DistributedValues, replica: int) -> Any:
    """Return a replica's component as a tensor or `IndexedSlices`."""
    component = value.values[replica]
    return component if isinstance(component, IndexedSlices) else as_tensor(component)


def _is_there_already(value: DistributedValues, destinations: Any) -> bool:
    return len(value.values) == 1 and num_destinations(destinations) == 1


class _Names:
    """Shows the devices of destinations, and as a text the first, when a log line is really written."""

    def __init__(self, destinations: Any) -> None:
        self._destinations = destinations

    def __str__(self) -> str:
        if isinstance(self._destinations, str):
            return str(parse_device(self._destinations))
        return "the first of them"

    def __repr__(self) -> str:
        if isinstance(self._destinations, str):
            return repr((str(parse_device(self._destinations)),))
        count = num_destinations(self._destinations)
        return f"{count} device{'s'[: count > 1]}"


_logged: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def log_few(message: str, *args: Any) -> None:
    """Log at level INFO the first ten times."""
    if next(_logged[message]) < 10:
        _log.info(message, *args)


def num_destinations(destinations: Any) -> int:
    """Return on how many devices ``destinations`` lies."""
    values = getattr(destinations, "values", None)
    return len(values) if isinstance(values, tuple) else 1
