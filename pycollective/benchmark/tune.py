"""Which algorithm is the fastest from which size on: a table for ``algorithm="auto"``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pycollective import tuning
from pycollective.algorithms import Collective
from pycollective.benchmark.measure import Row

__all__ = ["choose"]

NEARLY = 1.05
"""An algorithm stays chosen for the next size when it takes at most so many times the fastest's time."""
_ALL_BYTES = (1 << 63) - 1


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
