"""`CrossDeviceOps`, the base class of cross-device operations, and functions for them.

The subclasses are in `pycollective.distribute.all_reduce_ops`.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pycollective import array_backend
from pycollective.array_backend import Array
from pycollective.distribute.communication import CommunicationOptions
from pycollective.distribute.devices import Device, in_memory_of, parse_device
from pycollective.distribute.reduce_op import ReduceOp, finished, work_dtype
from pycollective.distribute.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    concatenated,
)
from pycollective.tensor import IndexedSlices, Tensor, Variable, as_tensor
from pycollective.tensor.indexed_slices import concatenated_slices

_log = logging.getLogger("pycollective")


class CrossDeviceOps:
    """Base class of cross-device operations.

    A subclass overrides `reduce_implementation` and `batch_reduce_implementation`, and
    `broadcast_implementation` for anything other than a copy for each destination. The public methods
    check the arguments and call these hooks in cross-replica context.
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
            The value.
        destinations : str, variable, tensor or DistributedValues
            The devices of the result.
        options : CommunicationOptions, optional
            Hints.

        Returns
        -------
        Tensor or Mirrored
            The result: Mirrored for several destinations. A single value that is on its destination
            already is returned unchanged without a call of the hook. All CPU devices have one memory.

        Raises
        ------
        TypeError
            ``reduce_op`` is not a reduction.
        ValueError
            ``destinations`` is empty or of another type.
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
        """Reduce several values together; see `reduce` for arguments and results.

        Raises
        ------
        ValueError
            ``value_destination_pairs`` are not pairs of a value and destinations.
        """
        op = ReduceOp.of(reduce_op)
        pairs = []
        for value, destinations in checked_pairs(value_destination_pairs):
            _check_destinations(destinations)
            pairs.append((_as_per_replica(value), destinations))
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
        """Concatenate the replicas' components along an axis, in replica order.

        Parameters
        ----------
        per_replica_value : PerReplica or tensor
            The value; shapes may differ along ``axis``.
        destinations
            See `reduce`.
        axis : int
            The axis of the concatenation.
        options : CommunicationOptions, optional
            Hints.

        Returns
        -------
        Tensor or Mirrored
            The result: Mirrored for several destinations.

        Raises
        ------
        NotImplementedError
            A value is an `IndexedSlices`.
        ValueError
            See `reduce`; or shapes differ along another axis.
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
        """Reduce one value; the arguments are valid."""
        raise NotImplementedError(f"{type(self).__name__} must override reduce_implementation")

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values; the arguments are valid."""
        raise NotImplementedError(
            f"{type(self).__name__} must override batch_reduce_implementation"
        )

    def broadcast_implementation(self, tensor: Tensor, destinations: Any) -> Mirrored:
        """Copy a tensor to every destination.

        Tensors never change, so replicas with one memory share it.
        """
        return Mirrored(
            [_component(placed_on(tensor, device)) for device in devices_of(destinations)]
        )

    def _gather_implementation(
        self,
        per_replica_value: PerReplica,
        destinations: Any,
        axis: int,
        options: CommunicationOptions,
    ) -> Any:
        """Concatenate the components of one value on one device; the arguments are valid."""
        arrays = [as_tensor(v).array for v in per_replica_value.values]
        return on_destinations(Tensor(concatenated(arrays, axis)), destinations)

    # Collectives of replicas that run at the same time ------------------------------------------

    def _all_reduce(
        self,
        reduce_op: ReduceOp,
        value: list[Tensor],
        replica_id: int,
        options: CommunicationOptions,
    ) -> list[Tensor]:
        """Reduce the values of one replica in its own thread, while the others do the same.

        This hook is optional. Without it, `batch_reduce_implementation` is called once at a merge
        point. An override must give each wait a deadline.
        """
        raise NotImplementedError(f"{type(self).__name__} must override _all_reduce")

    def describe(self) -> str:
        """Return a short description, for `Strategy.describe`."""
        return type(self).__name__


def reduced_on(
    here: Device,
    reduce_op: ReduceOp,
    values: Sequence[Any],
    destinations: Any,
    accumulation_fn: Callable[[list[Tensor]], Any] | None = None,
) -> Any:
    """Reduce the replicas' values on one device, and return the result on its destinations."""
    log_place(here, destinations)
    if any(isinstance(v, IndexedSlices) for v in values):
        return on_destinations(joined_slices(values, reduce_op), destinations)
    with here.in_use():
        tensors = [placed_on(as_tensor(v), here) for v in values]
        if accumulation_fn is None:
            total = Tensor(sum_in_order([t.array for t in tensors], reduce_op))
        else:
            total = as_tensor(accumulation_fn(tensors))
            if reduce_op is ReduceOp.MEAN:
                total = as_tensor(total / len(values))
    return on_destinations(total, destinations)


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


