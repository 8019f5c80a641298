"""Algorithms as schedules: list them, show them, prove them, write them.

An algorithm is data: the steps of every rank, in terms of chunks of a buffer. What runs is what is
shown here and what is proved here; see ``docs/architecture.md``, and ``docs/algorithms.md`` for how to
write one.
"""

from __future__ import annotations

from collections.abc import Sequence

from pycollective._core import (
    Collective,
    Schedule,
    Step,
    algorithm_names,
    make_hierarchical,
    make_schedule,
    prove,
)
from pycollective.algorithms.writing import (
    Algorithm,
    algorithm,
    copy,
    input,
    output,
    recv,
    recv_reduce,
    reduce,
    scratch,
    send,
)

__all__ = [
    "Algorithm",
    "Collective",
    "Schedule",
    "Step",
    "algorithm",
    "copy",
    "hierarchical",
    "input",
    "names",
    "output",
    "recv",
    "recv_reduce",
    "reduce",
    "rounds",
    "schedule",
    "scratch",
    "send",
    "show",
    "verify",
]


def names(collective: str = "all_reduce") -> list[str]:
    """Return the names of the algorithms of a collective, the default first.

    Parameters
    ----------
    collective : str
        What the algorithms do: all_reduce, reduce, reduce_scatter, broadcast, scatter, gather,
        all_gather, all_to_all or barrier.
    """
    return algorithm_names(_collective(collective))


def schedule(what: str | Algorithm, size: int, collective: str = "all_reduce") -> Schedule:
    """Return the steps of every rank for a group of ``size`` ranks.

    Parameters
    ----------
    what : str or Algorithm
        The name of an algorithm, or one of one's own.
    size : int
        Number of ranks.
    collective : str
        The collective of a named algorithm.
    """
    if isinstance(what, Algorithm):
        return what.schedule(size)
    return make_schedule(_collective(collective), what, size)


def hierarchical(hosts: Sequence[int]) -> Schedule:
    """Return the steps of the all-reduce that groups of several hosts use.

    Its name in a call is "hierarchical", and its schedule that of the group's own hosts.

    Parameters
    ----------
    hosts : sequence of int
        For each rank the number of its host, from 0; as `Communicator.hosts`.
    """
    return make_hierarchical(list(hosts))


def verify(
    what: str | Algorithm | Schedule, size: int | None = None, collective: str = "all_reduce"
) -> None:
    """Prove a schedule, out of place and in place, for arrays of any length.

    Every rank must end with what the collective promises, each contribution exactly once; sends and
    receives must match; nothing may block for ever with one message under way between two ranks; and
    no chunk may be written while a peer may still read it. Exact up to 64 ranks; beyond, contributions
    are random fingerprints and races are not looked for.

    Parameters
    ----------
    what : str, Algorithm or Schedule
        The name of an algorithm or one of one's own (then ``size`` is needed), or a schedule.
    size : int, optional
        Number of ranks.
    collective : str
        The collective of a named algorithm.

    Raises
    ------
    ValueError
        The first thing that is wrong: rank, step and why.
    """
    if not isinstance(what, Schedule):
        if size is None:
            raise TypeError("verify(algorithm, size) needs the number of ranks")
        what = schedule(what, size, collective)
    problem = prove(what)
    if problem:
        raise ValueError(problem)


def show(what: str | Algorithm, size: int, collective: str = "all_reduce") -> str:
    """Return the steps of every rank as text, a line each."""
    made = schedule(what, size, collective)
    lines = [_title(what, made)]
    for rank, steps in enumerate(made.steps):
        lines += [f"rank {rank}:"] + [f"  {k:3d}  {step}" for k, step in enumerate(steps)]
    return "\n".join(lines)


def rounds(what: str | Algorithm, size: int, collective: str = "all_reduce") -> str:
    """Return a picture of the messages as text: a line for each round, a column for each rank.

    A message takes a round; it begins when its sender has received what it waits for, and when the
    message before it between the same two ranks is over. ``2+0:4`` under a rank says that
    it receives chunks 0 to 3 from rank 2 and adds them; ``2<0:4`` that it keeps them as they are.
    """
    made = schedule(what, size, collective)
    cells = _played(made.steps)
    table = [[f"rank {r}" for r in range(size)]]
    last = max((number for number, _ in cells), default=0)
    table += [[" ".join(cells.get((n, r), [])) for r in range(size)] for n in range(1, last + 1)]
    widths = [max(len(row[r]) for row in table) for r in range(size)]
    lines = [_title(what, made)]
    for number, row in enumerate(table):
        head = f"{number:5d}" if number else "round"
        body = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        lines.append(f"{head}  {body}".rstrip())
    return "\n".join(lines)


def _title(what: str | Algorithm, made: Schedule) -> str:
    name = what if isinstance(what, str) else what.name
    ranks, chunks = len(made.steps), made.chunks
    return f"{name} {made.collective.name}: {ranks} ranks, {chunks} chunks"


def _played(steps: list[list[Step]]) -> dict[tuple[int, int], list[str]]:
    """What each rank receives in each round."""
    size = len(steps)
    cells: dict[tuple[int, int], list[str]] = {}
    under_way: dict[tuple[int, int], list[int]] = {}  # rounds in which messages can be received
    link: dict[tuple[int, int], int] = {}  # the last round in which there is a message
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
                    sign = "+" if verb == "recv_reduce" else "<"
                    text = f"{step.peer}{sign}{chunks if span.count else ''}"
                    cells.setdefault((now[rank], rank), []).append(text)
                following[rank] += 1
                moved = True
    return cells


def _collective(name: str) -> Collective:
    try:
        return Collective.__members__[name]  # type: ignore[no-any-return]
    except KeyError:
        raise ValueError(
            f"no collective is called {name!r}; there are {', '.join(Collective.__members__)}"
        ) from None
