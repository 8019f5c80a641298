"""The rendezvous of processes over TCP, through a key-value store at rank 0 (`store`).

1. Each rank sets ``join/<rank>``: the addresses at which it listens for its peers, and its deadline.
2. Rank 0 chooses the members (`leader`) and sets ``all/table``. A rank that is not in the table tries
   again later.
3. Every two members connect.
4. Each member sets ``near/<rank>``: the lowest rank that it reaches on its own host. Rank 0 sets
   ``all/near``: for each member, the rank that creates the shared memory of its host. These ranks send
   the memory's descriptor to the others (`memory`).
5. Each member sets ``ready/<rank>``: True if it shares memory. Rank 0 sets ``all/ready``: the number of
   each member's host. From then on no rank listens.

A member whose keys vanish before step 5 is lost, and the rendezvous fails. An elastic group repeats it:
rank 0 sets ``all/check``, and the ranks that answer with ``alive/<rank>`` in time are the members of the
next table. A rank that fails sets ``failed/<rank>``. Rank 0 ends the rendezvous with ``all/failed``.

Every connection is authenticated (`handshake`) before any other data are read from it. The core gets
the connected descriptors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pycollective import _core, tuning
from pycollective.errors import RendezvousError
from pycollective.launch import leader
from pycollective.launch.description import (
    MAX_RANKS,
    Description,
    FirstRankLostError,
)
from pycollective.launch.handshake import Channel, HandshakeError
from pycollective.launch.handshake_server import HANDSHAKE_SECONDS, HandshakeServer
from pycollective.launch.leader import Leader, reported
from pycollective.launch.members import int_of, milliseconds_until, time_of
from pycollective.launch.peers import (
    LEADER_GRACE_SECONDS,
    BrokenError,
    NotNowError,
    Peers,
)
from pycollective.launch.sockets import inherited
from pycollective.launch.store import Client, Store

__all__ = ["Joining"]

_log = logging.getLogger("pycollective")

T = TypeVar("T")

_token = secrets.token_hex(8)


class _RepeatError(Exception):
    """Rank 0 repeats the rendezvous, and this rank has answered its membership check."""


class Joining:
    """One process in a rendezvous, which fails if the group ``old`` fails."""

    def __init__(self, about: Description, seconds: float, old: _core.Group | None) -> None:
        self._listener = inherited(about)  # first, because from now on this rank must close it
        try:
            self.peers = Peers(about, seconds, self.poll, self._log_wait)
        except BaseException:
            if self._listener is not None:
                self._listener.close()
            raise
        self.about, self.old = about, old
        self.title = self.peers.title
        self.whole = about.rank, about.size  # before ranks are renumbered
        self.elastic = about.least > 0  # set again from rank 0's table
        self.store: Store | Client | None = None
        self.leader: Leader | None = None  # at rank 0
        self._refused = ""  # about the last join request that rank 0 refused
        self.check = 0  # the number of the last membership check that this rank has answered
        self.last_name = ""  # the group in the last table

    def close(self) -> None:
        """Close the sockets that the group does not use."""
        if self._listener is not None:
            self._listener.close()
        self.peers.sockets.close()
        self.peers.drop(for_ever=True)
        self._leave_store()

    def _leave_store(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def group(self) -> tuple[_core.Group, str, str, list[str]]:
        """Do the rendezvous.

        Returns
        -------
        group : Group
            The core's group.
        name, transport : str
            Its random name, and its transport in words.
        hosts : list of str
            The address at which this rank listens, and those by which it reaches the others, by rank.
        """
        try:
            while True:
                try:
                    self._join()
                    self.peers.connect()
                    hosts = self._agree("near", self.peers.nearest())
                    shared = self.peers.share(hosts)
                    hosts = self._agree("ready", shared is not None)
                    self.peers.sockets.close()
                    self._leave_store()  # a later failure is local to its rank
                    group, how = self.peers.group(hosts, shared)
                    known = self.peers.hosts
                    known[self.about.rank] = self.peers.places[0][0]
                    return group, self.peers.name, how, known
                except BrokenError as error:
                    if not self.elastic:
                        raise
                    self._report_failure(error, f"failed/{self.whole[0]}")
                    with contextlib.suppress(_RepeatError):
                        self._wait_for(
                            lambda: None, "for rank 0 to make the group again", self.peers.ends
                        )
                except _RepeatError:
                    pass
                except NotNowError as error:
                    _log.warning("rank %d tries again later: %s", self.whole[0], error)
                    self._leave_store()
                self.peers.drop()
        except RendezvousError as error:
            self._report_failure(
                error, f"failed/{self.whole[0]}" if self.whole[0] else "all/failed"
            )
            if isinstance(error, BrokenError):
                raise RendezvousError(str(error), ranks=error.ranks) from None
            raise

    def _report_failure(self, error: RendezvousError, key: str) -> None:
        """Set a key to this rank's error; rank 0 publishes the errors of the others."""
        if self.store is not None:
            with contextlib.suppress(OSError):
                self.store.set(key, {"error": str(error), "ranks": list(error.ranks)})

    # The store -----------------------------------------------------------------------------

    def poll(self, seconds: float = 0.0) -> bool:
        """Wait for changes in the store; return True if there are any."""
        for server in self.peers.sockets.servers:
            if server.shortage is not None:
                raise server.shortage
        ended = self.about.ended.rank_and_text if self.about.ended is not None else None
        changes = []
        if self.store is not None:  # also after a rank ended, because it may have set its error
            try:
                changes = self.store.wait(0.0 if ended else seconds)
            except OSError as error:
                raise self._first_rank_lost(error) from None
            if self.leader is not None:
                self.leader.step(changes)
            else:
                for key, value in changes:
                    if key == "all/waits":
                        _log.warning("%s: %s", self.title(), value)
            self._check_leader()
        if ended is not None:
            for text, ranks in self.leader.reasons.values() if self.leader else ():
                raise RendezvousError(text, ranks=ranks)
            rank, how = ended
            raise RendezvousError(
                f"{self.title()} cannot get all of its ranks: {how}", ranks=[rank]
            )
        failure = self.old.failure if self.old is not None else None
        if failure:
            raise RendezvousError(f"the group that is being split has failed: {failure}")
        return bool(changes)

    def _check_leader(self) -> None:
        """Raise an error if rank 0 has given up, repeats the rendezvous, or left out this rank."""
        assert self.store is not None
        why, check = self.store.get("all/failed"), self.store.get("all/check")
        if why is not None:
            text, ranks = reported(why, 0, self.about.size)
            raise RendezvousError(text, ranks=ranks)
        if check is not None and check != self.check:
            self.check = check
            self.last_name = self._table().get("group", "")  # also if this rank has not used it yet
            self._set("alive", check)
            self.peers.begin(leader.CHECK_SECONDS)
            raise _RepeatError
        if self.peers.name and self._table().get("group") != self.peers.name:
            raise HandshakeError("rank 0 went on without this rank")

    def _set(self, key: str, value: Any) -> Store | Client:
        """Set a key of this rank; return the store."""
        assert self.store is not None
        try:
            self.store.set(f"{key}/{self.whole[0]}", value)
        except OSError as error:
            raise self._first_rank_lost(error) from None
        return self.store

    def _table(self) -> dict[str, Any]:
        """Return rank 0's last table; an empty one if there is none."""
        assert self.store is not None
        table = self.store.get("all/table")
        return table if isinstance(table, dict) else {}

    def _wait_for(self, ready: Callable[[], T | None], what: str, until: float) -> T:
        """Return the result of ``ready`` as soon as there is one; ``until`` is rank 0's deadline."""
        late = 1.0  # rank 0 logs first, because it knows the missing ranks
        log_at = time.monotonic() + leader.LOG_EVERY + late
        while (found := ready()) is None:
            has_news = self.poll(0.05)
            now = time.monotonic()
            if now >= until + LEADER_GRACE_SECONDS and not has_news:
                waited = f"{self.title()} waited {round(until - self.peers.begun, 1):g} s {what}"
                raise RendezvousError(waited, ranks=[0])
            if has_news:
                log_at = now + leader.LOG_EVERY + late
            elif now >= log_at and self.leader is None:
                _log.warning("%s waits %s", self.title(), what)
                log_at = now + leader.LOG_EVERY
        return found

    def _log_wait(self, waits: str) -> None:
        if self.leader is not None:
            self.leader.log_wait(waits)
        else:
            _log.warning("%s", waits)

    def _first_rank_lost(self, error: OSError) -> RendezvousError:
        """Return rank 0's error if it set one before its connection ended, else that rank 0 is lost."""
        assert self.store is not None
        with contextlib.suppress(OSError, HandshakeError):
            self.store.wait(0.0)
        why = self.store.get("all/failed")
        if why is not None:
            text, ranks = reported(why, 0, self.about.size)
            return RendezvousError(text, ranks=ranks)
        text = f"{self.title(0)} was lost before the group was made: {error}"
        return FirstRankLostError(text, ranks=[0])

    # Joining --------------------------------------------------------------------------------

    def _listen(self) -> Store:
        """At rank 0, listen for join requests and peers: at one address, unless settings name others."""
        sock, self._listener = self._listener or self.peers.sockets.listen_at_own_address(), None
        address = str(sock.getsockname()[0])
        try:
            own = self.peers.sockets.own_addresses(address)
            store = self.store = Store()  # needs descriptors, so it can fail
        except (RendezvousError, OSError):
            sock.close()
            raise
        front = self.peers.serve(sock, own[0], self._enter)
        apart = self.about.own is None and own[0] != address
        self.peers.listen(own, None if apart else front)
        self.leader = Leader(
            self.about, store, self.peers.seconds, self.peers.streams, lambda: self._rejected(front)
        )
        return store

    def _rejected(self, front: HandshakeServer) -> str:
        """Return a text about rejected connections and the last join request that was refused."""
        failed = (
            f"{front.rejected} connections failed the handshake, the last one because {front.reason}"
            if front.rejected
            else ""
        )
        return ", ".join(filter(None, [failed, self._refused]))

    def _enter(self, channel: Channel, hello: dict[str, Any]) -> None:
        """Accept a join request, or the connection of a peer, at rank 0's address."""
        if hello.get("purpose") == "peer":
            self.peers.enter(channel, hello)
            return
        store = self.store  # read once: the main thread sets it to None when the group is made
        if hello.get("purpose") != "join" or not isinstance(store, Store):
            raise HandshakeError("this is not the address of the rendezvous")
        try:
            size = int_of(hello, "size", 1, MAX_RANKS)
            if size != self.whole[1]:
                text = f"rank 0 expects {self.whole[1]} ranks, but a rank that joins expects {size}"
                raise HandshakeError(text)
            rank = int_of(hello, "rank", 1, size - 1)
        except HandshakeError as error:
            self._refused = f"a join request was refused: {error}"
            channel.send({"error": str(error)}, time.monotonic() + HANDSHAKE_SECONDS)
            raise
        store.admit(channel, str(rank))

    def _reach(self) -> Client:
        """At a rank other than 0, connect to rank 0's store, and listen for peers."""
        rank, size = self.whole
        hello = {"purpose": "join", "rank": rank, "size": size}

        def reach() -> Client:
            channel = self.peers.introduce(
                *self.peers.sockets.resolve(), hello, self.peers.deadline
            )
            # An earlier rendezvous at the same address may not have ended yet.
            try:
                store = Client(channel)
                if store.get("all/table") is not None:
                    raise NotNowError
            except BaseException:
                channel.close()
                raise
            return store

        where = f"{self.about.host}:{self.about.port}"
        left = max(0.0, self.peers.deadline - time.monotonic())
        seconds = self.about.patience if self.about.least else left
        store = self.peers.until_reached(reach, 0, where, seconds)
        self.store, self.check = store, store.get("all/check") or 0
        if self.about.least:  # rank 0 may have started only now
            self.peers.begin()
        if not self.peers.places:
            reached = str(store.socket.getsockname()[0])
            self.peers.listen(self.peers.sockets.own_addresses(reached))
        return store

    def _enter_store(self) -> None:
        """Connect to the store and set this rank's join request: its addresses and its deadline."""
        rank, begun = self.whole[0], time.monotonic()
        store = self._reach() if rank else self._listen()
        waited = int(1000 * (time.monotonic() - begun))
        host, port = self.peers.places[0]
        request = {
            "host": host,
            "port": port,
            "more": self.peers.places[1:],
            "claim": self.peers.claim,
            "memory": self.peers.memory.name if self.peers.memory is not None else "",
            "process": f"{os.getpid()} {_token}",
            "milliseconds": milliseconds_until(self.peers.deadline),
            "waited": waited if rank else 0,
        }
        try:
            joined = store.compare_set(f"join/{rank}", None, request)
        except OSError as error:
            raise self._first_rank_lost(error) from None
        if not joined:
            raise RendezvousError(f"rank {rank} is taken: give every process a rank of its own")
        if store.get("all/table") is not None:  # the members were chosen before the request
            raise NotNowError

    def _join(self) -> None:
        """Wait for rank 0's table of members, and use it."""
        self.about.rank, self.about.size = self.whole
        if self.store is None:
            self._enter_store()
        what = f"for {self.title(0)} at {self.about.host}:{self.about.port} to choose the members"

        def new() -> dict[str, Any] | None:
            table = self._table()
            return table if table and table.get("group") != self.last_name else None

        table = self._wait_for(new, what, self.peers.deadline)
        name, places, ranks = (table.get(key) for key in ("group", "places", "ranks"))
        if not isinstance(name, str) or not isinstance(places, list) or not isinstance(ranks, list):
            raise HandshakeError("rank 0 sent a table of members that is malformed")
        if self.about.rank not in ranks:
            raise NotNowError
        # A restarted rank does not know the present value of `least`.
        least = int_of(table, "least", 0, self.about.size)
        self.elastic = least > 0
        if len(ranks) < (self.about.least or least or self.about.size):
            raise HandshakeError("rank 0 sent a table with too few ranks")
        if len(places) != len(ranks):
            raise HandshakeError("rank 0 sent a table whose ranks and addresses differ in number")
        self.about.rank, self.about.size = ranks.index(self.whole[0]), len(ranks)
        try:
            self.about.choices = tuning.checked_tables(table.get("choices"))
        except ValueError as error:
            raise HandshakeError(f"rank 0's table of algorithms cannot be used: {error}") from None
        self.peers.ends, self.last_name = time_of(table), name
        self.peers.use(table, self._first_host())

    def _first_host(self) -> str:
        """Return the address at which this rank has reached rank 0."""
        return str(self.store.socket.getpeername()[0]) if isinstance(self.store, Client) else ""

    def _agree(self, key: str, value: Any) -> list[int]:
        """Set this rank's key; return the hosts that rank 0 publishes once all ranks have set theirs."""
        store = self._set(key, {"group": self.peers.name, "value": value})

        def hosts() -> Any:
            found = store.get(f"all/{key}")
            is_this = isinstance(found, dict) and found.get("group") == self.peers.name
            return found.get("hosts") if is_this else None

        found = self._wait_for(hosts, "for the others to connect", self.peers.ends)
        if not isinstance(found, list) or len(found) != self.about.size:
            raise HandshakeError("rank 0 went on without this rank")
        return [int_of({"host": host}, "host", 0, self.about.size - 1) for host in found]
