"""Who shares this host's memory: claimed by an equal boot id, proved by passing memory along.

Of the ranks with one boot id the lowest leads. It listens on a Unix socket that no other host can
reach; who gets there and proves to know the group's key is handed the descriptor of the memory, and
takes its place in it, which the leader must see. Whoever cannot get there (another container, say)
is left to the same game among those who are left; what is never proved is TCP.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pycollective import _core
from pycollective.environment import arena_bytes
from pycollective.rendezvous import secret
from pycollective.rendezvous.door import SHORTAGES
from pycollective.rendezvous.handshake import Channel, HandshakeError, introduce

__all__ = ["PROOF_SECONDS", "Sharing", "boot_id", "naming"]

Listen = Callable[[socket.socket, Callable[[Channel, dict[str, Any]], None]], Any]

PROOF_SECONDS = 10.0
"""How long a rank may take to get to the leader's socket."""
_ENTER_SECONDS = 3.0
"""How long the leader may take to see a rank that has proved itself."""


def boot_id() -> str:
    """Return what only processes of this host have, until it starts again; empty if unknown."""
    if sys.platform != "linux":
        return ""  # neither memfd nor abstract sockets
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class Sharing:
    """How one rank of a group finds those with which it shares memory.

    Parameters
    ----------
    rank : int
        This rank.
    peers : dict
        The authenticated channels to the other ranks that say they are on this host.
    key : bytes
        The group's key.
    hear : callable
        Returns the next message of a rank, or raises if there is no use in waiting. The rank is
        named in errors of its connection (`naming`).
    has_secret : bool
        Whether the group has a secret. Memory is given to other users only where they know one.
    title : callable
        Returns the name of a rank in texts.
    """

    def __init__(
        self,
        rank: int,
        peers: dict[int, Channel],
        key: bytes,
        hear: Callable[[int], dict[str, Any]],
        has_secret: bool,
        title: Callable[[int], str],
    ) -> None:
        self._rank = rank
        self._peers = peers
        self._key = key
        self._hear = hear
        self._has_secret = has_secret
        self._title = title

    def share(
        self, claimed: list[int], deadline: float, listen: Listen
    ) -> tuple[list[int], _core.ShmGroup | None]:
        """Return the ranks that share memory with this one, itself included, and the memory.

        Parameters
        ----------
        claimed : list of int
            The ranks that say they are on this host, itself included; the same list for each of them.
        deadline : float
            When to give up (time.monotonic).
        listen : callable
            Makes a door (`pycollective.rendezvous.door`) of a socket and what to do with who comes in.

        Raises
        ------
        HandshakeError
            If a rank is lost, or sends what it should not. The text names the rank.
        """
        while len(claimed) > 1:
            leader, *others = claimed
            if leader == self._rank:
                members, memory = self._lead(others, deadline, listen)
            else:
                members, memory = self._follow(leader, deadline)
            if self._rank in members:
                return members, memory
            claimed = [r for r in claimed if r not in members]
        return [self._rank], None

    def _lead(
        self, others: list[int], deadline: float, listen: Listen
    ) -> tuple[list[int], _core.ShmGroup | None]:
        rank = self._rank
        name = f"pycollective-{secrets.token_hex(16)}"
        arrived: dict[int, Channel] = {}
        changed = threading.Condition()

        def enter(channel: Channel, hello: dict[str, Any]) -> None:
            if hello.get("purpose") != "memory" or hello.get("from") not in others:
                raise HandshakeError("nobody whom this rank waits for")
            self._check_user(channel.socket)
            with changed:
                arrived[hello["from"]] = channel
                changed.notify_all()

        with contextlib.ExitStack() as cleanup:
            sock = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.bind("\0" + name)
            sock.listen(len(others))
            door = listen(sock, enter)
            cleanup.callback(_close_all, arrived)
            cleanup.callback(door.close)
            for other in others:
                self._tell(other, {"door": name}, deadline)
            came = [r for r in others if self._hear(r).get("came") is True]
            with changed:  # our own end may be a moment later
                changed.wait_for(lambda: all(r in arrived for r in came), _ENTER_SECONDS)
                came = [r for r in came if r in arrived]
            memory = None
            if came:
                try:
                    memory = _core.ShmGroup.create(1 + len(came), arena_bytes(os.environ))
                    memory.join(0)
                except (OSError, MemoryError, RuntimeError):
                    came, memory = [], None
            members = [rank, *came]
            for other in others:
                self._tell(other, {"members": members}, deadline)
            if memory is not None:
                for r in came:
                    with naming(r, self._title(r)):
                        socket.send_fds(arrived[r].socket, [b"m"], [memory.descriptor])
                said = [self._hear(r).get("joined") is True for r in came]
                proved = all(said) and all(memory.is_in(place) for place in range(len(members)))
                for other in others:
                    self._tell(other, {"proved": proved}, deadline)
                if not proved:
                    return [rank], None
        return members, memory

    def _follow(self, leader: int, deadline: float) -> tuple[list[int], _core.ShmGroup | None]:
        """Return the members as the leader has them; the leader alone where nothing is proved."""
        name = self._hear(leader).get("door")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            came, soon = False, min(deadline, time.monotonic() + PROOF_SECONDS)
            with contextlib.suppress(OSError, HandshakeError):
                sock.settimeout(max(0.001, soon - time.monotonic()))
                sock.connect("\0" + str(name))
                self._check_user(sock)
                introduce(sock, self._key, {"purpose": "memory", "from": self._rank}, soon)
                came = True
            self._tell(leader, {"came": came}, deadline)
            members = self._hear(leader).get("members")
            if (
                not isinstance(members, list)
                or not all(type(r) is int for r in members)
                or not members
            ):
                raise HandshakeError(
                    f"{self._title(leader)} sent no list of the ranks that share memory",
                    ranks=[leader],
                )
            if len(members) == 1:
                return members, None
            memory = None
            if self._rank in members:
                with contextlib.suppress(OSError, ValueError, RuntimeError, MemoryError):
                    sock.settimeout(max(0.001, soon - time.monotonic()))
                    memory = _joined(sock, members.index(self._rank), len(members))
                self._tell(leader, {"joined": memory is not None}, deadline)
            if self._hear(leader).get("proved") is not True:
                return members[:1], None
        return members, memory

    def _tell(self, rank: int, message: dict[str, Any], deadline: float) -> None:
        with naming(rank, self._title(rank)):
            self._peers[rank].send(message, deadline)

    def _check_user(self, sock: socket.socket) -> None:
        if not self._has_secret and not secret.is_same_user(sock):
            raise HandshakeError("the process of another user, and the group has no secret")


@contextlib.contextmanager
def naming(rank: int, title: str) -> Iterator[None]:
    """Name the rank in errors of its connection."""
    try:
        yield
    except (OSError, HandshakeError) as error:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            raise
        raise HandshakeError(f"{title}: {error}", ranks=[rank]) from None


def _joined(sock: socket.socket, place: int, size: int) -> _core.ShmGroup:
    """Take the place in the memory whose descriptor comes over the socket."""
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    try:
        if len(descriptors) != 1:
            raise OSError("no descriptor came")
        memory = _core.ShmGroup.open(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    if memory.size != size:
        raise ValueError("the memory is another group's")
    memory.join(place)
    return memory


def _close_all(channels: dict[int, Channel]) -> None:
    for channel in channels.values():
        channel.close()
