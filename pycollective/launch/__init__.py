"""Join the group that the environment describes, and return its communicator.

``pycollective run`` creates the shared memory of a group on this host, and its processes inherit the
descriptor. No other process has the descriptor, so these ranks need no rendezvous and no secret.
Processes of several hosts, or with ``--transport tcp``, make a rendezvous over TCP at rank 0's
address (`tcp`). They prove to each other that they know the group's secret (`handshake`).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence

from pycollective import _core, observe, tuning
from pycollective.arguments import seconds
from pycollective.cluster.membership import membership_of_environment
from pycollective.comm import DEFAULT_TIMEOUT, Communicator, threads
from pycollective.comm.member import leave_processes
from pycollective.comm.split import SharedMemory
from pycollective.comm.tracing import group_made
from pycollective.environment import number
from pycollective.errors import RendezvousError, with_text
from pycollective.launch import tcp
from pycollective.launch.description import (
    ADDRESS,
    MEMORY,
    NO_THREADS,
    RANK,
    SIZE,
    TRANSPORT,
    Description,
    forced,
)
from pycollective.launch.ended import Ended
from pycollective.launch.members import Admissions

__all__ = [
    "RendezvousError",
    "init",
    "init_again",
    "leave_all",
    "rendezvous",
]

JOIN_TIMEOUT = 300.0
"""Seconds that the ranks wait for each other when a group is made."""
_MISSING_RANKS = (
    "Start the missing ranks; 'pycollective doctor', run by every rank instead of the program, tests "
    "the links"
)


class _ThreadRanks(threading.local):
    """The number of ranks in this thread's call of `spawn`, if the ranks are threads."""

    count = 1


thread_ranks = _ThreadRanks()
_launched: weakref.WeakSet[Communicator] = weakref.WeakSet()
"""This process's communicator in the launcher's shared memory, while the program holds it."""
_joined: set[tuple[int, int, int]] = set()
"""Process, inode of the memory and rank of each group in shared memory that was joined."""
_kept: list[Communicator] = []
"""The communicator in `_launched`, if `init_again` has made it and keeps it for later calls."""


def init(
    *,
    timeout: float = DEFAULT_TIMEOUT,
    join_timeout: float = JOIN_TIMEOUT,
    environment: Mapping[str, str] | None = None,
) -> Communicator:
    """Return this process's communicator in the group of its launcher.

    Environment variables identify the launcher: ``pycollective run``, ``TF_CONFIG``, torchrun,
    Kubeflow, ``mpirun`` of Open MPI, MPICH and Intel MPI, ``srun``, SageMaker, an indexed job of
    Kubernetes, or ``PYCOLLECTIVE_RANK``, ``PYCOLLECTIVE_SIZE`` and ``PYCOLLECTIVE_ADDRESS``. The table
    in ``docs/reference/launchers.md`` has their order of precedence. ``pycollective doctor`` and
    `pycollective.distribute.MultiWorkerMirroredStrategy` use the same table. Without a launcher the
    group has one rank, so the same script also runs alone.

    The ranks may start in any order. Ranks that prove to be on one host use shared memory, all others
    TCP. ``PYCOLLECTIVE_TRANSPORT=tcp`` or ``shm`` allows that transport only.

    Parameters
    ----------
    timeout : float
        Seconds that a call waits for the other ranks.
    join_timeout : float
        Seconds that `init` waits for the other ranks.
    environment : mapping, optional
        The environment, instead of ``os.environ``.

    Raises
    ------
    RendezvousError
        If the environment contradicts itself, has a misspelt variable, or describes several
        processes although this one would be alone. If the rank is taken, the transport is not
        available, the secrets differ, or a rank does not join in time.
    """
    observe.settings()  # reports invalid settings before the wait for other ranks
    timeout, join_timeout = seconds("timeout", timeout), seconds("join_timeout", join_timeout)
    env = os.environ if environment is None else environment
    if not isinstance(env, Mapping):
        raise TypeError(f"environment must be a mapping, such as os.environ, not {env!r}")
    try:
        wanted = forced(env)
        member = membership_of_environment(env)
    except ValueError as error:
        raise RendezvousError(str(error)) from None
    if member is None:
        if wanted in ("shm", "tcp"):
            raise RendezvousError(
                f"{TRANSPORT}={wanted} needs a launcher (pycollective run -n 2 script.py), or {RANK}, "
                f"{SIZE} and {ADDRESS}=host:port of rank 0"
            )
        return _alone(timeout, "nobody: no launcher's variables are set")
    if wanted == "thread" and member.size > 1:
        raise RendezvousError(NO_THREADS)
    if wanted == "thread" or not (member.addresses or MEMORY in env):
        return _alone(timeout, member.source)
    if member.addresses:
        try:
            return rendezvous(
                member.rank,
                member.size,
                member.addresses,
                member.source,
                timeout=timeout,
                join_timeout=join_timeout,
                environment=env,
            )
        except RendezvousError as error:
            if not error.ranks:
                raise
            raise with_text(error, f"{error}. {_MISSING_RANKS}") from None
    if wanted == "tcp":
        raise RendezvousError(
            f"{TRANSPORT}=tcp, but the launcher has set up shared memory and no {ADDRESS}: start the "
            "processes with pycollective run --transport tcp"
        )
    return _launched_in_memory(env, member.rank, member.size, timeout)


