"""Rank 0's decisions in a rendezvous: the members, their hosts, and the error if it fails."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

from pycollective import tuning
from pycollective.launch.description import Description
from pycollective.launch.handshake import HandshakeError
from pycollective.launch.members import Candidate, choose, milliseconds_until
from pycollective.launch.store import Change, Store

_log = logging.getLogger("pycollective")

LOG_EVERY = 10.0
"""Seconds between two log lines about missing ranks."""
ATTEMPT_SECONDS = 5.0
"""Seconds that an elastic group has to connect before a membership check; doubled after each check."""
CHECK_SECONDS = 12.0
"""Seconds that a rank has to answer a membership check: more than its longest wait for anything else."""
_CONNECT_SECONDS = 1.0
"""Least time, in seconds, to join and then to connect, even if rank 0 or the last rank is late."""


def reported(why: Any, reporter: int, size: int) -> tuple[str, list[int]]:
    """Return the text and the ranks of an error that rank ``reporter`` set.

    If the list of ranks has no valid rank, the error concerns ``reporter``.
    """
    why = why if isinstance(why, dict) else {}
    ranks = why.get("ranks")
    if not isinstance(ranks, list):
        return str(why.get("error")), []
    return str(why.get("error")), [r for r in ranks if type(r) is int and 0 <= r < size] or [
        reporter
    ]


class Leader:
    """Rank 0's decisions, from the keys of all ranks; each decision sets one key of the store.

    ``rejected`` returns a text about the connections and join requests that were rejected. `reasons`
    has the errors of ranks that have given up: their texts, and the ranks that they name.
    """

    def __init__(
        self,
        about: Description,
        store: Store,
        seconds: float,
        streams: int,
        rejected: Callable[[], str],
    ) -> None:
        self._size, self._least, self._patience = about.size, about.least, about.patience
        self._about, self._admissions = about, about.admissions
        self._where = f"to join at {about.host}:{about.port}"
        self._store, self._seconds, self._streams = store, seconds, streams
        self._rejected = rejected
        self._joined: dict[int, Candidate] = {}  # in the order of arrival
        self._chosen: dict[int, Candidate] = {}  # the members in this attempt
        self._asked: list[int] = []  # the members during a membership check
        self._checks = 0
        self._until = 0.0  # the end of the attempt, or of the membership check
        self._note = ""  # text about the last rank if it joined very late
        self._name = ""
        self._logged = self._attempt_begun = self._stepped = time.monotonic()
        self._pause = 0.0  # longest time between two steps: long if rank 0 was stopped
        self.reasons: dict[int, tuple[str, list[int]]] = {}
        self._begin()

    def _begin(self) -> None:
        self._begun = time.monotonic()
        self._deadline = self._begun + self._seconds

    def step(self, changes: list[Change]) -> None:
        """Make the decisions that are possible after changes, or after some time without changes."""
        now = time.monotonic()
        self._pause, self._stepped = max(self._pause, now - self._stepped), now
        for key, value in changes:
            self._record(key, value)
        if self._asked:
            self._end_check()
        elif self._chosen:
            self._watch_attempt()
        else:
            self._choose()

    def _record(self, key: str, value: Any) -> None:
        kind, _, number = key.partition("/")
        if kind == "failed" and value is not None:
            rank = int(number)
            members = list(self._chosen)
            reporter = members.index(rank) if rank in members else rank
            self.reasons[rank] = reported(value, reporter, len(members) or self._size)
        elif kind == "join":
            rank = int(number)
            self._joined.pop(rank, None)
            if value is not None:
                self.reasons.pop(rank, None)
                try:
                    self._joined[rank] = Candidate.of(value)
                except (AttributeError, HandshakeError, ValueError) as error:
                    self._end(rank, str(error))

    def _end(self, rank: int, why: str = "") -> None:
        for key, value in self._store.end(str(rank), why):
            self._record(key, value)

    def _fail(self, text: str, ranks: list[int]) -> None:
        self._store.set("all/failed", {"error": text, "ranks": ranks})

    def _waits(
        self, what: str, ranks: list[int], begun: float, until: float, note: str, late: float = 0.0
    ) -> tuple[str, list[int]] | None:
        """Return the error of a wait past its deadline, as text and ranks; log other waits."""
        now = time.monotonic()
        if now >= until + late:
            text = f"rank 0 waited {round(until - begun, 1):g} s for {what}{note}"
            if self._pause > max(1.0, (until - begun) / 2) and 0 not in ranks:
                text, ranks = f"{text}; rank 0 itself paused for {self._pause:.1f} s", [0, *ranks]
            return text, ranks
        if now >= self._logged + LOG_EVERY and late < math.inf:
            self._logged = now
            self.log_wait(f"rank 0 waits for {what}")
        return None

    def log_wait(self, waits: str) -> None:
        """Log the ranks that rank 0 waits for, and publish the text to all ranks."""
        _log.warning("%s", waits)
        self._store.set("all/waits", waits)

    # The choice of the members --------------------------------------------------------------

    def _choose(self) -> None:
        is_late = time.monotonic() >= self._begun + self._patience
        members = choose(self._joined, self._size, self._least, self._admissions, is_late)
        if members:
            self._begin_attempt(members)
            return
        absent = [rank for rank in range(self._size) if rank not in self._joined]
        until, note = self._deadline, ""
        if not self._least:  # the first rank that gives up ends the wait of all
            first, rank = self._first_to_give_up()
            # If rank 0 itself is late, a rank may just be trying again: give it time to join.
            first = max(first, self._begun + _CONNECT_SECONDS)
            if first < until:
                until, note = first, f", because {self._about.title(rank)} gives up then"
        rejected = self._rejected()
        rejected = f" ({rejected})" if rejected else ""
        what = f"{self._about.titles(absent)} of {self._size} {self._where}{rejected}"
        if problem := self._waits(what, absent, self._begun, until, note):
            text, ranks = problem
            waited = max((candidate.waited for candidate in self._joined.values()), default=0.0)
            if (
                waited > until - self._begun and 0 not in ranks
            ):  # the missing ranks may have given up because rank 0 was late
                text, ranks = f"{text}; rank 0 joined only after {waited:.1f} s", [0, *ranks]
            self._fail(text, ranks)

    def _first_to_give_up(self) -> tuple[float, int]:
        """Return the earliest deadline of the other ranks, and its rank."""
        others = [(c.deadline, rank) for rank, c in self._joined.items() if rank]
        return min(others, default=(math.inf, 0))

    def _begin_attempt(self, members: list[int]) -> None:
        """Publish the table of the members, with the deadline for their connections."""
        if len(members) < self._size:
            absent = [rank for rank in range(self._size) if rank not in members]
            _log.warning(
                "rank 0 continues without %s of %d", self._about.titles(absent), self._size
            )
        self._chosen = {rank: self._joined[rank] for rank in members}
        self.reasons.clear()
        if self._admissions is not None:
            self._admissions.admit_members(self._joined[rank].process for rank in members[1:])
        self._limit_attempt()
        self._name = secrets.token_hex(8)
        before = self._store.get("all/table")
        table = {
            "group": self._name,
            # An elastic group's members must still wait for a membership check after the attempt.
            "milliseconds": milliseconds_until(self._deadline if self._least else self._until),
            "streams": self._streams,
            "places": [[*c.place, c.claim, c.memory, c.more] for c in self._chosen.values()],
            "choices": {n: tuning.as_json(rows) for n, rows in self._about.choices.items()},
            "ranks": members,
            "least": self._least,
            "note": self._note,
        }
        self._store.compare_set("all/table", before, table)

    def _limit_attempt(self) -> None:
        now = time.monotonic()
        self._note, self._logged, self._attempt_begun = "", now, now
        if self._least:  # short, to detect a stopped member
            self._until = min(self._deadline, now + ATTEMPT_SECONDS * 2**self._checks)
            return
        # One deadline for all members. Otherwise the rank that started first gives up first, and the
        # error names that rank instead of the slow one.
        first, _ = self._first_to_give_up()
        self._until = max(min(first, self._deadline), now + _CONNECT_SECONDS)
        spent = now - self._begun
        if 2 * spent > self._until - self._begun:
            last = self._about.title([*self._joined][-1])
            self._note = f"; {last} joined only after {spent:.1f} s"

    # The members become a group -------------------------------------------------------------

    def _watch_attempt(self) -> None:
        if self._is_published("ready"):
            return
        problem = self._loss()
        if problem is None:
            waiting = self._agree("near", self._hosts_reached) or self._agree(
                "ready", self._hosts_proved
            )
            if not waiting:
                return
            # A rank that is not ready may wait for a third one, and reports that one if it gives up
            # first. Rank 0 itself always waits for another rank.
            late = 0.0 if self._least else math.inf if 0 in waiting else 1.0
            whole = not self._least or self._until == self._deadline
            begun = self._begun if whole else self._attempt_begun
            what = f"{self._about.titles(waiting)} to connect"
            problem = self._waits(what, waiting, begun, self._until, self._note, late)
        if problem is None:
            return
        if self._least and time.monotonic() < self._deadline:
            self._check_members(problem[0])
        else:
            self._fail(*problem)

    def _is_published(self, key: str) -> bool:
        decision = self._store.get(f"all/{key}")
        return decision is not None and decision["group"] == self._name

    def _agree(self, key: str, decide: Callable[[list[Any]], list[int]]) -> list[int]:
        """Publish the decision on a key once all members have set it; return those that have not."""
        if self._is_published(key):
            return []
        values = []
        for rank in self._chosen:
            found = self._store.get(f"{key}/{rank}")
            is_this = isinstance(found, dict) and found.get("group") == self._name
            values.append(found.get("value") if is_this else None)
        waiting = [number for number, value in enumerate(values) if value is None]
        if not waiting:
            self._store.set(f"all/{key}", {"group": self._name, "hosts": decide(values)})
        return waiting

    def _hosts_reached(self, reached: list[Any]) -> list[int]:
        """Return for each rank the lowest rank on its host; itself if it is alone there."""
        first = {rank for rank, other in enumerate(reached) if other == rank}
        return [
            other if type(other) is int and other in first else rank
            for rank, other in enumerate(reached)
        ]

    def _hosts_proved(self, shared: list[Any]) -> list[int]:
        """Return the number of each rank's host; without shared memory, a rank is a host of its own."""
        hosts = self._store.get("all/near")["hosts"]
        broken = {host for host, has in zip(hosts, shared, strict=True) if has is not True}
        first = [rank if host in broken else host for rank, host in enumerate(hosts)]
        numbers = {rank: number for number, rank in enumerate(sorted(set(first)))}
        return [numbers[rank] for rank in first]

    def _loss(self) -> tuple[str, list[int]] | None:
        """Return the text and ranks of a member's failure; None if no member has failed."""
        for number, (rank, candidate) in enumerate(self._chosen.items()):
            if rank in self.reasons:
                return self.reasons[rank]
            if self._joined.get(rank) is not candidate:
                return f"{self._about.title(number)} was lost before the group was made", [number]
        return None

    # Members are lost -----------------------------------------------------------------------

    def _check_members(self, why: str) -> None:
        """Ask the members of an elastic group to answer, which shows the ranks that still run."""
        _log.warning(
            "rank 0 asks which members still run, because the group could not be made: %s", why
        )
        self._checks += 1
        self._asked, self._chosen = list(self._chosen), {}
        self._until = time.monotonic() + CHECK_SECONDS
        self._store.set("all/check", self._checks)

    def _end_check(self) -> None:
        """Begin an attempt with the ranks that answered, if they are enough; else wait for others."""
        there = [rank for rank in self._asked if rank in self._joined]
        here = [rank for rank in there if self._store.get(f"alive/{rank}") == self._checks]
        silent = [rank for rank in there if rank not in here]
        if silent and time.monotonic() < self._until:
            return
        for rank in silent:
            self._end(rank)
        lost = [rank for rank in self._asked if rank not in here]
        self._asked = []
        if lost:  # restart the deadline; repeats end, as every rank can be lost only once
            _log.warning("%s did not answer", self._about.titles(lost))
            self._begin()
        if len(here) >= self._least:
            self._begin_attempt(here)
        else:
            self._store.set("all/table", None)
