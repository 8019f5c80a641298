"""The tasks' copies of variables that are on parameter servers in other processes.

A task of the server's host maps a variable, and reads and updates it in place. Another task has a copy
of the value, with the version that the server gave to it, and keeps its changes until `Servers.push`
sends them. A change is a method with its operands.

`Variable.update_inplace` and `Variable.update_rows` call any function on a copy. The task then sends the
difference between the copies before and after.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pycollective.array_backend import Array, scatter_add
from pycollective.distribute.shared_values import (
    ROWS_FROM,
    Block,
    apply_change,
    ascends,
    dropped,
)
from pycollective.distribute.worker_threads import cached_reads
from pycollective.tensor import Tensor, Variable
from pycollective.tensor.compiled import add_to
from pycollective.tensor.scattering import SCATTER
from pycollective.tensor.tape import new_key
from pycollective.tensor.variable import _value, may_write

if TYPE_CHECKING:
    from pycollective.distribute.server_connections import Servers

_ADDS = "iufcV"
"""The kinds of dtypes whose sums and differences are sent."""
_EXACT = "biu"
"""The kinds of dtypes whose sums can be joined, because they are not rounded."""
_MOST_CHANGES = 100
_MOST_BYTES = 64 << 20
"""The most changes of a variable, and bytes in addition to its own, that wait for the function's end."""

Change = tuple[str, list[Any]]
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
        """Apply a change of the variable to the rows of this part."""
        if name == "add":
            self.rows += operands[0][self.index]
            return
        changed, rows = operands
        position = np.searchsorted(self.index, changed)
        is_here = position < len(self.index)
        is_here[is_here] = self.index[position[is_here]] == changed[is_here]
        apply_change(self.rows, name, [position[is_here], rows[is_here]])


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
    #: This task's copy of the value; None while this thread updates the variable.
    _own: Tensor | None = None
    #: The value that was pulled. This reference makes every update copy the value first.
    _pulled: Any = None
    #: The period of `Servers` in which the value was pulled.
    _period = -1
    #: True after `assign`: the whole value is sent, and `_changes` is empty.
    _assigned = False
    #: The changes that the server does not have yet, in their order.
    _changes: tuple[Change, ...] = ()
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
        read = cached_reads.get()
        if read is not None:
            read.pop(id(self), None)

    def _mapped_value(self, block: Block) -> Tensor:
        """Return the current value in the server's memory; copy it if it has changed."""
        if self._lock_free:
            if not block.version:
                raise dropped()
            if self._own is None or self._own.array is not block.value:
                self._own = _value(block.value)
            elif self._own._key:
                self._own._key = new_key()
            return self._own
        read = cached_reads.get()
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
                return self._mapped_value(self._block)
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
        if own is not None or self._pulled is None:  # an assignment, not the end of an update
            self._changes, self._part, self._before = (), None, None
            self._assigned, self._period = True, servers.period
        servers.touch(self)

    def _write(self, method: str, value: Any) -> Variable:
        """Make an assignment: set without reading the current value, or add on the server."""
        servers = self._servers
        if servers is None or self._in_place:
            return super()._write(method, value)
        array = self.checked(value, method)
        if method == "assign":
            servers.wait_for_lost()
            with self._lock:
                self._tensor = _value(array.copy())
        else:
            adds = method == "assign_add"
            self._record("add", [array.copy() if adds else np.asarray(np.negative(array))])
        return self

    def set_pulled(self, array: Any, version: int) -> None:
        """Use a value that the server has sent, with this task's changes."""
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
        views = [v for v in every if isinstance(v, ServerVariable) and v._servers is not None]
        if servers is None or len(views) < len(every):
            super().update_rows(others, index, update)
        elif all(v._in_place for v in views):
            blocks = [v._block for v in views if v._block is not None]
            with contextlib.ExitStack() as held:
                for variable in sorted(views, key=lambda v: v._place):
                    assert variable._block is not None
                    held.enter_context(variable._block.locked(True))
                rows = [block.value[index] for block in blocks]
                update(rows)
                for variable, block, changed in zip(views, blocks, rows, strict=True):
                    block.changed(index)
                    block.value[index] = changed
                    variable._uncache()
        elif any(v._in_place for v in views):
            super().update_rows(others, index, update)
        else:
            before = [v.rows(index) for v in views]
            rows = [old.copy() for old in before]
            update(rows)
            for variable, old, new in zip(views, before, rows, strict=True):
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
        """Apply a change to this task's value, or to a copy if there are other references to it."""
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

    def changes(self) -> list[Change]:
        """Return the changes that the server does not have."""
        self._find_differences()
        if self._assigned:
            assert self._own is not None
            return [("set", [self._own.array])]
        found: list[Change] = []
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
    unique, positions = np.unique(index, return_inverse=True)
    total = np.zeros((len(unique), *rows.shape[1:]), rows.dtype)
    scatter_add(total, positions.reshape(-1), rows)
    return unique, total


def _differences(old: Array, new: Array) -> list[Change] | None:
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


def _differences_of_rows(index: Array, old: Array, new: Array) -> list[Change]:
    """Return changes that make rows from others at different indices.

    The rows themselves are sent if they have no finite difference: inf - inf is NaN.
    """
    rest = tuple(range(1, new.ndim))
    # NaN differs from itself.
    changed: Any = ((new != old) & ((new == new) | (old == old))).any(axis=rest)
    index, old, new = index[changed], old[changed], new[changed]
    finite: Any = np.zeros(len(index), np.bool_)
    found: list[Change] = []
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
