"""The meeting of processes over TCP: rank 0 listens, all come, and every two ranks connect.

Every connection is authenticated (`handshake`) before anything else is read from it. What the core gets
are the connected descriptors; from then on nobody listens, so nobody can come any more.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from pycollective import _core, tuning
from pycollective.errors import RendezvousError
from pycollective.rendezvous import interfaces, memory
from pycollective.rendezvous.description import MAX_RANKS, MAX_STREAMS, Description
from pycollective.rendezvous.door import MAX_STRANGERS, SHORTAGES, STRANGER_SECONDS, Door
from pycollective.rendezvous.handshake import (
    Channel,
    HandshakeError,
    Refused,
    digest,
    introduce,
    key_of,
)

__all__ = ["Meeting"]

_log = logging.getLogger("pycollective")

LOG_EVERY = 10.0
"""Seconds between two messages about who is missing."""
_CONNECTIONS = 2
"""Of every two ranks, besides those for collectives: control, and messages of send and recv."""


def _int(message: dict[str, Any], name: str, low: int, high: int) -> int:
    value = message.get(name)
    if type(value) is not int or not low <= value <= high:
        raise HandshakeError(f"{name} is not a number from {low} to {high}")
    return value


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def _is_unspecified(address: str) -> bool:
    return address in ("0.0.0.0", "::")


def _cannot_listen(about: Description, error: OSError) -> RendezvousError:
    host, port = about.own or (about.host, about.port)
    return RendezvousError(
        f"rank {about.rank} cannot listen at {host}:{port}, its own address: {error.strerror}; is it "
        "taken by another process (two tasks with one address, or one that was not ended)?"
    )


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
        self.deadline = time.monotonic() + seconds
        self.key = key_of(about.secret)
        self.cleanup = cleanup
        self.changed = threading.Condition()
        self.joined: dict[int, Channel] = {}  # rank 0's: the others
        self.places: dict[int, tuple[str, int]] = {}  # where they listen
        self.claims: dict[int, str] = {}  # what they say of their host
        self.peers: dict[tuple[int, int], Channel] = {}  # by rank and number of the stream
        self.doors: list[Door] = []
        self.over = False
        cleanup.callback(self._close_all)

    def _close_all(self) -> None:
        with self.changed:
            self.over = True  # who is about to enter does not
            self.changed.notify_all()
            for channel in [*self.joined.values(), *self.peers.values()]:
                channel.close()

    def group(self) -> tuple[_core.Group, str, str, str]:
        """Meet the others: the whole course of it; returns what `connect` returns."""
        name, door = self._gather() if self.about.rank == 0 else self._join()
        self._connect_peers(name)
        self._wait(
            lambda: [
                r
                for r in range(self.about.size)
                if r != self.about.rank
                and any((r, s) not in self.peers for s in range(self.streams))
            ],
            "to connect",
        )
        rank, size = self.about.rank, self.about.size
        here, shared = self._share()
        hosts = self._leave_together(here[0])
        door.close()
        if self.about.one_host and len(set(hosts)) > 1:
            elsewhere = [r for r in range(size) if hosts[r] != hosts[rank]]
            raise RendezvousError(
                f"PYCOLLECTIVE_TRANSPORT=shm, and rank {rank} shares no memory with "
                f"{_ranks(elsewhere)}{self._unproved(here)}: leave it out, or set it to 'tcp'"
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
        own = str(door.address[0])
        if len(set(hosts)) == size:
            how = "over TCP" + self._unproved(here)
            return _core.TcpGroup(rank, sockets, pipes), name, how, own
        if shared is None:
            shared = _core.ShmGroup.create(1)
            shared.join(0)
        how = "through shared memory"
        if len(here) < size:
            how += f" with {_ranks([r for r in here if r != rank])} and over TCP with the others"
            how = how if len(here) > 1 else "over TCP"
        return (
            _core.MixedGroup(rank, sockets, pipes, shared, hosts),
            name,
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
        claimed = self._claimed() or [self.about.rank]
        channels = {r: self.peers[r, 0] for r in claimed if r != self.about.rank}

        def listen(sock: socket.socket, enter: Callable[[Channel, dict[str, Any]], None]) -> Door:
            return self._open(Door(sock, self.key, self.about.size, enter))

        return memory.share(self.about.rank, claimed, channels, self.key, self.deadline, listen)

    def _unproved(self, here: list[int]) -> str:
        """Of whom it was not proved that they are where they say they are."""
        absent = [r for r in self._claimed() if r not in here]
        if not absent:
            return ""
        return f", {_ranks(absent)} said to be on this host but not reached through its memory"

    # Addresses ------------------------------------------------------------------------------

    def allow(self, address: str) -> None:
        """Raise where an address is beyond loopback, and nothing protects it."""
        if not self.about.secret and not self.about.insecure and not _is_loopback(address):
            raise RendezvousError(
                f"{address} is not a loopback address, and there is no secret: set "
                "PYCOLLECTIVE_SECRET (or PYCOLLECTIVE_SECRET_FILE) to the same long random text on "
                "every rank, or PYCOLLECTIVE_INSECURE=1 where everybody on the network is trusted"
            )

    def _resolve(self) -> tuple[Any, Any]:
        found = socket.getaddrinfo(self.about.host, self.about.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        self.allow(str(address[0]))
        return family, address

    def own_address(self, default: str) -> str:
        """Where this rank listens for its peers."""
        if not self.about.interface:
            return default
        try:
            family = socket.AF_INET6 if ":" in default else socket.AF_INET  # as rank 0's
            there = interfaces.interface_addresses(family)
            _, address = interfaces.choose(self.about.interface, there)
        except ValueError as error:
            raise RendezvousError(f"PYCOLLECTIVE_SOCKET_IFNAME: {error}") from None
        self.allow(address)
        return address

    def _listen(self, family: Any, address: Any) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(min(self.about.size + MAX_STRANGERS, 1024))
        except OSError:
            sock.close()
            raise
        return sock

    def _open(self, door: Door) -> Door:
        self.doors.append(door)
        return door

    def _peer_door(self, address: str, group: str) -> Door:
        sock = self.listen_for_peers(address)
        door = self._open(
            Door(
                sock,
                self.key,
                self.about.size * self.streams,
                lambda channel, hello: self._enter_peer(channel, hello, group),
                self.about.tls,
            )
        )
        if _is_unspecified(door.address[0]):  # the others are told where they can reach it
            door.address = address, door.address[1]
        self.cleanup.callback(door.close)
        return door

    def listen_for_peers(self, address: str) -> socket.socket:
        """Listen at an address, or where the description says that this rank does.

        A name of this host may mean its loopback address, or that of a service in front of it; then
        it listens at all of its addresses. A loopback address that stands there itself means all are
        on this host.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if self.about.own is None:
            return self._listen(family, (address, 0))
        host, port = self.about.own
        try:
            found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            own = str(found[0][4][0])
            if own in (address, host) or not _is_loopback(own):
                return self._listen(family, (own, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL and not isinstance(error, socket.gaierror):
                raise _cannot_listen(self.about, error) from None
        everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
        self.allow(everywhere)
        try:
            return self._listen(family, (everywhere, port))
        except OSError as error:
            raise _cannot_listen(self.about, error) from None

    # Rank 0 ---------------------------------------------------------------------------------

    def _gather(self) -> tuple[str, Door]:
        sock = self._inherited() or self.listen_at_own_address()
        self.cleanup.callback(sock.close)
        own = self.own_address(str(sock.getsockname()[0]))
        self.streams = _CONNECTIONS + self.about.streams
        name = secrets.token_hex(8)
        front = self._open(Door(sock, self.key, self.about.size, self._enter_group, self.about.tls))
        try:
            others = range(1, self.about.size)
            self._wait(
                lambda: [r for r in others if r not in self.joined or self.joined[r].ended()],
                f"to come to {self.about.host}:{self.about.port}",
                front,
            )
        except RendezvousError as error:
            self._tell_all({"error": str(error)})
            raise
        finally:
            front.close()
        present = [r for r in range(self.about.size) if r not in self._gone()]
        if len(present) < self.about.size:
            for rank in self.joined.keys() - set(present):
                self.joined[rank].close()
            self.joined = {i: self.joined[r] for i, r in enumerate(present) if r}
            self.places = {i: self.places[r] for i, r in enumerate(present) if r}
            self.claims = {i: self.claims[r] for i, r in enumerate(present) if r}
            self._renumber(present)
        door = self._peer_door(own, name)
        self.places[0] = door.address
        self.claims[0] = self._claim()
        places = [[*self.places[r], self.claims[r]] for r in range(self.about.size)]
        choices = {name: tuning.as_json(rows) for name, rows in self.about.choices.items()}
        self._tell_all(
            {
                "group": name,
                "streams": self.streams,
                "places": places,
                "choices": choices,
                "ranks": present,
                "least": self.about.least,
            }
        )
        return name, door

    def listen_at_own_address(self) -> socket.socket:
        """Listen where the others look for rank 0, which this is."""
        family, address = self._resolve()
        if self.about.own is None:
            return self._listen(family, address)
        return self.listen_for_peers(str(address[0]))

    def _gone(self) -> list[int]:
        """Those who have not come, where not all must."""
        if not self.about.least:
            return []
        others = range(1, self.about.size)
        return [r for r in others if r not in self.joined or self.joined[r].ended()]

    def _renumber(self, ranks: list[int]) -> None:
        """Go on as one of those who have come."""
        self.about.rank, self.about.size = ranks.index(self.about.rank), len(ranks)

    def _inherited(self) -> socket.socket | None:
        """The launcher's listening socket, if it is still the one that was meant."""
        if self.about.listener < 0:
            return None
        try:
            sock = socket.socket(fileno=self.about.listener)
        except OSError:
            return None
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and sock.getsockname()[1] == self.about.port:
            return sock
        sock.detach()
        return None

    def _enter_group(self, channel: Channel, hello: dict[str, Any]) -> None:
        soon = time.monotonic() + STRANGER_SECONDS
        try:
            if hello.get("purpose") != "join":
                raise HandshakeError("this is not where ranks meet")
            size = _int(hello, "size", 1, MAX_RANKS)
            if size != self.about.size:
                raise HandshakeError(
                    f"the group has {self.about.size} ranks for rank 0, and {size} for you"
                )
            rank = _int(hello, "rank", 1, self.about.size - 1)
            channel.send({"welcome": True}, soon)
            place = channel.receive(soon)
            host = str(ipaddress.ip_address(str(place.get("host"))))
            port = _int(place, "port", 1, 65535)
            claim = str(place.get("claim", ""))[:64]
        except (HandshakeError, ValueError) as error:
            channel.send({"error": str(error)}, soon)
            channel.close()
            return
        with self.changed:
            if self.over:
                raise HandshakeError("the meeting is over")
            before = self.joined.get(rank)
            if before is not None and not before.ended():
                taken = True
            else:  # it is new, or its connection has ended: it was started again
                if before is not None:
                    before.close()
                taken = False
                self.joined[rank] = channel
                self.places[rank] = (host, port)
                self.claims[rank] = claim
                self.changed.notify_all()
        if taken:
            channel.send({"error": f"rank {rank} is taken: every process needs its own"}, soon)
            channel.close()

    def _tell_all(self, message: dict[str, Any]) -> None:
        for channel in list(self.joined.values()):  # more may come at any time
            with contextlib.suppress(OSError):  # who is gone is found out below
                channel.send(message, time.monotonic() + STRANGER_SECONDS)

    # The others -----------------------------------------------------------------------------

    def _join(self) -> tuple[str, Door]:
        hello = {"purpose": "join", "rank": self.about.rank, "size": self.about.size}
        where = f"{self.about.host}:{self.about.port}"

        def reach() -> Channel:
            family, address = self._resolve()
            channel = self._introduce(family, address, hello)
            # At the same address there may still be the door of an earlier meeting, about to close.
            try:
                answer = channel.receive(time.monotonic() + STRANGER_SECONDS)
                if "error" in answer:
                    raise RendezvousError(str(answer["error"]))
            except BaseException:
                channel.close()
                raise
            return channel

        patience = self.about.patience if self.about.least else None
        self.store = self._until_reached(reach, f"rank 0 at {where}", patience)
        self.cleanup.callback(self.store.close)
        own = self.own_address(str(self.store.socket.getsockname()[0]))
        # The name of the group is not known yet: who comes early waits for it.
        self.streams = _CONNECTIONS + MAX_STREAMS
        door = self._peer_door(own, "")
        place = {"host": door.address[0], "port": door.address[1], "claim": self._claim()}
        self.store.send(place, self.deadline)
        table = self._hear(f"for rank 0 at {where} to have everybody")
        name = table.get("group")
        places = table.get("places")
        if not isinstance(name, str) or not isinstance(places, list):
            raise HandshakeError("no table of the group")
        ranks = table.get("ranks")
        if not isinstance(ranks, list) or self.about.rank not in ranks:
            raise HandshakeError("a table without this rank")
        # Who comes back to a group that has lost others takes its word for how many are enough.
        least = self.about.least or _int(table, "least", 0, self.about.size) or self.about.size
        if len(ranks) < least:
            raise HandshakeError("a table of too few ranks")
        self._renumber(ranks)
        if len(places) != self.about.size:
            raise HandshakeError("a table of another size")
        self.streams = _int(table, "streams", 1 + _CONNECTIONS, _CONNECTIONS + MAX_STREAMS)
        try:
            self.about.choices = tuning.checked_tables(table.get("choices"))
        except ValueError as error:
            raise HandshakeError(f"rank 0's table of algorithms cannot be used: {error}") from None
        for rank, place in enumerate(places):
            if not isinstance(place, list) or len(place) != 3:
                raise HandshakeError("a table without addresses")
            host = str(place[0])
            if rank == 0 and _is_unspecified(host):  # as rank 0 does not know how it is reached
                host = str(self.store.socket.getpeername()[0])
            self.places[rank] = (host, _int({"port": place[1]}, "port", 1, 65535))
            self.claims[rank] = str(place[2])
        with self.changed:
            self.name = name
            self.changed.notify_all()
        return name, door

    name = ""

    def _until_reached(
        self, reach: Callable[[], Channel], whom: str, seconds: float | None = None
    ) -> Channel:
        seconds = self.seconds if seconds is None else seconds
        deadline = self.deadline - self.seconds + seconds
        pause, say = 0.02, time.monotonic() + LOG_EVERY
        while True:
            try:
                return reach()
            except Refused:
                raise
            except (OSError, HandshakeError) as error:
                if isinstance(error, OSError) and error.errno in SHORTAGES:
                    raise
                self._watch()
                now = time.monotonic()
                if now >= deadline:
                    raise RendezvousError(
                        f"rank {self.about.rank} did not reach {whom} within {seconds:g} s: {error}"
                    ) from None
                if now >= say:
                    _log.warning(
                        "rank %d still tries to reach %s: %s", self.about.rank, whom, error
                    )
                    say = now + LOG_EVERY
                time.sleep(min(pause, max(0.0, deadline - now)))
                pause = min(2 * pause, 0.5)

    def _introduce(self, family: Any, address: Any, hello: dict[str, Any]) -> Channel:
        soon = min(self.deadline, time.monotonic() + STRANGER_SECONDS)
        return self.introduced(self.connected(family, address, soon), hello, soon)

    def connected(self, family: Any, address: Any, deadline: float) -> socket.socket:
        """Return a connection to an address."""
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():  # TCP can connect a port to itself
                raise ConnectionRefusedError("nobody listens")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return sock

    def introduced(self, sock: socket.socket, hello: dict[str, Any], deadline: float) -> Channel:
        """Prove, over a connection, that this rank belongs to the group; takes the socket over."""
        try:
            if self.about.tls is not None:
                return self.about.tls.introduce(sock, self.key, hello, deadline)
            return introduce(sock, self.key, hello, deadline)
        except BaseException:
            sock.close()
            raise

    def _hear(self, what: str) -> dict[str, Any]:
        """The next message of rank 0."""
        late = 1.0  # rank 0, who knows whom it waits for, is to say so first
        say = time.monotonic() + LOG_EVERY + late
        while True:
            while not self.store.readable(0.05):
                self._watch()
                now = time.monotonic()
                # Rank 0 names the missing at its own deadline, which may be a little later.
                if now >= self.deadline + 2:
                    raise RendezvousError(
                        f"rank {self.about.rank} waited {self.seconds:g} s {what}"
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
        try:
            message = self.store.receive(time.monotonic() + STRANGER_SECONDS)
        except OSError as error:
            raise RendezvousError(f"rank 0 is gone before the group was made: {error}") from None
        if "error" in message:
            raise RendezvousError(str(message["error"]))
        if "waits" not in message:
            return message
        _log.warning("rank %d: %s", self.about.rank, message["waits"])
        return None

    # All ------------------------------------------------------------------------------------

    def _enter_peer(self, channel: Channel, hello: dict[str, Any], name: str) -> None:
        if not name:
            with self.changed:
                self.changed.wait_for(lambda: self.name or self.over, STRANGER_SECONDS)
                name = self.name
        rank = _int(hello, "from", self.about.rank + 1, self.about.size - 1)
        stream = _int(hello, "stream", 0, self.streams - 1)
        if hello.get("purpose") != "peer" or hello.get("group") != name or not name:
            raise HandshakeError("another group's")
        if hello.get("to") != self.about.rank:
            raise HandshakeError("another rank's")
        if self.about.tls is not None and stream:
            self.about.tls.end(channel.socket, time.monotonic() + STRANGER_SECONDS)
        with self.changed:
            if self.over or (rank, stream) in self.peers:
                raise HandshakeError("a connection that is there already")
            self.peers[rank, stream] = channel
            self.changed.notify_all()

    def _connect_peers(self, name: str) -> None:
        for peer in range(self.about.rank):
            host, port = self.places[peer]
            self.allow(host)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            for stream in range(self.streams):
                hello = {
                    "purpose": "peer",
                    "group": name,
                    "from": self.about.rank,
                    "to": peer,
                    "stream": stream,
                }

                def reach(
                    family: Any = family,
                    address: Any = (host, port),
                    hello: dict[str, Any] = hello,
                ) -> Channel:
                    self._watch_others()
                    return self._introduce(family, address, hello)

                channel = self._until_reached(reach, f"rank {peer} at {host}:{port}")
                with self.changed:
                    self.peers[peer, stream] = channel

    def _watch(self) -> None:
        """Raise if there is no use in waiting."""
        for door in self.doors:
            if door.shortage is not None:
                raise door.shortage
        if self.about.ended is not None and self.about.ended.text:
            raise RendezvousError(
                f"rank {self.about.rank} waits for the others in vain: {self.about.ended.text}"
            )
        failure = self.old.failure if self.old is not None else None
        if failure:
            raise RendezvousError(f"the group that the new one is made of has failed: {failure}")

    def _watch_others(self) -> None:
        """Raise if rank 0 says that the group fails, or for rank 0 if one has ended."""
        if self.about.rank != 0:
            if self.store.readable() and self._message() is not None:
                raise HandshakeError("rank 0 went on without this rank")
            return
        for rank, channel in self.joined.items():
            if channel.ended():
                error = f"rank {rank} is gone before the group was made"
                self._tell_all({"error": error})
                raise RendezvousError(error)

    def _wait(self, missing: Callable[[], list[int]], what: str, front: Door | None = None) -> None:
        """Wait until no rank is missing."""
        say = time.monotonic() + LOG_EVERY
        while True:
            with self.changed:
                absent = missing()
                if not absent:
                    return
                self.changed.wait(0.05)
            self._watch()
            if front is None:
                self._watch_others()
            now = time.monotonic()
            who = _ranks(absent) + f" of {self.about.size}"
            away = front.turned_away if front else 0
            strangers = f" ({away} connections could not prove that they belong here)" * bool(away)
            if front is not None and self._are_enough(self.about.size - len(absent)):
                _log.warning("rank %d goes on without %s", self.about.rank, who)
                return
            if now >= self.deadline:
                raise RendezvousError(
                    f"rank {self.about.rank} waited {self.seconds:g} s for {who} {what}{strangers}"
                )
            if now >= say:
                self._say(f"rank {self.about.rank} waits for {who} {what}{strangers}")
                say = now + LOG_EVERY

    def _say(self, waits: str) -> None:
        """Log whom this rank waits for; rank 0 also lets the others know."""
        _log.warning("%s", waits)
        self._tell_all({"waits": waits})

    def _are_enough(self, ranks: int) -> bool:
        late = time.monotonic() >= self.deadline - self.seconds + self.about.patience
        return bool(self.about.least) and late and ranks >= self.about.least

    def _leave_together(self, leader: int) -> list[int]:
        """Nobody goes before everybody has all connections; return each rank's host, by number.

        `leader` stands for this rank's host.
        """
        if self.about.rank != 0:
            self.store.send({"ready": leader}, self.deadline)
            hosts = self._hear("for the others to connect").get("go")
            if (
                not isinstance(hosts, list)
                or len(hosts) != self.about.size
                or not all(type(h) is int for h in hosts)
            ):
                raise HandshakeError("rank 0 went on without this rank")
            return hosts
        leaders = {0: leader}
        waiting = dict(self.joined)
        say = time.monotonic() + LOG_EVERY
        try:
            while waiting:
                for rank, channel in list(waiting.items()):
                    if not channel.readable():
                        continue
                    try:
                        message = channel.receive(time.monotonic() + STRANGER_SECONDS)
                        leaders[rank] = _int(message, "ready", 0, self.about.size - 1)
                    except (OSError, HandshakeError) as error:
                        raise RendezvousError(
                            f"rank {rank} is gone before the group was made: {error}"
                        ) from None
                    del waiting[rank]
                self._watch()
                now = time.monotonic()
                who = f"{_ranks(list(waiting))} to connect"
                if waiting and now >= self.deadline:
                    raise RendezvousError(f"rank 0 waited {self.seconds:g} s for {who}")
                if waiting and now >= say:
                    self._say(f"rank 0 waits for {who}")
                    say = now + LOG_EVERY
                if waiting:  # one after the other: all of them must come
                    next(iter(waiting.values())).readable(0.01)
        except RendezvousError as error:
            self._tell_all({"error": str(error)})
            raise
        numbers = {leader: i for i, leader in enumerate(sorted(set(leaders.values())))}
        hosts = [numbers[leaders[r]] for r in range(self.about.size)]
        self._tell_all({"go": hosts})
        return hosts


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:20])) + (", …" if len(ranks) > 20 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
