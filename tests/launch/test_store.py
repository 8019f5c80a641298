"""The key-value store at rank 0: keys that a rank may set, and values that the others see."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from pycollective.errors import RendezvousError
from pycollective.launch.handshake import Channel
from pycollective.launch.joining import Joining
from pycollective.launch.store import Client, Store


class Served:
    """A store with connected ranks."""

    def __init__(self):
        self.store, self.changes, self._clients = Store(), [], []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while not self._stop.is_set():
            with self._lock:
                self.changes += self.store.wait(0.005)

    def connected(self, name):
        ours, theirs = (Channel(end) for end in socket.socketpair())
        for channel, connects in ((ours, True), (theirs, False)):
            channel.seal(b"key", connects)
        self.store.admit(theirs, name)
        self._clients.append(Client(ours))
        return self._clients[-1]

    def set(self, key, value):
        with self._lock:
            self.store.set(key, value)

    def comes(self, change):
        """Wait until the store has seen a change."""
        until = time.monotonic() + 20
        while change not in list(self.changes):
            assert time.monotonic() < until, self.changes
            time.sleep(0.005)

    def close(self):
        self._stop.set()
        self._thread.join(20)
        for client in self._clients:
            client.close()
        self.store.close()


@pytest.fixture
def served():
    served = Served()
    yield served
    served.close()


def received(client, key):
    until = time.monotonic() + 20
    while client.get(key) is None:
        assert time.monotonic() < until
        client.wait(0.1)
    return client.get(key)


def test_store_values_for_all_reach_present_and_later_connections(served):
    one = served.connected("1")
    served.set("all/table", {"ranks": [0, 1]})
    assert received(one, "all/table") == {"ranks": [0, 1]}
    assert served.connected("2").get("all/table") == {"ranks": [0, 1]}
    served.set("all/table", None)
    while one.get("all/table") is not None:
        one.wait(1.0)
    for client in (one, served.connected("3")):
        assert client.get("all/table") is None
        client.close()


def test_store_compare_set_of_one_key_by_two_connections_succeeds_once(served):
    first, second = served.connected("1"), served.connected("1")
    assert first.compare_set("join/1", None, "a")
    assert not second.compare_set("join/1", None, "b")
    assert not second.compare_set("join/1", "a", "b")  # the key belongs to another rank
    second.set("join/1", "b")
    assert not second.compare_set("join/1", "b", "b")  # answered after the request before it
    assert not first.compare_set("join/1", "b", "c")
    assert first.compare_set("join/1", "a", "c")
    assert served.store.get("join/1") == "c"
    first.close()
    served.comes(("join/1", None))
    assert second.compare_set("join/1", None, "b")
    second.close()


def test_store_connection_ends_values_arrive_before_its_keys_vanish(served):
    one = served.connected("1")
    one.set("join/1", "here")
    one.set("failed/1", "why")
    one.close()
    served.comes(("failed/1", None))
    assert served.changes[:2] == [("join/1", "here"), ("failed/1", "why")]
    assert sorted(served.changes[2:]) == [("failed/1", None), ("join/1", None)]


@pytest.mark.parametrize(
    "request_",
    [
        {"set": "join/2", "value": 1},
        {"set": "join/x/1", "value": 1},
        {"set": "all/1", "value": 1},
        {"set": "1", "value": 1},
        {"set": "x" * 100 + "/1", "value": 1},
        {"set": 7},
        {},
    ],
    ids=str,
)
def test_store_request_for_a_key_that_is_not_the_ranks_ends_the_connection(served, request_):
    one = served.connected("1")
    one._channel.send(request_, time.monotonic() + 5)
    with pytest.raises(OSError):
        for _ in range(10):
            one.wait(0.5)
    assert served.changes == []
    one.close()


def test_store_keys_of_one_connection_are_limited(served):
    one = served.connected("1")
    with pytest.raises(OSError):
        for number in range(100):
            one.compare_set(f"key{number}/1", None, 1)
    served.comes(("key0/1", None))
    assert ("key10/1", 1) not in served.changes
    one.close()


def test_store_closed_connection_gets_the_reason(served):
    one = served.connected("1")
    assert one.compare_set("join/1", None, 1)
    with served._lock:
        assert served.store.end("1", "port is no number") == [("join/1", None)]
    with pytest.raises(RendezvousError, match="^port is no number$"):
        one.wait(5.0)
    one.close()


def test_joining_lost_first_rank_that_gave_a_reason_raises_the_reason():
    """Rank 0 gives its reason and ends. This rank's send fails before it reads the reason."""
    ours, theirs = (Channel(end) for end in socket.socketpair())
    ours.seal(b"key", True)
    theirs.seal(b"key", False)
    store = Store()
    store.admit(theirs, "1")
    store.wait(1.0)
    client = Client(ours)
    store.set("all/failed", {"error": "rank 2 did not come", "ranks": [2]})
    store.close()
    with pytest.raises(OSError) as lost:
        while True:
            client.set("join/1", "a")
    joining = SimpleNamespace(store=client, about=SimpleNamespace(size=3), title=str)
    error = Joining._first_rank_lost(joining, lost.value)
    assert (str(error), list(error.ranks)) == ("rank 2 did not come", [2])
    client.close()
