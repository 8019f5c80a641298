"""Distribute worker 0's address and a secret through MPI, for ``mpirun`` on several hosts.

The package mpi4py is needed. The address and the secret travel as plain bytes over MPI's own
network.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import socket
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from pycollective.cluster.ports import reserved_address

_SECRETS = ("PYCOLLECTIVE_SECRET", "PYCOLLECTIVE_SECRET_FILE", "PYCOLLECTIVE_INSECURE")
_BYTES = 256  # for a host's name, and for an address with a secret


_agreed: dict[int, tuple[str, str]] = {}
"""Worker 0's address, and the secret that it has made or an empty text, by the number of processes."""


def worker_0(size: int, environ: Mapping[str, str]) -> str:
    """Return worker 0's address; a collective call of all processes, made once.

    Unless worker 0 has a secret or ``PYCOLLECTIVE_INSECURE`` in ``environ``, it makes a secret for all
    processes. That becomes ``PYCOLLECTIVE_SECRET`` in ``environ``.
    """
    if size not in _agreed:
        _agreed[size] = _asked(size, environ)
    address, secret = _agreed[size]
    if secret and isinstance(environ, MutableMapping):
        environ["PYCOLLECTIVE_SECRET"] = secret
    return address


def _asked(size: int, environ: Mapping[str, str]) -> tuple[str, str]:
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError):  # mpi4py without an MPI library
        raise LookupError(
            "mpi4py, which could ask MPI, is not installed or does not work"
        ) from None
    world = mpi.COMM_WORLD
    if world.size != size:
        raise LookupError(
            f"mpi4py sees {world.size} of the processes: it uses another MPI library than mpirun"
        )
    names = np.zeros((size, _BYTES), np.uint8)
    world.Allgather(_padded(mpi.Get_processor_name()), names)
    said = np.zeros(_BYTES, np.uint8)
    if world.rank == 0:
        address = reserved_address(_own_address([_text(name) for name in names]))
        secret = "" if any(name in environ for name in _SECRETS) else secrets.token_hex(32)
        said = _padded(f"{address} {secret}")
    world.Bcast(said, 0)
    address, _, secret = _text(said).partition(" ")
    return address, secret


def _own_address(hosts: list[str]) -> str:
    """Return the address of this process, the first one, as seen from other hosts."""
    for other in hosts:
        if other != hosts[0]:
            with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as sock:
                sock.connect((other, 9))  # sends nothing, but determines the local address
                return str(sock.getsockname()[0])
    try:
        return socket.gethostbyname(hosts[0])
    except OSError as error:
        raise LookupError(f"the address of {hosts[0]} is not known: {error.strerror}") from None


def _padded(text: str) -> Any:
    return np.frombuffer(text.encode()[:_BYTES].ljust(_BYTES, b"\0"), np.uint8).copy()


def _text(data: Any) -> str:
    return bytes(data).rstrip(b"\0").decode(errors="replace")
