"""A listening socket through which only those come who know the key."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycollective.launch.handshake import Channel, HandshakeError, answer, refuse

if TYPE_CHECKING:
    from pycollective.launch.tls import Tls

__all__ = ["SHORTAGES", "STRANGER_SECONDS", "HandshakeServer"]

STRANGER_SECONDS = 10.0
"""How long a connection may take to prove that it is one of ours."""
MAX_STRANGERS = 64
"""Connections beyond the group's size that may be proving at the same time; the oldest makes room."""
_TLS_BEGINS = b"\x16"
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""What this process or machine lacks: waiting for the others does not help."""


class HandshakeServer:
    """A listening socket; who comes in has proved to know the key. Strangers cost little and go soon."""

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        size: int,
        enter: Callable[[Channel, dict[str, Any]], None],
        tls: Tls | None = None,
    ) -> None:
        self._socket = sock
        self._key = key
        self._room = MAX_STRANGERS + size
        self._enter = enter
        self._tls = tls
        self._lock = threading.Lock()
        self._strangers: dict[int, socket.socket] = {}  # in the order of their coming
        self._closed = threading.Event()
        self.turned_away = 0
        self.shortage: OSError | None = None  # nobody can come in any more
        self.address: tuple[str, int] = sock.getsockname()[:2]  # of no use of a Unix socket
        sock.settimeout(0.2)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                guest, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # closed, or out of descriptors
                with self._lock:
                    if error.errno in SHORTAGES and not self._hang_up_oldest():
                        self.shortage = error
                self._closed.wait(0.01)
                continue
            with self._lock:
                if self._closed.is_set():
                    guest.close()
                    return
                if len(self._strangers) >= self._room:
                    self._hang_up_oldest()
                self._strangers[id(guest)] = guest
            try:
                threading.Thread(target=self._greet, args=(guest,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._forget(guest)
                guest.close()

    def _hang_up_oldest(self) -> bool:
        """Make room, with the lock held; return whether there was anybody."""
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            _hang_up(self._strangers.pop(oldest))
        return oldest is not None

    def _forget(self, guest: socket.socket) -> bool:
        with self._lock:
            return self._strangers.pop(id(guest), None) is not None

    def _greet(self, guest: socket.socket) -> None:
        sock = guest  # or what TLS makes of it
        try:
            deadline = time.monotonic() + STRANGER_SECONDS
            if guest.family != socket.AF_UNIX:
                guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock = self._secured(guest, deadline)
            channel, hello = answer(sock, self._key, deadline)
        except (HandshakeError, OSError):
            self.turned_away += 1
            self._forget(guest)
            sock.close()
            guest.close()
            return
        if not self._forget(guest) or self._closed.is_set():
            sock.close()
            return
        try:
            self._enter(channel, hello)
        except (HandshakeError, OSError):
            sock.close()

    def _secured(self, guest: socket.socket, deadline: float) -> socket.socket:
        """Turn away who speaks TLS where it is not asked for, or does not where it is."""
        guest.settimeout(STRANGER_SECONDS)
        speaks = guest.recv(1, socket.MSG_PEEK) == _TLS_BEGINS
        if not speaks and self._tls is None:
            return guest
        if speaks and self._tls is not None:
            return self._tls.accept(guest, deadline, lambda sock: self._becomes(guest, sock))
        why = "this rank speaks no TLS" if speaks else "this rank speaks TLS only"
        refuse(guest, f"{why}: PYCOLLECTIVE_TLS_CERT, _KEY and _CA are for all ranks, or for none")
        raise HandshakeError(why)

    def _becomes(self, guest: socket.socket, sock: socket.socket) -> None:
        with self._lock:
            if id(guest) not in self._strangers:
                raise HandshakeError("it had to make room")
            self._strangers[id(guest)] = sock

    def close(self) -> None:
        """Let nobody in any more; who is proving is turned away."""
        with self._lock:
            self._closed.set()
        if self._socket.family == socket.AF_UNIX:  # of which the end does not wake accept
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as guest:
                guest.setblocking(False)
                guest.connect(self._socket.getsockname())
        _hang_up(self._socket)  # wakes accept
        with self._lock:
            for guest in self._strangers.values():
                _hang_up(guest)
        self._thread.join()
        self._socket.close()


def _hang_up(sock: socket.socket) -> None:
    """Wake whoever reads from a socket, who then closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # below TLS, if any
