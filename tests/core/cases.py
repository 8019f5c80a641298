"""The cases of test_suite.py: calls of every collective, with exactly known results."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import own_algorithms
from layouts import LAYOUTS, laid_out

from pycollective import algorithms
from pycollective._core import SEGMENT_BYTES
from pycollective.algorithms import Algorithm
from pycollective.algorithms.simulation import ROOTED


class Variant(NamedTuple):
    """A collective by one of its algorithms; ``ragged`` if the parts have different lengths."""

    collective: str
    algorithm: str | Algorithm = ""
    ragged: bool = False

    def __str__(self) -> str:
        how = self.algorithm if isinstance(self.algorithm, str) else f"own {self.algorithm.name}"
        return f"{self.collective} {how}{' ragged' * self.ragged}".strip()


def _variants(collective: str, *others: str | Algorithm) -> list[Variant]:
    return [Variant(collective, how) for how in [*algorithms.names(collective), *others]]


REDUCTIONS = [
    *_variants(
        "all_reduce", "auto", "hierarchical", own_algorithms.ring, own_algorithms.through_scratch
    ),
    *_variants("reduce", own_algorithms.fan_in),
    *_variants("reduce_scatter", "auto", own_algorithms.collect),
    *_variants("scan", "auto", own_algorithms.onward),
    *_variants("exscan", "auto"),
]
MOVES = [
    *_variants("broadcast", "auto", own_algorithms.fan),
    *_variants("all_gather", "auto", own_algorithms.everyone),
    *_variants("gather", own_algorithms.funnel),
    *_variants("scatter", own_algorithms.deal),
    *_variants("all_to_all", own_algorithms.swap),
    *[Variant(c, ragged=True) for c in ("gather", "scatter", "all_to_all")],
    *[Variant("all_gather", how, ragged=True) for how in ("auto", "doubling", "direct")],
]
CUT = ("reduce_scatter", "scatter", "all_to_all")  # Every rank gets a part of an array.

INTS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
HALVES = ["float16", "bfloat16"]
FLOATS = [*HALVES, "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
OPS = ["sum", "prod", "min", "max", "mean"]
BITS = ["and", "or", "xor"]

# Reductions have every dtype with each of its ops, moves have every dtype.
KINDS = [
    *itertools.product(INTS, [*OPS, *BITS]),
    *itertools.product(FLOATS, OPS),
    *itertools.product(COMPLEX, ["sum", "prod", "mean"]),
    *itertools.product(["bool"], ["min", "max", *BITS]),
]
MOVED = [(dtype, "") for dtype in [*INTS, *FLOATS, *COMPLEX, "bool", "S5", "M8[s]"]]

RANKS = [1, 2, 3, 4, 5, 7, 8, 16]
SIZES = ["0", "1", "2", "97", "chunk-1", "chunk+1", "large"]
COMMON_FACTORS: dict[str, Sequence[Any]] = {
    "size": SIZES,
    "root": ["first", "middle", "last"],
    "target": ["new", "in place", "out", "strided out"],
    "layout": [*LAYOUTS, "comm.empty"],
    "call": ["blocking", "async"],
}
FACTORS = {
    "reductions": {"what": REDUCTIONS, "kind": KINDS, **COMMON_FACTORS},
    "moves": {"what": MOVES, "kind": MOVED, **COMMON_FACTORS},
}


@dataclass(frozen=True)
class Case:
    """One call of every rank; the fields are the number of ranks and `FACTORS`."""

    ranks: int
    what: Variant
    kind: tuple[str, str]
    size: str
    root: str
    target: str
    layout: str
    call: str

    def __str__(self) -> str:
        return ", ".join(map(str, vars(self).values()))

    @property
    def dtype(self) -> np.dtype[Any]:
        name = self.kind[0]
        return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    @property
    def root_rank(self) -> int:
        return {"first": 0, "middle": self.ranks // 2, "last": self.ranks - 1}[self.root]

    @property
    def rows(self) -> int:
        """The rows of a rank's array, or of each part if there are parts."""
        in_parts = self.what.collective in CUT or "gather" in self.what.collective
        chunks = 1 if in_parts else num_chunks(self.what, self.ranks)
        if self.size == "large":
            items = 40_009 if self.ranks < 6 else 200_003 // self.ranks
            return items // 20 if in_parts else items
        if self.size == "blocks":  # more than one block of the executor
            return int(1.1 * SEGMENT_BYTES / self.dtype.itemsize * chunks)
        if self.size.startswith("chunk"):
            line = 64 // math.gcd(64, self.dtype.itemsize)
            return 3 * line * chunks + int(self.size[len("chunk") :])
        return int(self.size)

    @property
    def counts(self) -> np.ndarray:
        """Rows that rank i has for rank j, ``[i, j]``: equal for each i except in all_to_all."""
        n, turn = self.rows, np.arange(self.ranks)
        if not self.what.ragged:
            return np.full((self.ranks, self.ranks), n)
        if self.what.collective == "all_to_all":
            return (n + 3 * turn[:, None] + turn) % (n + 2)
        return np.tile((n * (turn + 1)) % (n + 2), (self.ranks, 1))


