"""Rank 0's side of a rendezvous: which ranks have come, and which of them are the members.

The members are chosen once. Whoever comes after that is asked to come later, and never changes the
numbers of the others. A group that loses a member before it is made is made again by the rest: rank 0
calls the roll, and whoever does not answer in time is left out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pycollective.rendezvous.description import MAX_RANKS, Description
from pycollective.rendezvous.door import STRANGER_SECONDS
from pycollective.rendezvous.handshake import Channel, HandshakeError

__all__ = ["Gathering", "int_of", "milliseconds_until", "time_of"]

_LATER = {"later": True}
_MOST_MILLISECONDS = 1 << 40


def int_of(message: dict[str, Any], name: str, low: int, high: int) -> int:
    """Return a number of a message.

    Raises
    ------
    HandshakeError
        If it is not there, or out of bounds.
    """
    value = message.get(name)
    if type(value) is not int or not low <= value <= high:
        raise HandshakeError(f"{name} is not a number from {low} to {high}")
    return value


def milliseconds_until(deadline: float) -> int:
    """Return the time that is left, for a message that the other side reads with `time_of`."""
    return int(min(max(0.0, 1000 * (deadline - time.monotonic())), _MOST_MILLISECONDS))


def time_of(message: dict[str, Any]) -> float:
    """Return the deadline of a message, on this process's clock (time.monotonic).

    Raises
    ------
    HandshakeError
        If the message has none.
    """
    return time.monotonic() + int_of(message, "milliseconds", 0, _MOST_MILLISECONDS) / 1000


@dataclass
class Candidate:
    """A rank that has come."""

    channel: Channel
    place: tuple[str, int]
    """Host and port on which it listens for its peers."""
    claim: str
    """What it says of its host; equal on ranks that may share memory."""
    process: str
    """A random name of its process: a rank that was started again has another one."""
    deadline: float
    """When it gives up, on rank 0's clock."""


