"""Groups of ranks that are threads of the test, over any transport."""

from __future__ import annotations

import itertools
import os
import socket

from pycollective import _core
from pycollective.comm import Communicator, local_group
from pycollective.comm.split import SharedMemory, Threads
from pycollective.environment import arena_bytes

KINDS = ["threads", "shm", "tcp"]
ALL_KINDS = [*KINDS, "mixed"]


def make_group(kind: str, size: int, timeout: float = 60.0) -> list[Communicator]:
    """Return the communicators of a new group."""
    if kind == "threads":
        return local_group(size, timeout=timeout)
    if kind == "shm":
        return [Communicator(m, r, timeout, SharedMemory(m)) for r, m in enumerate(_joined(size))]
    hosts = list(range(size)) if kind == "tcp" else emulated_hosts(size)
    comms = []
    memories = {host: iter(_joined(hosts.count(host))) for host in set(hosts)}
    for rank, sockets_to in enumerate(_connected(size)):
        far = [kind == "tcp" or hosts[peer] != hosts[rank] for peer in range(size)]
        # Ranks of one host need no connection for collectives.
        streams = [[s.fileno() for s in sockets_to[p][: 2 if far[p] else 1]] for p in range(size)]
        pipes = [sockets[2].fileno() if sockets else -1 for sockets in sockets_to]
        if kind == "tcp":
            group = _core.TcpGroup(rank, streams, pipes)  # duplicates the sockets
        else:
            group = _core.MixedGroup(rank, streams, pipes, next(memories[hosts[rank]]), hosts)
        comms.append(Communicator(group, rank, timeout, Threads()))
        for connection in itertools.chain(*sockets_to):
            connection.close()
    return comms


def emulated_hosts(size: int) -> list[int]:
    """Return each rank's host in a mixed group: one host for two ranks, else several in turn."""
    count = 1 if size < 3 else 2 if size < 7 else 3
    return [rank % count for rank in range(size)]


def _joined(size: int) -> list[_core.ShmGroup]:
    """Return a new memory, opened and joined by each of its ranks."""
    memory = _core.ShmGroup.create(size, arena_bytes(os.environ))
    members = [_core.ShmGroup.open(memory.descriptor) for _ in range(size)]
    for rank, member in enumerate(members):
        member.join(rank)
    return members


def _connected(size: int) -> list[list[list[socket.socket]]]:
    """Return each rank's sockets to every other rank: for control, collectives and messages."""
    ends: list[list[list[socket.socket]]] = [[[] for _ in range(size)] for _ in range(size)]
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        for a, b in itertools.combinations(range(size), 2):
            for _ in range(3):
                ends[a][b].append(socket.create_connection(server.getsockname()[:2]))
                ends[b][a].append(server.accept()[0])
    return ends
