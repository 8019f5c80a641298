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
