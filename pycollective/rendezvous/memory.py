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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pycollective import _core
from pycollective.rendezvous.handshake import Channel, HandshakeError, introduce

__all__ = ["boot_id", "share"]

PROOF_SECONDS = 10.0
"""How long a rank may take to get to the leader's socket."""


def boot_id() -> str:
    """Return what only processes of this host have, until it starts again; empty if unknown."""
    if sys.platform != "linux":
        return ""  # neither memfd nor abstract sockets
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def share(
    rank: int,
    claimed: list[int],
    peers: dict[int, Channel],
    key: bytes,
    deadline: float,
    listen: Callable[[socket.socket, Callable[[Channel, dict[str, Any]], None]], Any],
) -> tuple[list[int], _core.ShmGroup | None]:
    """Return the ranks that share memory with this one, itself included, and the memory.

    Parameters
    ----------
    rank : int
        This rank.
    claimed : list of int
        The ranks that say they are on this host, itself included; the same list for each of them.
    peers : dict
        The authenticated channel to each of them.
    key : bytes
        The group's key.
    deadline : float
        When to give up (time.monotonic).
    listen : callable
        Makes a door (`pycollective.rendezvous.door`) of a socket and what to do with who comes in.
    """
    while len(claimed) > 1:
        leader, *others = claimed
        if leader == rank:
            members, memory = _lead(rank, others, peers, key, deadline, listen)
        else:
            members, memory = _follow(rank, peers[leader], key, deadline)
        if rank in members:
            return members, memory
        claimed = [r for r in claimed if r not in members]
    return [rank], None


def _lead(
    rank: int,
    others: list[int],
    peers: dict[int, Channel],
    key: bytes,
    deadline: float,
    listen: Callable[[socket.socket, Callable[[Channel, dict[str, Any]], None]], Any],
) -> tuple[list[int], _core.ShmGroup | None]:
    name = f"pycollective-{secrets.token_hex(16)}"
    arrived: dict[int, Channel] = {}
    changed = threading.Condition()

    def enter(channel: Channel, hello: dict[str, Any]) -> None:
        if hello.get("purpose") != "memory" or hello.get("from") not in others:
            raise HandshakeError("nobody whom this rank waits for")
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
            peers[other].send({"door": name}, deadline)
        came = [r for r in others if peers[r].receive(deadline).get("came") is True]
        with changed:  # our own end may be a moment later
            changed.wait_for(lambda: all(r in arrived for r in came), PROOF_SECONDS)
            came = [r for r in came if r in arrived]
        memory = None
        if came:
            try:
                memory = _core.ShmGroup.create(1 + len(came))
                memory.join(0)
            except (OSError, MemoryError, RuntimeError):
                came, memory = [], None
        members = [rank, *came]
        for other in others:
            peers[other].send({"members": members}, deadline)
        if memory is not None:
            for r in came:
                socket.send_fds(arrived[r].socket, [b"m"], [memory.descriptor])
            said = [peers[r].receive(deadline).get("joined") is True for r in came]
            proved = all(said) and all(memory.is_in(place) for place in range(len(members)))
            for other in others:
                peers[other].send({"proved": proved}, deadline)
            if not proved:
                return [rank], None
    return members, memory


def _follow(
    rank: int, leader: Channel, key: bytes, deadline: float
) -> tuple[list[int], _core.ShmGroup | None]:
    """Return the members as the leader has them; the leader alone where nothing is proved."""
    name = leader.receive(deadline).get("door")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        came, soon = False, min(deadline, time.monotonic() + PROOF_SECONDS)
        with contextlib.suppress(OSError, HandshakeError):
            sock.settimeout(max(0.001, soon - time.monotonic()))
            sock.connect("\0" + str(name))
            introduce(sock, key, {"purpose": "memory", "from": rank}, soon)
            came = True
        leader.send({"came": came}, deadline)
        members = leader.receive(deadline).get("members")
        if not isinstance(members, list) or not all(type(r) is int for r in members) or not members:
            raise HandshakeError("no list of the ranks that share memory")
        if len(members) == 1:
            return members, None
        memory = None
        if rank in members:
            with contextlib.suppress(OSError, ValueError, RuntimeError, MemoryError):
                sock.settimeout(max(0.001, soon - time.monotonic()))
                memory = _joined(sock, members.index(rank), len(members))
            leader.send({"joined": memory is not None}, deadline)
        if leader.receive(deadline).get("proved") is not True:
            return members[:1], None
    return members, memory


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
