"""One rank of a group: what all of its calls need."""

from __future__ import annotations

from typing import Any

from pycollective import _core
from pycollective.communicator.arrays import Array
from pycollective.errors import CollectiveError

__all__ = ["Member"]


class _Gone:
    """Stands for the core of a communicator that cannot be used any more."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise CollectiveError(self._why)


class Member:
    """A rank's place in its group."""

    def __init__(self, group: _core.Group, rank: int, timeout: float) -> None:
        self._group = group
        self._core: Any = _core.Communicator(group, rank)
        self.rank = rank
        self.size = group.size
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self._group.transport}>"

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it."""
        self._core.barrier(self._seconds(timeout))

    def abort(self, reason: str) -> None:
        """Fail the group: every rank's present or next call raises ``AbortedError(reason)``."""
        self._group.abort(reason)

    def describe(self) -> str:
        """Say what each rank is doing, in one line."""
        return self._group.describe()

    def close(self) -> None:
        """Leave the group in good order; peers that still wait for this rank get PeerLostError."""
        self._group.leave(self.rank)
        self._core = _Gone("this communicator is closed")

    def _disown(self) -> None:
        """After a fork, in the child: the rank is the parent's."""
        self._group.abandon()
        self._core = _Gone(
            "this communicator belongs to the parent process: a forked child has no rank of its own"
        )

    def _seconds(self, timeout: float | None) -> float:
        seconds = self.timeout if timeout is None else float(timeout)
        if not seconds > 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
        return seconds

    def _place(self, whole: Array, count: int) -> Array:
        """Return this rank's part, of ``count`` elements, of a contiguous array of all parts."""
        return whole.reshape(-1)[self.rank * count : (self.rank + 1) * count]
