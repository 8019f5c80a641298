"""What ``pycollective bench`` prints, writes and draws."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycollective import __version__
from pycollective.benchmark.measure import Row

__all__ = ["draw", "header", "line", "need_plot", "size_text", "write"]

_COLUMNS = (
    ("bytes", "", 11), ("count", "", 11), ("type", "", 10), ("op", "", 5),
    ("algorithm", "", 17), ("p50", "µs", 10), ("p99", "µs", 10), ("algbw", "GB/s", 8),
    ("busbw", "GB/s", 8), ("limit", "%", 6), ("errors", "", 7),
)  # fmt: skip
_COLLECTIVE = ("collective", "", 14)


def header(many: bool) -> str:
    """Return the two lines over the table; ``many``: with a column for the collective."""
    columns = (_COLLECTIVE, *_COLUMNS) if many else _COLUMNS
    names = " ".join(f"{name:>{width}}" for name, _, width in columns)
    units = " ".join(f"{unit:>{width}}" for _, unit, width in columns)
    return f"#{names[1:]}\n#{units[1:].rstrip()}"


def line(row: Row, many: bool) -> str:
    """Return a row as text."""
    limit = "-" if row.percent_of_limit is None else f"{row.percent_of_limit:.1f}"
    cells = [
        row.bytes, row.count, row.type, row.op, row.algorithm, f"{row.p50_us:.2f}",
        f"{row.p99_us:.2f}", f"{row.algbw_gb_s:.3f}", f"{row.busbw_gb_s:.3f}", limit, row.wrong,
    ]  # fmt: skip
    if many:
        cells.insert(0, row.collective)
    widths = [width for _, _, width in ((_COLLECTIVE, *_COLUMNS) if many else _COLUMNS)]
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def size_text(size: int) -> str:
    """Return a number of bytes for people: 64 KiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"


def write(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Write the rows as JSON."""
    report = {
        "command": "pycollective bench",
        "version": __version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **about,
        "results": [row.as_dict() for row in rows],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def need_plot() -> None:
    """Raise ImportError, with what to do, when nothing can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'pycollective[plot]'") from None


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw time and bus bandwidth over size, a line for each algorithm; the name says the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, rates = figure.subplots(1, 2)
    curves: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.bytes:
            curves.setdefault((row.collective, row.algorithm), []).append(row)
    for (collective, algorithm), found in curves.items():
        name = f"{collective}, {algorithm}"
        sizes = [row.bytes for row in found]
        (drawn,) = times.plot(sizes, [row.p50_us for row in found], marker="o", label=name)
        low, high = [row.min_us for row in found], [row.p99_us for row in found]
        times.fill_between(sizes, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)
        rates.plot(sizes, [row.busbw_gb_s for row in found], marker="o", label=name)
    times.set_ylabel("µs of the slowest rank: median, fastest to 99th percentile")
    rates.set_ylabel("bus bandwidth, GB/s")
    for axes in (times, rates):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes")
        axes.grid(True, alpha=0.3)
    times.set_yscale("log")
    if curves:
        times.legend()
    figure.suptitle(title)
    figure.savefig(path)
