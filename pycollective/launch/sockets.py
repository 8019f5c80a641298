"""The sockets of a rank: listening, connecting, and the check that a secret protects them."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from typing import Any

from pycollective.errors import RendezvousError
from pycollective.launch import interfaces, secret
from pycollective.launch.description import MAX_STREAMS, Description
from pycollective.launch.handshake import Channel, introduce, key_of
from pycollective.launch.handshake_server import MAX_HANDSHAKES, Enter, HandshakeServer


def is_loopback(address: str) -> bool:
    """Return True for an address that a host has for itself."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _is_local(host: str) -> bool:
    """Return True for an address or a name that means loopback on every host."""
    try:
        return is_loopback(host)
    except ValueError:
        return host.split(".")[0] in ("localhost", "ip6-localhost", "ip6-loopback")


def is_unspecified(address: str) -> bool:
    """Return True for an address that means all addresses of a host."""
    return address in ("0.0.0.0", "::")


def _everywhere(family: Any) -> str:
    return "::" if family == socket.AF_INET6 else "0.0.0.0"


def _cannot_listen(about: Description, host: str, port: int, error: OSError) -> RendezvousError:
    return RendezvousError(
        f"rank {about.rank} cannot listen at {host}:{port}, its own address: {error.strerror}. "
        "Another process may use the address: a second task, or an earlier one that still runs"
    )


def inherited(about: Description) -> socket.socket | None:
    """Return the inherited listening socket of rank 0, if the descriptor is still that socket."""
    if about.listener < 0:
        return None
    try:
        sock = socket.socket(fileno=about.listener)
    except OSError:
        return None
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if listens and sock.getsockname()[1] == about.port:
        return sock
    sock.detach()
    return None


class Sockets:
    """The sockets of one rank of a group; the rank and size in its description may change later.

    `key` is the key of the handshakes, from the group's secret or else from this user's key. Raises
    RendezvousError if there is no secret and this user's key cannot be used.
    """

    def __init__(self, about: Description) -> None:
        self.about = about
        self.key = key_of(about.secret or (b"" if about.insecure else secret.of_user()))
        self.servers: list[HandshakeServer] = []

    def serve(
        self, sock: socket.socket, enter: Enter, connections: int | None = None
    ) -> HandshakeServer:
        """Do the handshake with all who connect to a socket, by default one from each rank.

        ``enter`` gets their channels. The server owns the socket, and `close` ends the server.
        """
        most = self.about.size if connections is None else connections
        try:
            server = HandshakeServer(sock, self.key, most, enter, self.about.tls)
        except RuntimeError:  # no more threads
            sock.close()
            raise
        self.servers.append(server)
        return server

    def close(self) -> None:
        """Stop listening."""
        for server in self.servers:
            server.close()

    def allow(self, address: str) -> None:
        """Raise RendezvousError if an address is beyond loopback and the group needs a secret."""
        if not self.about.secret and not self.about.insecure and not is_loopback(address):
            raise RendezvousError(
                f"{address} is not a loopback address, and there is no secret. Set "
                "PYCOLLECTIVE_SECRET (or PYCOLLECTIVE_SECRET_FILE) to the same long random text on "
                "every rank. If you trust everybody on the network, PYCOLLECTIVE_INSECURE=1 is enough"
            )

    def resolve(self) -> tuple[Any, Any]:
        """Return the address family and the address of rank 0."""
        found = socket.getaddrinfo(self.about.host, self.about.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        self.allow(str(address[0]))
        return family, address

    def own_addresses(self, default: str) -> list[str]:
        """Return the addresses, one of each interface, at which this rank listens for its peers."""
        if not self.about.interface:
            return [default]
        try:
            family = socket.AF_INET6 if ":" in default else socket.AF_INET  # rank 0's family
            there = interfaces.interface_addresses(family)
            addresses = [address for _, address in interfaces.choose(self.about.interface, there)]
        except ValueError as error:
            raise RendezvousError(f"PYCOLLECTIVE_SOCKET_IFNAME: {error}") from None
        for address in addresses:
            self.allow(address)
        return addresses[:MAX_STREAMS]

    def listen(self, address: str) -> socket.socket:
        """Return a socket that listens at any port of an address."""
        return self._listen(socket.AF_INET6 if ":" in address else socket.AF_INET, (address, 0))

    def _listen(self, family: Any, address: Any) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(min(self.about.size + MAX_HANDSHAKES, 1024))
        except OSError:
            sock.close()
            raise
        return sock

    def listen_for_peers(self, address: str) -> socket.socket:
        """Return a socket that listens at this rank's address in the description.

        If there is none, it listens at any port of ``address``, from which this rank has reached
        rank 0.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if self.about.own is not None:
            return self._listen_at(family, *self.about.own)
        if self._is_for_this_host_only(self.about.host, address):
            address = _everywhere(family)
        return self._listen(family, (address, 0))

    def listen_at_own_address(self) -> socket.socket:
        """Return a socket that listens at rank 0's address; called at rank 0 only."""
        family, _ = self.resolve()
        return self._listen_at(family, *(self.about.own or (self.about.host, self.about.port)))

    def _is_for_this_host_only(self, host: str, address: str) -> bool:
        """Return True if other hosts find another address under the name ``host`` than this one does.

        Debian gives each host's own name a loopback address, such as 127.0.1.1. Without a secret, all
        ranks are on this host.
        """
        may_leave = self.about.secret or self.about.insecure
        return bool(may_leave) and is_loopback(address) and not _is_local(host)

    def _listen_at(self, family: Any, host: str, port: int) -> socket.socket:
        """Return a socket that listens at an address of the description.

        If the name means a loopback address or a proxy, it listens at all addresses of this host.
        """
        try:
            found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            address = found[0][4]
            if not self._is_for_this_host_only(host, str(address[0])):
                return self._listen(family, address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL and not isinstance(error, socket.gaierror):
                raise _cannot_listen(self.about, host, port, error) from None
        self.allow(_everywhere(family))
        try:
            return self._listen(family, (_everywhere(family), port))
        except OSError as error:
            raise _cannot_listen(self.about, host, port, error) from None

    def connected(
        self, family: Any, address: Any, deadline: float, source: str = ""
    ) -> socket.socket:
        """Return a connection to an address, from this host's address `source` unless it is empty."""
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if source:
                sock.bind((source, 0))
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():  # TCP can connect a port to itself
                raise ConnectionRefusedError("no process listens there")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return sock

    def reach(
        self, family: Any, address: Any, hello: dict[str, Any], deadline: float, source: str = ""
    ) -> Channel:
        """Return an authenticated connection to an address, as `connected` and `introduced` do."""
        return self.introduced(self.connected(family, address, deadline, source), hello, deadline)

    def introduced(self, sock: socket.socket, hello: dict[str, Any], deadline: float) -> Channel:
        """Do the handshake over a connection; return its channel, which owns the socket."""
        try:
            if self.about.tls is not None:
                return self.about.tls.introduce(sock, self.key, hello, deadline)
            return introduce(sock, self.key, hello, deadline)
        except BaseException:
            sock.close()
            raise
