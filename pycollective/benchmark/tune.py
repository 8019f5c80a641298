"""Tune this machine: the fastest algorithm for each size, and copies that bypass the caches."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import numpy as np

from pycollective import _core, tuning
from pycollective.algorithms import Collective
from pycollective.benchmark.measure import Row
from pycollective.comm import Communicator

NEARLY = 1.05
"""Keep the previous size's algorithm if its time is at most this many times the fastest one's."""
_ALL_BYTES = (1 << 63) - 1
_COPIED = [1 << 20, 4 << 20, 16 << 20, 64 << 20]
_TURNS, _CALLS = 5, 3


def choose(rows: Sequence[Row]) -> tuning.Rows:
    """Return the rows of the tuning table from measurements of several algorithms.

    The border between two sizes with different winners is their geometric mean. The last winner
    is valid for all larger arrays.
    """
    found: tuning.Rows = []
    for collective in dict.fromkeys(row.collective for row in rows):
        times: dict[int, dict[str, list[float]]] = {}
        for row in rows:
            if row.collective == collective and row.algorithm != "auto":
                times.setdefault(row.bytes, {}).setdefault(row.algorithm, []).append(row.p50_us)
        sizes = sorted(times)
        winner = ""
        for size, following in zip(sizes, [*sizes[1:], 0], strict=True):
            of = {name: statistics.median(turns) for name, turns in times[size].items()}
            best = min(of, key=lambda name: of[name])
            if winner not in of or of[winner] > NEARLY * of[best]:
                winner = best
            border = math.isqrt(size * following) if following else _ALL_BYTES
            choice = (Collective.__members__[collective], border, winner)
            if found and (found[-1][0], found[-1][2]) == (choice[0], winner):
                found.pop()
            found.append(choice)
    return found


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest row of each case that was measured several times."""
    found: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        case = row.collective, row.algorithm, row.bytes
        if case not in found or row.p50_us < found[case].p50_us:
            found[case] = row
    return list(found.values())


def past_cache_from(comm: Communicator) -> int:
    """Measure the total bytes of all ranks' arrays from which on copies should bypass the caches.

    Collective: every rank calls it. Broadcasts of several sizes are timed in turns, with and without the
    caches. The setting of the process is restored.
    """
    before = _core.past_cache_setting()
    comm.barrier()  # ranks that are threads have one setting
    found = _ALL_BYTES
    try:
        for size in reversed(_COPIED):
            x = np.ones(size, np.uint8)
            times: dict[int, list[float]] = {1: [], _ALL_BYTES: []}
            for setting in list(times) * _TURNS:
                _core.set_past_cache_from(setting)
                comm.barrier()
                begin = time.perf_counter()
                for _ in range(_CALLS):
                    comm.broadcast(x, out=x)
                times[setting].append(time.perf_counter() - begin)
            medians = np.array([np.median(times[1]), np.median(times[_ALL_BYTES])])
            past, through = comm.all_reduce(medians, "max")
            if past * NEARLY > through:
                break
            found = (comm.size + 1) * size
    finally:
        _core.set_past_cache_from(before)
    return found
