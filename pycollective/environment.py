"""Environment variables that the package reads: one table, and functions that read numbers.

A variable whose name begins with ``PYCOLLECTIVE_`` and is not in the table has no effect. If its name
looks like a misspelt one of the table, `check` raises an error, else it logs a warning.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from pycollective import _core

_log = logging.getLogger("pycollective")

MAX_RANKS = 1024
"""The most processes that a group may have."""
PREFIX = "PYCOLLECTIVE_"
VARIABLES = {
    "PYCOLLECTIVE_RANK": "the number of this process in its group, from 0",
    "PYCOLLECTIVE_SIZE": "the number of processes in the group",
    "PYCOLLECTIVE_ADDRESS": "host:port on which rank 0 listens",
    "PYCOLLECTIVE_MEMORY_FD": "set by `pycollective run`: the descriptor of the shared memory",
    "PYCOLLECTIVE_LISTEN_FD": "set by `pycollective run`: the descriptor of this process's listening "
    "socket",
    "PYCOLLECTIVE_ENDED_FD": "set by `pycollective run`: the descriptor of the list of ended ranks",
    "PYCOLLECTIVE_CHOICES": "set by `pycollective run`: the table of algorithms for all ranks",
    "PYCOLLECTIVE_ARENA": "bytes of address space for each rank's shared arrays; 64 GiB unless set, "
    "0: none",
    "PYCOLLECTIVE_TRANSPORT": "force a transport. `tcp`: also between ranks of one host; `shm`: an "
    "error if a rank is on another host; `thread`: an error with several processes",
    "PYCOLLECTIVE_SECRET": "the secret of the group, at least 16 bytes, the same on every rank. "
    "Without it only processes of the same user on the same machine join",
    "PYCOLLECTIVE_SECRET_FILE": "a file that holds the secret; if you own it, its mode must "
    "exclude all other users",
    "PYCOLLECTIVE_INSECURE": "1: accept addresses beyond loopback without a secret",
    "PYCOLLECTIVE_TLS_CERT": "a file with this rank's certificate, in PEM, valid for client and "
    "server",
    "PYCOLLECTIVE_TLS_KEY": "a file with the key of the certificate, in PEM, of mode 0600",
    "PYCOLLECTIVE_TLS_CA": "a file with the certificate of the cluster's own authority, in PEM",
    "PYCOLLECTIVE_SOCKET_IFNAME": "the network interfaces through which a rank and its peers connect. "
    "In NCCL's grammar: `eth,ib` beginnings of names, `=eth0,eth1` exact names that must exist, `^` all "
    "others. Streams use the interfaces in turn; control and messages use the first one",
    "PYCOLLECTIVE_SOCKET_STREAMS": "the number of connections of every two ranks for collectives, "
    "1 to 8; rank 0's value counts",
    "PYCOLLECTIVE_HOST_ID": "an identifier of this host instead of its boot id",
    "PYCOLLECTIVE_CHECK_ADDRESSES": "1: wrong names and addresses are errors; 0: they are logged. "
    "Unless set, 0 in a container, else 1",
    "PYCOLLECTIVE_JOBS": "the jobs of a JobSet of Kubernetes, as `leader:1x1,workers:2x4`: name, number "
    "of jobs, pods of each job",
    "PYCOLLECTIVE_LOCAL_RANK": "the number of this process in its pod, from 0",
    "PYCOLLECTIVE_LOCAL_SIZE": "the number of processes in each pod",
    "PYCOLLECTIVE_HEARTBEAT": "seconds after which a silent worker is lost, 8 unless set; `inf`: never",
    "PYCOLLECTIVE_NCCL_LIBRARY": "the libnccl to use, unless the process has loaded one",
    "PYCOLLECTIVE_TUNING": "the file with the table of algorithms of this machine, instead of the one "
    "in the user's cache; `none`: the built-in table only",
    "PYCOLLECTIVE_DATA": "the folder of the data sets",
    "PYCOLLECTIVE_DEBUG": "`INFO` or `TRACE`: log groups, or also calls",
    "PYCOLLECTIVE_WARN_AFTER": "seconds after which a waiting call names the missing ranks, 10 unless "
    "set; `inf`: never",
    "PYCOLLECTIVE_TIMELINE": "the file or folder of the timeline",
}
"""The site's page of environment variables is made from this table (`docs/generated.py`)."""
_OF_OUR_TESTS = ("PYCOLLECTIVE_TEST_", "PYCOLLECTIVE_SANITIZED", "PYCOLLECTIVE_QUICK")
_LIKE = 0.75
"""Similarity, as `difflib` measures it, from which on a name counts as a misspelt one."""

_warned: set[str] = set()


def check(environ: Mapping[str, str]) -> None:
    """Log a warning for each variable with the package's prefix that the package does not read.

    Raises
    ------
    ValueError
        The name of such a variable looks like a misspelt one of the table.
    """
    unknown = sorted(
        name
        for name in environ
        if name.startswith(PREFIX) and name not in VARIABLES and not name.startswith(_OF_OUR_TESTS)
    )
    known = [name.removeprefix(PREFIX) for name in VARIABLES]
    for name in unknown:
        like = difflib.get_close_matches(name.removeprefix(PREFIX), known, 1, _LIKE)
        if like:
            raise ValueError(
                f"{name} is set, but pycollective reads no such variable: did you mean "
                f"{PREFIX}{like[0]}?"
            )
        if name not in _warned:
            _warned.add(name)
            _log.warning("%s is set, but pycollective reads no such variable", name)


def shown(value: Any) -> str:
    """Return the `repr` of a value, shortened to a line, for an error message."""
    text = repr(value[:200] if isinstance(value, (str, list)) else value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def is_number(text: str) -> bool:
    """Return True for a whole number of at most 18 ASCII digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


def number(environ: Mapping[str, str], name: str, low: int, high: int | None = None) -> int:
    """Return the whole number in a variable.

    Raises
    ------
    ValueError
        The variable is not set, or its value is not a number from ``low`` to ``high``.
    """
    text = environ.get(name, "").strip()
    value = int(text) if is_number(text) else low - 1
    if value < low or (high is not None and value > high):
        to = "" if high is None else f" to {high}"
        raise ValueError(f"{name}={shown(text)} is not a number from {low}{to}")
    return value


def arena_bytes(environ: Mapping[str, str]) -> int:
    """Return the bytes of address space for a rank's shared arrays; see `pycollective.shared_arrays`."""
    name = "PYCOLLECTIVE_ARENA"
    return number(environ, name, 0, 1 << 45) if environ.get(name) else _core.ARENA_BYTES


def enumerated(names: Iterable[str]) -> str:
    """Return names with a verb: ``"A is"``, ``"A and B are"``, ``"A, B and C are"``."""
    *rest, last = names
    return f"{', '.join(rest)} and {last} are" if rest else f"{last} is"
