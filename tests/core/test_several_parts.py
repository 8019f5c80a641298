"""Messages with several ranks' parts, which need not be adjacent."""

from __future__ import annotations

import numpy as np
import pytest
from rank_groups import make_group

from pycollective.algorithms import algorithm, copy, input, output, recv, recv_reduce, scratch, send

BEYOND_A_BLOCK = (4 << 20) + 77
"""Bytes of a part that is longer than a block, so that the parts of a block are not adjacent."""


@algorithm(num_chunks=lambda size: size, collective="all_gather")
def through_rank_0(rank, size):
    """Rank 0 sends each rank all parts but its own: the parts after it, and those before."""
    yield copy(input[0], output[rank])
    if rank:
        yield send(0, output[rank])
        yield recv(0, output[(rank + 1) % size : (rank + 1) % size + size - 1])
        return
    for peer in range(1, size):
        yield recv(peer, output[peer])
    for peer in range(1, size):
        first = (peer + 1) % size
        yield send(peer, output[first : first + size - 1])


@algorithm(num_chunks=lambda size: size, num_scratch=lambda size: size, collective="reduce_scatter")
def added_by_rank_0(rank, size):
    """Rank 0 adds all parts, beginning with part 1, and sends each rank its part."""
    if rank:
        yield send(0, input[1 : 1 + size])
        yield recv(0, output[0])
        return
    sums = input[1 : 1 + size] if size > 1 else input[0]
    for peer in range(1, size):
        yield recv_reduce(peer, sums, scratch[0:size])
        sums = scratch[0:size]
    for peer in range(1, size):
        yield send(peer, scratch[peer - 1])
    yield copy(scratch[size - 1] if size > 1 else input[0], output[0])


GROUPS = [
    ("threads", 3),
    ("shm", 3),
    ("tcp", 3),
    ("mixed", 3),
    pytest.param("threads", 5, marks=pytest.mark.slow),
]


def numbers(items, rank):
    return (np.arange(items, dtype="u4") * 7 + rank).astype("u1") % 50


@pytest.mark.parametrize(("kind", "ranks"), GROUPS)
def test_all_gather_sends_several_parts_together(kind, ranks, on_ranks):
    counts = [BEYOND_A_BLOCK, 0, 5, BEYOND_A_BLOCK - 4096, 1][:ranks]
    ragged = [numbers(count, r) for r, count in enumerate(counts)]
    equal = [numbers(BEYOND_A_BLOCK, r) for r in range(ranks)]

    def work(c):
        for how in ("doubling", through_rank_0):
            for arrays in (equal, ragged, [x[:1] for x in equal]):
                x = arrays[c.rank]
                got = c.all_gather(x, algorithm=how, ragged=arrays is ragged)
                assert np.array_equal(got, np.concatenate(arrays)), (how, x.size)

    assert on_ranks(make_group(kind, ranks, 30.0), work) == [None] * ranks


@pytest.mark.parametrize(("kind", "ranks"), GROUPS)
def test_reduce_scatter_sends_several_parts_together(kind, ranks, on_ranks):
    given = [numbers(ranks * BEYOND_A_BLOCK, r) for r in range(ranks)]
    sums = sum(given).reshape(ranks, -1)

    def work(c):
        for how in ("halving", added_by_rank_0):
            for items in (1, 1001, BEYOND_A_BLOCK):
                x = given[c.rank].reshape(ranks, -1)[:, :items].copy()
                got = c.reduce_scatter(x, algorithm=how).reshape(-1)
                assert np.array_equal(got, sums[c.rank, :items]), (how, items)
                c.reduce_scatter(x, out=x[c.rank], algorithm=how)
                assert np.array_equal(x[c.rank], got), (how, items)

    assert on_ranks(make_group(kind, ranks, 30.0), work) == [None] * ranks


def test_schedules_with_several_parts_are_proved():
    for size in range(1, 20):
        through_rank_0.verify(size)
        added_by_rank_0.verify(size)


def test_ragged_parts_with_scratch_raise_value_error(on_ranks):
    @algorithm(num_chunks=lambda size: size, num_scratch=1, collective="all_gather")
    def kept(rank, size):
        yield copy(input[0], scratch[0])
        yield copy(input[0], output[rank])
        for step in range(1, size):
            yield send((rank + step) % size, scratch[0])
            yield recv((rank - step) % size, output[(rank - step) % size])

    def work(c):
        with pytest.raises(ValueError, match="kept uses scratch"):
            c.all_gather(np.ones(c.rank), algorithm=kept, ragged=True)
        return c.all_gather([c.rank], algorithm=kept).tolist()

    assert on_ranks(make_group("threads", 3), work) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("kind", ["threads", "shm", "tcp", "mixed"])
def test_items_cut_by_message_parts_arrive_whole(kind, on_ranks):
    """Messages are cut at any byte, also within an item of 13 bytes."""
    rows = np.zeros((3, 30_011), "i4, u1, f8")
    rows["f0"], rows["f1"] = np.arange(3)[:, None], np.arange(30_011) % 251

    def work(c):
        for how in ("ring", "doubling", "direct", through_rank_0):
            got = c.all_gather(rows[c.rank], algorithm=how)
            assert got.tobytes() == rows.tobytes(), how
        for how in ("tree", "chain"):
            assert c.broadcast(rows[c.rank], 1, algorithm=how).tobytes() == rows[1].tobytes()

    assert on_ranks(make_group(kind, 3, 30.0), work) == [None] * 3
