"""Messages of PyTorch, which can be received from any rank."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from pycollective.comm import Communicator, Work
from pycollective.errors import CollectiveError

_NOTICES = 0  # the tag of notices; a message has its own tag plus 1
_END = -1
_POLL_SECONDS = 0.0002


class Messages:
    """The messages of one rank.

    `Communicator.recv` needs the rank that sends. A rank therefore sends a notice with the tag before
    each message, and a receive from any rank waits for a notice. Every other receive reads one notice
    of its source too, so that notices do not accumulate.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._peers = [rank for rank in range(comm.size) if rank != comm.rank]
        self._unclaimed: Counter[tuple[int, int]] = Counter()
        """Notices read minus receives made, by source and tag."""
        self._ahead: Counter[int] = Counter()
        """The same by source."""
        self._pending: dict[int, Work[Any]] = {}
        """The receive of each source's next notice."""
        self._ended: set[int] = set()
        """The ranks that send no more messages."""

    def send(self, x: Any, dest: int, tag: int, **options: Any) -> Any:
        """Send an array; the options are those of `Communicator.send`."""
        notice = self._comm.send(np.array([tag]), dest, _NOTICES, **options)
        sent = self._comm.send(x, dest, tag + 1, **options)
        return Work.joined([notice, sent], lambda: None) if options["async_op"] else None

    def recv(self, out: Any, source: int, tag: int, **options: Any) -> Any:
        """Receive an array; the options are those of `Communicator.recv`."""
        self._unclaimed[source, tag] -= 1
        self._ahead[source] -= 1
        work = self._comm.recv(out, source, tag + 1, **options)
        if options["async_op"]:
            return work.then(lambda: self._catch_up(source))
        self._catch_up(source)
        return None

    def recv_any(self, out: Any, tag: int, timeout: float) -> _AnySource:
        """Return the work of a receive from any rank; its result is the rank."""

        def receive(seconds: float) -> int | None:
            source = self._noticed(tag, seconds)
            if source is not None:
                self.recv(out, source, tag, async_op=False, timeout=timeout)
            return source

        return _AnySource(receive, timeout)

    def close(self) -> None:
        """Let the other ranks' receives of notices end; send no more messages."""
        with contextlib.suppress(CollectiveError):
            for rank in self._peers:
                self._comm.send(np.array([_END]), rank, _NOTICES, timeout=1.0)

    def _next_notice(self, source: int) -> Work[Any]:
        work = self._pending.get(source)
        if work is None:
            notice = np.empty(1, np.int64)
            work = self._comm.recv(notice, source, _NOTICES, async_op=True)
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

    def _catch_up(self, source: int) -> None:
        """Read a notice after a receive, unless it has been read."""
        if self._ahead[source] < 0:
            self._read_notice(source)

    def _noticed(self, tag: int, seconds: float) -> int | None:
        """Return a rank that has sent a message with this tag; None if there is none in time."""
        until = time.monotonic() + seconds
        while True:
            for source in self._peers:
                while self._unclaimed[source, tag] <= 0 and source not in self._ended:
                    if not self._next_notice(source).done():
                        break
                    self._read_notice(source)
                if self._unclaimed[source, tag] > 0:
                    return source
            if time.monotonic() >= until:
                return None
            time.sleep(_POLL_SECONDS)


class _AnySource(Work[int]):
    """A receive from any rank, which looks for a message when the program asks."""

    def __init__(self, receive: Callable[[float], int | None], timeout: float) -> None:
        super().__init__(())
        self._receive, self._timeout = receive, timeout
        self._source: int | None = None

    def done(self) -> bool:
        if self._source is None:
            self._source = self._receive(0.0)
        return self._source is not None

    def wait(self, timeout: float | None = None) -> int:
        if self._source is None:
            seconds = self._timeout if timeout is None else timeout
            self._source = self._receive(seconds)
            if self._source is None:
                raise TimeoutError(f"no rank has sent a message with this tag in {seconds:g} s")
        return self._source
