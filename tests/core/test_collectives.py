"""Every collective but all_reduce: cases that test_suite.py does not cover, and errors."""

from __future__ import annotations

import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

import pycollective as pc
from pycollective import local_group
from pycollective._core import Collective


def check(got, want):
    """Assert that each rank's result has exactly the due values, shape and dtype, or is None."""
    for result, due in zip(got, want, strict=True):
        if due is None:
            assert result is None
            continue
        assert isinstance(result, np.ndarray), result
        assert (result.shape, result.dtype) == (due.shape, due.dtype)
        np.testing.assert_array_equal(result, due)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_collectives_of_several_segments_are_right(ranks, on_ranks):
    """Parts of several segments; scratch is written anew in each block."""
    comms = local_group(ranks, timeout=60)
    n = 1_100_003
    x = np.arange(ranks * n, dtype="float32") % 11
    due = np.split(x * (ranks * (ranks + 1) // 2), ranks)
    check(on_ranks(comms, lambda c: c.reduce_scatter(x * (c.rank + 1))), due)
    parts = np.split(x, ranks)
    check(on_ranks(comms, lambda c: c.all_gather(parts[c.rank])), [x] * ranks)
    check(on_ranks(comms, lambda c: c.broadcast(x, algorithm="chain")), [x] * ranks)
    want = [x * ranks] + [None] * (ranks - 1)
    check(on_ranks(comms, lambda c: c.reduce(x)), want)
    check(on_ranks(comms, lambda c: c.gather(parts[c.rank])), [x] + [None] * (ranks - 1))


@pytest.mark.parametrize("ranks", [1, 4])
def test_gathers_and_scatter_take_the_shapes_of_mpi4py(ranks, on_ranks):
    """A part may be one row, and a result may be stacked."""
    comms = local_group(ranks, timeout=30)
    rows = np.arange(3.0 * ranks).reshape(ranks, 3)
    check(on_ranks(comms, lambda c: c.all_gather(c.rank)), [np.arange(ranks)] * ranks)

    def stacked(c):
        return c.all_gather(rows[c.rank], out=np.empty((ranks, 3)))

    check(on_ranks(comms, stacked), [rows] * ranks)

    def a_row(c):
        return c.reduce_scatter(rows * ranks, "mean", out=np.empty(3))

    check(on_ranks(comms, a_row), list(rows * ranks))

    def without_x(c):
        return c.scatter(rows if c.rank == 0 else None, out=np.empty(3))

    check(on_ranks(comms, without_x), list(rows))

    def thin(c):  # a part of shape (1, 1), and rank 0's out without its first axis
        out = np.empty((1, 1) if c.rank else 1)
        return c.scatter(rows[:, :1] if c.rank == 0 else None, out=out).reshape(1)

    check(on_ranks(comms, thin), list(rows[:, :1]))


def test_ragged_scatter_takes_the_row_shape_from_x_or_out(on_ranks):
    counts = [2, 0, 3]
    whole = np.arange(10.0).reshape(5, 2)

    def work(c):
        if c.rank == 2:
            return c.scatter(whole, 2, ragged=True, counts=counts)
        if c.rank == 1:
            return c.scatter(np.empty((0, 2)), 2, ragged=True)
        return c.scatter(None, 2, out=np.empty((2, 2)), ragged=True)

    check(on_ranks(local_group(3, timeout=30), work), np.split(whole, [2, 2]))


def test_collectives_of_strided_or_overlapping_arrays_are_right(on_ranks):
    comms = local_group(3, timeout=30)
    x = np.arange(12.0).reshape(3, 4)
    check(on_ranks(comms, lambda c: c.all_gather(x.T[c.rank])), [x.T[:3].ravel()] * 3)

    def strided(c):
        memory = np.zeros((3, 8))
        assert c.all_gather(x[c.rank : c.rank + 1], out=memory[:, ::2]).base is memory
        assert not memory[:, 1::2].any()
        return memory[:, ::2].copy()

    check(on_ranks(comms, strided), [x] * 3)

    def overlapping(c):
        memory = np.zeros(7)
        memory[:2] = c.rank
        return c.all_gather(memory[:2], out=memory[1:]).copy()

    check(on_ranks(comms, overlapping), [np.array([0.0, 0, 1, 1, 2, 2])] * 3)

    def shifted(c):
        memory = np.arange(6.0)
        return c.reduce_scatter(memory, out=memory[1:3]).copy()

    check(on_ranks(comms, shifted), [3 * np.arange(6.0)[2 * r : 2 * r + 2] for r in range(3)])


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("bytes_per_pack", [0, 1, 100, 1 << 20])
def test_all_reduce_many_gives_the_sums_of_all_arrays(bytes_per_pack, kind, on_ranks):
    comms = make_group(kind, 3)
    shapes = [(3, 2), (), (0,), (40,), (5, 1)]
    dtypes = ["float32", "float64", "float32", "float64", "float32"]

    def work(c):
        arrays = [np.full(s, c.rank + 1, d) for s, d in zip(shapes, dtypes, strict=True)]
        return c.all_reduce_many(arrays, bytes_per_pack=bytes_per_pack)

    for got in on_ranks(comms, work):
        check(got, [np.full(s, 6, d) for s, d in zip(shapes, dtypes, strict=True)])
    assert on_ranks(comms, lambda c: c.all_reduce_many([])) == [[]] * 3
    for c in comms:
        c.close()


# Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ([lambda c: c.reduce(np.zeros(3)), lambda c: c.all_reduce(np.zeros(3))],
         ["reduce #1", "all_reduce #1"]),
        ([lambda c: c.all_gather(np.zeros(3)), lambda c: c.all_gather(np.zeros(4))],
         ["float64[3]", "float64[4]"]),
        ([lambda c: c.all_gather(np.zeros(3)), lambda c: c.gather(np.zeros(3))],
         ["all_gather", "gather #1"]),
        ([lambda c: c.all_gather(np.zeros((3, 1)), ragged=True),
          lambda c: c.all_gather(np.zeros((3, 2)), ragged=True)],
         ["float64[*, 1]", "float64[*, 2]"]),
        ([lambda c: c.scatter(np.zeros(4)), lambda c: c.scatter(np.zeros(6))],
         ["float64[2]", "float64[3]"]),
        ([lambda c: c.reduce_scatter(np.zeros(4), algorithm="ring"),
          lambda c: c.reduce_scatter(np.zeros(4), algorithm="direct")], ["ring", "direct"]),
        ([lambda c: c.all_to_all(np.zeros(4)), lambda c: c.all_to_all(np.zeros(4, "i4"))],
         ["float64[4]", "int32[4]"]),
        ([lambda c: c.all_to_all(np.zeros(4), [2, 2], out_counts=[2 + c.rank, 3 - c.rank]),
          lambda c: c.all_to_all(np.zeros(4), [2, 2], out_counts=[2, 2])], ["all_to_all"]),
        ([lambda c: c.all_to_all(np.zeros(4), [2, 2], out_counts=[2 - 2 * c.rank, 2 * c.rank]),
          lambda c: c.all_to_all(np.zeros(4), [2, 2], out_counts=[2, 2])], ["all_to_all"]),
        ([lambda c: c.scatter(np.zeros((4, 3))),
          lambda c: c.scatter(None if c.rank else np.zeros((6, 2)), out=np.zeros((3, 2)))],
         ["float64[2, 3]", "float64[3, 2]"]),
        ([lambda c: c.all_reduce_many([np.zeros((2, 3))]),
          lambda c: c.all_reduce_many([np.zeros((3, 2))])], ["float64[2, 3]", "float64[3, 2]"]),
        ([lambda c: c.all_reduce_many([np.zeros(1), np.zeros(5)], algorithm="ring"),
          lambda c: c.all_reduce_many([np.zeros(5), np.zeros(1)], algorithm="ring")],
         ["float64[1] [5]", "float64[5] [1]"]),
        ([lambda c: c.all_reduce_many([np.zeros(2), np.zeros(2), np.zeros(2)], bytes_per_pack=40),
          lambda c: c.all_reduce_many([np.zeros(6)], bytes_per_pack=40)],
         ["float64[2] [2] [2]", "float64[6]"]),
        ([lambda c: c.all_reduce(np.zeros((1,) * 9 + (2, 3))),
          lambda c: c.all_reduce(np.zeros((1,) * 9 + (3, 2)))], ["float64[1, 1, 1,"]),
        ([lambda c: c.broadcast(np.zeros(3)), lambda c: c.broadcast(np.zeros(3), algorithm="chain")],
         ["direct", "chain"]),
        ([lambda c: c.broadcast(np.zeros(3, "f4,f4")), lambda c: c.broadcast(np.zeros(3, "f4,i4"))],
         ["[('f0', '<f4'),…"]),
        ([lambda c: c.all_gather(np.zeros(3, "m8[100s]")),
          lambda c: c.all_gather(np.zeros(3, "m8[100h]"))], ["timedelta64[100…"]),
    ],
)  # fmt: skip
def test_collectives_differing_calls_raise_mismatch_error(calls, named, on_ranks):
    for order in (calls, calls[::-1]):
        comms = local_group(2, timeout=30)
        results = on_ranks(comms, lambda c, order=order: order[c.rank](c))
        errors = [r for r in results if isinstance(r, BaseException)]
        assert errors and all(isinstance(e, pc.MismatchError) for e in errors), results
        for name in [*named, "rank 0", "rank 1"]:
            assert name in str(errors[0])
        with pytest.raises(pc.MismatchError):
            comms[0].barrier()


