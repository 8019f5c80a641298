"""Algorithms as schedules: list them, show them, prove them.

An algorithm is data: the steps of every rank, in terms of chunks of a buffer. What runs is what is
shown here and what is proved here; see ``docs/architecture.md``.
"""

from __future__ import annotations

from pycollective._core import Collective, Schedule, Step, algorithm_names, make_schedule
from pycollective._core import verify as _verify

__all__ = ["Collective", "Schedule", "Step", "names", "schedule", "show", "verify"]


def names(collective: str = "all_reduce") -> list[str]:
    """Return the names of the algorithms of a collective, the default first.

    Parameters
    ----------
    collective : {"all_reduce", "broadcast", "barrier"}
        What the algorithms do.
    """
    return algorithm_names(_collective(collective))


def schedule(algorithm: str, size: int, collective: str = "all_reduce") -> Schedule:
    """Return the steps of every rank for a group of ``size`` ranks."""
    return make_schedule(_collective(collective), algorithm, size)


def verify(what: str | Schedule, size: int | None = None, collective: str = "all_reduce") -> None:
    """Prove a schedule, out of place and in place.

    Every rank must end with each rank's contribution exactly once; sends and receives must match;
    nothing may block for ever with one message under way between two ranks; and no chunk may be
    written while a peer may still read it. Exact up to 64 ranks; beyond, contributions are random
    fingerprints and races are not looked for.

    Parameters
    ----------
    what : str or Schedule
        The name of an algorithm (then ``size`` is needed), or a schedule of one's own.
    size : int, optional
        Number of ranks.
    collective : str
        The collective of a named algorithm.

    Raises
    ------
    ValueError
        The first thing that is wrong: rank, step and why.
    """
    if isinstance(what, str):
        if size is None:
            raise TypeError("verify(name, size) needs the number of ranks")
        what = schedule(what, size, collective)
    for in_place in (False, True):
        problem = _verify(what, in_place)
        if problem:
            raise ValueError(f"{'in place' if in_place else 'out of place'}: {problem}")


def show(algorithm: str, size: int, collective: str = "all_reduce") -> str:
    """Return the steps of every rank as text, a line each."""
    made = schedule(algorithm, size, collective)
    lines = [f"{algorithm} {collective}: {size} ranks, {made.chunks} chunks"]
    for rank, steps in enumerate(made.steps):
        lines += [f"rank {rank}:"] + [f"  {k:3d}  {step}" for k, step in enumerate(steps)]
    return "\n".join(lines)


def _collective(name: str) -> Collective:
    try:
        return Collective.__members__[name]  # type: ignore[no-any-return]
    except KeyError:
        raise ValueError(
            f"no collective is called {name!r}; there are {', '.join(Collective.__members__)}"
        ) from None
