"""Ports on which no process listens."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Return loopback ports that no process uses now.

    The ports are outside the range for outgoing connections. A connection could otherwise take a port
    before the test's process listens on it.
    """
    outgoing = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    candidates = random.SystemRandom().sample(range(_LOWEST, max(outgoing, 2 * _LOWEST)), 1000)
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for port in candidates:
            if len(found) == count:
                break
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    assert len(found) == count, "this machine has no free ports"
    return found


def free_port() -> int:
    """Return one of :func:`free_ports`."""
    return free_ports(1)[0]
