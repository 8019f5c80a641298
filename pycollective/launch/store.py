"""A key-value store at rank 0, through which the ranks agree on the members of their group.

Keys are texts, values are JSON. Rank 0 owns the `Store`; every other rank has an authenticated
connection to it, a `Client`. Both have the same operations: `set`, `get`, `compare_set`, and `wait`,
which waits for changes.

* A key of a rank ends in the rank's number, and only the connection that set the key may change it.
* The keys of a rank vanish when its connection ends. The loss of a rank is therefore a change of keys.
* Only rank 0 sets keys that begin with ``all/``, and sends their values to every rank.

Rank 0's main thread carries out all requests one after the other, in `Store.wait`. All changes that
rank 0 makes between two calls of `wait` are therefore one step for the other ranks.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import Any

from pycollective.errors import RendezvousError
from pycollective.launch.handshake import Channel, HandshakeError

SECONDS = 10.0
"""Seconds that a message to or from a connected rank may take."""
TO_ALL = "all/"
_MOST_KEYS = 8
"""Most keys of one connection."""
_LONGEST_KEY = 64

Change = tuple[str, Any]
"""A key and its new value; None if the key has vanished."""


class _Values:
    """Values by key: the common part of `Store` and `Client`."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        """Return the value of a key; None if there is none or this rank does not know it."""
        return self._values.get(key)

    def wait(self, seconds: float) -> list[Change]:
        """Wait up to ``seconds`` for changes; return them in their order."""
        raise NotImplementedError

    def _keep(self, key: str, value: Any) -> Change:
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value
        return key, value


class Store(_Values):
    """Rank 0's store."""

    def __init__(self) -> None:
        super().__init__()
        self._sessions: dict[int, _Session] = {}  # by descriptor, in the order of arrival
        self._owners: dict[str, _Session] = {}
        self._own: list[Change] = []  # changes by rank 0 since the last `wait`
        self._new: list[_Session] = []  # from other threads; the lock protects this list
        self._lock = threading.Lock()
        self._closed = False
        self._wake, self._waker = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)

    def admit(self, channel: Channel, name: str) -> None:
        """Serve a connection from the next `wait` on; ``name`` is the rank's number.

        Any thread may call this. From now on the store owns the connection.
        """
        with self._lock:
            if self._closed:
                raise HandshakeError("the store is closed")
            self._new.append(_Session(channel, name))
            self._waker.send(b"+")

    def set(self, key: str, value: Any) -> None:
        """Set a key, or remove it (None); send it to all ranks if it begins with ``all/``."""
        self._own.append(self._keep(key, value))
        if key.startswith(TO_ALL):
            for session in self._sessions.values():
                session.send({"key": key, "value": value})

    def compare_set(self, key: str, expected: Any, value: Any) -> bool:
        """Set a key if it has the expected value; return True if so."""
        if self.get(key) != expected:
            return False
        self.set(key, value)
        return True

    def wait(self, seconds: float) -> list[Change]:
        """Carry out requests; wait up to ``seconds`` for the first one."""
        changes, self._own = self._own, []
        ready = {descriptor for descriptor, _ in self._poll.poll(0 if changes else 1000 * seconds)}
        for descriptor, session in list(self._sessions.items()):
            if descriptor in ready:
                self._serve(session, changes)
        if self._wake.fileno() in ready:
            self._serve_new()
        return changes

    def _serve_new(self) -> None:
        """Begin to serve new connections: send them the values for all ranks."""
        with self._lock:
            self._wake.recv(4096)
            new, self._new = self._new, []
        known = {key: value for key, value in self._values.items() if key.startswith(TO_ALL)}
        for session in new:
            self._sessions[session.descriptor] = session
            self._poll.register(session.descriptor, select.POLLIN)
            session.send({"values": known})

    def _serve(self, session: _Session, changes: list[Change]) -> None:
        try:
            while session.channel.readable():
                request = session.channel.receive(time.monotonic() + SECONDS)
                changes += self._execute(session, request)
        except (OSError, HandshakeError):
            changes += self._end(session)

    def _execute(self, session: _Session, request: dict[str, Any]) -> list[Change]:
        key, value = request.get("set"), request.get("value")
        if not isinstance(key, str) or len(key) > _LONGEST_KEY:
            raise HandshakeError("the other side sent a malformed request")
        kind, _, name = key.partition("/")
        if name != session.name or f"{kind}/" == TO_ALL:
            raise HandshakeError("the other side set a key of another rank")
        if key not in session.keys and len(session.keys) == _MOST_KEYS:
            raise HandshakeError(f"the other side set more than {_MOST_KEYS} keys")
        may = self._owners.get(key, session) is session
        may = may and ("expected" not in request or request["expected"] == self.get(key))
        changes: list[Change] = []
        if may:
            self._owners[key] = session
            session.keys.add(key)
            changes.append(self._keep(key, value))
        if "expected" in request:
            session.send({"done": may})
        return changes

    def end(self, name: str, why: str = "") -> list[Change]:
        """End the connection that owns a rank's keys, with a reason; return the keys that vanish."""
        changes: list[Change] = []
        for session in {s for s in self._owners.values() if s.name == name}:
            if why:
                session.send({"error": why})
            changes += self._end(session)
        return changes

    def _end(self, session: _Session) -> list[Change]:
        del self._sessions[session.descriptor]
        self._poll.unregister(session.descriptor)
        session.channel.close()
        for key in session.keys:
            del self._owners[key]
        return [self._keep(key, None) for key in session.keys]

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._closed = True
        for session in [*self._new, *self._sessions.values()]:
            session.channel.close()
        self._sessions.clear()
        self._wake.close()
        self._waker.close()


