"""`sendrecv` over every transport: no deadlock at any length, in place, no neighbour."""

from __future__ import annotations

import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

import pycollective as pc

LENGTHS = [0, 1, 1000, 1_000_003]


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("async_op", [False, True])
def test_sendrecv_round_a_ring_shifts_arrays_of_any_length(kind, async_op, on_ranks):
    def work(comm):
        def shifted(x, out):
            got = comm.sendrecv(x, after, out, before, async_op=async_op)
            return got.wait() if async_op else got

        with comm:
            after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            for n in LENGTHS:
                x, want = np.arange(n) + 0.5 * comm.rank, np.arange(n) + 0.5 * before
                np.testing.assert_array_equal(shifted(x, None), want)
                out = np.zeros((n, 2))[:, 0]
                assert shifted(x, out) is out
                np.testing.assert_array_equal(out, want)
                assert shifted(x, x) is x  # in place
                np.testing.assert_array_equal(x, want)
        return True

    assert on_ranks(make_group(kind, 3), work) == [True] * 3


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("async_op", [False, True])
def test_sendrecv_without_a_neighbour_leaves_out_unchanged(kind, async_op, on_ranks):
    def work(comm):
        with comm:
            after = comm.rank + 1 if comm.rank + 1 < comm.size else None
            before = comm.rank - 1 if comm.rank else None
            out = np.full(3, -1.0)
            got = comm.sendrecv(np.full(3, comm.rank), after, out.astype(int), before)
            assert got.tolist() == [before if comm.rank else -1] * 3
            got = comm.sendrecv(np.full(3, 1.0 * comm.rank), after, out, before, async_op=async_op)
            assert (got.wait() if async_op else got) is out
            nothing = comm.sendrecv(None, None, None, None, async_op=async_op)
            assert (nothing.wait() if async_op else nothing) is None
            return out.tolist()

    assert on_ranks(make_group(kind, 3), work) == [[-1.0] * 3, [0.0] * 3, [1.0] * 3]


def test_sendrecv_with_two_tags_and_two_lengths_is_right(on_ranks):
    def work(comm):
        other = 1 - comm.rank
        x = np.full(2 + comm.rank, comm.rank)
        out = np.empty(2 + other, int)
        return comm.sendrecv(x, other, out, other, comm.rank, recvtag=other).tolist()

    assert on_ranks(pc.local_group(2, timeout=20), work) == [[1, 1, 1], [0, 0]]


def test_sendrecv_with_wrong_arguments_sends_nothing():
    (comm,) = pc.local_group(1)
    read_only = np.ones(1)
    read_only.flags.writeable = False
    for error, text, given in (
        (TypeError, "needs out, or x", (None, None, None, 0)),
        (TypeError, "needs x, the array to send to rank 0", (None, 0, np.ones(1), 0)),
        (ValueError, "source 7 is not among", (np.ones(1), 0, None, 7)),
        (ValueError, "read-only", (np.ones(1), 0, read_only, 0)),
        (ValueError, "dest 7 is not among", (np.ones(1), 7, None, 0)),
    ):
        with pytest.raises(error, match=text):
            comm.sendrecv(*given)
    with pytest.raises(ValueError, match="^tag must be a number from 0"):
        comm.sendrecv(np.ones(1), 0, None, 0, tag=2**40)
    with pytest.raises(ValueError, match="recvtag must be a number from 0"):
        comm.sendrecv(np.ones(1), 0, None, 0, recvtag=-1)
    comm.send(np.zeros(1), 0)
    assert comm.recv(np.ones(1), 0).tolist() == [0.0]  # no earlier message was sent