class Gathering:
    """The ranks that have come to rank 0.

    Parameters
    ----------
    about : Description
        The whole group.
    changed : Condition
        Guards what is here, and is notified when somebody comes.

    Attributes
    ----------
    came : dict
        The candidates, by their rank in the whole group.
    members : list of int or None
        The ranks that are chosen, in their order; None while others may come.
    """

    def __init__(self, about: Description, changed: threading.Condition) -> None:
        self._size = about.size
        self._least = about.least
        self._roster = about.roster
        self._changed = changed
        self.came: dict[int, Candidate] = {}
        self.members: list[int] | None = None

    def enter(self, channel: Channel, hello: dict[str, Any]) -> None:
        """Let a rank come that has proved to belong to the group; tell it why not otherwise."""
        soon = time.monotonic() + STRANGER_SECONDS
        try:
            if hello.get("purpose") != "join":
                raise HandshakeError("this is not where ranks meet")
            size = int_of(hello, "size", 1, MAX_RANKS)
            if size != self._size:
                raise HandshakeError(
                    f"the group has {self._size} ranks for rank 0, and {size} for you"
                )
            rank = int_of(hello, "rank", 1, self._size - 1)
            if self.members is None:
                channel.send({"welcome": True}, soon)
                place = channel.receive(soon)
                host = str(ipaddress.ip_address(str(place.get("host"))))
                port = int_of(place, "port", 1, 65535)
                claim, process = (str(place.get(name, ""))[:64] for name in ("claim", "process"))
                until = time_of(place)
                answer = self._add(rank, Candidate(channel, (host, port), claim, process, until))
            else:
                answer = _LATER
        except (HandshakeError, ValueError) as error:
            answer = {"error": str(error)}
        if answer:
            with contextlib.closing(channel):
                channel.send(answer, soon)

    def _add(self, rank: int, candidate: Candidate) -> dict[str, Any]:
        """Return an empty answer, or why the candidate cannot come."""
        with self._changed:
            if self.members is not None:  # they were chosen while this one was greeted
                return _LATER
            before = self.came.get(rank)
            if before is not None and not before.channel.ended():
                return {"error": f"rank {rank} is taken: every process needs its own"}
            if before is not None:  # it was started again
                self.came.pop(rank).channel.close()
            self.came[rank] = candidate  # behind all that came before
            self._changed.notify_all()
            return {}

    def choose(self, is_late: bool) -> list[int]:
        """Choose the members if all ranks are there, or it is late and enough of them are.

        Parameters
        ----------
        is_late : bool
            Whether the patience for the others is over.

        Returns
        -------
        list of int
            The ranks that are waited for; empty when the members are chosen.
        """
        with self._changed:
            others = range(1, self._size)
            there = [r for r in others if r in self.came and not self.came[r].channel.ended()]
            enough = is_late and 0 < self._least <= 1 + len(there)
            if len(there) < len(others) and not enough:
                return [r for r in others if r not in there]
            self._keep(self._let_in(there))
            return []

    def first_to_give_up(self) -> tuple[float, int]:
        """Return the earliest deadline of those that have come, and whose it is."""
        with self._changed:
            return min(
                ((c.deadline, r) for r, c in self.came.items() if not c.channel.ended()),
                default=(math.inf, 0),
            )

    def _let_in(self, there: list[int]) -> list[int]:
        """Return the ranks that become members: new processes only as far as the roster has room."""
        if self._roster is None:
            return there
        known = [r for r in there if self.came[r].process in self._roster.known]
        new = [r for r in there if r not in known]
        room = max(self._roster.left, self._least - 1 - len(known), 0)
        return sorted(known + new[:room])

    def _keep(self, ranks: list[int]) -> None:
        """Make members of some of those that have come; the others are to come later."""
        for rank in self.came.keys() - set(ranks):
            with contextlib.closing(self.came.pop(rank).channel) as channel:
                _send(channel, _LATER)
        if self._roster is not None:
            self._roster.let_in({self.came[r].process for r in ranks})
        self.members = [0, *ranks]

    def call_roll(self, number: int, seconds: float, watch: Callable[[], None]) -> list[int]:
        """Ask the members who is still there, and keep those that answer.

        Enough of them are the members of the next group; otherwise others may come again.

        Parameters
        ----------
        number : int
            Of this roll call, which the answers repeat.
        seconds : float
            How long to wait for answers.
        watch : callable
            Called now and then; raises if there is no use in waiting.

        Returns
        -------
        list of int
            The ranks that did not answer.
        """
        self.tell_all({"again": number})
        waiting = {rank: candidate.channel for rank, candidate in self.came.items()}
        answered = []
        until = time.monotonic() + seconds
        while waiting and time.monotonic() < until:
            watch()
            for rank, channel in list(waiting.items()):
                if not channel.readable():
                    continue
                try:  # what it has said before is of no use any more
                    message = channel.receive(time.monotonic() + 1.0)
                except (OSError, HandshakeError):
                    del waiting[rank]
                    continue
                if message.get("again") == number:
                    answered.append(rank)
                    del waiting[rank]
            if waiting:
                next(iter(waiting.values())).readable(0.01)
        with self._changed:
            lost = sorted(self.came.keys() - set(answered))
            for rank in lost:
                self.came.pop(rank).channel.close()
            self.members = None
            if 1 + len(answered) >= self._least:
                self._keep(sorted(answered))
            return lost

    def tell_all(self, message: dict[str, Any]) -> None:
        """Send a message to all that have come; who is gone is found out when it is heard."""
        with self._changed:
            candidates = list(self.came.values())
        for candidate in candidates:
            _send(candidate.channel, message)

    def close(self) -> None:
        """Close all connections; nobody comes any more."""
        with self._changed:
            self.members = self.members or []
            for candidate in self.came.values():
                candidate.channel.close()


def _send(channel: Channel, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        channel.send(message, time.monotonic() + STRANGER_SECONDS)
