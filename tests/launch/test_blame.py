"""A rendezvous that fails names the rank that is missing, and not the rank that gives up first."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
import time

import pytest
from ports import free_ports
from test_lost_members import KEY, at, place, reached, value_of
from test_rendezvous import ENVIRONMENT, Rank, call

from pycollective.launch import RendezvousError, handshake, leader
from pycollective.launch.ended import VARIABLE, Ended
from pycollective.launch.joining import Joining
from pycollective.launch.leader import Leader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux")

HOST = {k: v for k, v in ENVIRONMENT.items() if k != "PYCOLLECTIVE_TRANSPORT"} | {
    "PYCOLLECTIVE_HOST_ID": "one"
}


class Stopped:
    """A rank that is stopped while it connects to its peers, and then never answers.

    Parameters
    ----------
    rank : int
        Number of this rank.
    ports : sequence of int
        The ports of all ranks.
    reaches : tuple of int
        The ranks to which it connects before it is stopped.
    host : str
        Ranks of an equal host may share memory.
    after : Event, optional
        Event after which the rank joins.
    """

    def __init__(self, rank, ports, reaches=(), host="", after=None):
        self.rank, self.ports, self.reaches, self.host = rank, ports, reaches, host
        self.after = after
        self.has_joined, self.over = threading.Event(), threading.Event()

    def __call__(self):
        deadline = time.monotonic() + 20
        if self.after is not None:
            assert self.after.wait(20)
        claim = handshake.digest(KEY, "host", self.host) if self.host else ""
        connections = []
        with socket.create_server(("127.0.0.1", self.ports[self.rank])):
            try:
                store = reached(self.ports[0], self.rank, len(self.ports))
                connections.append(store)
                request = {**place(self.ports[self.rank]), "claim": claim}
                assert store.compare_set(f"join/{self.rank}", None, request)
                self.has_joined.set()
                table = value_of(store, "all/table")
                for peer in self.reaches:
                    for stream in range(table["streams"]):
                        hello = {"purpose": "peer", "group": table["group"], "from": self.rank}
                        hello |= {"to": peer, "stream": stream}
                        sock = socket.create_connection(tuple(table["places"][peer][:2]))
                        connections.append(handshake.introduce(sock, KEY, hello, deadline))
                self.over.wait(30)
            finally:
                for connection in connections:
                    connection.close()


def errors_of(on_ranks, ranks, *stopped):
    """Return the texts of the errors of ``ranks``; then end the stopped ranks."""
    failed = threading.Semaphore(0)

    def one(rank):
        try:
            return rank()
        finally:
            failed.release()

    def lift():
        for _ in ranks:
            failed.acquire(timeout=40)
        for rank in stopped:
            rank.over.set()

    calls = [lambda rank=rank: one(rank) for rank in ranks]
    found = on_ranks([*calls, *stopped, lift], call)[: len(ranks)]
    assert all(isinstance(error, RendezvousError) for error in found), found
    return [str(error) for error in found]


def spend(monkeypatch, rank, left=0.0):
    """Use up nearly all of a rank's time before the members are chosen."""
    if rank == 0:
        limit = Leader._limit_attempt

        def limits(self):
            now = time.monotonic()
            self._begun, self._deadline = now + left - self._seconds, now + left
            limit(self)

        monkeypatch.setattr(Leader, "_limit_attempt", limits)
        return
    join = Joining._join

    def joins(self):
        join(self)
        if self.about.rank == rank:
            now = time.monotonic()
            peers = self.peers
            peers.begun, peers.deadline = now + left - peers.seconds, now + left

    monkeypatch.setattr(Joining, "_join", joins)


@pytest.mark.slow
def test_rendezvous_rank_that_never_joins_is_named_when_another_times_out(on_ranks, monkeypatch):
    step = Leader.step

    def steps(self, changes):
        step(self, changes)
        if 1 in self._joined:  # its time is over, however late it started
            self._joined[1] = dataclasses.replace(self._joined[1], deadline=time.monotonic())

    monkeypatch.setattr(Leader, "step", steps)
    addresses = at(free_ports(3))
    ranks = [Rank(0, addresses), Rank(1, addresses)]
    missing = f"for rank 2 of 3 to join at {addresses[0]}, because rank 1 gives up then"
    for error in errors_of(on_ranks, ranks):
        assert missing in error


