"""New groups of some ranks of a group: `split`."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pycollective import _core
from pycollective.errors import CollectiveError

if TYPE_CHECKING:
    from pycollective.comm.member import Member

_OFFER_BYTES = 256
_REASON_BYTES = 512


class Family(Protocol):
    """How the ranks of a group make a new one: the first of them offers it, all of them accept."""

    def offer(self, size: int) -> bytes:
        """Return where the group of so many ranks is to be found."""

    def accept(
        self, offer: bytes, rank: int, members: Sequence[int], seconds: float
    ) -> tuple[_core.Group, Family]:
        """Take a place in an offered group of these ranks."""


class Threads:
    """Ranks that are threads of one process: all of them have this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: Any = None
        self._number = 0
        # Offered groups, and how many ranks have not accepted yet.
        self._offered: dict[bytes, list[Any]] = {}

    def shared(self, make: Callable[[], Any]) -> Any:
        """Return the object that all ranks of the group have together, and make it if need be."""
        with self._lock:
            if self._shared is None:
                self._shared = make()
            return self._shared

    def offer(self, size: int) -> bytes:
        """Make the group."""
        with self._lock:
            self._number += 1
            name = struct.pack("=q", self._number)
            self._offered[name] = [_core.ThreadGroup(size), Threads(), size]
        return name

    def accept(
        self, offer: bytes, rank: int, members: Sequence[int], seconds: float
    ) -> tuple[_core.Group, Family]:
        """Find the group."""
        name = offer[:8]
        with self._lock:
            entry = self._offered[name]
            entry[2] -= 1
            if entry[2] == 0:
                del self._offered[name]
        return entry[0], entry[1]


class SharedMemory:
    """Ranks that are processes of one host: they open the memory that one of them has made.

    It has no name; it is reached through the descriptor of the process that made it, in /proc.
    """

    def __init__(self, group: _core.ShmGroup) -> None:
        self._group = group
        self._made: _core.ShmGroup | None = None

    def offer(self, size: int) -> bytes:
        """Make the memory; return process, descriptor, and what identifies the memory."""
        self._made = _core.ShmGroup.create(size, 0)
        descriptor = self._made.descriptor
        found = os.fstat(descriptor)
        return struct.pack("=qqqq", os.getpid(), descriptor, found.st_dev, found.st_ino)

    def accept(
        self, offer: bytes, rank: int, members: Sequence[int], seconds: float
    ) -> tuple[_core.Group, Family]:
        """Open the memory and join the group."""
        made, self._made = self._made, None
        group = made or self._open(offer)
        if group.size != len(members):
            raise CollectiveError(f"the new group has {group.size} ranks, and not {len(members)}")
        group.follow(self._group)  # a rank that dies is lost to both
        group.join(rank)
        return group, SharedMemory(group)

    @staticmethod
    def _open(offer: bytes) -> _core.ShmGroup:
        process, number, *identity = struct.unpack_from("=qqqq", offer)
        path = f"/proc/{process}/fd/{number}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if [found.st_dev, found.st_ino] != identity:
                    raise OSError(errno.ESTALE, "it is other memory")
                return _core.ShmGroup.open(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CollectiveError(
                f"cannot open the shared memory of the new group at {path}: {error.strerror}. The "
                "processes must be one user's and see each other in /proc; where that is not so, "
                "PYCOLLECTIVE_TRANSPORT=tcp works"
            ) from None


def split_groups(
    communicator: Member, color: int | None, key: int, seconds: float
) -> tuple[_core.Group, int, Family] | None:
    """Make the new groups; called by every rank of the communicator.

    Returns
    -------
    tuple or None
        This rank's new group, rank in it, and its family; None without a color.
    """
    made: tuple[_core.Group, Family] | None = None
    members: list[int] = []
    me = communicator.rank
    try:
        with communicator._between("split"):
            members = _members(communicator, color, key, seconds)
            made, problem = _make(communicator, members, seconds)
            _agree(communicator, color, members, problem, seconds)
    except BaseException:
        if made is not None:  # others may be in calls of the new group by now
            whole = communicator._group
            assert isinstance(whole, _core.Group)  # MPI makes its own new groups
            made[0].fail_as(whole, members)
            made[0].leave(members.index(me))
        raise
    return None if made is None else (made[0], members.index(me), made[1])


def _members(communicator: Member, color: int | None, key: int, seconds: float) -> list[int]:
    """Return the ranks of this rank's color in their new order; none without a color."""
    wanted = -1 if color is None or color < 0 else color
    table = communicator._gathered(np.array([[wanted, key]], np.int64), seconds)
    return sorted(
        (r for r in range(communicator.size) if wanted >= 0 and table[r, 0] == wanted),
        key=lambda r: (table[r, 1], r),
    )


def _make(
    communicator: Member, members: list[int], seconds: float
) -> tuple[tuple[_core.Group, Family] | None, Exception | None]:
    """Take this rank's place in the new group; return the group, or why that did not succeed."""
    family, me = communicator._family, communicator.rank
    assert family is not None
    offer = b""
    problem: Exception | None = None
    if members and members[0] == me:
        try:
            offer = family.offer(len(members))
        except (OSError, RuntimeError, MemoryError) as error:
            problem = error
    padded = np.frombuffer(offer.ljust(_OFFER_BYTES, b"\0"), np.uint8)
    offers = communicator._gathered(padded.reshape(1, -1), seconds)
    if not members or problem is not None:
        return None, problem
    place = offers[members[0]].tobytes()
    if not any(place):
        return None, CollectiveError(f"rank {members[0]} could not make the new group", ranks=[0])
    try:
        return family.accept(place, members.index(me), members, seconds), None
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        return None, error


def _agree(
    communicator: Member,
    color: int | None,
    members: list[int],
    problem: Exception | None,
    seconds: float,
) -> None:
    """Raise CollectiveError on all members where one has a problem.

    Nobody goes on with a group that is not whole.
    """
    reason = "" if problem is None else str(problem) or repr(problem)
    others = problem.ranks if isinstance(problem, CollectiveError) else ()
    is_cause = all(members[r] == communicator.rank for r in others)
    said = bytes([is_cause]) + reason.encode()[:_REASON_BYTES]
    # Who waits for the others in the new group waits longer here.
    padded = np.frombuffer(said.ljust(1 + _REASON_BYTES, b"\0"), np.uint8)
    failed = communicator._gathered(padded.reshape(1, -1), 2 * seconds)
    reasons = {r: _text_of(failed[r, 1:]) for r in members if failed[r, 1:].any()}
    if not reasons:
        return
    # A rank whose error is about another one has it because of that one.
    causes = {r: text for r, text in reasons.items() if failed[r, 0]} or reasons
    raise CollectiveError(
        f"the group of color {color} could not be made: "
        + "; ".join(f"rank {r}: {text}" for r, text in causes.items()),
        ranks=sorted(causes),
    ) from problem


def _text_of(said: Any) -> str:
    return str(said.tobytes().rstrip(b"\0").decode(errors="replace"))
