"""The collective calls of a trial: how a rank makes each of them, and the exact result.

All inputs are small integers, so that every dtype holds every result exactly. They depend on the
step's salt, so that data of an earlier call is seldom right for a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

INTEGERS = ("int8", "uint8", "int16", "int32", "int64", "uint64")
FLOATS = ("float16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)


def ops(dtype: str) -> tuple[str, ...]:
    """Return the ops that a dtype has."""
    if dtype == "bool":
        return ("min", "max", "and", "or", "xor")
    if dtype in COMPLEX:
        return ("sum", "prod", "mean")
    both = ("sum", "prod", "min", "max", "mean")
    return both if dtype in FLOATS else (*both, "and", "or", "xor")


@dataclass(frozen=True)
class Step:
    """One call, which all ranks of a group make."""

    call: str
    group: str = "world"
    """``"world"``, or ``"part"``: the rank's group of the trial's split."""
    dtype: str = "float32"
    rows: int = 1
    """Elements of one rank's part."""
    op: str = "sum"
    root: int = 0
    """Taken modulo the size of the group."""
    algorithm: str = "auto"
    memory: str = "ordinary"
    """``"ordinary"``, ``"shared"`` (`Communicator.empty`) or ``"strided"``."""
    in_place: bool = False
    later: int = 0
    """0: a blocking call. n: an asynchronous call, waited for n steps later or before a split."""
    pauses: tuple[float, ...] = ()
    """Seconds that each rank sleeps before the call."""
    salt: int = 0


@dataclass(frozen=True)
class Place:
    """Rank and size in the group of a step."""

    rank: int
    size: int


def numbers(step: Step, rank: int, count: int, size: int) -> np.ndarray:
    """Return ``count`` numbers that a rank contributes to a step."""
    most = 2 if step.op == "prod" else 7
    pattern = (np.arange(7 * most) * 3 + 5 * rank + step.salt) % most + 1
    if step.dtype == "bool":
        pattern = pattern % 2
    if step.op == "mean":
        pattern = pattern * size
    return np.resize(pattern, count).astype(step.dtype)


