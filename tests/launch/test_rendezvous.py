"""Rendezvous at given addresses, of all ranks or of some of them."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time

import numpy as np
import pytest
from ports import free_port
from processes import SECRET

from pycollective.launch import RendezvousError, handshake, leader, rendezvous
from pycollective.launch.description import host_and_port
from pycollective.launch.join_requests import JoinRequests, is_listening
from pycollective.launch.leader import Leader
from pycollective.launch.store import Client

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux")

ENVIRONMENT = {"PYCOLLECTIVE_SECRET": SECRET, "PYCOLLECTIVE_TRANSPORT": "tcp"}


class Rank:
    """Callable for `on_ranks` that makes a group and sums over it."""

    def __init__(self, rank, addresses, pause=0.0, **options):
        self.rank, self.addresses, self.pause, self.options = rank, addresses, pause, options

    def __call__(self):
        time.sleep(self.pause)
        options = {"environment": ENVIRONMENT, "join_timeout": 30.0, **self.options}
        comm = rendezvous(self.rank, len(self.addresses), self.addresses, "a test", **options)
        total = float(comm.all_reduce(np.float64(self.rank + 1)))
        found = comm.rank, comm.size, total
        comm.close()
        return found


def call(rank):
    return rank()


def wait_until(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the condition does not become true"
        time.sleep(0.01)


def wait_for_ranks(monkeypatch, count):
    """Let rank 0's patience end when `count` ranks have joined, however late they start."""
    choose = leader.choose

    def choose_late(came, size, least, admissions, is_late):
        return choose(came, size, least, admissions, len(came) >= count)

    monkeypatch.setattr(leader, "choose", choose_late)


def end_wait(monkeypatch, is_over):
    """Use up rank 0's time, while it waits for ranks, once ``is_over(those that joined)`` is true."""
    step = Leader.step

    def steps(self, changes):
        step(self, changes)
        if is_over(list(self._joined)) and not self._chosen and not self._asked:
            self._deadline = min(self._deadline, time.monotonic())

    monkeypatch.setattr(Leader, "step", steps)


def refused(on_ranks, monkeypatch, first, second):
    """Return the results of rank 0, and of a rank that fails while rank 0 listens."""
    listens, is_over = threading.Event(), threading.Event()

    def fails():
        assert listens.wait(20)
        try:
            return second()
        finally:
            is_over.set()

    with monkeypatch.context() as patch:
        end_wait(patch, lambda came: listens.set() or is_over.is_set())
        return on_ranks([first, fails], call)


def test_rendezvous_of_own_addresses_in_any_order_makes_the_group(on_ranks):
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    pauses = (0.3, 0.0, 0.1)
    found = on_ranks([Rank(r, addresses, pauses[r]) for r in range(3)], call)
    assert found == [(r, 3, 6.0) for r in range(3)]


def test_rendezvous_address_of_another_host_needs_a_secret(on_ranks, monkeypatch):
    """A service's address makes the rank listen at all addresses, which needs a secret."""
    addresses = [f"127.0.0.1:{free_port()}", f"192.0.2.1:{free_port()}"]
    found = on_ranks([Rank(r, addresses) for r in range(2)], call)
    assert found == [(r, 2, 3.0) for r in range(2)]
    open_to_all = {"PYCOLLECTIVE_TRANSPORT": "tcp"}
    ranks = [Rank(r, addresses, environment=open_to_all) for r in range(2)]
    _, error = refused(on_ranks, monkeypatch, *ranks)
    assert isinstance(error, RendezvousError)
    assert "0.0.0.0 is not a loopback address, and there is no secret" in str(error)


def test_rendezvous_enough_ranks_in_time_make_the_group(on_ranks, monkeypatch):
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    some = {"least": 2, "patience": 20.0}
    with monkeypatch.context() as patch:
        wait_for_ranks(patch, 3)
        found = on_ranks([Rank(r, addresses, **some) for r in (0, 2, 3)], call)
    assert found == [(0, 3, 8.0), (1, 3, 8.0), (2, 3, 8.0)]
    assert on_ranks([Rank(0, addresses, least=1, patience=0.2)], call) == [(0, 1, 1.0)]


