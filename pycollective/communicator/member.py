"""One rank of a group: what all of its calls need."""

from __future__ import annotations

import weakref
from typing import Any

from pycollective import _core
from pycollective.algorithms import Algorithm
from pycollective.communicator.arrays import Array
from pycollective.communicator.split import Family, Threads
from pycollective.communicator.work import Work, nothing
from pycollective.errors import CollectiveError

__all__ = ["Member", "live"]

live: weakref.WeakSet[Member] = weakref.WeakSet()
"""Ranks of groups of several processes: the end of this one, and a fork, concern them."""


class _Gone:
    """Stands for the core of a communicator that cannot be used any more."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise CollectiveError(self._why)


class Member:
    """A rank's place in its group."""

    def __init__(self, group: _core.Group, rank: int, timeout: float, family: Family) -> None:
        self._group = group
        self._family = family
        self._core: Any = _core.Communicator(group, rank)
        self.rank = rank
        self.size = group.size
        self.timeout = timeout
        if not isinstance(family, Threads):
            live.add(self)

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self._group.transport}>"

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work | None:
        """Return when every rank has called it; with ``async_op``, a `Work` at once."""
        return nothing(self._core.barrier(self._seconds(timeout), async_op))

    def abort(self, reason: str) -> None:
        """Fail the group: every rank's present or next call raises ``AbortedError(reason)``."""
        self._group.abort(reason)

    def describe(self) -> str:
        """Say what each rank is doing, in one line."""
        return self._group.describe()

    def close(self) -> None:
        """Leave the group in good order; peers that still wait for this rank get PeerLostError.

        Calls that are under way are waited for first, each until its own deadline.
        """
        if not isinstance(self._core, _Gone):
            self._core.settle()
        self._group.leave(self.rank)
        self._core = _Gone("this communicator is closed")

    def _close_at_exit(self) -> None:
        """Leave when the process ends: nobody will wait for the calls that are under way."""
        if not isinstance(self._core, _Gone) and self._core.outstanding:
            self.abort(f"rank {self.rank} ended while calls of it were under way")
        self.close()

    def _disown(self) -> None:
        """After a fork, in the child: the rank is the parent's."""
        self._group.abandon()
        self._core = _Gone(
            "this communicator belongs to the parent process: a forked child has no rank of its own"
        )

    def _how(self, algorithm: str | Algorithm) -> str | _core.Algorithm:
        return algorithm if isinstance(algorithm, str) else algorithm.for_ranks(self.size)

    def _seconds(self, timeout: float | None) -> float:
        seconds = self.timeout if timeout is None else float(timeout)
        if not seconds > 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
        return seconds

    def _place(self, whole: Array, count: int) -> Array:
        """Return this rank's part, of ``count`` elements, of a contiguous array of all parts."""
        return whole.reshape(-1)[self.rank * count : (self.rank + 1) * count]
