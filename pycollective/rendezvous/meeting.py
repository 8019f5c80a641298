"""The rendezvous of processes over TCP: rank 0 listens, all come, and every two ranks connect.

Every connection is authenticated (`handshake`) before anything else is read from it. What the core gets
are the connected descriptors; from then on nobody listens, so nobody can come any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from pycollective import _core, tuning
from pycollective.errors import RendezvousError
from pycollective.rendezvous import memory
from pycollective.rendezvous.description import MAX_STREAMS, Description, FirstRankLostError
from pycollective.rendezvous.door import SHORTAGES, STRANGER_SECONDS, Door
from pycollective.rendezvous.gathering import Gathering, int_of, milliseconds_until, time_of
from pycollective.rendezvous.handshake import Channel, HandshakeError, Refused, digest
from pycollective.rendezvous.sockets import Sockets, is_unspecified

__all__ = ["Meeting"]

_log = logging.getLogger("pycollective")

LOG_EVERY = 10.0
"""Seconds between two messages about who is missing."""
ATTEMPT_SECONDS = 5.0
"""Seconds that an elastic group may take to connect before rank 0 calls the roll; then twice as many."""
_ROLL_SECONDS = memory.PROOF_SECONDS + 2.0
"""Seconds that a rank has to answer: more than the longest wait in which it does not hear rank 0."""
_CONNECT_SECONDS = 1.0
"""Seconds that the members have to connect at least, however late the last of them came."""
_WORD_SECONDS = 2.0
"""Seconds that the other ranks wait longer than rank 0, which knows who is missing and tells them."""
_CONNECTIONS = 2
"""Of every two ranks, besides those for collectives: control, and messages of send and recv."""

_token = secrets.token_hex(8)


class _BrokenError(RendezvousError):
    """The group could not be made of these members; an elastic group tries again with the rest."""


class _NotNowError(HandshakeError):
    """Rank 0 has a group already, or makes one, and says that this rank is to come later."""


class _RepeatError(Exception):
    """Rank 0 makes the group again, and this rank has answered its roll call."""


class Meeting:
    """One process on its way into a group."""

    def __init__(
        self,
        about: Description,
        seconds: float,
        cleanup: contextlib.ExitStack,
        old: _core.Group | None,
    ) -> None:
        self.about = about
        self.old = old
        self.seconds = seconds
        self._begin()
        self.sockets = Sockets(about)
        self.key = self.sockets.key
        self.cleanup = cleanup
        self.changed = threading.Condition()
        self.gathering = Gathering(about, self.changed)  # rank 0's
        self.elastic = about.least > 0  # for the others, rank 0's word counts
        self.whole = about.rank, about.size  # before ranks are renumbered
        self.places: list[tuple[str, int]] = []  # where the members listen
        self.claims: list[str] = []  # what they say of their host
        self.peers: dict[tuple[int, int], Channel] = {}  # by rank and number of the stream
        self.ready: dict[int, int] = {}  # rank 0's: who leads the host of each rank that has all
        self.streams = _CONNECTIONS + (about.streams if about.rank == 0 else MAX_STREAMS)
        self.name = ""  # of the group; empty until the members are known
        self.attempts = 0
        self.attempt_ends = self.deadline  # for all members the same, as rank 0 says
        self.last_came = ""  # rank 0's note on the last rank, if that rank came very late
        self.doors: list[Door] = []
        self.front: Door | None = None  # rank 0's, for ranks that come
        self.door: Door | None = None  # for peers
        self.store: Channel | None = None  # the others': the connection to rank 0
        self.over = False
        cleanup.callback(self._close_all)

    def _begin(self, pause: float = 0.0) -> None:
        """Start this rank's time, now or after a pause."""
        self.begun = time.monotonic() + pause
        self.deadline = self.begun + self.seconds

    def _close_all(self) -> None:
        for door in self.doors:
            door.close()
        with self.changed:
            self.over = True  # who is about to enter does not
            self.changed.notify_all()
        self.gathering.close()
        self._leave_rank_0()
        self._drop_peers()

    def _drop_peers(self) -> None:
        """Close what connects the members: they are others from now on."""
        with self.changed:
            self.name = ""
            for channel in self.peers.values():
                channel.close()
            self.peers.clear()
            self.ready.clear()

    def _leave_rank_0(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def group(self) -> tuple[_core.Group, str, str, str]:
        """Meet the others: the whole course of it; returns what `connect` returns."""
        try:
            return self._group()
        except RendezvousError as error:
            self._tell_why(error)
            if isinstance(error, _BrokenError):
                raise RendezvousError(str(error), ranks=error.ranks) from None
            raise

    def _tell_why(self, error: RendezvousError) -> None:
        """Tell the reason for giving up: rank 0 tells all others, and the others tell rank 0."""
        why = {"error": str(error), "ranks": list(error.ranks)}
        self.gathering.tell_all(why)
        if self.store is not None:
            with contextlib.suppress(OSError):
                self.store.send(why, time.monotonic() + STRANGER_SECONDS)

    def _group(self) -> tuple[_core.Group, str, str, str]:
        """Meet the others, again and again while an elastic group loses members that way."""
        is_first = self.about.rank == 0
        while True:
            try:
                if is_first:
                    self._gather()
                else:
                    self._join()
                return self._made()
            except _BrokenError as error:
                if not self.elastic:
                    raise
                if is_first:
                    self._repeat(error)
                else:
                    self._await_roll_call()
            except _RepeatError:
                pass
            except _NotNowError as error:
                _log.warning("rank %d is to come later, and tries again: %s", self.whole[0], error)
                self._leave_rank_0()
            self._drop_peers()

    def _made(self) -> tuple[_core.Group, str, str, str]:
        """Return the group of the members, as `group` does."""
        rank, size = self.about.rank, self.about.size
        self._connect_peers()
        self._wait(
            lambda: [
                r
                for r in range(size)
                if r != rank and any((r, s) not in self.peers for s in range(self.streams))
            ],
            "to connect",
        )
        here, shared = self._share()
        hosts = self._leave_together(here[0])
        for door in self.doors:
            door.close()
        if self.about.one_host and len(set(hosts)) > 1:
            elsewhere = [r for r in range(size) if hosts[r] != hosts[rank]]
            raise RendezvousError(
                f"PYCOLLECTIVE_TRANSPORT=shm, and {self._title(rank)} shares no memory with "
                f"{self._ranks(elsewhere)}{self._unproved(here)}: leave it out, or set it to 'tcp'",
                ranks=elsewhere,
            )
        self._relay()
        last = self.streams - 1  # for messages of two ranks
        sockets = [
            []
            if r == rank
            else [self.peers[r, s].socket.fileno() for s in range(1 if r in here else last)]
            for r in range(size)
        ]
        pipes = [-1 if r == rank else self.peers[r, last].socket.fileno() for r in range(size)]
        assert self.door is not None
        own = str(self.door.address[0])
        if len(set(hosts)) == size:
            how = "over TCP" + self._unproved(here)
            return _core.TcpGroup(rank, sockets, pipes), self.name, how, own
        if shared is None:
            shared = _core.ShmGroup.create(1, 0)
            shared.join(0)
        how = "through shared memory"
        if len(here) < size:
            how += (
                f" with {self._ranks([r for r in here if r != rank])} and over TCP with the others"
            )
            how = how if len(here) > 1 else "over TCP"
        return (
            _core.MixedGroup(rank, sockets, pipes, shared, hosts),
            self.name,
            f"{how}, {len(set(hosts))} hosts{self._unproved(here)}",
            own,
        )

    def _relay(self) -> None:
        """Let a thread stand between the core and control connections in TLS."""
        if self.about.tls is None:
            return
        from pycollective.rendezvous.relay import Relay

        others = [r for r in range(self.about.size) if r != self.about.rank]
        relay = Relay({r: self.peers[r, 0].socket for r in others})
        for r in others:
            self.peers[r, 0] = Channel(relay.ends[r])

    def _claim(self) -> str:
        """What this rank says of its host; equal where memory may be shared."""
        return digest(self.key, "host", self.about.host_id) if self.about.host_id else ""

    def _claimed(self) -> list[int]:
        claim = self._claim()
        return [r for r in range(self.about.size) if self.claims[r] == claim] if claim else []

    def _share(self) -> tuple[list[int], _core.ShmGroup | None]:
        """The ranks that share memory with this one, proved, and the memory."""
        rank = self.about.rank
        claimed = self._claimed() or [rank]
        channels = {r: self.peers[r, 0] for r in claimed if r != rank}

        def listen(sock: socket.socket, enter: Callable[[Channel, dict[str, Any]], None]) -> Door:
            return self._open(Door(sock, self.key, self.about.size, enter))

        sharing = memory.Sharing(
            rank, channels, self.key, self._heard, bool(self.about.secret), self._title
        )
        try:
            return sharing.share(claimed, self.attempt_ends, listen)
        except _NotNowError:
            raise
        except (OSError, HandshakeError) as error:
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                raise
            self._watch_others()  # which knows better who it was
            raise _BrokenError(
                f"{self._title(rank)} could not find out who shares its host's memory: {error}",
                ranks=error.ranks if isinstance(error, HandshakeError) else (),
            ) from None

    def _heard(self, peer: int) -> dict[str, Any]:
        """Return a peer's next message, unless the attempt fails first."""
        channel = self.peers[peer, 0]
        # The peer may wait for a third rank, and names it at its own deadline. The rank that shares
        # its memory is a lower one. The others give it the time that it gives them, and more.
        late = 1.0 if peer > self.about.rank else 2.0
        while not channel.readable(0.05):
            self._watch_others()
            if time.monotonic() >= self.attempt_ends + late:
                raise HandshakeError(f"nothing came in time from {self._title(peer)}", ranks=[peer])
        with memory.naming(peer, self._title(peer)):
            return channel.receive(time.monotonic() + STRANGER_SECONDS)

    def _unproved(self, here: list[int]) -> str:
        """Of whom it was not proved that they are where they say they are."""
        absent = [r for r in self._claimed() if r not in here]
        if not absent:
            return ""
        return f", {self._ranks(absent)} said to be on this host but not reached through its memory"

    # Doors ----------------------------------------------------------------------------------

    def _open(self, door: Door) -> Door:
        self.doors.append(door)
        return door

    def _door_at(
        self, sock: socket.socket, address: str, enter: Callable[[Channel, dict[str, Any]], None]
    ) -> Door:
        connections = self.about.size * self.streams
        door = self._open(Door(sock, self.key, connections, enter, self.about.tls))
        if is_unspecified(door.address[0]):  # the others are told where they can reach it
            door.address = address, door.address[1]
        return door

    def _enter(self, channel: Channel, hello: dict[str, Any]) -> None:
        """At rank 0's address: somebody who joins, or a peer."""
        if hello.get("purpose") == "peer":
            self._enter_peer(channel, hello)
        else:
            self.gathering.enter(channel, hello)

    # Rank 0 ---------------------------------------------------------------------------------

    def _listen(self) -> Door:
        """Listen for those who join, and for peers: at one address, unless another is asked for."""
        sock = self.sockets.inherited() or self.sockets.listen_at_own_address()
        self.cleanup.callback(sock.close)
        address = str(sock.getsockname()[0])
        own = self.sockets.own_address(address)
        front = self._door_at(sock, own, self._enter)
        if self.about.own is None and own != address:
            peers = self.sockets.listen_for_peers(own)
            self.door = self._door_at(peers, own, self._enter_peer)
        else:
            self.door = front
        return front

    def _gather(self) -> None:
        """Wait until the members can be chosen, and give them the table."""
        gathering = self.gathering
        self.front = self.front or self._listen()
        if gathering.members is None:
            self.about.rank, self.about.size = self.whole
            where = f"to come to {self.about.host}:{self.about.port}"
            self._wait(lambda: gathering.choose(self._is_late()), where, self.front)
        members = gathering.members
        assert members is not None and self.door is not None
        if len(members) < self.whole[1]:
            absent = [r for r in range(self.whole[1]) if r not in members]
            _log.warning("rank 0 goes on without %s of %d", self._ranks(absent), self.whole[1])
        self._renumber(members)
        candidates = [gathering.came[r] for r in members[1:]]
        self.places = [self.door.address, *(c.place for c in candidates)]
        self.claims = [self._claim(), *(c.claim for c in candidates)]
        with self.changed:
            self.name = secrets.token_hex(8)
        self._limit_attempt()
        # The members of an elastic group are to hear a roll call after the attempt.
        until = self.deadline if self.elastic else self.attempt_ends
        gathering.tell_all(
            {
                "group": self.name,
                "milliseconds": milliseconds_until(until),
                "streams": self.streams,
                "places": [
                    [*place, claim] for place, claim in zip(self.places, self.claims, strict=True)
                ],
                "choices": {n: tuning.as_json(rows) for n, rows in self.about.choices.items()},
                "ranks": members,
                "least": self.about.least,
            }
        )

    def _limit_attempt(self) -> None:
        """Set the time when the members must be connected; an elastic group may try again."""
        now = time.monotonic()
        self.last_came = ""
        if self.elastic:  # a member that is stopped must be found out
            self.attempt_ends = min(self.deadline, now + ATTEMPT_SECONDS * 2**self.attempts)
            return
        # One deadline for all members: else the rank that started first gives up first and is
        # blamed, though another rank has kept all of them waiting.
        first, _ = self.gathering.first_to_give_up()
        self.attempt_ends = max(min(first, self.deadline), now + _CONNECT_SECONDS)
        spent = now - self.begun
        if 2 * spent > self.attempt_ends - self.begun:
            self.last_came = (
                f"; {self._title([*self.gathering.came][-1])} came only after {spent:.1f} s"
            )

    def _is_late(self) -> bool:
        return time.monotonic() >= self.begun + self.about.patience

    def _renumber(self, members: list[int]) -> None:
        """Go on as one of the members."""
        self.about.rank, self.about.size = members.index(self.whole[0]), len(members)

    def _joined(self) -> dict[int, Channel]:
        """Return the connections to the other members, by their rank in the group."""
        members = self.gathering.members or []
        return {i: self.gathering.came[r].channel for i, r in enumerate(members) if r}

    def _repeat(self, error: _BrokenError) -> None:
        """Call the roll; whoever does not answer is out."""
        if time.monotonic() >= self.deadline:
            raise error
        self.attempts += 1
        _log.warning("rank 0 calls the roll, as the group could not be made: %s", error)
        lost = self.gathering.call_roll(self.attempts, _ROLL_SECONDS, self._watch)
        if lost:  # a new group, with the time of a new one: every rank can be lost only once
            _log.warning("%s did not answer the roll call", self._ranks(lost))
            self._begin()

    # The others -----------------------------------------------------------------------------

    def _reach_rank_0(self) -> Channel:
        """Connect to rank 0, and say where this rank listens."""
        rank, size = self.whole
        hello = {"purpose": "join", "rank": rank, "size": size}

        def reach() -> Channel:
            channel = self._introduce(*self.sockets.resolve(), hello, self.deadline)
            # At the same address there may still be an earlier rendezvous, about to end.
            try:
                answer = channel.receive(time.monotonic() + STRANGER_SECONDS)
                self._check_word(answer)
            except BaseException:
                channel.close()
                raise
            return channel

        where = f"{self.about.host}:{self.about.port}"
        left = max(0.0, self.deadline - time.monotonic())
        seconds = self.about.patience if self.about.least else left
        store = self.store = self._until_reached(reach, 0, where, seconds, self._watch)
        if self.about.least:  # rank 0 may begin to be patient only now
            self._begin()
        if self.door is None:
            own = self.sockets.own_address(str(store.socket.getsockname()[0]))
            sock = self.sockets.listen_for_peers(own)
            self.door = self._door_at(sock, own, self._enter_peer)
        host, port = self.door.address
        process = f"{os.getpid()} {_token}"
        place = {
            "host": host,
            "port": port,
            "claim": self._claim(),
            "process": process,
            "milliseconds": milliseconds_until(self.deadline),
        }
        try:
            store.send(place, self.deadline)
        except OSError as error:
            raise self._first_rank_lost(error) from None
        return store

    def _join(self) -> None:
        """Hear from rank 0 who the members are."""
        self.about.rank, self.about.size = self.whole
        store = self.store or self._reach_rank_0()
        what = f"for {self._title(0)} at {self.about.host}:{self.about.port} to have everybody"
        table = self._hear(what, self.deadline)
        name = table.get("group")
        places = table.get("places")
        if not isinstance(name, str) or not isinstance(places, list):
            raise HandshakeError("no table of the group")
        ranks = table.get("ranks")
        if not isinstance(ranks, list) or self.about.rank not in ranks:
            raise HandshakeError("a table without this rank")
        # Who comes back to a group that has lost others takes its word for how many are enough.
        least = int_of(table, "least", 0, self.about.size)
        self.elastic = least > 0
        if len(ranks) < (self.about.least or least or self.about.size):
            raise HandshakeError("a table of too few ranks")
        self._renumber(ranks)
        if len(places) != self.about.size:
            raise HandshakeError("a table of another size")
        self.streams = int_of(table, "streams", 1 + _CONNECTIONS, _CONNECTIONS + MAX_STREAMS)
        try:
            self.about.choices = tuning.checked_tables(table.get("choices"))
        except ValueError as error:
            raise HandshakeError(f"rank 0's table of algorithms cannot be used: {error}") from None
        self.places, self.claims = [], []
        for rank, place in enumerate(places):
            if not isinstance(place, list) or len(place) != 3:
                raise HandshakeError("a table without addresses")
            host = str(place[0])
            if rank == 0 and is_unspecified(host):  # as rank 0 does not know how it is reached
                host = str(store.socket.getpeername()[0])
            self.places.append((host, int_of({"port": place[1]}, "port", 1, 65535)))
            self.claims.append(str(place[2]))
        self.attempt_ends = time_of(table)
        with self.changed:
            self.name = name
            self.changed.notify_all()

    def _until_reached(
        self,
        reach: Callable[[], Channel],
        peer: int,
        where: str,
        seconds: float,
        watch: Callable[[], None],
    ) -> Channel:
        """Try until it works, or the time is over; a refusal may be a stranger's, and is not final."""
        deadline = time.monotonic() + seconds
        whom = f"{self._title(peer)} at {where}"
        pause, say = 0.02, time.monotonic() + LOG_EVERY
        refusal: Refused | None = None
        while True:
            watch()
            try:
                return reach()
            except (OSError, HandshakeError) as error:
                if isinstance(error, OSError) and error.errno in SHORTAGES:
                    raise
                now = time.monotonic()
                if isinstance(error, _NotNowError) and self.about.least:
                    deadline = now + seconds  # rank 0 lives: nobody may go on without it
                    self._begin()
                is_news = isinstance(error, Refused) and str(error) != str(refusal)
                if isinstance(error, Refused):
                    refusal = error
                if now >= deadline:
                    watch()  # rank 0 may have given up meanwhile, and knows why
                    # The deadline ends an attempt, too, and its error says less than a refusal.
                    if refusal is not None:
                        raise refusal from None
                    raise RendezvousError(
                        f"{self._title()} did not reach {whom} within "
                        f"{round(seconds, 1):g} s: {error}",
                        ranks=[peer],
                    ) from None
                if now >= say or is_news:
                    _log.warning(
                        "rank %d still tries to reach %s: %s", self.about.rank, whom, error
                    )
                    say = now + LOG_EVERY
                time.sleep(min(pause, max(0.0, deadline - now)))
                pause = min(2 * pause, 0.5)

    def _introduce(self, family: Any, address: Any, hello: dict[str, Any], until: float) -> Channel:
        soon = min(until, time.monotonic() + STRANGER_SECONDS)
        sock = self.sockets.connected(family, address, soon)
        return self.sockets.introduced(sock, hello, soon)

    def _hear(self, what: str, until: float) -> dict[str, Any]:
        """Return the next message of rank 0, which knows at `until` who is missing."""
        assert self.store is not None
        late = 1.0  # rank 0, who knows whom it waits for, is to say so first
        say = time.monotonic() + LOG_EVERY + late
        while True:
            while not self.store.readable(0.05):
                self._watch()
                now = time.monotonic()
                if now >= until + _WORD_SECONDS:
                    raise RendezvousError(
                        f"{self._title()} waited {round(until - self.begun, 1):g} s {what}",
                        ranks=[0],
                    )
                if now >= say:
                    _log.warning("rank %d waits %s", self.about.rank, what)
                    say = now + LOG_EVERY
            message = self._message()
            if message is not None:
                return message
            say = time.monotonic() + LOG_EVERY + late

    def _message(self) -> dict[str, Any] | None:
        """Return what rank 0 has sent; None if it was whom it waits for, which is logged."""
        assert self.store is not None
        try:
            message = self.store.receive(time.monotonic() + STRANGER_SECONDS)
            self._check_word(message)
            if "again" in message:
                self.store.send({"again": message["again"]}, time.monotonic() + STRANGER_SECONDS)
                self._begin(_ROLL_SECONDS)
                raise _RepeatError
        except OSError as error:
            raise self._first_rank_lost(error) from None
        if "waits" not in message:
            return message
        _log.warning("rank %d: %s", self.about.rank, message["waits"])
        return None

    def _check_word(self, message: dict[str, Any]) -> None:
        """Raise if rank 0 says that this rank is to end, or to come later."""
        if "error" in message:
            raise RendezvousError(str(message["error"]), ranks=self._told_ranks(message, 0))
        if "later" in message:
            raise _NotNowError("rank 0 has a group, or makes one, without this rank")

    def _await_roll_call(self) -> None:
        """Return when rank 0 has called the roll, and been answered."""
        with contextlib.suppress(_RepeatError):
            self._hear("for rank 0 to make the group again", self.attempt_ends)
            raise HandshakeError("rank 0 went on without this rank")

    # All ------------------------------------------------------------------------------------

    def _enter_peer(self, channel: Channel, hello: dict[str, Any]) -> None:
        with self.changed:  # who comes early waits for the name of the group
            self.changed.wait_for(lambda: self.name or self.over, STRANGER_SECONDS)
            name = self.name
        if hello.get("purpose") != "peer" or hello.get("group") != name or not name:
            raise HandshakeError("another group's")
        rank = int_of(hello, "from", self.about.rank + 1, self.about.size - 1)
        stream = int_of(hello, "stream", 0, self.streams - 1)
        if hello.get("to") != self.about.rank:
            raise HandshakeError("another rank's")
        if self.about.tls is not None and stream:
            self.about.tls.end(channel.socket, time.monotonic() + STRANGER_SECONDS)
        with self.changed:
            if self.over or self.name != name or (rank, stream) in self.peers:
                raise HandshakeError("a connection that is there already, or comes too late")
            self.peers[rank, stream] = channel
            self.changed.notify_all()

    def _connect_peers(self) -> None:
        for peer in range(self.about.rank):
            host, port = self.places[peer]
            self.sockets.allow(host)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            until = self.attempt_ends + (0.0 if peer else _WORD_SECONDS)
            for stream in range(self.streams):
                hello = {
                    "purpose": "peer",
                    "group": self.name,
                    "from": self.about.rank,
                    "to": peer,
                    "stream": stream,
                }

                def reach(
                    family: Any = family,
                    address: Any = (host, port),
                    hello: dict[str, Any] = hello,
                    until: float = until,
                ) -> Channel:
                    return self._introduce(family, address, hello, until)

                left = max(0.0, until - time.monotonic())
                where = f"{host}:{port}"
                channel = self._until_reached(reach, peer, where, left, self._watch_others)
                with self.changed:
                    self.peers[peer, stream] = channel

    def _watch(self) -> None:
        """Raise if there is no use in waiting."""
        for door in self.doors:
            if door.shortage is not None:
                raise door.shortage
        if self.about.ended is not None and self.about.ended.text:
            raise self._last_word() or RendezvousError(
                f"{self._title()} waits for the others in vain: {self.about.ended.text}",
                ranks=self.about.ended.ranks,
            )
        failure = self.old.failure if self.old is not None else None
        if failure:
            raise RendezvousError(f"the group that the new one is made of has failed: {failure}")

    def _last_word(self) -> RendezvousError | None:
        """Return another rank's reason for giving up, which may be why it has ended."""
        with self.changed:
            channels = {rank: c.channel for rank, c in self.gathering.came.items()}
        if self.store is not None:
            channels[0] = self.store
        for rank, channel in channels.items():
            with contextlib.suppress(OSError, HandshakeError):
                while channel.readable():
                    message = channel.receive(time.monotonic() + STRANGER_SECONDS)
                    if "error" in message:
                        ranks = self._told_ranks(message, rank)
                        return RendezvousError(str(message["error"]), ranks=ranks)
        return None

    def _watch_others(self) -> None:
        """Raise as `_watch`, or if rank 0 says that the group fails, or for rank 0 if one has ended."""
        self._watch()
        if self.about.rank != 0:
            assert self.store is not None
            if self.store.readable() and self._message() is not None:
                raise HandshakeError("rank 0 went on without this rank")
            return
        for rank, channel in self._joined().items():
            if not channel.readable():
                continue
            try:
                message = channel.receive(time.monotonic() + STRANGER_SECONDS)
                if "error" in message:
                    raise _BrokenError(str(message["error"]), ranks=self._told_ranks(message, rank))
                self.ready[rank] = int_of(message, "ready", 0, self.about.size - 1)
            except (OSError, HandshakeError) as error:
                raise _BrokenError(
                    f"{self._title(rank)} is gone before the group was made: {error}", ranks=[rank]
                ) from None

    def _wait(self, missing: Callable[[], list[int]], what: str, front: Door | None = None) -> None:
        """Wait until no rank is missing; at rank 0's front door, or for peers."""
        begun, say = time.monotonic(), time.monotonic() + LOG_EVERY
        while True:
            with self.changed:
                absent = missing()
                if not absent:
                    return
                self.changed.wait(0.05)
            until, note = self.attempt_ends, self.last_came
            if front is None:
                self._watch_others()
            else:
                self._watch()
                until, note = self._until_all_came()
            now = time.monotonic()
            who = self._ranks(absent) + f" of {self.about.size}"
            away = front.turned_away if front else 0
            strangers = f" ({away} connections could not prove that they belong here)" * bool(away)
            if now >= until:
                raise self._in_vain(f"{who} {what}{strangers}{note}", absent, until, begun)
            if now >= say:
                self._say(f"{self._title()} waits for {who} {what}{strangers}")
                say = now + LOG_EVERY

    def _until_all_came(self) -> tuple[float, str]:
        """Return when rank 0 gives up on those that have not come, and a note on the reason.

        The group needs all ranks: when the first of them gives up, rank 0 gives up, too.
        """
        until, rank = self.gathering.first_to_give_up()
        if self.elastic or until >= self.deadline:
            return self.deadline, ""
        return until, f", as {self._title(rank)} waits no longer"

    def _in_vain(self, whom: str, ranks: list[int], until: float, begun: float) -> _BrokenError:
        """Return the error of a wait that began at `begun` and may not go on after `until`."""
        if not self.elastic or until == self.deadline:  # all of this rank's time, no attempt's
            begun = self.begun
        waited = f"{self._title()} waited {round(until - begun, 1):g} s"
        return _BrokenError(f"{waited} for {whom}", ranks=ranks)

    def _say(self, waits: str) -> None:
        """Log whom this rank waits for; rank 0 also lets the others know."""
        _log.warning("%s", waits)
        self.gathering.tell_all({"waits": waits})

    def _leave_together(self, leader: int) -> list[int]:
        """Nobody goes before everybody has all connections; return each rank's host, by number.

        `leader` stands for this rank's host.
        """
        size = self.about.size
        if self.about.rank != 0:
            assert self.store is not None
            try:
                self.store.send({"ready": leader}, self.attempt_ends)
            except OSError as error:
                raise self._first_rank_lost(error) from None
            hosts = self._hear("for the others to connect", self.attempt_ends).get("go")
            if (
                not isinstance(hosts, list)
                or len(hosts) != size
                or not all(type(h) is int for h in hosts)
            ):
                raise HandshakeError("rank 0 went on without this rank")
            return hosts
        self.ready[0] = leader
        others = self._joined()
        begun, say = time.monotonic(), time.monotonic() + LOG_EVERY
        # A rank that is not ready may wait for a third one, and is to name it first.
        until = self.attempt_ends + (0.0 if self.elastic else 1.0)
        while waiting := [r for r in others if r not in self.ready]:
            others[waiting[0]].readable(0.01)  # one after the other: all of them must come
            self._watch_others()
            now = time.monotonic()
            who = f"{self._ranks(waiting)} to connect"
            if now >= until:
                raise self._in_vain(who + self.last_came, waiting, self.attempt_ends, begun)
            if now >= say:
                self._say(f"{self._title(0)} waits for {who}")
                say = now + LOG_EVERY
        numbers = {leader: i for i, leader in enumerate(sorted(set(self.ready.values())))}
        hosts = [numbers[self.ready[r]] for r in range(size)]
        self.gathering.tell_all({"go": hosts})
        return hosts

    # Names ----------------------------------------------------------------------------------

    def _first_rank_lost(self, error: OSError) -> FirstRankLostError:
        text = f"{self._title(0)} is gone before the group was made: {error}"
        return FirstRankLostError(text, ranks=[0])

    def _title(self, rank: int | None = None) -> str:
        """Return the name in texts of a rank, by default of this one."""
        return self.about.title(self.about.rank if rank is None else rank)

    def _ranks(self, ranks: list[int]) -> str:
        if len(ranks) == 1:
            return self._title(ranks[0])
        numbers = [self.about.known_as[r] if self.about.known_as else r for r in ranks[:20]]
        return "ranks " + ", ".join(map(str, numbers)) + (", …" if len(ranks) > 20 else "")

    def _told_ranks(self, message: dict[str, Any], teller: int) -> list[int]:
        """Return whom a rank's error is about: the rank itself, if it names no other."""
        ranks = message.get("ranks")
        if not isinstance(ranks, list):
            return []
        return [r for r in ranks if type(r) is int and 0 <= r < self.about.size] or [teller]
