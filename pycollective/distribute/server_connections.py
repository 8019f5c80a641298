"""A task's connections to the parameter servers of a cluster, over which it reads and changes variables.

`Servers.pull` asks for the changes of variables since the versions that the task has. `Servers.push`
sends the task's changes, which are methods with their operands. The server applies them to its own
value, so that no change of another task is lost. Lookups in a large variable pull single rows.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pycollective.array_backend import Array
from pycollective.distribute.server_variables import Change, ServerVariable, of_one_element
from pycollective.distribute.shared_values import Block, SharedFile, apply_change
from pycollective.distribute.task_links import (
    Link,
    LinkLostError,
    ServerLostError,
    spec_of,
)
from pycollective.distribute.task_values import error_of
from pycollective.errors import UnavailableError
from pycollective.tensor import Variable

_MOST_KEYS = 1000
"""The largest number of keys of dropped variables in a message."""

#: The number of arrays in each answer to a pull.
_ARRAYS = {"same": 0, "whole": 1, "rows": 2}
_Request = tuple[int, dict[str, Any], list[Any]]
"""A server, a message to it, and its arrays."""


class Servers:
    """Connections of a task to the parameter servers, and the task's copies of their variables.

    Attributes
    ----------
    uncached : bool
        True on the chief: every read asks the server, and every write is sent. A worker pulls the
        variables that a scheduled function reads, and pushes the changes after the function.
    private : bool
        True: no variable on a server changes. `forget_all` drops this task's changes.
    period : int
        The number of functions that this task has run. A copy is not pulled twice in one period.
    touched : dict
        The variables that this task has changed in this period, by id.
    restarts : list of int
        For each server, the number of times that it was started again and found.
    """

    def __init__(
        self, connect: Callable[[int, float | None], Link], count: int, uncached: bool
    ) -> None:
        self._connect = connect
        self.links = [connect(server, None) for server in range(count)]
        self.restarts = [0] * count
        #: Waits until lost servers run again, so that a read does not fail; or None.
        self.recover: Callable[[], None] | None = None
        self.uncached = uncached
        self.private = not uncached
        self.period = 0
        self.touched: dict[int, ServerVariable] = {}
        self._variables: list[weakref.WeakValueDictionary[int, ServerVariable]] = [
            weakref.WeakValueDictionary() for _ in self.links
        ]
        #: For each server, the keys of the variables that the chief's program has dropped, and how many
        #: of them the server knows. The garbage collector adds keys, so it must not send them.
        self._dropped: list[list[str]] = [[] for _ in self.links]
        self._told = [0] * count
        self._files: dict[tuple[Any, ...], SharedFile | None] = {}
        self._keys: dict[str, int] = {}
        #: For each function, the variables that it has pulled one by one, to be pulled at once.
        self._read: dict[Any, weakref.WeakValueDictionary[int, ServerVariable]] = {}
        self._function: Any = None
        #: Only one thread at a time can use an object of `select.poll`.
        self._polling = threading.Lock()
        self._watch()

    def _watch(self) -> None:
        """Prepare one system call that reports ended connections."""
        self._poll: select.poll | None = select.poll()
        for link in self.links:
            if link.descriptor < 0:
                self._poll = None
                return
            self._poll.register(link.descriptor, select.POLLIN)

    def key_of(self, name: str) -> str:
        """Return the key of the next variable of a name, the same in every task."""
        count = self._keys[name] = self._keys.get(name, -1) + 1
        return f"{name}#{count}"

    def server_of(self, name: str) -> int:
        """Return the server of the next variable of a name that is created after the start.

        Workers may create such variables in different orders, so the order does not matter.
        """
        number = self._keys.get(name, -1) + 1
        return zlib.crc32(f"{name}#{number}".encode()) % len(self.links)

    def create(self, variable: Variable, server: int, beside: Variable | None = None) -> Variable:
        """Return the view of a variable, and put it on a server unless another task did.

        With ``beside``, the variable is a slot of another one. A variable that the chief has already
        dropped stays in this process.
        """
        self.wait_for_lost()
        view = ServerVariable.__new__(ServerVariable)
        view.set_attributes(
            variable.trainable, variable.name, variable.synchronization, variable.aggregation
        )
        value = variable.current().array
        view._like = of_one_element(value)
        view._server, view._key_on_server = server, self.key_of(variable.name)
        if isinstance(beside, ServerVariable):
            view._slot_of = beside._key_on_server
        if not self._attach(view, value):
            return variable
        view._servers = self
        if self.uncached:
            key = view._key_on_server
            weakref.finalize(view, self._dropped[server].append, key).atexit = False
        return view

    def _attach(self, variable: ServerVariable, value: Any) -> bool:
        """Find a variable on its server, or create it there with a value.

        Return False if the chief has dropped the variable.
        """
        request: dict[str, Any] = {"request": "create", "key": variable._key_on_server}
        request |= {"spec": spec_of(variable.like().array), "slot_of": variable._slot_of}
        if self.uncached:
            request["keeps"] = True
        elif self.private:
            request["prepares"] = True
        ((reply, _),) = self._call([(variable._server, request, [])])
        if reply.get("begun") is False:
            link = self.links[variable._server]
            link.close()
            raise server_lost(link, "it was started again, and the chief has not connected to it")
        if reply.get("dropped"):
            return False
        if reply.get("wanted"):
            if value is None:
                raise UnavailableError(
                    f"variable {variable.name!r} is in no snapshot of "
                    f"{self.links[variable._server].task}"
                )
            ((reply, _),) = self._call([(variable._server, request, [value])])
        number = variable._number = reply["number"]
        variable._block = None
        if "file" in reply:
            name = tuple(reply["file"])
            if name not in self._files:
                self._files[name] = SharedFile.of(reply["file"])
            file = self._files[name]
            if file is not None:
                array = variable.like().array
                variable._block = Block(array.shape, array.dtype, number, file, reply["offset"])
        self._variables[variable._server][number] = variable
        return True

    def tell_dropped(self) -> None:
        """Tell the servers about dropped variables, unless a server is lost."""
        told = zip(self._dropped, self._told, strict=True)
        waiting = [server for server, (keys, count) in enumerate(told) if len(keys) > count]
        if waiting and not self.lost():
            with contextlib.suppress(ServerLostError):
                self._call([(server, {"request": "note"}, []) for server in waiting])

    # Servers that were started again -----------------------------------------------------------

    def follow(self, restarts: list[int]) -> None:
        """Connect to the servers that the chief has found again."""
        for server, (known, number) in enumerate(zip(self.restarts, restarts, strict=True)):
            if known != number:
                self.reattach(server, self._connect(server, None))
                self.restarts[server] = number

    def reattach(self, server: int, link: Link) -> None:
        """Use a server that was started again, and find this task's variables in its snapshot."""
        self.links[server].close()
        self.links[server] = link
        self._told[server] = 0  # its snapshot may still have dropped variables
        self._watch()
        variables = list(self._variables[server].values())
        for variable in variables:
            # Even after an error, no task may use the memory of the lost server.
            variable._block = None
            variable.lose()
            self.touched.pop(id(variable), None)
        for variable in variables:
            if not self._attach(variable, None):
                self._variables[server].pop(variable._number, None)
                variable.drop()

    def wait_for_lost(self) -> None:
        """Wait for lost servers that may be started again; only the chief waits."""
        if self.recover is not None and self.lost():
            self.recover()

    def lost(self) -> list[int]:
        """Return the servers whose connections have ended."""
        with self._polling:
            # The descriptor of a connection that this process has closed may be another file's.
            closed = any(link.descriptor < 0 for link in self.links)
            if not closed and self._poll is not None and not self._poll.poll(0):
                return []
        return [number for number, link in enumerate(self.links) if link.ended()]

    # A worker's functions --------------------------------------------------------------------

    def start(self) -> None:
        """Tell the servers that the worker has run its program, and now runs scheduled functions."""
        self.forget_all()
        self.private = False
        self._call(
            [(n, {"request": "note", "prepares": False}, []) for n in range(len(self.links))]
        )

    def begin(self, function: Any) -> None:
        """Pull the variables that a function has read before; before its first call all small ones."""
        self._function = function
        known = self._read.get(function)
        if known is None:
            known = self._read[function] = weakref.WeakValueDictionary(
                {
                    id(v): v
                    for of_server in self._variables
                    for v in list(of_server.values())
                    if not v._by_rows and v._block is None
                }
            )
        if known and (wanted := [v for v in list(known.values()) if v._block is None]):
            self.pull(wanted)

    def end(self) -> None:
        """Send the changes of a function."""
        self._function = None
        if self.touched:
            self.push_all()
        self.period += 1

    def touch(self, variable: ServerVariable) -> None:
        """Record that this task has changed a variable, whose lock it holds; the chief sends it now."""
        if not self.private and (self.uncached or variable.has_many_changes):
            self.touched.pop(id(variable), None)
            self.push([variable])
        else:
            self.touched[id(variable)] = variable

    def push_all(self) -> None:
        """Send the changes of all copies: one message to each server."""
        touched, self.touched = self.touched, {}
        self.push(touched.values())

    def forget_all(self) -> None:
        """Return to the values that were pulled."""
        touched, self.touched = self.touched, {}
        for variable in touched.values():
            variable.forget()
        for of_server in self._variables:
            for variable in list(of_server.values()):
                variable._part = None
                if variable._block is not None:
                    variable.lose()
        self.period += 1

    # Messages --------------------------------------------------------------------------------

    def rows(self, wanted: Sequence[tuple[ServerVariable, Array]]) -> list[Any]:
        """Return rows of variables on one server at some indices."""
        found = []
        for variable, index in wanted:
            if variable._block is not None:
                with variable._block.locked(False) as value:
                    found.append(value[index])
                continue
            request = {"request": "rows", "items": [variable._number]}
            ((_, (rows,)),) = self._call([(variable._server, request, [index])])
            found.append(rows)
        return found

    def pull(self, variables: Iterable[ServerVariable]) -> None:
        """Bring some copies up to date."""
        remote, variables = [], list(variables)
        for variable in variables:
            if variable._block is None:
                remote.append(variable)
                if self._function is not None:
                    self._read[self._function][id(variable)] = variable
                continue
            with variable._lock, variable._block.locked(False) as value:
                variable.set_pulled(value.copy(), variable._block.version)
        groups = self._by_server(remote)
        versions = [[v._version for v in wanted] for _, wanted in groups]
        requests: list[_Request] = [
            (
                server,
                {
                    "request": "pull",
                    "have": [[v._number, n] for v, n in zip(wanted, have, strict=True)],
                },
                [],
            )
            for (server, wanted), have in zip(groups, versions, strict=True)
        ]
        again = []
        try:
            replies = self._call(requests)
        except ServerLostError:
            if self.recover is None:
                raise
            self.recover()
            self.pull(variables)
            return
        for (_, wanted), have, (reply, arrays) in zip(groups, versions, replies, strict=True):
            rest = iter(arrays)
            for variable, before, (version, how) in zip(wanted, have, reply["found"], strict=True):
                if how == "dropped":
                    variable.drop()
                    self._variables[variable._server].pop(variable._number, None)
                    for known in self._read.values():
                        known.pop(id(variable), None)
                    continue
                values = [next(rest) for _ in range(_ARRAYS[how])]
                with variable._lock:
                    if variable._version != before:  # another thread has pulled the variable
                        again.append(variable)
                    elif how == "same":
                        variable._period = self.period
                        if variable._changes:
                            variable.set_pulled(variable._pulled, version)
                    # `_own` is None while this thread updates the variable.
                    elif variable._own is not None or not variable._version:
                        value = values[-1]
                        if how == "rows":
                            value = variable._pulled.copy()
                            value[values[0]] = values[1]
                        variable.set_pulled(value, version)
        if again:
            self.pull(again)

    def push(self, variables: Iterable[ServerVariable]) -> None:
        """Send the changes of some copies."""
        sent: list[tuple[ServerVariable, list[Change]]] = []
        requests: list[_Request] = []
        for server, wanted in self._by_server(variables):
            found = [(v, changes) for v in wanted if (changes := v.changes())]
            if found:
                items = [[v._number, name] for v, changes in found for name, _ in changes]
                arrays = [a for _, changes in found for _, operands in changes for a in operands]
                requests.append((server, {"request": "push", "items": items}, arrays))
                sent += found
        try:
            replies = self._call(requests)
        except BaseException:
            for variable, _ in sent:
                variable.lose()  # it is unknown which changes the servers have
            raise
        versions = itertools.chain.from_iterable(reply["versions"] for reply, _ in replies)
        for variable, changes in sent:
            before = [next(versions) for _ in changes]
            first, value = variable._version, None
            # The server has the same value if no other task has changed it, so it need not be pulled.
            if changes[0][0] == "set":
                value = changes[0][1][0]
            elif before == list(range(first, first + len(before))) and all(
                name == "add" for name, _ in changes
            ):
                value = variable._pulled.copy()
                for change in changes:
                    apply_change(value, *change)
            variable.forget()
            variable._period = -1
            if value is not None:
                variable.set_pulled(value, before[-1] + 1)

    def update(
        self,
        rule: tuple[str, dict[str, Any]],
        groups: Sequence[Sequence[Variable]],
        gradients: Sequence[Array],
        numbers: dict[str, float],
        decays: Sequence[bool],
        index: Array | None = None,
    ) -> bool:
        """Let servers update variables by their gradients; return False if they cannot.

        Parameters
        ----------
        rule : tuple
            The name of an optimizer's class, and its settings.
        groups : sequence of sequence of Variable
            Each variable, followed by its slots.
        gradients : sequence of array
            The gradient of each variable, or of its rows.
        numbers : dict
            The learning rate ``rate``, the number ``step``, and the factor ``decay`` of weight decay.
        decays : sequence of bool
            True for the variables to which weight decay applies.
        index : array, optional
            The rows that have a gradient, in ascending order; there is one variable then.
        """
        self.wait_for_lost()
        every: list[ServerVariable] = []
        for group in groups:
            for variable in group:
                if not isinstance(variable, ServerVariable) or variable._servers is not self:
                    return False
                changed = id(variable) in self.touched
                if changed or variable._block is not None or variable._server != group[0]._place[0]:
                    return False
                every.append(variable)
        requests: dict[int, _Request] = {}
        rows = [] if index is None else [index]
        for group, gradient, decayed in zip(groups, gradients, decays, strict=True):
            server = group[0]._place[0]
            message: dict[str, Any] = {"request": "update", "rule": rule, **numbers, "items": []}
            _, message, arrays = requests.setdefault(server, (server, message, []))
            message["items"].append([[v._place[1] for v in group], bool(rows), decayed])
            arrays += [*rows, gradient]
        self._call([requests[server] for server in sorted(requests)])
        for variable in every:
            variable.forget()
            variable._period = -1
        known = self._read.get(self._function)
        if known is not None:
            for slot in [slot for group in groups for slot in group[1:]]:
                known.pop(id(slot), None)  # the function need not pull it any more
        return True

    def _by_server(
        self, variables: Iterable[ServerVariable]
    ) -> list[tuple[int, list[ServerVariable]]]:
        groups: dict[int, list[ServerVariable]] = {}
        for variable in variables:
            groups.setdefault(variable._server, []).append(variable)
        return sorted(groups.items(), key=lambda group: group[0])

    def loads(self) -> list[list[int]]:
        """Return the load of each server: variables, their bytes, updates, bytes sent and received."""
        self.wait_for_lost()
        requests: list[_Request] = [
            (server, {"request": "load"}, []) for server in range(len(self.links))
        ]
        return [reply["load"] for reply, _ in self._call(requests)]

    def _call(self, requests: Sequence[_Request]) -> list[tuple[dict[str, Any], list[Any]]]:
        """Send requests to different servers in ascending order; return the replies of all.

        The servers carry out the requests at the same time.
        """
        replies, told = [], {}
        lost: UnavailableError | None = None
        with contextlib.ExitStack() as held:
            try:
                for server, message, arrays in requests:
                    held.enter_context(self.links[server].lock)
                    begin = self._told[server]
                    if keys := self._dropped[server][begin : begin + _MOST_KEYS]:
                        message = {**message, "dropped": keys}
                        told[server] = begin + len(keys)
                    try:
                        self.links[server].send(message, arrays)
                    except LinkLostError as error:
                        lost = server_lost(self.links[server], error)
                # An unread reply would be taken for the reply to the next request.
                for server, _, _ in requests:
                    try:
                        replies.append(self.links[server].reply())
                        self._told[server] = told.get(server, self._told[server])
                    except LinkLostError as error:
                        lost = server_lost(self.links[server], error)
            except KeyboardInterrupt:
                for server, _, _ in requests:
                    self.links[server].interrupts += 1
                raise
        if lost is not None:
            raise lost
        for (server, _, _), (reply, _) in zip(requests, replies, strict=True):
            if "error" in reply:
                raise error_of(reply, self.links[server].task)
        return replies

    def check(self) -> None:
        """Raise UnavailableError if a server is lost."""
        for number in self.lost():
            raise server_lost(self.links[number], "it has closed its connection")


def server_lost(link: Link, why: object) -> ServerLostError:
    """Return the error for a lost parameter server."""
    return ServerLostError(
        f"{link.task} is lost, and its variables with it ({why}); start the program again on all "
        "tasks, and restore a checkpoint"
    )