def joined_slices(values: Sequence[Any], reduce_op: ReduceOp) -> IndexedSlices:
    """Return the replicas' slices one after the other, with equal indices."""
    if not all(isinstance(v, IndexedSlices) for v in values):
        raise ValueError(
            "the replicas' values differ: some are IndexedSlices and some are dense tensors"
        )
    joined = concatenated_slices(values, len(values) if reduce_op is ReduceOp.MEAN else 1)
    return slices_beside(values[0], joined)


def slices_beside(own: IndexedSlices, total: IndexedSlices) -> IndexedSlices:
    """Return ``total`` on the device of a replica's own slices, with their dense shape."""
    rows = array_backend.asarray(total.values.array, like=own.values.array)
    indices = array_backend.asarray(total.indices.array, like=own.indices.array)
    return IndexedSlices(Tensor(rows), Tensor(indices), own.dense_shape)


def on_destinations(result: Any, destinations: Any) -> Any:
    """Return a result on its destination, Mirrored for several."""
    devices = devices_of(destinations)
    if len(devices) == 1:
        return placed_on(result, devices[0])
    return Mirrored([_component(placed_on(result, device)) for device in devices])


def _component(value: Any) -> Any:
    """Return an object of its own for a value: `regroup` unwraps components that are one object."""
    if isinstance(value, IndexedSlices):
        return IndexedSlices(value.values, value.indices, value.dense_shape)
    return Tensor(value.array)


def placed_on(value: Any, device: Device) -> Any:
    """Return a tensor, or `IndexedSlices`, on a device: the same one if it is there already."""
    if isinstance(value, IndexedSlices):
        rows, indices = placed_on(value.values, device), placed_on(value.indices, device)
        same = rows is value.values and indices is value.indices
        return value if same else IndexedSlices(rows, indices, value.dense_shape)
    array = device.place(value.array)
    return value if array is value.array else Tensor(array)


def devices_of(value: Any) -> tuple[Device, ...]:
    """Return the devices of the components of a value, or of destinations.

    Logical devices of one processor have one memory, which the first of them represents.
    """
    if isinstance(value, str):
        return (parse_device(value).memory,)
    if isinstance(value, DistributedValues):
        return tuple(device for component in value.values for device in devices_of(component))
    if isinstance(value, IndexedSlices):
        return devices_of(value.values)
    if isinstance(value, Variable):
        value = value.current()
    return (in_memory_of(getattr(value, "array", value)),)


def checked_pairs(pairs: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return pairs of a value and its destinations; raise a ValueError for anything else."""
    pairs = list(pairs)
    for pair in pairs:
        if not isinstance(pair, tuple):
            raise ValueError("Each element of `value_destination_pairs` should be a tuple.")
        if len(pair) != 2:
            raise ValueError(
                "Each element of `value_destination_pairs` should be a tuple of size 2."
            )
    return pairs


def check_alike(row: Sequence[Array]) -> None:
    """Raise an error unless the replicas' arrays have one shape and dtype."""
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
    check_not_empty(destinations)
    if isinstance(destinations, (str, DistributedValues, Variable, Tensor)):
        if isinstance(destinations, str):
            parse_device(destinations)
        return
    raise ValueError(
        "destinations must be one of a `DistributedValues` object, a tf.Variable object, or a device "
        f"string. Got {destinations!r}"
    )


def check_not_empty(destinations: Any) -> None:
    """Raise a ValueError if destinations name no device."""
    values = destinations.values if isinstance(destinations, DistributedValues) else destinations
    if isinstance(values, (str, tuple)) and not values:
        raise ValueError(
            f"destinations can not be empty, got {destinations!r}; name a device such as 'cpu:0', or "
            "give a value on the device"
        )


def component_of(value: Any, replica: int) -> Any:
    """Return a replica's component, or a plain value, as a tensor or `IndexedSlices`."""
    component = value.values[replica] if isinstance(value, DistributedValues) else value
    return component if isinstance(component, IndexedSlices) else as_tensor(component)


def _is_there_already(value: DistributedValues, destinations: Any) -> bool:
    return len(value.values) == 1 and devices_of(value) == devices_of(destinations)


_logged: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def log_few(message: str, *args: Any, level: int = logging.INFO, times: int = 10) -> None:
    """Log a message the first few times; call the functions among its arguments."""
    if next(_logged[message]) < times:
        _log.log(level, message, *[arg() if callable(arg) else arg for arg in args])


def log_place(here: Device, destinations: Any) -> None:
    """Log the device of a reduction, as TensorFlow does."""
    log_few(
        "Reduce to %s then broadcast to %r.",
        here,
        lambda: tuple(map(str, devices_of(destinations))),
    )
