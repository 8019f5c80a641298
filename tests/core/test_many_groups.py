"""Many groups of threads are made and end, and leave no resources in use."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pycollective import local_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def held():
    """Descriptors, threads, mappings and virtual MiB of this process."""
    gc.collect()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    maps = Path("/proc/self/maps").read_text().count("\n")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps, size >> 20


def grown(before):
    """Return the resources that have grown since `before`; threads may end a little later."""
    for _ in range(100):
        more = [now - then for now, then in zip(held(), before, strict=True)]
        if more[1] <= 0:
            break
        time.sleep(0.01)
    return more[0] > 0, more[1] > 0, more[2] > 20, more[3] > 100


COUNTS = [300, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
def test_many_groups_of_threads_leave_nothing_behind(count):
    x = np.ones(3)

    def use():
        a, b = local_group(2, timeout=30)
        works = [c.all_reduce(x, async_op=True) for c in (a, b)]
        waits = b.recv(source=0, shape=3, dtype=float, async_op=True)
        a.send(x, 1)
        assert [w.wait()[0] for w in works] == [2, 2]
        assert waits.wait()[0] == 1
        if len(uses) % 2:  # the others are dropped
            a.close()
            b.close()
        uses.append(None)

    uses = []
    for _ in range(50):
        use()
    before = held()
    for _ in range(count):
        use()
    assert grown(before) == (False,) * 4


@pytest.mark.parametrize("count", COUNTS)
def test_many_groups_by_split_leave_nothing_behind(on_ranks, count):
    def work(c):
        for i in range(count // 2):
            new = c.split(0, key=-c.rank)
            inner = new.split(c.rank if i % 3 else None)
            assert new.all_reduce(np.ones(1))[0] == 2
            new.send([1.0], 1 - new.rank)  # pipes are large
            assert new.recv(source=1 - new.rank, shape=1, dtype=float)[0] == 1
            if inner is not None:
                inner.barrier()
            if i % 2:
                new.close()
        return True

    comms = local_group(2, timeout=30)
    assert on_ranks(comms, work) == [True, True]
    before = held()
    assert on_ranks(comms, work) == [True, True]
    assert grown(before) == (False,) * 4
