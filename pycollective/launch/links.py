"""A test of the connections that a group needs, by all of its workers.

In a rendezvous each worker connects to all workers of lower rank. The test tries these links. Each
worker writes a report of its own links. Over each link that works the two workers exchange all reports
that they have. In the end, all workers that can reach each other, even through a third one, have the
result of every link.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pycollective.errors import RendezvousError
from pycollective.launch.description import Description, host_and_port
from pycollective.launch.handshake import Channel, HandshakeError, Refused
from pycollective.launch.sockets import Sockets

CONNECT_SECONDS = 2.0
"""Seconds that a connection may take; an answer takes far less."""
_SETTLED_SECONDS = CONNECT_SECONDS + 1.0
"""Seconds without a change after which the findings about all workers are final."""
_GRACE_SECONDS = 1.5
"""Seconds to pass on that all links work."""
_ROUND_SECONDS = 0.25
_EXCHANGES_A_ROUND = 3
_TEXT_LENGTH = 200

# Results of an attempt to connect. HERE: this host's routes or firewall let it send nothing there.
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

    participants: set[int]
    """The workers that take part in the test, including this one."""
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
        return [r for r in range(size) if r not in self.participants]

    def broken(self) -> list[tuple[int, int]]:
        """Return the links that do not work, between workers that take part."""
        return sorted(
            pair
            for pair, (kind, _) in self.links.items()
            if kind != WORKS and self.participants.issuperset(pair)
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
    """Test the links between all workers, together with the other workers."""
    about = Description.of_environment(environment, rank, size, addresses)
    try:
        places = {r: host_and_port(address) for r, address in enumerate(addresses)}
        return _Probe(about, addresses, places).run(seconds)
    except (ValueError, OSError) as error:
        raise RendezvousError(str(error)) from None


@dataclass
class _Report:
    """The findings of one worker, which only that worker changes; the newest version counts."""

    rank: int
    addresses: list[str]
    """The addresses in the worker's description."""
    version: int = 0
    links: dict[int, tuple[str, str]] = field(default_factory=dict)
    routes: dict[int, str] = field(default_factory=dict)
    place: tuple[str, int] | None = None
    """The host and port where the worker listens, if the description has none."""
    all_links_work: bool = False
    """True: the worker knows that all links work."""

    @classmethod
    def of(cls, value: Any, size: int) -> _Report:
        """Return the report in a message; raise one of several errors if it is malformed."""
        links = {_number(int(peer), size): found for peer, found in value["links"].items()}
        host, port = value["place"] or ("", 0)
        return cls(
            _number(value["rank"], size),
            [_clean(address) for address in value["addresses"]],
            _number(value["version"], 1 << 30),
            {
                peer: (_KINDS[_KINDS.index(kind)], _clean(text))
                for peer, (kind, text) in links.items()
            },
            {_number(int(peer), size): _clean(text) for peer, text in value["routes"].items()},
            (_clean(host), _number(port, 65536)) if host else None,
            value["all_links_work"] is True,
        )