@functools.cache
def num_chunks(what: Variant, ranks: int) -> int:
    """Return the number of chunks of an array in an algorithm; for "auto", a likely number."""
    if what.algorithm in ("auto", "hierarchical"):
        return ranks
    return algorithms.schedule(what.algorithm, ranks, what.collective).chunks


def pairwise(factors: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield few combinations, chosen greedily, that contain each pair of values of two factors."""
    names, counts = list(factors), [len(values) for values in factors.values()]
    left = {
        (a, b): set(itertools.product(range(counts[a]), range(counts[b])))
        for a, b in itertools.permutations(range(len(names)), 2)
    }

    def best(factor: int, chosen: dict[int, int], turn: int) -> int:
        """Return the value that forms most new pairs; values that form equally many take turns."""
        return max(
            range(counts[factor]),
            key=lambda value: (
                sum((value, taken) in left[factor, other] for other, taken in chosen.items()),
                -((value - turn) % counts[factor]),
            ),
        )

    for turn in itertools.count():
        pair = max(left, key=lambda pair: len(left[pair]))
        if not left[pair]:
            return
        chosen = dict(zip(pair, min(left[pair]), strict=True))
        for factor in range(len(names)):
            if factor not in chosen:
                chosen[factor] = best(factor, chosen, turn)
        for (a, b), pairs in left.items():
            pairs.discard((chosen[a], chosen[b]))
        yield {name: factors[name][chosen[i]] for i, name in enumerate(names)}


def contributions(case: Case) -> np.ndarray:
    """Return the ranks' inputs. Their reductions are exact in any order.

    The shape is (ranks, rows of a rank, ...).
    """
    rows = case.counts.sum(axis=1)
    if case.what.collective not in CUT:
        rows = case.counts[0]
    if not case.what.ragged:
        rows = rows[:1]
    shape = (case.ranks, int(rows.max(initial=0)), *((3,) if case.layout == "F" else ()))
    random = np.random.default_rng(len(str(case)))
    dtype, op = case.dtype, case.kind[1]
    if dtype.kind == "b":
        return random.random(shape) < 0.5
    whole = random.integers(-4, 5, shape)
    if dtype.kind in "iu":
        return whole.astype(dtype)
    if dtype.kind == "S":
        return np.char.add("r", whole.astype("S3").astype("U")).astype(dtype)
    if dtype.kind == "M":
        return whole.astype("i8").astype(dtype)
    if op == "mean":
        whole = whole * case.ranks
    if op == "prod":  # powers of two, and not too many of them
        exponents = random.integers(-1, 2, shape) * (np.arange(case.ranks) < 8).reshape(
            -1, *[1] * (len(shape) - 1)
        )
        whole = np.where(whole < 0, -1.0, 1.0) * 2.0**exponents
    if dtype.kind == "c":
        turned = random.integers(0, 4, shape)
        return (whole * np.array([1, 1j, -1, -1j])[turned]).astype(dtype)
    return whole.astype(dtype)


def reduced(x: np.ndarray, op: str) -> np.ndarray:
    """Return the reduction over the first axis."""
    first = {"min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
             "xor": np.bitwise_xor, "prod": np.multiply}.get(op, np.add)  # fmt: skip
    total = x[0]
    for other in x[1:]:
        total = first(total, other)
    if op == "mean" and x.dtype.kind in "iu":
        return np.sign(total) * (np.abs(total) // x.dtype.type(len(x)))  # toward zero
    if op == "mean" and x.dtype.kind == "c":  # NumPy multiplies by a reciprocal
        return (total.real / len(x) + 1j * (total.imag / len(x))).astype(x.dtype)
    return (total / x.dtype.type(len(x))).astype(x.dtype) if op == "mean" else total


def neutral(op: str, dtype: np.dtype[Any]) -> Any:
    """Return the identity of an operation for a dtype."""
    if op in ("min", "max") and dtype.kind in "iu":
        return getattr(np.iinfo(dtype), {"min": "max", "max": "min"}[op])
    all_bits = True if dtype.kind == "b" else ~dtype.type(0) if dtype.kind in "iu" else None
    least, greatest = (False, True) if dtype.kind == "b" else (-math.inf, math.inf)
    return {"prod": 1, "min": greatest, "max": least, "and": all_bits}.get(op, 0)


class Known:
    """The inputs and results of each rank in a case."""

    def __init__(self, case: Case) -> None:
        what, ranks, counts = case.what, case.ranks, case.counts
        x = contributions(case)
        if what.ragged and what.collective == "all_to_all":
            self.given = [x[r, : counts[r].sum()] for r in range(ranks)]
        elif what.ragged and what.collective != "scatter":
            self.given = [x[r, : counts[0, r]] for r in range(ranks)]
        else:
            self.given = list(x)
        root = case.root_rank
        begins = np.concatenate([np.zeros((ranks, 1), int), counts.cumsum(axis=1)], axis=1)
        self.parts = [slice(b, b + n) for b, n in zip(begins[0], counts[0], strict=False)]
        due: list[Any]
        if what.collective in ("all_reduce", "reduce"):
            due = [reduced(x, case.kind[1])] * ranks
        elif what.collective in ("scan", "exscan"):
            op, first = case.kind[1], what.collective == "exscan"
            due = [reduced(x[: r + 1].copy(), op) for r in range(ranks - first)]
            if first:
                due.insert(0, np.full_like(x[0], neutral(op, x.dtype)))
        elif what.collective == "reduce_scatter":
            total = reduced(x, case.kind[1])
            due = [total[part] for part in self.parts]
        elif what.collective == "broadcast":
            due = [x[root]] * ranks
        elif what.collective in ("all_gather", "gather"):
            due = [np.concatenate(self.given)] * ranks
        elif what.collective == "scatter":
            due = [x[root, part] for part in self.parts]
        else:
            due = [
                np.concatenate([x[i, begins[i, j] : begins[i, j + 1]] for i in range(ranks)])
                for j in range(ranks)
            ]
        self.due = due


class Shared:
    """The `Known` of the last cases, which the first rank computes for all ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = functools.lru_cache(maxsize=8)(Known)

    def __call__(self, case: Case) -> Known:
        with self._lock:
            return self._known(case)


def play(comm: Any, case: Case, known: Known) -> None:
    """Make one rank's call, and compare its result exactly with the known one."""
    what, rank, root = case.what, comm.rank, case.root_rank
    given, due, part = known.given[rank], known.due[rank], known.parts[rank]
    gets = what.collective not in ("reduce", "gather") or rank == root
    in_place = case.target == "in place"

    def placed(x: np.ndarray) -> np.ndarray:
        if case.layout != "comm.empty":
            return laid_out(x, case.layout)
        # All ranks must make the same call of empty(), so each makes an array of the largest length.
        most = max(max(len(g), len(d)) for g, d in zip(known.given, known.due, strict=True))
        memory = comm.empty((most, *x.shape[1:]), x.dtype)[: len(x)]
        memory[...] = x
        return memory

    out = None
    if in_place and "gather" in what.collective:
        whole = placed(np.zeros_like(due))
        x = whole[part]
        x[...] = given
        out = whole
    else:
        x = placed(given)
        if in_place:
            if what.collective in ("reduce_scatter", "scatter"):
                out = x[part] if what.collective == "reduce_scatter" or rank == root else None
            elif x.shape == due.shape:
                out = x
    if case.target.endswith("out"):
        noise = np.full(due.nbytes, 0x55, "u1").view(due.dtype).reshape(due.shape)
        out = laid_out(noise, case.target.removesuffix("out").strip())
    if not gets:
        out = None
    options: dict[str, Any] = {"out": out, "async_op": case.call == "async"}
    if what.algorithm:
        options["algorithm"] = what.algorithm
    if case.kind[1]:
        options["op"] = case.kind[1]
    if what.collective in ROOTED:
        options["root"] = root
    if what.ragged and what.collective == "all_to_all":
        options["counts"] = case.counts[rank]
        if case.size == "97":
            options["out_counts"] = case.counts[:, rank]
    elif what.ragged:
        options["ragged"] = True
        if what.collective == "scatter" and rank == root:
            options["counts"] = case.counts[0]
    result = getattr(comm, what.collective)(x, **options)
    if case.call == "async":
        result = result.wait()
    if not gets:
        assert result is None, case
        return
    assert out is None or result is out, case
    assert (result.shape, result.dtype) == (due.shape, due.dtype), case
    if not np.array_equal(result, due):
        raise AssertionError(f"rank {rank}: {case}: {result} instead of {due}")
    if out is None or case.target.endswith("out"):
        assert np.array_equal(x, given), f"rank {rank}: {case}: the input has changed"
