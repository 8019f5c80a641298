"""Asynchronous calls between processes: through shared memory and over TCP."""

from __future__ import annotations

import sys

import pytest
from processes import fast_on

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")


@pytest.mark.slow
def test_works_with_blocking_calls_among_them_are_right(run_on):
    body = """
n, r = comm.size, comm.rank
for size in (0, 3, 70_000, 1_500_000):
    xs = [np.full(size, float(r + i)) for i in range(4)]
    works = [comm.all_reduce(x, out=x, async_op=True) for x in xs]
    ragged = comm.all_gather(np.full(r, r), ragged=True, async_op=True)
    assert (comm.broadcast(np.full(5, r), 1) == 1).all()
    assert all(w.done() for w in works)
    for i, x in enumerate(xs):
        assert (x == n * i + n * (n - 1) // 2).all()
    assert ragged.wait().tolist() == [q for q in range(n) for _ in range(q)]
comm.barrier(async_op=True).wait()  # a rank that ends earlier would be lost to the others
print("done")
"""
    assert run_on(3, body) == (0, "done\ndone\ndone\n", "")


@fast_on("shm")
def test_the_end_of_a_process_does_not_wait_for_its_works(run_on):
    body = """
import pathlib
pid = int(comm.broadcast(np.array([os.getpid()]))[0])
def has_ended():
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
if comm.rank == 0:
    while not os.path.exists("heard"):  # rank 1 may start later, and needs this rank until then
        time.sleep(0.01)
    comm.all_gather(np.ones(3), ragged=True, async_op=True)
    comm.all_reduce(np.ones(3), async_op=True)
else:
    pathlib.Path("heard").touch()
    try:
        while not has_ended():  # an earlier call would differ from rank 0's
            time.sleep(0.01)
        comm.barrier()
    except pc.AbortedError as error:
        print(error)
"""
    status, out, err = run_on(2, body)
    assert (status, err) == (0, "")
    assert out == "rank 0 ended while its calls were under way\n"
