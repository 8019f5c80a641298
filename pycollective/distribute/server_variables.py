"""Variables on parameter servers in other processes: the server's store, and the other tasks' copies.

Each task has a copy of the value, with the version that the server gave to it. `Servers.pull` asks for
what has changed since; `Servers.push` sends the difference between a copy and the value that was pulled.
Of a large variable, only the rows that have changed are sent.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pycollective.distribute.task_links import Link, LinkLostError, error_of
from pycollective.errors import UnavailableError
from pycollective.launch.handshake import HandshakeError
from pycollective.tensor import Tensor, Variable
from pycollective.tensor.variable import _value

__all__ = ["ServerVariable", "Servers", "Store"]

_ROWS_FROM = 1 << 14
"""The bytes of a variable from which on its rows have versions."""
_ADDS = "iufcV"
"""The kinds of dtypes whose differences are sent; other values are sent whole."""


# The server -----------------------------------------------------------------------------------------


class _Stored:
    """A variable's value on its server, with a version, and the versions of its rows."""

    def __init__(self, array: Any) -> None:
        self.lock = threading.Lock()
        self.array = array
        self.version = 1
        by_rows = array.ndim > 1 and array.nbytes >= _ROWS_FROM
        self.rows = np.ones(len(array), np.int64) if by_rows else None

    def since(self, version: int) -> tuple[int, str, list[Any]]:
        """Return the version, and the value or the rows that have changed since another version."""
        with self.lock:
            if version == self.version:
                return version, "same", []
            if self.rows is None:
                return self.version, "whole", [self.array]  # no update changes this array
            changed = np.flatnonzero(self.rows > version)
            if 2 * len(changed) > len(self.array):
                return self.version, "whole", [self.array.copy()]
            return self.version, "rows", [changed, self.array[changed]]

    def update(self, how: str, values: list[Any]) -> tuple[int, int]:
        """Set the value, or add to it; return the versions before and after."""
        with self.lock:
            changed: Any = slice(None)
            if how == "rows":
                changed, rows = values
                self._check(rows, (len(changed), *self.array.shape[1:]))
                valid = self.rows is not None and changed.dtype.kind == "i" and changed.ndim == 1
                if not valid or np.any(np.diff(changed) <= 0):
                    raise HandshakeError("indices that do not ascend")
                if len(changed) and not 0 <= changed[0] <= changed[-1] < len(self.array):
                    raise HandshakeError("indices beyond the variable")
                self.array[changed] += rows
            else:
                (value,) = values
                self._check(value, self.array.shape)
                self.array = value if how == "set" else np.add(self.array, value, out=value)
            self.version += 1
            if self.rows is not None:
                self.rows[changed] = self.version
            return self.version - 1, self.version

    def _check(self, value: Any, shape: tuple[int, ...]) -> None:
        if value.shape != shape or value.dtype != self.array.dtype:
            raise HandshakeError("an update of another shape or dtype")


class Store:
    """The variables of one server, by number; every connection's thread calls `answer`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._all: list[_Stored] = []

    def answer(
        self, message: dict[str, Any], arrays: list[Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Carry out a request of another task, and return the reply with its arrays."""
        request = message.get("request")
        if request == "create":
            return self._create(str(message["key"]), arrays[0])
        if request == "pull":
            found = [self._all[number].since(have) for number, have in message["have"]]
            return (
                {"found": [[version, how] for version, how, _ in found]},
                [array for _, _, arrays in found for array in arrays],
            )
        if request == "push":
            rest, versions = iter(arrays), []
            for number, how in message["items"]:
                values = [next(rest) for _ in range(1 + (how == "rows"))]
                versions.append(self._all[number].update(how, values))
            return {"versions": versions}, []
        raise HandshakeError("no request")

    def _create(self, key: str, array: Any) -> tuple[dict[str, Any], list[Any]]:
        """Store a variable, or return the value of the one that another task has created."""
        with self._lock:
            number = self._numbers.get(key)
            if number is None:
                self._numbers[key] = number = len(self._all)
                self._all.append(_Stored(array))
        stored = self._all[number]
        if stored.array.shape != array.shape or stored.array.dtype != array.dtype:
            raise ValueError(
                f"variable {key!r} has shape {array.shape} and dtype {array.dtype}, and another task "
                f"has created it with {stored.array.shape} and {stored.array.dtype}: a worker has "
                "another program version. All tasks must run the same program, which creates the same "
                "variables in the same order"
            )
        version, _, (value, *_rest) = stored.since(0)
        return {"number": number, "version": version}, [value]


