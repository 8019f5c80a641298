"""Join requests that a working group receives at its rank 0's address, such as those of lost workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pycollective.errors import RendezvousError
from pycollective.launch.description import Description
from pycollective.launch.handshake import Channel, HandshakeError
from pycollective.launch.handshake_server import HANDSHAKE_SECONDS
from pycollective.launch.sockets import Sockets

_FRESH_SECONDS = 3.0
"""Age of a join request up to which its sender counts as waiting; senders repeat it more often."""
_CONNECT_SECONDS = 2.0
_NO_MEMBERS: dict[str, Any] = {"values": {"all/table": {"ranks": []}}}
"""Store contents after the choice of members: a rank that is not in the table tries again later."""


def is_listening(addresses: Sequence[str], environment: Mapping[str, str] | None = None) -> bool:
    """Return True if a process of the group listens at the first of the group's addresses."""
    sockets = Sockets(Description.of_environment(environment, 1, len(addresses), addresses))
    soon = time.monotonic() + _CONNECT_SECONDS
    try:
        sockets.reach(*sockets.resolve(), {"purpose": "look"}, soon).close()
    except (OSError, HandshakeError):
        return False
    return True


class JoinRequests:
    """A server at rank 0's address that asks all joining ranks to try again later.

    Raises
    ------
    RendezvousError
        The description is invalid (see `pycollective.launch.rendezvous`), or this process cannot
        listen at the address.
    """

    def __init__(
        self, addresses: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._last = -_FRESH_SECONDS
        about = Description.of_environment(environment, 0, len(addresses), addresses)
        sockets = Sockets(about)
        try:
            sock = sockets.listen_at_own_address()
        except OSError as error:
            raise RendezvousError(f"cannot listen for workers that join again: {error}") from None
        self._server = sockets.serve(sock, self._enter)

    def _enter(self, channel: Channel, hello: dict[str, Any]) -> None:
        if hello.get("purpose") != "join":
            raise HandshakeError("this is not the address of the rendezvous")
        self._last = time.monotonic()
        with contextlib.closing(channel):
            channel.send(_NO_MEMBERS, time.monotonic() + HANDSHAKE_SECONDS)

    def waiting(self) -> bool:
        """Return True if a process with the secret asked to join in the last `_FRESH_SECONDS`."""
        return time.monotonic() - self._last < _FRESH_SECONDS

    def close(self) -> None:
        """Stop listening."""
        self._server.close()
