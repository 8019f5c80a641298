"""The compiled kernels of batch and layer normalization compared with formulas in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pycollective import _nn as kernels

SHAPES = [(4096, 16), (1000, 3), (7, 33), (1, 5), (0, 4), (3000, 300), (64, 1)]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let each kernel use this number of threads."""
    before = kernels.threads()
    kernels.set_threads(request.param)
    yield request.param
    kernels.set_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_kernels_equal_the_formulas(shape: Any, dtype: str, threads: int) -> None:
    rng = np.random.default_rng(5)
    rows, channels = shape
    tolerance = {"float32": 2e-6, "float64": 1e-14}[dtype]
    # Far from 0, a sum of squares would lose the variance by rounding.
    x = (rng.normal(size=shape) + 1000).astype(dtype)
    g = rng.normal(size=shape).astype(dtype)
    a, b, c = (rng.normal(size=channels).astype(dtype) for _ in range(3))
    wide, up = x.astype(np.float64), g.astype(np.float64)
    mean, variance, sums, products = (np.empty(channels, dtype) for _ in range(4))
    kernels.batch_moments(x, mean, variance)
    if rows:
        np.testing.assert_allclose(mean, wide.mean(axis=0), rtol=tolerance)
        np.testing.assert_allclose(variance, wide.var(axis=0), rtol=1e-4, atol=1e-3 * tolerance)
    else:
        assert not mean.any() and not variance.any()
    y, dx = np.empty_like(x), np.empty_like(x)
    distance = wide - mean
    kernels.batch_scale(x, mean, a, b, y)
    np.testing.assert_allclose(y, distance * a + b, atol=10 * tolerance)
    kernels.batch_sums(g, x, mean, sums, products)
    scale = 10 * tolerance * (1 + np.sqrt(rows))
    np.testing.assert_allclose(sums, up.sum(axis=0), atol=scale)
    np.testing.assert_allclose(products, (up * distance).sum(axis=0), atol=scale)
    kernels.batch_combine(g, x, mean, a, b, c, dx)
    np.testing.assert_allclose(dx, up * a + distance * b + c, atol=20 * tolerance)
    # With relu, elements that the result shows as clipped do not count.
    kernels.batch_scale(x, mean, a, b, y)
    cut = up * (y > 0)
    kernels.batch_scale(x, mean, a, b, y, True)
    np.testing.assert_allclose(y, np.maximum(distance * a + b, 0), atol=10 * tolerance)
    kernels.batch_sums(g, x, mean, sums, products, a, b)
    np.testing.assert_allclose(sums, cut.sum(axis=0), atol=scale)
    np.testing.assert_allclose(products, (cut * distance).sum(axis=0), atol=scale)
    kernels.batch_combine(g, x, mean, c, b, a, dx, a, b)
    np.testing.assert_allclose(dx, cut * c + distance * b + a, atol=20 * tolerance)


def test_kernels_check_their_arrays() -> None:
    x = np.zeros((4, 3), np.float32)
    three, two = np.zeros(3, np.float32), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="variance has shape"):
        kernels.batch_moments(x, three, two)
    with pytest.raises(ValueError, match="whole number of blocks"):
        kernels.batch_moments(np.zeros(5, np.float32), two, two.copy())
    with pytest.raises(ValueError, match="at least one channel"):
        kernels.batch_moments(x, two[:0], two[:0])
    with pytest.raises(ValueError, match="go together"):
        kernels.batch_sums(x, x, three, three.copy(), three.copy(), three)
    with pytest.raises(ValueError, match="dtype float64"):
        kernels.batch_scale(x, three, three.astype(float), three, x.copy())


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
