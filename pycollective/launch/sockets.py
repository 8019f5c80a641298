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


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def is_unspecified(address: str) -> bool:
    """Return True for an address that means all addresses of a host."""
    return address in ("0.0.0.0", "::")


def _cannot_listen(about: Description, error: OSError) -> RendezvousError:
    host, port = about.own or (about.host, about.port)
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
        if not self.about.secret and not self.about.insecure and not _is_loopback(address):
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
        """Return a socket that listens at this rank's address in the description, else at ``address``.

        The description may have a name that resolves to a loopback address, or to that of a proxy.
        Then the rank listens at all addresses of this host. A literal loopback address means that all
        ranks are on this host.
        """
        if self.about.own is None:
            return self.listen(address)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        host, port = self.about.own
        try:
            found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            own = str(found[0][4][0])
            if own in (address, host) or not _is_loopback(own):
                return self._listen(family, (own, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL and not isinstance(error, socket.gaierror):
                raise _cannot_listen(self.about, error) from None
        everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
        self.allow(everywhere)
        try:
            return self._listen(family, (everywhere, port))
        except OSError as error:
            raise _cannot_listen(self.about, error) from None

    def listen_at_own_address(self) -> socket.socket:
        """Return a socket that listens at rank 0's address; called at rank 0 only."""
        family, address = self.resolve()
        if self.about.own is None:
            return self._listen(family, address)
        return self.listen_for_peers(str(address[0]))

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
