"""Measure one case on a group; every rank makes the same calls of these functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pycollective import array_backend
from pycollective.benchmark.cases import ROOTED, Arrays, Case, place
from pycollective.comm import Communicator

_SMALLEST_LIMIT = 64 << 10
"""Bytes of an array below which the call costs more than memory, so that no limit is given."""

_MOST_ITERATIONS = 20_000
_LONG = 3.0
_MEMORY_SECONDS = 0.02
_MEMORY_TURNS = 5


@dataclass(frozen=True)
class Row:
    """Measurement of one case.

    Attributes
    ----------
    bytes, count : int
        Size of the whole array.
    iterations : int
        Number of timed calls.
    p50_us, p99_us, min_us : float
        Microseconds of a call on the slowest rank.
    algbw_gb_s, busbw_gb_s : float
        Bytes over the median time, and the same times nccl-tests' factor, in 10⁹ bytes per second.
    limit_gb_s : float or None
        The memory's rate in 10⁹ bytes per second; see `memory_rate`.
    percent_of_limit : float or None
        Speed in percent of the speed at which memory could move the collective's least traffic.
    wrong : int
        Number of wrong items in all ranks' results.
    registered : bool
        The arrays came from `Communicator.empty`.
    """

    collective: str
    bytes: int
    count: int
    type: str
    op: str
    algorithm: str
    in_place: bool
    ranks: int
    iterations: int
    p50_us: float
    p99_us: float
    min_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    limit_gb_s: float | None
    percent_of_limit: float | None
    wrong: int
    registered: bool = False


def _slowest(comm: Communicator, seconds: Any) -> Any:
    return comm.all_reduce(np.asarray(seconds, np.float64), "max")


def memory_rate(comm: Communicator, size: int) -> float:
    """Measure memory: all ranks at once copy ``size`` bytes, and then change them in place.

    The ranks meet between the turns. Otherwise more ranks than cores would take turns on the cores, and
    each would find its own data in the caches.

    Returns
    -------
    float
        Bytes per second that all ranks together read and write in the faster of the two ways, the
        median of several turns.
    """
    source = np.arange(1, 1 + max(1, size // 8), dtype=np.uint64)
    target = source + 1
    clock = time.perf_counter

    def seconds_of(work: Callable[[], Any]) -> float:
        def one_turn(times: int) -> float:
            begin = clock()
            for _ in range(times):
                comm.barrier()
                work()
            return float(_slowest(comm, clock() - begin))

        one_turn(2)
        times = max(1, min(1000, int(_MEMORY_SECONDS / (one_turn(3) / 3))))
        return float(np.median([one_turn(times) for _ in range(_MEMORY_TURNS)])) / times

    fastest = min(
        seconds_of(lambda: np.copyto(target, source)),
        seconds_of(lambda: np.invert(source, out=source)),
    )
    return 2 * source.nbytes * comm.size / fastest


def measure_all(comm: Communicator, cases: Sequence[Case], **how: Any) -> Iterator[Row]:
    """Yield the measurement of each case, with the same settings of `measure`."""
    limits: dict[int, float] = {}
    # Cases whose sizes round to the same number of bytes are equal.
    for case in dict.fromkeys(replace(case, size=case.bytes) for case in cases):
        size = case.bytes
        if size >= _SMALLEST_LIMIT and size not in limits and case.device == "cpu":
            limits[size] = memory_rate(comm, size)
        with array_backend.on_device(*place(comm, case.device)):
            yield measure(comm, case, limit=limits.get(size), **how)


def measure(
    comm: Communicator,
    case: Case,
    *,
    iterations: int | None = None,
    seconds: float = 0.3,
    warmup: int = 5,
    limit: float | None = None,
    on_wait: Callable[[str], None] = lambda text: None,
) -> Row:
    """Check a case's result, then time it.

    The ranks synchronize before every call of a rooted collective, because some ranks would run
    ahead. Calls of the other collectives follow each other directly.

    Parameters
    ----------
    comm : Communicator
        The communicator of this rank.
    case : Case
        The case, the same on every rank.
    iterations : int, optional
        Number of timed calls; by default as many as take about ``seconds``, from 5 to 20,000.
    seconds : float
        Approximate length of the measurement.
    warmup : int
        Number of calls before the timed ones.
    limit : float, optional
        The memory's rate in bytes per second, from `memory_rate`.
    on_wait : callable
        A function that rank 0 calls with a text if the measurement takes long.
    """
    arrays = Arrays(comm, case)
    wrong = int(comm.all_reduce(np.asarray(arrays.wrong(), np.int64)))
    arrays.refill()
    call, clock = arrays.call, time.perf_counter
    synchronizes = case.kind in ROOTED
    for _ in range(warmup):
        call()
    comm.barrier()
    first = np.empty(5)
    for i in range(len(first)):
        begin = clock()
        call()
        first[i] = clock() - begin
    estimate = max(float(np.median(_slowest(comm, first))), 1e-7)
    if iterations is None:
        iterations = max(5, min(_MOST_ITERATIONS, int(seconds / estimate)))
    if comm.rank == 0 and estimate * iterations > _LONG:
        on_wait(
            f"{case.collective} ({case.algorithm_name}) of {case.bytes} bytes, {iterations} times, "
            f"takes about {estimate * iterations:.0f} s"
        )
    times = np.empty(iterations)
    growing = arrays.growing
    since = growing  # so that the first call is preceded by a refill
    comm.barrier()
    for i in range(iterations):
        if growing and since >= growing - 1:
            arrays.refill()
            comm.barrier()
            call()  # brings the caches into the state after any other call
            since = 1
        if synchronizes:
            comm.barrier()
        begin = clock()
        call()
        times[i] = clock() - begin
        since += 1
    slowest = _slowest(comm, times)
    p50 = float(np.median(slowest))
    of_limit = rate = None
    if limit and case.traffic and case.bytes >= _SMALLEST_LIMIT:
        of_limit, rate = 100 * case.traffic / limit / p50, limit / 1e9
    return Row(
        collective=case.collective,
        bytes=case.bytes,
        count=case.count,
        type=case.dtype if case.collective != "barrier" else "-",
        op=case.op if "reduce" in case.collective else "-",
        algorithm=case.algorithm_name,
        in_place=case.placed,
        ranks=case.ranks,
        iterations=iterations,
        p50_us=p50 * 1e6,
        p99_us=float(np.percentile(slowest, 99)) * 1e6,
        min_us=float(slowest.min()) * 1e6,
        algbw_gb_s=case.bytes / p50 / 1e9,
        busbw_gb_s=case.bytes / p50 / 1e9 * case.bus_factor,
        limit_gb_s=rate,
        percent_of_limit=of_limit,
        wrong=wrong,
        registered=case.in_registered,
    )
