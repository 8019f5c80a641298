"""Cross-device operations: how values of the replicas are reduced, and how to write one's own."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pycollective import array_backend
from pycollective.communicator import Communicator, all_reduce_together, local_group
from pycollective.distribute.devices import parse_device
from pycollective.distribute.reduce_op import ReduceOp
from pycollective.distribute.values import DistributedValues, Mirrored, PerReplica
from pycollective.tensor import Tensor, Variable, as_tensor

__all__ = [
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "ReductionToOneDevice",
    "RingAllReduce",
]

Array = Any

# Types that are reduced in the type named here, and cast back: halves, so that they are rounded once
# and not at every rank; bools, which TensorFlow sums as numbers.
_REDUCED_AS = {"float16": "float32", "bfloat16": "float32", "bool": "int32"}

# The mean of ints is a fraction, and their sums must not wrap around.
_SUMMED_FOR_MEAN_AS = {
    "int8": "int32",
    "int16": "int32",
    "uint8": "int32",
    "uint16": "int32",
    "uint32": "int64",
}


class CommunicationImplementation(enum.Enum):
    """Which library moves the data between devices."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


class CommunicationOptions:
    """Hints for collectives.

    Parameters
    ----------
    bytes_per_pack : int
        Arrays of one call are joined until a pack has more than this many bytes; 0: one pack.
    timeout_seconds : float, optional
        How long a collective waits for the others.
    implementation : CommunicationImplementation or str
        Which library moves the data.

    Raises
    ------
    ValueError
        If a value is out of range or unknown.
    """

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        if bytes_per_pack < 0:
            raise ValueError(f"Argument `bytes_per_pack` must be >=0, Received {bytes_per_pack}.")
        if isinstance(implementation, str):
            implementation = CommunicationImplementation(implementation.upper())
        if not isinstance(implementation, CommunicationImplementation):
            raise ValueError(
                "Argument `implementation` must be instance of "
                "`tf.distribute.experimental.CommunicationImplementation`."
            )
        self.bytes_per_pack = bytes_per_pack
        self.timeout_seconds = timeout_seconds
        self.implementation = implementation


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
            The result: Mirrored when there are several destinations.
        """
        op = ReduceOp.of(reduce_op)
        value = _as_per_replica(per_replica_value)
        _check_destinations(destinations)
        if len(value.values) == 1 and num_destinations(destinations) == 1:
            return as_tensor(value.values[0])
        return self.reduce_implementation(
            op, value, destinations, options or CommunicationOptions()
        )

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values in one go; arguments and results as those of `reduce`."""
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
        if all(len(v.values) == 1 and num_destinations(d) == 1 for v, d in pairs):
            return [as_tensor(value.values[0]) for value, _ in pairs]
        return self.batch_reduce_implementation(op, pairs, options or CommunicationOptions())

    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """Copy a tensor to the destinations."""
        _check_destinations(destinations)
        return self.broadcast_implementation(as_tensor(tensor), destinations)

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
        """Copy a tensor to every destination."""
        array = tensor.array
        return Mirrored([Tensor(array.copy()) for _ in range(num_destinations(destinations))])

    # Collectives of replicas that run at the same time ------------------------------------------

    def takes_part_from_replicas(self) -> bool:
        """Whether each replica can do its part from its own thread, by `all_reduce_replica`.

        Otherwise the replicas meet, and one thread reduces for all of them.
        """
        return False

    def all_reduce_replica(
        self,
        communicator: Communicator,
        reduce_op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions,
    ) -> list[Array]:
        """Do one replica's part of an all-reduce of several arrays."""
        raise NotImplementedError


