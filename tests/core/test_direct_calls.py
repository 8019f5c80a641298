"""Calls by the direct path: every collective, at every size, with ordinary and with shared arrays."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from rank_groups import make_group

import pycollective as pc

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")

COUNTS = [1, 3, 13, 100, 2049, 4099, 20_000, 100_003]
"""Items of a rank's part: for slots, for one-shot calls, for one block and for several blocks."""


def expected(name, inputs, root, rank):
    count = len(inputs[0]) // len(inputs)
    part = slice(rank * count, (rank + 1) * count)
    total = np.sum(inputs, axis=0)
    contributions = [x[:count] for x in inputs]
    return {
        "all_reduce": total,
        "reduce": total if rank == root else None,
        "broadcast": inputs[root],
        "reduce_scatter": total[part],
        "scatter": inputs[root][part],
        "gather": np.concatenate(contributions) if rank == root else None,
        "all_gather": np.concatenate(contributions),
        "all_to_all": np.concatenate([x[part] for x in inputs]),
    }[name]


CALLS = {
    "all_reduce": lambda c, x, root, out: c.all_reduce(x, out=out),
    "reduce": lambda c, x, root, out: c.reduce(x, root=root, out=out),
    "broadcast": lambda c, x, root, out: c.broadcast(x, root, out=out),
    "reduce_scatter": lambda c, x, root, out: c.reduce_scatter(x, out=out),
    "scatter": lambda c, x, root, out: c.scatter(x, root, out=out),
    "gather": lambda c, x, root, out: c.gather(x[: len(x) // c.size], root, out=out),
    "all_gather": lambda c, x, root, out: c.all_gather(x[: len(x) // c.size], out=out),
    "all_to_all": lambda c, x, root, out: c.all_to_all(x, out=out),
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["threads", "shm"])
def test_every_call_of_a_random_program_gives_what_numpy_does(on_ranks, kind, ranks):
    """Each rank chooses for itself which arrays are shared, and whether it gives `out`."""

    def work(comm):
        common, random = np.random.default_rng(ranks), np.random.default_rng(100 + comm.rank)

        def array(length):
            make = comm.empty if random.random() < 0.5 else np.empty
            return make(length, np.int32)

        for step in range(150):
            name = str(common.choice(list(CALLS)))
            count, root = int(common.choice(COUNTS)), int(common.integers(ranks))
            inputs = list(common.integers(-99, 99, (ranks, ranks * count), np.int32))
            x = array(ranks * count)
            x[:] = inputs[comm.rank]
            wanted = expected(name, inputs, root, comm.rank)
            out = None
            if wanted is not None and random.random() < 0.5:
                out = array(len(wanted))
            found = CALLS[name](comm, x, root, out)
            if wanted is None:
                assert found is None
            else:
                np.testing.assert_array_equal(found, wanted, f"{step}: {name} of {count}")
                assert out is None or found is out
            np.testing.assert_array_equal(x, inputs[comm.rank], f"{step}: the input of {name}")
            if common.random() < 0.2:
                comm.barrier()
        return True

    assert on_ranks(make_group(kind, ranks, 60.0), work) == [True] * ranks


@pytest.mark.parametrize("count", [5, 3000, 50_000])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["threads", "shm"])
def test_collectives_in_place_are_right(on_ranks, kind, shared, count):
    def work(comm):
        size, me = comm.size, comm.rank
        make = comm.empty if shared else np.empty
        whole = make(size * count)
        part = slice(me * count, (me + 1) * count)

        def fill():
            whole[:] = np.arange(size * count) + me
            return whole

        total = size * np.arange(size * count) + sum(range(size))
        assert comm.all_reduce(fill(), out=whole) is whole
        np.testing.assert_array_equal(whole, total)
        comm.reduce(fill(), root=1, out=whole)
        np.testing.assert_array_equal(whole, total if me == 1 else np.arange(size * count) + me)
        comm.broadcast(fill(), 1, out=whole)
        np.testing.assert_array_equal(whole, np.arange(size * count) + 1)
        comm.reduce_scatter(fill(), out=whole[part])
        np.testing.assert_array_equal(whole[part], total[part])
        comm.all_gather(fill()[part], out=whole)
        owners = np.repeat(np.arange(size), count)
        np.testing.assert_array_equal(whole, np.arange(size * count) + owners)
        comm.gather(fill()[part], 1, out=whole if me == 1 else None)
        if me == 1:
            np.testing.assert_array_equal(whole, np.arange(size * count) + owners)
        comm.scatter(fill(), 1, out=whole[part])
        np.testing.assert_array_equal(whole[part], (np.arange(size * count) + 1)[part])
        return True

    assert on_ranks(make_group(kind, 3, 60.0), work) == [True] * 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_short_calls_and_messages_are_right_with_every_way_of_copying(on_ranks, ranks):
    """About 1,000 calls of 4 KiB use each page of the staging rings, and then the trials begin."""

    def work(comm):
        me, size = comm.rank, comm.size
        for turn in range(1100):
            count = 1025 + turn % 50
            x = np.arange(size * count, dtype=np.float32) % 1000 + (turn + me)
            first = x - me
            total = size * first + sum(range(size))
            part = slice(me * count, (me + 1) * count)
            assert (comm.all_reduce(x[:count]) == total[:count]).all(), turn
            assert (comm.reduce_scatter(x) == total[part]).all(), turn
            assert (comm.broadcast(x[:count], turn % size) == first[:count] + turn % size).all()
            gathered = np.concatenate([first[:count] + r for r in range(size)])
            assert (comm.all_gather(x[:count]) == gathered).all(), turn
            assert (comm.all_to_all(x)[:count] == first[part]).all(), turn
            sent = comm.send(x[:count], (me + 1) % size, async_op=True)
            assert (
                comm.recv(np.empty(count, np.float32), (me - 1) % size)
                == first[:count] + (me - 1) % size
            ).all(), turn
            sent.wait()
        return True

    assert on_ranks(make_group("shm", ranks, 60.0), work) == [True] * ranks


@pytest.mark.parametrize("kind", ["threads", "shm"])
def test_root_is_at_most_one_call_ahead_of_its_peers(on_ranks, kind):
    """A rank that reads a slot late gets the value of that call, not of a later one."""

    def work(comm):
        found = []
        for i in range(2000):
            x = np.array([i if comm.rank == i % 3 else -1])
            found.append(int(comm.broadcast(x, i % 3)[0]))
            if i % 7 == 0:
                comm.reduce(x, root=(i + 1) % 3)
        return found == list(range(2000))

    assert on_ranks(make_group(kind, 3, 60.0), work) == [True] * 3


@pytest.mark.parametrize("kind", ["threads", "shm"])
@pytest.mark.parametrize("name", CALLS)
def test_asynchronous_calls_give_the_results_of_blocking_calls(on_ranks, kind, name):
    call = {
        "reduce_scatter": lambda c, x: c.reduce_scatter(x, async_op=True),
        "all_reduce": lambda c, x: c.all_reduce(x, async_op=True),
        "reduce": lambda c, x: c.reduce(x, root=1, async_op=True),
        "broadcast": lambda c, x: c.broadcast(x, 1, async_op=True),
        "scatter": lambda c, x: c.scatter(x, 1, async_op=True),
        "gather": lambda c, x: c.gather(x[: len(x) // 2], 1, async_op=True),
        "all_gather": lambda c, x: c.all_gather(x[: len(x) // 2], async_op=True),
        "all_to_all": lambda c, x: c.all_to_all(x, async_op=True),
    }[name]

    def work(comm):
        for count in (2, 1000, 60_000):
            inputs = [np.arange(2 * count) * (r + 1) for r in range(2)]
            works = [call(comm, inputs[comm.rank]) for _ in range(3)]
            for one in works:
                wanted, found = expected(name, inputs, 1, comm.rank), one.wait()
                assert one.done() and one.exception() is None
                assert (found is None) == (wanted is None)
                if wanted is not None:
                    np.testing.assert_array_equal(found, wanted)
        return True

    assert on_ranks(make_group(kind, 2, 60.0), work) == [True, True]


@pytest.mark.parametrize("kind", ["threads", "shm", "mixed"])
def test_all_reduce_many_fast_and_general_path_make_the_same_call(kind, on_ranks):
    """Rank 0's arrays are plain, the others' are strided: both paths join them and agree on shapes."""

    def work(c):
        found = []
        for dtype, op in (("float64", "sum"), ("int32", "max"), ("float32", "sum")):
            arrays = [
                np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape) + c.rank
                for shape in ((3, 2), (), (5,), (1, 4))
            ]
            if c.rank:
                arrays[2] = np.repeat(arrays[2], 2)[::2]
            before = [x.copy() for x in arrays]
            results = c.all_reduce_many(arrays, op)
            assert all(np.array_equal(x, y) for x, y in zip(arrays, before, strict=True))
            assert [x.shape for x in results] == [x.shape for x in arrays]
            outs = [np.zeros_like(x) for x in arrays]
            given = c.all_reduce_many(tuple(arrays), op=op, out=outs)
            assert all(x is y for x, y in zip(given, outs, strict=True))
            assert all(np.array_equal(x, y) for x, y in zip(results, outs, strict=True))
            found += [x.tolist() for x in results]
        return found

    got = on_ranks(make_group(kind, 3), work)
    assert got[0] == got[1] == got[2]
    assert got[0][:2] == [[[3.0, 6.0], [9.0, 12.0], [15.0, 18.0]], 3.0]
    assert got[0][6] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("kind", ["threads", "shm"])
def test_all_reduce_many_of_scalars_knows_their_number(kind, on_ranks):
    def work(c):
        found = []
        for n in (1, 2, 3, 1):
            arrays = [np.array(float(i)) for i in range(n)]
            found.append(c.all_reduce_many(arrays))
            assert c.all_reduce_many(arrays, async_op=c.rank == 1) is not None
        return found

    assert on_ranks(make_group(kind, 2), work) == [[[0], [0, 2], [0, 2, 4], [0]]] * 2


def test_all_reduce_many_differing_shapes_raise_mismatch_error(on_ranks):
    def work(c):
        shapes = [(2,), (3,)] if c.rank else [(3,), (2,)]
        with pytest.raises(pc.MismatchError):
            c.all_reduce_many([np.ones(shape) for shape in shapes])
            c.barrier()

    assert on_ranks(make_group("shm", 2, timeout=10), work) == [None] * 2
