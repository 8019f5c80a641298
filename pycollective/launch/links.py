"""A test of the connections that a group needs, by all of its workers.

In a rendezvous each worker connects to all workers of lower rank. The test tries these links. Over each
link that works the two workers exchange their findings. In the end, all workers that can reach each
other, even through a third one, have the result of every link.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pycollective.errors import RendezvousError
from pycollective.launch.description import Description, host_and_port
from pycollective.launch.handshake import Channel, HandshakeError, Refused
from pycollective.launch.handshake_server import HandshakeServer
from pycollective.launch.sockets import Sockets

__all__ = ["Findings", "probe"]

CONNECT_SECONDS = 2.0
"""Seconds that a connection may take; an answer takes far less."""
_SETTLED_SECONDS = CONNECT_SECONDS + 1.0
"""Seconds without a change after which the findings about all workers are final."""
_GRACE_SECONDS = 1.5
"""Seconds to pass on that all links work."""
_ROUND_SECONDS = 0.25
_NEWS_FROM = 3
_TEXT = 200

WORKS = "works"
REFUSED = "refused"
SILENT = "silent"
HERE = "here"
UNREACHABLE = "unreachable"
TURNED_AWAY = "turned away"
OTHER = "other"
_KINDS = (WORKS, REFUSED, SILENT, HERE, UNREACHABLE, TURNED_AWAY, OTHER)


@dataclass
class Findings:
    """The links between the workers of a group: the findings of all workers."""

    heard: set[int]
    """The workers that take part, this one included."""
    links: dict[tuple[int, int], tuple[str, str]]
    """Kind and text of the result, by the worker that tries and the worker of lower rank."""
    routes: dict[tuple[int, int], str]
    """Reasons why the first worker's host has no route to the second worker."""
    places: dict[int, tuple[str, int]]
    """The host and port where a worker listens."""
    others: dict[int, list[str]]
    """The addresses in the descriptions of workers whose description differs from this one's."""

    def missing(self, size: int) -> list[int]:
        """Return the workers that no other worker has reached."""
        return [r for r in range(size) if r not in self.heard]

    def broken(self) -> list[tuple[int, int]]:
        """Return the links that do not work, between workers that take part."""
        return sorted(
            pair
            for pair, (kind, _) in self.links.items()
            if kind != WORKS and self.heard.issuperset(pair)
        )

    def all_work(self, size: int) -> bool:
        """Return True if every link has been tried and works."""
        pairs = [(a, b) for a in range(size) for b in range(a)]
        return all(self.links.get(pair, ("", ""))[0] == WORKS for pair in pairs)


