"""Handshake of two processes, which proves that both know the secret, and their channel afterwards.

The handshake has four messages. Each side sends a nonce, and proves that it knows the key by an
HMAC-SHA256 of both first messages, which hold the nonces. The connecting side proves first. Each later
message carries an HMAC with a key of this connection, which covers the message, its direction and its
number. Nobody can therefore change a message, repeat it, or send it back. A Unix socket to a process of
the same user needs no HMAC, because the system gives it to these two processes alone. Messages are JSON
of bounded length; nothing is unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

VERSION = 2
UNAUTHENTICATED_LIMIT = 1024
"""Most bytes of a message before the sender has proved that it knows the key."""
AUTHENTICATED_LIMIT = 1 << 20
DEPTH_LIMIT = 8
"""Most levels of lists and objects in a message; this package sends four."""
_REPEATED_LIMIT = 1024
"""Most bytes of a message that is kept because it may come again."""
_MAC = hashlib.sha256().digest_size
_HEAD = struct.Struct("!QcQQQ")
_CREDENTIALS = struct.Struct("3i")


class HandshakeError(Exception):
    """The other side does not speak this protocol, or does not know the secret.

    Attributes
    ----------
    ranks : tuple of int
        The ranks on the other side, if they are known.
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class SecretsDifferError(HandshakeError):
    """The two sides have different secrets."""


class Refused(HandshakeError):
    """The other side refuses this connection, and gives the reason."""


class _SecretRefused(Refused, SecretsDifferError):
    """The other side says that the secrets differ."""


def key_of(secret: bytes) -> bytes:
    """Return the key of a secret."""
    return _mac(secret, b"pycollective rendezvous 1")


def digest(key: bytes, what: str, value: str) -> str:
    """Return the digest of a value; only processes that know the key can compute it."""
    return _mac(key, what.encode(), value.encode()).hex()


def _mac(key: bytes, *parts: bytes) -> bytes:
    joined = b"".join([piece for part in parts for piece in (_length(len(part)), part)])
    return hmac.digest(key, joined, "sha256")


_length = struct.Struct("!Q").pack


class Channel:
    """Messages over a socket, in order in each direction; deadlines are of time.monotonic."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._key = b""
        self._us, self._them = b"", b""
        self._sent = self._received = 0
        self._has_codes = False

    def seal(self, key: bytes, connected: bool) -> None:
        """Add an HMAC to every message from now on, unless the system protects the socket."""
        self._key = key
        self._has_codes = not _is_of_own_user(self.socket)
        self._us, self._them = (b"c", b"l") if connected else (b"l", b"c")

    def send(self, message: dict[str, Any], deadline: float) -> None:
        """Send one message."""
        data = self.encoded(message)
        self.socket.settimeout(max(0.001, deadline - time.monotonic()))
        self.socket.sendall(data)

    def encoded(self, message: dict[str, Any], repeated: bool = False) -> bytes:
        """Return the bytes of the next message to send; with ``repeated``, keep its JSON text."""
        data = _text_before(message) if repeated else _json_of(message).encode()
        if self._has_codes:
            data += self._code(self._us, self._sent, data)
        framed = struct.pack("!I", len(data)) + data
        self._sent += 1  # last, so that an interrupt leaves no gap
        return framed

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message; raise HandshakeError if it is invalid, OSError if none arrives."""
        length = self.length_of(self._exactly(4, deadline))
        return self.decoded(self._exactly(length, deadline))

    def length_of(self, header: bytes) -> int:
        """Return the length of a message after its header of four bytes."""
        limit = AUTHENTICATED_LIMIT if self._key else UNAUTHENTICATED_LIMIT
        (length,) = struct.unpack("!I", header)
        if length > limit:
            raise HandshakeError(
                f"the other side sent a message of {length} bytes; {limit} are allowed"
            )
        return int(length)

    def decoded(self, data: bytes, repeated: bool = False) -> dict[str, Any]:
        """Return the next received message.

        With ``repeated``, equal short messages are parsed once; the caller must not change their lists.
        The HMAC of each message is checked in any case.
        """
        if self._has_codes:
            data, code = data[:-_MAC], data[-_MAC:]
            want = self._code(self._them, self._received, data)
            if not hmac.compare_digest(code, want):
                raise HandshakeError(
                    "a message failed authentication: it was repeated, or changed on its way"
                )
        known = repeated and len(data) <= _REPEATED_LIMIT
        message = dict(_parsed_before(data)) if known else _parsed(data)
        self._received += 1  # last, so that an interrupt leaves no gap
        return message

    def _exactly(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no data arrived in time")
            self.socket.settimeout(left)
            part = self.socket.recv(min(count - len(data), 1 << 16))
            if not part:
                raise ConnectionResetError("the other side has closed the connection")
            data += part
        return bytes(data)

    def _code(self, side: bytes, number: int, data: bytes) -> bytes:
        """Return the HMAC of a message: that of `_mac`, without its loop."""
        head = _HEAD.pack(len(side), side, 8, number, len(data))
        return hmac.digest(self._key, head + data, "sha256")

    def readable(self, seconds: float = 0.0) -> bool:
        """Return True if a message or the end of the connection arrives within ``seconds``."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def ended(self) -> bool:
        """Return True if the other side has closed the connection and nothing is left to read."""
        try:
            self.socket.setblocking(False)
            return socket.socket.recv(self.socket, 1, socket.MSG_PEEK) == b""  # below TLS, if any
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def _parsed(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a message; its values can be compared, encoded and printed."""
    try:
        text = data.decode()
        message = _decoder.decode(text)
    except (ValueError, RecursionError):
        raise HandshakeError("the other side sent a message that is not JSON") from None
    if not isinstance(message, dict):
        raise HandshakeError("the other side sent a message that is not a JSON object")
    level: list[Any] = [message]
    for _ in range(DEPTH_LIMIT - 1):
        below: list[Any] = []
        for value in level:
            inside = value.values() if value.__class__ is dict else value
            below += [v for v in inside if v.__class__ is list or v.__class__ is dict]
        level = below
        if not level:
            break
    if any(level):
        raise HandshakeError(f"the other side sent a message of more than {DEPTH_LIMIT} levels")
    if "\\u" in text:
        _refuse_surrogates(json.dumps(message, ensure_ascii=False))
    return message


# Calls of one function have equal messages, whose parsing takes longer than their HMAC.
_parsed_before = functools.lru_cache(maxsize=64)(_parsed)


_texts: dict[str, bytes] = {}


def _text_before(message: dict[str, Any]) -> bytes:
    """Return a message as JSON; equal short messages are encoded once."""
    # Equal values of different types, such as 1 and True, have different texts.
    key = repr(message)
    text = _texts.get(key)
    if text is None:
        text = _json_of(message).encode()
        if len(key) <= _REPEATED_LIMIT:
            if len(_texts) >= 64:
                _texts.clear()
            _texts[key] = text
    return text


def _is_of_own_user(sock: socket.socket) -> bool:
    """Return True for a Unix socket whose other side is a process of this user."""
    if not hasattr(socket, "SO_PEERCRED") or sock.family != socket.AF_UNIX:
        return False
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.getuid())


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
_json_of = json.JSONEncoder(separators=(",", ":")).encode