# The other tasks ------------------------------------------------------------------------------------


class ServerVariable(Variable):
    """A task's copy of a variable on a parameter server."""

    #: The servers, once the variable is on one of them.
    _servers: Servers | None = None
    _server = _number = _version = 0
    _own: Tensor | None = None
    #: The value that was pulled. This reference makes every update copy the value first.
    _pulled: Any = None
    #: True after `assign`: the value is sent, and not a difference.
    _assigned = False

    @property
    def _tensor(self) -> Tensor | None:
        if self._servers is not None and self._servers.at_once and self._own is not None:
            self._servers.pull([self])
        return self._own

    @_tensor.setter
    def _tensor(self, value: Tensor | None) -> None:
        self._own = value
        if self._servers is not None and self._servers.at_once and value is not None:
            self._servers.push([self])

    def assign(self, value: Any, read_value: bool = True) -> Variable:
        """Set the value; see `Variable.assign`."""
        self._assigned = True
        return super().assign(value)

    def take(self, array: Any, version: int) -> None:
        """Keep a value of the server."""
        self._pulled, self._version, self._assigned = array, version, False
        self._own = _value(array)

    def forget(self) -> None:
        """Return to the value that was pulled."""
        if self._assigned or self._own is None or self._own.array is not self._pulled:
            self.take(self._pulled, self._version)

    def difference(self) -> tuple[str, list[Any]] | None:
        """Return the change since the last pull, as `_Stored.update` takes it; None for none."""
        assert self._own is not None
        own, old = self._own.array, self._pulled
        if self._assigned:
            return "set", [own]
        if own is old:
            return None
        if own.dtype.kind not in _ADDS:
            return "set", [own]
        if own.ndim > 1 and own.nbytes >= _ROWS_FROM:
            changed = np.flatnonzero((own != old).reshape(len(own), -1).any(axis=1))
            if 2 * len(changed) <= len(own):
                return "rows", [changed, own[changed] - old[changed]]
        return "add", [own - old]


_Request = tuple[int, dict[str, Any], list[Any]]
"""A server, a message to it, and its arrays."""


