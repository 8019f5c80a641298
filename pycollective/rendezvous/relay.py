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

    Parameters
    ----------
    connections : mapping
        The connection to each rank, which is this object's from now on.

    Attributes
    ----------
    ends : dict
        For each rank the socket that stands for its connection.
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


class _Pair:
    """A connection to a peer, and the one to the core."""

    def __init__(self, secure: ssl.SSLSocket, plain: socket.socket) -> None:
        self._secure, self._plain = secure, plain
        for sock in (secure, plain):
            sock.setblocking(False)
        with contextlib.suppress(OSError):
            secure.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._out, self._in = b"", b""  # to the peer, to the core
        self._core_ended = self._peer_ended = self._said_so = False
        self._wants_room = False  # TLS has to write before it reads on
        self.until: float | None = None  # when the rest is given up
        self.over = False

    def awaits(self) -> list[tuple[int, int]]:
        """Return the descriptors, and for which events to wait."""
        return [
            (
                self._plain.fileno(),
                (select.POLLIN if not self._out and not self._core_ended else 0)
                | (select.POLLOUT if self._in else 0),
            ),
            (
                self._secure.fileno(),
                (select.POLLIN if not self._in and not self._peer_ended else 0)
                | (select.POLLOUT if self._out or self._wants_room else 0),
            ),
        ]

    def move(self) -> None:
        """Carry what there is, both ways; a side that is broken has ended."""
        for _ in range(_ROUNDS):
            if not (self._to_peer() | self._to_core()):
                break
        if self._core_ended and not self._out:
            if not self._said_so:  # what was said arrives: nothing unread resets the connection
                self._said_so = True
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._secure, socket.SHUT_WR)
            self._in = b""
        late = self.until is not None and time.monotonic() >= self.until
        self.over = self._core_ended and (self._peer_ended or late)

    def _to_peer(self) -> bool:
        """Return whether anything has moved."""
        if not self._out and not self._core_ended:
            try:
                self._out = self._plain.recv(_MOST)
            except BlockingIOError:
                return False
            except OSError:
                self._out = b""
            if not self._out:
                self._core_ended = True
                self.until = time.monotonic() + _LINGER
            return True
        if not self._out:
            return False
        try:
            self._out = self._out[self._secure.send(self._out) :]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:  # reading says what happened
            self._out = b""
        return True

    def _to_core(self) -> bool:
        """Return whether anything has moved."""
        if not self._in and not self._peer_ended:
            self._wants_room = False
            try:
                self._in = self._secure.recv(_MOST)
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLWantWriteError:
                self._wants_room = True
                return False
            except OSError:  # SSLError is one
                self._in = b""
            if not self._in:
                self._peer_ended = True
                with contextlib.suppress(OSError):
                    self._plain.shutdown(socket.SHUT_WR)
            return True
        if not self._in:
            return False
        if self._core_ended:
            self._in = b""
            return True
        try:
            self._in = self._in[self._plain.send(self._in) :]
        except BlockingIOError:
            return False
        except OSError:
            self._in = b""
        return True

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
