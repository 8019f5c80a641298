"""Arrays in an arena, made by `Communicator.empty` and `pycollective.shared_arrays`."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest
from rank_groups import make_group

import pycollective as pc
from pycollective import _core

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")


@pytest.fixture
def comms():
    group = make_group("shm", 2, 30.0)
    yield group
    for comm in group:
        comm.close()


def test_shared_arrays_concern_only_the_block(comms):
    before = np.ones(100_000)
    with pc.shared_arrays():
        long = [np.ones(100_000), np.zeros((300, 300)), np.ones(100_000) + before]
        short = np.arange(5)
    assert [_core.is_shared(x) for x in long] == [True] * 3
    after = long[0] + before
    assert not any(_core.is_shared(x) for x in (before, short, after))
    assert (long[2] == 2).all() and (long[1] == 0).all()


def test_shared_arrays_without_a_block_last_until_they_are_turned_off(comms):
    pc.shared_arrays()
    try:
        assert _core.is_shared(np.ones(100_000))
        with pc.shared_arrays(False):
            assert not _core.is_shared(np.ones(100_000))
        assert _core.is_shared(np.ones(100_000))
    finally:
        pc.shared_arrays(False)
    assert not _core.is_shared(np.ones(100_000))


def test_shared_arrays_with_an_argument_that_is_no_bool_raise_type_error(comms):
    with pytest.raises(TypeError, match="on must be True or False, not 'off'"):
        pc.shared_arrays("off")
    assert not _core.is_shared(np.ones(100_000))


def test_zeros_in_reused_memory_are_zero(comms):
    with pc.shared_arrays():
        for _ in range(3):
            x = np.zeros(50_000)
            assert (x == 0).all()
            x.fill(7)
            del x


def test_shared_arrays_grow_and_shrink(comms):
    with pc.shared_arrays():
        x = np.ones(10_000)
        x.resize(300_000, refcheck=False)
        assert (x[:10_000] == 1).all() and (x[10_000:] == 0).all()
        x.resize(5000, refcheck=False)
        assert (x == 1).all()
        y = np.fromiter(iter(range(200_000)), np.int64)
        np.testing.assert_array_equal(y, np.arange(200_000))


def test_freed_memory_is_reused(comms):
    first = comms[0].empty(100_000)
    place = first.ctypes.data
    del first
    gc.collect()
    assert comms[0].empty(99_000).ctypes.data == place


def test_long_results_are_shared_and_own_their_memory(comms, on_ranks):
    def work(comm):
        long, short = comm.all_reduce(np.ones(100_000)), comm.all_reduce(np.ones(10))
        assert _core.is_shared(long) and not _core.is_shared(short)
        assert long.flags.owndata and (comm.all_reduce(long) == 4).all()
        return True

    assert on_ranks(comms, work) == [True, True]


def test_ten_thousand_arrays_cost_no_descriptor_and_leave_nothing(comms):
    before = len(os.listdir("/proc/self/fd"))
    arrays = [comms[0].empty(16) for _ in range(10_000)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len({x.ctypes.data for x in arrays}) == 10_000
    for i, x in enumerate(arrays):
        x.fill(i)
    assert all((x == i).all() for i, x in enumerate(arrays))
    places = {x.ctypes.data for x in arrays}
    del x, arrays
    again = [comms[0].empty(16) for _ in range(10_000)]
    assert {x.ctypes.data for x in again} == places


def test_arrays_beyond_the_arena_are_ordinary(on_ranks):
    group = _core.ShmGroup.create(2, 4 << 20)
    groups = [group, _core.ShmGroup.open(group.descriptor)]
    for rank, each in enumerate(groups):
        each.join(rank)
    comms = [pc.Communicator(each, rank, 30.0, None) for rank, each in enumerate(groups)]

    def work(comm):
        kept = [comm.empty(100_000) for _ in range(20)]  # 16 MB
        assert _core.is_shared(kept[0]) and not _core.is_shared(kept[-1])
        for x in kept:
            x.fill(comm.rank + 1)
            assert (comm.all_reduce(x) == 3).all()
        return True

    assert on_ranks(comms, work) == [True, True]


def test_arrays_outlive_their_group():
    comms = make_group("shm", 2, 30.0)
    x = comms[0].empty(100_000)
    x.fill(5)
    for comm in comms:
        comm.close()
    del comm, comms
    gc.collect()
    assert (x == 5).all()
    x.fill(6)


def test_group_without_an_arena_makes_ordinary_arrays():
    group = _core.ShmGroup.create(1, 0)
    group.join(0)
    comm = pc.Communicator(group, 0, 30.0, None)
    x = comm.empty(100_000)
    assert not _core.is_shared(x)
    x.fill(1)
    assert (comm.all_reduce(x) == 1).all()
    comm.close()
