"""``all_to_all`` with lengths for each pair of ranks, of which no rank knows all."""

from __future__ import annotations

import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

from pycollective import CollectiveError, MismatchError


def rows_for(sender, receiver, turn, part):
    """Return a part's rows: ``part``, or other lengths where both ranks have unequal parts."""
    if {sender, receiver} <= unequal_ranks(turn):
        return part + (1 + sender + 2 * receiver) % 3 * (sender != receiver)
    return part


def unequal_ranks(turn):
    return [set(), {0, 1}, set(), {0, 2}, {1}, {0, 1, 2}, {0, 1, 2}, set()][turn % 8]


def part_of(sender, receiver, turn, part):
    """Return the rows of one part, in which the numbers of turn and ranks are visible."""
    rows = rows_for(sender, receiver, turn, part)
    return np.arange(rows, dtype="i4") + 1000 * turn + 100 * sender + 10 * receiver


def exchange(comm, turn, part, **options):
    """Make one call, and return its result or Work, and the expected rows."""
    ranks = range(comm.size)
    x = np.concatenate([part_of(comm.rank, r, turn, part) for r in ranks])
    sent = [rows_for(comm.rank, r, turn, part) for r in ranks]
    received = [rows_for(r, comm.rank, turn, part) for r in ranks]
    expected = np.concatenate([part_of(r, comm.rank, turn, part) for r in ranks])
    return comm.all_to_all(x, sent, out_counts=received, **options), expected


@pytest.fixture
def on_new_group(on_ranks):
    """Return a function that runs ``work(comm)`` on each rank of a new group, and closes the group."""

    def run(kind, size, work):
        comms = make_group(kind, size, 20.0)
        try:
            assert on_ranks(comms, work) == [None] * size
        finally:
            for comm in comms:
                comm.close()

    return run


@pytest.mark.parametrize("part", [0, 1, 3, 700, 40_000, 300_000])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_ranks_with_equal_parts_and_ranks_without_meet(kind, part, on_new_group):
    def work(comm):
        for turn in range(16):
            got, expected = exchange(comm, turn, part)
            np.testing.assert_array_equal(got, expected)
            # The call after it uses the same memory.
            assert comm.all_reduce(np.full(200, turn)).tolist() == [3 * turn] * 200

    on_new_group(kind, 3, work)


@pytest.mark.parametrize("part", [3, 40_000])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_asynchronous_calls_with_lengths_are_made_in_order(kind, part, on_new_group):
    def work(comm):
        for _ in range(2):
            later = [exchange(comm, turn, part, async_op=True) for turn in range(8)]
            for call, expected in later:
                np.testing.assert_array_equal(call.wait(), expected)

    on_new_group(kind, 3, work)


@pytest.mark.parametrize("items", [1, 20_000])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_lengths_that_contradict_fail_on_all_ranks(kind, items, on_new_group):
    def work(comm):
        rows = items * (1 + comm.rank)  # equal on each rank, and not between them
        with pytest.raises(CollectiveError):
            comm.all_to_all(np.ones(2 * rows), [rows] * 2, out_counts=[rows] * 2)

    on_new_group(kind, 2, work)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_call_with_lengths_and_one_without_are_a_mismatch(kind, on_new_group):
    def work(comm):
        lengths = {"counts": [1, 1], "out_counts": [1, 1]} if comm.rank else {}
        with pytest.raises(MismatchError, match=r"float64\[\*\]"):
            comm.all_to_all(np.ones(2), **lengths)

    on_new_group(kind, 2, work)
