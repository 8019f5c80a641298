"""send and recv among threads: order, tags, lengths, layouts, mismatches, deadlines."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

import pycollective as pc
from pycollective import local_group

LENGTHS = [0, 1, 1000, 70_000, 1_000_003]


@pytest.fixture
def pair():
    return local_group(2, timeout=30)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_messages_of_any_length_round_a_ring_arrive(ranks, on_ranks):
    def work(c):
        after, before = (c.rank + 1) % c.size, (c.rank - 1) % c.size
        for n in LENGTHS:
            x = np.arange(n) * (c.rank + 1.0)
            c.send(x, after)  # every rank sends first
            got = c.recv(source=before, shape=n, dtype=float)
            np.testing.assert_array_equal(got, np.arange(n) * (before + 1.0))
        return True

    assert on_ranks(local_group(ranks, timeout=30), work) == [True] * ranks


def test_messages_of_any_layout_and_dtype_arrive(pair, on_ranks):
    xs = [
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(40, dtype="int16")[::3],
        np.array(3 + 4j),
        np.array([b"ab", b"c"]),
        np.zeros((0, 3), "float16"),
        np.arange(24).reshape(2, 3, 4).T,
        np.ones((1,) * 9),
    ]
    if pc.dtypes.bfloat16 is not None:
        xs.append(np.arange(5).astype(pc.dtypes.bfloat16))

    def work(c):
        if c.rank == 0:
            for x in xs:
                c.send(x, 1)
            return None
        wide = np.zeros((3, 8))
        first = c.recv(wide[:, ::2], 0)  # into every other column
        assert first.base is wide
        assert (wide[:, 1::2] == 0).all()
        return [first, *(c.recv(source=0, shape=x.shape, dtype=x.dtype) for x in xs[1:])]

    got = on_ranks(pair, work)[1]
    for result, x in zip(got, xs, strict=True):
        assert (result.shape, result.dtype) == (x.shape, x.dtype)
        np.testing.assert_array_equal(result, x)


def test_messages_with_one_tag_arrive_in_order(pair, on_ranks):
    def work(c):
        if c.rank == 0:
            for i in range(20):
                c.send(np.full(1000, i), 1, tag=i % 3)
            return None
        return [[int(c.recv(source=0, tag=t, shape=1000, dtype=int)[0]) for _ in range(6)]
                for t in (2, 0, 1)]  # fmt: skip

    got = on_ranks(pair, work)[1]
    assert got == [list(range(t, 18, 3)) for t in (2, 0, 1)]


def test_send_to_this_rank_is_received(pair):
    c = pair[1]
    c.send(np.arange(5), 1, tag=7)
    np.testing.assert_array_equal(c.recv(source=1, tag=7, shape=5, dtype=int), np.arange(5))
    waits = c.recv(source=1, shape=5, dtype=int, async_op=True)
    assert not waits.done()
    c.send(np.arange(5), 1)
    np.testing.assert_array_equal(waits.wait(20), np.arange(5))


def test_messages_beside_collectives_do_not_disturb_them(on_ranks):
    def work(c):
        got = []
        for i in range(30):
            if c.rank == 0:
                c.send([float(i)], 1)
            if i % 3 == 0:
                got.append(float(c.all_reduce(np.ones(1))[0]))
            if c.rank == 1:  # rank 0 may be in the collective already
                got.append(float(c.recv(source=0, shape=1, dtype=float)[0]))
        c.barrier()
        return got

    got = on_ranks(local_group(3, timeout=30), work)
    assert got[0] == got[2] == [3.0] * 10
    assert got[1] == [v for i in range(30) for v in ([3.0] if i % 3 == 0 else []) + [float(i)]]


def test_messages_exchanged_with_works_arrive(pair, on_ranks):
    """Programs for mpi4py call receives first, then sends, then wait for all."""

    def work(c):
        other = 1 - c.rank
        ins = [c.recv(source=other, tag=t, shape=n, dtype=float, async_op=True)
               for t, n in enumerate(LENGTHS)]  # fmt: skip
        outs = [c.send(np.full(n, c.rank + 1.0), other, t, async_op=True)
                for t, n in reversed(list(enumerate(LENGTHS)))]  # fmt: skip
        c.all_reduce(np.ones(3))
        c.send(np.ones(3), other, 99)  # while works run
        assert c.recv(source=other, tag=99, shape=3, dtype=float).sum() == 3
        for w, n in zip(ins, LENGTHS, strict=True):
            np.testing.assert_array_equal(w.wait(20), np.full(n, other + 1.0))
        assert [w.wait(20) for w in outs] == [None] * len(outs)
        return True

    assert on_ranks(pair, work) == [True, True]


def test_mismatch_of_a_message_raises_on_both_ranks(pair, on_ranks):
    def work(c):
        with pytest.raises(pc.MismatchError) as caught:
            if c.rank == 0:
                c.send(np.ones((2, 3)), 1, tag=5)
                c.barrier()
            else:
                c.recv(source=0, tag=5, shape=(3, 2), dtype="float32")
        return str(caught.value)

    first, second = on_ranks(pair, work)
    assert first == second
    assert (
        "rank 1 receives float32[3, 2] from rank 0 with tag 5, but rank 0 sent float64[2, 3]"
        in first
    )


def test_mismatch_wakes_a_sleeping_receiver(pair, on_ranks):
    def work(c):
        with pytest.raises(pc.MismatchError, match=r"receives float64\[4\] .* sent float64\[3\]"):
            if c.rank == 0:
                time.sleep(0.2)
                c.send(np.ones(3), 1)
                c.barrier()
            else:
                c.recv(source=0, shape=4, dtype=float)
        with pytest.raises(pc.MismatchError):
            c.recv(source=1 - c.rank, shape=4, dtype=float)
        c.close()
        return True

    assert on_ranks(pair, work) == [True, True]


def test_mismatch_of_a_buffered_message_raises(pair, on_ranks):
    def work(c):
        if c.rank == 0:
            c.send(np.ones(2), 1, tag=1)
            c.send(np.ones(3), 1, tag=2)
            return None
        c.recv(source=0, tag=2, shape=3, dtype=float)
        with pytest.raises(pc.MismatchError, match=r"receives int64\[2\] .* sent float64\[2\]"):
            c.recv(source=0, tag=1, shape=2, dtype=int)
        return True

    assert on_ranks(pair, work) == [None, True]


def test_messages_timeout_names_the_message_and_the_rank(pair):
    with pytest.raises(
        pc.CollectiveTimeoutError,
        match=r"rank 1 waited until its deadline in recv \(float64\[4\], tag 3\) from rank 0\. rank 0",
    ):
        pair[1].recv(source=0, tag=3, shape=4, dtype=float, timeout=0.1)
    a, _b = local_group(2)
    with pytest.raises(
        pc.CollectiveTimeoutError, match=r"in send \(float64\[1000000\], tag 0\) to"
    ):
        a.send(np.ones(1_000_000), 1, timeout=0.1)
    a, _b = local_group(2)
    under_way = a.recv(source=1, shape=1, dtype=float, timeout=0.1, async_op=True)
    with pytest.raises(pc.CollectiveTimeoutError, match="in recv"):
        under_way.wait(20)


def test_failed_group_ends_the_wait_of_a_message(pair):
    timer = threading.Timer(0.1, lambda: pair[0].abort("stop it"))
    timer.start()
    with pytest.raises(pc.AbortedError, match="stop it"):
        pair[1].recv(source=0, shape=1, dtype=float)
    timer.join()
    with pytest.raises(pc.AbortedError):
        pair[0].send([1.0], 1)


def test_recv_interrupted_aborts_the_group(pair, ctrl_c):
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        pair[1].recv(source=0, shape=1, dtype=float)
    timer.join()
    with pytest.raises(pc.AbortedError, match="rank 1 left a message") as caught:
        pair[0].send([1.0], 1)
    assert caught.value.call == "recv (float64[1], tag 0) from rank 0"


def test_messages_wrong_arguments_raise(pair):
    c = pair[0]
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match=f"dest {wrong} is not among the 2 ranks"):
            c.send([1.0], wrong)
        with pytest.raises(ValueError, match=f"source {wrong} is not among the 2 ranks"):
            c.recv(np.ones(1), wrong)
    for wrong in (-1, 2**31, 2**63):
        with pytest.raises(ValueError, match="tag must be a number from 0 to 2147483647, not"):
            c.send([1.0], 1, wrong)
        with pytest.raises(ValueError, match="tag must be a number from 0 to 2147483647, not"):
            c.recv(np.ones(1), 1, wrong)
    c.send([4.0], 0, 2**31 - 1)
    assert c.recv(np.ones(1), 0, 2**31 - 1).tolist() == [4.0]
    with pytest.raises(TypeError, match="needs source="):
        c.recv(np.ones(1))
    for given in ({}, {"shape": 3}, {"dtype": float}):
        with pytest.raises(TypeError, match="recv needs out, or shape and dtype"):
            c.recv(source=1, **given)
    with pytest.raises(TypeError, match="recv needs out, or shape and dtype"):
        c.recv(np.ones(3), 1, shape=3, dtype=float)
    with pytest.raises(TypeError, match="Python objects"):
        c.recv(source=1, shape=1, dtype=object)
    out = np.ones(1)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        c.recv(out, 1)


def test_close_waits_for_messages_and_a_dropped_communicator_fails_them(pair):
    a, b = pair
    under_way = a.recv(source=1, shape=2, dtype=float, async_op=True)
    closing = threading.Thread(target=a.close)
    closing.start()
    time.sleep(0.1)
    assert closing.is_alive()
    b.send([1.0, 2.0], 0)
    closing.join(20)
    np.testing.assert_array_equal(under_way.wait(20), [1.0, 2.0])
    a, b = local_group(2)
    under_way = a.recv(source=1, shape=2, dtype=float, async_op=True)
    del a
    with pytest.raises(pc.AbortedError, match="deleted its communicator"):
        under_way.wait(20)


def test_send_without_a_receiver_buffers_a_bounded_amount():
    """A send waits when the pipe is full; memory does not grow."""
    a, b = local_group(2)
    sent = 0
    with pytest.raises(pc.CollectiveTimeoutError, match="in send"):
        for _ in range(100):
            a.send(np.zeros(8192), 1, timeout=0.2)
            sent += 1
    assert 1 <= sent <= 64
    with pytest.raises(pc.CollectiveTimeoutError):
        b.recv(source=0, shape=8192, dtype=float)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_recv_of_three_threads_from_a_leaving_rank_raises_in_each(kind):
    """One thread notices the end of the connection while the others go to sleep."""
    for _ in range(5):
        comms = make_group(kind, 2, timeout=30)
        errors = []

        def receive(tag, comm=comms[0], errors=errors):
            with pytest.raises(pc.PeerLostError) as caught:
                comm.recv(source=1, tag=tag, shape=3, dtype="int8")
            errors.append(caught.value)

        threads = [threading.Thread(target=receive, args=(tag,)) for tag in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        comms[1].close()
        for thread in threads:
            thread.join(20)
        assert [error.ranks for error in errors] == [(1,)] * 3
        comms[0].close()
