"""The memory of 64 ranks: what two ranks need for each other is allocated at first use."""

from __future__ import annotations

import sys

import pytest
from processes import run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.slow,
]

RANKS = 64
PREAMBLE = """
from in_ranks import *

def private():
    "MiB of this process's own pages."
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

before = private()
comm = pc.init(timeout=120, join_timeout=120)
"""
BODY = """
r, n = comm.rank, comm.size
x, word, got = np.ones(1 << 16), np.ones(1), np.empty(1)

def shared():
    "MiB of the pages of this host's group."
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    named = [f for f in files if os.path.islink(f) and "memfd:pycollective" in os.readlink(f)]
    return max([os.stat(f).st_blocks * 512 / 2**20 for f in named], default=0.0)

def report():
    comm.barrier()
    used = np.array([private() - before, shared()])
    most = comm.all_reduce(used, "max")
    if r == 0:
        print(*(int(m) for m in most), flush=True)
    comm.barrier()

report()
comm.all_reduce(word)
comm.all_reduce(x, out=x)
comm.all_reduce(x, out=x, algorithm="ring")
comm.sendrecv(word, (r + 1) % n, got, source=(r - 1) % n)
report()
comm.all_to_all(x)
for distance in range(1, n):
    comm.sendrecv(word, (r + distance) % n, got, source=(r - distance) % n)
report()
comm.close()
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_memory_of_64_ranks_is_allocated_at_first_use(tmp_path, transport):
    done = run(tmp_path, transport, RANKS, BODY, preamble=PREAMBLE, seconds=180)
    assert (set(done.codes), done.errors) == ({0}, "")
    begun, near, far = (map(int, line.split()) for line in done.outputs[0].splitlines())
    for (private, shared), most in ((begun, 16), (near, 128), (far, 512)):
        assert private < 16  # MiB of each rank
        assert shared < most  # MiB of all ranks of a host
