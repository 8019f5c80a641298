"""Compiled activations beside float64 references: values, gradients, special numbers, odd sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pycollective import _nn as kernels


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def normal(x):
    return math.erfc(-x / math.sqrt(2)) / 2


def by_tanh(x):
    return math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def clip(x, low, high):
    return min(max(x, low), high)


REFERENCES = {
    "sigmoid": sigmoid,
    "tanh": math.tanh,
    "softplus": softplus,
    "silu": lambda x: x * sigmoid(x),
    "mish": lambda x: x * math.tanh(softplus(x)),
    "gelu": lambda x: x * normal(x),
    "gelu_tanh": lambda x: x * (1 + by_tanh(x)) / 2,
    "softsign": lambda x: x / (1 + abs(x)),
    "relu6": lambda x: clip(x, 0, 6),
    "hard_sigmoid": lambda x: clip(x / 6 + 0.5, 0, 1),
    "hard_silu": lambda x: x * clip(x / 6 + 0.5, 0, 1),
    "erf": math.erf,
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "selu": lambda x: 1.0507009873554805 * (x if x > 0 else 1.6732632423543772 * math.expm1(x)),
    "leaky_relu": lambda x: x,  # alpha is 1
}
#: The largest error, in units of the last place of f(x), for negative x of the larger of |x| and |f(x)|.
ULPS = 4

#: The step of the difference quotients.
STEP = 1e-6


def values_of(name, x):
    y = np.empty_like(x)
    kernels.activation(name, x, y)
    return y


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", REFERENCES)
def test_activation_values_are_within_ulps_of_the_reference(name, dtype):
    rng = np.random.default_rng(0)
    spread = np.concatenate([rng.normal(0, scale, 2001) for scale in (1e-4, 0.3, 1, 5, 40)])
    x = spread.astype(dtype)
    expected = np.array([REFERENCES[name](float(v)) for v in x])
    unit = np.spacing(np.maximum(np.abs(expected), np.abs(x) * (x < 0)).astype(dtype))
    assert (np.abs(values_of(name, x) - expected) <= ULPS * unit).all()


@pytest.mark.parametrize("name", REFERENCES)
def test_activation_gradient_is_the_derivative_times_the_upstream_gradient(name):
    x = np.random.default_rng(1).normal(0, 3, 4001)
    g = np.random.default_rng(2).normal(0, 1, 4001)
    x = x[np.min(np.abs(x[:, None] - [-3, 0, 3, 6]), axis=1) > 2 * STEP]  # not at a corner
    g, dx = g[: x.size], np.empty_like(x)
    kernels.activation_gradient(name, g, x, dx)
    f = REFERENCES[name]
    expected = np.array([(f(v + STEP) - f(v - STEP)) / (2 * STEP) for v in x]) * g
    np.testing.assert_allclose(dx, expected, rtol=1e-7, atol=1e-8)
    narrow = np.empty(x.size, np.float32)
    kernels.activation_gradient(name, g.astype(np.float32), x.astype(np.float32), narrow)
    np.testing.assert_allclose(narrow, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_activation_of_special_numbers_is_the_limit(dtype):
    x = np.array([np.nan, np.inf, -np.inf, 0.0, 1e30, -1e30], dtype)
    inf, nan = np.inf, np.nan
    expected = {
        "sigmoid": [nan, 1, 0, 0.5, 1, 0],
        "tanh": [nan, 1, -1, 0, 1, -1],
        "softplus": [nan, inf, 0, np.log(dtype(2)), dtype(1e30), 0],
        "erf": [nan, 1, -1, 0, 1, -1],
        "relu6": [nan, 6, 0, 0, 6, 0],
        "hard_sigmoid": [nan, 1, 0, 0.5, 1, 0],
        "elu": [nan, inf, -1, 0, dtype(1e30), -1],
        "leaky_relu": [nan, inf, -inf, 0, dtype(1e30), dtype(-1e30)],
    }
    for name, limits in expected.items():
        np.testing.assert_allclose(values_of(name, x), limits, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("size", [0, 1, 7, 16, 17, 33, 70001])
def test_activation_of_any_size_equals_that_of_its_parts(size):
    x = np.random.default_rng(3).normal(0, 2, size).astype(np.float32)
    alone = [values_of("gelu", x[i : i + 1])[0] for i in range(min(size, 40))]
    np.testing.assert_array_max_ulp(values_of("gelu", x)[:40], np.array(alone, np.float32), 2)


def test_activation_with_an_unknown_name_raises_value_error():
    x = np.zeros(3)
    with pytest.raises(ValueError, match="unknown activation 'swoosh'"):
        kernels.activation("swoosh", x, np.empty(3))
    with pytest.raises(ValueError, match="y"):
        kernels.activation("gelu", x, np.empty(2))


def test_alpha_scales_the_activation_of_negative_numbers():
    x, g = np.array([-2.0, -0.5, 0.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])
    results = {"elu": (0.3 * np.expm1(x), 0.3 * np.exp(x)), "leaky_relu": (0.3 * x, 0.3 + 0 * x)}
    for name, (values, slopes) in results.items():
        y, dx = np.empty(4), np.empty(4)
        kernels.activation(name, x, y, 0.3)
        kernels.activation_gradient(name, g, x, dx, 0.3)
        np.testing.assert_allclose(y, np.where(x > 0, x, values), rtol=1e-15, atol=1e-15)
        np.testing.assert_allclose(dx, g * np.where(x > 0, 1, slopes), rtol=1e-15)


@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (3, 31), (5, 32), (7, 101), (300, 333)])
def test_softmax_of_rows_equals_the_float64_reference(shape, logarithm):
    rng = np.random.default_rng(5)
    x, g = rng.normal(0, 20, shape), rng.normal(0, 1, shape)
    shifted = x - x.max(axis=1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    p = np.exp(log)
    y = log if logarithm else p
    total = (g if logarithm else g * p).sum(axis=1, keepdims=True)
    gradient = g - p * total if logarithm else p * (g - total)
    for dtype, error in ((np.float64, 1e-13), (np.float32, 1e-5)):
        found, dx = np.empty(shape, dtype), np.empty(shape, dtype)
        kernels.softmax(x.astype(dtype), found, logarithm)
        kernels.softmax_gradient(g.astype(dtype), y.astype(dtype), dx, logarithm)
        np.testing.assert_allclose(found, y, rtol=10 * error, atol=error)
        np.testing.assert_allclose(dx, gradient, rtol=error, atol=10 * error)


def test_softmax_with_special_numbers_changes_their_rows_alone():
    x = np.zeros((4, 40), np.float32)
    x[0, 35] = np.nan
    x[1, :39] = -np.inf
    x[2] = 1e30
    y, log = np.empty_like(x), np.empty_like(x)
    kernels.softmax(x, y, False)
    kernels.softmax(x, log, True)
    assert np.isnan(y[0]).all() and np.isnan(log[0]).all()
    np.testing.assert_array_equal(y[1], [0] * 39 + [1])
    np.testing.assert_array_equal(log[1], [-np.inf] * 39 + [0])
    np.testing.assert_allclose(y[2:], 1 / 40, rtol=1e-6)
