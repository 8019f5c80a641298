"""Pictures with matplotlib, an optional package; no display is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["mark", "mark_seconds", "new_figure", "panels", "show_legend", "size_text"]

_MOST_MARKS = 12


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'pycollective[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with axes side by side, each of a size in inches."""
    figure = new_figure(count * width, height)
    from matplotlib import rcParams

    colors = rcParams["axes.prop_cycle"].by_key()["color"]
    found = list(figure.subplots(1, count, squeeze=False)[0])
    for axes in found:
        # Different dashes keep lines visible that lie on each other.
        axes.set_prop_cycle(color=4 * colors, linestyle=["-", "--", ":", "-."] * len(colors))
        axes.grid(True, alpha=0.3)
    return figure, found


def size_text(size: int) -> str:
    """Return a number of bytes as text for people, such as 64 KiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"


def mark(axes: Axes, label: str, values: Sequence[int]) -> None:
    """Make the horizontal axis logarithmic, with ticks at these sizes in bytes or numbers of ranks."""
    values = sorted(set(values))
    shown = values[:: math.ceil(len(values) / _MOST_MARKS)]
    in_bytes = label == "bytes"
    texts = [size_text(value) if in_bytes else f"{value:,}" for value in shown]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, texts, rotation=45 if in_bytes else 0)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("size of the array" if in_bytes else label)


def mark_seconds(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with ticks such as 20 µs."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def show_legend(figure: Figure, lines: Sequence[Any], names: Sequence[str]) -> None:
    """Add a legend below the axes, where it hides no line; the figure becomes taller."""
    if lines:
        columns = min(len(lines), 4)
        figure.set_figheight(figure.get_figheight() + 0.25 * math.ceil(len(lines) / columns))
        figure.legend(lines, names, loc="outside lower center", ncols=columns, frameon=False)
