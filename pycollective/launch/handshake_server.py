"""A listening socket that accepts only connections whose other side knows the key."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycollective.launch.handshake import Channel, HandshakeError, answer, refuse

if TYPE_CHECKING:
    from pycollective.launch.tls import Tls

HANDSHAKE_SECONDS = 10.0
"""Seconds that a connection has for its handshake."""
MAX_HANDSHAKES = 64
"""Most simultaneous handshakes beyond the group's size; one more ends the oldest.

All together may have a quarter of the descriptors that the process can open.
"""
_TLS_BEGINS = b"\x16"
Enter = Callable[[Channel, dict[str, Any]], None]
"""Accepts a connection, or raises HandshakeError; gets the other side's first message too."""
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Error numbers for resources that this process or machine lacks; waiting does not help."""


class HandshakeServer:
    """A listening socket that does the handshake with every connection.

    ``enter`` is called for a connection whose other side has proved that it knows the key, in a thread
    of that connection. Time and number of unfinished handshakes are limited.
    """

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        size: int,
        enter: Enter,
        tls: Tls | None = None,
    ) -> None:
        self._socket = sock
        self._key = key
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        share = limit // 4 if limit != resource.RLIM_INFINITY else MAX_HANDSHAKES + size
        self._most_handshakes = max(1, min(MAX_HANDSHAKES + size, share))
        self._enter = enter
        self._tls = tls
        self._lock = threading.Lock()
        self._handshakes: dict[int, socket.socket] = {}  # in the order of arrival
        self._closed = threading.Event()
        self.rejected = 0
        self.reason = ""  # for which the last connection was rejected
        self.shortage: OSError | None = None  # set if no connection can be accepted any more
        self.address: tuple[str, int] = sock.getsockname()[:2]  # meaningless for a Unix socket
        sock.settimeout(0.2)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # closed, or out of descriptors
                with self._lock:
                    if error.errno in SHORTAGES and not self._shut_down_oldest():
                        self.shortage = error
                self._closed.wait(0.01)
                continue
            with self._lock:
                if self._closed.is_set():
                    connection.close()
                    return
                if len(self._handshakes) >= self._most_handshakes:
                    self._shut_down_oldest()
                self._handshakes[id(connection)] = connection
            try:
                threading.Thread(target=self._handshake, args=(connection,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._forget(connection)
                connection.close()

    def _shut_down_oldest(self) -> bool:
        """End the oldest unfinished handshake, with the lock held; return True if there was one."""
        oldest = next(iter(self._handshakes), None)
        if oldest is not None:
            _shut_down(self._handshakes.pop(oldest))
        return oldest is not None

    def _forget(self, connection: socket.socket) -> bool:
        with self._lock:
            return self._handshakes.pop(id(connection), None) is not None

    def _handshake(self, connection: socket.socket) -> None:
        sock = connection  # or the TLS socket around it
        try:
            deadline = time.monotonic() + HANDSHAKE_SECONDS
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock = self._secured(connection, deadline)
            channel, hello = answer(sock, self._key, deadline)
        except (HandshakeError, OSError) as error:
            self.rejected += 1
            self.reason = str(error)
            self._forget(connection)
            sock.close()
            connection.close()
            return
        if not self._forget(connection) or self._closed.is_set():
            sock.close()
            return
        try:
            self._enter(channel, hello)
        except (HandshakeError, OSError):
            sock.close()

    def _secured(self, connection: socket.socket, deadline: float) -> socket.socket:
        """Return the socket, in TLS if this rank uses it; refuse a side that differs in this."""
        connection.settimeout(HANDSHAKE_SECONDS)
        begins_tls = connection.recv(1, socket.MSG_PEEK) == _TLS_BEGINS
        if not begins_tls and self._tls is None:
            return connection
        if begins_tls and self._tls is not None:
            return self._tls.accept(
                connection, deadline, lambda sock: self._replace(connection, sock)
            )
        there, here = ("uses", "does not") if begins_tls else ("does not use", "does")
        refuse(
            connection,
            f"this rank {there} TLS, and the other side {here}: set PYCOLLECTIVE_TLS_CERT, _KEY and "
            "_CA on all ranks, or on none",
        )
        raise HandshakeError(f"the other side {there} TLS, and this rank {here}")

    def _replace(self, connection: socket.socket, sock: socket.socket) -> None:
        """Register the TLS socket of a connection, which `close` then shuts down."""
        with self._lock:
            if id(connection) not in self._handshakes:
                raise HandshakeError("there were too many handshakes, and this one was the oldest")
            self._handshakes[id(connection)] = sock

    def close(self) -> None:
        """Accept no more connections, and end the unfinished handshakes."""
        with self._lock:
            self._closed.set()
        if self._socket.family == socket.AF_UNIX:  # its shutdown does not wake accept
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.setblocking(False)
                connection.connect(self._socket.getsockname())
        _shut_down(self._socket)  # wakes accept
        with self._lock:
            for connection in self._handshakes.values():
                _shut_down(connection)
        self._thread.join()
        self._socket.close()


def _shut_down(sock: socket.socket) -> None:
    """Wake the thread that reads from a socket; that thread closes the socket."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # below TLS, if any
