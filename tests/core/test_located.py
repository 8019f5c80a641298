"""`minloc` and `maxloc`: values and ranks, ties, NaN, every dtype with an order."""

from __future__ import annotations

import numpy as np
import pytest
from cases import FLOATS, INTS
from rank_groups import ALL_KINDS, make_group

import pycollective as pc
from pycollective.dtypes import bfloat16


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_minloc_and_maxloc_give_the_results_of_numpy(kind, on_ranks):
    names = [*INTS, *FLOATS, "bool"]
    x = np.random.default_rng(5).integers(0, 3, (3, 500))  # many numbers are equal

    def work(comm):
        with comm:
            for name in names:
                given = x.astype(bfloat16 if name == "bfloat16" else name)
                for call, arg in ((comm.minloc, np.argmin), (comm.maxloc, np.argmax)):
                    values, ranks = call(given[comm.rank])
                    want = arg(given.astype(float), axis=0)
                    assert values.dtype == given.dtype
                    np.testing.assert_array_equal(ranks, want)
                    np.testing.assert_array_equal(values, given[want, np.arange(500)])
            return comm.minloc(3.0, async_op=True).wait()

    assert on_ranks(make_group(kind, 3), work) == [(3.0, 0)] * 3


def test_minloc_of_nan_and_infinity_is_that_of_argmin(on_ranks):
    x = np.array(
        [[np.inf, 1.0, -0.0, np.inf], [np.inf, np.nan, 0.0, 7.0], [np.inf, np.nan, 1, 8.0]]
    )

    def work(comm):
        return [np.array(found).tolist() for found in comm.minloc(x[comm.rank])]

    for values, ranks in on_ranks(pc.local_group(3, timeout=20), work):
        np.testing.assert_array_equal(values, [np.inf, np.nan, 0.0, 7.0])
        assert ranks == [0, 1, 0, 1]


def test_maxloc_with_indices_takes_the_lowest_of_equal_values(on_ranks):
    """The ints include pairs that float64 cannot distinguish."""
    big = 2**53

    def work(comm):
        index = np.array([100 - comm.rank, big + comm.rank])
        found = comm.maxloc(np.array([5, big + comm.rank]), index)
        return found.values.tolist(), found.indices.tolist()

    assert on_ranks(pc.local_group(3, timeout=20), work) == [([5, big + 2], [98, big + 2])] * 3


def test_minloc_invalid_dtype_or_index_raises():
    (comm,) = pc.local_group(1)
    for async_op in (False, True):
        with pytest.raises(TypeError, match="complex"):
            comm.minloc(np.ones(2, complex), async_op=async_op)
    assert comm.all_reduce(np.ones(1)) == 1  # the group has not failed
    with pytest.raises(TypeError, match="index must be whole numbers, not float64"):
        comm.minloc(np.ones(2), [0.5, 1.5])
    with pytest.raises(ValueError, match="shape"):
        comm.minloc(np.ones(2), [1, 2, 3])
    with pytest.raises(ValueError, match=f"index must be at most {2**63 - 2}, not {2**63 + 5}"):
        comm.minloc(np.ones(2), np.array([1, 2**63 + 5], np.uint64))
    assert comm.minloc(np.ones(1), np.array([2**63 - 2], np.uint64)).indices == 2**63 - 2


def test_minloc_with_an_invalid_timeout_leaves_the_group_working():
    (comm,) = pc.local_group(1)
    for async_op in (False, True):
        with pytest.raises(ValueError, match="timeout must be a positive number"):
            comm.minloc(np.ones(2), async_op=async_op, timeout=-1)
    assert comm.all_reduce(np.ones(1)) == 1
