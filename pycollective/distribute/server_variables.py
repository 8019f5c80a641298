"""The tasks' copies of variables that are on parameter servers in other processes.

A task of the server's host maps a variable, and reads and updates it in place. Another task has a copy
of the value, with the version that the server gave to it. `Servers.pull` asks for the changes since
then. `Servers.push` sends the task's changes, which are methods with their operands. The server applies
them to its own value, so that no change of another task is lost. Lookups in a large variable pull single
rows.

`Variable.update_inplace` and `Variable.update_rows` call any function on a copy. The task then sends the
difference between the copies before and after.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import select
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pycollective.array_backend import Array, scatter_add
from pycollective.distribute.shared_values import (
    ROWS_FROM,
    Block,
    SharedFile,
    apply_change,
    ascends,
    dropped,
)
from pycollective.distribute.task_links import (
    Link,
    LinkLostError,
    ServerLostError,
    spec_of,
)
from pycollective.distribute.task_values import error_of
from pycollective.distribute.worker_threads import this_thread
from pycollective.errors import UnavailableError
from pycollective.tensor import Tensor, Variable
from pycollective.tensor.compiled import add_to
from pycollective.tensor.scattering import SCATTER
from pycollective.tensor.tape import new_key
from pycollective.tensor.variable import _value, may_write

_ADDS = "iufcV"
"""The kinds of dtypes whose sums and differences are sent."""
_EXACT = "biu"
"""The kinds of dtypes whose sums can be joined, because they are not rounded."""
_MOST_CHANGES = 100
_MOST_BYTES = 64 << 20
"""The most changes of a variable, and bytes in addition to its own, that wait for the function's end."""

_MOST_KEYS = 1000
"""The most keys of dropped variables in a message."""

_Change = tuple[str, list[Any]]
"""The name of a change and its operands, as for `apply_change`."""


class _Part:
    """Some rows of a variable at ascending indices, with this task's changes."""

    def __init__(self, index: Array, rows: Array, period: int) -> None:
        self.index = index
        self.rows = rows
        self.period = period

    def add(self, other: _Part) -> None:
        """Add the rows of another part, none of which are there yet."""
        index = np.concatenate([self.index, other.index])
        order = np.argsort(index, kind="stable")
        self.index = index[order]
        self.rows = np.concatenate([self.rows, other.rows])[order]

    def apply(self, name: str, operands: Sequence[Any]) -> None:
        """Apply a change of the variable to those rows that are there."""
        if name == "add":
            self.rows += operands[0][self.index]
            return
        changed, rows = operands
        place = np.searchsorted(self.index, changed)
        here = place < len(self.index)
        here[here] = self.index[place[here]] == changed[here]
        apply_change(self.rows, name, [place[here], rows[here]])


