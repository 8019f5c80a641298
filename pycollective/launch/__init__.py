"""Join the group that the environment describes, and return its communicator.

``pycollective run`` creates the shared memory of a group on this host, and its processes inherit the
descriptor. No other process has it, so these ranks need no rendezvous and no secret. Processes of
several hosts, or with ``--transport tcp``, make a rendezvous over TCP at rank 0's address (`tcp`). They
prove to each other that they know the group's secret (`handshake`).
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pycollective import _core, observe, tuning
from pycollective.cluster.membership import membership_of_environment
from pycollective.comm import DEFAULT_TIMEOUT, Communicator, threads
from pycollective.comm.member import live
from pycollective.comm.split import SharedMemory
from pycollective.comm.tracing import group_made
from pycollective.environment import check, is_number, number
from pycollective.errors import RendezvousError
from pycollective.launch.ended import Ended

if TYPE_CHECKING:
    from pycollective.launch.description import Description
    from pycollective.launch.join_requests import JoinRequests
    from pycollective.launch.links import Findings
    from pycollective.launch.members import Roster
    from pycollective.launch.tls import Tls

__all__ = [
    "RendezvousError",
    "init_again",
    "host_and_port",
    "init",
    "is_listening",
    "launched_environment",
    "listen_for_join_requests",
    "rendezvous",
    "probe",
    "protection",
]

RANK = "PYCOLLECTIVE_RANK"
SIZE = "PYCOLLECTIVE_SIZE"
MEMORY = "PYCOLLECTIVE_MEMORY_FD"
TRANSPORT = "PYCOLLECTIVE_TRANSPORT"
ADDRESS = "PYCOLLECTIVE_ADDRESS"
SECRET = "PYCOLLECTIVE_SECRET"
SECRET_FILE = "PYCOLLECTIVE_SECRET_FILE"
INSECURE = "PYCOLLECTIVE_INSECURE"
INTERFACE = "PYCOLLECTIVE_SOCKET_IFNAME"
STREAMS = "PYCOLLECTIVE_SOCKET_STREAMS"
LISTENER = "PYCOLLECTIVE_LISTEN_FD"
HOST_ID = "PYCOLLECTIVE_HOST_ID"

_NO_THREADS = (
    f"{TRANSPORT}=thread, and this process is one rank of several: processes talk through 'shm' or "
    "'tcp'; pycollective.local_group makes ranks that are threads"
)

JOIN_TIMEOUT = 300.0
"""Seconds that the ranks wait for each other when a group is made."""
SHORTEST_SECRET = 16

_launched: weakref.WeakSet[Communicator] = weakref.WeakSet()
"""This process's communicator in the launcher's shared memory, while the program holds it."""
_kept: list[Communicator] = []
"""The same communicator, which `init_again` keeps for later calls."""


def forced(environment: Mapping[str, str]) -> str:
    """Return the transport that the environment forces: "thread", "shm" or "tcp"; empty for none.

    Raises
    ------
    ValueError
        If the variable has another value.
    """
    wanted = environment.get(TRANSPORT, "")
    if wanted not in ("", "shm", "thread", "tcp"):
        raise ValueError(
            f"{TRANSPORT}={wanted!r}: there are 'shm' (processes of one host), 'tcp' and 'thread'"
        )
    return wanted


def launched_environment(rank: int, size: int, descriptor: int) -> dict[str, str]:
    """Return the variables by which `init` in a launched process finds its group."""
    return {RANK: str(rank), SIZE: str(size), MEMORY: str(descriptor)}


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
        The environment contradicts itself, has a misspelt variable, or means several processes
        although this one would be alone. The rank is taken, the transport is not available, the
        secrets differ, or a rank does not join in time.
    """
    observe.settings()  # reports invalid settings before the wait for other ranks
    env = os.environ if environment is None else environment
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
        raise RendezvousError(_NO_THREADS)
    if wanted == "thread" or not (member.addresses or MEMORY in env):
        return _alone(timeout, member.source)
    if member.addresses:
        return rendezvous(
            member.rank,
            member.size,
            member.addresses,
            member.source,
            timeout=timeout,
            join_timeout=join_timeout,
            environment=env,
        )
    if wanted == "tcp":
        raise RendezvousError(
            f"{TRANSPORT}=tcp, and the launcher gave memory to share and no {ADDRESS}: start the "
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
        group = _core.ShmGroup.open(number(env, MEMORY, 0, 1 << 30))
        if group.size != size:
            raise ValueError(f"{SIZE} is {size}, and the group has {group.size} ranks")
        choices = tuning.given(env, group.transport, size)
        group.join(rank)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        raise RendezvousError(
            f"cannot join the group that {RANK}={env[RANK]!r}, {SIZE}={env[SIZE]!r} and "
            f"{MEMORY}={env[MEMORY]!r} describe: {error or 'no memory is left'}"
        ) from None
    communicator = Communicator(group, rank, timeout, SharedMemory(group))
    communicator._prefer(choices)
    who = f"rank {rank} of {size}, through shared memory"
    group_made(communicator, who, "pycollective run", "pycollective run's table")
    _launched.add(communicator)
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
        As of `init`.

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
    roster: Roster | None = None,
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
        As of `init`. The environment has the secret and other settings.
    least, patience : int, float
        After ``patience`` seconds ``least`` ranks are enough, if rank 0 is one of them. They are
        renumbered in their order. If members are lost during the rendezvous, the other ranks repeat it.
        A ``least`` of 0 requires all ranks, and the loss of one is an error.
    roster : Roster, optional
        Limits the new processes that rank 0 admits.

    Raises
    ------
    RendezvousError
        As `init`; `FirstRankLostError` if rank 0 is lost, or leaves this rank out.
    """
    from pycollective.launch import tcp  # imported here: a group in one process needs no sockets

    if not timeout > 0 or not join_timeout > 0:
        raise ValueError("timeout and join_timeout must be positive numbers of seconds")
    observe.settings()
    env = os.environ if environment is None else environment
    about = _described(env, rank, size, addresses)
    about.least, about.patience, about.roster = least, patience, roster
    ended = about.ended = Ended.of_environment(env, size, addresses[0])
    try:
        group, name, how, host = tcp.connect(about, join_timeout)
        if ended is not None:
            ended.has_connected(rank)
    finally:
        about.ended = None  # from now on the connections show which ranks have ended
        if ended is not None:
            ended.close()
    communicator = Communicator(group, about.rank, timeout, tcp.Addresses(about, host, group))
    communicator._prefer(about.choices.get(group.transport, []))
    trust = "authenticated" if about.secret else "without a secret"
    trust += ", control in TLS" if about.tls and about.size > 1 else ""
    who = f"group {name}: rank {about.rank} of {about.size}, {how}, {trust}"
    group_made(communicator, who, source, "rank 0's table")
    return communicator


def probe(
    rank: int,
    size: int,
    addresses: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Findings:
    """Test the links between all workers, together with the other workers.

    Parameters
    ----------
    rank, size, addresses, environment
        As of `rendezvous`.
    seconds : float
        The longest time that the test takes. The test ends earlier if all links work, or if all
        workers take part and nothing changes.

    Raises
    ------
    RendezvousError
        If this process cannot take part, for example because it cannot listen at its address.
    """
    from pycollective.launch.links import Probe

    about = _described(environment, rank, size, addresses)
    try:
        places = {r: host_and_port(address) for r, address in enumerate(addresses)}
        return Probe(about, addresses, places).run(seconds)
    except (ValueError, OSError) as error:
        raise RendezvousError(str(error)) from None


def listen_for_join_requests(
    addresses: Sequence[str], environment: Mapping[str, str] | None = None
) -> JoinRequests:
    """Listen at rank 0's address for workers that want to join while the group already works.

    Raises
    ------
    RendezvousError
        As `rendezvous`.
    """
    from pycollective.launch.join_requests import JoinRequests

    return JoinRequests(_described(environment, 0, len(addresses), addresses))


def is_listening(addresses: Sequence[str], environment: Mapping[str, str] | None = None) -> bool:
    """Return True if a process of the group listens at the first of the group's addresses.

    Raises
    ------
    RendezvousError
        As `rendezvous`.
    """
    from pycollective.launch import join_requests

    return join_requests.is_listening(_described(environment, 1, len(addresses), addresses))


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host and the port of ``host:port``; raise ValueError for any other text."""
    host, colon, digits = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not is_number(digits) or not 0 < int(digits) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(digits)


def _described(
    environment: Mapping[str, str] | None, rank: int, size: int, addresses: Sequence[str]
) -> Description:
    """Return the description of a group from its addresses and the settings of the environment.

    Raises
    ------
    RendezvousError
        If an address or a variable is wrong, or a file that a variable names cannot be read.
    """
    from pycollective.launch import description, memory

    env = os.environ if environment is None else environment
    try:
        host, port = host_and_port(addresses[0])
        own = host_and_port(addresses[rank]) if len(addresses) == size else None
        check(env)
        wanted = forced(env)
        if wanted == "thread":
            raise ValueError(_NO_THREADS)
        if size > description.MAX_RANKS:
            raise ValueError(f"{size} ranks are too many: {description.MAX_RANKS} are the most")
        return description.Description(
            rank,
            size,
            host,
            port,
            secret=_secret(env),
            insecure=bool(env.get(INSECURE)) and number(env, INSECURE, 0, 1) == 1,
            interface=env.get(INTERFACE, ""),
            streams=number(env, STREAMS, 1, description.MAX_STREAMS) if STREAMS in env else 1,
            host_id="" if wanted == "tcp" else env.get(HOST_ID) or memory.boot_id(),
            one_host=wanted == "shm",
            listener=number(env, LISTENER, 0, 1 << 30) if LISTENER in env and rank == 0 else -1,
            choices=tuning.tables(env, size) if rank == 0 else {},
            own=own,
            tls=_tls(env),
        )
    except (ValueError, OSError) as error:
        raise RendezvousError(str(error)) from None


def _secret(env: Mapping[str, str]) -> bytes:
    if SECRET in env:
        secret, source = env[SECRET].strip().encode(), SECRET
    elif SECRET_FILE in env:
        from pycollective.launch.secret import of_file

        source = SECRET_FILE
        try:
            secret = of_file(env[SECRET_FILE])
        except OSError as error:
            raise ValueError(
                f"{SECRET_FILE}={env[SECRET_FILE]!r} cannot be read: {error.strerror}"
            ) from None
        except ValueError as error:
            raise ValueError(f"{SECRET_FILE}={error}") from None
    else:
        return b""
    if len(secret) < SHORTEST_SECRET:
        raise ValueError(
            f"the secret of {source} has {len(secret)} bytes, and less than {SHORTEST_SECRET} can be "
            "guessed: python -c 'import secrets; print(secrets.token_hex())' makes a good one"
        )
    return secret


def protection(environment: Mapping[str, str] | None = None) -> str:
    """Return a text about the group's protection: the secret, its source, and TLS.

    Raises
    ------
    RendezvousError
        If the secret or the files for TLS cannot be used.
    """
    env = os.environ if environment is None else environment
    try:
        secret = _secret(env)
        tls = "control connections in TLS" if _tls(env) else "no TLS"
        insecure = bool(env.get(INSECURE)) and number(env, INSECURE, 0, 1) == 1
    except ValueError as error:
        raise RendezvousError(str(error)) from None
    if secret:
        return f"secret: of {SECRET if SECRET in env else SECRET_FILE}; {tls}"
    if insecure:
        return f"secret: none, and everybody on the network is trusted ({INSECURE}=1); {tls}"
    return f"secret: none, so only processes of this user on this machine are accepted; {tls}"


def _tls(env: Mapping[str, str]) -> Tls | None:
    if not any(name.startswith("PYCOLLECTIVE_TLS_") for name in env):
        return None
    from pycollective.launch import tls

    return tls.of_environment(env)


@atexit.register
def _leave_all() -> None:
    for communicator in list(live):
        if communicator._group.transport != "threads":  # threads end with the process
            communicator._close_at_exit()
    relay = sys.modules.get("pycollective.launch.relay")
    if relay is not None:
        relay.finish()