def test_collectives_wrong_arguments_raise():
    comm, _ = local_group(2, timeout=5)
    x = np.ones((3, 2))
    for call in (comm.reduce_scatter, comm.scatter, comm.all_to_all):
        with pytest.raises(ValueError, match=r"shape \[3, 2\] cannot be cut into 2 equal parts"):
            call(x)
        with pytest.raises(ValueError, match="equal parts"):
            call(1.0)
    with pytest.raises(ValueError, match=r"out must be float64\[6, 2\], not float64\[3, 2\]"):
        comm.all_gather(x, out=x)
    with pytest.raises(ValueError, match=r"out must be float64\[6, 2\], not float32"):
        comm.gather(x, out=np.ones((6, 2), "f4"))
    with pytest.raises(TypeError, match="out must be an array, not list"):
        comm.all_gather(x, out=[])
    with pytest.raises(ValueError, match="read-only"):
        comm.reduce(x, out=np.broadcast_to(1.0, (3, 2)))
    with pytest.raises(TypeError, match="Python objects"):
        comm.all_gather(np.array([None]))
    with pytest.raises(TypeError, match="Python objects"):
        comm.scatter(None, 1, out=np.array([None]))
    with pytest.raises(TypeError, match=r"\|S3"):
        comm.reduce(x.astype("S3"))
    for call in (comm.reduce, comm.gather, comm.scatter):
        with pytest.raises(ValueError, match="root 2 is not among the 2 ranks"):
            call(np.ones(2), root=2)
    with pytest.raises(TypeError, match="scatter needs x on the root"):
        comm.scatter(None)
    with pytest.raises(TypeError, match="scatter needs x on the root"):
        comm.scatter(None, out=np.ones(2))
    with pytest.raises(ValueError, match="counts add up to 2 rows"):
        comm.all_to_all(x, [1, 1])
    with pytest.raises(ValueError, match="counts must be 2 numbers of rows"):
        comm.all_to_all(x, [1, 1, 1])
    with pytest.raises(ValueError, match="out_counts must be 2"):
        comm.all_to_all(x, [1, 2], out_counts=[1, -1])
    with pytest.raises(ValueError, match=r"counts\[0\] and out_counts\[0\] .* 1 and 2"):
        comm.all_to_all(x, [1, 2], out_counts=[2, 1])
    for given in ({}, {"out_counts": [1, 2]}):
        with pytest.raises(
            ValueError, match="must be 'direct' in all_to_all with counts, not 'ring'"
        ):
            comm.all_to_all(x, [1, 2], algorithm="ring", **given)
    with pytest.raises(TypeError, match="out_counts only with counts"):
        comm.all_to_all(x, out_counts=[1, 2])
    with pytest.raises(ValueError, match="no reduce_scatter algorithm is called 'bus'"):
        comm.reduce_scatter(np.ones(2), algorithm="bus")
    with pytest.raises(ValueError, match="bytes_per_pack"):
        comm.all_reduce_many([x], bytes_per_pack=-1)