def probe(
    rank: int,
    size: int,
    addresses: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Findings:
    """Test the links between all workers, together with the other workers.

    Parameters
    ----------
    rank, size, addresses, environment
        As of `pycollective.launch.rendezvous`.
    seconds : float
        The longest time that the test takes. The test ends earlier if all links work, or if all
        workers take part and nothing changes.

    Raises
    ------
    RendezvousError
        If this process cannot take part, for example because it cannot listen at its address.
    """
    about = Description.of_environment(environment, rank, size, addresses)
    try:
        places = {r: host_and_port(address) for r, address in enumerate(addresses)}
        return _Probe(about, addresses, places).run(seconds)
    except (ValueError, OSError) as error:
        raise RendezvousError(str(error)) from None


class _Probe:
    """One worker's part of the test: it listens, tries its links, and exchanges findings.

    ``addresses`` and ``places`` come from the description: those of all workers, or of rank 0 alone.
    Raises RendezvousError for an address beyond loopback if there is no secret.
    """

    def __init__(
        self, about: Description, addresses: Sequence[str], places: Mapping[int, tuple[str, int]]
    ) -> None:
        self._about = about
        self._addresses = list(addresses)
        self._cleanup = contextlib.ExitStack()
        self._sockets = Sockets(about)
        self._changed = threading.Condition()
        self._last_change = time.monotonic()
        self._versions: dict[tuple[int, int], int] = {}
        self._well: set[int] = set()  # the workers that know that all links work
        self._busy: set[int] = set()
        self._told: dict[int, float] = {}
        self.findings = Findings({about.rank}, {}, {}, dict(places), {})
        self._server: HandshakeServer | None = None
        self._threads: list[threading.Thread] = []

    def run(self, seconds: float) -> Findings:
        """Try the links until all work, nothing changes any more, or the time is over."""
        deadline = time.monotonic() + seconds
        size, rank = self._about.size, self._about.rank
        well_since = 0.0
        try:
            if rank == 0 or self._about.own is not None:
                self._listen()
            while True:
                now = time.monotonic()
                self._look_at_routes()
                with self._changed:
                    if self.findings.all_work(size):
                        self._well.add(rank)
                        well_since = well_since or now
                        if len(self._well) == size or now > well_since + _GRACE_SECONDS:
                            break
                    tried = len(self.findings.links) == size * (size - 1) // 2
                    everybody = len(self.findings.heard) == size and tried
                    if everybody and now > self._last_change + _SETTLED_SECONDS:
                        break
                if now >= deadline:
                    break
                self._begin_round(deadline)
                with self._changed:
                    self._changed.wait(min(_ROUND_SECONDS, max(0.0, deadline - now)))
        finally:
            for thread in self._threads:
                thread.join()  # each ends within the time limit of a connection
            if self._server is not None:
                self._server.close()
            self._cleanup.close()
        with self._changed:
            return self.findings

    # Listening ------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._about.rank == 0:
            sock = self._sockets.listen_at_own_address()
        else:
            sock = self._sockets.listen_for_peers(self._local_address(self.findings.places[0]))
        self._open(sock)

    def _open(self, sock: socket.socket) -> None:
        self._server = HandshakeServer(
            sock, self._sockets.key, self._about.size, self._enter, self._about.tls
        )

    def _local_address(self, place: tuple[str, int]) -> str:
        """Return the address of this host from which a place is reached."""
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0])
        return "0.0.0.0"

    def _enter(self, channel: Channel, hello: dict[str, Any]) -> None:
        soon = time.monotonic() + CONNECT_SECONDS
        peer = hello.get("from")
        known = type(peer) is int and 0 <= peer < self._about.size
        if hello.get("purpose") != "probe" or not known:
            raise HandshakeError("this is not the address of the rendezvous")
        with contextlib.closing(channel):
            self._take(channel.receive(soon))
            channel.send(self._news(), soon)

    # Trying ---------------------------------------------------------------------------------

    def _begin_round(self, deadline: float) -> None:
        """Try the links that do not work yet, and exchange findings over some that do."""
        rank, now = self._about.rank, time.monotonic()
        with self._changed:
            lower = [b for b in range(rank) if b in self.findings.places and b not in self._busy]
            works = [b for b in lower if self.findings.links.get((rank, b), ("",))[0] == WORKS]
            fresh = sorted(works, key=lambda b: (b != 0, self._told.get(b, 0.0)))[:_NEWS_FROM]
            chosen = [b for b in lower if b not in works] + fresh
            for b in chosen:
                self._told[b] = now
            self._busy.update(chosen)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for b in chosen:
            thread = threading.Thread(target=self._try, args=(b, deadline), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _try(self, peer: int, deadline: float) -> None:
        soon = min(deadline, time.monotonic() + CONNECT_SECONDS)
        kind, text = WORKS, ""
        try:
            # Look up the address in each round: a name may resolve only later.
            family, _, _, _, address = socket.getaddrinfo(
                *self.findings.places[peer], type=socket.SOCK_STREAM
            )[0]
            self._sockets.allow(str(address[0]))
            sock = self._sockets.connected(family, address, soon)
            hello = {"purpose": "probe", "from": self._about.rank}
            with contextlib.closing(_introduced(self._sockets, sock, hello, soon)) as channel:
                self._reached(channel)
                # This exchange fails if the peer has already ended its test.
                with contextlib.suppress(OSError, HandshakeError):
                    channel.send(self._news(), soon)
                    self._take(channel.receive(soon))
        except (OSError, HandshakeError, RendezvousError) as error:
            kind, text = _outcome(error)
        with self._changed:
            self._busy.discard(peer)
            pair = self._about.rank, peer
            before = self.findings.links.get(pair, ("",))[0]
            # A link that works keeps its result when the peer ends its test. A refusal keeps its
            # result until the link works.
            gone = before == TURNED_AWAY and kind != WORKS
            if before not in (WORKS, kind) and not gone:
                self._put(pair, (kind, text), self._versions.get(pair, 0) + 1)
            self._changed.notify_all()

    def _reached(self, channel: Channel) -> None:
        """Listen at a connection's local address if the description has none for this worker."""
        with self._changed:
            if self._about.own is not None or self._server is not None:
                return
            own = self._sockets.own_addresses(str(channel.socket.getsockname()[0]))[0]
            family = socket.AF_INET6 if ":" in own else socket.AF_INET
            sock = socket.create_server((own, 0), family=family, backlog=self._about.size)
            self._open(sock)
            self.findings.places[self._about.rank] = own, int(sock.getsockname()[1])

    def _look_at_routes(self) -> None:
        """Ask this host's routing table for a route to each worker; nothing is sent."""
        rank = self._about.rank
        for peer, place in list(self.findings.places.items()):
            if peer == rank:
                continue
            text = ""
            with contextlib.suppress(socket.gaierror):
                family, _, _, _, address = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
                with socket.socket(family, socket.SOCK_DGRAM) as sock:
                    try:
                        sock.connect(address)
                    except OSError as error:
                        text = _words(error)
            with self._changed:
                if text:
                    self.findings.routes[rank, peer] = text
                else:
                    self.findings.routes.pop((rank, peer), None)

    # The exchange of findings ---------------------------------------------------------------

    def _put(self, pair: tuple[int, int], outcome: tuple[str, str], version: int) -> None:
        """Store the newest result of a link, from the worker that tries it."""
        self._versions[pair] = version
        if self.findings.links.get(pair) != outcome:
            self.findings.links[pair] = outcome
            self._last_change = time.monotonic()

    def _news(self) -> dict[str, Any]:
        with self._changed:
            found = self.findings
            return {
                "from": self._about.rank,
                "heard": sorted(found.heard),
                "links": [[*p, *what, self._versions[p]] for p, what in found.links.items()],
                "routes": [[a, b, text] for (a, b), text in found.routes.items()],
                "places": [[r, *place] for r, place in found.places.items()],
                "others": {str(r): a for r, a in found.others.items()},
                "well": sorted(self._well),
                "addresses": self._addresses,
            }

    def _take(self, news: dict[str, Any]) -> None:
        """Add another worker's findings, except those about this worker's own links."""
        size, rank = self._about.size, self._about.rank
        try:
            peer = _rank(news["from"], size)
            heard = {_rank(r, size) for r in news["heard"]}
            links = {
                (_rank(a, size), _rank(b, size)): (str(kind), _clean(text), _rank(version, 1 << 30))
                for a, b, kind, text, version in news["links"]
            }
            routes = {
                (_rank(a, size), _rank(b, size)): _clean(text) for a, b, text in news["routes"]
            }
            places = {
                _rank(r, size): (_clean(host), _rank(port, 65536))
                for r, host, port in news["places"]
            }
            others = {
                _rank(int(r), size): [_clean(a) for a in addresses]
                for r, addresses in news["others"].items()
            }
            well = {_rank(r, size) for r in news["well"]}
            addresses = [_clean(a) for a in news["addresses"]]
            if not all(kind in _KINDS for kind, _, _ in links.values()):
                raise ValueError("an unknown kind of finding")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HandshakeError(f"no news: {error}") from None
        with self._changed:
            before = json.dumps([sorted(self.findings.heard), sorted(self.findings.places)])
            self.findings.heard |= heard | {peer}
            if addresses != self._addresses:
                self.findings.others[peer] = addresses
            for r, theirs in others.items():
                if r != rank and theirs != self._addresses:
                    self.findings.others.setdefault(r, theirs)
            for pair, (*what, version) in links.items():
                if pair[0] != rank and version > self._versions.get(pair, 0):
                    self._put(pair, (what[0], what[1]), version)
            for pair, text in routes.items():
                if pair[0] != rank:
                    self.findings.routes[pair] = text
            if len(self._addresses) < size:  # else the description has all addresses
                for r, place in places.items():
                    if r not in (0, rank):
                        self.findings.places[r] = place
            self._well |= well
            after = json.dumps([sorted(self.findings.heard), sorted(self.findings.places)])
            if before != after:
                self._last_change = time.monotonic()
            self._changed.notify_all()


def _introduced(
    sockets: Sockets, sock: socket.socket, hello: dict[str, Any], deadline: float
) -> Channel:
    try:
        return sockets.introduced(sock, hello, deadline)
    except OSError as error:
        raise HandshakeError(
            f"somebody listens there, and does not speak as a worker does: {error}"
        ) from None


def _rank(value: Any, size: int) -> int:
    if type(value) is not int or not 0 <= value < size:
        raise ValueError(f"{value!r} is not a number below {size}")
    return value


def _clean(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is no text")
    return "".join(c if c.isprintable() else "?" for c in text[:_TEXT])


def _words(error: OSError) -> str:
    return _clean(str(error.strerror or error))


def _outcome(error: Exception) -> tuple[str, str]:
    """Return the kind and the text of a failed attempt."""
    if isinstance(error, Refused):
        return TURNED_AWAY, _clean(str(error))
    if isinstance(error, (HandshakeError, RendezvousError, socket.gaierror)):
        text = error.strerror if isinstance(error, OSError) else str(error)
        return OTHER, _clean(str(text))
    if isinstance(error, ConnectionRefusedError):
        return REFUSED, ""
    assert isinstance(error, OSError)
    if isinstance(error, TimeoutError):  # also the kernel's ETIMEDOUT
        return SILENT, ""
    if error.errno in (errno.EINVAL, errno.EACCES, errno.EPERM):
        return HERE, _words(error)
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN):
        return UNREACHABLE, _words(error)
    return OTHER, _words(error)
