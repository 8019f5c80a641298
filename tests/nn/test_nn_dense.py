"""The fused product, bias and relu compared with the separate operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pycollective import _nn as kernels
from pycollective.nn import bias_add, relu
from pycollective.nn.dense import dense
from pycollective.tensor import GradientTape, Tensor, as_tensor, ops


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(5, 7, 3), (0, 4, 2), (1, 1, 1), (40, 33, 65), (300, 3600, 5)])
def test_dense_is_the_composition(shape: Any, biased: bool, activation: Any, dtype: str) -> None:
    n, inputs, units = shape
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=s).astype(dtype) for s in ((n, inputs), (inputs, units), (units,))]
    tensors = [as_tensor(a) for a in (arrays if biased else arrays[:2])]
    with GradientTape(persistent=True) as tape:
        for tensor in tensors:
            tape.watch(tensor)
        y = dense(*tensors, activation=activation)
        parts = ops.matmul(*tensors[:2])
        if biased:
            parts = bias_add(parts, tensors[2])
        if activation:
            parts = relu(parts)
    tolerance = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-13}[dtype]
    np.testing.assert_allclose(y.array, parts.array, rtol=tolerance, atol=tolerance * 10)
    g = Tensor(rng.normal(size=y.shape).astype(dtype))
    expected = tape.gradient(parts, tensors, g)
    for a, e in zip(tape.gradient(y, tensors, g), expected, strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a.array, e.array, rtol=tolerance, atol=tolerance * 10)
    for which, e in enumerate(expected):
        alone = tape.gradient(y, tensors[which], g)
        np.testing.assert_allclose(alone.array, e.array, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [64, 32, 16])
@pytest.mark.parametrize(
    "shape",
    [
        (64, 300, 64), (7, 130, 200), (65, 257, 10), (1, 1, 129), (3, 0, 4), (90, 64, 70),
        (300, 310, 300), (4, 300, 290),  # more than one block in each direction; few rows
    ],
)  # fmt: skip
def test_dense_kernels_equal_the_definition(shape: Any, width: int, threads: int) -> None:
    n, inputs, units = shape
    rng = np.random.default_rng(2)
    x, w, b, g = (
        rng.normal(size=s).astype(np.float32)
        for s in ((n, inputs), (inputs, units), (units,), (n, units))
    )
    before = kernels.limit_vector_bytes(width), kernels.threads()
    kernels.set_threads(threads)
    try:
        y = np.full(g.shape, np.nan, np.float32)
        kernels.dense_forward(x, w, b, y, True)
        results = [np.full(a.shape, np.nan, np.float32) for a in (x, w, b)]
        kernels.dense_gradient(x, w, g, y, *results)
        plain = np.empty_like(y)
        kernels.dense_forward(x, w, None, plain, False)
        dw = np.empty_like(w)
        kernels.dense_gradient(x, w, g, None, None, dw, None)
    finally:
        kernels.limit_vector_bytes(before[0])
        kernels.set_threads(before[1])
    wx, ww, wg = (a.astype(np.float64) for a in (x, w, g))
    product = wx @ ww
    dz = np.where(y > 0, wg, 0)
    pairs = [
        (plain, product),
        (y, np.maximum(product + b, 0)),
        (results[0], dz @ ww.T),
        (results[1], wx.T @ dz),
        (results[2], dz.sum(axis=0)),
        (dw, wx.T @ wg),
    ]
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=3e-6 * np.sqrt(300))


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(4, 5\)"):
        dense(np.zeros((2, 3)), np.zeros((4, 5)))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        dense(np.zeros((2, 4)), np.zeros((4, 5)), np.zeros(3))
    with pytest.raises(TypeError, match=r"float64.*float32"):
        dense(np.zeros((2, 4)), np.zeros((4, 5), np.float32))
    with pytest.raises(ValueError, match="tanh"):
        dense(np.zeros((2, 4)), np.zeros((4, 5)), activation="tanh")


@pytest.mark.parametrize("rows", [1, 7])
def test_long_sums_of_products_lose_no_digits(rows):
    """Each addition rounds, so that no million of them may follow each other."""
    x = np.full((rows, 1_000_000), 0.1, np.float32)
    y = dense(x, np.ones((1_000_000, 3), np.float32)).numpy()
    np.testing.assert_allclose(y, x[0].astype(float).sum(), rtol=2e-3)
    rng = np.random.default_rng(1)
    x, w = rng.random((rows, 100_000), np.float32), rng.random((100_000, 2), np.float32)
    np.testing.assert_allclose(dense(x, w).numpy(), x.astype(float) @ w.astype(float), rtol=4e-6)


def test_dense_without_units_has_no_elements():
    for dtype in ("float32", "float64"):
        x, w, b = np.ones((3, 2), dtype), np.ones((2, 0), dtype), np.ones(0, dtype)
        assert dense(x, w, b).shape == (3, 0)
