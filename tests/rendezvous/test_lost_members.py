"""Members that are lost during a rendezvous: the others make their group without them."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from ports import free_ports
from processes import SECRET
from test_meet import ENVIRONMENT, Rank, call

from pycollective.rendezvous import (
    RendezvousError,
    handshake,
    listen_for_knocks,
    meet,
    meeting,
    tcp,
)
from pycollective.rendezvous.description import Description, FirstRankLostError, Roster
from pycollective.rendezvous.gathering import Gathering

KEY = handshake.key_of(SECRET.encode())
SOME = {"least": 2, "patience": 0.5, "join_timeout": 20.0}


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Call the roll early, and wait briefly for ranks that are silent."""
    monkeypatch.setattr(meeting, "ATTEMPT_SECONDS", 0.5)
    monkeypatch.setattr(meeting, "_ROLL_SECONDS", 3.0)
    monkeypatch.setattr(meeting, "STRANGER_SECONDS", 1.0)


def at(ports):
    return [f"127.0.0.1:{port}" for port in ports]


def joined(port, rank, size):
    """Join as a rank does, as far as rank 0's welcome."""
    soon = time.monotonic() + 20
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < soon
            time.sleep(0.01)
    hello = {"purpose": "join", "rank": rank, "size": size}
    channel = handshake.introduce(sock, KEY, hello, soon)
    assert channel.receive(soon) == {"welcome": True}
    return channel


def place(port, process="one"):
    return {
        "host": "127.0.0.1",
        "port": port,
        "claim": "",
        "process": process,
        "milliseconds": 20_000,
    }


class Doomed:
    """A rank that is admitted and goes no further.

    It closes its connection when it has heard of the group, or it stays silent. Its listening socket
    takes connections, as that of a stopped process does, and answers none.
    """

    def __init__(self, rank, ports, fate):
        self.rank, self.ports, self.fate = rank, ports, fate
        self.over = threading.Event()

    def __call__(self):
        soon = time.monotonic() + 20
        with socket.create_server(("127.0.0.1", self.ports[self.rank])):
            channel = joined(self.ports[0], self.rank, len(self.ports))
            channel.send(place(self.ports[self.rank]), soon)
            table = channel.receive(soon)
            if self.fate == "dies when ready":
                channel.send({"ready": 0}, soon)
            if self.fate == "is silent":
                self.over.wait(30)
            channel.close()
            return table["ranks"]


@pytest.mark.parametrize(
    "fate", ["dies", "dies when ready", pytest.param("is silent", marks=pytest.mark.slow)]
)
def test_meet_elastic_member_lost_after_the_table_rest_makes_the_group(on_ranks, fate):
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
def test_meet_elastic_roll_call_longer_than_the_ranks_wait_rest_makes_the_group(on_ranks):
    """Rank 0 begins its time anew after the roll call, in which it cannot tell the others anything."""
    ports = free_ports(3)
    doomed = Doomed(1, ports, "is silent")

    def others(rank, seconds):
        try:
            return Rank(rank, at(ports), **{**SOME, "join_timeout": seconds})()
        finally:
            doomed.over.set()

    found = on_ranks([lambda: others(0, 20.0), doomed, lambda: others(2, 0.1)], lambda rank: rank())
    assert found == [(0, 2, 4.0), [0, 1, 2], (1, 2, 4.0)]


def test_meet_elastic_two_members_lost_rest_makes_the_group(on_ranks):
    ports = free_ports(4)
    doomed = [Doomed(r, ports, "dies") for r in (1, 2)]
    ranks = [Rank(0, at(ports), **SOME), *doomed, Rank(3, at(ports), **SOME)]
    found = on_ranks(ranks, call)
    assert (found[0], found[3]) == ((0, 2, 5.0), (1, 2, 5.0))


def test_meet_elastic_too_few_left_waits_for_others(on_ranks):
    """The lost rank is started again, and is needed."""
    ports = free_ports(2)

    def again():
        Doomed(1, ports, "dies")()
        return Rank(1, at(ports), **SOME)()

    found = on_ranks([Rank(0, at(ports), **SOME), again], call)
    assert found == [(0, 2, 3.0), (1, 2, 3.0)]


def test_meet_elastic_nobody_left_says_whom_it_waited_for(on_ranks):
    ports = free_ports(2)
    some = {**SOME, "join_timeout": 1.0}
    error, _ = on_ranks([Rank(0, at(ports), **some), Doomed(1, ports, "dies")], call)
    assert isinstance(error, RendezvousError)
    assert "rank 0 waited 1 s for rank 1 of 2 to come to" in str(error)


def test_meet_elastic_rank_0_lost_raises_first_rank_lost(on_ranks):
    """The other ranks look for another one then; they do not take this for the end."""
    (port,) = free_ports(1)

    def rank_0():
        soon = time.monotonic() + 20
        with socket.create_server(("127.0.0.1", port)) as server:
            channel, _ = handshake.answer(server.accept()[0], KEY, soon)
        channel.send({"welcome": True}, soon)
        channel.receive(soon)
        channel.close()

    _, error = on_ranks([rank_0, Rank(1, [*at([port]), *at(free_ports(1))], **SOME)], call)
    assert isinstance(error, FirstRankLostError)


def test_meet_member_lost_all_needed_raises(on_ranks):
    """Where no rank may be missing, its loss is everyone's end."""
    ports = free_ports(3)
    ranks = [Rank(0, at(ports)), Doomed(1, ports, "dies"), Rank(2, at(ports))]
    first, _, last = on_ranks(ranks, call)
    for error in (first, last):
        assert isinstance(error, RendezvousError)
        assert "rank 1 is gone before the group was made" in str(error)