def test_ragged_scatter_wrong_arguments_raise_clear_errors(on_ranks):
    (c,) = local_group(1)
    with pytest.raises(TypeError, match="counts only with ragged=True"):
        c.scatter(np.ones(1), counts=[1])
    with pytest.raises(TypeError, match="needs x and counts on the root"):
        c.scatter(np.ones(1), ragged=True)
    with pytest.raises(ValueError, match="counts add up to 2 rows"):
        c.scatter(np.ones(1), ragged=True, counts=[2])

    def work(c):
        with pytest.raises(TypeError, match="x or out on ranks other than the root"):
            c.scatter(None, 1 - c.rank, ragged=True)
        with pytest.raises(pc.MismatchError, match=r"float64\[\*, 2\].*\(float32\[\*, 2\]"):
            c.gather(np.ones((1, 2), "float32" if c.rank else "float64"), ragged=True)
        return True

    assert on_ranks(local_group(2, timeout=30), work) == [True, True]


@pytest.mark.parametrize(
    ("kind", "ranks", "collective", "borders"),
    [
        ("threads", 2, "broadcast", [("direct", None)]),
        ("shm", 3, "reduce", [("direct", None)]),
        ("mixed", 3, "broadcast", [("tree", 1 << 20), ("chain", None)]),
        ("tcp", 4, "broadcast", [("tree", 64 << 10), ("chain", None)]),
        ("tcp", 5, "broadcast", [("tree", 256 << 10), ("chain", None)]),
        ("threads", 4, "reduce_scatter", [("direct", None)]),
        ("mixed", 5, "reduce_scatter", [("halving", None)]),
        ("tcp", 3, "reduce_scatter", [("direct", 32 << 10), ("ring", None)]),
        ("shm", 3, "all_gather", [("direct", None)]),
        ("tcp", 3, "all_gather", [("direct", 32 << 10), ("ring", None)]),
    ],
)
def test_auto_chooses_by_bytes_ranks_and_transport(kind, ranks, collective, borders):
    comms = make_group(kind, ranks)
    first = 0
    for name, last in borders:
        for size in (first, last or 1 << 40):
            assert comms[0]._core.select(Collective.__members__[collective], size) == name
        first = (last or 0) + 1
    for c in comms:
        c.close()


def test_auto_of_all_gather_counts_the_bytes_of_all_parts(on_ranks):
    comms = make_group("tcp", 3)

    def work(c):
        c.all_gather(np.zeros((32 << 10) // 3 + c.size, "int8"))
        large = c.describe()
        c.all_gather(np.zeros((32 << 10) // 3, "int8"))
        return large, c.describe()

    for large, small in on_ranks(comms, work):
        assert ", ring)" in large
        assert ", direct)" in small
    for c in comms:
        c.close()
