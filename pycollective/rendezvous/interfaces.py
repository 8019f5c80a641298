"""Network interfaces of this host, and the grammar that chooses among them."""

from __future__ import annotations

import socket
import struct
import sys

__all__ = ["choose", "interface_addresses"]

_SIOCGIFADDR = 0x8915 if sys.platform == "linux" else 0xC0206921  # macOS


def interface_addresses() -> list[tuple[str, str]]:
    """Return (name, IPv4 address) of every interface that has one."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("16s240x", name.encode()))
            except OSError:  # it has none
                continue
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def choose(pattern: str, interfaces: list[tuple[str, str]]) -> tuple[str, str]:
    """Return the first interface that NCCL_SOCKET_IFNAME's grammar allows.

    ``eth,ib``: names with these beginnings; ``=eth0``: exactly these; ``^docker`` and ``^=eth0``: all
    others. An exclusion takes the loopback interface only where there is no other.

    Raises
    ------
    ValueError
        None is left; the message lists what there is.
    """
    rest = pattern
    exclude = rest.startswith("^")
    rest = rest[1:] if exclude else rest
    exact = rest.startswith("=")
    rest = rest[1:] if exact else rest
    names = [name.strip() for name in rest.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{pattern!r} names no interface")

    def listed(name: str) -> bool:
        return any(name == n if exact else name.startswith(n) for n in names)

    left = [(n, a) for n, a in interfaces if listed(n) != exclude]
    if exclude:
        left.sort(key=lambda pair: pair[1].startswith("127."))
    if not left:
        there = ", ".join(f"{n} ({a})" for n, a in interfaces)
        raise ValueError(f"{pattern!r} matches none of the interfaces {there}")
    return left[0]