def test_split_of_an_elastic_group_waits_for_every_rank(on_ranks, monkeypatch):
    """The patience of the group's own rendezvous does not hold for groups that are made of it."""
    accept = tcp.Addresses.accept

    def late(addresses, offer, rank, members, seconds):
        time.sleep(0.6 * rank)
        return accept(addresses, offer, rank, members, seconds)

    monkeypatch.setattr(tcp.Addresses, "accept", late)
    addresses = at(free_ports(2))

    def work(rank):
        some = {"least": 1, "patience": 0.3, "environment": ENVIRONMENT}
        comm = meet(rank, 2, addresses, "a test", join_timeout=20.0, **some)
        part = comm.split(0)
        size = part.size
        part.close()
        comm.close()
        return size

    assert on_ranks([0, 1], work) == [2, 2]


# Who is chosen --------------------------------------------------------------------------------


def description(size, **more):
    return Description(0, size, "127.0.0.1", 1, SECRET.encode(), **more)


class Guests:
    """Ranks that come to a `Gathering`, each in a thread of its own."""

    def __init__(self, gathering):
        self._gathering = gathering
        self._pairs, self._threads = [], []

    def comes(self, rank, size):
        """Let a rank come as far as the welcome; return its channel."""
        ours, theirs = socket.socketpair()
        self._pairs += [ours, theirs]
        hello = {"purpose": "join", "rank": rank, "size": size}
        args = (handshake.Channel(theirs), hello)
        self._threads.append(threading.Thread(target=self._gathering.enter, args=args))
        self._threads[-1].start()
        return handshake.Channel(ours)

    def settle(self):
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def close(self):
        self.settle()
        for sock in self._pairs:
            sock.close()


@pytest.fixture
def gathering():
    """Return a function that makes a `Gathering`, and its guests."""
    made = []

    def make(size, **more):
        made.append(Gathering(description(size, **more), threading.Condition()))
        made[-1].guests = Guests(made[-1])
        return made[-1]

    yield make
    for one in made:
        one.guests.close()


def soon():
    return time.monotonic() + 20


def test_gathering_greeting_under_way_at_the_choice_is_asked_to_come_later(gathering):
    three = gathering(3, least=2)
    second, third = (three.guests.comes(rank, 3) for rank in (1, 2))
    for channel in (second, third):
        assert channel.receive(soon()) == {"welcome": True}
    third.send(place(9003), soon())
    while three.choose(True):  # until the third one has come
        time.sleep(0.01)
    assert three.members == [0, 2]
    second.send(place(9002), soon())
    assert second.receive(soon()) == {"later": True}
    fourth = three.guests.comes(1, 3)
    assert fourth.receive(soon()) == {"later": True}
    three.guests.settle()
    assert (three.members, list(three.came)) == ([0, 2], [2])


def test_gathering_member_that_ends_after_the_choice_stays_a_member(gathering):
    """Its number is given out already: the roll call takes it off the list, nothing else."""
    three = gathering(3, least=1)
    second, third = (three.guests.comes(rank, 3) for rank in (1, 2))
    for channel in (second, third):
        assert channel.receive(soon()) == {"welcome": True}
        channel.send(place(9000), soon())
    three.guests.settle()
    assert three.choose(False) == []
    second.close()
    assert three.members == [0, 1, 2]
    answers = threading.Thread(
        target=lambda: third.send({"again": third.receive(soon())["again"]}, soon())
    )
    answers.start()
    assert three.call_roll(7, 5.0, lambda: None) == [1]
    answers.join(20)
    assert three.members == [0, 2]


@pytest.mark.parametrize(
    ("left", "least", "expected"),
    [(2, 1, [0, 1, 2, 3]), (1, 1, [0, 1, 3]), (0, 1, [0, 3]), (0, 3, [0, 1, 3])],
)
def test_gathering_new_processes_beyond_the_roster_come_later(gathering, left, least, expected):
    """New processes come if a place is free, or the others are too few."""
    roster = Roster(limit=5, known={"survivor"})
    roster.left = left
    four = gathering(4, least=least, roster=roster)
    channels = {rank: four.guests.comes(rank, 4) for rank in (1, 2, 3)}
    for rank, channel in channels.items():
        assert channel.receive(soon()) == {"welcome": True}
        channel.send(place(9000, "survivor" if rank == 3 else f"new {rank}"), soon())
    four.guests.settle()
    assert four.choose(False) == []
    assert four.members == expected
    assert roster.left == left - (len(expected) - 2)
    for rank in {1, 2, 3} - set(expected):
        assert channels[rank].receive(soon()) == {"later": True}
    roster.has_saved()
    assert roster.left == 5


def test_meet_elastic_first_address_has_a_group_waits_for_it(on_ranks):
    """A rank that was left out does not go on alone while the others answer."""
    addresses = at(free_ports(2))
    knocks = listen_for_knocks(addresses, ENVIRONMENT)
    some = {"least": 1, "patience": 0.3, "join_timeout": 0.6}
    out = []
    waits = threading.Thread(
        target=lambda: out.extend(on_ranks([Rank(1, addresses, **some)], call))
    )
    waits.start()
    until = time.monotonic() + 1.5  # several times its patience
    while time.monotonic() < until:
        assert waits.is_alive()
        time.sleep(0.05)
    assert knocks.heard()
    knocks.close()
    (first,) = on_ranks([Rank(0, addresses, join_timeout=20.0)], call)
    waits.join(20)
    assert (first, out) == ((0, 2, 3.0), [(1, 2, 3.0)])
