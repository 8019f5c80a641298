"""The description of a group that a process has before the rendezvous, from its environment."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pycollective import tuning
from pycollective.environment import MAX_RANKS, check, is_number, number
from pycollective.errors import RendezvousError
from pycollective.launch import secret

if TYPE_CHECKING:
    from pycollective.launch.ended import Ended
    from pycollective.launch.members import Admissions
    from pycollective.launch.tls import Tls

__all__ = [
    "MAX_RANKS",
    "MAX_STREAMS",
    "NO_THREADS",
    "Description",
    "FirstRankLostError",
    "forced",
    "host_and_port",
    "launched_environment",
    "protection",
]

RANK = "PYCOLLECTIVE_RANK"
SIZE = "PYCOLLECTIVE_SIZE"
MEMORY = "PYCOLLECTIVE_MEMORY_FD"
TRANSPORT = "PYCOLLECTIVE_TRANSPORT"
ADDRESS = "PYCOLLECTIVE_ADDRESS"
LISTENER = "PYCOLLECTIVE_LISTEN_FD"
_INSECURE = "PYCOLLECTIVE_INSECURE"
_STREAMS = "PYCOLLECTIVE_SOCKET_STREAMS"

NO_THREADS = (
    f"{TRANSPORT}=thread, but this process is one of several ranks: set it to 'shm' or 'tcp', or "
    "make ranks that are threads with pycollective.local_group"
)
MAX_STREAMS = 8


class FirstRankLostError(RendezvousError):
    """Rank 0 was lost during the rendezvous, or made the group without this rank.

    A new rendezvous may succeed.
    """


@dataclass
class Description:
    """The group, and this process in it, as the environment describes them.

    Attributes
    ----------
    rank, size : int
        This process's rank, and the number of ranks.
    host, port : str, int
        Rank 0's address.
    secret : bytes
        The group's secret; empty for none.
    insecure : bool
        True: the group trusts everybody on the network and needs no secret.
    interface : str
        The pattern of the network interfaces to use; empty for any.
    streams : int
        Connections for collectives between every two ranks. All ranks use rank 0's value.
    listener : int
        The descriptor of rank 0's listening socket if the launcher created it, else -1.
    host_id : str
        A text that is equal on ranks that may share memory; empty to use TCP only.
    one_host : bool
        True: report an error if not all ranks share memory.
    choices : tuning.Tables
        The tables for ``algorithm="auto"``. All ranks use rank 0's.
    own : tuple or None
        The host and port where this rank listens for its peers; None for any port.
    least, patience : int, float
        After ``patience`` seconds ``least`` ranks are enough, and are renumbered. 0: all must join.
    admissions : Admissions or None
        Rank 0's, if ``least`` is not 0.
    tls : Tls or None
        TLS for the connections of the rendezvous and for control connections.
    ended : Ended or None
        The ranks that have ended, as the launcher reports them.
    known_as : tuple of int
        In a split, the ranks' numbers in the group that was split.
    """

    rank: int
    size: int
    host: str
    port: int
    secret: bytes
    insecure: bool = False
    interface: str = ""
    streams: int = 1
    listener: int = -1
    host_id: str = ""
    one_host: bool = False
    choices: tuning.Tables = field(default_factory=dict)
    own: tuple[str, int] | None = None
    least: int = 0
    patience: float = 0.0
    admissions: Admissions | None = None
    tls: Tls | None = None
    ended: Ended | None = None
    known_as: tuple[int, ...] = ()

    @classmethod
    def of_environment(
        cls,
        environment: Mapping[str, str] | None,
        rank: int,
        size: int,
        addresses: Sequence[str],
    ) -> Description:
        """Return the description of a group; ``addresses`` has those of all ranks, or of rank 0 alone.

        Raises
        ------
        RendezvousError
            If an address or a variable is wrong, or a file that a variable names cannot be read.
        """
        env = os.environ if environment is None else environment
        try:
            host, port = host_and_port(addresses[0])
            own = host_and_port(addresses[rank]) if len(addresses) == size else None
            check(env)
            wanted = forced(env)
            if wanted == "thread":
                raise ValueError(NO_THREADS)
            if size > MAX_RANKS:
                raise ValueError(
                    f"a group of {size} ranks is too large: at most {MAX_RANKS} are supported"
                )
            return cls(
                rank,
                size,
                host,
                port,
                secret=secret.of_environment(env),
                insecure=_is_insecure(env),
                interface=env.get("PYCOLLECTIVE_SOCKET_IFNAME", ""),
                streams=number(env, _STREAMS, 1, MAX_STREAMS) if _STREAMS in env else 1,
                host_id="" if wanted == "tcp" else env.get("PYCOLLECTIVE_HOST_ID") or boot_id(),
                one_host=wanted == "shm",
                listener=number(env, LISTENER, 0, 1 << 30) if LISTENER in env and rank == 0 else -1,
                choices=tuning.tables(env, size) if rank == 0 else {},
                own=own,
                tls=_tls(env),
            )
        except (ValueError, OSError) as error:
            raise RendezvousError(str(error)) from None

    def title(self, rank: int) -> str:
        """Return the rank's name in messages."""
        return f"rank {self.known_as[rank] if self.known_as else rank}"

    def titles(self, ranks: Sequence[int]) -> str:
        """Return the names of some ranks in messages."""
        if len(ranks) == 1:
            return self.title(ranks[0])
        numbers = [self.known_as[r] if self.known_as else r for r in ranks[:20]]
        return "ranks " + ", ".join(map(str, numbers)) + (", …" if len(ranks) > 20 else "")


def launched_environment(rank: int, size: int, descriptor: int) -> dict[str, str]:
    """Return the variables by which `init` in a launched process finds its group."""
    return {RANK: str(rank), SIZE: str(size), MEMORY: str(descriptor)}


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
            f"{TRANSPORT}={wanted!r} is unknown: use 'shm' (processes of one host), 'tcp' or 'thread'"
        )
    return wanted


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host and the port of ``host:port``; raise ValueError for any other text."""
    host, colon, digits = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not is_number(digits) or not 0 < int(digits) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    return host, int(digits)


def boot_id() -> str:
    """Return the id of this host's kernel since it booted; empty if unknown."""
    if sys.platform != "linux":
        return ""  # neither memfd nor abstract sockets
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def protection(environment: Mapping[str, str] | None = None) -> str:
    """Return a text about the group's protection: the secret, its source, and TLS."""
    env = os.environ if environment is None else environment
    try:
        has_secret = bool(secret.of_environment(env))
        tls = "control connections in TLS" if _tls(env) else "no TLS"
        insecure = _is_insecure(env)
    except ValueError as error:
        raise RendezvousError(str(error)) from None
    if has_secret:
        return (
            f"secret: from {secret.SECRET if secret.SECRET in env else secret.SECRET_FILE}; {tls}"
        )
    if insecure:
        return f"secret: none, and everybody on the network is trusted ({_INSECURE}=1); {tls}"
    return f"secret: none, so only processes of this user on this machine are accepted; {tls}"


def _is_insecure(env: Mapping[str, str]) -> bool:
    return bool(env.get(_INSECURE)) and number(env, _INSECURE, 0, 1) == 1


def _tls(env: Mapping[str, str]) -> Tls | None:
    if not any(name.startswith("PYCOLLECTIVE_TLS_") for name in env):
        return None
    from pycollective.launch import tls  # loads OpenSSL

    return tls.of_environment(env)
