"""Copies with strides in several threads, and sums of rows, compared with those of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import _nn as kernels
from pycollective.tensor import compiled


@pytest.fixture(params=[1, 3])
def threads(request):
    before = kernels.threads()
    kernels.set_threads(request.param)
    yield
    kernels.set_threads(before)


VIEWS = {
    "whole": lambda a: a,
    "half of each pixel": lambda a: a[..., : a.shape[-1] // 2],
    "rows from the middle": lambda a: a[:, 1:-1],
    "channels first": lambda a: a.transpose(0, 3, 1, 2),
    "reversed axes": lambda a: a.T,
    "every other column": lambda a: a[:, :, ::2],
    "backwards": lambda a: a[::-1, :, ::-1],
    "new axis": lambda a: a[:, None],
    "one row repeated": lambda a: np.broadcast_to(a[0, 0], a.shape),
    "one number": lambda a: np.broadcast_to(a[0, 0, 0, 0], a.shape),
    "nothing": lambda a: a[:0],
    "scalar": lambda a: a[0, 0, 0, 0, ...],
}


@pytest.mark.parametrize("dtype", ["f4", "f8", "i2", "?", "c8", "c16"])
@pytest.mark.parametrize("shape", [(3, 5, 7, 9), (6, 33, 40, 12), (1, 2, 90_001, 1)], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_copy_of_any_strides_equals_numpy(threads, view, shape, dtype):
    numbers = np.random.default_rng(1).integers(0, 250, shape)
    source = VIEWS[view](numbers.astype(dtype))
    for target in (np.ones_like(source, order="C"), VIEWS[view](np.ones(shape, dtype))):
        if target.shape != source.shape or not target.flags.writeable:
            continue
        copied = kernels.copy(source, target)
        assert copied == (dtype != "c16" or not source.size)
        if copied:
            np.testing.assert_array_equal(target, source)


def test_copy_keeps_what_is_beside_the_target(threads):
    whole = np.full((7, 40, 33, 5), 9.0, np.float32)
    compiled.put(whole[1:-1, 3:-2, 1:, 2:4], 4.0)
    expected = np.full_like(whole, 9.0)
    expected[1:-1, 3:-2, 1:, 2:4] = 4.0
    np.testing.assert_array_equal(whole, expected)


def test_copy_of_unequal_arrays_raises_or_refuses():
    with pytest.raises(ValueError, match=r"\(3,\) does not fit shape \(4,\)"):
        kernels.copy(np.zeros(3), np.zeros(4))
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.copy(np.zeros(3), fixed)
    assert not kernels.copy(np.zeros(3), np.zeros(3, np.float32))
    assert not kernels.copy(np.array([None]), np.array([None]))


@pytest.mark.parametrize("axis", [0, 1, 3])
def test_joined_equals_concatenate_with_and_without_the_kernel(threads, axis):
    rng = np.random.default_rng(2)
    for size in (3, 40):
        sizes = [[size, 11, 7, 13] for _ in range(3)]
        for number, each in enumerate(sizes):
            each[axis] = 4 * number
        arrays = [rng.normal(size=each).astype("f4") for each in sizes]
        expected = np.concatenate(arrays, axis=axis)
        np.testing.assert_array_equal(compiled.joined(arrays, axis), expected)
        placed = compiled.placed(arrays[1], tuple(n + 2 for n in sizes[1]), (slice(1, -1),) * 4, 5)
        np.testing.assert_array_equal(placed, np.pad(arrays[1], 1, constant_values=5))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 3, 64, 257])
@pytest.mark.parametrize("count", [0, 1, 1500])
def test_add_rows_equals_the_float64_sums(threads, count, width, dtype):
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(count, width)).astype(dtype)
    index = rng.integers(0, 19, count)
    if count > 3:
        rows[0, 0], rows[1, -1] = np.nan, np.inf
    y = np.ones((20, width), dtype)
    kernels.add_rows(rows, index, y)
    expected = np.ones((20, width))
    np.add.at(expected, index, rows.astype(np.float64))
    np.testing.assert_allclose(y, expected, rtol=1e-4 if dtype == np.float32 else 1e-12, atol=1e-5)


def test_add_rows_with_an_index_beyond_the_rows_raises_value_error():
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=rf"index {wrong} is not in 0 to 2"):
            kernels.add_rows(np.ones((1, 2)), np.array([wrong]), np.zeros((3, 2)))


def test_copy_of_objects_is_left_to_numpy():
    kind = np.dtype([("a", "O")])
    assert not kernels.copy(np.zeros(4, kind), np.zeros(4, kind))


def test_joined_texts_are_new_objects_and_not_old_memory():
    numbers = compiled.joined([np.random.default_rng(1).random(10_000)] * 2, 0)
    del numbers
    names = np.array([f"s{i}" for i in range(10_000)], object)
    joined = compiled.joined([names, names], 0)
    assert joined.shape == (20_000,)
    assert joined[-1] == "s9999"
