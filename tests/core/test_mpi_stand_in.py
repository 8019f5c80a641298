"""Communicators on a stand-in for MPI whose ranks are threads; test_mpi.py has the real MPI."""

from __future__ import annotations

import json
import platform
import sys
import types

import fake_mpi
import numpy as np
import pytest
from cases import FACTORS, Case, Known, pairwise, play

import pycollective as pc


@pytest.fixture
def on_mpi(monkeypatch, on_ranks):
    """Return a function that calls ``work(communicator)`` on n ranks."""
    package = types.ModuleType("mpi4py")
    package.MPI = fake_mpi
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake_mpi)

    def run(size, work):
        def on_one(comm):
            return work(pc.Communicator.from_mpi(comm, timeout=20))

        return on_ranks(fake_mpi.world(size), on_one)

    return run


def chosen_by_mpi(which):
    """Return cases of test_suite.py with one variant of a collective: MPI chooses the algorithm."""
    factors, calls = dict(FACTORS[which]), {}
    for call in factors["what"]:
        named = call.algorithm
        if not isinstance(named, str) or named not in ("auto", "", "direct"):
            continue
        if call.collective != "all_reduce" or named == "auto":
            calls.setdefault((call.collective, call.ragged), call)
    factors["what"] = list(calls.values())
    return list(pairwise(factors))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["reductions", "moves"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_mpi_collectives_give_the_results_of_the_core(on_mpi, ranks, which):
    chosen = chosen_by_mpi(which)
    assert len(chosen) > 100

    def work(comm):
        for factors in chosen[:: 1 if ranks == 2 else 3]:
            case = Case(ranks, **factors)
            play(comm, case, Known(case))

    assert on_mpi(ranks, work) == [None] * ranks


@pytest.mark.parametrize("op", ["sum", "max", "mean"])
def test_mpi_reductions_in_place_use_disjoint_buffers(on_mpi, op):
    def work(comm):
        x = np.arange(6.0) * (comm.rank + 1)
        comm.all_reduce(x, op, out=x)
        y = np.arange(6.0) * (comm.rank + 1)
        got = comm.reduce(y, op, out=y if comm.rank == 0 else None)
        return x.tolist(), None if got is None else y.tolist()

    factor = {"sum": 3.0, "max": 2.0, "mean": 1.5}[op]
    want = [factor * i for i in range(6)]
    assert on_mpi(2, work) == [(want, want), (want, None)]


def test_mpi_messages_and_splits_are_right(on_mpi):
    def work(comm):
        for step in range(comm.size):
            comm.send(np.full(5, comm.rank + 0.5), (comm.rank + step) % comm.size, tag=step)
        for step in reversed(range(comm.size)):
            source = (comm.rank - step) % comm.size
            got = comm.recv(source=source, tag=step, shape=5, dtype=float)
            assert (got == source + 0.5).all()
        part = comm.split(comm.rank % 2, -comm.rank)
        assert part.all_reduce(np.ones(1))[0] == part.size == (2 if comm.rank != 1 else 1)
        assert (comm.split(None if comm.rank else 0) is None) == (comm.rank > 0)
        return comm.all_reduce(np.ones(3), async_op=True).wait().tolist()

    assert on_mpi(3, work) == [[3.0] * 3] * 3


def test_mpi_calls_after_an_asynchronous_receive_do_not_wait_for_its_message(on_mpi):
    def work(comm):
        other, arrays = 1 - comm.rank, np.zeros((4, 2))
        first = [comm.recv(arrays[i], other, tag=i % 2, async_op=True) for i in range(3)]
        assert comm.all_reduce(np.ones(1)).tolist() == [2]
        part = comm.split(0)
        later = comm.all_reduce(np.ones(2), async_op=True)
        assert later.wait().tolist() == [2, 2]
        assert part.all_reduce(np.ones(1)).tolist() == [2]
        got = comm.sendrecv(np.full(2, 9.0), other, np.zeros(2), other, 5)
        assert got.tolist() == [9, 9]
        assert not any(call.done() for call in first)
        comm.barrier()
        for i in range(4):
            comm.send(np.full(2, i + 1.0), other, tag=i % 2)
        comm.recv(arrays[3], other, tag=1)  # gets the message after that of first[1]
        for call in first:
            call.wait()
        assert comm.all_reduce(np.ones(1)).tolist() == [2]
        return arrays[:, 0].tolist()

    assert on_mpi(2, work) == [[1, 2, 3, 4]] * 2


def test_mpi_asynchronous_receives_raise_their_own_errors(on_mpi):
    def work(comm):
        if comm.rank:
            comm.send(np.ones(3), 0, tag=1)
            with pytest.raises(pc.MismatchError):
                comm.barrier()
            return
        wrong = comm.recv(np.zeros(2), 1, tag=1, async_op=True)
        with pytest.raises(pc.MismatchError, match=r"sent float64\[3\] with tag 1"):
            wrong.wait()
        with pytest.raises(pc.MismatchError):
            comm.recv(np.zeros(2), 1, async_op=True, timeout=5).wait()

    assert on_mpi(2, work) == [None, None]


def test_mpi_asynchronous_receive_ends_at_its_deadline(on_mpi):
    def work(comm):
        late = comm.recv(np.zeros(2), 1 - comm.rank, async_op=True, timeout=0.2)
        with pytest.raises(pc.CollectiveTimeoutError, match="did not answer within 0.2 s"):
            late.wait()

    assert on_mpi(2, work) == [None, None]


def test_mpi_differing_calls_raise_mismatch_error(on_mpi):
    def work(comm):
        with pytest.raises(
            pc.MismatchError, match=r"rank 0 is in all_reduce\(float64\[4\], sum\)"
        ) as caught:
            comm.all_reduce(np.ones(4 if comm.rank == 0 else 3))
        error = caught.value
        calls = {0: "all_reduce(float64[4], sum)", 1: "all_reduce(float64[3], sum)"}
        assert (error.calls, error.ranks) == (calls, (0, 1))
        with pytest.raises(pc.MismatchError) as again:  # detected by the group, or by another rank
            comm.barrier()
        assert (again.value.calls, again.value.ranks) == (calls, (0, 1))

    assert on_mpi(2, work) == [None, None]


def test_mpi_leaving_rank_is_lost_and_missing_rank_times_out(on_mpi, monkeypatch):
    monkeypatch.setattr("pycollective.comm.mpi_group._GRACE", 0.05)

    def work(comm):
        first, second = comm.split(0), comm.split(0)
        if comm.rank == 0:
            first.close()
            with pytest.raises(
                pc.CollectiveTimeoutError, match="did not join within 0.1 s"
            ) as late:
                second.barrier(timeout=0.1)
            assert late.value.call == "barrier() #1"
            comm.barrier()
            return
        with pytest.raises(pc.PeerLostError, match="rank 0 has left the group") as lost:
            first.barrier()
        hosts = (platform.node(),)
        assert (lost.value.ranks, lost.value.hosts, lost.value.call) == (
            (0,),
            hosts,
            "barrier() #1",
        )
        comm.barrier()
        with pytest.raises(pc.CollectiveTimeoutError, match="did not join within 0.1 s"):
            second.barrier()

    assert on_mpi(2, work) == [None, None]


def test_mpi_moves_items_without_bytes(on_mpi):
    def work(comm):
        x = np.zeros(4, "V0")
        return [
            r if r is None else (r.shape, r.dtype == "V0")
            for r in (comm.broadcast(x), comm.all_gather(x), comm.scatter(x), comm.all_to_all(x))
        ]

    want = [((4,), True), ((8,), True), ((2,), True), ((4,), True)]
    assert on_mpi(2, work) == [want, want]


def test_mpi_calls_with_a_named_algorithm_raise_value_error(on_mpi):
    def work(comm):
        x = np.ones(4)
        for call in (
            lambda: comm.all_reduce(x, algorithm="ring"),
            lambda: comm.all_reduce(x, reproducible=True),
            lambda: comm.broadcast(x, algorithm="chain"),
            lambda: comm.all_gather(x, algorithm="doubling"),
            lambda: comm.scan(x, algorithm="chain"),
        ):
            with pytest.raises(ValueError, match="leave out algorithm and reproducible"):
                call()
        return comm.broadcast(x).tolist()

    assert on_mpi(2, work) == [[1.0] * 4] * 2


def test_from_mpi_of_another_object_raises_type_error(on_mpi):
    def work(comm):
        with pytest.raises(TypeError, match="needs an intracommunicator"):
            pc.Communicator.from_mpi("MPI.COMM_WORLD")
        with pytest.raises(TypeError, match="timeout must be a positive number of seconds"):
            pc.Communicator.from_mpi(comm._group.comm, timeout="x")

    assert on_mpi(1, work) == [None]


def test_mpi_calls_are_in_the_timeline(on_mpi, tmp_path):
    def work(comm):
        comm.all_reduce(np.ones(3))
        comm.barrier(async_op=True).wait()
        comm.close()

    with pc.timeline(tmp_path / "t.json"):
        on_mpi(2, work)
    (file,) = tmp_path.glob("t.rank*.json")  # each rank counts as a process
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] != "M"]
    assert sorted((e["pid"], e["name"]) for e in events) == [
        (0, "all_reduce"), (0, "barrier"), (1, "all_reduce"), (1, "barrier"),
    ]  # fmt: skip
    assert {e["args"]["transport"] for e in events} == {"MPI"}
