"""Reused memory: only without references to it, and within limits."""

from __future__ import annotations

import threading

import numpy as np

from pycollective.comm.packing import joined
from pycollective.tensor.compiled import binary
from pycollective.workspace import Workspace

SHAPE = (64, 1024)


def address(array: np.ndarray) -> int:  # type: ignore[type-arg]
    return array.__array_interface__["data"][0]


def test_memory_of_a_result_is_reused_only_after_it_is_dropped() -> None:
    space = Workspace()
    first = space.empty(SHAPE, np.float32)
    place = address(first)
    assert place % 64 == 0
    view = first[3:, ::2].T
    del first
    assert address(space.empty(SHAPE, np.float32)) != place
    del view
    assert address(space.empty(SHAPE, np.float32)) == place
    assert space.empty(SHAPE, np.float64).shape == SHAPE


def test_small_results_are_ordinary_arrays() -> None:
    assert Workspace().empty((4,), np.float32).base is None


def test_kept_memory_is_bounded() -> None:
    size = SHAPE[0] * SHAPE[1] * 4
    space = Workspace(3 * size)
    held = [space.empty(SHAPE, np.float32) for _ in range(5)]
    assert [a.base is None for a in held] == [False, False, False, True, True]
    del held
    # Requests of other sizes release idle memory.
    for rows in range(60, 70):
        space.empty((rows, 1024), np.float32)
        assert space._kept() <= 3 * size


def test_blocks_that_exist_keep_no_more_than_the_limit() -> None:
    """One array in each piece of memory keeps the whole piece."""
    space = Workspace(64 << 20)
    held = []
    for step in range(300):
        space.empty((1024 + 16 * (step % 37), 512), np.float32)
        held.append(space.empty((64 << 10,), np.uint8))
        assert space._kept() <= 64 << 20
    assert len({address(array) for array in held}) == len(held)


def test_results_of_about_the_same_length_share_a_block() -> None:
    space = Workspace()
    places = {address(space.empty((100_000 + n,), np.uint8)) for n in range(0, 3000, 100)}
    assert len(places) <= 2


def test_scratch_is_one_block_per_name_and_thread() -> None:
    space = Workspace()
    big = address(space.scratch("a", (100,), np.float64))
    assert address(space.scratch("a", (10,), np.float32)) == big
    assert address(space.scratch("b", (10,), np.float32)) != big
    others: list[int] = []
    thread = threading.Thread(
        target=lambda: others.append(address(space.scratch("a", (10,), np.float32)))
    )
    thread.start()
    thread.join()
    assert others[0] != big


def test_computed_results_are_those_of_the_function() -> None:
    a, b = np.full(SHAPE, 2.0, np.float32), np.full(SHAPE, 3.0, np.float32)
    first = binary("add", np.add, a, b)
    assert first.base is not None and (first == 5).all()
    repeated = binary("multiply", np.multiply, b[0], a)
    assert repeated.base is not None and (repeated == 6).all()
    for x, y in ((a, b[:, :1]), (a, b.astype(np.float64)), (a[:2], b[:2]), (a.T, b.T)):
        plain = binary("multiply", np.multiply, x, y)
        assert plain.base is None
        np.testing.assert_array_equal(plain, x * y)
        assert plain.dtype == (x * y).dtype


def test_scratch_without_elements_can_be_written_to() -> None:
    space = Workspace()
    for _ in range(2):
        assert space.scratch("a", (0, 5), np.float64).flags.writeable
        space.scratch("b", (3, 5), np.float64)


def test_large_products_come_in_memory_used_before() -> None:
    space = Workspace()
    rng = np.random.default_rng(0)
    a, b = rng.random((200, 30)), rng.random((30, 300))
    product = space.matmul(a, b)
    place = address(product)
    assert np.array_equal(product, a @ b)
    assert np.allclose(space.matmul(b.T, a.T), product.T)
    assert np.allclose(space.matmul(a, b.astype(np.float32)), product)  # NumPy determines the dtype
    assert space.matmul(a[None], b).shape == (1, 200, 300)
    assert space.matmul(a[:2], b).base is None
    del product
    assert address(space.matmul(a, b)) == place


def test_buckets_reuse_memory() -> None:
    def addresses() -> list[int]:
        buckets = [joined([np.ones(50_000)] * n)[1] for n in (2, 1)]
        return [address(bucket) for bucket in buckets]

    assert addresses() == addresses()
