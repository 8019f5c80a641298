"""Control connections in TLS, for a core that reads and writes plain sockets.

Of each such connection the core has one end of a socket pair; a thread carries what comes to the other
side. That is little: calls in which ranks wait, failures, and leaves. A connection that ends, ends on
both sides.
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

__all__ = ["Relay", "finish"]

_MOST = 16384
"""Bytes that are carried at a time: a record of TLS."""
_ROUNDS = 64
"""Of one connection, before others have their turn."""
_LINGER = 2.0
"""Seconds that a peer has to take what was said last."""


class Relay:
    """The thread that carries what the control connections of a group say.

    The connections to each rank belong to this object. `ends` has the sockets that stand for them.
    """

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self.ends: dict[int, socket.socket] = {}
        self._pairs = []
        for rank, secure in connections.items():
            assert isinstance(secure, ssl.SSLSocket)
            self.ends[rank], plain = socket.socketpair()
            self._pairs.append(_Pair(secure, plain))
        self._thread = threading.Thread(target=self._carry, name="pycollective-tls", daemon=True)
        _running.add(self)
        self._thread.start()

    def _carry(self) -> None:
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
        """Wait until all has been carried; for some seconds at most."""
        self._thread.join(2 * _LINGER)

    def abandon(self) -> None:
        """In a forked child: the connections are the parent's."""
        for pair in self._pairs:
            pair.close()


class _Way:
    """One direction of a connection: what is read from one socket is written to the other."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self._source, self._sink = source, sink
        self.data = b""  # read, and not yet written
        self.ended = False  # nothing more is read
        self.wants_room = False  # TLS has to write before it reads on

    def move(self) -> bool:
        """Read or write what is possible; return True if anything has moved."""
        self.wants_room = False
        is_written = bool(self.data)
        try:
            if is_written:
                self.data = self.data[self._sink.send(self.data) :]
            elif not self.ended:
                self.data = self._source.recv(_MOST)
                self.ended = not self.data
            else:
                return False
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except ssl.SSLWantWriteError:
            self.wants_room = not is_written
            return False
        except OSError:  # SSLError is one; where writing fails, reading says what happened
            self.data = b""
            self.ended = self.ended or not is_written
        return True


class _Pair:
    """A connection to a peer, and the one to the core."""

    def __init__(self, secure: ssl.SSLSocket, plain: socket.socket) -> None:
        self._secure, self._plain = secure, plain
        for sock in (secure, plain):
            sock.setblocking(False)
        with contextlib.suppress(OSError):
            secure.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._out, self._in = _Way(plain, secure), _Way(secure, plain)
        self._shut: set[socket.socket] = set()  # whose other end knows that nothing more comes
        self.until: float | None = None  # when the rest is given up
        self.over = False

    def awaits(self) -> list[tuple[int, int]]:
        """Return the descriptors, and for which events to wait."""
        found = []
        for sock, reads, writes in (
            (self._plain, self._out, self._in),
            (self._secure, self._in, self._out),
        ):
            events = 0 if reads.data or reads.ended else select.POLLIN
            events |= select.POLLOUT if writes.data or reads.wants_room else 0
            found.append((sock.fileno(), events))
        return found

    def move(self) -> None:
        """Carry what there is, both ways; a side that is broken has ended."""
        for _ in range(_ROUNDS):
            if not (self._out.move() | self._in.move()):
                break
            if self._out.ended:  # nobody reads what comes for the core
                self._in.data = b""
        if self._out.ended and self.until is None:
            self.until = time.monotonic() + _LINGER
        for way, sink in ((self._out, self._secure), (self._in, self._plain)):
            if way.ended and not way.data and sink not in self._shut:
                self._shut.add(sink)  # what was said arrives: nothing unread resets the connection
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(sink, socket.SHUT_WR)  # below TLS
        late = self.until is not None and time.monotonic() >= self.until
        self.over = self._out.ended and (self._in.ended or late)

    def close(self) -> None:
        """Close both."""
        self._plain.close()
        self._secure.close()


_running: weakref.WeakSet[Relay] = weakref.WeakSet()


def finish() -> None:
    """At the end of the process: what the core has said last is on its way."""
    for relay in list(_running):
        relay.join()


def _forget_after_fork() -> None:
    for relay in list(_running):
        relay.abandon()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
