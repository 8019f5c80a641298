"""What the ranks that make calls on GPUs hear of each other beside NCCL."""

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
    """What a rank hears of the others beside NCCL: each second they tell how many calls each has made.

    They do so in a group of their own, so that a process that ends is heard of at once, one that is
    stopped soon, and one that does not come is known by its count.
    """

    SECONDS = 1.0
    GRACE = 1.0
    """Seconds for what a rank that has left had enqueued before."""
    SILENCE = 8.0
    """Seconds after which a rank that does not tell is lost."""
    _LEFT = -1

    def __init__(self, member: Member, make_group: Callable[[], Member]) -> None:
        self._group = member._group
        self._own = None if member.size == 1 else make_group()
        if self._own is not None:
            tracing.ignore(self._own)
            self._own._group.call_ranks([self._title(r) for r in range(member.size)])
        self._rank = member.rank
        self._calls: Callable[[], int] = int
        self._counts = [0] * member.size
        self._work: Work[Array] | None = None
        self._begun = -self.SECONDS
        self._gone: CollectiveError | None = None
        self._lock = threading.Lock()  # the watching thread, and the one that closes

    def start(self, communicator: nccl.NcclCommunicator) -> None:
        """Begin to tell of a communicator's calls."""
        weak = weakref.ref(communicator)

        def calls() -> int:
            found = weak()
            return 0 if found is None else found.calls

        self._calls = calls

    def failure(self, waiting: float) -> CollectiveError | None:
        """Return why the group is dead, or who was lost to a call that waits for so many seconds."""
        try:
            self._group.check()
        except CollectiveError as error:
            return error
        with self._lock:
            self._beat()
            return self._gone if waiting > self.GRACE else None

    def _beat(self) -> None:
        own = self._own
        if own is None or self._gone is not None:
            return
        now = time.monotonic()
        try:
            if self._work is None and now - self._begun >= self.SECONDS:
                self._begun = now
                # How long calls wait is no matter of this one, of which silence is the end.
                self._work = self._tell(own, self._calls(), 2 * self.SILENCE)
            if self._work is not None and self._work.done():
                self._heard(self._work.result().tolist())
            elif self._work is not None and now - self._begun > self.SILENCE:
                self._gone = self._silent(own)
        except CollectiveError as error:
            self._gone = error

    @staticmethod
    def _tell(own: Member, number: int, seconds: float) -> Work[Array]:
        """Begin to tell the others a number, and to hear theirs."""
        work: Work[Array] = own._gathered(np.array([number], np.int64), seconds, async_op=True)
        return work

    def _heard(self, counts: list[int]) -> None:
        self._work = None
        left = [r for r, n in enumerate(counts) if n == self._LEFT]
        if left:
            self._gone = self._lost(left, f"{self._title(left[0])} has closed its communicator")
        else:
            self._counts = counts

    def _silent(self, own: Member) -> PeerLostError:
        beats = own._group
        silent = [r for r in range(own.size) if beats.calls(r) < beats.calls(self._rank)]
        who = ", ".join(map(self._title, silent)) or "a rank"
        return self._lost(
            silent,
            f"{who} is lost to {self._title(self._rank)}: not heard of for {self.SILENCE:g} s, so it is "
            "stopped or cut off",
        )

    def _title(self, rank: int) -> str:
        return self._group.title(rank)

    def _lost(self, ranks: Sequence[int], text: str) -> PeerLostError:
        hosts = [self._group.address(r) or platform.node() for r in ranks]
        return PeerLostError(text, ranks=ranks, hosts=hosts)

    def late(self, number: int) -> PeerLostError | None:
        """Return the loss of the ranks that have made fewer calls on GPUs than ``number``, if any."""
        late = [r for r, n in enumerate(self._counts) if n < number and r != self._rank]
        if not late:
            return None
        made = [
            f"{self._title(r)} has made {self._counts[r]} of {number} calls on GPUs" for r in late
        ]
        return self._lost(late, "; ".join(made))

    def fail(self, error: CollectiveError) -> None:
        """Fail the group: every rank's watching thread then aborts, and calls on the host fail too."""
        lost = isinstance(error, (PeerLostError, CollectiveTimeoutError))
        self._group.abort(str(error), peer_lost=lost, ranks=error.ranks, call=error.call)

    def close(self) -> None:
        """Tell the others, who take part within a second, and leave."""
        with self._lock:
            own, self._own = self._own, None
            if own is None:
                return
            try:
                if self._work is not None and self._gone is None:
                    self._heard(self._work.wait(self.SILENCE).tolist())
                if self._gone is None:
                    self._tell(own, self._LEFT, self.SILENCE).wait()
            except (CollectiveError, TimeoutError):  # they have gone, too
                pass
            own.close()

    def abandon(self) -> None:
        """Let go of the group of their own, which ends as every group does."""
        self._own = None
