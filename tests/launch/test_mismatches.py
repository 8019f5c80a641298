"""Mismatched calls: each rank's error names both calls, on every transport."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from fast_cases import some_fast
from in_ranks import until_error
from processes import TRANSPORTS, run

import pycollective as pc

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")

# Call of most ranks, call of one rank, and their names in the error.
CASES = {
    "collective": (
        "all_reduce(np.ones(4))", "broadcast(np.ones(4), 1)",
        "all_reduce #1 (float64[4], sum, ", "broadcast #1 (float64[4], ",
    ),
    "barrier": (
        "barrier()", "all_reduce(np.ones(4), algorithm='ring')",
        "barrier #1", "all_reduce #1 (float64[4], sum, ring)",
    ),
    "shape": (
        "all_reduce(np.ones(4))", "all_reduce(np.ones((2, 2)))",
        "(float64[4], sum, ", "(float64[2, 2], sum, ",
    ),
    "length": (
        "all_reduce(np.ones(70_000), algorithm='ring')",
        "all_reduce(np.ones(70_001), algorithm='ring')",
        "(float64[70000], sum, ring)", "(float64[70001], sum, ring)",
    ),
    "no elements": (
        "all_reduce(np.ones(3))", "all_reduce(np.ones(0))",
        "(float64[3], sum, ", "(float64[0], sum, ",
    ),
    "dtype": (
        "all_reduce(np.ones(4))", "all_reduce(np.ones(4, 'int64'))",
        "(float64[4], sum, ", "(int64[4], sum, ",
    ),
    "op": (
        "all_reduce(np.ones(70_000))", "all_reduce(np.ones(70_000), 'max')",
        "(float64[70000], sum, ", "(float64[70000], max, ",
    ),
    "root": (
        "broadcast(np.ones(4), 0)", "broadcast(np.ones(4), 2)",
        "root 0)", "root 2)",
    ),
    "root of a reduce": (
        "reduce(np.ones(4), root=0)", "reduce(np.ones(4), root=1)",
        "root 0)", "root 1)",
    ),
    "algorithm": (
        "all_reduce(np.ones(4), algorithm='ring')",
        "all_reduce(np.ones(4), algorithm='double_tree')",
        "(float64[4], sum, ring)", "(float64[4], sum, double_tree)",
    ),
    "parts": (
        "all_gather(np.ones(3))", "all_to_all(np.ones(3))",
        "all_gather #1 (float64[3]", "all_to_all #1 (float64[3]",
    ),
    "rows of ragged parts": (
        "all_gather(np.ones((2, 3)), ragged=True)", "all_gather(np.ones((2, 4)), ragged=True)",
        "all_gather #2 (float64[*, 3]", "all_gather #2 (float64[*, 4]",
    ),
    "arrays of equal total length": (
        "all_reduce_many([np.ones((2, 3)), np.ones(4)])",
        "all_reduce_many([np.ones(4), np.ones((2, 3))])",
        "(float64[2, 3] [4], sum, ", "(float64[4] [2, 3], sum, ",
    ),
    "the last of many arrays": (
        "all_reduce_many([*np.ones((9, 1)), np.ones((2, 3))], async_op=True).wait()",
        "all_reduce_many([*np.ones((9, 1)), np.ones((3, 2))], async_op=True).wait()",
        "(float64[1] [1] [1] [1] [… ", "(float64[1] [1] [1] [1] [… ",
    ),
    "shapes of a scatter": (
        "scatter(np.ones((6, 2)))", "scatter(np.ones((12, 1)))",
        "scatter #1 (float64[2, 2], ", "scatter #1 (float64[4, 1], ",
    ),
    "under way": (
        "all_reduce(np.ones(4), async_op=True).wait()", "all_reduce(np.ones(3), async_op=True).wait()",
        "(float64[4], sum, ", "(float64[3], sum, ",
    ),
    "a new group": (
        "split(0)", "barrier()",
        "all_gather #1 (int64[1, 2]", "barrier #1",
    ),
}  # fmt: skip

# Some ranks may finish the first call before the mismatch is found: their next call raises.
BODY = """
odd = comm.rank == ODD
for name, (call, other, *_) in CASES.items():
    group = comm.split(0)
    print(name, until_error(lambda: (eval("group." + (other if odd else call)), group.barrier())),
          sep=" | ", flush=True)
    group.close()
    comm.barrier()
    before = held() if name == "collective" else before