def _refuse_surrogates(text: str) -> None:
    """Raise HandshakeError for a lone surrogate, which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise HandshakeError("the other side sent a message with a lone surrogate") from None


def introduce(sock: socket.socket, key: bytes, about: dict[str, Any], deadline: float) -> Channel:
    """Do the handshake on the connecting side; ``about`` describes the connection to the other side."""
    channel = Channel(sock)
    hello = {"pycollective": VERSION, "nonce": secrets.token_hex(16), **about}
    channel.send(hello, deadline)
    challenge = channel.receive(deadline)
    _raise_refusal(challenge)
    said = _transcript(hello, challenge)
    channel.send({"proof": _mac(key, b"connects", said).hex()}, deadline)
    answer = channel.receive(deadline)
    _raise_refusal(answer)
    _check(answer, _mac(key, b"listens", said))
    channel.seal(_mac(key, b"conversation", said), connected=True)
    return channel


def refuse(sock: socket.socket, why: str) -> None:
    """Refuse a connection on the listening side, with the reason in plain text."""
    sock.recv(1 << 16)  # closing a socket with unread data would reset the connection
    Channel(sock).send({"refused": why}, time.monotonic() + 1.0)


def answer(sock: socket.socket, key: bytes, deadline: float) -> tuple[Channel, dict[str, Any]]:
    """Do the handshake on the listening side; return the channel and the other side's first message."""
    channel = Channel(sock)
    hello = channel.receive(deadline)
    if hello.get("pycollective") != VERSION:
        raise HandshakeError(f"the other side does not use version {VERSION} of this handshake")
    challenge = {"nonce": secrets.token_hex(16)}
    channel.send(challenge, deadline)
    said = _transcript(hello, challenge)
    try:
        _check(channel.receive(deadline), _mac(key, b"connects", said))
    except HandshakeError:
        channel.send({"refused": "the secrets differ", "secret": False}, deadline)
        raise
    channel.send({"proof": _mac(key, b"listens", said).hex()}, deadline)
    channel.seal(_mac(key, b"conversation", said), connected=False)
    return channel, hello


def _transcript(hello: dict[str, Any], challenge: dict[str, Any]) -> bytes:
    return json.dumps([hello, challenge], sort_keys=True, separators=(",", ":")).encode()


def _raise_refusal(message: dict[str, Any]) -> None:
    if "refused" in message:
        why = "".join(c if c.isprintable() else "?" for c in str(message["refused"])[:200])
        raise (_SecretRefused if message.get("secret") is False else Refused)(why)


def _check(message: dict[str, Any], want: bytes) -> None:
    proof = message.get("proof")
    if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(), want.hex().encode()):
        raise SecretsDifferError("the secrets differ")