class ServerVariable(Variable):
    """A task's view of a variable on a parameter server."""

    #: The servers, once the variable is on one of them.
    _servers: Servers | None = None
    _server = _number = _version = 0
    _key_on_server = ""
    #: The key of the variable whose slot this one is.
    _slot_of: str | None = None
    #: True once the chief's program has dropped the variable.
    _dropped = False
    #: The memory of the server, if this process has mapped it.
    _block: Block | None = None
    _own: Tensor | None = None
    #: The value that was pulled. This reference makes every update copy the value first.
    _pulled: Any = None
    #: The period of `Servers` in which the value was pulled.
    _period = -1
    #: True after `assign`: the whole value is sent, and `_changes` is empty.
    _assigned = False
    #: The changes that the server does not have yet, in their order.
    _changes: tuple[_Change, ...] = ()
    #: The value before `update_inplace` calls, whose difference is not in `_changes` yet. This reference
    #: makes the first of them copy the value.
    _before: Any = None
    _part: _Part | None = None

    # Mapped variables ------------------------------------------------------------------------

    @property
    def _in_place(self) -> bool:
        return self._block is not None and self._servers is not None and not self._servers.private

    @property
    def update_on_servers(self) -> Any:  # type: ignore[override]
        """The method `Servers.update`, or None if this process has the memory of the variable."""
        servers = self._servers
        remote = servers is not None and self._block is None and not servers.private
        return servers.update if remote and servers is not None else None

    @property
    def _place(self) -> tuple[int, int]:  # type: ignore[override]
        return self._server, self._number

    @contextlib.contextmanager
    def in_place(self) -> Iterator[Array]:
        """Lock the server's memory for an update in the block."""
        if self._servers is not None:
            self._servers.wait_for_lost()
        block = self._block
        assert block is not None
        self._uncache()
        if self._lock_free:
            if not block.version:
                raise dropped()
            block.changed()
            yield block.value
            return
        with self._lock, block.locked(True) as value:
            block.changed()
            yield value

    def _uncache(self) -> None:
        if this_thread.read is not None:
            this_thread.read.pop(id(self), None)

    def _seen(self, block: Block) -> Tensor:
        """Return the present value of the server's memory; copy it if it has changed."""
        if self._lock_free:
            if not block.version:
                raise dropped()
            if self._own is None or self._own.array is not block.value:
                self._own = _value(block.value)
            elif self._own._key:
                self._own._key = new_key()
            return self._own
        read = this_thread.read
        if read is not None and id(self) in read:
            return read[id(self)]
        with self._lock:
            own = self._own
            if own is not None and self._version == block.version:
                return own
            self._own = None
            kept = [] if own is None else [own]
            del own
            free = bool(kept) and may_write(kept)
            with block.locked(False) as value:
                self._version = block.version
                if free:
                    kept[0].array[...] = value
                    kept[0]._key = new_key() if kept[0]._key else 0
                    self._own = kept[0]
                else:
                    self._own = _value(value.copy())
            if read is not None:
                read[id(self)] = self._own
            return self._own

    # The value -------------------------------------------------------------------------------

    @property
    def _tensor(self) -> Tensor | None:
        servers = self._servers
        if servers is None:
            return self._own
        if not servers.private:
            servers.wait_for_lost()
            if self._block is not None:
                return self._seen(self._block)
        if self._period != servers.period or (servers.uncached and not servers.private):
            servers.pull([self])
            if self._dropped:
                raise dropped()
        return self._own

    @_tensor.setter
    def _tensor(self, value: Tensor | None) -> None:
        servers = self._servers
        if servers is not None and self._block is not None and not servers.private:
            if value is not None and value is not self._own:
                with self.in_place() as memory:
                    memory[...] = value.array
            return
        own, self._own = self._own, value
        if servers is None:
            return
        if value is None:  # an update begins, and writes to the value or to a copy of it
            if self._before is None and not self._assigned and own is not None:
                self._before = own.array
            return
        if own is not None or self._pulled is None:  # no update ends: the value is another one
            self._changes, self._part, self._before = (), None, None
            self._assigned, self._period = True, servers.period
        servers.touch(self)

    def assign(self, value: Any, read_value: bool = True) -> Variable:
        """Set the value; see `Variable.assign`. The present value is not read."""
        servers = self._servers
        if servers is None or self._in_place:
            return super().assign(value)
        array = self.checked(value, "assign")
        servers.wait_for_lost()
        with self._lock:
            self._tensor = _value(array.copy())
        return self

    def assign_add(self, value: Any, read_value: bool = True) -> Variable:
        """Add ``value`` on the server; see `Variable.assign_add`."""
        if self._servers is None or self._in_place:
            return super().assign_add(value)
        self._record("add", [self.checked(value, "assign_add").copy()])
        return self

    def assign_sub(self, value: Any, read_value: bool = True) -> Variable:
        """Subtract ``value`` on the server; see `Variable.assign_sub`."""
        if self._servers is None or self._in_place:
            return super().assign_sub(value)
        self._record("add", [np.asarray(np.negative(self.checked(value, "assign_sub")))])
        return self

    def take(self, array: Any, version: int) -> None:
        """Keep a value of the server, with this task's changes."""
        assert self._servers is not None
        self._pulled, self._version, self._period = array, version, self._servers.period
        self._assigned, self._part, self._before = False, None, None
        if self._changes:
            array = array.copy()
            for change in self._changes:
                apply_change(array, *change)
        self._own = _value(array)

    def forget(self) -> None:
        """Return to the value that was pulled."""
        self._part, self._before, self._assigned, self._changes = None, None, False, ()
        if self._pulled is not None and self._version:
            self._own = _value(self._pulled)

    def lose(self) -> None:
        """Drop the value and its changes, such as after the loss of the server."""
        self._own, self._pulled, self._version, self._period = None, None, 0, -1
        self.forget()

    def drop(self) -> None:
        """Drop the value: the chief's program has dropped the variable."""
        self.lose()
        self._dropped = True

    # Rows ------------------------------------------------------------------------------------

    def rows(self, index: Array) -> Array:
        """Return a copy of the rows at some indices."""
        servers = self._servers
        if servers is None or not self._by_rows:
            return super().rows(index)
        servers.wait_for_lost()
        if self._in_place:
            assert self._block is not None
            with self._block.locked(False) as value:
                found: Array = np.take(value, index, axis=0)
            return found
        if servers.uncached and not servers.private:
            found = servers.rows([(self, index)])[0]
            return found
        if self._period == servers.period:
            return super().rows(index)
        part = self._with_rows(np.unique(index))
        found = part.rows[np.searchsorted(part.index, index)]
        return found

    def _with_rows(self, index: Array) -> _Part:
        """Return the pulled rows, with those at some ascending indices."""
        servers, part = self._servers, self._part
        assert servers is not None
        if part is not None and part.period == servers.period:
            index = np.setdiff1d(index, part.index, assume_unique=True)
            if not len(index):
                return part
        new = _Part(index, servers.rows([(self, index)])[0], servers.period)
        for change in self._changes:
            new.apply(*change)
        if part is not None and part.period == servers.period:
            part.add(new)
            return part
        self._part = new
        return new

    def update_rows(
        self, others: Sequence[Variable], index: Array, update: Callable[[list[Array]], Any]
    ) -> None:
        """Update some rows; see `Variable.update_rows`."""
        servers, every = self._servers, [self, *others]
        own = [v for v in every if isinstance(v, ServerVariable) and v._servers is not None]
        if servers is None or len(own) < len(every):
            super().update_rows(others, index, update)
        elif all(v._in_place for v in own):
            blocks = [v._block for v in own if v._block is not None]
            with contextlib.ExitStack() as held:
                for variable in sorted(own, key=lambda v: v._place):
                    assert variable._block is not None
                    held.enter_context(variable._block.locked(True))
                rows = [block.value[index] for block in blocks]
                update(rows)
                for variable, block, changed in zip(own, blocks, rows, strict=True):
                    block.changed(index)
                    block.value[index] = changed
                    variable._uncache()
        elif any(v._in_place for v in own):
            super().update_rows(others, index, update)
        else:
            before = [v.rows(index) for v in own]
            rows = [old.copy() for old in before]
            update(rows)
            for variable, old, new in zip(own, before, rows, strict=True):
                for change in _differences_of_rows(index, old, new):
                    variable._record(*change)

    def _scatter(self, method: str, slices: Any) -> Variable:
        servers = self._servers
        if servers is None or (self._in_place and not self._by_rows):
            return super()._scatter(method, slices)
        index, rows = self.checked_rows(slices, method)
        if self._in_place:
            assert self._block is not None
            self._uncache()
            with self._block.locked(True) as value:
                self._block.changed(index)
                SCATTER[method](value, index, rows)
            return self
        self._record(method, [index.copy(), rows.copy()])
        return self

    # Changes ---------------------------------------------------------------------------------

    def _record(self, name: str, operands: list[Any]) -> None:
        """Apply a change to this task's copies, if there are any, and keep it for the server.

        No other code may change the operands.
        """
        servers = self._servers
        assert servers is not None
        servers.wait_for_lost()
        with self._lock:
            current = self._period == servers.period
            if current and self._own is None:
                self.current()  # raises the error for a variable that this thread updates
            self._find_differences()
            if current:
                self._change_own(name, operands)
            elif self._part is not None and self._part.period == servers.period:
                self._part.apply(name, operands)
            if not self._assigned:
                self._keep(name, operands)
            servers.touch(self)

    def _change_own(self, name: str, operands: list[Any]) -> None:
        """Apply a change to the own value, or to a copy of it if there are other references to it."""
        assert self._own is not None
        kept: list[Tensor] = [self._own]
        self._own = None
        try:
            if not may_write(kept):
                kept[0] = _value(kept[0].array.copy())
            elif kept[0]._key:
                kept[0]._key = new_key()
            apply_change(kept[0].array, name, operands)
        finally:
            self._own = kept[0]

    def _keep(self, name: str, operands: list[Any]) -> None:
        """Keep a change for the server; join exact sums, such as those of counters."""
        last = self._changes[-1] if self._changes else None
        if last is not None and name == last[0] == "add" and operands[0].dtype.kind in _EXACT:
            add_to(last[1][0], operands[0], 1.0)
        else:
            self._changes += ((name, operands),)

    def _find_differences(self) -> None:
        """Add the differences by calls of `update_inplace` to the changes."""
        before = self._before
        if before is None or self._own is None:
            return
        self._before = None
        if before is self._own.array:
            return
        found = _differences(before, self._own.array)
        if found is None:
            self._assigned, self._changes = True, ()
            return
        for change in found:
            self._keep(*change)

    def changes(self) -> list[_Change]:
        """Return the changes that the server does not have."""
        self._find_differences()
        if self._assigned:
            assert self._own is not None
            return [("set", [self._own.array])]
        found: list[_Change] = []
        for name, group in itertools.groupby(self._changes, operator.itemgetter(0)):
            operands = [change[1] for change in group]
            if name == "add":
                found += [(name, values) for values in operands]
                continue
            index, rows = map(np.concatenate, zip(*operands, strict=True))
            if name in ("scatter_add", "scatter_sub") and rows.dtype.kind in _ADDS:
                index, rows = _summed(index, rows)
            found.append((name, [index, rows]))
        return found

    @property
    def has_many_changes(self) -> bool:
        """True if the changes should not wait for the end of the function, because of their memory."""
        if len(self._changes) < 2:
            return False
        size = sum(array.nbytes for _, operands in self._changes for array in operands)
        limit = _MOST_BYTES + self.like().array.nbytes
        return len(self._changes) > _MOST_CHANGES or size > limit