del group
print("held", grown(before))
"""


def check(case, odd, error):
    *_, most, one = CASES[case]
    assert error.startswith("MismatchError"), error
    assert f"rank {odd} called " in error, error
    theirs = error.partition(f"rank {odd} called ")[2].partition(", rank ")[0]
    assert one in theirs, error
    assert most in error.replace(theirs, ""), error


@pytest.mark.parametrize(
    ("transport", "odd"),
    some_fast([(t, odd) for t in TRANSPORTS for odd in (1, 0)], [("shm", 1), ("tcp", 1)]),
)
def test_mismatch_between_processes_names_both_calls(tmp_path, transport, odd):
    body = BODY.replace("CASES", repr(CASES)).replace("ODD", str(odd))
    done = run(tmp_path, transport, 3, body)
    for output in done.outputs:
        lines = output.splitlines()
        assert [line.partition(" | ")[0] for line in lines] == [*CASES, "held "], done
        for name, line in zip(CASES, lines, strict=False):
            check(name, odd, line.partition(" | ")[2])


@pytest.mark.parametrize("case", CASES)
def test_mismatch_between_threads_names_both_calls(on_ranks, case):
    call, other, *_ = CASES[case]

    def work(group):
        text = other if group.rank == 1 else call
        names = {"group": group, "np": np}
        return until_error(lambda: (eval(f"group.{text}", names), group.barrier()))

    for error in on_ranks(pc.local_group(3, timeout=20), work):
        check(case, 1, error)


@pytest.mark.slow
@pytest.mark.parametrize("transport", some_fast(TRANSPORTS, ["shm", "tcp"]))
def test_mismatched_messages_raise_on_all_ranks(tmp_path, transport):
    body = """
for later in (False, True):
    for sent in (np.ones(3), np.ones(4, "int32"), np.ones((2, 2))):
        group = comm.split(0)
        def call():
            if group.rank == 0:
                work = group.send(sent, 2, 5, async_op=later)
            if group.rank == 2:
                work = group.recv(source=0, tag=5, shape=4, dtype=float, async_op=later)
            if later and group.rank != 1:
                work.wait()
            group.barrier()
        print(until_error(call), flush=True)
        group.close()
        comm.barrier()
"""
    done = run(tmp_path, transport, 3, body)
    text = "MismatchError rank 2 receives float64[4] from rank 0 with tag 5, but rank 0 sent "
    for output in done.outputs:
        for line, what in zip(
            output.splitlines(), 2 * ["float64[3]", "int32[4]", "float64[2, 2]"], strict=True
        ):
            assert line.startswith(f"{text}{what}:"), done


_LAST = [(t, end) for t in TRANSPORTS for end in ("close", "exit")]
_LAST_FAST = [("shm", "close"), ("host", "exit"), ("tcp", "exit"), ("mixed", "close")]


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "end"), some_fast(_LAST, _LAST_FAST))
def test_last_calls_that_differ_end_the_job_in_failure(tmp_path, transport, end):
    body = "comm.broadcast(np.ones(4), comm.rank)\n" + ("comm.close()\n" if end == "close" else "")
    done = run(tmp_path, transport, 2, body)
    assert any(done.codes), done
    assert "MismatchError" in done.errors, done
    for rank in (0, 1):
        way = "direct" if TRANSPORTS[transport] == "shared memory" else "tree"
        assert f"rank {rank} called broadcast #1 (float64[4], {way}, root {rank})" in done.errors


def test_equal_calls_end_with_status_0(tmp_path):
    done = run(tmp_path, "shm", 2, "comm.broadcast(np.ones(4), 0)\n")
    assert done.codes == [0], done