def _alone(timeout: float, source: str) -> Communicator:
    (alone,) = threads(1, timeout, source)
    return alone


def _launched_in_memory(
    env: Mapping[str, str], rank: int, size: int, timeout: float
) -> Communicator:
    """Join the shared memory that `pycollective run` has created."""
    try:
        memory = number(env, MEMORY, 0, 1 << 30)
        group = _core.ShmGroup.open(memory)
        if group.size != size:
            raise ValueError(f"{SIZE} is {size}, and the group has {group.size} ranks")
        place = os.getpid(), os.fstat(memory).st_ino, rank
        if place in _joined:
            raise ValueError(
                "this process has already joined the group: keep the communicator of the first init(), "
                "or split() it"
            )
        choices = tuning.given(env, group.transport, size)
        group.join(rank)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        raise RendezvousError(
            f"cannot join the group that {RANK}={env[RANK]!r}, {SIZE}={env[SIZE]!r} and "
            f"{MEMORY}={env[MEMORY]!r} describe: {error or 'out of memory'}"
        ) from None
    communicator = Communicator(group, rank, timeout, SharedMemory(group), choices=choices)
    who = f"rank {rank} of {size}, through shared memory"
    group_made(communicator, who, "pycollective run", "pycollective run's table")
    _launched.add(communicator)
    _joined.add(place)
    return communicator


def init_again(
    *, timeout: float = DEFAULT_TIMEOUT, join_timeout: float = JOIN_TIMEOUT
) -> Communicator:
    """Return a new communicator of all ranks at each call.

    A rank can join the shared memory of ``pycollective run`` only once. This function joins it if the
    program has not, keeps that communicator, and returns a new split of it at each call. Other
    groups make a new rendezvous. All ranks make the same calls in the same order.

    Parameters
    ----------
    timeout, join_timeout
        As in `init`.

    Raises
    ------
    CollectiveError
        As `init`, and as `Communicator.split`.
    """
    whole = next(iter(_launched), None)
    if whole is None:
        whole = init(timeout=timeout, join_timeout=join_timeout)
        if whole not in _launched:
            return whole
        _kept.append(whole)
    part = whole.split(0, timeout=join_timeout)
    assert part is not None
    part.timeout = timeout
    return part


def rendezvous(
    rank: int,
    size: int,
    addresses: Sequence[str],
    source: str,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    join_timeout: float = JOIN_TIMEOUT,
    environment: Mapping[str, str] | None = None,
    least: int = 0,
    patience: float = 0.0,
    admissions: Admissions | None = None,
) -> Communicator:
    """Return this process's communicator in a group with the given addresses.

    Parameters
    ----------
    rank, size : int
        This process's rank, and the number of ranks.
    addresses : sequence of str
        ``host:port`` of every rank, at which that rank then listens; or of rank 0 alone.
    source : str
        The origin of these values, for the log.
    timeout, join_timeout, environment
        As in `init`. The environment has the secret and other settings.
    least, patience : int, float
        After ``patience`` seconds ``least`` ranks are enough, if rank 0 is one of them. They are
        renumbered in their order. If members are lost during the rendezvous, the other ranks repeat it.
        A ``least`` of 0 requires all ranks, and the loss of one is an error.
    admissions : Admissions, optional
        Limits the new processes that rank 0 admits.

    Raises
    ------
    RendezvousError
        As `init`; `FirstRankLostError` if rank 0 is lost, or leaves this rank out.
    """
    timeout, join_timeout = seconds("timeout", timeout), seconds("join_timeout", join_timeout)
    observe.settings()
    env = os.environ if environment is None else environment
    about = Description.of_environment(env, rank, size, addresses)
    about.least, about.patience, about.admissions = least, patience, admissions
    about.ended = Ended.of_environment(env, size, addresses[0])
    group, name, how, hosts = tcp.connect(about, join_timeout)
    if about.ended is not None:
        about.ended.has_connected(rank)
        about.ended = None  # from now on the connections show which ranks have ended
    choices = about.choices.get(group.transport, [])
    factory = tcp.Addresses(about, hosts, group)
    communicator = Communicator(group, about.rank, timeout, factory, choices=choices)
    trust = "authenticated" if about.secret else "without a secret"
    trust += ", control in TLS" if about.tls and about.size > 1 else ""
    who = f"group {name}: rank {about.rank} of {about.size}, {how}, {trust}"
    group_made(communicator, who, source, "rank 0's table")
    return communicator


@atexit.register
def leave_all() -> None:
    """Leave all groups of processes at the end of this process, and send the last data."""
    leave_processes()
    relay = sys.modules.get("pycollective.launch.relay")
    if relay is not None:
        relay.finish()
