"""The rendezvous of processes over TCP: they agree by rank 0's store, then every two ranks connect.

1. Each rank sets ``join/<rank>``: where it listens for its peers, and how long it waits.
2. Rank 0 chooses the members (`leader`) and sets ``all/table``. A rank without a place in the table
   comes later.
3. Every two members connect, and find out whether they share memory.
4. Each member sets ``ready/<rank>``, and rank 0 sets ``all/go``. From then on nobody listens.

A member whose keys vanish before step 4 is lost. Then the rendezvous fails; that of an elastic group is
repeated: rank 0 sets ``all/roll``, and the ranks that answer by ``here/<rank>`` in time are the members
of the next table. A rank that fails sets ``failed/<rank>``; rank 0 ends all by ``all/failed``.

Every connection is authenticated (`handshake`) before anything else is read from it. The core gets the
connected descriptors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pycollective import _core, tuning
from pycollective.errors import RendezvousError
from pycollective.rendezvous import leader, memory
from pycollective.rendezvous.description import (
    MAX_RANKS,
    MAX_STREAMS,
    Description,
    FirstRankLostError,
)
from pycollective.rendezvous.door import SHORTAGES, STRANGER_SECONDS, Door
from pycollective.rendezvous.handshake import Channel, HandshakeError, Refused, digest
from pycollective.rendezvous.leader import Leader, told
from pycollective.rendezvous.members import int_of, milliseconds_until, time_of
from pycollective.rendezvous.sockets import Sockets, is_unspecified
from pycollective.rendezvous.store import Client, Store

__all__ = ["Joining"]

_log = logging.getLogger("pycollective")

T = TypeVar("T")

_WORD_SECONDS = 2.0
"""Seconds that the other ranks wait longer than rank 0, which knows who is missing and tells them."""
_CONNECTIONS = 2
"""Of every two ranks, besides those for collectives: control, and messages of send and recv."""

_token = secrets.token_hex(8)


class _BrokenError(RendezvousError):
    """The group could not be made of these members; an elastic group tries again with the rest."""


class _NotNowError(HandshakeError):
    """Rank 0 has a group already, or makes one, without this rank, which is to come later."""

    def __init__(self) -> None:
        super().__init__("rank 0 has a group, or makes one, without this rank")


class _RepeatError(Exception):
    """Rank 0 makes the group again, and this rank has answered its roll call."""


class Joining:
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
        self.whole = about.rank, about.size  # before ranks are renumbered
        self.elastic = about.least > 0  # rank 0's word counts
        self.store: Store | Client | None = None
        self.leader: Leader | None = None  # rank 0's
        self.roll = 0  # the last roll call that this rank has heard of
        self.places: list[tuple[str, int]] = []  # where the members listen
        self.claims: list[str] = []  # the digests of their hosts' names
        self.streams = _CONNECTIONS + (about.streams if about.rank == 0 else MAX_STREAMS)
        self.attempt_ends = self.deadline  # for all members the same, as rank 0 says
        self.note = ""  # rank 0's, on the last rank, if that rank came very late
        self.changed = threading.Condition()  # guards the next three
        self.name = ""  # of the group; empty until the members are known
        self.peers: dict[tuple[int, int], Channel] = {}  # by rank and number of the stream
        self.over = False
        self.last_name = ""
        self.doors: list[Door] = []
        self.door: Door | None = None  # for peers
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
        self._leave_store()
        self._drop_peers()

    def _drop_peers(self) -> None:
        """Close what connects the members: they are others from now on."""
        with self.changed:
            self.name = ""
            for channel in self.peers.values():
                channel.close()
            self.peers.clear()

    def _leave_store(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def group(self) -> tuple[_core.Group, str, str, str]:
        """Meet the others: the whole course of it; returns what `connect` returns."""
        try:
            while True:
                try:
                    self._join()
                    return self._connected()
                except _BrokenError as error:
                    if not self.elastic:
                        raise
                    self._tell_why(error, f"failed/{self.whole[0]}")
                    with contextlib.suppress(_RepeatError):
                        self._hear(
                            lambda: None, "for rank 0 to make the group again", self.attempt_ends
                        )
                except _RepeatError:
                    pass
                except _NotNowError as error:
                    _log.warning("rank %d tries again later: %s", self.whole[0], error)
                    self._leave_store()
                self._drop_peers()
        except RendezvousError as error:
            self._tell_why(error, f"failed/{self.whole[0]}" if self.whole[0] else "all/failed")
            if isinstance(error, _BrokenError):
                raise RendezvousError(str(error), ranks=error.ranks) from None
            raise

    def _tell_why(self, error: RendezvousError, key: str) -> None:
        """Tell the reason for giving up; rank 0 passes on the others' reasons."""
        if self.store is not None:
            with contextlib.suppress(OSError):
                self.store.set(key, {"error": str(error), "ranks": list(error.ranks)})

    # What the others say --------------------------------------------------------------------

    def _attend(self, seconds: float = 0.0) -> bool:
        """Wait for changes in the store; return whether there are any.

        Raises
        ------
        RendezvousError
            If there is no use in waiting.
        """
        for door in self.doors:
            if door.shortage is not None:
                raise door.shortage
        ended = self.about.ended
        has_ended = ended is not None and bool(ended.text)
        changes = []
        if self.store is not None:  # also where a rank has ended, which may have said why
            try:
                changes = self.store.attend(0.0 if has_ended else seconds)
            except OSError as error:
                raise self._first_rank_lost(error) from None
            if self.leader is not None:
                self.leader.step(changes)
            else:
                for key, value in changes:
                    if key == "all/waits":
                        _log.warning("%s: %s", self._title(), value)
            self._check_word()
        if ended is not None and has_ended:
            for text, ranks in self.leader.reasons.values() if self.leader else ():
                raise RendezvousError(text, ranks=ranks)
            raise RendezvousError(
                f"{self._title()} waits for the others in vain: {ended.text}", ranks=ended.ranks
            )
        failure = self.old.failure if self.old is not None else None
        if failure:
            raise RendezvousError(f"the group that the new one is made of has failed: {failure}")
        return bool(changes)

    def _check_word(self) -> None:
        """Raise if rank 0 has given up, or makes the group again."""
        assert self.store is not None
        why, roll = self.store.get("all/failed"), self.store.get("all/roll")
        if why is not None:
            text, ranks = told(why, 0, self.about.size)
            raise RendezvousError(text, ranks=ranks)
        if roll is not None and roll != self.roll:
            self.roll = roll
            self.last_name = self._table().get("group", "")  # also where it was not read yet
            self.store.set(f"here/{self.whole[0]}", roll)
            self._begin(leader.ROLL_SECONDS)
            raise _RepeatError
        if self.name and self._table().get("group") != self.name:
            raise HandshakeError("rank 0 went on without this rank")

    def _table(self) -> dict[str, Any]:
        """Return rank 0's last table; an empty one if there is none."""
        assert self.store is not None
        table = self.store.get("all/table")
        return table if isinstance(table, dict) else {}

    def _hear(self, ready: Callable[[], T | None], what: str, until: float) -> T:
        """Return what rank 0 says; at `until` it knows who is missing."""
        late = 1.0  # rank 0, which knows whom it waits for, is to say so first
        say = time.monotonic() + leader.LOG_EVERY + late
        while (found := ready()) is None:
            has_heard = self._attend(0.05)
            now = time.monotonic()
            if now >= until + _WORD_SECONDS and not has_heard:
                waited = f"{self._title()} waited {round(until - self.begun, 1):g} s {what}"
                raise RendezvousError(waited, ranks=[0])
            if has_heard:
                say = now + leader.LOG_EVERY + late
            elif now >= say and self.leader is None:
                _log.warning("%s waits %s", self._title(), what)
                say = now + leader.LOG_EVERY
        return found

    def _first_rank_lost(self, error: OSError) -> FirstRankLostError:
        text = f"{self._title(0)} is gone before the group was made: {error}"
        return FirstRankLostError(text, ranks=[0])

    # Joining --------------------------------------------------------------------------------

    def _listen(self) -> Store:
        """At rank 0, listen for ranks and peers: at one address, unless another is asked for."""
        sock = self.sockets.inherited() or self.sockets.listen_at_own_address()
        self.cleanup.callback(sock.close)
        address = str(sock.getsockname()[0])
        own = self.sockets.own_address(address)
        store = self.store = Store()
        front = self.door = self._door_at(sock, own, self._enter)
        if self.about.own is None and own != address:
            peers = self.sockets.listen_for_peers(own)
            self.door = self._door_at(peers, own, self._enter_peer)
        self.leader = Leader(
            self.about, store, self.seconds, self.streams, lambda: front.turned_away
        )
        return store

    def _enter(self, channel: Channel, hello: dict[str, Any]) -> None:
        """At rank 0's address: a rank that joins, or a peer."""
        if hello.get("purpose") == "peer":
            self._enter_peer(channel, hello)
            return
        if hello.get("purpose") != "join" or not isinstance(self.store, Store):
            raise HandshakeError("this is not where ranks meet")
        try:
            size = int_of(hello, "size", 1, MAX_RANKS)
            if size != self.whole[1]:
                text = f"the group has {self.whole[1]} ranks for rank 0, and {size} for you"
                raise HandshakeError(text)
            rank = int_of(hello, "rank", 1, size - 1)
        except HandshakeError as error:
            channel.send({"error": str(error)}, time.monotonic() + STRANGER_SECONDS)
            raise
        self.store.admit(channel, str(rank))

    def _reach(self) -> Client:
        """At another rank, connect to rank 0's store, and listen for peers."""
        rank, size = self.whole
        hello = {"purpose": "join", "rank": rank, "size": size}

        def reach() -> Client:
            channel = self._introduce(*self.sockets.resolve(), hello, self.deadline)
            # At the same address there may still be an earlier rendezvous, about to end.
            try:
                store = Client(channel)
                if store.get("all/table") is not None:
                    raise _NotNowError
            except BaseException:
                channel.close()
                raise
            return store

        where = f"{self.about.host}:{self.about.port}"
        left = max(0.0, self.deadline - time.monotonic())
        store = self._until_reached(
            reach, 0, where, self.about.patience if self.about.least else left
        )
        self.store, self.roll = store, store.get("all/roll") or 0
        if self.about.least:  # rank 0 may begin to be patient only now
            self._begin()
        if self.door is None:
            own = self.sockets.own_address(str(store.socket.getsockname()[0]))
            sock = self.sockets.listen_for_peers(own)
            self.door = self._door_at(sock, own, self._enter_peer)
        return store

    def _enter_store(self) -> None:
        """Say where this rank listens, and how long it waits."""
        rank = self.whole[0]
        store = self._reach() if rank else self._listen()
        assert self.door is not None
        host, port = self.door.address
        request = {
            "host": host,
            "port": port,
            "claim": self._claim(),
            "process": f"{os.getpid()} {_token}",
            "milliseconds": milliseconds_until(self.deadline),
        }
        try:
            joined = store.compare_set(f"join/{rank}", None, request)
        except OSError as error:
            raise self._first_rank_lost(error) from None
        if not joined:
            raise RendezvousError(f"rank {rank} is taken: every process needs its own")
        if store.get("all/table") is not None:  # the members were chosen before
            raise _NotNowError

    def _join(self) -> None:
        """Hear from rank 0 who the members are."""
        self.about.rank, self.about.size = self.whole
        if self.store is None:
            self._enter_store()
        what = f"for {self._title(0)} at {self.about.host}:{self.about.port} to have everybody"

        def new() -> dict[str, Any] | None:
            table = self._table()
            return table if table and table.get("group") != self.last_name else None

        table = self._hear(new, what, self.deadline)
        name, places, ranks = (table.get(key) for key in ("group", "places", "ranks"))
        if not isinstance(name, str) or not isinstance(places, list) or not isinstance(ranks, list):
            raise HandshakeError("no table of the group")
        if self.about.rank not in ranks:
            raise _NotNowError
        # A rank that returns to a group that has lost others takes its word for the least number.
        least = int_of(table, "least", 0, self.about.size)
        self.elastic = least > 0
        if len(ranks) < (self.about.least or least or self.about.size):
            raise HandshakeError("a table of too few ranks")
        if len(places) != len(ranks):
            raise HandshakeError("a table of another size")
        self.about.rank, self.about.size = ranks.index(self.whole[0]), len(ranks)
        self.streams = int_of(table, "streams", 1 + _CONNECTIONS, _CONNECTIONS + MAX_STREAMS)
        try:
            self.about.choices = tuning.checked_tables(table.get("choices"))
        except ValueError as error:
            raise HandshakeError(f"rank 0's table of algorithms cannot be used: {error}") from None
        self._take_places(places)
        self.attempt_ends, self.note = time_of(table), str(table.get("note", ""))
        with self.changed:
            self.name = self.last_name = name
            self.changed.notify_all()

    def _take_places(self, places: list[Any]) -> None:
        self.places, self.claims = [], []
        for rank, place in enumerate(places):
            if not isinstance(place, list) or len(place) != 3:
                raise HandshakeError("a table without addresses")
            host = str(place[0])
            if rank == 0 and is_unspecified(host) and isinstance(self.store, Client):
                host = str(self.store.socket.getpeername()[0])  # rank 0 does not know its address
            self.places.append((host, int_of({"port": place[1]}, "port", 1, 65535)))
            self.claims.append(str(place[2]))

    # The members connect --------------------------------------------------------------------

    def _connected(self) -> tuple[_core.Group, str, str, str]:
        """Return the group of the members, as `group` does."""
        rank, size = self.about.rank, self.about.size
        self._connect_peers()
        self._wait_for_peers()
        here, shared = self._share()
        hosts = self._leave_together(here[0])
        for door in self.doors:
            door.close()
        if self.about.one_host and len(set(hosts)) > 1:
            elsewhere = [r for r in range(size) if hosts[r] != hosts[rank]]
            raise RendezvousError(
                f"PYCOLLECTIVE_TRANSPORT=shm, and {self._title(rank)} shares no memory with "
                f"{self.about.titles(elsewhere)}{self._unproved(here)}: leave it out, or set it to "
                "'tcp'",
                ranks=elsewhere,
            )
        if self.about.tls is not None:  # a thread stands between the core and control connections
            from pycollective.rendezvous.relay import Relay  # which loads OpenSSL

            others = [r for r in range(size) if r != rank]
            relay = Relay({r: self.peers[r, 0].socket for r in others})
            for r in others:
                self.peers[r, 0] = Channel(relay.ends[r])
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
            near = self.about.titles([r for r in here if r != rank])
            how += f" with {near} and over TCP with the others"
            how = how if len(here) > 1 else "over TCP"
        how += f", {len(set(hosts))} hosts{self._unproved(here)}"
        return _core.MixedGroup(rank, sockets, pipes, shared, hosts), self.name, how, own

    def _door_at(
        self, sock: socket.socket, address: str, enter: Callable[[Channel, dict[str, Any]], None]
    ) -> Door:
        connections = self.about.size * self.streams
        door = self._open(Door(sock, self.key, connections, enter, self.about.tls))
        if is_unspecified(door.address[0]):  # the others are told where they can reach it
            door.address = address, door.address[1]
        return door

    def _open(self, door: Door) -> Door:
        self.doors.append(door)
        return door

    def _introduce(self, family: Any, address: Any, hello: dict[str, Any], until: float) -> Channel:
        soon = min(until, time.monotonic() + STRANGER_SECONDS)
        sock = self.sockets.connected(family, address, soon)
        return self.sockets.introduced(sock, hello, soon)

    def _until_reached(self, reach: Callable[[], T], peer: int, where: str, seconds: float) -> T:
        """Try until it works, or the time is over; a refusal may be a stranger's, and is not final."""
        deadline = time.monotonic() + seconds
        whom = f"{self._title(peer)} at {where}"
        pause, say = 0.02, time.monotonic() + leader.LOG_EVERY
        refusal: Refused | None = None
        while True:
            self._attend()
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
                    self._attend()  # rank 0 may have given up meanwhile, and knows why
                    # The deadline ends an attempt, too, and its error says less than a refusal.
                    if refusal is not None:
                        raise refusal from None
                    raise RendezvousError(
                        f"{self._title()} did not reach {whom} within "
                        f"{round(seconds, 1):g} s: {error}",
                        ranks=[peer],
                    ) from None
                if now >= say or is_news:
                    _log.warning("%s still tries to reach %s: %s", self._title(), whom, error)
                    say = now + leader.LOG_EVERY
                time.sleep(min(pause, max(0.0, deadline - now)))
                pause = min(2 * pause, 0.5)

    def _connect_peers(self) -> None:
        for peer in range(self.about.rank):
            host, port = self.places[peer]
            self.sockets.allow(host)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            until = self.attempt_ends + (0.0 if peer else _WORD_SECONDS)
            hello = {"purpose": "peer", "group": self.name, "from": self.about.rank, "to": peer}
            for stream in range(self.streams):

                def reach(
                    family: Any = family,
                    address: Any = (host, port),
                    hello: Mapping[str, Any] = hello,
                    stream: int = stream,
                    until: float = until,
                ) -> Channel:
                    return self._introduce(family, address, {**hello, "stream": stream}, until)

                left = max(0.0, until - time.monotonic())
                channel = self._until_reached(reach, peer, f"{host}:{port}", left)
                with self.changed:
                    self.peers[peer, stream] = channel

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

    def _wait_for_peers(self) -> None:
        """Wait until every peer of higher rank has made its connections."""
        rank, size = self.about.rank, self.about.size
        everything = [(r, s) for r in range(rank + 1, size) for s in range(self.streams)]
        say = time.monotonic() + leader.LOG_EVERY
        while True:
            self._attend()
            with self.changed:
                absent = sorted({r for r, s in everything if (r, s) not in self.peers})
                if not absent:
                    return
                self.changed.wait(0.05)
            now = time.monotonic()
            who = f"{self.about.titles(absent)} of {size} to connect"
            if now >= self.attempt_ends:
                waited = f"{self._title()} waited {round(self.attempt_ends - self.begun, 1):g} s"
                raise _BrokenError(f"{waited} for {who}{self.note}", ranks=absent)
            if now >= say and self.leader is None:
                _log.warning("%s waits for %s", self._title(), who)
                say = now + leader.LOG_EVERY

    def _leave_together(self, stands_for: int) -> list[int]:
        """Nobody goes before everybody has all connections; return each rank's host, by number.

        `stands_for` is the rank that stands for this rank's host.
        """
        assert self.store is not None
        try:
            ready = {"group": self.name, "leader": stands_for}
            self.store.set(f"ready/{self.whole[0]}", ready)
        except OSError as error:
            raise self._first_rank_lost(error) from None
        store = self.store
        go = self._hear(lambda: store.get("all/go"), "for the others to connect", self.attempt_ends)
        if (
            not isinstance(go, list)
            or len(go) != self.about.size
            or not all(type(host) is int for host in go)
        ):
            raise HandshakeError("rank 0 went on without this rank")
        return go

    # Shared memory --------------------------------------------------------------------------

    def _claim(self) -> str:
        """Return the digest of this host's name, equal where memory may be shared; empty for none."""
        return digest(self.key, "host", self.about.host_id) if self.about.host_id else ""

    def _claimed(self) -> list[int]:
        claim = self._claim()
        return [r for r in range(self.about.size) if self.claims[r] == claim] if claim else []

    def _share(self) -> tuple[list[int], _core.ShmGroup | None]:
        """Return the ranks that share memory with this one, proved, and the memory."""
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
        except (OSError, HandshakeError) as error:
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                raise
            self._attend()  # the store may know better which rank it was
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
            self._attend()
            if time.monotonic() >= self.attempt_ends + late:
                raise HandshakeError(f"nothing came in time from {self._title(peer)}", ranks=[peer])
        with memory.naming(peer, self._title(peer)):
            return channel.receive(time.monotonic() + STRANGER_SECONDS)

    def _unproved(self, here: list[int]) -> str:
        """Return a note on the ranks that did not prove to be where they say they are."""
        absent = [r for r in self._claimed() if r not in here]
        if not absent:
            return ""
        who = self.about.titles(absent)
        return f", {who} said to be on this host but not reached through its memory"

    # Names ----------------------------------------------------------------------------------

    def _title(self, rank: int | None = None) -> str:
        """Return the name in texts of a rank, by default of this one."""
        return self.about.title(self.about.rank if rank is None else rank)
