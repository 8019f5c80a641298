"""The choice of a group's members among the ranks that have sent a join request."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pycollective.launch.description import MAX_STREAMS
from pycollective.launch.handshake import HandshakeError

_MOST_MILLISECONDS = 1 << 40


def int_of(message: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return a number of a message."""
    value = message.get(name)
    if type(value) is not int or not low <= value <= high:
        raise HandshakeError(f"{name} is not a number from {low} to {high}")
    return value


def milliseconds_until(deadline: float) -> int:
    """Return the time until a deadline, for a message that the other side reads with `time_of`."""
    return int(min(max(0.0, 1000 * (deadline - time.monotonic())), _MOST_MILLISECONDS))


def time_of(message: Mapping[str, Any]) -> float:
    """Return the deadline of a message, on this process's clock (time.monotonic)."""
    return time.monotonic() + int_of(message, "milliseconds", 0, _MOST_MILLISECONDS) / 1000


def places_of(message: Mapping[str, Any], name: str) -> list[tuple[str, int]]:
    """Return a message's addresses and ports; raise HandshakeError or ValueError if invalid."""
    pairs = message.get(name, [])
    if not isinstance(pairs, list) or len(pairs) > MAX_STREAMS:
        raise HandshakeError(f"{name} is not a list of at most {MAX_STREAMS} addresses")
    places = []
    for pair in pairs:
        host, port = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else ("", 0)
        address = str(ipaddress.ip_address(str(host)))
        places.append((address, int_of({"port": port}, "port", 1, 65535)))
    return places


@dataclass(frozen=True, eq=False)
class Candidate:
    """A rank that has sent a join request.

    Attributes
    ----------
    place : tuple of str and int
        The address and port where it listens for its peers.
    claim : str
        The digest of its host's id, equal on ranks that may share memory.
    memory : str
        The name of the Unix socket over which it shares memory.
    process : str
        A random name of its process; a restarted rank has another one.
    deadline : float
        The time when it gives up, on rank 0's clock.
    waited : float
        Seconds for which it has tried to reach rank 0.
    more : sequence of tuple
        The addresses and ports where it listens at its other interfaces.
    """

    place: tuple[str, int]
    claim: str
    memory: str
    process: str
    deadline: float
    waited: float = 0.0
    more: Sequence[tuple[str, int]] = ()

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Candidate:
        """Return the rank of a join request; raise HandshakeError or ValueError if that is invalid."""
        host = str(ipaddress.ip_address(str(value.get("host"))))
        port = int_of(value, "port", 1, 65535)
        names = "claim", "memory", "process"
        claim, shared, process = (str(value.get(name, ""))[:64] for name in names)
        waited = int_of(value, "waited", 0, _MOST_MILLISECONDS) / 1000 if "waited" in value else 0.0
        more = places_of(value, "more")
        return cls((host, port), claim, shared, process, time_of(value), waited, more)


@dataclass
class Admissions:
    """The processes that an elastic group has admitted, and how many more it may admit.

    Processes that join and fail repeatedly could keep the others from ever saving a checkpoint. The
    group therefore admits only a limited number of new processes between two checkpoints, if the known
    ones are enough.
    """

    limit: int
    """Most new processes between two checkpoints."""
    left: int = field(init=False)
    known: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.left = self.limit

    def admit_members(self, processes: Iterable[str]) -> None:
        """Record the members of a group."""
        new = set(processes) - self.known
        self.left -= len(new)
        self.known |= new

    def has_saved(self) -> None:
        """Record a checkpoint, after which ``limit`` new processes may join again."""
        self.left = self.limit


def choose(
    joined: Mapping[int, Candidate],
    size: int,
    least: int,
    admissions: Admissions | None,
    is_late: bool,
) -> list[int]:
    """Return the sorted members of a group; an empty list while more ranks are needed.

    ``joined`` has the ranks that have sent a join request, and rank 0. If ``is_late``, ``least`` ranks
    are enough; a ``least`` of 0 requires all. ``admissions`` limits new processes beyond ``least``.
    """
    enough = is_late and 0 < least <= len(joined)
    if len(joined) < size and not enough:
        return []
    if admissions is None:
        return sorted(joined)
    known = [rank for rank in joined if not rank or joined[rank].process in admissions.known]
    new = sorted(rank for rank in joined if rank not in known)
    return sorted(known + new[: max(admissions.left, least - len(known), 0)])
