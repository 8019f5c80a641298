"""`scan` and `exscan` beyond test_suite.py: their bits, mismatches, means of several blocks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

import pycollective as pc
from pycollective import algorithms
from pycollective._core import Collective, Schedule, Step, Verb, prove


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_prefix_bits_are_those_of_a_loop_over_the_ranks(kind, dtype, on_ranks):
    x = np.random.default_rng(7).standard_normal((4, 30_001)).astype(dtype)
    want = [x[0]]
    for other in x[1:]:
        want.append((want[-1] + other).astype(dtype))

    def work(comm):
        with comm:
            return comm.scan(x[comm.rank]), comm.exscan(x[comm.rank])

    for rank, (scan, exscan) in enumerate(on_ranks(make_group(kind, 4), work)):
        assert scan.tobytes() == want[rank].tobytes()
        before = want[rank - 1] if rank else np.zeros_like(x[0])
        assert exscan.tobytes() == before.tobytes()


@pytest.mark.parametrize("call", ["scan", "exscan"])
def test_prefix_of_other_op_or_shape_raises_mismatch_error(call, on_ranks):
    for change in ({"op": "mean"}, {"x": np.ones(3)}):

        def work(comm, change=change):
            given = {"x": np.ones(4), "op": "sum"} | (change if comm.rank == 1 else {})
            with pytest.raises(pc.MismatchError, match=f"{call}.*{call}"):
                for _ in range(2):  # rank 0 does not wait in the first call
                    getattr(comm, call)(**given)
                comm.barrier()

        assert on_ranks(pc.local_group(3, timeout=20), work) == [None] * 3


def test_prefix_op_that_the_dtype_lacks_raises_type_error():
    (comm,) = pc.local_group(1)
    for call in (comm.scan, comm.exscan):
        with pytest.raises(TypeError, match="complex"):
            call(np.ones(2, complex), "min")
        with pytest.raises(ValueError, match="no .*scan algorithm is called 'ring'"):
            call(np.ones(2), algorithm="ring")


def test_prefix_in_a_timeline_has_its_name_and_algorithm(on_ranks, tmp_path):
    comms = pc.local_group(2, timeout=20)
    with pc.timeline(tmp_path / "t.json"):
        results = on_ranks(comms, lambda c: (c.scan([1.0]).tolist(), c.exscan([1.0]).tolist()))
    assert results == [([1.0], [0.0]), ([2.0], [1.0])]
    text = (tmp_path / "t.json").read_text()
    assert '"exscan' in text
    assert '"scan' in text
    assert "chain" in text


def test_prefix_schedule_with_a_contribution_too_many_is_rejected():
    """An all-reduce is no scan, and a step of a scan completes no mean."""
    whole = algorithms.schedule("reduce_to_one", 2)
    assert "wrong output[0]: chunk 0 with the contributions of ranks 0 1" in prove(
        Schedule(Collective.scan, whole.chunks, [_unmarked(s) for s in whole.steps], whole.scratch)
    )
    scan = algorithms.schedule("chain", 2, "scan")
    marked = [list(steps) for steps in scan.steps]
    marked[1][0].completes = True
    assert "marked complete and is not" in prove(Schedule(Collective.scan, 1, marked))


def _unmarked(steps: list[Step]) -> list[Step]:
    return [Step(s.verb, s.peer, s.source, s.target, completes=False) for s in steps]


def test_scan_is_one_message_for_each_neighbour():
    schedule = algorithms.schedule("chain", 9, "scan")
    assert [sum(s.verb == Verb.send for s in steps) for steps in schedule.steps] == [1] * 8 + [0]