class _Probe:
    """One worker's part of the test: it listens, tries its links, and exchanges reports.

    ``addresses`` and ``places`` come from the description: those of all workers, or of rank 0 alone.
    Raises RendezvousError for an address beyond loopback if there is no secret.
    """

    def __init__(
        self, about: Description, addresses: Sequence[str], places: dict[int, tuple[str, int]]
    ) -> None:
        self._about = about
        self._sockets = Sockets(about)
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()  # guards the rest
        self._places = places
        self._own = _Report(about.rank, list(addresses))
        self._reports = {about.rank: self._own}
        self._last_change = time.monotonic()
        self._works_since = 0.0
        self._busy: set[int] = set()
        self._exchanged_at: dict[int, float] = {}

    def run(self, seconds: float) -> Findings:
        """Try the links until all work, nothing changes any more, or the time is over."""
        deadline = time.monotonic() + seconds
        try:
            if self._about.rank == 0 or self._about.own is not None:
                self._listen()
            while not self._is_over(deadline):
                self._find_routes()
                self._begin_round(deadline)
                with self._changed:
                    left = max(0.0, deadline - time.monotonic())
                    self._changed.wait(min(_ROUND_SECONDS, left))
        finally:
            for thread in self._threads:
                thread.join()  # each ends within the time limit of a connection
            self._sockets.close()
        return self._findings()

    def _findings(self) -> Findings:
        with self._changed:
            reports = self._reports.values()
            return Findings(
                set(self._reports),
                {(r.rank, peer): result for r in reports for peer, result in r.links.items()},
                {(r.rank, peer): text for r in reports for peer, text in r.routes.items()},
                dict(self._places),
                {r.rank: r.addresses for r in reports if r.addresses != self._own.addresses},
            )

    def _is_over(self, deadline: float) -> bool:
        """Return True if the findings are final and all workers know them, or the time is over."""
        size, now = self._about.size, time.monotonic()
        with self._changed:
            found = self._findings()
            if found.all_work(size):
                if not self._own.all_links_work:
                    self._own.all_links_work, self._works_since = True, now
                    self._has_changed()
                others_know = sum(r.all_links_work for r in self._reports.values()) == size
                if others_know or now > self._works_since + _GRACE_SECONDS:
                    return True
            is_complete = (
                len(found.participants) == size and len(found.links) == size * (size - 1) // 2
            )
            is_final = is_complete and now > self._last_change + _SETTLED_SECONDS
        return is_final or now >= deadline

    def _has_changed(self) -> None:
        """Begin a new version of this worker's report, with the lock held."""
        self._own.version += 1
        self._last_change = time.monotonic()

    # Listening ------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._about.rank == 0:
            sock = self._sockets.listen_at_own_address()
        else:
            address, _ = _route(self._places[0])
            sock = self._sockets.listen_for_peers(address or "0.0.0.0")
        self._sockets.serve(sock, self._enter)

    def _enter(self, channel: Channel, hello: dict[str, Any]) -> None:
        if hello.get("purpose") != "probe":
            raise HandshakeError("this is not the address of the rendezvous")
        soon = time.monotonic() + CONNECT_SECONDS
        with contextlib.closing(channel):
            self._keep_newest(channel.receive(soon))
            channel.send(self._reports_message(), soon)

    # Trying ---------------------------------------------------------------------------------

    def _begin_round(self, deadline: float) -> None:
        """Try the links that do not work yet, and exchange reports over some that do."""
        now = time.monotonic()
        with self._changed:
            lower = [b for b in range(self._about.rank) if b in self._places.keys() - self._busy]
            works = [b for b in lower if self._own.links.get(b, ("",))[0] == WORKS]
            fresh = sorted(works, key=lambda b: (b != 0, self._exchanged_at.get(b, 0.0)))[
                :_EXCHANGES_A_ROUND
            ]
            chosen = [b for b in lower if b not in works] + fresh
            self._exchanged_at |= dict.fromkeys(chosen, now)
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
                *self._places[peer], type=socket.SOCK_STREAM
            )[0]
            self._sockets.allow(str(address[0]))
            sock = self._sockets.connected(family, address, soon)
            with contextlib.closing(self._introduced(sock, soon)) as channel:
                self._listen_locally(channel)
                # This exchange fails if the peer has already ended its test.
                with contextlib.suppress(OSError, HandshakeError):
                    channel.send(self._reports_message(), soon)
                    self._keep_newest(channel.receive(soon))
        except (OSError, HandshakeError, RendezvousError) as error:
            kind, text = _result_of(error)
        with self._changed:
            self._busy.discard(peer)
            before = self._own.links.get(peer, ("",))[0]
            # A link that works keeps its result when the peer ends its test. A refusal keeps its
            # result until the link works.
            keeps_refusal = before == TURNED_AWAY and kind != WORKS
            if before not in (WORKS, kind) and not keeps_refusal:
                self._own.links[peer] = kind, text
                self._has_changed()
            self._changed.notify_all()

    def _introduced(self, sock: socket.socket, deadline: float) -> Channel:
        try:
            hello = {"purpose": "probe", "from": self._about.rank}
            return self._sockets.introduced(sock, hello, deadline)
        except OSError as error:
            raise HandshakeError(
                f"a program listens there that does not answer as a worker does: {error}"
            ) from None

    def _listen_locally(self, channel: Channel) -> None:
        """Listen at a connection's local address if the description has none for this worker."""
        with self._changed:
            if self._about.own is not None or self._sockets.servers:
                return
            own = self._sockets.own_addresses(str(channel.socket.getsockname()[0]))[0]
            server = self._sockets.serve(self._sockets.listen(own), self._enter)
            self._own.place = self._places[self._about.rank] = server.address
            self._has_changed()

    def _find_routes(self) -> None:
        """Ask this host's routing table for a route to each worker."""
        with self._changed:
            peers = [(r, place) for r, place in self._places.items() if r != self._about.rank]
        routes = {peer: why for peer, place in peers if (why := _route(place)[1])}
        with self._changed:
            if routes != self._own.routes:
                self._own.routes = routes
                self._has_changed()

    # The exchange of reports ----------------------------------------------------------------

    def _reports_message(self) -> dict[str, Any]:
        """Return copies of all reports, because the caller writes them without the lock."""
        with self._changed:
            return {"reports": [asdict(report) for report in self._reports.values()]}

    def _keep_newest(self, news: dict[str, Any]) -> None:
        """Keep the newest report of every other worker."""
        size = self._about.size
        try:
            reports = [_Report.of(value, size) for value in news["reports"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HandshakeError(f"the other side sent malformed reports: {error}") from None
        with self._changed:
            for report in reports:
                known = self._reports.get(report.rank)
                if known is self._own or (known and known.version >= report.version):
                    continue
                self._reports[report.rank] = report
                self._last_change = time.monotonic()
                if report.place and report.rank and len(self._own.addresses) < size:
                    self._places[report.rank] = report.place
            self._changed.notify_all()


def _route(place: tuple[str, int]) -> tuple[str, str]:
    """Return this host's address towards a place, or the reason for no route; nothing is sent.

    Both texts are empty if the host's name cannot be resolved.
    """
    with contextlib.suppress(socket.gaierror):
        family, _, _, _, address = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect(address)
                return str(sock.getsockname()[0]), ""
            except OSError as error:
                return "", _words(error)
    return "", ""


def _number(value: Any, size: int) -> int:
    if type(value) is not int or not 0 <= value < size:
        raise ValueError(f"{value!r} is not a number below {size}")
    return value


def _clean(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a text")
    return "".join(c if c.isprintable() else "?" for c in text[:_TEXT_LENGTH])


def _words(error: OSError) -> str:
    return _clean(str(error.strerror or error))


def _result_of(error: Exception) -> tuple[str, str]:
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
