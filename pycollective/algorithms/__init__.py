"""Algorithms as schedules: list them, show them, prove them, time them, write them.

An algorithm is data: the steps of every rank, in terms of chunks of a buffer. The same data is shown,
proved and run; ``docs/tutorials/write_an_algorithm.md`` writes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pycollective._core import (
    Collective,
    Schedule,
    Step,
    algorithm_names,
    make_hierarchical,
    make_schedule,
    prove,
    verify_many,
)
from pycollective.algorithms.clusters import CLUSTERS, Cluster, Link
from pycollective.algorithms.drawing import draw_rounds, table_of_rounds
from pycollective.algorithms.simulation import (
    Progress,
    Simulation,
    checked_name,
    collective_of,
    plot,
    simulate,
    watching,
)
from pycollective.algorithms.text import text_of, title_of
from pycollective.algorithms.writing import (
    PROVED_RANKS,
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
from pycollective.arguments import whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Algorithm",
    "CLUSTERS",
    "Cluster",
    "Collective",
    "Link",
    "Schedule",
    "Simulation",
    "Step",
    "algorithm",
    "copy",
    "draw",
    "hierarchical",
    "input",
    "names",
    "output",
    "plot",
    "recv",
    "recv_reduce",
    "reduce",
    "rounds",
    "schedule",
    "scratch",
    "send",
    "show",
    "simulate",
    "verify",
]


def names(collective: str = "all_reduce") -> list[str]:
    """Return the names of the algorithms of a collective, the default first.

    Parameters
    ----------
    collective : str
        The collective: all_reduce, reduce, reduce_scatter, broadcast, scatter, gather, all_gather,
        all_to_all, barrier, scan or exscan.

    Raises
    ------
    ValueError
        No collective has this name.
    """
    return algorithm_names(collective_of(collective))


def schedule(what: str | Algorithm, size: int, collective: str = "all_reduce") -> Schedule:
    """Return the steps of every rank for a group of ``size`` ranks.

    Parameters
    ----------
    what : str or Algorithm
        The name of an algorithm, or an algorithm made by `algorithm`.
    size : int
        Number of ranks.
    collective : str
        The collective of a named algorithm.

    Raises
    ------
    ValueError
        No algorithm or collective has this name, or ``size`` is below 1.
    TypeError
        ``what`` is neither a name nor an `Algorithm`, ``size`` is not a whole number, or the
        `Algorithm` yields other objects than steps.
    """
    if isinstance(what, Algorithm):
        return what.schedule(size)
    return make_schedule(collective_of(collective), checked_name(what), whole("size", size))


def hierarchical(hosts: Sequence[int]) -> Schedule:
    """Return the steps of the all-reduce that groups of several hosts use.

    Calls name this algorithm "hierarchical", and take the hosts of their own group.

    Parameters
    ----------
    hosts : sequence of int
        The number of each rank's host, from 0, as in `Communicator.hosts`.

    Raises
    ------
    TypeError
        ``hosts`` is not a sequence of whole numbers.
    ValueError
        ``hosts`` is empty, or a number from 0 to the largest one is missing.
    """
    if not np.iterable(hosts):
        raise TypeError(
            "hosts must be a sequence with the number of each rank's host, as [0, 0, 1, 1], "
            f"not {hosts!r}"
        )
    return make_hierarchical([whole("the number of a rank's host", host) for host in hosts])


def verify(
    what: str | Algorithm | Schedule,
    size: int | None = None,
    collective: str = "all_reduce",
    *,
    progress: Progress | bool = True,
) -> None:
    """Prove a schedule, out of place and in place, for arrays of any length.

    Every rank must end with the collective's result, with each contribution exactly once. Sends and
    receives must match. No rank may block for ever, even if only one message fits between two ranks. No
    chunk may be written while a peer may still read it.

    The proof is exact up to 64 ranks. Beyond 64 ranks, contributions are random numbers modulo a prime
    near 2^61. For each chunk of each rank, the probability to accept an error is about 10^-18. Arrays
    shorter than the number of chunks are not checked then. The ranks are executed in one order only, so
    that a chunk that is overwritten too early may stay undetected.

    The steps of a named algorithm are generated one at a time. Memory is 8 bytes for each chunk of
    each rank: a ring of 10,000 ranks takes about half a minute and 0.8 GiB. Ctrl-C stops the proof.

    Parameters
    ----------
    what : str, Algorithm or Schedule
        The name of an algorithm or an `Algorithm` (both need ``size``), or a schedule.
    size : int, optional
        Number of ranks.
    collective : str
        The collective of a named algorithm.
    progress : bool or callable
        As in `simulate`; used beyond 64 ranks.

    Raises
    ------
    ValueError
        The schedule is wrong; the text names the first error by rank, step and reason. Or no
        algorithm or collective has this name.
    TypeError
        ``size`` is missing.
    """
    if isinstance(what, Schedule):
        _, what = _named(what, size, collective)
        size = len(what.steps)
    elif size is None:
        raise TypeError("verify(algorithm, size) needs the number of ranks")
    size = whole("size", size)
    if size <= PROVED_RANKS:
        if isinstance(what, Algorithm):
            what.verify(size)
            return
        problem = prove(what if isinstance(what, Schedule) else schedule(what, size, collective))
    else:
        # The steps that complete a chunk are marked in named algorithms, not in a user's.
        made = what.schedule(size) if isinstance(what, Algorithm) else what
        kind = made.collective if isinstance(made, Schedule) else collective_of(collective)
        with watching(progress, f"verify {what if isinstance(what, str) else 'schedule'}") as watch:
            problem = verify_many(kind, made, size, not isinstance(what, Algorithm), watch)
    if problem:
        raise ValueError(problem)


def show(
    what: str | Algorithm | Schedule, size: int | None = None, collective: str = "all_reduce"
) -> str:
    """Return the steps of every rank as text, a line each; the parameters are those of `draw`."""
    return text_of(*_named(what, size, collective))


def rounds(
    what: str | Algorithm | Schedule, size: int | None = None, collective: str = "all_reduce"
) -> str:
    """Return the messages as a text table: one line for each round, one column for each rank.

    A message takes one round. The message begins when its sender has all data that it waits for,
    and when the previous message between the same two ranks is over. The text ``2+0:4`` under a
    rank means that the rank receives chunks 0 to 3 from rank 2 and reduces them. With ``2<0:4`` the rank
    only stores them. Ranges of ranks' parts wrap around: of 4 parts, ``3:5`` is the last and the first.
    The parameters are those of `draw`.
    """
    name, made = _named(what, size, collective)
    return f"{title_of(name, made)}\n{table_of_rounds(made.steps)}"


def draw(
    what: str | Algorithm | Schedule,
    size: int | None = None,
    collective: str = "all_reduce",
    *,
    file: str | Path | None = None,
) -> Figure:
    """Draw the messages of a schedule: ranks from left to right, rounds from top to bottom.

    An arrow is a message, and the text at its head names the chunks. Rounds are those of `rounds`. The
    function needs matplotlib (``pip install 'pycollective[plot]'``), and no display.

    Parameters
    ----------
    what : str, Algorithm or Schedule
        The name of an algorithm or an `Algorithm` (both need ``size``), or a schedule, such as that of
        `hierarchical`.
    size : int, optional
        The number of ranks.
    collective : str
        The collective of a named algorithm.
    file : str or path, optional
        File for the picture: ``.png``, ``.svg`` or ``.pdf``.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        No algorithm has this name, ``size`` is below 1, or the schedule has another number of
        ranks.
    TypeError
        ``size`` is missing.
    """
    name, made = _named(what, size, collective)
    return draw_rounds(made.steps, title_of(name, made), file)


def _named(
    what: str | Algorithm | Schedule, size: int | None, collective: str
) -> tuple[str, Schedule]:
    """Return the name of an algorithm ("schedule" for a schedule), and its schedule."""
    if isinstance(what, Schedule):
        if size not in (None, len(what.steps)):
            raise ValueError(f"the schedule has {len(what.steps)} ranks, not {size}")
        return "schedule", what
    if size is None:
        raise TypeError("size is missing: the number of ranks of the algorithm")
    made = schedule(what, size, collective)
    return what if isinstance(what, str) else what.name, made