def test_rendezvous_missing_rank_is_logged_on_every_rank(on_ranks, caplog, monkeypatch):
    assert leader.LOG_EVERY == 10
    monkeypatch.setattr(leader, "LOG_EVERY", 0.2)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    missing = f"rank 0 waits for rank 2 of 3 to join at {addresses[0]}"

    def last():
        wait_until(lambda: caplog.messages.count(f"rank 1: {missing}") >= 2)
        return Rank(2, addresses)()

    found = on_ranks([Rank(0, addresses), Rank(1, addresses), last], call)
    assert found == [(r, 3, 6.0) for r in range(3)]
    assert caplog.messages.count(missing) >= caplog.messages.count(f"rank 1: {missing}") >= 2


def test_rendezvous_too_few_ranks_raises_and_names_the_missing(on_ranks, monkeypatch):
    end_wait(monkeypatch, lambda came: 1 in came)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    some = {"least": 3, "patience": 20.0}
    for error in on_ranks([Rank(r, addresses, **some) for r in (0, 1)], call):
        assert isinstance(error, RendezvousError)
        assert "ranks 2, 3 of 4" in str(error)


@pytest.mark.parametrize("after", ["welcome", "table", "reason"])
def test_rendezvous_rank_dies_while_others_join_raises(on_ranks, monkeypatch, after):
    """The error comes at once if all had joined; otherwise the rank may restart until the deadline."""
    port, is_gone = free_port(), threading.Event()
    rank_0 = Rank(0, [f"127.0.0.1:{port}"] * 2)
    if after == "welcome":
        end_wait(monkeypatch, lambda came: is_gone.is_set())

    def dies():
        key = handshake.key_of(SECRET.encode())
        deadline = time.monotonic() + 20
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        hello = {"purpose": "join", "rank": 1, "size": 2}
        store = Client(handshake.introduce(sock, key, hello, deadline))
        if after != "welcome":
            request = {"host": "127.0.0.1", "port": 1, "claim": "", "milliseconds": 20_000}
            assert store.compare_set("join/1", None, request)
            while store.get("all/table") is None:
                store.wait(1.0)
            assert store.get("all/table")["ranks"] == [0, 1]
        if after == "reason":
            store.set("failed/1", {"error": "rank 1 did not reach rank 7", "ranks": []})
        store.close()
        is_gone.set()

    error, _ = on_ranks([rank_0, dies], call)
    assert isinstance(error, RendezvousError)
    gone = "rank 1 was lost before the group was made"
    waited = r"rank 0 waited [\d.]+ s for rank 1 of 2 to join at"
    words = {"welcome": waited, "table": gone, "reason": "rank 1 did not reach rank 7"}
    assert re.search(words[after], str(error)), error


def test_join_requests_each_smaller_group_notices_them(on_ranks):
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]

    def first(requests):
        try:
            wait_until(requests.waiting)
        finally:
            requests.close()
        return Rank(0, addresses)()

    for _ in range(2):
        requests = JoinRequests(addresses, ENVIRONMENT)
        assert not requests.waiting()
        ranks = [lambda requests=requests: first(requests), Rank(1, addresses)]
        assert on_ranks(ranks, call) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_is_listening_sees_rank_0_of_the_group_and_no_foreign_listener(on_ranks):
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    assert not is_listening(addresses, ENVIRONMENT)
    with socket.create_server(host_and_port(addresses[0])) as stranger:
        accepts = threading.Thread(target=lambda: stranger.accept()[0].close())
        accepts.start()
        assert not is_listening(addresses, ENVIRONMENT)
        accepts.join(20)

    def joins():
        wait_until(lambda: is_listening(addresses, ENVIRONMENT))
        return Rank(1, addresses)()

    assert on_ranks([Rank(0, addresses), joins], call) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_addresses_malformed_raise():
    assert host_and_port("[::1]:8") == ("::1", 8)
    for wrong in ("host", "host:", ":1", "host:0", "host:65536", "host:x"):
        with pytest.raises(ValueError, match="is not host:port"):
            host_and_port(wrong)
    with pytest.raises(RendezvousError, match="'nowhere' is not host:port"):
        rendezvous(0, 2, ["nowhere"], "a test")