def _summed(index: Array, rows: Array) -> tuple[Array, Array]:
    """Return each index once, in ascending order, with the sum of its rows."""
    if ascends(index):
        return index, rows
    unique, place = np.unique(index, return_inverse=True)
    total = np.zeros((len(unique), *rows.shape[1:]), rows.dtype)
    scatter_add(total, place.reshape(-1), rows)
    return unique, total


def _differences(old: Array, new: Array) -> list[_Change] | None:
    """Return changes that make a value from another one, or None if it must be sent whole."""
    if new.dtype.kind in _ADDS:
        if new.ndim > 1 and new.nbytes >= ROWS_FROM:
            changed = np.flatnonzero((new != old).reshape(len(new), -1).any(axis=1))
            if 2 * len(changed) <= len(new):
                return _differences_of_rows(changed, old[changed], new[changed])
        difference = _minus(new, old)
        if new.dtype.kind in _EXACT or np.isfinite(difference).all():
            return [("add", [difference])]
    return _differences_of_rows(np.arange(len(new)), old, new) if new.ndim else None


def _differences_of_rows(index: Array, old: Array, new: Array) -> list[_Change]:
    """Return changes that make rows from others at different indices.

    The rows themselves are sent if they have no finite difference: inf - inf is NaN.
    """
    rest = tuple(range(1, new.ndim))
    # NaN differs from itself.
    changed: Any = ((new != old) & ((new == new) | (old == old))).any(axis=rest)
    index, old, new = index[changed], old[changed], new[changed]
    finite: Any = np.zeros(len(index), np.bool_)
    found: list[_Change] = []
    if new.dtype.kind in _ADDS:
        difference = _minus(new, old)
        finite = np.isfinite(difference).all(axis=rest)
        if finite.any():
            found.append(("scatter_add", [index[finite], difference[finite]]))
    if not finite.all():
        found.append(("scatter_update", [index[~finite], new[~finite]]))
    return found


