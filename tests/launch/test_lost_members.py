"""Members that are lost during a rendezvous: the others make their group without them."""

from __future__ import annotations

import re
import socket
import threading
import time

import pytest
from ports import free_ports
from processes import SECRET
from test_rendezvous import ENVIRONMENT, Rank, call, end_wait, wait_for_ranks, wait_until

from pycollective.launch import (
    RendezvousError,
    handshake,
    leader,
    peers,
    rendezvous,
    tcp,
)
from pycollective.launch.description import FirstRankLostError
from pycollective.launch.join_requests import JoinRequests
from pycollective.launch.members import Admissions, Candidate, choose
from pycollective.launch.store import Client

KEY = handshake.key_of(SECRET.encode())
SOME = {"least": 2, "patience": 20.0, "join_timeout": 20.0}


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Shorten the time limits for silent ranks."""
    monkeypatch.setattr(leader, "ATTEMPT_SECONDS", 0.5)
    monkeypatch.setattr(peers, "HANDSHAKE_SECONDS", 1.0)


def at(ports):
    return [f"127.0.0.1:{port}" for port in ports]


def deadline():
    return time.monotonic() + 20


def reached(port, rank, size):
    """Connect to rank 0's store as a rank does; return the connection."""
    until = deadline()
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.01)
    hello = {"purpose": "join", "rank": rank, "size": size}
    return Client(handshake.introduce(sock, KEY, hello, until))


def value_of(store, key):
    """Return the value that rank 0 sets."""
    until = deadline()
    while store.get(key) is None:
        assert time.monotonic() < until
        store.wait(0.1)
    return store.get(key)


def place(port, process="one"):
    return {
        "host": "127.0.0.1",
        "port": port,
        "claim": "",
        "process": process,
        "milliseconds": 20_000,
    }


class Doomed:
    """A rank that joins and then does not continue.

    The rank closes its connection after it gets the table of ranks, or stays silent. Its listening
    socket accepts connections and never answers, like a stopped process.
    """

    def __init__(self, rank, ports, fate):
        self.rank, self.ports, self.fate = rank, ports, fate
        self.over = threading.Event()

    def __call__(self):
        with socket.create_server(("127.0.0.1", self.ports[self.rank])):
            store = reached(self.ports[0], self.rank, len(self.ports))
            assert store.compare_set(f"join/{self.rank}", None, place(self.ports[self.rank]))
            table = value_of(store, "all/table")
            if self.fate == "dies when ready":
                for key, said in (("near", self.rank), ("ready", False)):
                    store.set(f"{key}/{self.rank}", {"group": table["group"], "value": said})
            if self.fate == "is silent":
                self.over.wait(30)
            store.close()
            return table["ranks"]


@pytest.mark.parametrize(
    "fate", ["dies", "dies when ready", pytest.param("is silent", marks=pytest.mark.slow)]
)
def test_rendezvous_elastic_member_lost_after_the_table_rest_makes_the_group(
    on_ranks, monkeypatch, fate
):
    wait_for_ranks(monkeypatch, 4)
    ports = free_ports(4)
    doomed = Doomed(1, ports, fate)

    def others(rank):
        try:
            return Rank(rank, at(ports), **SOME)()
        finally:
            doomed.over.set()

    found = on_ranks(
        [lambda: others(0), doomed, lambda: others(2), lambda: others(3)], lambda rank: rank()
    )
    assert found == [(0, 3, 8.0), [0, 1, 2, 3], (1, 3, 8.0), (2, 3, 8.0)]


@pytest.mark.slow
def test_rendezvous_elastic_check_longer_than_the_ranks_wait_rest_makes_the_group(
    on_ranks, monkeypatch
):
    """Rank 0 restarts its timer after the membership check, during which it cannot notify the others."""
    wait_for_ranks(monkeypatch, 3)
    ports = free_ports(3)
    doomed = Doomed(1, ports, "is silent")

    def others(rank, seconds):
        try:
            return Rank(rank, at(ports), **{**SOME, "join_timeout": seconds})()
        finally:
            doomed.over.set()

    found = on_ranks([lambda: others(0, 20.0), doomed, lambda: others(2, 0.1)], lambda rank: rank())
    assert found == [(0, 2, 4.0), [0, 1, 2], (1, 2, 4.0)]


def test_rendezvous_elastic_two_members_lost_rest_makes_the_group(on_ranks, monkeypatch):
    wait_for_ranks(monkeypatch, 4)
    ports = free_ports(4)
    doomed = [Doomed(r, ports, "dies") for r in (1, 2)]
    ranks = [Rank(0, at(ports), **SOME), *doomed, Rank(3, at(ports), **SOME)]
    found = on_ranks(ranks, call)
    assert (found[0], found[3]) == ((0, 2, 5.0), (1, 2, 5.0))


def test_rendezvous_elastic_too_few_left_waits_for_others(on_ranks):
    """The group needs the lost rank, which is started again."""
    ports = free_ports(2)

    def again():
        Doomed(1, ports, "dies")()
        return Rank(1, at(ports), **SOME)()

    found = on_ranks([Rank(0, at(ports), **SOME), again], call)
    assert found == [(0, 2, 3.0), (1, 2, 3.0)]


def test_rendezvous_elastic_no_rank_left_names_the_awaited_ranks(on_ranks, monkeypatch):
    ports, is_gone = free_ports(2), threading.Event()
    end_wait(monkeypatch, lambda came: is_gone.is_set() and came == [0])

    def dies():
        Doomed(1, ports, "dies")()
        is_gone.set()

    error, _ = on_ranks([Rank(0, at(ports), **SOME), dies], call)
    assert isinstance(error, RendezvousError)
    assert re.search(r"rank 0 waited [\d.]+ s for rank 1 of 2 to join at", str(error)), error