class _Session:
    """The store's side of a rank's connection."""

    def __init__(self, channel: Channel, name: str) -> None:
        self.channel, self.name = channel, name
        self.descriptor = channel.socket.fileno()
        self.keys: set[str] = set()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; ignore errors, because `Store.wait` detects a lost rank."""
        with contextlib.suppress(OSError):
            self.channel.send(message, time.monotonic() + SECONDS)


class Client(_Values):
    """The connection of another rank to the store; `get` knows only the keys for all ranks.

    Every call raises OSError when the connection ends, and RendezvousError if rank 0 gives a reason.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.socket = channel.socket
        self._channel = channel
        self._unseen: list[Change] = []
        values = self._receive().get("values")
        if not isinstance(values, dict):
            raise HandshakeError("rank 0 sent no values")
        self._values.update(values)

    def set(self, key: str, value: Any) -> None:
        """Set a key of this rank; nothing happens if another connection owns it."""
        self._channel.send({"set": key, "value": value}, time.monotonic() + SECONDS)

    def compare_set(self, key: str, expected: Any, value: Any) -> bool:
        """Set a key of this rank if it has the expected value; return True if so."""
        request = {"set": key, "value": value, "expected": expected}
        self._channel.send(request, time.monotonic() + SECONDS)
        while "done" not in (message := self._receive()):
            self._unseen.append(self._changed(message))
        return message["done"] is True

    def wait(self, seconds: float) -> list[Change]:
        """Wait up to ``seconds`` for changes of the keys for all ranks; return them."""
        changes, self._unseen = self._unseen, []
        while self._channel.readable(0.0 if changes else seconds):
            try:
                message = self._receive()
            except OSError:
                if changes:  # the next call raises the error again
                    break
                raise
            changes.append(self._changed(message))
        return changes

    def _changed(self, message: dict[str, Any]) -> Change:
        return self._keep(str(message.get("key")), message.get("value"))

    def _receive(self) -> dict[str, Any]:
        message = self._channel.receive(time.monotonic() + SECONDS)
        if "error" in message:
            raise RendezvousError(str(message["error"]))
        return message

    def close(self) -> None:
        """End the connection, which removes this rank's keys."""
        self._channel.close()
