"""The meeting of processes over TCP: rank 0 listens, all come, and every two ranks connect.

Every connection is authenticated (`handshake`) before anything else is read from it. What the core gets
are the connected descriptors; from then on nobody listens, so nobody can come any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pycollective import _core, tuning
from pycollective.errors import RendezvousError
from pycollective.rendezvous import interfaces, memory
from pycollective.rendezvous.handshake import (
    Channel,
    HandshakeError,
    Refused,
    answer,
    digest,
    introduce,
    key_of,
)

__all__ = ["Description", "connect"]

_log = logging.getLogger("pycollective")

LOG_EVERY = 10.0
"""Seconds between two messages about who is missing."""
STRANGER_SECONDS = 10.0
"""How long a connection may take to prove that it is one of ours."""
MAX_STRANGERS = 64
"""Connections beyond the group's size that may be proving at the same time; the oldest makes room."""
MAX_RANKS = 1024
MAX_STREAMS = 8
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""What this process or machine lacks: waiting for the others does not help."""
_CONNECTIONS = 2
"""Of every two ranks, besides those for collectives: control, and messages of send and recv."""


@dataclass
class Description:
    """What the environment says of the group, and of this process in it."""

    rank: int
    size: int
    host: str
    port: int
    secret: bytes  # empty: none
    insecure: bool = False
    interface: str = ""
    streams: int = 1  # for messages, of every pair of ranks; rank 0's word counts
    listener: int = -1  # the descriptor of rank 0's listening socket, if the launcher made it
    host_id: str = ""  # what equals on ranks that may share memory; empty: TCP only
    choices: tuning.Rows = field(default_factory=list)  # for algorithm="auto"; rank 0's count
    own: tuple[str, int] | None = None  # where this rank listens for its peers; None: any port


def connect(
    about: Description, seconds: float, old: _core.Group | None = None
) -> tuple[_core.Group, str, str, str]:
    """Meet the other ranks.

    Parameters
    ----------
    about : Description
        The group.
    seconds : float
        How long to wait for the others.
    old : Group, optional
        The group that the ranks are in already: if it fails, nobody waits any longer.

    Returns
    -------
    tuple
        The core's group, the group's name, how the ranks talk, and where this rank was reached.

    Raises
    ------
    RendezvousError
        The others did not come, are not who they should be, or say that they cannot go on.
    """
    if about.size == 1:
        return _core.TcpGroup(0, [[]], [-1]), "of one", "over TCP", about.host
    with contextlib.ExitStack() as cleanup:
        try:
            return _Meeting(about, seconds, cleanup, old).group()
        except RendezvousError:
            raise
        except HandshakeError as error:
            raise RendezvousError(
                f"rank {about.rank} was refused at {about.host}:{about.port}: {error}"
                + (
                    ". All ranks need the same PYCOLLECTIVE_SECRET"
                    if "secrets" in str(error)
                    else ""
                )
            ) from None
        # The core's too: it duplicates the descriptors.
        except (OSError, RuntimeError, MemoryError) as error:
            raise RendezvousError(
                f"rank {about.rank} cannot meet the group at {about.host}:{about.port}: "
                f"{error or 'no memory is left'}"
            ) from None


class Addresses:
    """Ranks that are reached over TCP: to make a new group, they meet at the address of its first."""

    def __init__(self, about: Description, host: str, group: _core.Group) -> None:
        self._about = about
        self._host = host
        self._group = group
        self._listener: socket.socket | None = None

    def offer(self, size: int) -> bytes:
        """Listen; return the address."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server(
            (self._host, 0), family=family, backlog=min(size, 1024)
        )
        return f"{self._listener.getsockname()[1]} {self._host}".encode()

    def accept(
        self, offer: bytes, rank: int, size: int, seconds: float
    ) -> tuple[_core.Group, Addresses]:
        """Meet the others; with the secret of this group."""
        listener, self._listener = self._listener, None
        if size == 1 and listener:
            listener.close()
            listener = None
        port, _, host = offer.rstrip(b"\0").decode().partition(" ")
        about = dataclasses.replace(
            self._about,
            rank=rank,
            size=size,
            host=host,
            port=int(port),
            listener=listener.detach() if listener else -1,
            own=None,
        )
        group, _, _, own = connect(about, min(seconds, 300.0), self._group)
        return group, Addresses(about, own if size > 1 else self._host, group)


