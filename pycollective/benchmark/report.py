"""Tables, reports and pictures of ``pycollective bench`` and ``simulate``."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycollective import __version__
from pycollective.atomic_files import write_atomically
from pycollective.benchmark.measure import Row
from pycollective.plots import mark, mark_seconds, panels, show_legend

_COLUMNS = (
    ("bytes", "", 11), ("count", "", 11), ("type", "", 10), ("op", "", 5),
    ("algorithm", "", 17), ("p50", "µs", 10), ("p99", "µs", 10), ("algbw", "GB/s", 8),
    ("busbw", "GB/s", 8), ("limit", "%", 6), ("errors", "", 7),
)  # fmt: skip
COLLECTIVE = ("collective", "", 14)
_MOST_BANDS = 3
"""Most curves that are drawn with a band; more bands would cover each other."""


class Table:
    """Columns of a text table: the name, the unit and the width of each."""

    def __init__(self, *columns: tuple[str, str, int]) -> None:
        self._columns = columns

    def header(self) -> str:
        """Return the two header lines."""
        names = self.line([name for name, _, _ in self._columns])
        units = self.line([unit for _, unit, _ in self._columns])
        return f"#{names[1:]}\n#{units[1:].rstrip()}"

    def line(self, cells: Sequence[Any]) -> str:
        """Return a line of the table."""
        pairs = zip(cells, self._columns, strict=True)
        return " ".join(f"{cell:>{width}}" for cell, (_, _, width) in pairs)


def bench_table(many: bool) -> Table:
    """Return the table of ``pycollective bench``; ``many`` adds a column for the collective."""
    return Table(*([COLLECTIVE] if many else []), *_COLUMNS)


def line(row: Row, many: bool) -> str:
    """Return a row as text."""
    limit = "-" if row.percent_of_limit is None else f"{row.percent_of_limit:.1f}"
    cells = [
        row.bytes, row.count, row.type, row.op, row.algorithm, f"{row.p50_us:.2f}",
        f"{row.p99_us:.2f}", f"{row.algbw_gb_s:.3f}", f"{row.busbw_gb_s:.3f}", limit, row.wrong,
    ]  # fmt: skip
    return bench_table(many).line([row.collective, *cells] if many else cells)


def write(path: Path, command: str, about: dict[str, Any], results: Sequence[Any]) -> None:
    """Write the results of a command as JSON, with null for numbers that are not finite."""
    report = {
        "command": f"pycollective {command}",
        "version": __version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **about,
        "results": results,
    }
    text = json.dumps(_finite(report), indent=1, allow_nan=False) + "\n"
    write_atomically(str(path), text.encode())
    print(f"# written to {path}")


def _finite(value: Any) -> Any:
    """Return a value for JSON, which has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Plot time and bus bandwidth against size, a line for each algorithm; the suffix is the format."""
    figure, (times, rates) = panels(2, 5.5, 4.5)
    curves: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.bytes:
            curves.setdefault((row.collective, row.algorithm), []).append(row)
    many = len({collective for collective, _ in curves}) > 1
    for (collective, algorithm), found in curves.items():
        sizes = [row.bytes for row in found]
        (drawn,) = times.plot(sizes, [row.p50_us / 1e6 for row in found], marker="o")
        if len(curves) <= _MOST_BANDS:
            low = [row.min_us / 1e6 for row in found]
            high = [row.p99_us / 1e6 for row in found]
            times.fill_between(sizes, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)
        name = f"{collective}, {algorithm}" if many else algorithm
        rates.plot(sizes, [row.busbw_gb_s for row in found], marker="o", label=name)
    band = ", fastest to 99th percentile" if len(curves) <= _MOST_BANDS else ""
    times.set_title(f"slowest rank: median{band}")
    rates.set_title("bus bandwidth")
    mark_seconds(times)
    rates.set(ylabel="GB/s", ylim=(0, None))
    for axes in (times, rates) if curves else ():
        mark(axes, "bytes", [row.bytes for found in curves.values() for row in found])
    show_legend(figure, *rates.get_legend_handles_labels())
    figure.suptitle(title, wrap=True)
    figure.savefig(path)
    print(f"# drawn to {path}")
