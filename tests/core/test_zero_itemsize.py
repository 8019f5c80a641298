"""Arrays whose items have no bytes: calls wait for all ranks, and move no data."""

from __future__ import annotations

import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

import pycollective as pc

DTYPES = [np.dtype("V0"), np.dtype([])]
CALLS = {
    "broadcast": (lambda c, x: c.broadcast(x), 6),
    "all_gather": (lambda c, x: c.all_gather(x), 18),
    "ragged all_gather": (lambda c, x: c.all_gather(x[: c.rank], ragged=True), 3),
    "gather": (lambda c, x: c.gather(x), 18),
    "ragged gather": (lambda c, x: c.gather(x[: c.rank], ragged=True), 3),
    "scatter": (lambda c, x: c.scatter(x), 2),
    "ragged scatter": (
        lambda c, x: c.scatter(x, ragged=True, counts=[1, 2, 3] if c.rank == 0 else None), None,
    ),
    "all_to_all": (lambda c, x: c.all_to_all(x), 6),
    "ragged all_to_all": (lambda c, x: c.all_to_all(x, [2, 2, 2]), 6),
    "empty": (lambda c, x: c.empty(4, x.dtype), 4),
    "message": (
        lambda c, x: (c.send(x, (c.rank + 1) % 3),
                      c.recv(source=(c.rank - 1) % 3, shape=6, dtype=x.dtype))[1], 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("after_async_call", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["void", "no fields"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_zero_itemsize_moves_have_the_usual_shapes(on_ranks, kind, dtype, after_async_call):
    def work(comm):
        for name, (call, rows) in CALLS.items():
            if after_async_call:
                comm.broadcast(np.zeros(3, dtype), async_op=True).wait()
            result = call(comm, np.zeros(6, dtype))
            if name.endswith("gather") and "all" not in name and comm.rank:
                assert result is None
                continue
            assert result.dtype == dtype, name
            assert result.shape == ((comm.rank + 1) if rows is None else rows,), name
        for call in (comm.all_reduce, comm.reduce, comm.reduce_scatter):
            with pytest.raises(TypeError, match="there is no reduction for dtype"):
                call(np.zeros(6, dtype))
        return comm.all_reduce(np.ones(2)).tolist()

    assert on_ranks(make_group(kind, 3, 20), work) == [[3, 3]] * 3


def test_zero_itemsize_differing_shapes_raise_mismatch_error(on_ranks):
    def work(comm):
        with pytest.raises(pc.MismatchError, match=r"\[2\].*\[3\]"):
            comm.broadcast(np.zeros(2 + comm.rank, "V0"))
            comm.barrier()

    assert on_ranks(pc.local_group(2, timeout=20), work) == [None, None]