class _Door:
    """A listening socket; who comes in has proved to know the key. Strangers cost little and go soon."""

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        size: int,
        enter: Callable[[Channel, dict[str, Any]], None],
    ) -> None:
        self._socket = sock
        self._key = key
        self._room = MAX_STRANGERS + size
        self._enter = enter
        self._lock = threading.Lock()
        self._strangers: dict[int, socket.socket] = {}  # in the order of their coming
        self._closed = threading.Event()
        self.turned_away = 0
        self.shortage: OSError | None = None  # nobody can come in any more
        self.address: tuple[str, int] = sock.getsockname()[:2]  # of no use of a Unix socket
        sock.settimeout(0.2)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                guest, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # closed, or out of descriptors
                with self._lock:
                    if error.errno in _SHORTAGES and not self._hang_up_oldest():
                        self.shortage = error
                time.sleep(0.01)
                continue
            with self._lock:
                if self._closed.is_set():
                    guest.close()
                    return
                if len(self._strangers) >= self._room:
                    self._hang_up_oldest()
                self._strangers[id(guest)] = guest
            try:
                threading.Thread(target=self._greet, args=(guest,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._forget(guest)
                guest.close()

    def _hang_up_oldest(self) -> bool:
        """Make room, with the lock held; return whether there was anybody."""
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            _hang_up(self._strangers.pop(oldest))
        return oldest is not None

    def _forget(self, guest: socket.socket) -> bool:
        with self._lock:
            return self._strangers.pop(id(guest), None) is not None

    def _greet(self, guest: socket.socket) -> None:
        try:
            if guest.family != socket.AF_UNIX:
                guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel, hello = answer(guest, self._key, time.monotonic() + STRANGER_SECONDS)
        except (HandshakeError, OSError):
            self.turned_away += 1
            self._forget(guest)
            guest.close()
            return
        if not self._forget(guest) or self._closed.is_set():
            guest.close()
            return
        try:
            self._enter(channel, hello)
        except (HandshakeError, OSError):
            guest.close()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
        _hang_up(self._socket)  # wakes accept
        with self._lock:
            for guest in self._strangers.values():
                _hang_up(guest)
        self._thread.join()
        self._socket.close()


def _hang_up(sock: socket.socket) -> None:
    """Wake whoever reads from a socket, who then closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


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


class _Meeting:
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
        self.doors: list[_Door] = []
        self.over = False
        cleanup.callback(self._close_all)

    def _close_all(self) -> None:
        with self.changed:
            self.over = True  # who is about to enter does not
            self.changed.notify_all()
            for channel in [*self.joined.values(), *self.peers.values()]:
                channel.close()

    def group(self) -> tuple[_core.Group, str, str, str]:
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

        def listen(sock: socket.socket, enter: Callable[[Channel, dict[str, Any]], None]) -> _Door:
            return self._open(_Door(sock, self.key, self.about.size, enter))

        return memory.share(self.about.rank, claimed, channels, self.key, self.deadline, listen)

    def _unproved(self, here: list[int]) -> str:
        """Of whom it was not proved that they are where they say they are."""
        absent = [r for r in self._claimed() if r not in here]
        if not absent:
            return ""
        return f", {_ranks(absent)} said to be on this host but not reached through its memory"

    # Addresses ------------------------------------------------------------------------------

    def _allow(self, address: str) -> None:
        if not self.about.secret and not self.about.insecure and not _is_loopback(address):
            raise RendezvousError(
                f"{address} is not a loopback address, and there is no secret: set "
                "PYCOLLECTIVE_SECRET (or PYCOLLECTIVE_SECRET_FILE) to the same long random text on "
                "every rank, or PYCOLLECTIVE_INSECURE=1 where everybody on the network is trusted"
            )

    def _resolve(self) -> tuple[Any, Any]:
        found = socket.getaddrinfo(self.about.host, self.about.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        self._allow(str(address[0]))
        return family, address

    def _own_address(self, default: str) -> str:
        """Where this rank listens for its peers."""
        if not self.about.interface:
            return default
        try:
            family = socket.AF_INET6 if ":" in default else socket.AF_INET  # as rank 0's
            there = interfaces.interface_addresses(family)
            _, address = interfaces.choose(self.about.interface, there)
        except ValueError as error:
            raise RendezvousError(f"PYCOLLECTIVE_SOCKET_IFNAME: {error}") from None
        self._allow(address)
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

    def _open(self, door: _Door) -> _Door:
        self.doors.append(door)
        return door

    def _peer_door(self, address: str, group: str) -> _Door:
        sock = self._listen_for_peers(address)
        door = self._open(
            _Door(
                sock,
                self.key,
                self.about.size * self.streams,
                lambda channel, hello: self._enter_peer(channel, hello, group),
            )
        )
        if _is_unspecified(door.address[0]):  # the others are told where they can reach it
            door.address = address, door.address[1]
        self.cleanup.callback(door.close)
        return door

    def _listen_for_peers(self, address: str) -> socket.socket:
        """Listen at an address, or where the description says that this rank does.

        A name of this host may mean its loopback address, or that of a service in front of it; then
        it listens at all of its addresses.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if self.about.own is None:
            return self._listen(family, (address, 0))
        host, port = self.about.own
        try:
            found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            own = str(found[0][4][0])
            if own == address or not _is_loopback(own):
                return self._listen(family, (own, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL and not isinstance(error, socket.gaierror):
                raise _cannot_listen(self.about, error) from None
        everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
        self._allow(everywhere)
        try:
            return self._listen(family, (everywhere, port))
        except OSError as error:
            raise _cannot_listen(self.about, error) from None

    # Rank 0 ---------------------------------------------------------------------------------

    def _gather(self) -> tuple[str, _Door]:
        family, address = self._resolve()
        sock = self._inherited()
        if sock is None and self.about.own is None:
            sock = self._listen(family, address)
        elif sock is None:
            sock = self._listen_for_peers(str(address[0]))
        self.cleanup.callback(sock.close)
        own = self._own_address(str(sock.getsockname()[0]))
        self.streams = _CONNECTIONS + self.about.streams
        name = secrets.token_hex(8)
        front = self._open(_Door(sock, self.key, self.about.size, self._enter_group))
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
        door = self._peer_door(own, name)
        self.places[0] = door.address
        self.claims[0] = self._claim()
        places = [[*self.places[r], self.claims[r]] for r in range(self.about.size)]
        choices = tuning.as_json(self.about.choices)
        self._tell_all(
            {"group": name, "streams": self.streams, "places": places, "choices": choices}
        )
        return name, door

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
        for channel in self.joined.values():
            with contextlib.suppress(OSError):  # who is gone is found out below
                channel.send(message, time.monotonic() + STRANGER_SECONDS)

    # The others -----------------------------------------------------------------------------

    def _join(self) -> tuple[str, _Door]:
        hello = {"purpose": "join", "rank": self.about.rank, "size": self.about.size}
        where = f"{self.about.host}:{self.about.port}"

        def reach() -> Channel:
            family, address = self._resolve()
            return self._introduce(family, address, hello)

        self.store = self._until_reached(reach, f"rank 0 at {where}")
        self.cleanup.callback(self.store.close)
        own = self._own_address(str(self.store.socket.getsockname()[0]))
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
        if len(places) != self.about.size:
            raise HandshakeError("a table of another size")
        self.streams = _int(table, "streams", 1 + _CONNECTIONS, _CONNECTIONS + MAX_STREAMS)
        try:
            self.about.choices = tuning.checked(table.get("choices"))
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

    def _until_reached(self, reach: Callable[[], Channel], whom: str) -> Channel:
        pause, say = 0.02, time.monotonic() + LOG_EVERY
        while True:
            try:
                return reach()
            except Refused:
                raise
            except (OSError, HandshakeError) as error:
                if isinstance(error, OSError) and error.errno in _SHORTAGES:
                    raise
                self._watch()
                now = time.monotonic()
                if now >= self.deadline:
                    raise RendezvousError(
                        f"rank {self.about.rank} did not reach {whom} within {self.seconds:g} s: "
                        f"{error}"
                    ) from None
                if now >= say:
                    _log.warning(
                        "rank %d still tries to reach %s: %s", self.about.rank, whom, error
                    )
                    say = now + LOG_EVERY
                time.sleep(min(pause, max(0.0, self.deadline - now)))
                pause = min(2 * pause, 0.5)

    def _introduce(self, family: Any, address: Any, hello: dict[str, Any]) -> Channel:
        soon = min(self.deadline, time.monotonic() + STRANGER_SECONDS)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, soon - time.monotonic()))
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():  # TCP can connect a port to itself
                raise ConnectionRefusedError("nobody listens")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return introduce(sock, self.key, hello, soon)
        except BaseException:
            sock.close()
            raise

    def _hear(self, what: str) -> dict[str, Any]:
        """The next message of rank 0."""
        say = time.monotonic() + LOG_EVERY
        while not self.store.readable():
            self._watch()
            now = time.monotonic()
            # Rank 0 names the missing at its own deadline, which may be a little later.
            if now >= self.deadline + 2:
                raise RendezvousError(f"rank {self.about.rank} waited {self.seconds:g} s {what}")
            if now >= say:
                _log.warning("rank %d waits %s", self.about.rank, what)
                say = now + LOG_EVERY
            time.sleep(0.005)
        try:
            message = self.store.receive(time.monotonic() + STRANGER_SECONDS)
        except OSError as error:
            raise RendezvousError(f"rank 0 is gone before the group was made: {error}") from None
        if "error" in message:
            raise RendezvousError(str(message["error"]))
        return message

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
        with self.changed:
            if self.over or (rank, stream) in self.peers:
                raise HandshakeError("a connection that is there already")
            self.peers[rank, stream] = channel
            self.changed.notify_all()

    def _connect_peers(self, name: str) -> None:
        for peer in range(self.about.rank):
            host, port = self.places[peer]
            self._allow(host)
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
        failure = self.old.failure if self.old is not None else None
        if failure:
            raise RendezvousError(f"the group that the new one is made of has failed: {failure}")

    def _watch_others(self) -> None:
        """Raise if rank 0 says that the group fails, or for rank 0 if one has ended."""
        if self.about.rank != 0:
            if self.store.readable():
                self._hear("")  # an error, or the end
                raise HandshakeError("rank 0 went on without this rank")
            return
        for rank, channel in self.joined.items():
            if channel.ended():
                error = f"rank {rank} is gone before the group was made"
                self._tell_all({"error": error})
                raise RendezvousError(error)

    def _wait(
        self, missing: Callable[[], list[int]], what: str, front: _Door | None = None
    ) -> None:
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
            if now >= self.deadline:
                raise RendezvousError(
                    f"rank {self.about.rank} waited {self.seconds:g} s for {who} {what}{strangers}"
                )
            if now >= say:
                _log.warning("rank %d waits for %s %s%s", self.about.rank, who, what, strangers)
                say = now + LOG_EVERY

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
                if waiting and time.monotonic() >= self.deadline:
                    raise RendezvousError(
                        f"rank 0 waited {self.seconds:g} s for {_ranks(list(waiting))} to connect"
                    )
                if waiting:
                    time.sleep(0.002)
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
