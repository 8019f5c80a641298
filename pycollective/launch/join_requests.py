"""Join requests of lost workers, which a working group receives at the address of its rank 0."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from pycollective.errors import RendezvousError
from pycollective.launch.description import Description
from pycollective.launch.handshake import Channel, HandshakeError
from pycollective.launch.handshake_server import STRANGER_SECONDS, HandshakeServer
from pycollective.launch.sockets import Sockets

__all__ = ["JoinRequests", "is_listening"]

_FRESH_SECONDS = 3.0
"""Who still waits tries again in less."""
_LOOK_SECONDS = 2.0
_NO_MEMBERS: dict[str, Any] = {"values": {"all/table": {"ranks": []}}}
"""The values of a store where the members are chosen: a rank that is not in the table comes later."""


def is_listening(about: Description) -> bool:
    """Return True if a process that belongs to the group listens at rank 0's address."""
    sockets = Sockets(about)
    soon = time.monotonic() + _LOOK_SECONDS
    try:
        sock = sockets.connected(*sockets.resolve(), soon)
        sockets.introduced(sock, {"purpose": "look"}, soon).close()
    except (OSError, HandshakeError):
        return False
    return True


class JoinRequests:
    """Listen at rank 0's address, and ask everybody who comes to come later.

    Raises RendezvousError if this process cannot listen there.
    """

    def __init__(self, about: Description) -> None:
        self._last = -_FRESH_SECONDS
        sockets = Sockets(about)
        try:
            sock = sockets.listen_at_own_address()
        except OSError as error:
            raise RendezvousError(f"cannot listen for workers that come back: {error}") from None
        self._server = HandshakeServer(sock, sockets.key, about.size, self._enter, about.tls)

    def _enter(self, channel: Channel, hello: dict[str, Any]) -> None:
        if hello.get("purpose") != "join":
            raise HandshakeError("this is not the address of the rendezvous")
        self._last = time.monotonic()
        with contextlib.closing(channel):
            channel.send(_NO_MEMBERS, time.monotonic() + STRANGER_SECONDS)

    def waiting(self) -> bool:
        """Return True if a process that knows the secret asked to join within the last seconds."""
        return time.monotonic() - self._last < _FRESH_SECONDS

    def close(self) -> None:
        """Listen no more."""
        self._server.close()
