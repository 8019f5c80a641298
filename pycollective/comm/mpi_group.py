"""Groups on an MPI library: their ranks, their failures, and the messages about failures."""

from __future__ import annotations

import copy
import importlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycollective.errors import (
    AbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
)

_SPIN_LIMIT = 200
"""Polls before a waiting rank sleeps between polls."""
_PAUSE = 50e-6
"""Seconds of such a sleep."""
_GRACE = 2.0
"""Seconds in which the last messages of a rank that left must arrive."""
_NAME_BYTES = 256  # of a host


def join(comm: Any) -> MPIGroup:
    """Return a group on duplicates of an MPI communicator."""
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except ImportError:
        raise ImportError("from_mpi needs mpi4py: pip install 'pycollective[mpi]'") from None
    if not isinstance(comm, mpi.Intracomm):
        raise TypeError(f"from_mpi needs an intracommunicator such as MPI.COMM_WORLD, not {comm!r}")
    return MPIGroup(mpi, comm)


_KINDS = {kind.__name__: kind for kind in (AbortedError, CollectiveTimeoutError, PeerLostError)}


class MPIGroup:
    """The ranks of an MPI communicator as a group.

    The group has the deadlines, the failures and the messages about failures. The engines make the
    calls.
    """

    transport = "MPI"

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi = mpi
        # One communicator for each kind of message, so that no receive matches another kind.
        self.comm, self.envelopes, self.data, self.notices = (comm.Dup() for _ in range(4))
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.names = self._host_names()
        self.hosts = [sorted(set(self.names)).index(name) for name in self.names]
        self._failure: CollectiveError | None = None
        self._left: dict[int, float] = {}  # ranks, and the times of their notices
        self._sent: list[Any] = []
        self._calls = 0
        self._call: str | None = None
        self._doing = "has made no call"
        self._titles = [f"rank {r}" for r in range(self.size)]

    def _host_names(self) -> list[str]:
        """Return each rank's host name, exchanged as bytes, so that no received data are unpickled."""
        own = platform.node().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        names = np.empty((self.size, _NAME_BYTES), np.uint8)
        self.comm.Allgather(np.frombuffer(own, np.uint8), names)
        return [name.tobytes().rstrip(b"\0").decode(errors="replace") for name in names]

    @property
    def failure(self) -> str | None:
        """The reason of the group's failure, or None."""
        return None if self._failure is None else str(self._failure)

    def begin(self, what: str) -> None:
        """Begin a collective call, which ``what`` describes; raise an error if the group has failed."""
        self.check()
        self._calls += 1
        self._call = f"{what} #{self._calls}"
        self._doing = f"is in {self._call}"

    def check(self) -> None:
        """Receive the notices of other ranks; raise an error if the group has failed."""
        status = self.mpi.Status()
        while self.notices.Iprobe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG, status):
            source = status.Get_source()
            data = np.empty(status.Get_count(self.mpi.BYTE), np.uint8)
            self.notices.Recv([data, self.mpi.BYTE], source, status.Get_tag())
            notice = json.loads(data.tobytes())
            if "left" in notice:
                self._left[source] = time.monotonic()
            elif self._failure is None:
                self._failure = self._error_of(notice)
        if self._failure is not None:
            raise copy.copy(self._failure)

    def wait(self, requests: list[Any], seconds: float, meanwhile: Callable[[], object]) -> None:
        """Wait at most ``seconds`` for requests of MPI, and call ``meanwhile`` between the polls.

        Fail the group and raise `PeerLostError` if a rank has left, and `CollectiveTimeoutError` at
        the deadline.
        """
        begin = time.monotonic()
        polls = 0
        while not self.mpi.Request.Testall(requests):
            polls += 1
            if polls < _SPIN_LIMIT:
                continue
            self.check()
            meanwhile()
            now = time.monotonic()
            for rank, since in self._left.items():
                if now - max(since, begin) > _GRACE:
                    self._fail_by_loss(rank, f"has left the group: {self.describe()}")
            if now - begin > seconds:
                self.fail(
                    CollectiveTimeoutError(
                        f"a rank did not join within {seconds:g} s: {self.describe()}",
                        call=self._call,
                    )
                )
            time.sleep(_PAUSE)

    def pause(self, begin: float, seconds: float, peer: int) -> None:
        """Sleep briefly while a message waits for a peer; raise the errors of `expect`."""
        self.expect(begin, seconds, peer)
        self.rest(begin)

    def rest(self, begin: float) -> None:
        """Sleep briefly in a wait that began at ``begin``."""
        time.sleep(_PAUSE if time.monotonic() - begin > 0.001 else 0)

    def expect(self, begin: float, seconds: float, peer: int) -> None:
        """Raise an error if the peer of a message is lost or late.

        ``begin`` is the time at which the wait began. ``seconds`` is its limit.
        """
        waited = time.monotonic() - begin
        if waited > 0.001:
            self.check()
            left = self._left.get(peer)
            if left is not None and time.monotonic() - max(left, begin) > _GRACE:
                self._fail_by_loss(peer, "has left the group")
        if waited > seconds:
            self.fail(
                CollectiveTimeoutError(
                    f"rank {peer} did not answer within {seconds:g} s",
                    ranks=[peer],
                    hosts=[self.names[peer]],
                )
            )

    def fail(self, error: CollectiveError) -> None:
        """Fail the group with an error, and raise the error."""
        self._fail_with(error)
        raise error

    def _fail_by_loss(self, rank: int, how: str) -> None:
        """Fail the group because a rank is lost."""
        text = f"{self.title(rank)} {how}"
        self.fail(PeerLostError(text, ranks=[rank], hosts=[self.names[rank]], call=self._call))

    def abort(
        self,
        message: str,
        peer_lost: bool = False,
        ranks: Sequence[int] = (),
        call: str | None = None,
    ) -> None:
        """Fail every rank's current or next call."""
        ranks = sorted(ranks)
        hosts = [self.names[r] for r in ranks]
        kind = PeerLostError if peer_lost else AbortedError
        self._fail_with(kind(message, ranks=ranks, hosts=hosts, call=call))

    def _fail_with(self, error: CollectiveError) -> None:
        if self._failure is None:
            self._failure = error
            notice = {"reason": str(error), "kind": type(error).__name__, "ranks": error.ranks}
            calls = list(error.calls.items()) if isinstance(error, MismatchError) else []
            self._notify({**notice, "call": error.call, "calls": calls})

    def _error_of(self, notice: dict[str, Any]) -> CollectiveError:
        """Return the error in a notice."""
        hosts = [self.names[r] for r in notice["ranks"]]
        if notice["kind"] == "MismatchError":
            return MismatchError(notice["reason"], calls=dict(notice["calls"]), hosts=hosts)
        kind = _KINDS.get(notice["kind"], AbortedError)
        return kind(notice["reason"], ranks=notice["ranks"], hosts=hosts, call=notice["call"])

    def close(self, rank: int) -> None:
        """Leave the group, and notify the other ranks."""
        if not self._doing.startswith("has left"):
            self._doing = "has left"
            self._notify({"left": True})

    def _notify(self, notice: dict[str, Any]) -> None:
        data = np.frombuffer(json.dumps(notice).encode(), np.uint8)
        for rank in range(self.size):
            if rank != self.rank and not self.mpi.Is_finalized():
                request = self.notices.Isend([data, self.mpi.BYTE], rank)
                # No code waits for the request, so the list keeps the request and its data alive.
                self._sent.append((data, request))

    def abandon(self) -> None:
        """Do nothing in a forked child."""

    def calls(self, rank: int) -> int:
        """Return the number of collective calls that this rank has begun; 0 for other ranks."""
        return self._calls if rank == self.rank else 0

    def address(self, rank: int) -> str:
        """Return the host of a rank on another host, else ""; MPI does not tell addresses."""
        return "" if self.hosts[rank] == self.hosts[self.rank] else self.names[rank]

    def title(self, rank: int) -> str:
        """Return a rank's name for messages."""
        return self._titles[rank]

    def set_titles(self, titles: Sequence[str]) -> None:
        """Set the ranks' names for messages."""
        self._titles = list(titles)

    def describe(self) -> str:
        """Return this rank's name and its call; MPI does not tell the calls of other ranks."""
        return f"{self.title(self.rank)} {self._doing}"

    def split(self, color: int | None, key: int) -> MPIGroup | None:
        """Make a group of the ranks with the same color."""
        absent = color is None or color < 0
        part = self.comm.Split(self.mpi.UNDEFINED if absent else color, key)
        return None if absent else MPIGroup(self.mpi, part)
