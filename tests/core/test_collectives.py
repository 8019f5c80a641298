"""Every collective but all_reduce: right answers for all ranks, layouts and lengths, and errors."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective as pc
from pycollective import local_group

WORLDS = [1, 2, 3, 4, 5, 7, 8, 16]
ROWS = [0, 1, 13, 1009]
DTYPES = ["float32", "float64", "int32", "int64"]


def contributions(ranks, shape, dtype="int64", seed=0):
    random = np.random.default_rng(seed)
    return random.integers(-9, 9, size=(ranks, *shape)).astype(dtype)


def check(got, want):
    """Exact equality of each rank's result, of its shape and of its dtype; None where None is due."""
    for result, due in zip(got, want, strict=True):
        if due is None:
            assert result is None
            continue
        assert isinstance(result, np.ndarray), result
        assert (result.shape, result.dtype) == (due.shape, due.dtype)
        np.testing.assert_array_equal(result, due)


@pytest.mark.parametrize("ranks", WORLDS)
def test_reduce(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    for dtype in DTYPES:
        for n in ROWS:
            x = contributions(ranks, (n, 2), dtype, n)
            for root in {0, ranks // 2, ranks - 1}:
                want = [x.max(axis=0) if r == root else None for r in range(ranks)]
                check(on_ranks(comms, lambda c, x=x, r=root: c.reduce(x[c.rank], "max", r)), want)

                def in_place(c, x=x, root=root):
                    mine = x[c.rank].copy()
                    result = c.reduce(mine, root=root, out=mine)
                    assert result is mine if c.rank == root else (mine == x[c.rank]).all()
                    return result

                due = x.sum(axis=0, dtype=dtype)
                check(on_ranks(comms, in_place), [due if r == root else None for r in range(ranks)])
    x = contributions(ranks, (50,), "float64") * ranks
    got = on_ranks(comms, lambda c: c.reduce(x[c.rank], "mean"))
    check(got, [x.sum(axis=0) / ranks] + [None] * (ranks - 1))


@pytest.mark.parametrize("algorithm", pc.algorithms.names("reduce_scatter"))
@pytest.mark.parametrize("ranks", WORLDS)
def test_reduce_scatter(ranks, algorithm, on_ranks):
    comms = local_group(ranks, timeout=30)
    for dtype in DTYPES:
        for n in ROWS:
            x = contributions(ranks, (ranks * n, 2), dtype, n)
            due = np.split(x.sum(axis=0, dtype=dtype), ranks)

            def work(c, x=x):
                return c.reduce_scatter(x[c.rank], algorithm=algorithm)

            def in_place(c, x=x, n=n):
                mine = x[c.rank].copy()
                part = mine[c.rank * n : (c.rank + 1) * n]
                assert c.reduce_scatter(mine, out=part, algorithm=algorithm) is part
                return part

            check(on_ranks(comms, work), due)
            check(on_ranks(comms, in_place), due)
    x = contributions(ranks, (ranks, 3), "float64") * ranks
    rows = x.sum(axis=0) / ranks

    def a_row(c):
        return c.reduce_scatter(x[c.rank], "mean", out=np.empty(3), algorithm=algorithm)

    check(on_ranks(comms, a_row), list(rows))


@pytest.mark.parametrize("ranks", WORLDS)
def test_all_gather_and_gather(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    root = ranks - 1
    for dtype in ("float32", "bool", "complex128", "S3"):
        for n in ROWS:
            x = contributions(ranks, (n, 2), "int32", n).astype(dtype)
            whole = np.concatenate(x)
            check(on_ranks(comms, lambda c, x=x: c.all_gather(x[c.rank])), [whole] * ranks)

            def in_place(c, x=x, n=n):
                room = np.zeros((ranks * n, 2), x.dtype)
                mine = room[c.rank * n : (c.rank + 1) * n]
                mine[...] = x[c.rank]
                return c.all_gather(mine, out=room)

            check(on_ranks(comms, in_place), [whole] * ranks)
            want = [whole if r == root else None for r in range(ranks)]
            check(on_ranks(comms, lambda c, x=x: c.gather(x[c.rank], root)), want)

    check(on_ranks(comms, lambda c: c.all_gather(c.rank)), [np.arange(ranks)] * ranks)

    def stacked(c):
        return c.all_gather(np.full(3, c.rank), out=np.empty((ranks, 3), int))

    check(on_ranks(comms, stacked), [np.repeat(np.arange(ranks), 3).reshape(ranks, 3)] * ranks)


@pytest.mark.parametrize("ranks", WORLDS)
def test_ragged_all_gather(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    for rows in (
        list(range(ranks)),
        [0] * ranks,
        [5 if r == ranks // 2 else 0 for r in range(ranks)],
    ):
        parts = [np.full((n, 2), r, "int16") for r, n in enumerate(rows)]
        whole = np.concatenate(parts)
        got = on_ranks(comms, lambda c, p=parts: c.all_gather(p[c.rank], ragged=True))
        check(got, [whole] * ranks)

        def in_place(c, parts=parts, whole=whole, rows=rows):
            room = np.zeros_like(whole)
            before = sum(rows[: c.rank])
            mine = room[before : before + rows[c.rank]]
            mine[...] = parts[c.rank]
            return c.all_gather(mine, out=room, ragged=True)

        check(on_ranks(comms, in_place), [whole] * ranks)


@pytest.mark.parametrize("ranks", WORLDS)
def test_scatter(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    for root in {0, ranks // 2, ranks - 1}:
        for n in ROWS:
            x = contributions(1, (ranks * n, 2), "float64", n)[0]
            due = np.split(x, ranks)
            check(on_ranks(comms, lambda c, x=x, r=root: c.scatter(x, r)), due)

            def with_out(c, x=x, n=n, root=root):
                if c.rank != root:
                    return c.scatter(None, root, out=np.empty((n, 2)))
                mine = x.copy()
                return c.scatter(mine, root, out=mine[c.rank * n : (c.rank + 1) * n])

            check(on_ranks(comms, with_out), due)
        rows = np.arange(3.0 * ranks).reshape(ranks, 3)

        def mpi_style(c, root=root, rows=rows):
            return c.scatter(rows if c.rank == root else None, root, out=np.empty(3))

        check(on_ranks(comms, mpi_style), list(rows))


@pytest.mark.parametrize("ranks", WORLDS)
def test_all_to_all(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    for n in ROWS:
        x = contributions(ranks, (ranks, n, 2), "int32", n)
        due = list(x.swapaxes(0, 1).reshape(ranks, ranks * n, 2))
        flat = x.reshape(ranks, ranks * n, 2)
        check(on_ranks(comms, lambda c, f=flat: c.all_to_all(f[c.rank])), due)

        def in_place(c, flat=flat):
            mine = flat[c.rank].copy()
            return c.all_to_all(mine, out=mine)

        check(on_ranks(comms, in_place), due)


@pytest.mark.parametrize("ranks", WORLDS)
def test_ragged_all_to_all(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    rows = np.random.default_rng(ranks).integers(0, 4, size=(ranks, ranks))
    for sent in (rows, np.zeros_like(rows), np.diag(np.arange(ranks))):
        x = [
            np.concatenate([np.full((sent[i, j], 3), 100 * i + j) for j in range(ranks)])
            for i in range(ranks)
        ]
        due = [
            np.concatenate([np.full((sent[i, j], 3), 100 * i + j) for i in range(ranks)])
            for j in range(ranks)
        ]

        def ask(c, x=x, sent=sent):
            return c.all_to_all(x[c.rank], sent[c.rank])

        def know(c, x=x, sent=sent):
            return c.all_to_all(x[c.rank], sent[c.rank], out_counts=sent[:, c.rank])

        check(on_ranks(comms, ask), due)
        check(on_ranks(comms, know), due)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_many_blocks(ranks, on_ranks):
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


@pytest.mark.parametrize("ranks", WORLDS)
def test_broadcast_by_a_chain(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    for n in (0, 1, 17, 1009):
        for root in {0, ranks - 1}:
            x = contributions(ranks, (n,), "int32", n)
            got = on_ranks(
                comms, lambda c, x=x, r=root: c.broadcast(x[c.rank], r, algorithm="chain")
            )
            check(got, [x[root]] * ranks)


def test_strided_arrays_and_overlaps(on_ranks):
    comms = local_group(3, timeout=30)
    x = np.arange(12.0).reshape(3, 4)
    check(on_ranks(comms, lambda c: c.all_gather(x.T[c.rank])), [x.T[:3].ravel()] * 3)

    def strided(c):
        room = np.zeros((3, 8))
        assert c.all_gather(x[c.rank : c.rank + 1], out=room[:, ::2]).base is room
        assert not room[:, 1::2].any()
        return room[:, ::2].copy()

    check(on_ranks(comms, strided), [x] * 3)

    def overlapping(c):
        room = np.zeros(7)
        room[:2] = c.rank
        return c.all_gather(room[:2], out=room[1:]).copy()

    check(on_ranks(comms, overlapping), [np.array([0.0, 0, 1, 1, 2, 2])] * 3)

    def shifted(c):
        room = np.arange(6.0)
        return c.reduce_scatter(room, out=room[1:3]).copy()

    check(on_ranks(comms, shifted), [3 * np.arange(6.0)[2 * r : 2 * r + 2] for r in range(3)])


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 100, 1 << 20])
def test_all_reduce_many(bytes_per_pack, on_ranks):
    comms = local_group(3, timeout=30)
    shapes = [(3, 2), (), (0,), (40,), (5, 1)]
    dtypes = ["float32", "float64", "float32", "float64", "float32"]

    def work(c):
        arrays = [np.full(s, c.rank + 1, d) for s, d in zip(shapes, dtypes, strict=True)]
        return c.all_reduce_many(arrays, bytes_per_pack=bytes_per_pack)

    for got in on_ranks(comms, work):
        check(got, [np.full(s, 6, d) for s, d in zip(shapes, dtypes, strict=True)])
    assert on_ranks(comms, lambda c: c.all_reduce_many([])) == [[]] * 3


# What goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ([lambda c: c.reduce(np.zeros(3)), lambda c: c.all_reduce(np.zeros(3))],
         ["reduce #1", "all_reduce #1"]),
        ([lambda c: c.reduce(np.zeros(3), root=0), lambda c: c.reduce(np.zeros(3), root=1)],
         ["root 0", "root 1"]),
        ([lambda c: c.all_gather(np.zeros(3)), lambda c: c.all_gather(np.zeros(4))],
         ["float64[3]", "float64[4]"]),
        ([lambda c: c.all_gather(np.zeros(3)), lambda c: c.gather(np.zeros(3))],
         ["all_gather", "gather #1"]),
        ([lambda c: c.all_gather(np.zeros((3, 1)), ragged=True),
          lambda c: c.all_gather(np.zeros((3, 2)), ragged=True)],
         ["float64[*, 1]", "float64[*, 2]"]),
        ([lambda c: c.scatter(np.zeros(4)), lambda c: c.scatter(np.zeros(6))],
         ["float64[2]", "float64[3]"]),
        ([lambda c: c.reduce_scatter(np.zeros(4)),
          lambda c: c.reduce_scatter(np.zeros(4), algorithm="direct")], ["ring", "direct"]),
        ([lambda c: c.all_to_all(np.zeros(4)), lambda c: c.all_to_all(np.zeros(4, "i4"))],
         ["float64[4]", "int32[4]"]),
        ([lambda c: c.all_to_all(np.zeros(4), [2, 2], out_counts=[2 + c.rank, 3 - c.rank]),
          lambda c: c.all_to_all(np.zeros(4), [2, 2], out_counts=[2, 2])], ["all_to_all"]),
        ([lambda c: c.all_to_all(np.zeros(4), [2, 2], out_counts=[2 - 2 * c.rank, 2 * c.rank]),
          lambda c: c.all_to_all(np.zeros(4), [2, 2], out_counts=[2, 2])], ["all_to_all"]),
        ([lambda c: c.broadcast(np.zeros(3)), lambda c: c.broadcast(np.zeros(3), algorithm="chain")],
         ["tree", "chain"]),
    ],
)  # fmt: skip
def test_calls_that_do_not_belong_together(calls, named, on_ranks):
    for order in (calls, calls[::-1]):
        comms = local_group(2, timeout=30)
        results = on_ranks(comms, lambda c, order=order: order[c.rank](c))
        errors = [r for r in results if isinstance(r, BaseException)]
        assert errors and all(isinstance(e, pc.MismatchError) for e in errors), results
        for name in [*named, "rank 0", "rank 1"]:
            assert name in str(errors[0])
        with pytest.raises(pc.MismatchError):
            comms[0].barrier()


def test_bad_arguments():
    comm, _ = local_group(2, timeout=5)
    x = np.ones((3, 2))
    for call in (comm.reduce_scatter, comm.scatter, comm.all_to_all):
        with pytest.raises(ValueError, match=r"2 equal parts along its first axis.*\[3, 2\]"):
            call(x)
        with pytest.raises(ValueError, match="equal parts"):
            call(1.0)
    with pytest.raises(ValueError, match=r"out must be float64\[6, 2\], and is float64\[3, 2\]"):
        comm.all_gather(x, out=x)
    with pytest.raises(ValueError, match=r"out must be float64\[6, 2\], and is float32"):
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
    with pytest.raises(TypeError, match="out_counts with counts"):
        comm.all_to_all(x, out_counts=[1, 2])
    with pytest.raises(ValueError, match="no reduce_scatter algorithm is called 'bus'"):
        comm.reduce_scatter(np.ones(2), algorithm="bus")
    with pytest.raises(ValueError, match="bytes_per_pack"):
        comm.all_reduce_many([x], bytes_per_pack=-1)


@pytest.mark.parametrize("ranks", WORLDS)
def test_ragged_gather_and_scatter(ranks, on_ranks):
    comms = local_group(ranks, timeout=30)
    for counts in ([r * r % 5 for r in range(ranks)], [70_001 * (r == 1) for r in range(ranks)]):
        whole = np.arange(2.0 * sum(counts)).reshape(-1, 2)
        parts = np.split(whole, np.cumsum(counts)[:-1])
        for root in {0, ranks // 2, ranks - 1}:

            def gather(c, parts=parts, root=root, **more):
                return c.gather(parts[c.rank], root, ragged=True, **more)

            want = [whole if r == root else None for r in range(ranks)]
            check(on_ranks(comms, gather), want)
            check(on_ranks(comms, lambda c, g=gather: g(c, async_op=True).wait(30)), want)

            def in_place(c, counts=counts, parts=parts, root=root):
                out = np.zeros((sum(counts), 2))
                begin = sum(counts[: c.rank])
                mine = out[begin : begin + counts[c.rank]]
                mine[:] = parts[c.rank]
                return c.gather(mine, root, out=out if c.rank == root else None, ragged=True)

            check(on_ranks(comms, in_place), want)

            def scatter(c, counts=counts, whole=whole, root=root, **more):
                if c.rank == root:
                    return c.scatter(
                        np.asfortranarray(whole), root, ragged=True, counts=counts, **more
                    )
                if c.rank % 2:
                    out = np.empty((counts[c.rank], 2))
                    return c.scatter(None, root, out=out, ragged=True, **more)
                return c.scatter(np.empty((0, 2)), root, ragged=True, **more)

            check(on_ranks(comms, scatter), parts)
            check(on_ranks(comms, lambda c, s=scatter: s(c, async_op=True).wait(30)), parts)


def test_ragged_scatter_says_what_is_wrong(on_ranks):
    (c,) = local_group(1)
    with pytest.raises(TypeError, match="counts with ragged=True only"):
        c.scatter(np.ones(1), counts=[1])
    with pytest.raises(TypeError, match="needs x and counts on the root"):
        c.scatter(np.ones(1), ragged=True)
    with pytest.raises(ValueError, match="counts add up to 2 rows"):
        c.scatter(np.ones(1), ragged=True, counts=[2])

    def work(c):
        with pytest.raises(TypeError, match="to say dtype and row shape"):
            c.scatter(None, 1 - c.rank, ragged=True)
        with pytest.raises(pc.MismatchError, match=r"float64\[\*, 2\].*\(float32\[\*, 2\]"):
            c.gather(np.ones((1, 2), "float32" if c.rank else "float64"), ragged=True)
        return True

    assert on_ranks(local_group(2, timeout=30), work) == [True, True]
