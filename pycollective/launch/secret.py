"""Files with a secret: that of a group, or the key of this user.

The files' modes are checked, because everyone who can read a secret can join the group.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pycollective.errors import RendezvousError

SECRET = "PYCOLLECTIVE_SECRET"
SECRET_FILE = "PYCOLLECTIVE_SECRET_FILE"
_SHORTEST = 16
_LONGEST = 1 << 16
_NAME = "pycollective.key"
_BYTES = 64
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC
_INSTEAD = "set PYCOLLECTIVE_SECRET to the same long random text on every rank"


def of_environment(env: Mapping[str, str]) -> bytes:
    """Return the group's secret; empty if the environment has none."""
    if SECRET in env:
        secret, source = os.fsencode(env[SECRET].strip()), SECRET
    elif SECRET_FILE in env:
        source, path = SECRET_FILE, env[SECRET_FILE]
        try:
            secret = _of_file(path)
        except OSError as error:
            raise ValueError(f"{SECRET_FILE}={path!r} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{SECRET_FILE}={error}") from None
    else:
        return b""
    if len(secret) < _SHORTEST:
        raise ValueError(
            f"the secret in {source} has {len(secret)} bytes, but needs at least {_SHORTEST}: make one "
            "with python -c 'import secrets; print(secrets.token_hex())'"
        )
    return secret


def _of_file(path: str) -> bytes:
    """Return the secret in a file; if this user owns the file, no other user may have access.

    The modes of other owners' files are ignored: Kubernetes and Docker mount secrets that root owns.
    """
    with open(path, "rb") as file:
        check_private(path, os.fstat(file.fileno()))
        secret = file.read(_LONGEST + 1)
    if len(secret) > _LONGEST:
        raise ValueError(f"{path!r} has more than {_LONGEST:,} bytes, which is no secret")
    return secret.strip()


def check_private(path: str, found: os.stat_result) -> None:
    """Raise ValueError if this user owns the file and other users can use it."""
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and mode & 0o077:
        raise ValueError(
            f"{path!r} has mode {mode:04o}, so other users can use the secret in it: "
            f"chmod 600 {path} (in a Kubernetes volume: defaultMode: 0400)"
        )


def of_user() -> bytes:
    """Return a random key that only processes of this user on this machine can read.

    The first process that needs the key creates it. The key's file is in the first folder that
    belongs to this user and that no other user can enter. The folders are ``$XDG_RUNTIME_DIR``,
    ``/run/user/<uid>``, and ``pycollective-<uid>`` in the folder for temporary files.
    """
    where = ""
    try:
        where = str(_folder() / _NAME)
        descriptor = os.open(where, os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
        with open(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # only one of several processes creates the key
            _check(where, os.fstat(file.fileno()), stat.S_ISREG, "a regular file")
            key = file.read()
            if not key:
                key = secrets.token_hex(_BYTES // 2).encode()
                file.write(key)
        if len(key) != _BYTES:
            raise ValueError(f"{where} has {len(key)} bytes, not {_BYTES}: delete it")
    except (OSError, ValueError) as error:
        reason = f"{error.strerror}: {where}" if isinstance(error, OSError) else str(error)
        raise RendezvousError(
            "the group has no secret, so ranks prove with a file of this user that they belong to "
            f"one user. That file cannot be used ({reason}): {_INSTEAD}"
        ) from None
    return key


def is_same_user(sock: socket.socket) -> bool:
    """Return True if the other end of a Unix socket is a process of this user.

    Root counts as another user, because root's processes would in turn reject this user's.
    """
    if sys.platform != "linux":
        return False
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


def _folder() -> Path:
    for folder in _runtime_folders():
        with contextlib.suppress(OSError, ValueError):
            _check(str(folder), folder.stat(), stat.S_ISDIR, "a folder")
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    folder = Path(tempfile.gettempdir()) / f"pycollective-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    _check(str(folder), folder.lstat(), stat.S_ISDIR, "a folder")
    return folder


def _runtime_folders() -> Iterator[Path]:
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(named):
        yield Path(named)
    yield Path(f"/run/user/{os.geteuid()}")  # the usual value of XDG_RUNTIME_DIR


def _check(where: str, found: os.stat_result, is_kind: Callable[[int], bool], kind: str) -> None:
    """Raise ValueError unless ``where`` is of this kind and only this user owns and can use it."""
    mode = stat.S_IMODE(found.st_mode)
    if not is_kind(found.st_mode):
        raise ValueError(f"{where} is not {kind}")
    if found.st_uid != os.geteuid():
        raise ValueError(f"{where} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if mode & 0o077:
        raise ValueError(
            f"{where} has mode {mode:04o}, so other users can use it: chmod go= {where}"
        )
