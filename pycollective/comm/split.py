"""New groups of some ranks of a group: `split`."""

from __future__ import annotations

import errno
import json
import os
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
_REPORT_BYTES = 6 * _REASON_BYTES + 16  # JSON may need six bytes for one byte of text


class GroupFactory(Protocol):
    """A way to make new groups: the first rank of a new group offers it, and all its ranks accept it."""

    def offer(self, size: int) -> Any:
        """Make a group of ``size`` ranks; return JSON by which the others can join it."""

    def accept(
        self, offer: Any, rank: int, members: Sequence[int], seconds: float
    ) -> tuple[_core.Group, GroupFactory]:
        """Join an offered group as rank ``rank``; ``members`` are its ranks in the old group.

        Return the group, and the factory for groups that are split from it.
        """


class Threads:
    """The factory of groups whose ranks are threads of one process; the ranks share this object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: Any = None
        self._number = 0
        # Offered groups, each with the number of ranks that have not joined yet.
        self._offered: dict[int, list[Any]] = {}

    def shared(self, make: Callable[[], Any]) -> Any:
        """Return an object that all ranks of the group share; the first rank makes it."""
        with self._lock:
            if self._shared is None:
                self._shared = make()
            return self._shared

    def offer(self, size: int) -> int:
        """Make the group; return its number."""
        with self._lock:
            self._number += 1
            self._offered[self._number] = [_core.ThreadGroup(size), Threads(), size]
            return self._number

    def accept(
        self, offer: int, rank: int, members: Sequence[int], seconds: float
    ) -> tuple[_core.Group, GroupFactory]:
        """Return the group."""
        with self._lock:
            entry = self._offered[offer]
            entry[2] -= 1
            if entry[2] == 0:
                del self._offered[offer]
        return entry[0], entry[1]


class SharedMemory:
    """The factory of groups whose ranks are processes of one host.

    One rank makes the memory of the group. The memory has no name: the other ranks open the
    descriptor of that rank in /proc.
    """

    def __init__(self, group: _core.ShmGroup) -> None:
        self._group = group
        self._made: _core.ShmGroup | None = None

    def offer(self, size: int) -> list[int]:
        """Make the memory; return process, descriptor, and device and inode of the memory."""
        self._made = _core.ShmGroup.create(size, 0)
        descriptor = self._made.descriptor
        found = os.fstat(descriptor)
        return [os.getpid(), descriptor, found.st_dev, found.st_ino]

    def accept(
        self, offer: list[int], rank: int, members: Sequence[int], seconds: float
    ) -> tuple[_core.Group, GroupFactory]:
        """Open the memory and join the group."""
        made, self._made = self._made, None
        group = made or self._open(offer)
        if group.size != len(members):
            raise CollectiveError(f"the new group has {group.size} ranks, not {len(members)}")
        group.follow(self._group)  # a process that ends is lost to both groups
        group.join(rank)
        return group, SharedMemory(group)

    @staticmethod
    def _open(offer: list[int]) -> _core.ShmGroup:
        process, number, *identity = offer
        path = f"/proc/{process}/fd/{number}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if [found.st_dev, found.st_ino] != identity:
                    raise OSError(errno.ESTALE, "the descriptor refers to other memory")
                return _core.ShmGroup.open(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CollectiveError(
                f"cannot open the shared memory of the new group at {path}: {error.strerror}. The "
                "processes must belong to one user and see each other in /proc. Otherwise set "
                "PYCOLLECTIVE_TRANSPORT=tcp"
            ) from None


def split_groups(
    communicator: Member, color: int | None, key: int, seconds: float
) -> tuple[_core.Group, int, GroupFactory] | None:
    """Make the new groups; return this rank's group, rank and factory, or None without a color.

    Every rank of the communicator makes this call. If a rank cannot join its new group, all ranks of
    that new group raise a `CollectiveError`.
    """
    made: tuple[_core.Group, GroupFactory] | None = None
    members: list[int] = []
    me = communicator.rank
    try:
        members = _members(communicator, color, key, seconds)
        with communicator._between("split"):
            made, problem = _make(communicator, members, seconds)
            _agree(communicator, color, members, problem, seconds)
    except BaseException:
        if made is not None:  # other ranks may already be in calls of the new group
            old = communicator._group
            assert isinstance(old, _core.Group)  # MPI does not come here
            made[0].fail_as(old, members)
            made[0].leave(members.index(me))
        raise
    return None if made is None else (made[0], members.index(me), made[1])


def _members(communicator: Member, color: int | None, key: int, seconds: float) -> list[int]:
    """Return the ranks of this rank's color in their new order; an empty list without a color."""
    wanted = -1 if color is None or color < 0 else color
    table = communicator._gathered(np.array([[wanted, key]], np.int64), seconds)
    return sorted(
        (r for r in range(communicator.size) if wanted >= 0 and table[r, 0] == wanted),
        key=lambda r: (table[r, 1], r),
    )


def _exchanged_json(communicator: Member, value: Any, most: int, seconds: float) -> list[Any]:
    """Return the values of all ranks, each at most ``most`` bytes of JSON."""
    data = json.dumps(value, ensure_ascii=False).encode().ljust(most)
    assert len(data) == most
    table = communicator._gathered(np.frombuffer(data, np.uint8).reshape(1, -1), seconds)
    return [json.loads(row.tobytes()) for row in table]


def _make(
    communicator: Member, members: list[int], seconds: float
) -> tuple[tuple[_core.Group, GroupFactory] | None, Exception | None]:
    """Join the new group; return the group, or the error of this rank."""
    factory, me = communicator._factory, communicator.rank
    assert factory is not None
    offer: Any = None
    problem: Exception | None = None
    if members and members[0] == me:
        try:
            offer = factory.offer(len(members))
        except (OSError, RuntimeError, MemoryError) as error:
            problem = error
    offers = _exchanged_json(communicator, offer, _OFFER_BYTES, seconds)
    if not members or problem is not None:
        return None, problem
    offer = offers[members[0]]
    if offer is None:
        return None, CollectiveError(f"rank {members[0]} could not make the new group", ranks=[0])
    try:
        return factory.accept(offer, members.index(me), members, seconds), None
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        return None, error


def _agree(
    communicator: Member, color: int | None, members: list[int], problem: Exception | None,
    seconds: float,
) -> None:  # fmt: skip
    """Raise a CollectiveError on all members if a member could not join."""
    reason = "" if problem is None else str(problem) or repr(problem)
    others = problem.ranks if isinstance(problem, CollectiveError) else ()
    # The error of a rank about another member is a consequence of that member's error.
    is_cause = all(members[r] == communicator.rank for r in others)
    report = [is_cause, reason.encode(errors="replace")[:_REASON_BYTES].decode(errors="replace")]
    # Another member may still wait for its deadline in the new group: wait longer here.
    reports = _exchanged_json(communicator, report, _REPORT_BYTES, 2 * seconds)
    reasons = {r: reports[r][1] for r in members if reports[r][1]}
    if not reasons:
        return
    causes = {r: text for r, text in reasons.items() if reports[r][0]} or reasons
    raise CollectiveError(
        f"the group of color {color} could not be made: "
        + "; ".join(f"rank {r}: {text}" for r, text in causes.items()),
        ranks=sorted(causes),
    ) from problem
