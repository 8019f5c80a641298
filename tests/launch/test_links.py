"""Link checks before a group is made: each worker's results, and the report that all workers share."""

from __future__ import annotations

import contextlib
import socket
import sys
import time

import pytest
from ports import free_port
from processes import SECRET

from pycollective.launch import RendezvousError, links
from pycollective.launch.description import Description, protection
from pycollective.launch.handshake import introduce, key_of
from pycollective.launch.links import probe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux")

ENVIRONMENT = {"PYCOLLECTIVE_SECRET": SECRET}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(links, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(links, "_SETTLED_SECONDS", 2.0)
    monkeypatch.setattr(links, "_ROUND_SECONDS", 0.05)


class Rank:
    """Callable for `on_ranks` that checks the links of one rank."""

    def __init__(self, rank, size, addresses, seconds=30.0, pause=0.0, environment=ENVIRONMENT):
        self.arguments = rank, size, addresses, seconds, environment
        self.pause = pause

    def __call__(self):
        time.sleep(self.pause)
        return probe(*self.arguments)


def call(rank):
    return rank()


def end_when_known(monkeypatch, links_of):
    """End the checks of all ranks once each rank of ``links_of`` knows the results of its links.

    ``links_of`` has the expected results for each rank, by pairs of ranks.
    """
    is_over, knowing = links._Probe._is_over, set()

    def known(probe, deadline):
        rank, found = probe._about.rank, probe._findings()
        if all(found.links.get(pair, "")[:1] == (want,) for pair, want in links_of[rank].items()):
            knowing.add(rank)
        return is_over(probe, deadline) or knowing == set(links_of)

    monkeypatch.setattr(links._Probe, "_is_over", known)


def own_addresses(size):
    """Return an address of this host for each rank."""
    return [f"127.0.0.1:{free_port()}" for _ in range(size)]


@pytest.mark.parametrize("known", ["all", "the first"])
def test_all_links_work(on_ranks, known):
    """Workers start in any order. If only worker 0's address is known, they exchange the others."""
    addresses = own_addresses(4 if known == "all" else 1)
    begin = time.monotonic()
    ranks = [Rank(r, 4, addresses, pause=pause) for r, pause in enumerate((0.3, 0.0, 0.1, 0.2))]
    for found in on_ranks(ranks, call):
        assert found.all_work(4)
        assert (found.missing(4), found.broken(), found.others, found.routes) == ([], [], {}, {})
        assert sorted(found.places) == [0, 1, 2, 3] if known == "all" else [0, 1, 2]
    assert time.monotonic() - begin < 29  # no worker waits for the deadline


def test_missing_worker_is_known_to_all(on_ranks, monkeypatch):
    both = {(2, 0): links.WORKS, (2, 1): links.REFUSED}
    end_when_known(monkeypatch, {0: both, 2: both})
    addresses = own_addresses(3)
    ranks = [Rank(r, 3, addresses) for r in (0, 2)]
    for found in on_ranks(ranks, call):
        assert found.missing(3) == [1]
        assert found.links[2, 1] == (links.REFUSED, "")
        assert found.links[2, 0] == (links.WORKS, "")
        assert found.broken() == []  # a missing worker is not a broken link


@pytest.mark.slow
def test_broken_link_is_reported_with_its_reason(on_ranks, monkeypatch):
    """Worker 2 cannot reach worker 1, and worker 0 learns of this and of the reason."""
    real = links.Sockets.connected

    def connected(rendezvous, family, address, deadline):
        if rendezvous.about.rank == 2 and address[1] == port:
            raise OSError(22, "Invalid argument")
        return real(rendezvous, family, address, deadline)

    addresses = own_addresses(3)
    port = int(addresses[1].rpartition(":")[2])
    monkeypatch.setattr(links.Sockets, "connected", connected)
    begin = time.monotonic()
    for found in on_ranks([Rank(r, 3, addresses) for r in range(3)], call):
        assert found.broken() == [(2, 1)]
        assert found.links[2, 1] == (links.HERE, "Invalid argument")
        assert found.missing(3) == []
    assert time.monotonic() - begin < 29  # all workers know the final result early


def test_different_secret_or_description_is_reported(on_ranks, monkeypatch):
    both = {(2, 0): links.WORKS, (2, 1): links.TURNED_AWAY}
    end_when_known(monkeypatch, {0: both, 1: {(1, 0): links.TURNED_AWAY}, 2: both})
    addresses = own_addresses(3)
    other = {"PYCOLLECTIVE_SECRET": SECRET[::-1]}
    ranks = [Rank(0, 3, addresses), Rank(1, 3, addresses, environment=other)]
    ranks += [Rank(2, 3, [*addresses[:2], "127.0.0.1:1"])]
    zero, one, two = on_ranks(ranks, call)
    assert one.links == {(1, 0): (links.TURNED_AWAY, "the secrets differ")}
    assert zero.missing(3) == [1]
    assert zero.links[2, 1] == (links.TURNED_AWAY, "the secrets differ")
    assert zero.others == {2: [*addresses[:2], "127.0.0.1:1"]}
    assert two.others == {0: addresses}


@pytest.mark.slow
def test_foreign_listener_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as sock, contextlib.ExitStack() as held:
        where = f"127.0.0.1:{sock.getsockname()[1]}"
        own_address = f"127.0.0.1:{free_port()}"
        found = probe(1, 2, [where, own_address], 0.8, ENVIRONMENT)
        assert found.links[1, 0][0] == links.OTHER
        assert found.links[1, 0][1].startswith("a program listens there that does not answer as")
        # A listener with a full queue never answers, like a firewall that drops packets.
        with contextlib.suppress(TimeoutError):
            while True:
                held.enter_context(socket.create_connection(sock.getsockname(), 0.1))
        found = probe(1, 2, [where, own_address], 0.8, ENVIRONMENT)
        assert found.links == {(1, 0): (links.SILENT, "")}


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (
            socket.gaierror(-2, "Name or service not known"),
            (links.OTHER, "Name or service not known"),
        ),
        (OSError(113, "No route to host"), (links.UNREACHABLE, "No route to host")),
        (PermissionError(13, "Permission denied"), (links.HERE, "Permission denied")),
        (TimeoutError(110, "Connection timed out"), (links.SILENT, "")),
        (ConnectionResetError(104, "reset\x1b[2J"), (links.OTHER, "reset?[2J")),
    ],
)
def test_os_errors_map_to_link_results(error, result):
    assert links._result_of(error) == result


