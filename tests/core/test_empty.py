"""Communicator.empty: arrays that processes of one host reduce without a copy."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
from rank_groups import make_group

import pycollective as pc
from pycollective.communicator import local_group


def shm_group(size):
    return make_group("shm", size, 30.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "int16", "complex128"])
def test_reduced_where_it_is(ranks, dtype, on_ranks):
    def work(c):
        x = c.empty((7, 4_321), dtype)
        y = c.empty((7, 4_321), dtype)
        assert x.shape == (7, 4_321)
        assert x.dtype == dtype
        assert x.ctypes.data % 64 == 0
        for turn in range(3):
            x[...] = np.arange(x.size).reshape(x.shape) % 11 + c.rank + turn
            mine = x.copy()
            whole = c.all_reduce(mine)  # ordinary memory, for comparison
            assert c.all_reduce(x, out=y) is y  # from one to another
            np.testing.assert_array_equal(y, whole)
            np.testing.assert_array_equal(x, mine)
            c.all_reduce(x, out=x)
            np.testing.assert_array_equal(x, whole)
            part = x[2:5]  # a part of it will do
            part[...] = c.rank
            c.all_reduce(part, "max", out=part)
            assert (part == c.size - 1).all()

    on_ranks(shm_group(ranks), work)


def test_only_some_ranks_have_it(on_ranks):
    def work(c):
        x = c.empty(50_000)
        if c.rank == 1:
            x = np.empty(50_000)
        x.fill(c.rank)
        c.all_reduce(x, out=x)
        assert (x == 3).all()

    on_ranks(shm_group(3), work)


def test_threads_and_one_rank_get_ordinary_arrays(on_ranks):
    def work(c):
        x = c.empty([3, 2], "int8")
        x.fill(1)
        np.testing.assert_array_equal(c.all_reduce(x, out=x), np.full((3, 2), c.size))

    on_ranks(local_group(2, timeout=30), work)
    on_ranks(local_group(1), work)


@pytest.mark.slow
def test_memory_is_given_back(on_ranks):
    comms = shm_group(2)
    descriptor = comms[0]._group.descriptor

    def work(c):
        for _ in range(20):
            x = c.empty(1 << 20, "u1")
            x.fill(1)
            del x
            gc.collect()
            c.barrier()

    before = os.fstat(descriptor).st_blocks
    on_ranks(comms, work)
    assert os.fstat(descriptor).st_blocks - before < 2 * 8 * 20 * 2 + (4 << 20) // 512


def test_arrays_outlive_the_communicator(on_ranks):
    arrays = on_ranks(shm_group(2), lambda c: c.empty(1000))
    gc.collect()
    for x in arrays:
        x.fill(3)
        assert x.sum() == 3000


def test_zero_items(on_ranks):
    for x in on_ranks(shm_group(2), lambda c: c.empty((0, 3))):
        assert x.shape == (0, 3)


def test_errors(on_ranks):
    (alone,) = local_group(1)
    with pytest.raises(ValueError, match="no negative"):
        alone.empty((2, -1))
    with pytest.raises(TypeError, match="Python objects"):
        alone.empty(2, object)

    def too_much(c):
        with pytest.raises(MemoryError):
            c.empty(1 << 58, "u1")
        with pytest.raises(MemoryError, match="a rank of the group has no memory"):
            c.empty(1 << 50, "u1")
        x = c.empty(1000, "u1")  # the group lives on
        x.fill(1)
        assert c.all_reduce(x)[0] == c.size

    on_ranks(shm_group(2), too_much)

    def different(c):
        with pytest.raises(pc.MismatchError, match=r"empty #1 \(float64\[(2|3)\]\)"):
            c.empty(2 + c.rank)

    on_ranks(shm_group(2), different)
