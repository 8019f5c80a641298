"""What is fastest on this machine: a table for ``algorithm="auto"``, and copies past the caches."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import numpy as np

from pycollective import _core, tuning
from pycollective.algorithms import Collective
from pycollective.benchmark.measure import Row
from pycollective.communicator import Communicator

__all__ = ["choose", "past_cache_from"]

NEARLY = 1.05
"""An algorithm stays chosen for the next size when it takes at most so many times the fastest's time."""
_ALL_BYTES = (1 << 63) - 1
_COPIED = [1 << 20, 4 << 20, 16 << 20, 64 << 20]
_TURNS, _CALLS = 5, 3


def choose(rows: Sequence[Row]) -> tuning.Rows:
    """Return the rows of the table, from what was measured of several algorithms, each once or more.

    Between two sizes with different winners the border is their geometric mean; the last winner stands
    for all larger arrays.
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


def past_cache_from(comm: Communicator) -> int:
    """Measure from how many bytes of all ranks' arrays on copies should go past the caches.

    Every rank calls it. Broadcasts of several sizes are timed in turns, with copies that go through the
    caches and with copies past them. The process's setting stays as it was.

    Returns
    -------
    int
        The same on all ranks.
    """
    before = _core.past_cache_from()
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