def test_addresses_without_a_secret_must_be_loopback():
    with pytest.raises(
        RendezvousError, match="192.0.2.1 is not a loopback address, and there is no"
    ):
        probe(0, 2, ["192.0.2.1:9000", "192.0.2.2:9000"], 1.0, {})
    found = probe(1, 2, ["192.0.2.1:9000", f"127.0.0.1:{free_port()}"], 0.3, {})
    assert "192.0.2.1 is not a loopback address" in found.links[1, 0][1]
    assert (
        protection({})
        == "secret: none, so only processes of this user on this machine are accepted; no TLS"
    )


def test_own_address_in_use_raises():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        taken = f"127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(RendezvousError, match="Address already in use"):
            probe(0, 2, [taken, "127.0.0.1:1"], 1.0, ENVIRONMENT)
        with pytest.raises(RendezvousError, match="rank 1 cannot listen at 127.0.0.1"):
            probe(1, 2, ["127.0.0.1:1", taken], 1.0, ENVIRONMENT)


GOOD = {
    "rank": 1, "addresses": ["a"], "version": 1, "links": {"0": ["works", ""]},
    "routes": {"0": "x"}, "place": ["h", 1], "all_links_work": True,
}  # fmt: skip


def test_malformed_reports_are_refused(on_ranks):
    """Even a process with the secret may send only well-formed reports."""
    port = free_port()

    def tell(news):
        for _ in range(2000):
            with contextlib.suppress(ConnectionRefusedError):
                sock = socket.create_connection(("127.0.0.1", port))
                break
            time.sleep(0.01)
        deadline = time.monotonic() + 20
        about = {"purpose": "probe", "from": 1}
        with contextlib.closing(
            introduce(sock, key_of(SECRET.encode()), about, deadline)
        ) as channel:
            channel.send(news, deadline)
            with contextlib.suppress(OSError):
                return channel.receive(deadline)
        return None

    def other():
        for change in (
            {"rank": 2},
            {"rank": True},
            {"version": -1},
            {"links": {"0": ["done", ""]}},
            {"links": {"0": ["works", 7]}},
            {"links": {"0": ["works"]}},
            {"links": {"x": ["works", ""]}},
            {"routes": {"9": "x"}},
            {"place": ["h", 70000]},
            {"place": ["h"]},
            {"addresses": [1]},
        ):
            assert tell({"reports": [{**GOOD, **change}]}) is None, change
        for news in ({}, {"reports": 3}, {"reports": [3]}, {"reports": [{}]}):
            assert tell(news) is None, news
        return tell({"reports": [GOOD]})

    found, heard = on_ranks([Rank(0, 2, [f"127.0.0.1:{port}"]), other], call)
    assert [report["rank"] for report in heard["reports"]] == [0, 1]
    assert found.all_work(2)
    assert found.routes == {(1, 0): "x"}
    assert found.others == {1: ["a"]}


def test_older_report_is_ignored():
    about = Description.of_environment(ENVIRONMENT, 0, 2, ["127.0.0.1:1"])
    probe = links._Probe(about, ["127.0.0.1:1"], {0: ("127.0.0.1", 1)})
    for version, text in ((2, "new"), (1, "old")):
        probe._keep_newest({"reports": [{**GOOD, "version": version, "routes": {"0": text}}]})
    assert probe._findings().routes == {(1, 0): "new"}


def test_reports_to_send_are_copies_that_other_threads_do_not_change():
    about = Description.of_environment(ENVIRONMENT, 0, 2, ["127.0.0.1:1"])
    probe = links._Probe(about, ["127.0.0.1:1"], {0: ("127.0.0.1", 1)})
    news = probe._reports_message()
    probe._own.links[1] = links.WORKS, ""
    assert news["reports"][0]["links"] == {}
