"""Pictures of schedules: the messages from rank to rank in each round."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pycollective._core import Step
from pycollective.plots import new_figure, show_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {True: "#c0392b", False: "#2471a3"}
_NAMES = {True: "received and reduced", False: "received"}


class _Message(NamedTuple):
    """One message: its round (from 1), both ranks, its chunks as text, and how it is received."""

    round: int
    source: int
    dest: int
    chunks: str
    reduces: bool


def _messages(steps: list[list[Step]]) -> list[_Message]:
    """Walk through the ranks' steps; return the messages in the order in which they are received."""
    size = len(steps)
    found: list[_Message] = []
    under_way: dict[tuple[int, int], list[int]] = {}  # arrival rounds of messages not yet received
    link: dict[tuple[int, int], int] = {}  # round of the last message from a rank to another
    now, following = [0] * size, [0] * size
    moved = True
    while moved:
        moved = False
        for rank in range(size):
            while following[rank] < len(steps[rank]):
                step = steps[rank][following[rank]]
                verb = step.verb.name
                if verb == "send":
                    pair = rank, step.peer
                    link[pair] = max(now[rank], link.get(pair, 0)) + 1
                    under_way.setdefault(pair, []).append(link[pair])
                elif verb.startswith("recv"):
                    queue = under_way.get((step.peer, rank))
                    if not queue:
                        break
                    now[rank] = max(now[rank], queue.pop(0))
                    span, end = step.target, step.target.first + step.target.count
                    chunks = f"{span.first}" if span.count == 1 else f"{span.first}:{end}"
                    found.append(
                        _Message(
                            now[rank],
                            step.peer,
                            rank,
                            chunks if span.count else "",
                            verb == "recv_reduce",
                        )
                    )
                following[rank] += 1
                moved = True
    for rank, number in enumerate(following):
        if number < len(steps[rank]):
            raise ValueError(
                f"rank {rank} waits for ever in step {number} ({steps[rank][number]}): the schedule "
                "cannot be drawn"
            )
    return found


def table_of_rounds(steps: list[list[Step]]) -> str:
    """Return the messages as text: one line for each round, one column for each rank."""
    size, messages = len(steps), _messages(steps)
    table = [[f"rank {r}" for r in range(size)]]
    for number in range(1, max((m.round for m in messages), default=0) + 1):
        cells: list[list[str]] = [[] for _ in range(size)]
        for m in messages:
            if m.round == number:
                cells[m.dest].append(f"{m.source}{'+' if m.reduces else '<'}{m.chunks}")
        table.append([" ".join(cell) for cell in cells])
    widths = [max(len(row[r]) for row in table) for r in range(size)]
    lines = []
    for number, row in enumerate(table):
        head = f"{number:5d}" if number else "round"
        body = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        lines.append(f"{head}  {body}".rstrip())
    return "\n".join(lines)


def draw_rounds(steps: list[list[Step]], title: str, file: str | Path | None) -> Figure:
    """Draw the messages as arrows between vertical lines, one for each rank."""
    size, messages = len(steps), _messages(steps)
    last = max((m.round for m in messages), default=0)
    figure = new_figure(2 + 1.1 * size, 1.6 + 0.8 * last)
    axes = figure.subplots()
    for rank in range(size):
        axes.plot([rank, rank], [0, last], color="0.75", linewidth=1, zorder=0)
    shown: dict[tuple[int, int, bool], list[str]] = {}
    for m in messages:
        color = _COLORS[m.reduces]
        axes.annotate(
            "",
            xy=(m.dest, m.round),
            xytext=(m.source, m.round - 1),
            arrowprops={"arrowstyle": "->", "color": color, "shrinkA": 2, "shrinkB": 2},
        )
        shown.setdefault((m.dest, m.round, m.reduces), []).append(m.chunks)
    for (rank, number, reduces), chunks in shown.items():
        down = 11 if (rank, number, not reduces) in shown and not reduces else 0
        axes.annotate(
            ", ".join(chunks),
            (rank, number),
            xytext=(5, 2 - down),
            textcoords="offset points",
            fontsize=8,
            color=_COLORS[reduces],
            bbox={"boxstyle": "square,pad=0.05", "color": "white", "alpha": 0.8},
        )
    axes.set_xticks(range(size), [f"rank {r}" for r in range(size)])
    axes.set_yticks(range(last + 1))
    axes.set(ylabel="round", title=title, xlim=(-0.4, size - 0.3), ylim=(last + 0.3, -0.3))
    axes.xaxis.tick_top()
    kinds = sorted({m.reduces for m in messages}, reverse=True)
    lines = [axes.plot([], [], color=_COLORS[kind])[0] for kind in kinds]
    show_legend(figure, lines, [_NAMES[kind] for kind in kinds])
    if file is not None:
        figure.savefig(file)
    return figure