def combined(step: Step, contributions: list[np.ndarray]) -> np.ndarray:
    """Return the contributions reduced by the step's op."""
    functions: dict[str, Any] = {
        "sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    total = contributions[0].copy()
    for other in contributions[1:]:
        total = functions[step.op](total, other)
    if step.op == "mean":
        total = (
            total // len(contributions) if step.dtype in INTEGERS else total / len(contributions)
        )
    return total.astype(step.dtype)


def parts(step: Step, place: Place, count: int) -> list[np.ndarray]:
    """Return each rank's contribution, with ``count`` elements."""
    return [numbers(step, r, count, place.size) for r in range(place.size)]


@dataclass(frozen=True)
class Call:
    """One kind of call."""

    inputs: Callable[[Step, Place], np.ndarray]
    """The array that this rank gives."""
    run: Callable[[Any, np.ndarray, np.ndarray | None, Step, dict[str, Any]], Any]
    """Make the call with communicator, input, output, step and keyword arguments."""
    result: Callable[[Step, Place], np.ndarray | list[np.ndarray] | None]
    reduces: bool = False
    rooted: bool = False
    collective: str = ""
    """The collective whose algorithms the call takes; empty: it takes none."""
    shared: bool = False
    """True if every rank's input has the same shape, so that `Communicator.empty` may make it."""
    in_place: bool = False
    ragged: bool = False
    pair: bool = False
    """True if the call consists of messages between two ranks."""


def _root(step: Step, place: Place) -> int:
    return step.root % place.size


def _own(step: Step, place: Place) -> np.ndarray:
    return numbers(step, place.rank, step.rows, place.size)


def _own_for_all(step: Step, place: Place) -> np.ndarray:
    return numbers(step, place.rank, step.rows * place.size, place.size)


def _own_ragged(step: Step, place: Place) -> np.ndarray:
    return numbers(step, place.rank, step.rows + place.rank, place.size)


def _cut(whole: np.ndarray, place: Place, rank: int) -> np.ndarray:
    return whole.reshape(place.size, -1)[rank]


def _at_root(
    result: Callable[[Step, Place], np.ndarray],
) -> Callable[[Step, Place], np.ndarray | None]:
    return lambda step, place: result(step, place) if place.rank == _root(step, place) else None


def _sum_of_all(step: Step, place: Place) -> np.ndarray:
    return combined(step, parts(step, place, step.rows))


def _sum_part(step: Step, place: Place) -> np.ndarray:
    return _cut(combined(step, parts(step, place, step.rows * place.size)), place, place.rank)


def _of_root(step: Step, place: Place) -> np.ndarray:
    return numbers(step, _root(step, place), step.rows, place.size)


def _concatenated(step: Step, place: Place) -> np.ndarray:
    return np.concatenate(parts(step, place, step.rows))


def _ragged_parts(step: Step, place: Place) -> np.ndarray:
    return np.concatenate([numbers(step, r, step.rows + r, place.size) for r in range(place.size)])


def _from_root(step: Step, place: Place) -> np.ndarray:
    whole = numbers(step, _root(step, place), step.rows * place.size, place.size)
    return _cut(whole, place, place.rank)


def _from_each(step: Step, place: Place) -> np.ndarray:
    return np.concatenate(
        [_cut(whole, place, place.rank) for whole in parts(step, place, step.rows * place.size)]
    )


def _lengths_of_many(step: Step) -> list[int]:
    return [step.rows, step.rows // 3, 1]


def _many(step: Step, place: Place) -> np.ndarray:
    return numbers(step, place.rank, sum(_lengths_of_many(step)), place.size)


def _cut_many(step: Step, whole: np.ndarray) -> list[np.ndarray]:
    return np.split(whole, np.cumsum(_lengths_of_many(step))[:-1])


def _sum_of_many(step: Step, place: Place) -> list[np.ndarray]:
    lengths = sum(_lengths_of_many(step))
    return _cut_many(step, combined(step, parts(step, place, lengths)))


def _counts(rank: int, size: int, rows: int) -> list[int]:
    """Return the rows that a rank sends to each rank in an all-to-all of ragged parts."""
    return [rows + (rank + r) % 2 for r in range(size)]


def _own_counted(step: Step, place: Place) -> np.ndarray:
    count = sum(_counts(place.rank, place.size, step.rows))
    return numbers(step, place.rank, count, place.size)


def _from_each_counted(step: Step, place: Place) -> np.ndarray:
    found = []
    for r in range(place.size):
        counts = _counts(r, place.size, step.rows)
        begin = sum(counts[: place.rank])
        whole = numbers(step, r, sum(counts), place.size)
        found.append(whole[begin : begin + counts[place.rank]])
    return np.concatenate(found)


class _Both:
    """The works of a send and a recv, waited for together."""

    def __init__(self, sent: Any, received: Any) -> None:
        self._works = [sent, received]

    def wait(self) -> np.ndarray:
        return [work.wait() for work in self._works][1]


def _exchange(comm: Any, x: np.ndarray, out: Any, step: Step, how: dict[str, Any]) -> Any:
    """Send to the next rank, and receive from the previous one."""
    following, previous, tag = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, step.salt
    how.pop("algorithm", None)
    sent = comm.send(x, following, tag, **how)
    kind = {"out": out} if out is not None else {"shape": x.shape, "dtype": x.dtype}
    received = comm.recv(source=previous, tag=tag, **kind, **how)
    return _Both(sent, received) if how.get("async_op") else received


def _from_previous(step: Step, place: Place) -> np.ndarray:
    return numbers(step, (place.rank - 1) % place.size, step.rows, place.size)


def _barrier(comm: Any, x: Any, out: Any, step: Step, how: dict[str, Any]) -> Any:
    how.pop("algorithm", None)
    return comm.barrier(**how)


CALLS: dict[str, Call] = {
    "all_reduce": Call(
        _own, lambda c, x, out, s, how: c.all_reduce(x, s.op, out=out, **how), _sum_of_all,
        reduces=True, collective="all_reduce", shared=True, in_place=True,
    ),
    "all_reduce_many": Call(
        _many, lambda c, x, out, s, how: c.all_reduce_many(_cut_many(s, x), s.op, **how),
        _sum_of_many, reduces=True, collective="all_reduce",
    ),
    "reduce": Call(
        _own, lambda c, x, out, s, how: c.reduce(x, s.op, s.root % c.size, **how),
        _at_root(_sum_of_all), reduces=True, rooted=True, collective="reduce", shared=True,
    ),
    "reduce_scatter": Call(
        _own_for_all, lambda c, x, out, s, how: c.reduce_scatter(x, s.op, out=out, **how), _sum_part,
        reduces=True, collective="reduce_scatter", shared=True,
    ),
    "broadcast": Call(
        _own, lambda c, x, out, s, how: c.broadcast(x, s.root % c.size, out=out, **how), _of_root,
        rooted=True, collective="broadcast", shared=True, in_place=True,
    ),
    "all_gather": Call(
        _own, lambda c, x, out, s, how: c.all_gather(x, **how), _concatenated,
        collective="all_gather", shared=True,
    ),
    "all_gather ragged": Call(
        _own_ragged, lambda c, x, out, s, how: c.all_gather(x, ragged=True, **how), _ragged_parts,
        collective="all_gather", ragged=True,
    ),
    "gather": Call(
        _own, lambda c, x, out, s, how: c.gather(x, s.root % c.size, **how),
        _at_root(_concatenated), rooted=True, collective="gather", shared=True,
    ),
    "scatter": Call(
        _own_for_all, lambda c, x, out, s, how: c.scatter(x, s.root % c.size, out=out, **how),
        _from_root, rooted=True, collective="scatter", shared=True,
    ),
    "all_to_all": Call(
        _own_for_all, lambda c, x, out, s, how: c.all_to_all(x, out=out, **how), _from_each,
        collective="all_to_all", shared=True,
    ),
    "all_to_all ragged": Call(
        _own_counted,
        lambda c, x, out, s, how: c.all_to_all(x, _counts(c.rank, c.size, s.rows), **how),
        _from_each_counted, collective="all_to_all", ragged=True,
    ),
    "exchange": Call(_own, _exchange, _from_previous, shared=True, pair=True),
    "barrier": Call(lambda step, place: np.empty(0), _barrier, lambda step, place: None),
}  # fmt: skip
