"""The memory that ranks of one host share. An equal boot id suggests one host; shared memory proves it.

Each rank listens on a Unix socket, which other hosts cannot reach. Each rank connects to the lowest rank
with the same boot id that it can reach there. That rank creates the memory and sends its descriptor to
the others, which join the memory. Ranks that cannot reach each other, for example in different
containers, use TCP. Ranks within one container can still share memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pycollective import _core
from pycollective.environment import arena_bytes
from pycollective.launch import secret
from pycollective.launch.handshake import Channel, HandshakeError, introduce
from pycollective.launch.handshake_server import HandshakeServer

PROOF_SECONDS = 10.0
"""Seconds in which a rank must connect to another rank's socket, and then get the descriptor."""
_ENTER_SECONDS = 3.0
"""Seconds in which all connected ranks must join the memory."""


class Sharing:
    """One rank's Unix socket for other ranks of its host.

    The other ranks get its `name`. The owner of this object closes its `server`. Processes of other
    users get memory only if the group has a secret.
    """

    def __init__(self, key: bytes, size: int, has_secret: bool) -> None:
        self._key, self._has_secret = key, has_secret
        self.name = f"pycollective-{secrets.token_hex(16)}"
        self._arrived: dict[tuple[str, int], Channel] = {}  # by group and rank
        self._changed = threading.Condition()
        self._closed = False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind("\0" + self.name)
        sock.listen(size)
        self.server = HandshakeServer(sock, key, size, self._enter)

    def _enter(self, channel: Channel, hello: dict[str, Any]) -> None:
        if hello.get("purpose") != "memory":
            raise HandshakeError("this socket is for sharing memory only")
        self._check_user(channel.socket)
        with self._changed:
            if self._closed:
                raise HandshakeError("no memory is shared any more")
            self._arrived[str(hello.get("group")), hello.get("from", -1)] = channel
            self._changed.notify_all()

    def _check_user(self, sock: socket.socket) -> None:
        if not self._has_secret and not secret.is_same_user(sock):
            raise HandshakeError("the process belongs to another user, and the group has no secret")

    def reach(self, name: str, group: str, rank: int, until: float) -> socket.socket | None:
        """Return a connection to another rank's socket; None if this rank cannot connect in time."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, until - time.monotonic()))
            sock.connect("\0" + name)
            self._check_user(sock)
            hello = {"purpose": "memory", "group": group, "from": rank}
            introduce(sock, self._key, hello, until)
        except (OSError, HandshakeError):
            sock.close()
            return None
        return sock

    def create(
        self, group: str, ranks: Sequence[int], poll: Callable[[], object]
    ) -> _core.ShmGroup | None:
        """Create memory, and return it when all ranks have joined it.

        Return None if a rank does not join in time, or if the system refuses the memory. This rank is
        the first of ``ranks``, and the others have connected to its socket. ``poll`` raises an error
        if the rendezvous has failed.
        """
        until = time.monotonic() + _ENTER_SECONDS
        others = [(group, rank) for rank in ranks[1:]]
        with self._changed:  # the server may accept a connection later than the peer sees it
            self._changed.wait_for(lambda: all(o in self._arrived for o in others), _ENTER_SECONDS)
            channels = [self._arrived.pop(other, None) for other in others]
        try:
            memory = _core.ShmGroup.create(len(ranks), arena_bytes(os.environ))
            memory.join(0)
            for channel in channels:
                if channel is not None:
                    socket.send_fds(channel.socket, [b"m"], [memory.descriptor])
        except (OSError, MemoryError, RuntimeError):
            return None
        finally:
            _close(channels)
        while not all(memory.is_in(place) for place in range(len(ranks))):
            if time.monotonic() >= until:
                return None
            poll()
            time.sleep(0.001)
        return memory

    def close(self) -> None:
        """Close the unused connections."""
        with self._changed:
            self._closed = True
        _close(list(self._arrived.values()))


def join(sock: socket.socket, place: int, size: int) -> _core.ShmGroup | None:
    """Join the memory whose descriptor arrives over a connection; return None if that fails."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, MemoryError):
        sock.settimeout(PROOF_SECONDS)
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        for descriptor in descriptors:  # one, or none
            try:
                memory = _core.ShmGroup.open(descriptor)
            finally:
                os.close(descriptor)
            if memory.size == size:
                memory.join(place)
                return memory
    return None


def _close(channels: Sequence[Channel | None]) -> None:
    for channel in channels:
        if channel is not None:
            channel.close()