class _ScheduledOps(CrossDeviceOps):
    """Cross-device operations that run one of the core's schedules."""

    algorithm: str
    called: str  # in messages

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(f"{self.called} requires num_packs >= 0, but {num_packs} is specified")
        self._num_packs = num_packs
        self._groups: dict[int, list[Communicator]] = {}
        self._groups_lock = threading.Lock()

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce one value by the schedule."""
        return self.batch_reduce_implementation(
            reduce_op, [(per_replica_value, destinations)], options
        )[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values by the schedule, in packs."""
        rows = [[as_tensor(v).array for v in value.values] for value, _ in value_destination_pairs]
        replicas = len(rows[0])
        if any(len(row) != replicas for row in rows):
            raise ValueError(
                "the values of one batch_reduce come from different numbers of replicas"
            )
        for row in rows:
            _check_alike(row)
        with self._groups_lock:
            group = self._groups.get(replicas)
            if group is None:
                group = self._groups[replicas] = local_group(replicas)
            reduced = _in_packs(
                [[row[r] for row in rows] for r in range(replicas)],
                replicas,
                reduce_op,
                self._packs_of(options),
                lambda packs, op: all_reduce_together(group, packs, op, self.algorithm),
            )
        results: list[Any] = []
        for i, (_, destinations) in enumerate(value_destination_pairs):
            components = [Tensor(of_replica[i]) for of_replica in reduced]
            count = num_destinations(destinations)
            if count == 1:
                results.append(components[0])
            else:
                results.append(Mirrored([components[r % replicas] for r in range(count)]))
        return results

    def takes_part_from_replicas(self) -> bool:
        """Return True unless a subclass has its own hooks, which must then be called."""
        mine, base = type(self), _ScheduledOps
        return (
            mine.reduce_implementation is base.reduce_implementation
            and mine.batch_reduce_implementation is base.batch_reduce_implementation
        )

    def all_reduce_replica(
        self,
        communicator: Communicator,
        reduce_op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions,
    ) -> list[Array]:
        """Do one replica's part by the schedule, in packs."""

        def reduce(packs: list[Array], op: str) -> list[Array]:
            result = communicator.all_reduce(
                packs[0], op, algorithm=self.algorithm, timeout=options.timeout_seconds
            )
            return [result]

        packs_of = self._packs_of(options)
        return _in_packs([list(arrays)], communicator.size, reduce_op, packs_of, reduce)[0]

    def _packs_of(self, options: CommunicationOptions) -> Callable[[list[Array]], list[list[int]]]:
        """Return what sorts the arrays of one call into packs, by their places in the list."""

        def by_count(arrays: list[Array]) -> list[list[int]]:
            if self._num_packs == 0:
                return [[i] for i in range(len(arrays))]
            total = sum(a.size for a in arrays)
            share = max(1, total // self._num_packs)
            packs: list[list[int]] = [[]]
            held = 0
            for i, a in enumerate(arrays):
                if held >= share and len(packs) < self._num_packs:
                    packs.append([])
                    held = 0
                packs[-1].append(i)
                held += a.size
            return packs

        def by_bytes(arrays: list[Array]) -> list[list[int]]:
            packs: list[list[int]] = [[]]
            held = 0
            for i, a in enumerate(arrays):
                if held > options.bytes_per_pack:
                    packs.append([])
                    held = 0
                packs[-1].append(i)
                held += a.nbytes
            return packs

        return by_bytes if options.bytes_per_pack else by_count


class RingAllReduce(_ScheduledOps):
    """All-reduce in a ring of the replicas: the least data moved; the default between CPU replicas.

    Parameters
    ----------
    num_packs : int
        Into how many packs the arrays of one call are joined; 0: none are joined.
    """

    algorithm = "ring"
    called = "Ring all-reduce"


class HierarchicalCopyAllReduce(_ScheduledOps):
    """All-reduce in two halves that exchange their sums; right for every number of devices.

    Parameters
    ----------
    num_packs : int
        Into how many packs the arrays of one call are joined; 0: none are joined.
    """

    algorithm = "hierarchical_copy"
    called = "HierarchicalCopy"


class ReductionToOneDevice(_ScheduledOps):
    """Copy all values to one device, reduce them there, and copy the result out.

    Parameters
    ----------
    reduce_to_device : str, optional
        The device that reduces; by default the first one.
    accumulation_fn : callable, optional
        Takes the list of the replicas' tensors and returns their sum; by default the core adds them
        in replica order.
    """

    algorithm = "reduce_to_one"
    called = "ReductionToOneDevice"

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[list[Tensor]], Any] | None = None,
    ) -> None:
        super().__init__()
        if reduce_to_device is not None:
            parse_device(reduce_to_device)
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    def takes_part_from_replicas(self) -> bool:
        """Return False with a user's own accumulation, which needs all values in one place."""
        return self.accumulation_fn is None and super().takes_part_from_replicas()

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values, by the user's accumulation if there is one."""
        if self.accumulation_fn is None:
            return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)
        results: list[Any] = []
        for value, destinations in value_destination_pairs:
            total = as_tensor(self.accumulation_fn([as_tensor(v) for v in value.values]))
            if reduce_op is ReduceOp.MEAN:
                total = total / len(value.values)
            count = num_destinations(destinations)
            results.append(total if count == 1 else Mirrored([total] * count))
        return results


def _in_packs(
    arrays: list[list[Array]],
    replicas: int,
    reduce_op: ReduceOp,
    packs_of: Callable[[list[Array]], list[list[int]]],
    reduce: Callable[[list[Array], str], list[Array]],
) -> list[list[Array]]:
    """Join arrays of one dtype into packs, reduce each pack, and return views of the results.

    ``arrays[r]`` are the arrays of the r-th replica that is here, of ``replicas`` in all;
    ``reduce(packs, op)`` takes one flat array for each that is here and returns one for each.
    """
    first = arrays[0]
    results: list[list[Array]] = [[None] * len(first) for _ in arrays]
    by_dtype: dict[np.dtype[Any], list[int]] = {}
    for i, array in enumerate(first):
        by_dtype.setdefault(array.dtype, []).append(i)
    for dtype, places in by_dtype.items():
        mean = reduce_op is ReduceOp.MEAN
        reduced_as = _REDUCED_AS | _SUMMED_FOR_MEAN_AS if mean else _REDUCED_AS
        work = np.dtype(reduced_as.get(dtype.name, dtype))
        # A mean of ints is a fraction: sum the ints exactly, then divide.
        whole = dtype.kind in "iub"
        op = "mean" if mean and not whole else "sum"
        for pack in packs_of([first[i] for i in places]):
            members = [places[k] for k in pack]
            flat = [_join([mine[i] for i in members], work) for mine in arrays]
            for out, total, mine in zip(results, reduce(flat, op), arrays, strict=True):
                if mean and whole:
                    total = total / replicas
                elif work != dtype:
                    total = total.astype(dtype)
                begin = 0
                for i in members:
                    like = mine[i]
                    part = total[begin : begin + like.size].reshape(like.shape)
                    out[i] = array_backend.asarray(part, like=like)
                    begin += like.size
    return results


def _join(arrays: list[Array], dtype: np.dtype[Any]) -> Array:
    """Return host arrays, flat, one after the other, in one array of ``dtype``."""
    hosts = [array_backend.to_numpy(a) for a in arrays]
    if len(hosts) == 1:
        return hosts[0].reshape(-1).astype(dtype, copy=False)
    return np.concatenate([h.reshape(-1) for h in hosts], dtype=dtype)


def _check_alike(row: Sequence[Array]) -> None:
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
    return PerReplica((value,))


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


def num_destinations(destinations: Any) -> int:
    """Return on how many devices ``destinations`` lies."""
    values = getattr(destinations, "values", None)
    return len(values) if isinstance(values, tuple) else 1
