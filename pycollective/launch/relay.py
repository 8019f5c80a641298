"""Control connections in TLS, for a core that reads and writes plain sockets.

For each control connection the core has one end of a socket pair. A thread copies data between the other
end and the TLS connection. There are few data: descriptions of calls, heartbeats, and notices of
ranks that fail or leave. When one side ends, the thread ends the other side too.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Mapping

_MOST = 16384
"""Most bytes that are copied at a time: a TLS record."""
_ROUNDS = 64
"""Most copies for one connection before the next connection has its turn."""
_LINGER = 2.0
"""Seconds that a peer has to read the last data."""


class Relay:
    """The thread that copies data of a group's control connections.

    This object owns the connections. `ends` has the sockets that the core uses instead.
    """

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self.ends: dict[int, socket.socket] = {}
        self._pairs = []
        for rank, secure in connections.items():
            assert isinstance(secure, ssl.SSLSocket)
            self.ends[rank], plain = socket.socketpair()
            self._pairs.append(_Pair(secure, plain))
        self._thread = threading.Thread(target=self._copy_all, name="pycollective-tls", daemon=True)
        _running.add(self)
        self._thread.start()

    def _copy_all(self) -> None:
        poll = select.poll()
        pairs = set(self._pairs)
        watched: dict[int, _Pair] = {}
        ready = set(pairs)
        while pairs:
            for pair in ready:
                pair.move()
                for descriptor, events in pair.awaits():
                    if events and not pair.over:
                        poll.register(descriptor, events)
                        watched[descriptor] = pair
                    elif watched.pop(descriptor, None):
                        poll.unregister(descriptor)
                if pair.over:
                    pair.close()
                    pairs.remove(pair)
            lingers = [pair.until for pair in pairs if pair.until is not None]
            left = max(0.0, min(lingers) - time.monotonic()) if lingers else None
            found = poll.poll(None if left is None else 1000 * left + 1) if pairs else []
            ready = {watched[descriptor] for descriptor, _ in found}
            now = time.monotonic()
            ready |= {pair for pair in pairs if pair.until is not None and pair.until <= now}

    def join(self) -> None:
        """Wait until all data are copied, for some seconds at most."""
        self._thread.join(2 * _LINGER)

    def abandon(self) -> None:
        """Close the copies of the connections in a forked child."""
        for pair in self._pairs:
            pair.close()


class _Direction:
    """One direction of a connection: data are read from one socket and written to the other."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self._source, self._sink = source, sink
        self.data = b""  # read, but not yet written
        self.ended = False  # the source has ended
        self.needs_write = False  # TLS must write before it can read

    def move(self) -> bool:
        """Read or write without waiting; return True if anything was done."""
        self.needs_write = False
        must_write = bool(self.data)
        try:
            if must_write:
                self.data = self.data[self._sink.send(self.data) :]
            elif not self.ended:
                self.data = self._source.recv(_MOST)
                self.ended = not self.data
            else:
                return False
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except ssl.SSLWantWriteError:
            self.needs_write = not must_write
            return False
        except OSError:  # also SSLError; after a failed write, a read reports the end
            self.data = b""
            self.ended = self.ended or not must_write
        return True


class _Pair:
    """A TLS connection to a peer, and the plain socket to the core."""

    def __init__(self, secure: ssl.SSLSocket, plain: socket.socket) -> None:
        self._secure, self._plain = secure, plain
        for sock in (secure, plain):
            sock.setblocking(False)
        with contextlib.suppress(OSError):
            secure.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._out, self._in = _Direction(plain, secure), _Direction(secure, plain)
        self._shut: set[socket.socket] = set()  # the sockets that are shut down for writing
        self.until: float | None = None  # time limit for the rest of the data
        self.over = False

    def awaits(self) -> list[tuple[int, int]]:
        """Return the descriptors with the events to wait for."""
        found = []
        for sock, reads, writes in (
            (self._plain, self._out, self._in),
            (self._secure, self._in, self._out),
        ):
            events = 0 if reads.data or reads.ended else select.POLLIN
            events |= select.POLLOUT if writes.data or reads.needs_write else 0
            found.append((sock.fileno(), events))
        return found

    def move(self) -> None:
        """Copy available data in both directions, and pass on the end of each side."""
        for _ in range(_ROUNDS):
            if not (self._out.move() | self._in.move()):
                break
            if self._out.ended:  # the core no longer reads
                self._in.data = b""
        if self._out.ended and self.until is None:
            self.until = time.monotonic() + _LINGER
        for way, sink in ((self._out, self._secure), (self._in, self._plain)):
            if way.ended and not way.data and sink not in self._shut:
                self._shut.add(sink)  # for writing only: unread data would reset the connection
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(sink, socket.SHUT_WR)  # below TLS
        late = self.until is not None and time.monotonic() >= self.until
        self.over = self._out.ended and (self._in.ended or late)

    def close(self) -> None:
        """Close both sockets."""
        self._plain.close()
        self._secure.close()


_running: weakref.WeakSet[Relay] = weakref.WeakSet()


def finish() -> None:
    """Wait, at the end of the process, until the core's last data are sent."""
    for relay in list(_running):
        relay.join()


def _forget_after_fork() -> None:
    for relay in list(_running):
        relay.abandon()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
