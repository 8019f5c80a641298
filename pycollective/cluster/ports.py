"""Ports that a task chooses before it listens."""

from __future__ import annotations

import socket
import sys

UNKNOWN = "0.0.0.0:0"
"""The address of a task that has not begun, on a host that is not known yet."""


def host_of(address: str) -> str:
    """Return the host of an address."""
    return address.rpartition(":")[0].strip("[]")


def has_port(address: str) -> bool:
    """Return False for port 0: the task chooses its port when it begins."""
    return address.rpartition(":")[2] != "0"


def reserved_address(host: str) -> str:
    """Return an address with a free port, which the system gives to no other program.

    Call it in the process that listens there later. On other systems than Linux, another program may get
    the port before this process listens.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # Linux allows a second socket to listen if both have this option and the first does not listen.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
        port = sock.getsockname()[1]
        if sys.platform == "linux":
            sock.detach()  # the descriptor stays open until the process ends
    finally:
        sock.close()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
