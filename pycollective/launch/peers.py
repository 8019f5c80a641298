"""The connections between the members of a group: sockets, and shared memory on a common host."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pycollective import _core
from pycollective.errors import RendezvousError
from pycollective.launch import leader, memory
from pycollective.launch.description import MAX_STREAMS, Description
from pycollective.launch.handshake import Channel, HandshakeError, Refused, digest
from pycollective.launch.handshake_server import (
    HANDSHAKE_SECONDS,
    SHORTAGES,
    Enter,
    HandshakeServer,
)
from pycollective.launch.members import int_of, places_of
from pycollective.launch.sockets import Sockets, is_loopback, is_unspecified

_log = logging.getLogger("pycollective")

T = TypeVar("T")

LEADER_GRACE_SECONDS = 2.0
"""Extra seconds that other ranks wait, so that rank 0 can first report the missing ranks."""
_CONNECTIONS = 2
"""Connections of every two ranks besides those for collectives: control, and point-to-point."""


class BrokenError(RendezvousError):
    """Members failed to connect; an elastic group repeats the rendezvous with the other ones."""


class NotNowError(HandshakeError):
    """Rank 0 has chosen the members of a group without this rank, which must try again later."""

    def __init__(self) -> None:
        super().__init__("rank 0 has made a group without this rank, or is making one")


class Peers:
    """The connections of a rank to the others, and its time limit: from `begun` to `deadline`.

    ``poll`` reads rank 0's messages, and raises an error if the rendezvous has failed. ``log_wait``
    logs the ranks for which this rank waits. The rank and size in ``about`` change when the members are
    known.
    """

    def __init__(
        self,
        about: Description,
        seconds: float,
        poll: Callable[[], object],
        log_wait: Callable[[str], object],
    ) -> None:
        self._about, self._poll, self._log_wait = about, poll, log_wait
        self.seconds = seconds
        self.begin()
        self.sockets = Sockets(about)
        self.places: list[tuple[str, int]] = []  # this rank's addresses for peers, by interface
        self.hosts: list[str] = []  # the ranks' addresses, as this rank reaches them
        self.streams = _CONNECTIONS + (about.streams if about.rank == 0 else MAX_STREAMS)
        key, host = self.sockets.key, about.host_id
        self.claim = digest(key, "host", host) if host else ""
        """The digest of this host's id, equal on ranks that may share memory; empty to share none."""
        self.memory: memory.Sharing | None = None
        if host:
            self.memory = memory.Sharing(key, about.size, bool(about.secret))
            self.sockets.servers.append(self.memory.server)
        self._creator: socket.socket | None = None  # to the rank that creates the memory
        self._changed = threading.Condition()  # guards the next three
        self.name = ""  # of the group; empty until the members are known
        self._channels: dict[tuple[int, int], Channel] = {}  # by rank and number of the stream
        self._over = False
        self._places: list[list[tuple[str, int]]] = []  # by rank and interface
        self._near: dict[int, str] = {}  # Unix sockets of ranks with an equal `claim`
        self.ends = self.deadline  # of the attempt, the same for all members, from rank 0
        self._note = ""

    def begin(self, seconds_later: float = 0.0) -> None:
        """Start this rank's time limit, now or later."""
        self.begun = time.monotonic() + seconds_later
        self.deadline = self.begun + self.seconds

    def title(self, rank: int | None = None) -> str:
        """Return the name of a rank in messages, by default of this one."""
        return self._about.title(self._about.rank if rank is None else rank)

    def serve(self, sock: socket.socket, address: str, enter: Enter) -> HandshakeServer:
        """Serve a socket; peers use ``address`` if the socket listens at all of this host's.

        A loopback address would lead peers on other hosts to themselves. They use the address by
        which they have reached rank 0, which is on this host.
        """
        server = self.sockets.serve(sock, enter, self._about.size * self.streams)
        if is_unspecified(server.address[0]) and not is_loopback(address):
            server.address = address, server.address[1]
        return server

    def listen(self, addresses: list[str], first: HandshakeServer | None = None) -> None:
        """Listen at this rank's addresses; ``first`` is a server that listens at the first."""
        if first is None:
            sock = self.sockets.listen_for_peers(addresses[0])
            first = self.serve(sock, addresses[0], self.enter)
        servers = [first]
        for address in addresses:
            if address != first.address[0]:
                servers.append(self.serve(self.sockets.listen(address), address, self.enter))
        self.places = [server.address for server in servers]

    def introduce(
        self, family: Any, address: Any, hello: dict[str, Any], until: float, source: str = ""
    ) -> Channel:
        """Return an authenticated connection to an address, as `Sockets.reach` does."""
        soon = min(until, time.monotonic() + HANDSHAKE_SECONDS)
        return self.sockets.reach(family, address, hello, soon, source)

    def until_reached(self, reach: Callable[[], T], peer: int, where: str, seconds: float) -> T:
        """Call ``reach`` until it succeeds or the time is over.

        A refusal is not final, because another program may have sent it.
        """
        deadline = time.monotonic() + seconds
        whom = f"{self.title(peer)} at {where}"
        pause, log_at = 0.02, time.monotonic() + leader.LOG_EVERY
        refusal: Refused | None = None
        while True:
            self._poll()
            try:
                return reach()
            except (OSError, HandshakeError) as error:
                if isinstance(error, OSError) and error.errno in SHORTAGES:
                    raise
                now = time.monotonic()
                if isinstance(error, NotNowError) and self._about.least:
                    deadline = now + seconds  # rank 0 still runs, so waiting is useful
                    self.begin()
                is_news = isinstance(error, Refused) and str(error) != str(refusal)
                if isinstance(error, Refused):
                    refusal = error
                if now >= deadline:
                    self._poll()  # raises the error of rank 0, if that has given up meanwhile
                    # The last attempt may have ended at the deadline; a refusal explains more.
                    if refusal is not None:
                        raise refusal from None
                    waited = f"{self.title()} did not reach {whom} within {round(seconds, 1):g} s"
                    raise RendezvousError(f"{waited}: {error}", ranks=[peer]) from None
                if now >= log_at or is_news:
                    _log.warning("%s still tries to reach %s: %s", self.title(), whom, error)
                    log_at = now + leader.LOG_EVERY
                time.sleep(min(pause, max(0.0, deadline - now)))
                pause = min(2 * pause, 0.5, max(0.02, seconds / 8))

    def use(self, table: dict[str, Any], first: str) -> None:
        """Use the members' addresses in rank 0's table; rank 0 was reached at ``first``."""
        self.streams = int_of(table, "streams", 1 + _CONNECTIONS, _CONNECTIONS + MAX_STREAMS)
        places, near = [], {}
        for rank, place in enumerate(table["places"]):
            if not isinstance(place, list) or len(place) != 5:
                raise HandshakeError("rank 0 sent a table without addresses")
            host = str(place[0])
            if is_unspecified(host):  # a rank on rank 0's host listens at all addresses
                host = first
            first_place = host, int_of({"port": place[1]}, "port", 1, 65535)
            places.append([first_place, *places_of({"more": place[4]}, "more")])
            if place[2] == self.claim != "":
                near[rank] = str(place[3])
        self.hosts = [of_rank[0][0] for of_rank in places]
        self._places, self._note = places, str(table.get("note", ""))
        self._near = near
        with self._changed:
            self.name = str(table["group"])
            self._changed.notify_all()

    def drop(self, *, for_ever: bool = False) -> None:
        """Close the connections, for another attempt or ``for_ever``."""
        with self._changed:
            self.name, self._over = "", for_ever
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()
            if self._creator is not None:
                self._creator.close()
                self._creator = None
            self._changed.notify_all()
        if for_ever and self.memory is not None:
            self.memory.close()

    def enter(self, channel: Channel, hello: dict[str, Any]) -> None:
        """Accept a connection of a peer of higher rank."""
        with self._changed:  # a peer may have the table before this rank
            self._changed.wait_for(lambda: self.name or self._over, HANDSHAKE_SECONDS)
            name = self.name
        if hello.get("purpose") != "peer" or hello.get("group") != name or not name:
            raise HandshakeError("the connection is for another group")
        rank = int_of(hello, "from", self._about.rank + 1, self._about.size - 1)
        stream = int_of(hello, "stream", 0, self.streams - 1)
        if hello.get("to") != self._about.rank:
            raise HandshakeError("the connection is for another rank")
        if self._about.tls is not None and stream:
            self._about.tls.end(channel.socket, time.monotonic() + HANDSHAKE_SECONDS)
        with self._changed:
            if self._over or self.name != name or (rank, stream) in self._channels:
                raise HandshakeError("the connection exists already, or comes too late")
            self._channels[rank, stream] = channel
            self._changed.notify_all()

    def connect(self) -> None:
        """Connect to the peers of lower rank, and wait for connections from those of higher rank."""
        rank, size = self._about.rank, self._about.size
        for peer, places in enumerate(self._places[:rank]):
            until = self.ends + (0.0 if peer else LEADER_GRACE_SECONDS)
            hello = {"purpose": "peer", "group": self.name, "from": rank, "to": peer}
            interfaces = min(len(places), len(self.places))
            for stream in range(self.streams):
                # Stream 0 is for control, the last one for point-to-point messages.
                collective = 0 < stream < self.streams - 1
                number = (stream - 1) % interfaces if collective else 0
                host, port = places[number]
                self.sockets.allow(host)
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                source = self.places[number][0] if interfaces > 1 else ""
                about = {**hello, "stream": stream}
                reach = partial(self.introduce, family, (host, port), about, until, source)
                left = max(0.0, until - time.monotonic())
                where = f"{host}:{port}" + f" from {source}" * bool(source)
                channel = self.until_reached(reach, peer, where, left)
                with self._changed:
                    self._channels[peer, stream] = channel
        everything = [(r, s) for r in range(rank + 1, size) for s in range(self.streams)]
        log_at = time.monotonic() + leader.LOG_EVERY
        while True:
            self._poll()
            with self._changed:
                absent = sorted({r for r, s in everything if (r, s) not in self._channels})
                if not absent:
                    return
                self._changed.wait(0.05)
            now = time.monotonic()
            who = f"{self._about.titles(absent)} of {size} to connect"
            if now >= self.ends:
                waited = f"{self.title()} waited {round(self.ends - self.begun, 1):g} s"
                raise BrokenError(f"{waited} for {who}{self._note}", ranks=absent)
            if now >= log_at:
                self._log_wait(f"{self.title()} waits for {who}")
                log_at = now + leader.LOG_EVERY

    def nearest(self) -> int:
        """Return the lowest rank that this rank reaches on its host; this rank if there is none."""
        rank = self._about.rank
        until = min(self.ends, time.monotonic() + memory.PROOF_SECONDS)
        for other in range(rank):
            if other in self._near and self.memory is not None:
                self._creator = self.memory.reach(self._near[other], self.name, rank, until)
                if self._creator is not None:
                    return other
        return rank

    def share(self, hosts: list[int]) -> _core.ShmGroup | None:
        """Return the memory that this rank shares with the others of its host; None for none.

        ``hosts`` has for each rank the rank that creates the memory of its host.
        """
        rank = self._about.rank
        here = [r for r in range(len(hosts)) if hosts[r] == hosts[rank]]
        if len(here) == 1 or self.memory is None:
            return None
        if self._creator is None:
            return self.memory.create(self.name, here, self._poll)
        return memory.join(self._creator, here.index(rank), len(here))

    def group(self, hosts: list[int], shared: _core.ShmGroup | None) -> tuple[_core.Group, str]:
        """Return the core's group and a text about it; ``hosts`` numbers each rank's host."""
        rank, size = self._about.rank, self._about.size
        here = [r for r in range(size) if hosts[r] == hosts[rank]]
        absent = [r for r in self._near if r not in here]
        unproved = f", no shared memory with {self._about.titles(absent)} despite an equal host id"
        unproved *= bool(absent)
        elsewhere = [r for r in range(size) if hosts[r] != hosts[rank]]
        if self._about.one_host and len(set(hosts)) > 1:
            raise RendezvousError(
                f"PYCOLLECTIVE_TRANSPORT=shm, but {self.title()} shares no memory with "
                f"{self._about.titles(elsewhere)}{unproved}: unset the variable, or set it to 'tcp'",
                ranks=elsewhere,
            )
        others = [r for r in range(size) if r != rank]
        if self._about.tls is not None:  # a thread connects the core to TLS
            from pycollective.launch.relay import Relay  # loads OpenSSL, so only here

            relay = Relay({r: self._channels[r, 0].socket for r in others})
            for r in others:
                self._channels[r, 0] = Channel(relay.ends[r])
        last = self.streams - 1  # for point-to-point messages
        sockets: list[list[int]] = [[] for _ in range(size)]
        pipes = [-1] * size
        for r in others:
            streams = [self._channels[r, s].socket.fileno() for s in range(last + 1)]
            sockets[r], pipes[r] = streams[: 1 if r in here else last], streams[last]
        if len(set(hosts)) == size:
            return _core.TcpGroup(rank, sockets, pipes), "over TCP" + unproved
        if len(here) == 1 or shared is None:
            shared = _core.ShmGroup.create(1, 0)
            shared.join(0)
        how = "through shared memory" if len(here) > 1 else "over TCP"
        if 1 < len(here) < size:
            near = self._about.titles([r for r in here if r != rank])
            how += f" with {near} and over TCP with the others"
        how += f", {len(set(hosts))} hosts{unproved}"
        return _core.MixedGroup(rank, sockets, pipes, shared, hosts), how
