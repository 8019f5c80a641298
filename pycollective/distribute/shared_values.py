"""Values of variables on a parameter server, in memory that the other tasks of its host can map.

A server has one file in memory for all of its variables. A block of the file has a variable's value and
versions. The tasks lock blocks by locks of the file, which the system releases when a process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pycollective.errors import FailedPreconditionError, UnavailableError
from pycollective.launch.description import TRANSPORT
from pycollective.tensor.compiled import add_to
from pycollective.tensor.scattering import SCATTER

ROWS_FROM = 1 << 14
"""The bytes of a variable from which on its rows have versions."""
_PAGE = mmap.ALLOCATIONGRANULARITY
_TOKEN_BYTES = 32
_HEADER_BYTES = 64
_SECONDS = 600.0
"""Seconds that a task waits for a lock."""
_SPINS = 50

# Locks of an open file description, which closing another descriptor of the process does not release.
_SET_LOCK = getattr(fcntl, "F_OFD_SETLK", None)


class SharedFile:
    """A file in memory, in which one process allocates blocks that processes of its host map."""

    def __init__(self, fd: int, token: bytes, owner: int) -> None:
        self._fd = fd
        self._token = token
        self._owner = owner
        self._end = _PAGE
        self._lock = threading.Lock()

    @classmethod
    def made(cls) -> SharedFile | None:
        """Return a new file, or None if this system has no files in memory."""
        if _SET_LOCK is None or not hasattr(os, "memfd_create"):
            return None
        if os.environ.get(TRANSPORT) == "tcp":
            return None
        try:
            fd = os.memfd_create("pycollective-variables", os.MFD_CLOEXEC)
        except OSError:
            return None
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.ftruncate(fd, _PAGE)
        os.pwrite(fd, token, 0)
        return cls(fd, token, os.getpid())

    @classmethod
    def of(cls, name: Any) -> SharedFile | None:
        """Return another process's file by its `name`, or None if it is not on this host."""
        if _SET_LOCK is None or os.environ.get(TRANSPORT) == "tcp":
            return None
        try:
            owner, fd, text = name
            path, token = f"/proc/{int(owner)}/fd/{int(fd)}", bytes.fromhex(text)
            # The path can be another file's: of another host, or of another container.
            if not stat.S_ISREG(os.stat(path).st_mode):
                return None
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, TypeError, ValueError):
            return None
        if len(token) != _TOKEN_BYTES or os.pread(opened, _TOKEN_BYTES, 0) != token:
            os.close(opened)
            return None
        return cls(opened, token, owner)

    @property
    def name(self) -> list[Any]:
        """The name by which other processes find the file; only those of the same user can open it."""
        return [self._owner, self._fd, self._token.hex()]

    def allocated(self, size: int) -> int | None:
        """Return the offset of new memory, or None if there is not enough."""
        with self._lock:
            offset, end = self._end, self._end + -(-size // _PAGE) * _PAGE
            try:
                os.posix_fallocate(self._fd, offset, end - offset)
            except OSError:
                return None
            self._end = end
            return offset

    def mapped(self, offset: int, size: int) -> mmap.mmap:
        """Return a view of memory in the file."""
        return mmap.mmap(self._fd, size, offset=offset)

    def lock(self, number: int, exclusive: bool) -> None:
        """Lock a block by its number, for this process."""
        assert _SET_LOCK is not None
        kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
        request = _request(kind, number)
        begun, tries = 0.0, 0
        while True:
            try:
                fcntl.fcntl(self._fd, _SET_LOCK, request)
                return
            except (BlockingIOError, PermissionError):
                now = time.monotonic()
                begun = begun or now
                if now - begun > _SECONDS:
                    raise UnavailableError(
                        f"another process has locked a variable for {_SECONDS:g} s, so it is probably "
                        "stopped: end it"
                    ) from None
                tries += 1
                time.sleep(0 if tries < _SPINS else 1e-4)

    def unlock(self, number: int) -> None:
        """Release the lock of a block."""
        assert _SET_LOCK is not None
        fcntl.fcntl(self._fd, _SET_LOCK, _request(fcntl.F_UNLCK, number))

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _request(kind: int, number: int) -> bytes:
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, number, 1, 0)


