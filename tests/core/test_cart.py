"""Cartesian grids: coordinates, neighbours, and exchange over every transport."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from rank_groups import ALL_KINDS, make_group

import pycollective as pc
from pycollective.comm.cart import dims_create


@pytest.mark.parametrize(
    ("size", "dims", "want"),
    [
        (6, [0, 0], (3, 2)), (7, [0, 0], (7, 1)), (6, [0, 3, 0], (2, 3, 1)), (16, [0, 0, 0], (4, 2, 2)),
        (24, [0, 0, 0], (4, 3, 2)), (36, [0, 0], (6, 6)), (1, [0, 0], (1, 1)), (12, [2, 6], (2, 6)),
        (8, 0, (8,)),
    ],
)  # fmt: skip
def test_dims_create_is_balanced_and_keeps_what_is_given(size, dims, want):
    assert dims_create(size, dims) == want


@pytest.mark.parametrize("dims", [[4], [2, 2], [5, 0], [], [-1, 0], [7, 0]])
def test_cart_dims_that_do_not_fit_the_ranks_raise_value_error(dims):
    (comm, *_) = pc.local_group(6)
    with pytest.raises(ValueError, match=r"grid|length|dims"):
        comm.cart(dims)


def test_cart_coords_and_rank_are_inverse_in_the_order_of_numpy():
    comms = pc.local_group(12)
    for comm in comms:
        grid = comm.cart([3, 2, 2], periods=[True, False, False])
        assert grid.coords() == grid.coords(comm.rank)
        assert grid.rank(grid.coords()) == comm.rank
        assert [grid.coords(r) for r in range(12)] == list(np.ndindex(3, 2, 2))
    assert grid.rank([-1, 0, 1]) == grid.rank([5, 0, 1]) == 9
    assert grid.rank([0, 2, 0]) is grid.rank([0, 0, -1]) is None
    assert repr(grid) == "<Cart 3 x 2 x 2, rank 11>"
    for call, text in (
        (lambda: grid.coords(12), "rank 12 is not among"),
        (lambda: grid.rank([0, 0]), "2 coordinates for 3 axes"),
        (lambda: grid.shift(3), "axis 3 is not among the 3 axes"),
        (lambda: comms[0].cart([12], [True, False]), "periods has 2 values for 1 axes"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_cart_shift_is_none_beyond_an_open_border():
    comms = pc.local_group(6)
    grids = [c.cart([2, 3], periods=[False, True]) for c in comms]
    assert [g.shift(0) for g in grids] == [
        (None, r + 3) if r < 3 else (r - 3, None) for r in range(6)
    ]
    assert [g.shift(1) for g in grids[:3]] == [(2, 1), (0, 2), (1, 0)]
    assert [g.shift(1, -1) for g in grids[:3]] == [(1, 2), (2, 0), (0, 1)]
    assert grids[0].shift(0, 2) == (None, None)
    assert grids[4].neighbors == (1, None, 3, 5)


GRIDS = [
    ([4], False), ([4], True), ([2, 2], False), ([2, 2], True), ([4, 1], True), ([1, 4], [True, False]),
]  # fmt: skip


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("async_op", [False, True])
def test_neighbor_all_to_all_gives_each_neighbour_its_block(kind, async_op, on_ranks):
    """One rank may be the neighbour on both sides, and a rank may be its own neighbour."""

    def work(comm):
        with comm:
            for (dims, periods), length in itertools.product(GRIDS, (1, 40_000)):
                grid = comm.cart(dims, periods)
                sides = len(grid.neighbors)
                numbers = 10.0 * comm.rank + np.arange(sides)
                x = np.repeat(numbers, length).reshape(sides, length)
                given = np.full_like(x, -1)
                got = grid.neighbor_all_to_all(x, out=given, async_op=async_op)
                assert (got.wait() if async_op else got) is given
                new = grid.neighbor_all_to_all(x)
                gathered = grid.neighbor_all_gather(x[0])
                blocks = x.copy()
                in_place = grid.neighbor_all_to_all(blocks, out=blocks, async_op=async_op)
                assert (in_place.wait() if async_op else in_place) is blocks
                for i, peer in enumerate(grid.neighbors):
                    want = -1 if peer is None else 10 * peer + (i ^ 1)
                    assert (given[i] == want).all(), (dims, periods, i)
                    assert (new[i] == max(want, 0)).all()
                    assert (blocks[i] == (x[i] if peer is None else want)).all()
                    assert (gathered[i] == (0 if peer is None else 10 * peer)).all()
        return True

    assert on_ranks(make_group(kind, 4), work) == [True] * 4


def test_neighbor_all_to_all_exchanges_a_halo_in_place(on_ranks):
    """Rows and columns of different lengths, as views of one array."""
    whole = np.arange(8.0 * 12).reshape(8, 12)

    def work(comm):
        grid = comm.cart([2, 2])
        i, j = grid.coords()
        u = np.zeros((6, 8))
        u[1:-1, 1:-1] = whole[4 * i : 4 * i + 4, 6 * j : 6 * j + 6]
        border = [u[0], u[-1], u[:, 0], u[:, -1]]
        assert grid.neighbor_all_to_all([u[1], u[-2], u[:, 1], u[:, -2]], out=border) is border
        padded = np.pad(whole, 1)[4 * i : 4 * i + 6, 6 * j : 6 * j + 8]
        padded[::5, ::7] = u[::5, ::7]  # no neighbour sends the corners
        return np.array_equal(u, padded)

    assert on_ranks(pc.local_group(4, timeout=20), work) == [True] * 4


def test_neighbor_all_to_all_wrong_number_of_blocks_raises_value_error():
    (comm,) = pc.local_group(1)
    grid = comm.cart([1, 1])
    for x, out, text in (
        (np.ones(3), None, "x must have a block for each of the 4 neighbours, not 3"),
        (1.0, None, "x must have a block for each of the 4 neighbours, not 0"),
        (
            np.ones(4),
            [np.ones(())],
            "out must have a block for each of the 4 neighbours, not 1",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            grid.neighbor_all_to_all(x, out=out)
    grid = comm.cart([1], periods=True)
    assert grid.neighbor_all_to_all(np.arange(2.0)).tolist() == [1.0, 0.0]
    assert grid.neighbor_all_gather(5).tolist() == [5, 5]
