"""Messages of PyTorch, which can be received from any rank."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from pycollective.comm import Communicator, Work
from pycollective.errors import CollectiveError, PeerLostError

_NOTICES = 2**31 - 1  # the tag of notices
_END = -1
_POLL_SECONDS = 0.0002
_FOREVER = 1e9  # seconds


class Messages:
    """The messages of one rank.

    `Communicator.recv` needs the rank that sends. A rank therefore sends a notice with the tag before
    each message, and a receive from any rank waits for a notice. Every other receive reads one notice
    of its source too, so that notices do not accumulate.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._peers = [rank for rank in range(comm.size) if rank != comm.rank]
        self._lock = threading.Lock()  # guards the following variables
        self._unclaimed: Counter[tuple[int, int]] = Counter()
        """Notices read minus receives made, by source and tag."""
        self._ahead: Counter[int] = Counter()
        """Notices read minus receives that have ended, by source."""
        self._pending: dict[int, Work[Any]] = {}
        """The receive of each source's next notice."""
        self._ended: set[int] = set()
        """The ranks that send no more messages."""
        self._waiting: defaultdict[int, deque[object]] = defaultdict(deque)
        """The receives from any rank that wait, by tag: the first one gets the next message."""

    def send(self, x: Any, dest: int, tag: int) -> Work[None]:
        """Return the work of a send."""
        _check(tag)
        notice = self._comm.send(np.array([tag]), dest, _NOTICES, async_op=True)
        sent = self._comm.send(x, dest, tag, async_op=True)
        return Work.joined([notice, sent], lambda: None)

    def recv(self, out: Any, source: int, tag: int) -> Work[None]:
        """Return the work of a receive."""
        _check(tag)
        with self._lock:
            self._unclaimed[source, tag] -= 1
        work = self._comm.recv(out, source, tag, async_op=True)
        return work.then(lambda: self._end(source))

    def recv_any(self, out: Any, tag: int, timeout: float) -> Work[int]:
        """Return the work of a receive from any rank; its result is the rank."""
        _check(tag)
        turn, waiting = object(), self._waiting[tag]

        def begin() -> tuple[int, Work[Any]] | None:
            """Claim a message if this receive is the first with its tag, and begin to receive it."""
            with self._lock:
                if waiting[0] is not turn:
                    return None
                try:
                    source = self._noticed(tag)
                except BaseException:
                    waiting.popleft()
                    raise
                if source is None:
                    return None
                waiting.popleft()
                work = self._comm.recv(out, source, tag, async_op=True, timeout=timeout)
                return source, work.then(lambda: self._end(source))

        def receive() -> int:
            until = time.monotonic() + timeout
            while (begun := begin()) is None:
                if time.monotonic() >= until:
                    with self._lock:
                        waiting.remove(turn)
                    raise TimeoutError(f"no rank has sent a message with this tag in {timeout:g} s")
                time.sleep(_POLL_SECONDS)
            source, work = begun
            work.wait()
            return source

        with self._lock:
            waiting.append(turn)
        begun = begin()
        if begun is not None:
            source, work = begun
            return work.then(lambda: source)
        task = _Receive(receive)
        return Work([task], lambda: task.source)

    def close(self) -> None:
        """Tell all ranks that no message follows, and wait for the pending receives of notices."""
        with contextlib.suppress(CollectiveError):
            for rank in self._peers:
                self._comm.send(np.array([_END]), rank, _NOTICES, timeout=1.0)
        with self._lock:
            pending = list(self._pending.items())
        until = time.monotonic() + self._comm.timeout
        for source, work in pending:
            try:
                work.wait(max(0.0, until - time.monotonic()))
            except TimeoutError:
                self._comm.abort(
                    f"rank {source} has not left the group in {self._comm.timeout:g} s"
                )
            except CollectiveError:
                return

    def _next_notice(self, source: int) -> Work[Any]:
        work = self._pending.get(source)
        if work is None:
            notice = np.empty(1, np.int64)
            # No deadline, because a rank may send nothing for any time.
            work = self._comm.recv(notice, source, _NOTICES, async_op=True, timeout=_FOREVER)
            self._pending[source] = work
        return work

    def _read_notice(self, source: int) -> None:
        """Wait for a source's next notice, and count its message."""
        tag = int(self._next_notice(source).wait()[0])
        del self._pending[source]
        if tag == _END:
            self._ended.add(source)
        else:
            self._unclaimed[source, tag] += 1
            self._ahead[source] += 1

    def _end(self, source: int) -> None:
        """Count a receive that has ended, and read a notice, which came before the message."""
        with self._lock:
            self._ahead[source] -= 1
            if self._ahead[source] < 0:
                self._read_notice(source)

    def _noticed(self, tag: int) -> int | None:
        """Claim a message with this tag, and return its source; None if there is none yet.

        The caller holds the lock.
        """
        for source in self._peers:
            while self._unclaimed[source, tag] <= 0 and source not in self._ended:
                if not self._next_notice(source).done():
                    break
                self._read_notice(source)
            if self._unclaimed[source, tag] > 0:
                self._unclaimed[source, tag] -= 1
                return source
        if len(self._ended) == len(self._peers):
            raise PeerLostError(
                f"rank {self._comm.rank} receives from any rank, and all others have left the group",
                ranks=self._peers,
            )
        return None


def _check(tag: int) -> None:
    if not 0 <= tag < _NOTICES:
        raise ValueError(f"tag must be a number from 0 to {_NOTICES - 1}, not {tag}")


class _Receive:
    """The task of a receive from any rank.

    A thread makes the receive, because the other rank may wait for it in `send`.
    """

    times = 0.0, 0.0  # for traces, which do not show these receives

    def __init__(self, receive: Callable[[], int]) -> None:
        self.source = -1
        self._receive = receive
        self._error: Exception | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="pycollective", daemon=True).start()

    def _run(self) -> None:
        try:
            self.source = self._receive()
        except Exception as error:
            self._error = error
        self._ended.set()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float) -> bool:
        return self._ended.wait(timeout)

    def check(self) -> None:
        if self._error is not None:
            raise self._error