def _minus(new: Array, old: Array) -> Array:
    if new.dtype.kind in _EXACT:
        return np.asarray(new - old)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(new - old)


def of_one_element(value: Any) -> Tensor:
    """Return a tensor with an array's shape and dtype, which has a single element in memory."""
    return Tensor(np.broadcast_to(np.zeros((), value.dtype), value.shape))


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
        own = ServerVariable.__new__(ServerVariable)
        own.set_attributes(
            variable.trainable, variable.name, variable.synchronization, variable.aggregation
        )
        value = variable.current().array
        own._like = of_one_element(value)
        own._server, own._key_on_server = server, self.key_of(variable.name)
        if isinstance(beside, ServerVariable):
            own._slot_of = beside._key_on_server
        if not self._attach(own, value):
            return variable
        own._servers = self
        if self.uncached:
            key = own._key_on_server
            weakref.finalize(own, self._dropped[server].append, key).atexit = False
        return own

    def _attach(self, own: ServerVariable, value: Any) -> bool:
        """Find a variable on its server, or create it there with a value.

        Return False if the chief has dropped the variable.
        """
        request: dict[str, Any] = {"request": "create", "key": own._key_on_server}
        request |= {"spec": spec_of(own.like().array), "slot_of": own._slot_of}
        if self.uncached:
            request["keeps"] = True
        elif self.private:
            request["prepares"] = True
        ((reply, _),) = self._call([(own._server, request, [])])
        if reply.get("dropped"):
            return False
        if reply.get("wanted"):
            if value is None:
                raise UnavailableError(
                    f"variable {own.name!r} is in no snapshot of {self.links[own._server].task}"
                )
            ((reply, _),) = self._call([(own._server, request, [value])])
        own._number = reply["number"]
        own._block = None
        if "file" in reply:
            name = tuple(reply["file"])
            if name not in self._files:
                self._files[name] = SharedFile.of(reply["file"])
            file = self._files[name]
            if file is not None:
                array = own.like().array
                own._block = Block(array.shape, array.dtype, own._number, file, reply["offset"])
        self._variables[own._server][own._number] = own
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
        self._told[server] = 0  # its snapshot may be older than that
        self._watch()
        variables = list(self._variables[server].values())
        self._variables[server].clear()
        for variable in variables:
            variable.lose()
            self.touched.pop(id(variable), None)
            if not self._attach(variable, None):
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
        """Note that the worker has run its program, and now runs scheduled functions."""
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
                    for of in self._variables
                    for v in list(of.values())
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
        """Note that this task has changed a variable, whose lock it holds; the chief sends it now."""
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
                variable.take(value.copy(), variable._block.version)
        groups = self._by_server(remote)
        requests: list[_Request] = [
            (server, {"request": "pull", "have": [[v._number, v._version] for v in wanted]}, [])
            for server, wanted in groups
        ]
        try:
            replies = self._call(requests)
        except ServerLostError:
            if self.recover is None:
                raise
            self.recover()
            self.pull(variables)
            return
        for (_, wanted), (reply, arrays) in zip(groups, replies, strict=True):
            rest = iter(arrays)
            for variable, (version, how) in zip(wanted, reply["found"], strict=True):
                if how == "dropped":
                    variable.drop()
                    self._variables[variable._server].pop(variable._number, None)
                    for known in self._read.values():
                        known.pop(id(variable), None)
                    continue
                if how == "same":
                    variable._period = self.period
                    if variable._changes:
                        variable.take(variable._pulled, version)
                    continue
                value = next(rest)
                if how == "rows":
                    rows, value = value, variable._pulled.copy()
                    value[rows] = next(rest)
                with variable._lock:
                    # None: this thread updates it.
                    if variable._own is not None or not variable._version:
                        variable.take(value, version)

    def push(self, variables: Iterable[ServerVariable]) -> None:
        """Send the changes of some copies."""
        sent: list[tuple[ServerVariable, list[_Change]]] = []
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
                variable.take(value, before[-1] + 1)

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