class Block:
    """A variable's value with its version, and for a large variable the versions of its rows.

    Parameters
    ----------
    shape, dtype
        The shape and the dtype of the value.
    number : int
        The variable's number on its server.
    file : SharedFile, optional
        The file that has the block. By default the block is in this process alone.
    offset : int, optional
        The block's offset in the file.

    Attributes
    ----------
    value : array
        The value. Read and change it while the block is locked.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        number: int,
        file: SharedFile | None = None,
        offset: int | None = None,
    ) -> None:
        self.number = number
        self.file = None if offset is None else file
        self.offset = offset
        self._thread = threading.RLock()
        self._is_locked = False
        size, rows_bytes = _sizes(shape, dtype)
        memory: Any = np.zeros(size, np.uint8)
        self._mapping: mmap.mmap | None = None
        if offset is not None:
            assert file is not None
            memory = self._mapping = file.mapped(offset, size)
        header = np.ndarray((2,), np.int64, memory, 0)
        self._version, self._whole = header[:1], header[1:]
        self._rows = (
            np.ndarray((shape[0],), np.int64, memory, _HEADER_BYTES) if rows_bytes else None
        )
        self.value: Any = np.ndarray(shape, dtype, memory, _HEADER_BYTES + rows_bytes)

    @classmethod
    def made(cls, value: Any, number: int, file: SharedFile | None) -> Block:
        """Return a new block with a value, if possible in a file."""
        size, _ = _sizes(value.shape, value.dtype)
        offset = None if file is None else file.allocated(size)
        block = cls(value.shape, value.dtype, number, file, offset)
        block.value[...] = value
        block.changed()
        return block

    @property
    def version(self) -> int:
        """The number of changes."""
        return int(self._version[0])

    def changed(self, rows: Any = None) -> None:
        """Count a change of the value, or of some rows.

        The caller holds the lock, except for lock-free updates.
        """
        self._version[0] += 1
        if rows is None:
            self._whole[0] = self._version[0]
        elif self._rows is not None:
            self._rows[rows] = self._version[0]

    def restore(self, version: int) -> None:
        """Set the version, as that of a value from a snapshot."""
        self._version[0] = self._whole[0] = version

    def rows_since(self, version: int) -> Any:
        """Return the rows that have changed since a version, or None for all."""
        if self._rows is None or version < self._whole[0]:
            return None
        changed = np.flatnonzero(self._rows > version)
        return None if 2 * len(changed) > len(self._rows) else changed

    def drop(self) -> None:
        """Return the memory of a block in a file to the system; the version becomes 0 for all tasks.

        A stopped task could hold the lock, and no lock is needed: no later block has this offset.
        """
        self._version[0] = 0
        if self._mapping is not None:
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_REMOVE)

    @contextlib.contextmanager
    def locked(self, exclusive: bool) -> Iterator[Any]:
        """Lock the value in the block, for all tasks; readers run concurrently unless ``exclusive``.

        Raises
        ------
        FailedPreconditionError
            The variable was dropped.
        RuntimeError
            This thread has locked the value.
        """
        self.lock(exclusive)
        try:
            yield self.value
        finally:
            self.unlock()

    def lock(self, exclusive: bool) -> None:
        """Lock the value until `unlock`."""
        self._thread.acquire()
        if self._is_locked:  # the system's lock belongs to the process, and does not count
            self._thread.release()
            raise RuntimeError(
                "a variable was read by the function that updates it in place; use the array that "
                "this function gets"
            )
        if self.file is not None:
            try:
                self.file.lock(self.number, exclusive)
            except BaseException:
                self._thread.release()
                raise
        self._is_locked = True
        if not self._version[0]:
            self.unlock()
            raise dropped()

    def unlock(self) -> None:
        """Release the lock."""
        self._is_locked = False
        if self.file is not None:
            self.file.unlock(self.number)
        self._thread.release()


def dropped() -> FailedPreconditionError:
    """Return the error for a variable that the chief has dropped."""
    return FailedPreconditionError(
        "the chief's program has dropped this variable, so it is no longer on its server: keep the "
        "variables that scheduled functions use"
    )


def _sizes(shape: tuple[int, ...], dtype: Any) -> tuple[int, int]:
    """Return the bytes of a block, and those of the versions of its rows."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    rows = -(-8 * shape[0] // 64) * 64 if len(shape) > 1 and size >= ROWS_FROM else 0
    return _HEADER_BYTES + rows + max(1, size), rows


_SUMS = {"scatter_add": np.add, "scatter_sub": np.subtract}


def ascends(index: Any) -> bool:
    """Return True if each index is greater than the one before it."""
    # A comparison, because differences of unsigned integers are never negative.
    return bool(np.all(index[1:] > index[:-1]))


def apply_change(value: Any, name: str, operands: Sequence[Any]) -> None:
    """Change a value in place; a server and a task with a copy do the same.

    Parameters
    ----------
    value : array
        The value of a variable, or some of its rows.
    name : str
        ``"set"`` or ``"add"`` for the whole value, or a name in `SCATTER`.
    operands : sequence of array
        The other value; or indices, and a row for each of them.
    """
    if name == "set":
        value[...] = operands[0]
        return
    if name == "add":
        add_to(value, operands[0], 1.0)
        return
    index, rows = operands
    if name in _SUMS and ascends(index):
        # `ufunc.at`, which also adds rows with equal indices, takes ten times as long.
        changed = value[index]
        _SUMS[name](changed, rows, out=changed)
        value[index] = changed
        return
    SCATTER[name](value, index, rows)
