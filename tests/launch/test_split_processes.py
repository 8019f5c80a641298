"""split between processes: new shared memory without a launcher, new connections over TCP."""

from __future__ import annotations

import signal
import sys

import pytest
from processes import fast_on

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")


@pytest.mark.slow
def test_split_into_rows_columns_and_nested_groups_works(run_on):
    body = """
r = comm.rank
row, column = comm.split(r // 2), comm.split(r % 2, key=-r)
assert repr(row).split(", ")[1] == repr(comm).split(", ")[1]
assert (row.rank, column.rank, row.size, column.size) == (r % 2, 1 - r // 2, 2, 2)
works = [g.all_reduce(np.full(200_000, r), async_op=True) for g in (row, column, comm)]
assert [int(w.wait()[0]) for w in works] == [r // 2 * 4 + 1, r % 2 * 2 + 2, 6]
assert comm.split(None) is None
one = column.split(r)
assert (one.size, one.all_reduce(np.ones(3)).sum()) == (1, 3)
column.send([r], 1 - column.rank)
assert column.recv(source=1 - column.rank, shape=1, dtype=int)[0] == (r + 2) % 4
row.close()
comm.barrier()
column.barrier()
later = comm.split(r % 2, async_op=True), comm.split(None, async_op=True)
column, nothing = [work.wait() for work in later]
assert (column.rank, column.size, nothing) == (r // 2, 2, None)
inner = column.split(0, async_op=True).wait()
assert inner.all_reduce([r])[0] == 2 + 2 * (r % 2)
comm.split(0, async_op=True)
inner.split(0, async_op=True)
inner.close()
print("done")
"""
    assert run_on(4, body) == (0, "done\n" * 4, "")


@fast_on("tcp")
def test_a_rank_that_dies_is_lost_to_both_groups(run_on):
    body = """
pair = comm.split(comm.rank // 2)
inner = pair.split(0)
comm.barrier()
if comm.rank == 3:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
for group in (inner, comm) if comm.rank == 2 else (comm,):
    try:
        while True:
            group.all_reduce(np.ones(10))
    except pc.PeerLostError as error:
        of_comm = group is comm or "in the group that this one was split from: " in str(error)
        print(time.monotonic() - began < 10, ("rank 3" if of_comm else "rank 1") in str(error))
sys.exit(0)
"""
    status, out, _ = run_on(4, body)
    assert status == 128 + signal.SIGKILL
    assert out == "True True\n" * 4


@pytest.mark.slow
@fast_on("shm")
def test_a_process_that_ends_without_leaving_is_lost_to_its_parts_alone(run_on):
    """os._exit(0) runs no exit functions and reports success."""
    body = """
pair = comm.split(comm.rank // 2)
inner = pair.split(0)
comm.barrier()
if comm.rank == 1:
    time.sleep(0.2)
    os._exit(0)
if comm.rank == 0:
    for group in (inner, pair):
        try:
            while True:
                group.all_reduce(np.ones(10))
        except pc.PeerLostError as error:
            print("rank 1" in str(error))
else:
    time.sleep(0.5)
    print(inner.all_reduce([1])[0])
sys.exit(0)
"""
    status, out, _ = run_on(4, body)
    assert (status, sorted(out.split())) == (0, ["2", "2", "True", "True"])


@pytest.mark.slow
def test_rank_that_dies_while_others_split_is_named(run_on):
    body = """
comm.barrier()
if comm.rank == 1:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
work, began = comm.split(0, async_op=True), time.monotonic()
try:
    work.wait()
except pc.PeerLostError as error:
    print(time.monotonic() - began < 10, "rank 1" in str(error))
sys.exit(0)
"""
    status, out, _ = run_on(3, body)
    assert (status, out) == (128 + signal.SIGKILL, "True True\n" * 2)


@fast_on("shm")
def test_a_group_that_fails_does_not_end_the_old_one(run_on):
    body = """
pair = comm.split(0)
try:
    pair.all_reduce(np.ones(1 + comm.rank))
except pc.MismatchError:
    print(comm.all_reduce(np.ones(1))[0])
"""
    assert run_on(2, body) == (0, "2.0\n" * 2, "")


@pytest.mark.slow
def test_split_memory_that_cannot_be_opened_is_reported(run_on):
    body = """
from pycollective.comm import split
def elsewhere(offer):
    return open_memory([offer[0], 10**6, *offer[2:]])
open_memory = split.SharedMemory._open
if comm.rank == 1:
    split.SharedMemory._open = staticmethod(elsewhere)
    import pycollective.launch.tcp as tcp
    tcp.connect = lambda *about: (_ for _ in ()).throw(pc.CollectiveError("No such file"))
try:
    comm.split(0, timeout=3)
except pc.CollectiveError as error:
    print(comm.rank, "No such file" in str(error), "rank 1" in str(error))
    comm.barrier()
"""
    status, out, err = run_on(2, body)
    assert (status, err) == (0, "")
    assert "1 True True" in out.splitlines()
    assert len(out.splitlines()) == 2