class Servers:
    """This task's connections to the parameter servers, and its copies of their variables.

    Attributes
    ----------
    at_once : bool
        True: every read asks the server, and every write is sent. This is so on the chief. A worker
        pulls before a scheduled function and pushes after it.
    """

    def __init__(self, links: Sequence[Link], at_once: bool) -> None:
        self.links = list(links)
        self.at_once = at_once
        self._variables: list[weakref.WeakValueDictionary[int, ServerVariable]] = [
            weakref.WeakValueDictionary() for _ in links
        ]
        self._keys: dict[str, int] = {}

    def key_of(self, name: str) -> str:
        """Return the key of the next variable of a name, the same in every task."""
        count = self._keys[name] = self._keys.get(name, -1) + 1
        return f"{name}#{count}"

    def server_of(self, name: str) -> int:
        """Return the server of the next variable of a name that is created after the start.

        Workers may create such variables in different orders, so the order does not count.
        """
        number = self._keys.get(name, -1) + 1
        return zlib.crc32(f"{name}#{number}".encode()) % len(self.links)

    def create(self, variable: Variable, server: int) -> ServerVariable:
        """Return the copy of a variable that is put on a server, unless another task has done so."""
        own = ServerVariable(
            variable.current(),
            variable.trainable,
            variable.name,
            synchronization=variable.synchronization,
            aggregation=variable.aggregation,
        )
        key = self.key_of(variable.name)
        request = {"request": "create", "key": key}
        ((reply, (value,)),) = self._call([(server, request, [own.numpy()])])
        own._server, own._number = server, reply["number"]
        own.take(value, reply["version"])
        own._servers = self
        self._variables[server][own._number] = own
        return own

    def pull_all(self) -> None:
        """Bring the copies of all variables up to date: one message to each server."""
        self.pull([v for of_server in self._variables for v in list(of_server.values())])

    def push_all(self) -> None:
        """Send what has changed in any copy: one message to each server."""
        self.push([v for of_server in self._variables for v in list(of_server.values())])

    def forget_all(self) -> None:
        """Return to the values that were pulled."""
        for of_server in self._variables:
            for variable in list(of_server.values()):
                variable.forget()

    def pull(self, variables: Iterable[ServerVariable]) -> None:
        """Bring some copies up to date."""
        groups = self._by_server(variables)
        requests: list[_Request] = [
            (server, {"request": "pull", "have": [[v._number, v._version] for v in wanted]}, [])
            for server, wanted in groups
        ]
        for (_, wanted), (reply, arrays) in zip(groups, self._call(requests), strict=True):
            rest = iter(arrays)
            for variable, (version, how) in zip(wanted, reply["found"], strict=True):
                if how == "same":
                    continue
                value = next(rest)
                if how == "rows":
                    rows, value = value, variable._pulled.copy()
                    value[rows] = next(rest)
                with variable._lock:
                    if variable._own is not None:  # None: this thread updates it
                        variable.take(value, version)

    def push(self, variables: Iterable[ServerVariable]) -> None:
        """Send what has changed in some copies."""
        changes = []
        requests: list[_Request] = []
        for server, wanted in self._by_server(variables):
            found = [(v, change) for v in wanted if (change := v.difference()) is not None]
            if found:
                items = [[v._number, how] for v, (how, _) in found]
                arrays = [array for _, (_, values) in found for array in values]
                requests.append((server, {"request": "push", "items": items}, arrays))
                changes.append(found)
        for found, (reply, _) in zip(changes, self._call(requests), strict=True):
            for (variable, (how, values)), (before, after) in zip(
                found, reply["versions"], strict=True
            ):
                if how != "rows" and before == variable._version:
                    # The server has computed the same sum, so this value need not be pulled.
                    value = values[0] if how == "set" else np.asarray(variable._pulled + values[0])
                    variable.take(value, after)
                else:
                    variable.take(variable._pulled, variable._version)

    def _by_server(
        self, variables: Iterable[ServerVariable]
    ) -> list[tuple[int, list[ServerVariable]]]:
        groups: dict[int, list[ServerVariable]] = {}
        for variable in variables:
            groups.setdefault(variable._server, []).append(variable)
        return sorted(groups.items(), key=lambda group: group[0])

    def _call(self, requests: Sequence[_Request]) -> list[tuple[dict[str, Any], list[Any]]]:
        """Send requests to different servers in ascending order; return the replies of all.

        The servers carry out the requests at the same time.
        """
        replies = []
        lost: UnavailableError | None = None
        with contextlib.ExitStack() as held:
            for server, message, arrays in requests:
                held.enter_context(self.links[server].lock)
                try:
                    self.links[server].send(message, arrays)
                except LinkLostError as error:
                    lost = server_lost(self.links[server], error)
            for server, _, _ in requests:  # every reply is read, for the next call's sake
                try:
                    replies.append(self.links[server].receive())
                except LinkLostError as error:
                    lost = server_lost(self.links[server], error)
        if lost is not None:
            raise lost
        for (server, _, _), (reply, _) in zip(requests, replies, strict=True):
            if "error" in reply:
                raise error_of(reply, self.links[server].task)
        return replies

    def check(self) -> None:
        """Raise UnavailableError if a server is lost."""
        for link in self.links:
            if link.ended():
                raise server_lost(link, "it has closed its connection")


def server_lost(link: Link, why: object) -> UnavailableError:
    """Return the error for a lost parameter server."""
    return UnavailableError(
        f"{link.task} is lost, and its variables with it ({why}); start the program again on all "
        "tasks, and restore a checkpoint"
    )
