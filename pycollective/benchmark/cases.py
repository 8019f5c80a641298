"""Cases to time: each collective's arrays, exact result, and least traffic.

Sizes are those of nccl-tests: the bytes of the whole array. In a collective of parts, the whole
array consists of all ranks' parts. In ragged parts, rank r has r + 1 shares. `all_reduce_many` has
the whole array in 16 arrays. In `send_recv` every rank sends to the next one. The expected result
is computed here, from the ranks' known contributions and not by the library.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pycollective import algorithms, array_backend, dtypes
from pycollective.algorithms import Algorithm
from pycollective.algorithms.simulation import ROOTED
from pycollective.comm import Communicator
from pycollective.launch.description import boot_id
from pycollective.nccl.device import present_stream

__all__ = [
    "COLLECTIVES", "PARTS", "REDUCING", "ROOTED", "Arrays", "Case", "algorithms_of", "has_choice",
    "dtype_of", "place", "takes",
]  # fmt: skip

COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "barrier", "all_reduce_many", "all_gather_ragged", "gather_ragged",
    "scatter_ragged", "all_to_all_ragged", "send_recv",
)  # fmt: skip
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "all_reduce_many")
MANY = 16
"""Number of arrays that `all_reduce_many` joins."""
_RAGGED = "_ragged"
_ID_BYTES = 40
PARTS = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")

Array = NDArray[Any]

_FOLDS: dict[str, Any] = {
    "sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@functools.cache
def has_choice(collective: str) -> bool:
    """Return True if calls of a collective accept the name of an algorithm."""
    method = getattr(Communicator, collective.removesuffix(_RAGGED), None)
    return method is not None and "algorithm" in inspect.signature(method).parameters


def algorithms_of(collective: str) -> list[str]:
    """Return the algorithms of one of `COLLECTIVES`, or ["-"] if it has none."""
    if collective == "send_recv":
        return ["-"]
    return algorithms.names(_of_algorithms(collective))


def _of_algorithms(collective: str) -> str:
    """Return the collective whose algorithms one of `COLLECTIVES` uses."""
    return "all_reduce" if collective == "all_reduce_many" else collective.removesuffix(_RAGGED)


def takes(collective: str, algorithm: Algorithm) -> bool:
    """Return True if a user's algorithm carries out one of `COLLECTIVES`."""
    return has_choice(collective) and algorithm.collective == _of_algorithms(collective)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name; raise TypeError if there is none."""
    return dtypes.as_dtype(name) if name == "bfloat16" else np.dtype(name)


def place(comm: Communicator, device: str) -> tuple[str, int]:
    """Return the type and the number of the device for a rank's arrays."""
    if device == "cpu":
        return "CPU", 0
    places = machines(comm)
    before = places[: comm.rank].count(places[comm.rank])
    return "GPU", before % max(1, array_backend.gpu_count()[0])


def machines(comm: Communicator) -> list[str]:
    """Return the machine of each rank, also where ranks of one machine use TCP; a collective call."""
    own = np.frombuffer(boot_id().ljust(_ID_BYTES).encode()[:_ID_BYTES], np.uint8)
    found = comm.all_gather(own).reshape(comm.size, -1)
    # Without an id, the ranks that share memory are on one machine.
    return [
        row.tobytes().decode().strip() or f"host {host}"
        for row, host in zip(found, comm.hosts, strict=True)
    ]


