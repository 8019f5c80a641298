"""Find all errors in a description of a cluster at once, each with its key, task and address.

Errors in the description itself are always errors. Tests on this host, of names and of this process's
port, may fail for a correct description. For example, a name may resolve only when other containers run,
or an address may belong to a proxy in front of this host. Failures of such tests are doubts.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pycollective.cluster.spec import ClusterSpec
from pycollective.environment import is_number, shown

CHECK = "PYCOLLECTIVE_CHECK_ADDRESSES"
"""1: doubts about addresses are errors; 0: they are logged. The default is 0 in a container, else 1."""
_LOOKUP_SECONDS = 5.0
_AGAIN_SECONDS = 0.5
_MOST_RESOLVED = 64
"""The most names that each worker looks up. In larger clusters a worker looks up its own name and
worker 0's only. Otherwise the number of all requests would grow with the square of the number of
workers."""


class NoAddress(str):
    """A stand-in for an address that is not a text; the problem has been reported already."""

    __slots__ = ()


@dataclass
class Examined:
    """A description as far as it is valid, and its problems.

    Attributes
    ----------
    cluster : ClusterSpec
        The valid part of the description.
    task_type : str or None
        This process's job.
    task_id : int or None
        This process's number within the job.
    problems : list of str
        The problems, a sentence each.
    knows_task : bool
        True if the task is valid enough to be looked up in the cluster.
    """

    cluster: ClusterSpec
    task_type: str | None
    task_id: int | None
    problems: list[str] = field(default_factory=list)
    knows_task: bool = True


@dataclass(frozen=True)
class TaskAddress:
    """A task, the key of its address in the description, and the address."""

    task: str
    key: str
    address: str

    def __str__(self) -> str:
        return f"{self.key} ({self.task})"


def places_of(cluster: ClusterSpec, jobs: Sequence[str]) -> list[TaskAddress]:
    """Return the tasks of the jobs, if the cluster has these jobs."""
    return [
        TaskAddress(f"{job} {i}", f"cluster[{job!r}][{i}]", cluster.task_address(job, i))
        for job in jobs
        if job in cluster.jobs
        for i in cluster.task_indices(job)
    ]


def host_and_port_of(address: str) -> tuple[str, int] | None:
    """Return the host and the port of an address, or None if it is not ``host:port``."""
    host, colon, port = address.rpartition(":")
    if not colon or not is_number(port) or not 0 < int(port) < 65536:
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or any(c in "/[]@" or c.isspace() for c in host):
        return None
    if ":" in host:
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return None
    return host, int(port)


def address_problems(places: Sequence[TaskAddress]) -> list[str]:
    """Return a problem for each address that is invalid or that another task has too."""
    found: list[str] = []
    seen: dict[tuple[str, int], TaskAddress] = {}
    for place in places:
        if isinstance(place.address, NoAddress):
            continue
        where = host_and_port_of(place.address)
        if where is None:
            scheme = place.address.partition("://")[0] + "://"
            hint = f" (leave out {shown(scheme)})" if place.address.startswith(scheme) else ""
            found.append(
                f"{place.key} is {shown(place.address)}, which is not host:port with a port from 1 to "
                f"65535{hint}"
            )
            continue
        where = where[0].lower(), where[1]
        if where in seen:
            found.append(
                f"{place.key} and {seen[where].key} have the same address {place.address}: each task "
                "needs its own"
            )
        else:
            seen[where] = place
    return found


def are_errors(environ: Mapping[str, str]) -> bool:
    """Return True if doubts about names and addresses are errors.

    Raises ValueError if ``PYCOLLECTIVE_CHECK_ADDRESSES`` is neither 0 nor 1.
    """
    said = environ.get(CHECK, "")
    if said not in ("", "0", "1"):
        raise ValueError(f"{CHECK}={said!r}: must be 0 or 1")
    return said == "1" or (not said and not _in_container(environ))


def _in_container(environ: Mapping[str, str]) -> bool:
    marks = ("/.dockerenv", "/run/.containerenv")
    return "KUBERNETES_SERVICE_HOST" in environ or any(Path(mark).exists() for mark in marks)


def problems_here(
    places: Sequence[TaskAddress], own: int | None, listens: bool
) -> tuple[list[str], list[str]]:
    """Look up the names, and test this process's port.

    Parameters
    ----------
    places : sequence of TaskAddress
        Tasks with addresses ``host:port``, worker 0 first.
    own : int or None
        Index of this process in ``places``, if it is there.
    listens : bool
        True if a socket already listens at this process's port, so that the port cannot be tested.

    Returns
    -------
    tuple
        Two lists: errors, and doubts. A doubt is no error if this host is reached through another one,
        or if names resolve later.
    """
    named = list(range(len(places)))
    if len(places) > _MOST_RESOLVED:
        named = sorted({0} | ({own} if own is not None else set()))
    found = dict(zip(named, _resolve_all([places[i] for i in named]), strict=True))
    wrong: list[str] = []
    doubtful: list[str] = []
    seen: dict[Any, TaskAddress] = {}
    for i, resolved in found.items():
        place = places[i]
        if isinstance(resolved, str):
            doubtful.append(
                f"{place} is {place.address}, and the name does not resolve here: {resolved}"
            )
            continue
        where = resolved[1][:2]
        first = seen.setdefault(where, place)
        if first.address.lower() != place.address.lower():
            wrong.append(
                f"{place} and {first} are {place.address} and {first.address}, which is one address, "
                f"{where[0]}: each task needs its own"
            )
        if i != own or listens:
            continue
        problem = _cannot_listen(*resolved)
        if problem == errno.EADDRNOTAVAIL:
            text = (
                f"{place}, this process, is {place.address}, which is not an address of this host"
            )
            others_here = [
                j for j, r in found.items() if j != own and not isinstance(r, str) and _is_own(*r)
            ]
            if others_here:
                other = places[others_here[0]]
                wrong.append(
                    f"{text}, but {other}, {other.address}, is: this process has another task's "
                    "number"
                )
            else:
                doubtful.append(
                    f"{text}: other workers could reach it only through a host that has the address"
                )
        elif problem:
            taken = problem == errno.EADDRINUSE
            wrong.append(
                f"{place}, this process, is {place.address}, where no socket can listen: "
                + os.strerror(problem)
                + ". Another process may use it: a second task, or an earlier one that still runs"
                * taken
            )
    return wrong, doubtful


_Resolved = tuple[int, tuple[Any, ...]]
"""An address family, and an address as the socket module returns it."""


def _resolve_all(places: Sequence[TaskAddress]) -> list[_Resolved | str]:
    """Return the address of each place, or the reason why there is none; all are asked at once."""
    found: list[_Resolved | str] = [f"no answer within {_LOOKUP_SECONDS:g} s"] * len(places)

    def ask(i: int, flags: int = 0) -> None:
        where = host_and_port_of(places[i].address)
        assert where is not None
        for again in (True, False):
            try:
                got = socket.getaddrinfo(*where, type=socket.SOCK_STREAM, flags=flags)[0]
                found[i] = int(got[0]), got[4]
                return
            except UnicodeError as error:
                found[i] = str(error)
                return
            except OSError as error:
                found[i] = str(error.strerror or error)
                if error.errno != socket.EAI_AGAIN or not again:
                    return
                time.sleep(_AGAIN_SECONDS)

    threads = []
    for i in range(len(places)):
        ask(i, socket.AI_NUMERICHOST)
        if isinstance(found[i], str):
            found[i] = f"no answer within {_LOOKUP_SECONDS:g} s"
            threads.append(threading.Thread(target=ask, args=(i,), daemon=True))
            threads[-1].start()
    until = time.monotonic() + _LOOKUP_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return list(found)


def _cannot_listen(family: int, address: tuple[Any, ...]) -> int:
    """Return the number of the error that `bind` gives for an address, 0 if there is none.

    The socket never listens: a worker that tries to connect is refused, and tries again.
    """
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _is_own(family: int, address: tuple[Any, ...]) -> bool:
    """Return True if the address belongs to this host and is not a loopback address."""
    if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        return False
    return not _cannot_listen(family, (address[0], 0, *address[2:]))