def test_rendezvous_elastic_rank_0_lost_raises_first_rank_lost(on_ranks):
    """The other ranks then try another first rank instead of failing."""
    (port,) = free_ports(1)

    def rank_0():
        with socket.create_server(("127.0.0.1", port)) as server:
            channel, _ = handshake.answer(server.accept()[0], KEY, deadline())
        channel.send({"values": {}}, deadline())
        channel.receive(deadline())
        channel.close()

    _, error = on_ranks([rank_0, Rank(1, [*at([port]), *at(free_ports(1))], **SOME)], call)
    assert isinstance(error, FirstRankLostError)


def test_rendezvous_member_lost_all_needed_raises(on_ranks):
    """A group that needs all ranks fails on all ranks if one is lost."""
    ports = free_ports(3)
    ranks = [Rank(0, at(ports)), Doomed(1, ports, "dies"), Rank(2, at(ports))]
    first, _, last = on_ranks(ranks, call)
    for error in (first, last):
        assert isinstance(error, RendezvousError)
        assert "rank 1 was lost before the group was made" in str(error)


def test_split_of_an_elastic_group_waits_for_every_rank(on_ranks, monkeypatch):
    """The patience of the rendezvous does not apply to splits of the group."""
    accept = tcp.Addresses.accept

    def late(addresses, offer, rank, members, seconds):
        time.sleep(0.6 * rank)
        return accept(addresses, offer, rank, members, seconds)

    monkeypatch.setattr(tcp.Addresses, "accept", late)
    wait_for_ranks(monkeypatch, 2)
    addresses = at(free_ports(2))

    def work(rank):
        some = {"least": 1, "patience": 20.0, "environment": ENVIRONMENT}
        comm = rendezvous(rank, 2, addresses, "a test", join_timeout=20.0, **some)
        part = comm.split(0)
        size = part.size
        part.close()
        comm.close()
        return size

    assert on_ranks([0, 1], work) == [2, 2]


# Chosen members -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("came", "least", "is_late", "expected"),
    [([0, 1, 2], 0, True, []), ([0, 3, 1, 2], 0, False, [0, 1, 2, 3]), ([0, 2], 2, False, []),
     ([0, 2], 2, True, [0, 2]), ([0, 2], 3, True, []), ([0], 1, True, [0])],
)  # fmt: skip
def test_choose_waits_for_all_or_for_enough_when_it_is_late(came, least, is_late, expected):
    candidates = {rank: Candidate(("h", 1), "", "", "one", 0.0) for rank in came}
    assert choose(candidates, 4, least, None, is_late) == expected


@pytest.mark.parametrize(
    ("left", "least", "expected"),
    [(2, 1, [0, 1, 2, 3]), (1, 1, [0, 1, 3]), (0, 1, [0, 3]), (0, 3, [0, 1, 3])],
)
def test_choose_new_processes_beyond_the_admissions_come_later(left, least, expected):
    """New processes are admitted if the limit allows it, or the others are too few."""
    admissions = Admissions(limit=5, known={"survivor"})
    admissions.left = left
    came = {
        rank: Candidate(("h", 1), "", "", "survivor" if rank == 3 else f"new {rank}", 0.0)
        for rank in range(4)
    }
    assert choose(came, 4, least, admissions, False) == expected
    admissions.admit_members(came[rank].process for rank in expected[1:])
    assert admissions.left == left - (len(expected) - 2)
    admissions.has_saved()
    assert admissions.left == 5


def test_rendezvous_elastic_join_request_under_way_at_the_choice_comes_later(on_ranks, monkeypatch):
    """Rank 2 has connected to the store, and sets its key after the members are chosen."""
    ports = free_ports(3)
    is_chosen, is_gone = threading.Event(), threading.Event()
    end_wait(monkeypatch, lambda came: is_gone.is_set())

    def late():
        store = reached(ports[0], 2, 3)
        ranks = value_of(store, "all/table")["ranks"]
        joined = store.compare_set("join/2", None, place(ports[2]))
        store.wait(0.2)
        same = store.get("all/table")["ranks"] == ranks
        store.close()
        is_chosen.set()
        return ranks, joined, same

    def member():
        with socket.create_server(("127.0.0.1", ports[1])):
            store = reached(ports[0], 1, 3)
            store.set("join/1", place(ports[1]))
            assert is_chosen.wait(20)
            store.close()
            is_gone.set()

    first = Rank(0, at(ports), least=2, patience=0.3)
    error, found, _ = on_ranks([first, late, member], call)
    assert isinstance(error, RendezvousError)
    assert found == ([0, 1], True, True)


@pytest.mark.slow
def test_rendezvous_elastic_first_address_has_a_group_waits_for_it(on_ranks):
    """A rank that was left out does not make a group alone while the others answer."""
    addresses = at(free_ports(2))
    requests = JoinRequests(addresses, ENVIRONMENT)
    some = {"least": 1, "patience": 2.0, "join_timeout": 20.0}
    out = []
    waits = threading.Thread(
        target=lambda: out.extend(on_ranks([Rank(1, addresses, **some)], call))
    )
    waits.start()
    wait_until(requests.waiting)
    until = time.monotonic() + 2.5  # longer than the rank's patience
    while time.monotonic() < until:
        assert waits.is_alive()
        time.sleep(0.05)
    assert requests.waiting()
    requests.close()
    (first,) = on_ranks([Rank(0, addresses, join_timeout=20.0)], call)
    waits.join(20)
    assert (first, out) == ((0, 2, 3.0), [(1, 2, 3.0)])
