"""send and recv between processes: through shared memory and over TCP."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import pytest
from processes import fast_on

from pycollective import spawn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")


def test_all_ranks_send_first_without_deadlock(run_on):
    body = """
n, r = comm.size, comm.rank
for size in (0, 1, 1000, 70_000, 2_000_003):
    for step in range(1, n):
        comm.send(np.full(size, r + 0.5), (r + step) % n, tag=step)
    for step in reversed(range(1, n)):
        got = comm.recv(source=(r - step) % n, tag=step, shape=size, dtype=float)
        assert got.shape == (size,) and (got == (r - step) % n + 0.5).all()
print("done")
"""
    assert run_on(3, body) == (0, "done\n" * 3, "")


@fast_on("tcp")
def test_exchange_with_works_beside_collectives_is_right(run_on):
    body = """
other = 1 - comm.rank
ins = [comm.recv(source=other, tag=t, shape=300_000, dtype=float, async_op=True) for t in range(4)]
total = comm.all_reduce(np.ones(100_000), async_op=True)
outs = [comm.send(np.full(300_000, float(t)), other, t, async_op=True) for t in range(4)]
for t, w in enumerate(ins):
    assert (w.wait() == t).all()
assert [w.wait() for w in outs] == [None] * 4
assert (total.wait() == 2).all()
print("done")
"""
    assert run_on(2, body) == (0, "done\n" * 2, "")


@pytest.mark.slow  # the fast tests of test_mismatches.py have more of these
def test_a_mismatch_is_named_on_both_sides(run_on):
    body = """
try:
    if comm.rank == 0:
        comm.send(np.ones(3), 1)
        comm.barrier()
    else:
        comm.recv(source=0, shape=4, dtype="int32")
except pc.MismatchError as error:
    print(error)
"""
    status, out, err = run_on(2, body)
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 2
    for line in out.splitlines():
        assert "rank 1 receives int32[4] from rank 0 with tag 0, but rank 0 sent float64[3]" in line


@pytest.mark.slow
def test_a_sender_that_leaves_or_dies_is_named(run_on):
    body = """
if comm.rank == 0:
    comm.send(np.arange(5.0), 1)
    comm.close()
    sys.exit(0)
time.sleep(0.3)
print(comm.recv(source=0, shape=5, dtype=float).sum())  # it was sent before
try:
    comm.recv(source=0, shape=5, dtype=float)
except pc.PeerLostError as error:
    print(error)
"""
    status, out, err = run_on(2, body)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "10.0"
    assert lines[1].startswith(
        "rank 0 has left the group, while rank 1 is in recv (float64[5], tag 0)"
    )
    body = """
if comm.rank == 0:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    comm.recv(source=0, shape=5, dtype=float)
except pc.PeerLostError as error:
    print(time.monotonic() - began < 10, "rank 0 " in str(error))
    sys.exit(0)
"""
    status, out, _ = run_on(2, body)
    assert (status, out) == (128 + signal.SIGKILL, "True True\n")


def test_long_message_overwrites_nothing_of_the_one_before():
    """Lengths with which the head after the second message met unread bytes of the first one."""
    block = 64 * 320 + 1
    ahead = 16 * block
    after = (2 << 20) + block - 1 - 192 + -ahead // 64 * 64 - 63

    def work(comm):
        first, second = np.full(ahead, 1, "u1"), np.full(after, 2, "u1")
        wrong = 0
        for _ in range(60):
            if comm.rank == 0:
                works = [comm.send(x, 1, async_op=True) for x in (first, second)]
                for each in works:
                    each.wait()
            else:
                time.sleep(0.002)
                found = np.zeros(ahead, "u1"), np.zeros(after, "u1")
                for out in found:
                    comm.recv(out, 0)
                wrong += not (found[0] == 1).all() or not (found[1] == 2).all()
            comm.barrier()
        return wrong

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # a rank loses its core between two steps
    try:
        assert spawn(work, 2) == [0, 0]
    finally:
        os.sched_setaffinity(0, cores)
