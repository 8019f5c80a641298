"""Algorithms written in Python: proved, then run by the executor; broken ones never run."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from own_algorithms import fan, funnel, ring, through_scratch

import pycollective as pc
from pycollective import algorithms, local_group
from pycollective.algorithms import (
    algorithm,
    copy,
    input,
    output,
    recv,
    recv_reduce,
    reduce,
    scratch,
    send,
)


@pytest.mark.parametrize("mine", [ring, through_scratch], ids=lambda a: a.name)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_own_algorithm_gives_sums_and_means(mine, ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    for n in (0, 1, 2, 33, 1009, 3_300_001 if ranks == 3 else 50_000):
        x = (np.arange(n * ranks) % 17).reshape(ranks, n).astype("float32") * ranks

        def work(c, x=x):
            mean = c.all_reduce(x[c.rank], "mean", algorithm=mine)
            total = x[c.rank].copy()
            c.all_reduce(total, out=total, algorithm=mine)
            return mean, total

        for mean, total in on_ranks(comms, work):
            np.testing.assert_array_equal(total, x.sum(axis=0))
            np.testing.assert_array_equal(mean, x.sum(axis=0) / ranks)


def test_async_call_keeps_its_algorithm_alive():
    def with_own(comm, x):
        @algorithm(num_chunks=1, collective="broadcast")
        def short_lived(rank, size):
            if rank == 0:
                yield copy(input[0], output[0])
                yield send(1, output[0])
            else:
                yield recv(0, output[0])

        return comm.broadcast(x, algorithm=short_lived, async_op=True)

    a, b = local_group(2, timeout=30)
    barrier = a.barrier(async_op=True)
    work = with_own(a, np.arange(5.0))
    gc.collect()
    b.barrier()
    with_own(b, np.zeros(5)).wait()
    barrier.wait()
    np.testing.assert_array_equal(work.wait(), np.arange(5.0))


def test_own_ring_has_the_steps_of_the_cores_ring():
    for size in (*range(1, 24), 64):
        ring.verify(size)
        got = ring.for_ranks(size).schedule  # with the marks of complete chunks
        want = algorithms.schedule("ring", size)
        assert [[str(s) for s in steps] for steps in got.steps] == [
            [str(s) for s in steps] for steps in want.steps
        ]


def test_own_algorithm_is_planned_once_for_all_threads(on_ranks):
    calls = []

    @algorithm(num_chunks=1)
    def counted(rank, size):
        calls.append(rank)
        yield from (
            [recv_reduce(1, input[0], output[0]), send(1, output[0])]
            if rank == 0
            else [send(0, input[0]), recv(0, output[0])]
        )

    comms = local_group(2, timeout=30)
    for _ in range(3):
        on_ranks(comms, lambda c: c.all_reduce(np.ones(3), algorithm=counted))
    assert calls == [0, 1]


def test_invalid_own_algorithm_raises_before_it_runs(on_ranks):
    @algorithm(num_chunks=1)
    def forgets_a_rank(rank, size):
        yield copy(input[0], output[0])

    results = on_ranks(
        local_group(2, timeout=30), lambda c: c.all_reduce(np.ones(2), algorithm=forgets_a_rank)
    )
    for error in results:
        assert isinstance(error, ValueError)
        assert "forgets_a_rank: out of place: rank 0 ends with a wrong output[0]" in str(error)
    forgets_a_rank.verify(1)
    with pytest.raises(ValueError, match="wrong output"):
        algorithms.verify(forgets_a_rank, 3)
    with pytest.raises(ValueError, match="64 ranks at most"):
        ring.verify(65)
    with pytest.raises(ValueError, match="at least 1 rank"):
        ring.verify(0)
    with pytest.raises(ValueError, match="at least one chunk"):
        algorithm(num_chunks=0)(lambda rank, size: []).verify(2)
    with pytest.raises(
        TypeError, match=r"function 'steps' in place of num_chunks: write @algorithm"
    ):

        @algorithm
        def steps(rank, size):
            yield copy(input[0], output[0])

    with pytest.raises(TypeError, match=r"\[first:end\]"):
        input[:2]
    assert repr([input[0:2], output[3]]) == "[input[0:2], output[3]]"
    with pytest.raises(ValueError, match="schedule for all_reduce among 3 ranks"):
        (comm,) = local_group(1)
        comm._core.all_reduce(np.ones(1), np.ones(1), "sum", ring.for_ranks(3), False, 1.0)


def test_own_algorithm_that_overwrites_what_it_has_not_read_raises():
    @algorithm(num_chunks=lambda n: n, num_scratch=3, collective="all_gather")
    def shifted(rank, size):
        peer = 1 - rank
        yield copy(input[0], scratch[0])
        yield send(peer, scratch[0])
        yield recv(peer, scratch[1])
        yield copy(scratch[1], output[peer])
        yield copy(scratch[0:2], scratch[1:3])
        yield copy(scratch[2], output[rank])

    with pytest.raises(ValueError, match=r"copy scratch\[0:2\] to .*source and target overlap"):
        shifted.verify(2)


def test_own_algorithm_whose_ranks_add_in_different_orders_raises():
    """Otherwise the ranks' results could differ in their last bits."""

    def steps(rank, size, first):
        others = [peer for peer in range(size) if peer != rank]
        for peer in others:
            yield send(peer, input[0])
        yield copy(input[0], scratch[rank])
        for peer in others:
            yield recv(peer, scratch[peer])
        order = [rank, *others] if first == "own" else range(size)
        begin, *rest = order
        for peer in others:
            yield send(peer, scratch[rank])  # shows that the inputs were read
        for peer in others:
            yield recv(peer, scratch[size + peer])
        yield copy(scratch[begin], output[0])
        for peer in rest:
            yield reduce(scratch[peer], output[0])

    def made(first):
        return algorithm(num_chunks=1, num_scratch=lambda n: 2 * n)(
            lambda rank, size: steps(rank, size, first)
        )

    made("rank 0's").verify(3)
    made("own").verify(2)  # a + b has the bits of b + a
    with pytest.raises(ValueError, match=r"rank 2 adds output\[0\] in another order than rank 0"):
        made("own").verify(3)


