"""TLS for the connections of a rendezvous, and for control connections, which report failures.

Three variables name PEM files: this rank's certificate, its key, and the certificate of the authority
that signed all ranks' certificates. Every connection of a rendezvous then begins with TLS 1.3, in which
both sides present a certificate of that authority. Names in certificates are ignored, so the authority
must be the cluster's own. The handshake about the secret follows within TLS. Connections for arrays then
continue in plain text.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

from pycollective.environment import enumerated
from pycollective.launch import secret
from pycollective.launch.handshake import Channel, HandshakeError, Refused, introduce

CERTIFICATE = "PYCOLLECTIVE_TLS_CERT"
KEY = "PYCOLLECTIVE_TLS_KEY"
AUTHORITY = "PYCOLLECTIVE_TLS_CA"
_CLOSE_SECONDS = 1.0
_NAMES = (CERTIFICATE, KEY, AUTHORITY)


class Tls:
    """The certificate and the key of a rank, and the authority of all ranks: names of PEM files.

    Raises ValueError if a file cannot be read or used.
    """

    def __init__(self, certificate: str, key: str, authority: str) -> None:
        self._connects, self._listens = [
            _context(protocol, certificate, key, authority)
            for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        ]

    def introduce(
        self, sock: socket.socket, key: bytes, about: dict[str, Any], deadline: float
    ) -> Channel:
        """Do `handshake.introduce` in TLS; the channel owns the socket."""
        secure = self._connects.wrap_socket(sock, do_handshake_on_connect=False)
        try:
            _prove(secure, deadline)
            try:
                channel = introduce(secure, key, about, deadline)
            except ssl.SSLError as error:  # the other side's refusal arrives here
                raise _explained(error) from None
            if about.get("stream"):
                self.end(secure, deadline)
        except BaseException:
            secure.close()
            raise
        return channel

    def accept(
        self, sock: socket.socket, deadline: float, replace: Callable[[ssl.SSLSocket], None]
    ) -> ssl.SSLSocket:
        """Return a TLS socket, which owns ``sock``, on the listening side.

        ``replace`` is called with the TLS socket before the TLS handshake.
        """
        secure = self._listens.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        try:
            replace(secure)
            _prove(secure, deadline)
        except HandshakeError:
            _read_until_closed(secure)
            secure.close()
            raise
        except BaseException:
            secure.close()
            raise
        return secure

    def end(self, sock: socket.socket, deadline: float) -> None:
        """End TLS on a connection, which continues in plain text; both sides call this."""
        assert isinstance(sock, ssl.SSLSocket)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            sock.unwrap()
        except ssl.SSLError as error:
            raise _explained(error) from None


def _prove(sock: ssl.SSLSocket, deadline: float) -> None:
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        sock.do_handshake()
    except ssl.SSLError as error:
        raise _explained(error) from None


def _read_until_closed(sock: socket.socket) -> None:
    """Read until the other side closes: unread data would reset the connection and lose the alert."""
    until = time.monotonic() + _CLOSE_SECONDS
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        while (left := until - time.monotonic()) > 0:
            sock.settimeout(left)
            if not socket.socket.recv(sock, 4096):  # below TLS
                return


def _explained(error: ssl.SSLError) -> HandshakeError:
    """Return an error whose text says what to do."""
    reason = (error.reason or "").lower().replace("_", " ")
    why = None
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        text = f"this rank refuses the other side's certificate ({why})"
    elif "alert" in reason:
        why = reason
        text = f"the other side refuses this rank's certificate ({why})"
    if why is not None:
        if "expired" in why or "not yet valid" in why:
            return Refused(f"{text}: make a new one, and compare the clocks of the hosts")
        return Refused(
            f"{text}: all ranks need certificates of one authority, and the authority's certificate as "
            f"{AUTHORITY}"
        )
    if reason == "wrong version number":
        return Refused(
            f"the other side does not use TLS: set {', '.join(_NAMES)} on all ranks, or on none"
        )
    return HandshakeError(f"TLS: {error}")


def of_environment(environment: Mapping[str, str]) -> Tls | None:
    """Return the TLS settings of the environment, or None if it has none."""
    missing = [name for name in _NAMES if not environment.get(name)]
    if len(missing) == len(_NAMES):
        return None
    if missing:
        there = enumerated(name for name in _NAMES if name not in missing)
        raise ValueError(f"{there} set, and {enumerated(missing)} not: TLS needs all three")
    key = environment[KEY]
    with contextlib.suppress(OSError):  # `Tls` reports a missing file
        try:
            secret.check_private(key, os.stat(key))
        except ValueError as error:
            raise ValueError(f"{KEY}={error}") from None
    return Tls(*(environment[name] for name in _NAMES))


def _context(protocol: int, certificate: str, key: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no session is resumed

    def refuse() -> str:  # without this function OpenSSL asks the user for a passphrase
        raise ValueError(
            f"{KEY}={key!r} is encrypted: give a key without a passphrase, made by 'openssl pkey'"
        )

    name, value = CERTIFICATE, certificate
    try:
        context.load_cert_chain(certificate, key, password=refuse)
        name, value = AUTHORITY, authority
        context.load_verify_locations(authority)
    except OSError as error:  # also SSLError
        which = f"{name}={value!r}" + (f" with {KEY}={key!r}" if name == CERTIFICATE else "")
        raise ValueError(f"{which} cannot be used: {error}") from None
    return context
