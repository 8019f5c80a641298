"""split among threads: ranks of new groups, nested and independent groups."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest

import pycollective as pc
from pycollective import local_group


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_split_groups_by_colors_and_orders_by_keys(ranks, on_ranks):
    def work(c):
        r, n = c.rank, c.size
        half = c.split(r % 2, key=-r)
        members = sorted((q for q in range(n) if q % 2 == r % 2), reverse=True)
        assert (half.rank, half.size) == (members.index(r), len(members))
        assert half.all_gather([r]).tolist() == members
        everyone = c.split(5)
        assert (everyone.rank, everyone.size) == (r, n)
        nobody = c.split(None if r % 2 else -3, 9)
        assert nobody is None
        some = c.split(0 if r == n - 1 else None)
        assert (some is None) == (r != n - 1)
        return everyone.all_reduce(np.ones(1))[0] + c.all_reduce(np.ones(1))[0]

    assert on_ranks(local_group(ranks, timeout=30), work) == [2.0 * ranks] * ranks


def test_split_into_rows_and_columns_works_concurrently(on_ranks):
    """Calls of a row, of a column and of the first group run concurrently."""

    def work(c):
        row, column = c.split(c.rank // 3), c.split(c.rank % 3)
        assert row.timeout == column.timeout == 30
        works = [g.all_reduce(np.full(1000, c.rank), async_op=True) for g in (row, column, c)]
        return [int(w.wait()[0]) for w in works]

    got = on_ranks(local_group(6, timeout=30), work)
    assert got == [[3 * (r // 3 * 3 + 1), 2 * (r % 3) + 3, 15] for r in range(6)]


def test_split_of_a_split_group_works(on_ranks):
    def work(c):
        sizes = []
        while c.size > 1:
            c = c.split(c.rank % 2)
            sizes.append(c.size)
        c.send([1.0], 0)
        assert c.recv(source=0, shape=1, dtype=float)[0] == 1
        return sizes

    assert on_ranks(local_group(8, timeout=30), work) == [[4, 2, 1]] * 8


def test_split_group_that_fails_leaves_the_first_group_working(on_ranks):
    def work(c):
        new = c.split(0)
        with pytest.raises(pc.MismatchError):
            new.all_reduce(np.ones(1 + c.rank))
        with pytest.raises(pc.MismatchError):
            new.barrier()
        again = c.split(0)
        new.close()
        again.barrier()
        return float(c.all_reduce(np.ones(1))[0])

    assert on_ranks(local_group(2, timeout=30), work) == [2.0, 2.0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, pc.CollectiveTimeoutError])
def test_split_error_in_the_last_part_fails_the_new_group(on_ranks, error):
    """Rank 0 fails in the last part of the call, in which rank 1 has all that it needs."""
    others_are_done = threading.Event()

    def work(c):
        if c.rank == 1:
            new = c.split(0)
            others_are_done.set()
            return new.barrier()
        gathered, calls = c._gathered, []

        def fails(*args, **kwargs):
            calls.append(gathered(*args, **kwargs))
            if len(calls) == 3:
                assert others_are_done.wait(30)
                if error is not KeyboardInterrupt:
                    c.barrier(timeout=0.01)
                raise error
            return calls[-1]

        c._gathered = fails
        with pytest.raises(error):
            c.split(0)

    text = "in the group that this one was split from: rank 0 "
    expected = error if error is not KeyboardInterrupt else pc.AbortedError
    nothing, error_of_1 = on_ranks(local_group(2, timeout=30), work)
    assert nothing is None
    assert type(error_of_1) is expected
    assert re.match(text, str(error_of_1))


def test_split_within_a_call_is_refused_and_leaves_the_group_working():
    comms = local_group(2, timeout=30)
    first = threading.Thread(target=comms[0].barrier)
    first.start()
    until = time.monotonic() + 20
    while "rank 0 is in barrier" not in comms[1].describe():
        assert time.monotonic() < until
        time.sleep(0.001)
    for call in (lambda: comms[0].split(0), lambda: comms[0].all_reduce(np.ones(2), np.hypot)):
        with pytest.raises(RuntimeError, match="rank 0 is already in a collective call"):
            call()
    comms[1].barrier()
    first.join(30)
    assert not first.is_alive() and comms[0]._group.failure is None


def test_split_with_another_call_raises_mismatch_error(on_ranks):
    def work(c):
        with pytest.raises(
            pc.MismatchError, match="rank 0 called all_gather.* rank 1 called barrier"
        ):
            c.split(0) if c.rank == 0 else c.barrier()
        return True

    assert on_ranks(local_group(2, timeout=30), work) == [True, True]
    with pytest.raises(TypeError):
        local_group(1)[0].split(0.5)


def test_split_async_returns_works_of_communicators(on_ranks):
    """Works that give communicators, or None, in the order of the calls."""

    def work(c):
        halves = c.split(c.rank % 2, key=-c.rank, async_op=True)
        some = c.split(0 if c.rank == 1 else None, async_op=True)
        total = c.all_reduce(np.ones(1), async_op=True)
        with pytest.raises(TypeError):
            c.split(0.5, async_op=True)
        with pytest.raises(ValueError, match="timeout"):
            c.split(0, async_op=True, timeout=0)
        half = halves.wait()
        assert halves.done()
        assert halves.result() is half
        assert (half.rank, half.size) == (1 - c.rank // 2, 2)
        assert (some.wait() is None) == (c.rank != 1)
        pair = half.split(0, async_op=True)  # of a group made later
        assert pair.wait().all_reduce([c.rank]).tolist() == [2 + 2 * (c.rank % 2)]
        return float(total.wait()[0])

    assert on_ranks(local_group(4, timeout=30), work) == [4.0] * 4


def test_split_async_with_a_missing_rank_times_out(on_ranks):
    def work(c):
        if c.rank == 0:
            split = c.split(0, async_op=True, timeout=1.5)
            with pytest.raises(TimeoutError, match="still runs"):
                split.wait(0.01)
            with pytest.raises(
                pc.CollectiveTimeoutError, match="rank 1 has made no collective call"
            ):
                split.wait()
            assert isinstance(split.exception(), pc.CollectiveTimeoutError)
            late.set()
        assert late.wait(30)
        with pytest.raises(pc.CollectiveTimeoutError):
            c.split(0, async_op=True).wait()
        return True

    late = threading.Event()
    assert on_ranks(local_group(2, timeout=30), work) == [True, True]


def test_split_async_with_another_call_raises_mismatch_error(on_ranks):
    def work(c):
        call = c.split(0, async_op=True) if c.rank else c.barrier(async_op=True)
        with pytest.raises(pc.MismatchError, match="called all_gather"):
            call.wait()
        return True

    assert on_ranks(local_group(2, timeout=30), work) == [True, True]


def test_split_async_without_wait_is_completed_by_close(on_ranks):
    def work(c):
        c.split(0, async_op=True)
        c.close()  # waits for the split
        return True

    assert on_ranks(local_group(3, timeout=30), work) == [True] * 3