@pytest.mark.slow
def test_proof_can_be_interrupted(tmp_path):
    code = """
import signal, sys, time
from pycollective.algorithms import algorithm, copy, input, output, recv, recv_reduce, send
signal.signal(signal.SIGINT, signal.default_int_handler)
@algorithm(num_chunks=4000)
def star(rank, size):
    for c in range(4000):
        if rank:
            yield send(0, input[c])
            yield recv(0, output[c])
        else:
            yield copy(input[c], output[c])
            for peer in range(1, size):
                yield recv_reduce(peer, output[c], output[c])
            for peer in range(1, size):
                yield send(peer, output[c])
print("begins", flush=True)
try:
    star.verify(8)
    print("ended", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process, process.stdout:
        assert process.stdout.readline() == "begins\n"
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"


def test_own_algorithm_with_invalid_spans_raises():
    far = 2**31 - 1
    for span in (output[far], output[0:far], output[-1], output[2:1], output[-far:-1]):
        wild = algorithm(num_chunks=2)(lambda rank, size, span=span: [copy(span, span)])
        with pytest.raises((ValueError, TypeError)):
            wild.verify(1)


def test_own_algorithms_with_one_name_raise_mismatch_error(on_ranks):
    @algorithm(num_chunks=1)
    def ring(rank, size):
        if rank == 0:
            yield recv_reduce(1, input[0], output[0])
            yield send(1, output[0])
        else:
            yield send(0, input[0])
            yield recv(0, output[0])

    rings = [ring, globals()["ring"]]
    results = on_ranks(
        local_group(2, timeout=30), lambda c: c.all_reduce(np.ones(4), algorithm=rings[c.rank])
    )
    assert all(isinstance(r, pc.MismatchError) for r in results), results


def test_own_algorithm_can_be_shown():
    assert ring.show(3).startswith("ring all_reduce: 3 ranks, 3 chunks\nrank 0:\n")
    assert algorithms.rounds(ring, 4) == algorithms.rounds("ring", 4)
    assert repr(ring) == "<Algorithm ring>"


def test_own_algorithms_run_in_every_collective(on_ranks):
    def work(c):
        r, n = c.rank, c.size
        for root in (0, n - 1):
            got = c.broadcast(np.arange(9.0) * (r + 1), root, algorithm=fan)
            assert (got == np.arange(9.0) * (root + 1)).all()
            parts = c.gather(np.full((2, 2), r), root, algorithm=funnel)
            want = np.repeat(np.arange(n), 2)[:, None] * np.ones((1, 2), int)
            assert (parts is None) if r != root else (parts == want).all()
        under_way = c.broadcast(np.full(3, r), 0, algorithm=fan, async_op=True)
        assert (under_way.wait() == 0).all()
        with pytest.raises(
            ValueError, match="'fan' is a schedule for broadcast among 3 ranks, not"
        ):
            c.all_reduce(np.ones(2), algorithm=fan)
        with pytest.raises(
            ValueError, match="is a schedule for broadcast .* not for reduce_scatter"
        ):
            c.reduce_scatter(np.ones(3), algorithm=fan)
        return True

    assert on_ranks(local_group(3, timeout=30), work) == [True] * 3
    with pytest.raises(ValueError, match="no collective is called 'shout'"):
        algorithm(num_chunks=1, collective="shout")(lambda rank, size: [])
