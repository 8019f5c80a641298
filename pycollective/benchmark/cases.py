"""What is timed: each collective's arrays, exact result, and least traffic.

Sizes are those of nccl-tests: of the whole array, which for a collective of parts is all ranks' parts
together. A result is computed here from the numbers that every rank is known to have, not by the
library.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycollective.algorithms.simulation import ROOTED
from pycollective.communicator import Communicator

__all__ = ["COLLECTIVES", "PARTS", "REDUCING", "ROOTED", "Arrays", "Case", "has_choice", "kind_of"]

COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "barrier",
)  # fmt: skip
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
PARTS = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")

Array = NDArray[Any]

_FOLDS: dict[str, Any] = {
    "sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@functools.cache
def has_choice(collective: str) -> bool:
    """Whether calls of a collective can name an algorithm."""
    return "algorithm" in inspect.signature(getattr(Communicator, collective)).parameters


def kind_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name; bfloat16 is of ``ml_dtypes``.

    Raises
    ------
    ImportError
        If ``ml_dtypes`` is needed and not there.
    TypeError
        If there is no such dtype.
    """
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ImportError(
                "bfloat16 needs ml_dtypes: pip install 'pycollective[bf16]'"
            ) from None
        name = ml_dtypes.bfloat16
    kind: np.dtype[Any] = np.dtype(name)
    return kind


