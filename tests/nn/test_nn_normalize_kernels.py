"""The compiled kernels of batch and layer normalization compared with formulas in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pycollective import _nn as kernels
from pycollective import nn
from pycollective.tensor import GradientTape, Variable, ops

SHAPES = [(4096, 16), (1000, 3), (7, 33), (1, 5), (0, 4), (3000, 300), (64, 1)]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let each kernel use this number of threads."""
    before = kernels.threads()
    kernels.set_threads(request.param)
    yield request.param
    kernels.set_threads(before)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_kernels_equal_the_formulas(
    shape: Any, dtype: str, with_factors: bool, relu: bool, threads: int
) -> None:
    rng = np.random.default_rng(5)
    rows, channels = shape
    tolerance = {"float32": 2e-6, "float64": 1e-14}[dtype]
    # Far from 0, a sum of squares would lose the variance by rounding.
    x = (rng.normal(size=shape) + 1000).astype(dtype)
    g = rng.normal(size=shape).astype(dtype)
    factor, shift = (rng.normal(size=channels).astype(dtype) for _ in range(2))
    given = (factor, shift) if with_factors else (None, None)
    y, dx = np.full((2, *shape), np.nan, dtype)
    mean, variance, by_factor, by_shift = np.full((4, channels), np.nan, dtype)
    kernels.batch_moments(x, mean, variance)
    kernels.normalize_batch(x, *given, mean, variance, y, 1e-3, relu)
    about = x, *given, mean, variance
    kernels.normalize_batch_gradient(g, *about, dx, by_factor, by_shift, 1e-3, relu)
    if not rows:
        assert not (mean.any() or variance.any() or by_factor.any() or by_shift.any())
        return
    wide, up = x.astype(np.float64), g.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean(axis=0), rtol=tolerance)
    np.testing.assert_allclose(variance, wide.var(axis=0), rtol=1e-4, atol=1e-3 * tolerance)
    slope = 1 / np.sqrt(variance.astype(np.float64) + 1e-3)
    normal = (wide - mean) * slope
    scaled = normal * factor + shift if with_factors else normal
    np.testing.assert_allclose(y, np.maximum(scaled, 0) if relu else scaled, atol=100 * tolerance)
    if with_factors:
        slope = slope * factor
    if relu:
        up = up * (y > 0)
    scale = 100 * tolerance * (1 + np.sqrt(rows))
    np.testing.assert_allclose(by_shift, up.sum(axis=0), atol=scale)
    np.testing.assert_allclose(by_factor, (up * normal).sum(axis=0), atol=scale)
    expected = slope * (up - up.mean(axis=0) - normal * (up * normal).mean(axis=0))
    np.testing.assert_allclose(dx, expected, atol=100 * scale / np.sqrt(rows))
    sums = np.full((2, channels), np.nan, dtype)
    kernels.normalize_batch_gradient(g, *about, None, *sums, 1e-3, relu)
    assert (sums == [by_factor, by_shift]).all()
    kernels.normalize_batch_gradient(g, *about, dx, *sums, 1e-3, relu, True)  # constant moments
    assert (sums == [by_factor, by_shift]).all()
    np.testing.assert_allclose(dx, slope * up, atol=scale)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [0, 1, 33])
def test_moving_average_weighs_the_old_and_the_new_value(size: int, dtype: str) -> None:
    rng = np.random.default_rng(6)
    average, value = rng.normal(size=(2, size)).astype(dtype)
    moved = np.full(size, np.nan, dtype)
    kernels.move_average(average, value, moved, 0.25)
    np.testing.assert_allclose(moved, 0.75 * average + 0.25 * value, rtol=1e-5, atol=1e-6)
    kernels.move_average(average, value, moved, 0)
    assert moved.tobytes() == average.tobytes()
    with pytest.raises(ValueError, match="value has shape"):
        kernels.move_average(average, np.zeros(size + 1, dtype), moved, 0.25)


