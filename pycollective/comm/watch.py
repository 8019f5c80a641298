"""Failure detection among ranks that use NCCL."""

from __future__ import annotations

import platform
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from pycollective import nccl
from pycollective.comm import tracing
from pycollective.comm.arrays import Array
from pycollective.comm.member import Member
from pycollective.comm.work import Work
from pycollective.errors import CollectiveError, CollectiveTimeoutError, PeerLostError


class Watch:
    """A rank's heartbeats: each second the ranks exchange their numbers of calls on GPUs.

    The heartbeats have their own group on the host, which reports at once that a process has ended.
    A stopped process sends no heartbeat. The numbers show which rank has not joined a call.
    """

    SECONDS = 1.0
    """Seconds between heartbeats."""
    GRACE = 1.0
    """Seconds to wait for calls that a rank enqueued before it left."""
    SILENCE = 8.0
    """Seconds without a heartbeat after which a rank is lost."""
    _LEFT = -1

    def __init__(self, member: Member, make_group: Callable[[], Member]) -> None:
        self._group = member._group
        self._own = None if member.size == 1 else make_group()
        if self._own is not None:
            tracing.ignore(self._own)
            self._own._group.set_titles([self._title(r) for r in range(member.size)])
        self._rank = member.rank
        self._calls: Callable[[], int] = int
        self._counts = [0] * member.size
        self._work: Work[Array] | None = None
        self._began = -self.SECONDS
        self._looked = time.monotonic()
        self._failure: CollectiveError | None = None
        self._lock = threading.Lock()  # for the watching thread and the closing thread

    def start(self, communicator: nccl.NcclCommunicator) -> None:
        """Count the calls of a communicator from now on."""
        weak = weakref.ref(communicator)

        def calls() -> int:
            found = weak()
            return 0 if found is None else found.calls

        self._calls = calls

    def failure(self, waiting: float) -> CollectiveError | None:
        """Return the group's error, or a lost rank's if a call has waited longer than `GRACE`."""
        try:
            self._group.check()
        except CollectiveError as error:
            return error
        with self._lock:
            self._beat()
            return self._failure if waiting > self.GRACE else None

    def _beat(self) -> None:
        own = self._own
        if own is None or self._failure is not None:
            return
        now = time.monotonic()
        if self._work is not None and now - self._looked > self.SILENCE / 2:
            self._began += now - self._looked  # this rank was stopped: no other rank is silent
        self._looked = now
        try:
            if self._work is None and now - self._began >= self.SECONDS:
                self._began = now
                # Longer than SILENCE, which detects a silent rank: this timeout never applies.
                self._work = self._exchange(own, self._calls(), 2 * self.SILENCE)
            if self._work is not None and self._work.done():
                self._received(self._work.result().tolist())
            elif self._work is not None and now - self._began > self.SILENCE:
                self._failure = self._silent(own)
        except CollectiveError as error:
            self._failure = error

    @staticmethod
    def _exchange(own: Member, number: int, seconds: float) -> Work[Array]:
        """Begin to exchange a number with the other ranks."""
        work: Work[Array] = own._gathered(np.array([number], np.int64), seconds, async_op=True)
        return work

    def _received(self, counts: list[int]) -> None:
        self._work = None
        left = [r for r, n in enumerate(counts) if n == self._LEFT]
        if left:
            self._failure = self._lost(left, f"{self._title(left[0])} has closed its communicator")
        else:
            self._counts = counts

    def _silent(self, own: Member) -> PeerLostError:
        beats = own._group
        silent = [r for r in range(own.size) if beats.calls(r) < beats.calls(self._rank)]
        who = ", ".join(map(self._title, silent)) or "a rank"
        return self._lost(
            silent,
            f"{who} is lost to {self._title(self._rank)}: no heartbeat for {self.SILENCE:g} s, so the "
            "process is stopped or unreachable",
        )

    def _title(self, rank: int) -> str:
        return self._group.title(rank)

    def _lost(self, ranks: Sequence[int], text: str) -> PeerLostError:
        hosts = [self._group.address(r) or platform.node() for r in ranks]
        return PeerLostError(text, ranks=ranks, hosts=hosts)

    def late(self, number: int) -> PeerLostError | None:
        """Return an error about the ranks that have made fewer than ``number`` calls on GPUs, if any."""
        late = [r for r, n in enumerate(self._counts) if n < number and r != self._rank]
        if not late:
            return None
        made = [
            f"{self._title(r)} has made {self._counts[r]} of {number} calls on GPUs" for r in late
        ]
        return self._lost(late, "; ".join(made))

    def fail(self, error: CollectiveError) -> None:
        """Fail the group: every rank's watching thread aborts NCCL, and calls on the host fail too."""
        lost = isinstance(error, (PeerLostError, CollectiveTimeoutError))
        self._group.abort(str(error), peer_lost=lost, ranks=error.ranks, call=error.call)

    def close(self) -> None:
        """Announce the end to the other ranks, which join within a second, and close the group."""
        with self._lock:
            own, self._own = self._own, None
            if own is None:
                return
            try:
                if self._work is not None and self._failure is None:
                    self._received(self._work.wait(self.SILENCE).tolist())
                if self._failure is None:
                    self._exchange(own, self._LEFT, self.SILENCE).wait()
            except (CollectiveError, TimeoutError):  # the other ranks have closed, too
                pass
            own.close()

    def abandon(self) -> None:
        """Release the group of the heartbeats without an announcement."""
        self._own = None
