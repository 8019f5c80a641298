"""Reductions with NumPy's functions: in the order of the ranks, with the same bits on all of them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

import pycollective as pc

FUNCTIONS = [np.hypot, np.logaddexp, np.subtract, np.arctan2]


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("async_op", [False, True])
def test_ufunc_reductions_combine_in_the_order_of_the_ranks(kind, async_op, on_ranks):
    """The lengths need not be multiples of the number of ranks, and arrays have all layouts."""
    random = np.random.default_rng(3)

    def work(comm):
        def result_of(call, *args, **given):
            got = call(*args, **given, async_op=async_op)
            return got.wait() if async_op else got

        with comm:
            for function in FUNCTIONS:
                for x in arrays:
                    mine, want = x[comm.rank], functools.reduce(function, x)
                    before = [functools.reduce(function, x[: r + 1]) for r in range(3)]
                    got = result_of(comm.all_reduce, mine, function)
                    assert (got.shape, got.dtype) == (mine.shape, mine.dtype)
                    assert got.tobytes() == want.tobytes()
                    got = result_of(comm.reduce, mine, function, 1)
                    assert got is None if comm.rank != 1 else got.tobytes() == want.tobytes()
                    assert (
                        result_of(comm.scan, mine, function).tobytes()
                        == before[comm.rank].tobytes()
                    )
                    out = np.array(mine)
                    assert result_of(comm.all_reduce, out, function, out=out) is out
                    assert out.tobytes() == want.tobytes()
            x = arrays[2]
            got = result_of(comm.reduce_scatter, x[comm.rank].T, np.hypot)
            assert (
                got.tobytes()
                == functools.reduce(np.hypot, x).T[comm.rank : comm.rank + 1].tobytes()
            )
            got = result_of(comm.exscan, x[comm.rank], np.logaddexp)
            want = np.logaddexp(x[0], x[1]) if comm.rank == 2 else x[0] if comm.rank else -np.inf
            np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
        return True

    shapes = [(), (1,), (5, 3), (0,), (1001,)]
    arrays = [random.uniform(1, 2, (3, *shape)).astype("float32") for shape in shapes]
    assert on_ranks(make_group(kind, 3), work) == [True] * 3


def test_ufunc_of_python_keeps_the_dtype(on_ranks):
    longest = np.frompyfunc(lambda a, b: a if abs(a) >= abs(b) else b, 2, 1)

    def work(comm):
        got = comm.all_reduce(np.array([1, -5, 3], np.int16) * (comm.rank - 1), longest)
        return got.dtype.name, got.tolist()

    assert on_ranks(pc.local_group(3, timeout=20), work) == [("int16", [-1, 5, -3])] * 3


@pytest.mark.parametrize(
    ("x", "function", "result"),
    [
        (np.array([1, 7], "uint8"), max, [1, 7]),
        (np.array([100, 1], "int8"), lambda a, b: a + b, None),
        (np.array(["ab", "c"], "U4"), lambda a, b: a + b, ["abab", "cc"]),
        (np.array(["ab", "c"]), lambda a, b: a + b, None),
        (np.array([b"ab"]), lambda a, b: a + b, None),
    ],
)
def test_ufunc_of_python_with_results_that_do_not_fit_raises_type_error(
    x, function, result, on_ranks
):
    op = np.frompyfunc(function, 2, 1)
    found = on_ranks(pc.local_group(2, timeout=20), lambda comm: comm.all_reduce(x, op))
    if result is None:
        assert any("do not fit into" in str(f) for f in found if isinstance(f, TypeError))
    else:
        assert [f.tolist() for f in found] == [result] * 2 and found[0].dtype == x.dtype


@pytest.mark.parametrize("function", [lambda a, b: (a + b) / 2, lambda a, b: None])
def test_ufunc_of_python_with_results_of_another_kind_raises_type_error(function, on_ranks):
    op = np.frompyfunc(function, 2, 1)
    for x, error in ((np.array([0, 7]), TypeError), (np.zeros(0, int), None)):
        found = on_ranks(pc.local_group(2, timeout=20), lambda c, x=x: c.all_reduce(x, op))
        assert any(isinstance(result, error) for result in found) if error else found[0].size == 0


@pytest.mark.parametrize(
    ("op", "text"),
    [(np.sin, "function of two numbers"), (np.divmod, "function of two numbers"),
     (np.matmul, "function of two numbers"), (np.less, "makes bool of float64"),
     (np.gcd, "gcd")],
)  # fmt: skip
def test_ufunc_that_does_not_reduce_raises_type_error(op, text):
    (comm,) = pc.local_group(1)
    for call in (comm.all_reduce, comm.reduce, comm.reduce_scatter, comm.scan, comm.exscan):
        with pytest.raises(TypeError, match=text):
            call(np.ones(3), op)
    with pytest.raises(TypeError, match="exscan needs an op with an identity, .*arctan2"):
        comm.exscan(np.ones(3), np.arctan2)
    with pytest.raises(ValueError, match="algorithm= needs an op by name"):
        comm.all_reduce(np.ones(3), np.hypot, algorithm="ring")
    assert comm.all_reduce(np.ones(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("other", [np.logaddexp, np.add, "scan"])
def test_ufunc_of_another_name_raises_mismatch_error(other, on_ranks):
    def work(comm):
        with pytest.raises(pc.MismatchError) as caught:
            if comm.rank == 0:
                comm.all_reduce(np.ones(3), np.hypot)
            elif other == "scan":
                comm.scan(np.ones(3), np.hypot)
            else:
                comm.all_reduce(np.ones(3), other)
        names = ["hypot", {"scan": "hypot", np.add: "sum"}.get(other, "logaddexp")]
        assert all(name in caught.value.calls[rank] for rank, name in enumerate(names))

    assert on_ranks(pc.local_group(2, timeout=20), work) == [None] * 2


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_ufunc_of_another_dtype_raises_mismatch_error(kind, on_ranks):
    """The names of the dtypes lie after the part of the label that the core keeps."""
    unnamed = np.frompyfunc(lambda a, b: a, 2, 1)  # "<lambda> (vectorized)"

    def work(comm):
        with pytest.raises(pc.MismatchError):
            comm.all_reduce(np.ones(3, "i4" if comm.rank else "f4"), unnamed)

    assert on_ranks(make_group(kind, 2, timeout=20), work) == [None] * 2


def test_ufunc_error_on_one_rank_ends_the_call_on_all(on_ranks):
    def work(comm):
        def fails(a, b):
            if comm.rank == 1:
                raise ZeroDivisionError("mine")
            return a

        with pytest.raises(ZeroDivisionError if comm.rank == 1 else pc.AbortedError):
            comm.all_reduce(np.ones(3), np.frompyfunc(fails, 2, 1))

    assert on_ranks(pc.local_group(3, timeout=20), work) == [None] * 3
