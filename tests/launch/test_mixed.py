"""Groups in which some ranks share a host; PYCOLLECTIVE_HOST_ID simulates several hosts on one."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading

import numpy as np
import pytest
from processes import environments, run_on_hosts
from test_blame import spend
from test_rendezvous import wait_until

import pycollective as pc
from pycollective import _core, algorithms, tuning
from pycollective.launch import RendezvousError, description, init, memory, peers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")


def join(envs, seconds=15.0):
    """Call init for each environment in a thread of its own; return the communicators."""
    results = init_results(envs, seconds)
    for result in results:
        assert not isinstance(result, Exception), result
    return results


def init_results(envs, seconds=15.0):
    """Call init for each environment in a thread of its own; return communicators or errors."""
    results = [None] * len(envs)

    def one(i):
        try:
            results[i] = init(environment=envs[i], timeout=15, join_timeout=seconds)
        except RendezvousError as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(envs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


def close(comms):
    for c in comms:
        c.close()


COLLECTIVES = """
from pycollective import algorithms
r, n = comm.rank, comm.size
for name in [*algorithms.names(), "hierarchical", "auto"]:
    for size in (0, 1, 3, 17, 4096, 65_537, 700_007):
        x = (np.arange(size) % 11 + r).astype("float32")
        want = (np.arange(size) % 11 * n + n * (n - 1) // 2).astype("float32")
        assert np.array_equal(comm.all_reduce(x, algorithm=name), want), (name, size)
        comm.all_reduce(x, out=x, algorithm=name)
        assert np.array_equal(x, want), (name, size)
        mean = comm.all_reduce(np.full(size, r * 2.0), "mean", algorithm=name)
        assert (mean == n - 1).all()
for root in range(n):
    assert (comm.broadcast(np.full(300_000, float(r)), root) == root).all()
    part = comm.gather(np.full(70_000, r), root)
    assert part is None or (part.reshape(n, -1) == np.arange(n)[:, None]).all()
got = comm.all_to_all(np.repeat(np.arange(n) + 10 * r, 50_000))
assert (got.reshape(n, -1) == (10 * np.arange(n) + r)[:, None]).all()
assert (comm.all_gather(np.full(90_000, r)).reshape(n, -1) == np.arange(n)[:, None]).all()
comm.barrier()
shared = comm.empty(1000)
shared[:] = r
assert (comm.all_reduce(shared) == n * (n - 1) // 2).all()
print(comm.hosts, repr(comm))
"""


@pytest.mark.parametrize(
    ("hosts", "numbers", "how"),
    [
        ("aabb", [0, 0, 1, 1], "shared memory and TCP"),
        pytest.param("abacb", [0, 1, 0, 2, 1], "shared memory and TCP", marks=pytest.mark.slow),
        (["", "", ""], [0, 0, 0], "shared memory"),
        pytest.param("abc", [0, 1, 2], "TCP", marks=pytest.mark.slow),
    ],
)
def test_collectives_by_hosts_use_the_expected_transport(tmp_path, hosts, numbers, how):
    done = run_on_hosts(tmp_path, hosts, COLLECTIVES)
    codes, outputs = done.codes, done.outputs
    assert codes == [0] * len(hosts), done
    for rank, output in enumerate(outputs):
        assert output == f"{numbers} <Communicator rank {rank} of {len(hosts)}, {how}>\n"


def test_tcp_can_be_forced():
    comms = join(environments(["", ""], PYCOLLECTIVE_TRANSPORT="tcp"))
    assert [(c.hosts, c._group.transport) for c in comms] == [([0, 1], "TCP")] * 2
    close(comms)
    # One of the two ranks suffices to force TCP.
    envs = environments(["", ""])
    envs[1]["PYCOLLECTIVE_TRANSPORT"] = "tcp"
    comms = join(envs)
    assert [c.hosts for c in comms] == [[0, 1]] * 2
    close(comms)


@pytest.mark.parametrize("hosts", ["aab", pytest.param(["", ""], marks=pytest.mark.slow)])
def test_groups_leave_nothing_behind(hosts, on_ranks):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before, threads = descriptors(), threading.active_count()
    for i in range(6):
        comms = join(environments(hosts))
        total = len(hosts) * (len(hosts) + 1) / 2
        got = on_ranks(comms, lambda c: float(c.all_reduce([c.rank + 1.0])[0]))
        assert got == [total] * len(hosts)
        if i % 3 == 0:
            comms[0].abort("on purpose")
            errors = [str(e) for e in on_ranks(comms, lambda c: c.barrier())]
            assert errors == ["on purpose"] * len(hosts)
        if i % 2:
            close(comms)
        del comms
    gc.collect()  # tracebacks keep the communicators alive
    wait_until(lambda: descriptors() <= before and threading.active_count() <= threads)


# Access to shared memory ----------------------------------------------------------------------


def test_ranks_that_cannot_reach_the_memory_use_tcp(monkeypatch, caplog, on_ranks):
    """Ranks 1 and 2 have the boot id of rank 0, but cannot reach its socket."""
    caplog.set_level("INFO", "pycollective")
    real = memory.Sharing.reach

    def reach(sharing, name, group, rank, until):
        if rank in (1, 2) and threading.current_thread() not in tried:
            tried.add(threading.current_thread())
            key, sharing._key = sharing._key, b"another key"
            try:
                return real(sharing, name, group, rank, until)
            finally:
                sharing._key = key
        return real(sharing, name, group, rank, until)

    tried = set()
    monkeypatch.setattr(memory.Sharing, "reach", reach)
    comms = join(environments(["a"] * 4))
    assert [c.hosts for c in comms] == [[0, 1, 1, 0]] * 4
    assert on_ranks(comms, lambda c: float(c.all_reduce([1.0])[0])) == [4.0] * 4
    close(comms)
    text = "no shared memory with ranks 1, 2 despite an equal host id"
    assert text in caplog.text
    assert "through shared memory with rank 3 and over TCP with the others, 2 hosts" in caplog.text


def test_memory_that_cannot_be_created_falls_back_to_tcp(monkeypatch, on_ranks):
    def create(*args):
        raise OSError("no memory")

    monkeypatch.setattr(memory._core.ShmGroup, "create", staticmethod(create))
    comms = join(environments(["a"] * 3))
    assert [c.hosts for c in comms] == [[0, 1, 2]] * 3
    assert on_ranks(comms, lambda c: float(c.all_reduce([1.0])[0])) == [3.0] * 3
    close(comms)


def test_memory_that_cannot_be_joined_falls_back_to_tcp(monkeypatch, on_ranks):
    def opened(descriptor):
        raise ValueError("another version's")

    monkeypatch.setattr(memory._core.ShmGroup, "open", staticmethod(opened))
    monkeypatch.setattr(memory, "_ENTER_SECONDS", 0.2)
    comms = join(environments(["a"] * 3))
    assert [c.hosts for c in comms] == [[0, 1, 2]] * 3
    assert on_ranks(comms, lambda c: float(c.all_reduce([1.0])[0])) == [3.0] * 3
    close(comms)


def test_memory_socket_without_the_key_gives_nothing(monkeypatch, on_ranks):
    """A process without the key gets no descriptor and does not disturb the group."""
    got = []
    real = memory.Sharing.reach

    def reach(sharing, name, group, rank, until):
        for noise in (b"\0" * 50, b"\xff" * 5000, b"\0\0\0\2{}", b""):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect("\0" + name)
            sock.settimeout(0.5)
            try:
                sock.sendall(noise)
                got.append(socket.recv_fds(sock, 1000, 4)[1])
            except OSError:
                pass
            sock.close()
        return real(sharing, name, group, rank, until)

    monkeypatch.setattr(memory.Sharing, "reach", reach)
    comms = join(environments(["a"] * 2))
    assert [c.hosts for c in comms] == [[0, 0]] * 2
    assert not any(got)
    assert on_ranks(comms, lambda c: float(c.all_reduce([1.0])[0])) == [2.0] * 2
    close(comms)


@pytest.mark.slow
def test_rank_that_one_peer_waits_for_is_named_by_all(monkeypatch):
    """Rank 2 connects to rank 0 alone. Rank 0 waits for rank 1, which waits longer, for rank 2."""
    real, real_drop = peers.Peers.until_reached, peers.Peers.drop
    given_up = threading.Semaphore(0)

    def reached(self, reach, peer, where, seconds):
        if self.title() == "rank 2" and peer == 1:
            for _ in range(2):  # ranks 0 and 1
                given_up.acquire(timeout=20)
            raise RendezvousError("stopped")
        return real(self, reach, peer, where, seconds)

    def drop(self, *, for_ever=False):
        given_up.release()
        real_drop(self, for_ever=for_ever)

    monkeypatch.setattr(peers.Peers, "until_reached", reached)
    monkeypatch.setattr(peers.Peers, "drop", drop)
    spend(monkeypatch, rank=0, left=2.0)
    results = init_results(environments(["a", "a", "b"]), seconds=20.0)
    for error in results[:2]:
        assert " s for rank 2 of 3 to connect" in str(error)
        assert error.ranks == (2,)


def test_boot_id_is_constant_and_not_empty():
    assert description.boot_id() == description.boot_id() != ""


def test_groups_with_inconsistent_arguments_raise():
    memory_of_two = _core.ShmGroup.create(2)
    memory_of_two.join(0)
    with pytest.raises(ValueError, match="`hosts` must have a number"):
        _core.MixedGroup(0, [[]], [], memory_of_two, [0, 0])
    with pytest.raises(ValueError, match="the memory has 2 ranks"):
        _core.MixedGroup(0, [[]], [], memory_of_two, [0])
    a, b = socket.socketpair()
    with pytest.raises(ValueError, match="a connection for messages"):
        _core.MixedGroup(0, [[], [a.fileno()]], [], memory_of_two, [0, 1])
    with pytest.raises(ValueError, match="every peer needs a control connection"):
        _core.TcpGroup(0, [[], [a.fileno()]])
    a.close()
    b.close()


# The schedule ---------------------------------------------------------------------------------

LAYOUTS = [[0], [0, 0], [0, 1], [0, 0, 1], [0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 2, 2, 2],
           [0, 0, 0, 1, 1], [0, 1, 1, 0, 1, 2], [0, 0, 0, 0, 1, 1, 2], [0] * 8 + [1] * 8,
           [2, 1, 0, 0, 1, 2, 2, 0], [0] * 5 + [1] * 3 + [2] * 7, list(range(4)) * 3]  # fmt: skip


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_hierarchical_schedule_is_verified(hosts):
    algorithms.verify(algorithms.hierarchical(hosts))


def test_hierarchical_schedule_sends_the_least_between_hosts():
    hosts = [0] * 4 + [1] * 4 + [2] * 4
    schedule = algorithms.hierarchical(hosts)
    crossing = [0] * 3
    for rank, steps in enumerate(schedule.steps):
        for step in steps:
            if step.verb.name == "send" and hosts[step.peer] != hosts[rank]:
                crossing[hosts[rank]] += step.source.count
    assert crossing == [schedule.chunks * 2 * 2 // 3] * 3


@pytest.mark.parametrize("hosts", [[], [1], [0, 2], [-1], [0, 3, 1]])
def test_hierarchical_invalid_layout_raises(hosts):
    with pytest.raises(ValueError, match="host|ranks"):
        algorithms.hierarchical(hosts)


def test_hierarchical_on_one_host_sums(on_ranks):
    comms = pc.local_group(5)
    assert comms[0].hosts == [0] * 5
    results = on_ranks(comms, lambda c: c.all_reduce(np.arange(999.0), algorithm="hierarchical"))
    assert all(np.array_equal(r, 5 * np.arange(999.0)) for r in results)


# Measured tables ------------------------------------------------------------------------------


def test_a_mixed_group_uses_rank_0s_table(tmp_path):
    file = tmp_path / "table.json"
    kinds = _core.Collective
    rows = [(kinds.all_reduce, 1000, "hierarchical"), (kinds.all_reduce, 1 << 40, "double_tree")]
    tuning.save(file, "shared memory and TCP", 3, rows, "0")
    tuning.save(file, "shared memory", 3, [(kinds.broadcast, 1000, "chain")], "0")
    for hosts, collective, names in (
        ("aab", kinds.all_reduce, ["hierarchical", "double_tree"]),
        ("aaa", kinds.broadcast, ["chain", "direct"]),
    ):
        envs = environments(hosts, PYCOLLECTIVE_TUNING="none")
        envs[0][tuning.TUNING] = str(file)
        comms = join(envs)
        for c in comms:
            assert [c._core.select(collective, size) for size in (1000, 1001)] == names
        close(comms)


@pytest.mark.slow
def test_bench_tunes_a_mixed_group(tmp_path):
    file = tmp_path / "table.json"
    words = "bench --tune -c all_reduce -b 64 -e 64 --seconds 0.002 -w 1".split()
    preamble = f"import sys; from pycollective.cli import main; sys.exit(main({words}))"
    done = run_on_hosts(tmp_path, "aab", "", preamble, PYCOLLECTIVE_TUNING=str(file))
    assert done.codes == [0] * 3, done
    timed = {line.split()[4] for line in done.outputs[0].splitlines() if line[:1] == " "}
    assert timed == {*algorithms.names(), "hierarchical"}
    ((what, _, name),) = json.loads(file.read_text())["tables"]["mixed"]["3"]
    assert (what, name in timed) == ("all_reduce", True)


# Forced transports ----------------------------------------------------------------------------


def test_shared_memory_can_be_forced():
    comms = join(environments(["a", "a"], PYCOLLECTIVE_TRANSPORT="shm"))
    assert [c._group.transport for c in comms] == ["shared memory"] * 2
    close(comms)
    text = "PYCOLLECTIVE_TRANSPORT=shm, but rank {} shares no memory with {}"
    envs = environments(["a", "b", "a"], PYCOLLECTIVE_TRANSPORT="shm")
    errors = [str(e) for e in init_results(envs)]
    away = ["rank 1", "ranks 0, 2", "rank 1"]
    for rank, error in enumerate(errors):
        assert text.format(rank, away[rank]) in error, errors


def test_threads_cannot_be_forced_on_processes():
    for error in init_results(environments(["a", "a"], PYCOLLECTIVE_TRANSPORT="thread")):
        assert "PYCOLLECTIVE_TRANSPORT=thread, but this process is one of several ranks" in str(
            error
        )
