"""A thousand groups of processes are made and closed, and leave nothing behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.slow,
]

BODY = """
def held():
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    size = int(Path("/proc/self/statm").read_text().split()[0]) >> 8  # MiB
    named = maps.count("memfd:pycollective")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), named, size

def use(i):
    new = comm.split(0, key=-comm.rank)
    if i % 10 == 0:
        new.all_reduce(np.ones(3), async_op=True)
        new.send([1.0], (new.rank + 1) % new.size)
        assert new.recv(source=(new.rank - 1) % new.size, shape=1, dtype=float)[0] == 1
    assert new.all_reduce(np.ones(1))[0] == new.size
    if i % 2:
        new.close()

for i in range(20):
    use(i)
before = held()
for i in range(MANY):
    use(i)
time.sleep(0.1)  # a thread that was joined is still listed for a moment
after = held()
print([n - m > slack for n, m, slack in zip(after, before, (0, 0, 0, 100))])
comm.barrier()
"""


@pytest.mark.parametrize(
    ("transport", "ranks", "many"), [("shm", 2, 1000), ("tcp", 2, 300), ("mixed", 3, 100)]
)
def test_many_groups_of_processes_leave_nothing_behind(tmp_path, transport, ranks, many):
    before = set(os.listdir("/dev/shm"))
    # malloc reserves 64 MiB for a thread whose memory it takes from a new arena.
    body, one_arena = BODY.replace("MANY", str(many)), {"MALLOC_ARENA_MAX": "1"}
    done = run(tmp_path, transport, ranks, body, seconds=300, **one_arena)
    assert (set(done.codes), done.errors) == ({0}, "")
    assert done.outputs == [f"{[False] * 4}\n"] * ranks
    assert {n for n in set(os.listdir("/dev/shm")) - before if "pycollective" in n} == set()


def test_a_thousand_groups_in_one_process_leave_nothing_behind():
    """Shared memory is made, joined and left by one process."""
    from pycollective import _core

    def use():
        group = _core.ShmGroup.create(4)
        other = _core.ShmGroup.open(group.descriptor)
        group.join(0)
        other.join(1)
        other.follow(group)
        group.leave(0)

    use()
    count = len(os.listdir("/proc/self/fd"))
    maps = Path("/proc/self/maps").read_text().count("pycollective (deleted)")
    for _ in range(1000):
        use()
    assert len(os.listdir("/proc/self/fd")) == count
    assert Path("/proc/self/maps").read_text().count("pycollective (deleted)") == maps