@pytest.mark.parametrize("rank", [0, 1])
def test_rendezvous_members_out_of_time_when_the_last_joins_still_connect(
    on_ranks, monkeypatch, rank
):
    monkeypatch.setattr(leader, "_CONNECT_SECONDS", 10.0)
    spend(monkeypatch, rank)
    addresses = at(free_ports(3))
    assert on_ranks([Rank(r, addresses) for r in range(3)], call) == [(r, 3, 6.0) for r in range(3)]


@pytest.mark.slow
def test_rendezvous_rank_stopped_after_joining_is_named_when_another_times_out(
    on_ranks, monkeypatch
):
    spend(monkeypatch, rank=1)
    spend(monkeypatch, rank=0, left=1.0)
    ports = free_ports(3)
    ranks = [Rank(r, at(ports), join_timeout=20.0) for r in range(2)]
    for error in errors_of(on_ranks, ranks, Stopped(2, ports)):
        assert "for rank 2 of 3 to connect" in error


@pytest.mark.slow
def test_rendezvous_rank_stopped_between_two_peers_is_named_by_the_waiting_peer(
    on_ranks, monkeypatch
):
    """Rank 0, whose peers have all connected, could only say that ranks 1 and 2 are not ready."""
    spend(monkeypatch, rank=0, left=1.0)
    ports = free_ports(3)
    ranks = [Rank(r, at(ports), join_timeout=20.0) for r in range(2)]
    for error in errors_of(on_ranks, ranks, Stopped(2, ports, reaches=(0,))):
        assert "for rank 2 of 3 to connect" in error


@pytest.mark.slow
def test_rendezvous_rank_stopped_before_it_shares_memory_is_named_by_rank_0(on_ranks, monkeypatch):
    monkeypatch.setattr(leader, "_CONNECT_SECONDS", 0.1)
    spend(monkeypatch, rank=0, left=0.8)
    ports = free_ports(3)
    ranks = [Rank(r, at(ports), join_timeout=20.0, environment=HOST) for r in range(2)]
    for error in errors_of(on_ranks, ranks, Stopped(2, ports, reaches=(0, 1), host="one")):
        assert "for rank 2 to connect" in error


@pytest.mark.slow
def test_rendezvous_rank_that_joins_too_late_for_the_rest_is_named(on_ranks, monkeypatch):
    monkeypatch.setattr(leader, "_CONNECT_SECONDS", 0.1)
    spend(monkeypatch, rank=0, left=1.0)
    ports = free_ports(3)
    first = Stopped(1, ports)
    last = Stopped(2, ports, after=first.has_joined, reaches=(0,))
    (error,) = errors_of(on_ranks, [Rank(0, at(ports), join_timeout=20.0)], first, last)
    assert "rank 2 joined only after 19." in error


def test_rendezvous_ended_rank_with_a_reason_reports_the_reason(on_ranks):
    """The launcher sees only that the process ended, which is a consequence of the reason."""
    ports = free_ports(3)
    ended = Ended.create(3, at(ports)[0])

    def gives_up():
        store = reached(ports[0], 1, 3)
        store.set("join/1", place(ports[1]))
        store.set("failed/1", {"error": "rank 1 did not reach rank 2", "ranks": [2]})
        store.close()
        ended.write(1, "rank 1 has ended with exit code 1", failed=True)

    environment = {**ENVIRONMENT, VARIABLE: str(ended.descriptor)}
    rank_0 = Rank(0, at(ports), join_timeout=20.0, environment=environment)
    error, _ = on_ranks([rank_0, gives_up], call)
    assert isinstance(error, RendezvousError)
    assert str(error) == "rank 1 did not reach rank 2"
    os.close(ended.descriptor)


def test_rendezvous_ended_rank_is_in_the_ranks_of_the_error(on_ranks):
    ports = free_ports(3)
    ended = Ended.create(3, at(ports)[0])
    ended.has_connected(0)
    ended.write(2, "rank 2 has ended with exit code 1", failed=True)
    environment = {**ENVIRONMENT, VARIABLE: str(ended.descriptor)}
    rank_0 = Rank(0, at(ports), join_timeout=20.0, environment=environment)
    (error,) = on_ranks([rank_0], call)
    assert isinstance(error, RendezvousError)
    assert "cannot get all of its ranks: rank 2 has ended" in str(error)
    assert error.ranks == (2,)
    os.close(ended.descriptor)
