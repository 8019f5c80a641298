"""A communicator as a context manager: its end, with and without an error in the block."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective as pc


def test_init_in_with_is_closed_at_the_end_and_refuses_any_use():
    x = np.ones(2)
    with pc.init(environment={}) as comm:
        assert comm.all_reduce(x).tolist() == [1, 1]
    uses = (
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce(x, async_op=True),
        lambda: comm.all_gather(x, ragged=True),
        lambda: comm.send(x, 0),
        lambda: comm.split(0),
        lambda: comm.empty(3),
        lambda: comm.barrier(),
        comm.__enter__,
    )
    for use in uses:
        with pytest.raises(pc.CollectiveError, match="^this communicator is closed$"):
            use()


def test_close_within_with_is_no_error():
    with pc.init(environment={}) as comm:
        comm.close()


def test_error_in_with_aborts_the_group_also_with_a_call_under_way(on_ranks):
    def work(comm):
        with comm:
            if comm.rank == 1:
                comm.all_reduce(np.ones(2), async_op=True)  # rank 0 never makes this call
                raise KeyError("a key")
            comm.recv(source=1, shape=1, dtype="u1")

    errors = on_ranks(pc.local_group(2, timeout=30), work)
    assert isinstance(errors[1], KeyError)
    assert isinstance(errors[0], pc.AbortedError)
    assert "rank 1 raised KeyError: 'a key'" in str(errors[0])


def test_exit_in_with_leaves_without_an_abort(on_ranks):
    def work(comm):
        with comm:
            y = comm.all_reduce(np.ones(1))
            if comm.rank == 1:
                raise SystemExit(0)
            return y.tolist()

    results = on_ranks(pc.local_group(2), work)
    assert results[0] == [2.0]
    assert isinstance(results[1], SystemExit)