@dataclass(frozen=True)
class Case:
    """One line of the table: a call, and on how much.

    Attributes
    ----------
    collective : str
        One of `COLLECTIVES`.
    size : int
        Bytes that are asked for; `bytes` are those that can be had.
    ranks : int
        Number of ranks.
    dtype, op, algorithm : str
        As the collective takes them; those that it does not take are not looked at.
    in_place : bool
        Whether the result replaces the input where the collective can do that.
    """

    collective: str
    size: int
    ranks: int
    dtype: str = "float32"
    op: str = "sum"
    algorithm: str = "auto"
    in_place: bool = True

    @property
    def count(self) -> int:
        """Items of the whole array: a multiple of the ranks where they have parts, at least one each."""
        if self.collective == "barrier":
            return 0
        items = max(1, self.size // kind_of(self.dtype).itemsize)
        if self.collective in PARTS:
            items = max(1, items // self.ranks) * self.ranks
        return items

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return self.count * kind_of(self.dtype).itemsize

    @property
    def placed(self) -> bool:
        """Whether the call really works in place."""
        return self.in_place and self.collective not in ("all_to_all", "barrier")

    @property
    def bus_factor(self) -> float:
        """What nccl-tests multiplies algorithm bandwidth by to get bus bandwidth."""
        n = self.ranks
        if self.collective == "all_reduce":
            return 2 * (n - 1) / n
        return (n - 1) / n if self.collective in PARTS else 1.0

    @property
    def traffic(self) -> float:
        """Bytes that all ranks together must at least read and write.

        Every contribution is read once and every result written once; what is in its place already is
        neither.
        """
        n, size = self.ranks, self.bytes
        moved: float = {
            "all_reduce": 2 * n * size,
            "reduce": (n + 1) * size,
            "broadcast": (n if self.placed else n + 1) * size,
            "all_gather": (n if self.placed else n + 1) * size,
            "gather": 2 * size,
            "scatter": 2 * size,
            "reduce_scatter": (n + 1) * size,
            "all_to_all": 2 * n * size,
            "barrier": 0,
        }[self.collective]
        if self.placed and self.collective in ("gather", "scatter"):
            moved -= 2 * size / n
        return moved


class Arrays:
    """One rank's arrays for a case.

    Attributes
    ----------
    call : callable
        Makes the call on them.
    """

    def __init__(self, comm: Communicator, case: Case) -> None:
        self._comm, self._case = comm, case
        self._dtype = kind_of(case.dtype)
        count, n, rank = case.count, case.ranks, comm.rank
        part = slice(rank * (count // n), (rank + 1) * (count // n))
        what = case.collective
        whole = np.empty(count, self._dtype)
        if what in ("all_gather", "gather"):
            own = whole[part] if case.placed else np.empty(count // n, self._dtype)
            self._source, self._target = own, whole
        elif what in ("scatter", "reduce_scatter"):
            own = whole[part] if case.placed else np.empty(count // n, self._dtype)
            self._source, self._target = whole, own
        else:
            self._source = whole
            self._target = whole if case.placed else np.empty(count, self._dtype)
        self.call = self._call()

    def _call(self) -> Callable[[], Any]:
        case, x, out = self._case, self._source, self._target
        if case.collective == "barrier":
            return self._comm.barrier
        options: dict[str, Any] = {"out": out}
        if case.collective in REDUCING:
            options["op"] = case.op
        if has_choice(case.collective):
            options["algorithm"] = case.algorithm
        return functools.partial(getattr(self._comm, case.collective), x, **options)

    def _values(self, rank: int) -> Array:
        """Return a rank's contribution: small whole numbers, so that every reduction is exact."""
        count = self._source.size
        small = (np.arange(count) * 7 + rank * 3) % 5 + (self._dtype.kind != "b")
        if self._dtype.kind == "b":
            small = small % 2
        elif self._case.op == "prod" and self._case.collective in REDUCING:
            small = small % 2 + 1 if rank == 0 else np.ones(count, np.int64)
        return small.astype(self._dtype)

    def _expected(self) -> Array | None:
        """Return what this rank must get; None: nothing."""
        case, rank, n = self._case, self._comm.rank, self._case.ranks
        part = self._target.size
        what = case.collective
        if what == "broadcast":
            return self._values(0)
        if what in ("all_gather", "gather"):
            return (
                np.concatenate([self._values(r) for r in range(n)])
                if what[0] == "a" or rank == 0
                else None
            )
        if what == "scatter":
            return self._values(0)[rank * part : (rank + 1) * part]
        if what == "all_to_all":
            own = slice(rank * (part // n), (rank + 1) * (part // n))
            return np.concatenate([self._values(r)[own] for r in range(n)])
        if what == "barrier" or (what == "reduce" and rank):
            return None
        result = self._values(0)
        for r in range(1, n):
            _FOLDS[case.op](result, self._values(r), out=result)
        if case.op == "mean":
            result = self._mean(result)
        return result if what != "reduce_scatter" else result[rank * part : (rank + 1) * part]

    def _mean(self, total: Array) -> Array:
        n = self._case.ranks
        if self._dtype.kind in "iu":
            mean = np.sign(total) * (np.abs(total.astype(np.int64)) // n)  # toward zero
        else:
            mean = total / self._dtype.type(n)
        return np.asarray(mean, self._dtype)

    def wrong(self) -> int:
        """Make the call once and return how many items of this rank's result are not right."""
        if self._case.collective == "barrier":
            self.call()
            return 0
        self._source[...] = self._values(self._comm.rank)
        self.call()
        want = self._expected()
        if want is None:
            return 0
        got = self._target
        if self._case.op != "mean" or self._case.collective not in REDUCING:
            return int(np.count_nonzero(got != want))
        wide = np.complex128 if self._dtype.kind == "c" else np.float64
        tolerance = 0.01 if self._dtype.itemsize == 2 else 1e-6
        close = np.isclose(got.astype(wide), want.astype(wide), rtol=tolerance)
        return int(np.count_nonzero(~close))

    @property
    def growing(self) -> int:
        """Calls after which `refill` is due, so that sums in place stay finite; 0: never."""
        case = self._case
        grows = case.placed and case.collective == "all_reduce" and case.op in ("sum", "prod")
        if not grows or self._dtype.kind in "biu" or case.ranks == 1:
            return 0
        if case.op == "prod":
            return 0  # of ones
        limit = 1e7 if case.dtype == "float16" else 1e60
        return int(math.log(limit) / math.log(case.ranks))

    def refill(self) -> None:
        """Give the input numbers to time with: not zeros, no two ranks' the same, small ones."""
        if self._case.collective == "barrier":
            return
        values = self._values(self._comm.rank)
        if self._dtype.kind not in "biu" and self._case.op != "prod":
            values = values * self._dtype.type(7e-5 if self._case.dtype == "float16" else 1e-30)
        self._source[...] = values if self._case.op != "prod" else self._dtype.type(1)