def test_kernels_check_their_arrays() -> None:
    x = np.zeros((4, 3), np.float32)
    three, two = np.zeros(3, np.float32), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="variance has shape"):
        kernels.batch_moments(x, three, two)
    with pytest.raises(ValueError, match="whole number of blocks"):
        kernels.batch_moments(np.zeros(5, np.float32), two, two.copy())
    with pytest.raises(ValueError, match="at least one channel"):
        kernels.batch_moments(x, two[:0], two[:0])
    y = x.copy()
    calls: list[tuple[str, list[Any]]] = [
        ("variance has shape", [x, None, None, three, two, y]),
        ("factor has dtype float64", [x, three.astype(float), None, three, three, y]),
        ("shift has shape", [x, three, two, three, three, y]),
        ("y has shape", [x, None, None, three, three, y[:2].copy()]),
    ]
    for text, arrays in calls:
        with pytest.raises(ValueError, match=text):
            kernels.normalize_batch(*arrays, 1e-3)


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (3, 31), (5, 32), (7, 101), (700, 333)])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 2e-5), ("float64", 1e-12)])
def test_layer_normalization_kernels_equal_the_float64_reference(shape, dtype, error, threads):
    rng = np.random.default_rng(6)
    size = shape[1]
    x, g = rng.normal(3, 2, shape), rng.normal(0, 1, shape)
    factor, shift = rng.normal(1, 0.3, size), rng.normal(0, 1, size)
    mean, inverse = x.mean(1, keepdims=True), 1 / np.sqrt(x.var(1, keepdims=True) + 1e-3)
    normal = (x - mean) * inverse
    scaled = g * factor
    dx = inverse * (
        scaled - scaled.mean(1, keepdims=True) - normal * (scaled * normal).mean(1, keepdims=True)
    )
    x, g, factor, shift = (a.astype(dtype) for a in (x, g, factor, shift))
    y, found = np.full((2, *shape), np.nan, dtype)
    means, inverses = np.empty((2, shape[0]), dtype)
    by_factor, by_shift = np.full((2, size), np.nan, dtype)
    kernels.normalize_rows(x, factor, shift, y, means, inverses, 1e-3)
    kernels.normalize_rows_gradient(g, x, factor, means, inverses, found, by_factor, by_shift)
    pairs = [
        (y, normal * factor + shift),
        (means, mean[:, 0]),
        (inverses, inverse[:, 0]),
        (found, dx),
        (by_factor, (g * normal).sum(0)),
        (by_shift, g.sum(0)),
    ]
    for result, expected in pairs:
        np.testing.assert_allclose(result, expected, rtol=error, atol=10 * error)


def test_layer_normalization_of_nan_and_infinity_gives_nan_in_their_rows_alone():
    x = np.ones((3, 40), np.float32)
    x[0, 35], x[1, 2] = np.nan, np.inf
    ones, y = np.ones(40, np.float32), np.empty_like(x)
    kernels.normalize_rows(x, ones, ones, y, *np.empty((2, 3), np.float32), 1e-3)
    assert np.isnan(y[:2]).all()
    np.testing.assert_array_equal(y[2], 1)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 1), (6, 40, 33), (2, 0, 3)])
def test_moments_of_channels_and_their_gradients_equal_those_of_other_axes(shape, keepdims):
    """The kernel reduces all axes but the last. With the channels first, operations do."""
    axes = list(range(len(shape) - 1))
    x = np.random.default_rng(3).normal(2, 3, shape)
    by = np.random.default_rng(4).normal(0, 1, (2, shape[-1]))
    found = []
    for values, moved in ((x, axes), (np.moveaxis(x, -1, 0), [axis + 1 for axis in axes])):
        weight = Variable(values)
        with GradientTape() as tape, np.errstate(all="ignore"):
            moments = nn.moments(weight, moved, keepdims=keepdims)
            total = sum(
                ops.reduce_sum(ops.reshape(moment, (-1,)) * factor)
                for moment, factor in zip(moments, by, strict=True)
            )
        gradient = tape.gradient(total, weight).numpy()
        found.append([*(np.ravel(m.numpy()) for m in moments), gradient, moments[0].shape])
    assert tuple(found[0][3]) == ((1,) * len(axes) + shape[-1:] if keepdims else shape[-1:])
    for one, other in zip(found[0][:2], found[1][:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    np.testing.assert_allclose(found[0][2], np.moveaxis(found[1][2], 0, -1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(57069, 1), (2049, 1), (6341, 3), (7, 2), (65, 300)], ids=str)
def test_moments_far_from_0_are_exact_for_every_number_of_rows(shape: Any, threads: int) -> None:
    constant = np.full(shape, 10001, np.float32)
    mean, variance = np.empty(shape[1], np.float32), np.empty(shape[1], np.float32)
    kernels.batch_moments(constant, mean, variance)
    assert (mean == 10001).all() and (variance == 0).all()
    noisy = (np.random.default_rng(3).normal(size=shape) + 10000).astype(np.float32)
    kernels.batch_moments(noisy, mean, variance)
    exact = noisy.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(0), rtol=2e-7)
    np.testing.assert_allclose(variance, exact.var(0), rtol=1e-5)
