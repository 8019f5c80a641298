"""Network interfaces of this host, and their selection by NCCL's grammar."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from pathlib import Path

_LINK = "20"  # the scope of addresses that are valid on one link
_SIOCGIFADDR = 0x8915 if sys.platform == "linux" else 0xC0206921  # macOS


def interface_addresses(first: int = socket.AF_INET) -> list[tuple[str, str]]:
    """Return (name, address) of every interface, those of one address family first.

    IPv6 addresses are found on Linux only. Link-local ones are left out, because other hosts cannot use
    them without a zone.
    """
    both = [_ipv4_addresses(), _ipv6_addresses()]
    if first == socket.AF_INET6:
        both.reverse()
    return both[0] + both[1]


def _ipv6_addresses() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]  # address, index, prefix, scope, flags, name
    return [
        (name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
        for address, _, _, scope, _, name in fields
        if scope != _LINK
    ]


def _ipv4_addresses() -> list[tuple[str, str]]:
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("16s240x", name.encode()))
            except OSError:  # no IPv4 address
                continue
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def choose(pattern: str, interfaces: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the interfaces that NCCL_SOCKET_IFNAME's grammar allows, each with its first address.

    ``eth,ib`` allows names with these prefixes, ``=eth0,eth1`` exactly these names, and ``^docker`` or
    ``^=eth0`` all others. An exclusion allows the loopback interface only if no other one is left. All
    addresses are of the first one's family.
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

    left = [(n, ipaddress.ip_address(a)) for n, a in interfaces if listed(n) != exclude]
    if exclude:
        left = [(n, a) for n, a in left if not a.is_loopback] or left
    there = ", ".join(f"{n} ({a})" for n, a in interfaces)
    if not left:
        raise ValueError(f"{pattern!r} matches none of the interfaces {there}")
    version = left[0][1].version
    found: dict[str, str] = {}
    for name, address in left:
        if address.version == version:
            found.setdefault(name, str(address))
    missing = [n for n in names if exact and not exclude and n not in found]
    if missing:
        raise ValueError(
            f"{pattern!r} names {' and '.join(missing)}, which has no IPv{version} address: there are "
            f"{there}"
        )
    return list(found.items())
