"""Files that appear whole or not at all, and locks on folders.

A file is written under a temporary name, flushed to the disk and renamed. The writer keeps a lock
(``flock``) on the temporary file. The next writer in that folder deletes temporary files without a
lock, because their writers were killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from typing import BinaryIO

_TEMPORARY_SUFFIX = ".unfinished"
_TEMPORARY = re.compile(rf"\.[0-9a-f]{{16}}{re.escape(_TEMPORARY_SUFFIX)}$")
#: On a file system without locks, a temporary file that has not changed for this long is abandoned.
_ABANDONED_SECONDS = 3600.0
#: The longest file name in bytes, and the length of the ending of `_TEMPORARY`.
_LONGEST_NAME, _ENDING = 255, 28
_LOCK_SECONDS = 600.0
_LOCK_PAUSE_SECONDS = 0.01


def write_atomically(path: str, data: bytes) -> None:
    """Replace the contents of ``path``; after a crash the file has the old or the new contents."""
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Yield a file to write, which replaces ``path`` at the end of the block.

    After an error in the block ``path`` is unchanged. Files that killed writers left in the folder are
    deleted.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe stays
        with _naming(path), open(path, "wb") as file:
            yield file
            file.flush()
        return
    path = os.path.realpath(path)  # a link stays, and its target is replaced
    directory = os.path.dirname(path)
    _remove_abandoned(directory)
    descriptor, temporary = _open_temporary(path)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(os.stat(path).st_mode))
    # The lock ends when the descriptor is closed, after the file has its final name.
    with os.fdopen(descriptor, "wb") as file:
        try:
            with _naming(path):
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    _sync_directory(directory)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Add the path to an error of writing, which has no file name."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = path
        raise


@contextlib.contextmanager
def locked(directory: str) -> Iterator[None]:
    """Make a folder if it is missing, and let one process at a time run the block for it.

    The system releases the lock of a process that ends. On file systems without locks for folders
    (some NFS servers) any number of processes run the block.
    """
    try:
        os.makedirs(directory, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        text = "a file is in the place of a folder; remove the file or choose another path"
        raise NotADirectoryError(errno.ENOTDIR, text, error.filename) from None
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while _try_lock(descriptor) is False:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another process has been writing in {directory!r} for {_LOCK_SECONDS:g} s; "
                    "end that process if it hangs, or choose another folder"
                )
            time.sleep(_LOCK_PAUSE_SECONDS)
        yield
    finally:
        # A child forked in the block has the descriptor too: only an explicit unlock is enough.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Return True if the lock was free, False if not, None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _open_temporary(path: str) -> tuple[int, str]:
    """Return the descriptor of a new, locked temporary file, and its name."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    folder, name = os.path.split(path)
    while _LONGEST_NAME >= len(os.fsencode(name)) > _LONGEST_NAME - _ENDING:
        name = name[:-1]
    begin = os.path.join(folder, name)
    while True:
        temporary = f"{begin}.{os.urandom(8).hex()}{_TEMPORARY_SUFFIX}"
        try:
            descriptor = os.open(temporary, flags, 0o666)
        except OSError as error:
            error.filename = path
            raise
        # Before the lock is taken, another writer may delete the file as abandoned.
        if _try_lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
            return descriptor, temporary
        os.close(descriptor)


def _remove_abandoned(directory: str) -> None:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _TEMPORARY.search(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        free = _try_lock(descriptor)
        if free is None:
            free = time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_SECONDS
        if free:
            os.unlink(path)
    finally:
        os.close(descriptor)


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
