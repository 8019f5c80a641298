"""Communicators: the collectives of one rank, on NumPy arrays."""

from __future__ import annotations

from pycollective import _core
from pycollective.communicator.messages import Messages
from pycollective.communicator.moves import Moves
from pycollective.communicator.reductions import (
    DEFAULT_ALGORITHM,
    Reductions,
    all_reduce_together,
)
from pycollective.communicator.work import Work

__all__ = [
    "DEFAULT_ALGORITHM",
    "DEFAULT_TIMEOUT",
    "Communicator",
    "Work",
    "all_reduce_together",
    "local_group",
]

DEFAULT_TIMEOUT = 600.0
"""Seconds that a collective call waits for the other ranks."""


class Communicator(Reductions, Moves, Messages):
    """One rank of a group.

    Every rank of the group makes the same calls in the same order, each from its own thread; a call
    returns when this rank's part is done. All ranks get bit-identical results. A call that fails
    leaves the whole group dead: every other rank's call fails too, with the same reason. Make a new
    group to go on.

    Communicators come from `local_group`.

    Attributes
    ----------
    rank, size : int
        This rank, 0 to size - 1, and the number of ranks.
    timeout : float
        Seconds a call waits for the other ranks, unless the call says otherwise.
    """


def local_group(size: int, *, timeout: float = DEFAULT_TIMEOUT) -> list[Communicator]:
    """Make a group of ``size`` ranks that are threads of this process.

    Parameters
    ----------
    size : int
        Number of ranks, at least 1.
    timeout : float
        Seconds that a call waits for the other ranks.

    Returns
    -------
    list of Communicator
        One for each rank; each is used by one thread at a time.

    Examples
    --------
    >>> import threading, numpy as np, pycollective as pc
    >>> def work(comm):
    ...     print(comm.all_reduce(np.ones(3)))
    >>> threads = [threading.Thread(target=work, args=(c,)) for c in pc.local_group(2)]
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    group = _core.ThreadGroup(size)
    return [Communicator(group, rank, timeout) for rank in range(size)]
