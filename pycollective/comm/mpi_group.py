"""Groups on an MPI library: who is in one, whether it is alive, and what its ranks tell each other."""

from __future__ import annotations

import copy
import importlib
import json
import platform
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycollective.errors import (
    AbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
)

_LOOKS = 200
_PAUSE = 50e-6
_GRACE = 2.0
"""Seconds in which what a rank that has left had sent before must arrive."""
_NAME_BYTES = 256  # of a host


def join(comm: Any) -> MPIGroup:
    """Return this rank's group, on duplicates of an MPI communicator."""
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except ImportError:
        raise ImportError("from_mpi needs mpi4py: pip install 'pycollective[mpi]'") from None
    if not isinstance(comm, mpi.Intracomm):
        raise TypeError(f"from_mpi needs an intracommunicator such as MPI.COMM_WORLD, not {comm!r}")
    return MPIGroup(mpi, comm)


_KINDS = {kind.__name__: kind for kind in (AbortedError, PeerLostError)}


class MPIGroup:
    """The ranks of an MPI communicator, as a group; it makes no calls."""

    transport = "MPI"

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi = mpi
        # Collectives, messages' envelopes and data, and words to all must not meet.
        self.comm, self.envelopes, self.data, self.words = (comm.Dup() for _ in range(4))
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.names = self._host_names()
        self.hosts = [sorted(set(self.names)).index(name) for name in self.names]
        self._failure: CollectiveError | None = None
        self._left: dict[int, float] = {}  # ranks, and when that was heard
        self._told: list[Any] = []
        self._calls = 0
        self._call: str | None = None
        self._doing = "has made no call"
        self._titles = [f"rank {r}" for r in range(self.size)]

    def _host_names(self) -> list[str]:
        """Return each rank's host, told as plain bytes: nothing that others say is unpickled."""
        own = platform.node().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        names = np.empty((self.size, _NAME_BYTES), np.uint8)
        self.comm.Allgather(np.frombuffer(own, np.uint8), names)
        return [name.tobytes().rstrip(b"\0").decode(errors="replace") for name in names]

    @property
    def failure(self) -> str | None:
        """Why the group is dead, if it is."""
        return None if self._failure is None else str(self._failure)

    def begin(self, what: str) -> None:
        """Note a collective call; raise if the group is dead."""
        self.check()
        self._calls += 1
        self._call = f"{what} #{self._calls}"
        self._doing = f"is in {self._call}"

    def check(self) -> None:
        """Take in what others say; raise if the group is dead."""
        status = self.mpi.Status()
        while self.words.Iprobe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG, status):
            source = status.Get_source()
            word = np.empty(status.Get_count(self.mpi.BYTE), np.uint8)
            self.words.Recv([word, self.mpi.BYTE], source, status.Get_tag())
            said = json.loads(word.tobytes())
            if "left" in said:
                self._left[source] = time.monotonic()
            elif self._failure is None:
                self._failure = self._error_of(said)
        if self._failure is not None:
            raise copy.copy(self._failure)

    def wait(self, requests: list[Any], seconds: float, peer: int | None = None) -> None:
        """Wait for requests of MPI, of the whole group or one peer, until a deadline."""
        begin = time.monotonic()
        looks = 0
        while not self.mpi.Request.Testall(requests):
            looks += 1
            if looks < _LOOKS:
                continue
            self.check()
            now = time.monotonic()
            for rank, since in self._left.items():
                if peer in (None, rank) and now - max(since, begin) > _GRACE:
                    self._lose(rank, f"has left the group: {self.describe()}")
            if now - begin > seconds:
                self.fail(
                    CollectiveTimeoutError(
                        f"a rank did not come within {seconds:g} s: {self.describe()}",
                        call=self._call,
                    )
                )
            time.sleep(_PAUSE)

    def pause(self, begin: float, seconds: float, peer: int) -> None:
        """Wait a moment for a peer in a message that has begun; raise if the peer is lost or late."""
        waited = time.monotonic() - begin
        if waited > 0.001:
            self.check()
            left = self._left.get(peer)
            if left is not None and time.monotonic() - max(left, begin) > _GRACE:
                self._lose(peer, "has left the group")
        if waited > seconds:
            self.fail(
                CollectiveTimeoutError(
                    f"rank {peer} did not answer within {seconds:g} s",
                    ranks=[peer],
                    hosts=[self.names[peer]],
                )
            )
        time.sleep(_PAUSE if waited > 0.001 else 0)

    def fail(self, error: CollectiveError) -> None:
        """Fail the group, unless it has failed, and raise why."""
        self._end(error)
        raise error

    def _lose(self, rank: int, how: str) -> None:
        """Fail the group because a rank is lost, and raise that."""
        text = f"{self.title(rank)} {how}"
        self.fail(PeerLostError(text, ranks=[rank], hosts=[self.names[rank]], call=self._call))

    def abort(
        self,
        message: str,
        peer_lost: bool = False,
        ranks: Sequence[int] = (),
        call: str | None = None,
    ) -> None:
        """Let every rank's present or next call fail."""
        ranks = sorted(ranks)
        hosts = [self.names[r] for r in ranks]
        kind = PeerLostError if peer_lost else AbortedError
        self._end(kind(message, ranks=ranks, hosts=hosts, call=call))

    def _end(self, error: CollectiveError) -> None:
        if self._failure is None:
            self._failure = error
            said = {"reason": str(error), "kind": type(error).__name__, "ranks": error.ranks}
            calls = list(error.calls.items()) if isinstance(error, MismatchError) else []
            self._tell({**said, "call": error.call, "calls": calls})

    def _error_of(self, said: dict[str, Any]) -> CollectiveError:
        """Return the error that another rank tells of."""
        hosts = [self.names[r] for r in said["ranks"]]
        if said["kind"] == "MismatchError":
            return MismatchError(said["reason"], calls=dict(said["calls"]), hosts=hosts)
        kind = _KINDS.get(said["kind"], AbortedError)
        return kind(said["reason"], ranks=said["ranks"], hosts=hosts, call=said["call"])

    def close(self, rank: int) -> None:
        """Leave in good order."""
        if not self._doing.startswith("has left"):
            self._doing = "has left"
            self._tell({"left": True})

    def _tell(self, said: dict[str, Any]) -> None:
        word = np.frombuffer(json.dumps(said).encode(), np.uint8)
        for rank in range(self.size):
            if rank != self.rank and not self.mpi.Is_finalized():
                request = self.words.Isend([word, self.mpi.BYTE], rank)
                self._told.append((word, request))  # kept until the end: nobody waits for it

    def abandon(self) -> None:
        """Let go in a forked child."""

    def calls(self, rank: int) -> int:
        """Return the number of collective calls that a rank has begun, if it is this one; else 0."""
        return self._calls if rank == self.rank else 0

    def address(self, rank: int) -> str:
        """Return the host of a rank that is not on this one; how it is reached MPI keeps to itself."""
        return "" if self.hosts[rank] == self.hosts[self.rank] else self.names[rank]

    def title(self, rank: int) -> str:
        """Return the rank's name in texts."""
        return self._titles[rank]

    def call_ranks(self, titles: Sequence[str]) -> None:
        """Give the ranks their names in texts."""
        self._titles = list(titles)

    def describe(self) -> str:
        """Return this rank's name and its call; MPI does not tell those of other ranks."""
        return f"{self.title(self.rank)} {self._doing}"

    def split(self, color: int | None, key: int) -> MPIGroup | None:
        """Make groups of those with one color."""
        absent = color is None or color < 0
        part = self.comm.Split(self.mpi.UNDEFINED if absent else color, key)
        return None if absent else MPIGroup(self.mpi, part)