@dataclass(frozen=True)
class Case:
    """One call to time, one line of the table.

    Attributes
    ----------
    collective : str
        One of `COLLECTIVES`.
    size : int
        Bytes that are asked for; `bytes` is rounded to whole items and parts.
    ranks : int
        Number of ranks.
    dtype, op, algorithm
        As in the call; ignored by collectives that do not have them.
    in_place : bool
        The result replaces the input, if the collective can do that.
    registered : bool
        The arrays come from `Communicator.empty`, if all ranks' arrays have the same length.
    device : {"cpu", "gpu"}
        The device of the arrays; the ranks of a host take its GPUs in turn.
    """

    collective: str
    size: int
    ranks: int
    dtype: str = "float32"
    op: str = "sum"
    algorithm: str | Algorithm = "auto"
    in_place: bool = True
    registered: bool = False
    device: Literal["cpu", "gpu"] = "cpu"

    @property
    def algorithm_name(self) -> str:
        """Name of the algorithm in the table."""
        return self.algorithm if isinstance(self.algorithm, str) else self.algorithm.name

    @property
    def kind(self) -> str:
        """Name of the collective without "_ragged": the `Communicator` method, except `send_recv`."""
        return self.collective.removesuffix(_RAGGED)

    @property
    def ragged(self) -> bool:
        """True if the ranks' parts have different lengths."""
        return self.collective.endswith(_RAGGED)

    @property
    def in_registered(self) -> bool:
        """True if the arrays come from `Communicator.empty`; messages on GPUs refuse such arrays."""
        messages = self.device == "gpu" and self.collective == "send_recv"
        return self.registered and not self.ragged and not messages

    def places(self) -> list[int]:
        """Return the offsets of the ranks' parts in the whole array, and the end of the last part."""
        n, count = self.ranks, self.count
        if self.ragged:
            return [count * r * (r + 1) // (n * (n + 1)) for r in range(n + 1)]
        return [r * (count // n) for r in range(n + 1)]

    @property
    def count(self) -> int:
        """Number of items: at least one a rank, and a multiple of the ranks if they have parts."""
        if self.collective == "barrier":
            return 0
        items = max(1, self.size // dtype_of(self.dtype).itemsize)
        if self.kind in PARTS:
            items = max(1, items // self.ranks) * self.ranks
        return items

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return self.count * dtype_of(self.dtype).itemsize

    @property
    def placed(self) -> bool:
        """True if the call works in place."""
        never = self.ragged or self.collective in ("all_to_all", "barrier", "send_recv")
        return self.in_place and not never

    @property
    def bus_factor(self) -> float:
        """Bus bandwidth divided by algorithm bandwidth, as in nccl-tests."""
        n = self.ranks
        if self.collective in ("all_reduce", "all_reduce_many"):
            return 2 * (n - 1) / n
        return (n - 1) / n if self.kind in PARTS else 1.0

    @property
    def traffic(self) -> float:
        """Least number of bytes that all ranks together read and write.

        Every contribution is read once, and every result is written once. Data that is already in its
        place counts for neither.
        """
        n, size = self.ranks, self.bytes
        moved: float = {
            "all_reduce": 2 * n * size,
            "all_reduce_many": 2 * n * size,
            "reduce": (n + 1) * size,
            "broadcast": (n if self.placed else n + 1) * size,
            "all_gather": (n if self.placed else n + 1) * size,
            "gather": 2 * size,
            "scatter": 2 * size,
            "reduce_scatter": (n + 1) * size,
            "all_to_all": 2 * n * size,
            "send_recv": 2 * n * size,
            "barrier": 0,
        }[self.kind]
        if self.placed and self.collective in ("gather", "scatter"):
            moved -= 2 * size / n
        return moved


class Arrays:
    """One rank's arrays for a case.

    Attributes
    ----------
    call : callable
        A function that makes the call on the arrays.
    """

    def __init__(self, comm: Communicator, case: Case) -> None:
        self._comm, self._case = comm, case
        self._dtype = dtype_of(case.dtype)
        places = case.places()
        self._part = slice(*places[comm.rank : comm.rank + 2])
        length = self._part.stop - self._part.start
        kind = case.kind
        whole = self._empty(case.count)
        if kind in ("all_gather", "gather"):
            own = whole[self._part] if case.placed else self._empty(length)
            self._source, self._target = own, whole
        elif kind in ("scatter", "reduce_scatter"):
            own = whole[self._part] if case.placed else self._empty(length)
            self._source, self._target = whole, own
        elif case.ragged:  # all_to_all
            self._source, self._target = whole, self._empty(case.ranks * length)
        else:
            self._source = whole
            self._target = whole if case.placed else self._empty(case.count)
        self.call = self._call() if case.device == "cpu" else self._until_done(self._call())

    def _empty(self, count: int) -> Array:
        case = self._case
        where = place(self._comm, case.device)
        with array_backend.on_device(*where):
            if case.in_registered:
                return self._comm.empty(count, self._dtype, device=case.device)
            if case.device == "gpu":
                return array_backend.empty_on_gpu(count, self._dtype)
        return np.empty(count, self._dtype)

    def _until_done(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that makes the call and waits for the GPU."""

        def called() -> None:
            call()
            present_stream().synchronize()

        return called

    def _call(self) -> Callable[[], Any]:
        case, x, out = self._case, self._source, self._target
        if case.collective == "barrier":
            return self._comm.barrier
        if case.collective == "send_recv":
            return self._shift
        options: dict[str, Any] = {"out": out}
        if case.collective in REDUCING:
            options["op"] = case.op
        if has_choice(case.collective):
            options["algorithm"] = case.algorithm
        if case.ragged and case.kind != "all_to_all":
            options["ragged"] = True
        if case.kind in ("scatter", "all_to_all") and case.ragged:
            options["counts"] = np.diff(case.places()).tolist()
        if case.collective == "all_reduce_many":
            options["out"] = np.array_split(out, MANY)
            return functools.partial(self._comm.all_reduce_many, np.array_split(x, MANY), **options)
        return functools.partial(getattr(self._comm, case.kind), x, **options)

    def _shift(self) -> None:
        comm, n = self._comm, self._case.ranks
        sent = comm.send(self._source, (comm.rank + 1) % n, async_op=True)
        comm.recv(self._target, (comm.rank - 1) % n)
        sent.wait()

    def _values(self, rank: int) -> Array:
        """Return a rank's contribution: small whole numbers, so that every reduction is exact."""
        count = self._source.size
        if self._case.kind in ("all_gather", "gather"):
            begin, end = self._case.places()[rank : rank + 2]
            count = end - begin
        small = (np.arange(count) * 7 + rank * 3) % 5 + (self._dtype.kind != "b")
        if self._dtype.kind == "b":
            small = small % 2
        elif self._case.op == "prod" and self._case.collective in REDUCING:
            small = small % 2 + 1 if rank == 0 else np.ones(count, np.int64)
        return small.astype(self._dtype)

    def _expected(self) -> Array | None:
        """Return this rank's exact result, or None if it gets none."""
        case, rank, n = self._case, self._comm.rank, self._case.ranks
        part = self._part
        kind = case.kind
        if kind == "broadcast":
            return self._values(0)
        if kind in ("all_gather", "gather"):
            return (
                np.concatenate([self._values(r) for r in range(n)])
                if kind == "all_gather" or rank == 0
                else None
            )
        if kind == "scatter":
            return self._values(0)[part]
        if kind == "all_to_all":
            return np.concatenate([self._values(r)[part] for r in range(n)])
        if kind == "send_recv":
            return self._values((rank - 1) % n)
        if kind == "barrier" or (kind == "reduce" and rank):
            return None
        result = self._values(0)
        for r in range(1, n):
            _FOLDS[case.op](result, self._values(r), out=result)
        if case.op == "mean":
            result = self._mean(result)
        return result if kind != "reduce_scatter" else result[part]

    def _mean(self, total: Array) -> Array:
        n = self._case.ranks
        if self._dtype.kind in "iu":
            mean = np.sign(total) * (np.abs(total.astype(np.int64)) // n)  # toward zero
        else:
            mean = total / self._dtype.type(n)
        return np.asarray(mean, self._dtype)

    def wrong(self) -> int:
        """Make the call once and return the number of wrong items in this rank's result."""
        if self._case.collective == "barrier":
            self.call()
            return 0
        self._fill(self._values(self._comm.rank))
        self.call()
        want = self._expected()
        if want is None:
            return 0
        got = array_backend.to_numpy(self._target)
        if self._case.op != "mean" or self._case.collective not in REDUCING:
            return int(np.count_nonzero(got != want))
        wide = np.complex128 if self._dtype.kind == "c" else np.float64
        tolerance = 0.01 if self._dtype.itemsize == 2 else 1e-6
        close = np.isclose(got.astype(wide), want.astype(wide), rtol=tolerance)
        return int(np.count_nonzero(~close))

    @property
    def growing(self) -> int:
        """Number of calls after which sums in place need `refill` to stay finite; 0: never."""
        case = self._case
        # A product does not grow: `refill` gives ones, whose product stays 1.
        grows = case.placed and case.kind in ("all_reduce", "all_reduce_many") and case.op == "sum"
        if not grows or self._dtype.kind in "biu" or case.ranks == 1:
            return 0
        limit = 1e7 if case.dtype == "float16" else 1e60
        return int(math.log(limit) / math.log(case.ranks))

    def refill(self) -> None:
        """Fill the input with small numbers other than zero, different on every rank."""
        if self._case.collective == "barrier":
            return
        values = self._values(self._comm.rank)
        if self._dtype.kind not in "biu" and self._case.op != "prod":
            values = values * self._dtype.type(7e-5 if self._case.dtype == "float16" else 1e-30)
        self._fill(values if self._case.op != "prod" else np.ones_like(values))

    def _fill(self, values: Array) -> None:
        array_backend.assign(self._source, values)
