"""Groups of ranks that are threads of the test, over any transport."""

from __future__ import annotations

import socket

from pycollective import _core
from pycollective.communicator import Communicator, local_group
from pycollective.communicator.split import SharedMemory, Threads

KINDS = ["threads", "shm", "tcp"]


def make_group(kind: str, size: int, timeout: float = 60.0) -> list[Communicator]:
    """Return the communicators of a new group."""
    if kind == "threads":
        return local_group(size, timeout=timeout)
    if kind == "tcp":
        return _over_sockets(size, timeout)
    memory = _core.ShmGroup.create(size)
    comms = []
    for rank in range(size):
        one = _core.ShmGroup.open(memory.descriptor)
        one.join(rank)
        comms.append(Communicator(one, rank, timeout, SharedMemory(one)))
    return comms


def _over_sockets(size: int, timeout: float) -> list[Communicator]:
    # Between two ranks: control, collectives, messages.
    ends: dict[tuple[int, int], list[socket.socket]] = {}
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        for a in range(size):
            for b in range(a + 1, size):
                for _ in range(3):
                    ends.setdefault((a, b), []).append(
                        socket.create_connection(server.getsockname()[:2])
                    )
                    ends.setdefault((b, a), []).append(server.accept()[0])
    comms = []
    for rank in range(size):
        own = [ends.get((rank, peer), []) for peer in range(size)]
        streams = [[s.fileno() for s in sockets[:2]] for sockets in own]
        pipes = [sockets[2].fileno() if sockets else -1 for sockets in own]
        group = _core.TcpGroup(rank, streams, pipes)  # which duplicates them
        comms.append(Communicator(group, rank, timeout, Threads()))
        for sockets in own:
            for one in sockets:
                one.close()
    return comms
