"""Compiled operations on elements and reductions compared with float64 references."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pycollective import _nn as kernels
from pycollective.tensor import GradientTape, Variable, ops
from pycollective.tensor.compiled import reduced


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
    "relu": lambda x: max(x, 0.0),
    "exp": math.exp,
    "log": math.log,
    "log1p": math.log1p,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "square": lambda x: x * x,
    "abs": abs,
    "negative": lambda x: -x,
    "sin": math.sin,
    "cos": math.cos,
}
#: The number above which a function is tested; the other functions are tested for all numbers.
ABOVE = {"log": 0, "log1p": -1, "sqrt": 0, "rsqrt": 0, "reciprocal": 0}
#: The largest error in units in the last place of f(x). For negative x, the units are those of the
#: larger of |x| and |f(x)|.
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
    x = x[x > ABOVE.get(name, -np.inf)]
    expected = np.array([REFERENCES[name](float(v)) for v in x])
    fits = np.abs(expected) < np.finfo(dtype).max
    x, expected = x[fits], expected[fits]
    unit = np.spacing(np.maximum(np.abs(expected), np.abs(x) * (x < 0)).astype(dtype))
    assert (np.abs(values_of(name, x) - expected) <= ULPS * unit).all()


@pytest.mark.parametrize("name", REFERENCES)
def test_activation_gradient_is_the_derivative_times_the_upstream_gradient(name):
    x = np.random.default_rng(1).normal(0, 3, 4001)
    g = np.random.default_rng(2).normal(0, 1, 4001)
    x = x[np.min(np.abs(x[:, None] - [-3, 0, 3, 6]), axis=1) > 2 * STEP]  # not at a corner
    x = x[x > ABOVE.get(name, -np.inf) + 0.1]
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
        "relu": [nan, inf, 0, 0, dtype(1e30), 0],
        "log": [nan, inf, nan, -inf, np.log(dtype(1e30)), nan],
        "log1p": [nan, inf, nan, 0, np.log(dtype(1e30)), nan],
        "sqrt": [nan, inf, nan, 0, np.sqrt(dtype(1e30)), nan],
        "abs": [nan, inf, inf, 0, dtype(1e30), dtype(1e30)],
        "reciprocal": [nan, 0, 0, inf, dtype(1e-30), dtype(-1e-30)],
        "sin": [nan, nan, nan, 0, math.sin(dtype(1e30)), -math.sin(dtype(1e30))],
        "cos": [nan, nan, nan, 1, math.cos(dtype(1e30)), math.cos(dtype(1e30))],
    }
    for name, limits in expected.items():
        np.testing.assert_allclose(values_of(name, x), limits, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_of_subnormal_numbers_and_of_minus_one_has_the_right_exponent(dtype):
    least = np.finfo(dtype).smallest_subnormal
    x = np.array([least, 5 * least, np.finfo(dtype).tiny / 3, np.finfo(dtype).max], dtype)
    np.testing.assert_allclose(
        values_of("log", x), [math.log(float(v)) for v in x], rtol=4 * np.finfo(dtype).eps
    )
    np.testing.assert_array_equal(
        values_of("log1p", np.array([-1, least], dtype)), [-np.inf, least]
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_circular_functions_near_their_zeros_and_far_away_are_within_two_ulps(name, dtype):
    zeros = np.concatenate([np.arange(-640, 640) * (np.pi / 2), 10.0 ** np.arange(1, 9)])
    x = np.concatenate([zeros, np.linspace(-1000, 1000, 10007), [1e3, 1e6, 1e20]]).astype(dtype)
    expected = np.array([getattr(math, name)(float(v)) for v in x])
    unit = np.spacing(np.abs(expected).astype(dtype))
    assert (np.abs(values_of(name, x) - expected) <= 2 * unit).all()
    g, dx = np.full_like(x, 2), np.empty_like(x)
    kernels.activation_gradient(name, g, x, dx)
    other = [math.cos(float(v)) if name == "sin" else -math.sin(float(v)) for v in x]
    np.testing.assert_allclose(dx, 2 * np.array(other), rtol=4 * np.finfo(dtype).eps)


# Two operands: the result, and the factors of its gradient for x and y.
BINARIES = {
    "add": (lambda x, y: x + y, lambda x, y: (1, 1)),
    "add_relu": (
        lambda x, y: np.where(x + y < 0, x.dtype.type(0), x + y),
        lambda x, y: (x + y > 0, x + y > 0),
    ),
    "subtract": (lambda x, y: x - y, lambda x, y: (1, -1)),
    "multiply": (lambda x, y: x * y, lambda x, y: (y, x)),
    "divide": (lambda x, y: x / y, lambda x, y: (1 / y, -x / y / y)),
    "maximum": (np.maximum, lambda x, y: (x >= y, ~(x >= y))),
    "minimum": (np.minimum, lambda x, y: (x <= y, ~(x <= y))),
    "mod": (np.remainder, lambda x, y: (1, -np.floor(x / y))),
    "squared_difference": (lambda x, y: (x - y) ** 2, lambda x, y: (2 * (x - y), 2 * (y - x))),
    "prelu": (
        lambda x, y: np.where(x < 0, x * y, x),
        lambda x, y: (np.where(x > 0, 1, np.where(x < 0, y, 0)), np.where(x < 0, x, 0)),
    ),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shapes", [((5, 7), (5, 7)), ((300, 333), (333,)), ((4097, 3), (3,)),
                                    ((), (70001,)), ((9, 700), ()), ((0, 3), (3,)),
                                    ((2, 3), (6000, 2, 3))], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", BINARIES)
def test_operation_of_two_operands_equals_the_reference(name, shapes, dtype):
    rng = np.random.default_rng(4)
    x, y = (rng.normal(0, 2, shape).astype(dtype) for shape in shapes)
    for a, numbers in ((x, [np.nan, np.inf]), (y, [1, np.inf, np.nan, 0])):
        if a.size > 5:
            a.flat[[1, 3, 4, 5][: len(numbers)]] = numbers
    values, factors = BINARIES[name]
    with np.errstate(all="ignore"):
        expected = np.asarray(values(x, y))
        z = np.empty_like(expected)
        kernels.binary(name, x, y, z)
        np.testing.assert_array_equal(z, expected)
        g = rng.normal(0, 1, z.shape).astype(dtype)
        dx, dy = np.empty_like(g), np.empty_like(g)
        kernels.binary_gradient(name, g, x, y, dx, dy)
        wide = factors(np.asarray(x, np.float64), np.asarray(y, np.float64))
        for found, factor in zip((dx, dy), wide, strict=True):
            theirs = np.where(factor, g, 0) if np.asarray(factor).dtype == bool else g * factor
            np.testing.assert_allclose(found, theirs.astype(dtype), rtol=1e-5, atol=1e-6)
        only = np.empty_like(dy)
        kernels.binary_gradient(name, g, x, y, None, only)
        np.testing.assert_array_equal(only, dy)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_extremum_of_zeros_of_both_signs_is_the_first_operand(name):
    x = np.tile(np.array([0.0, -0.0], np.float32), 20)
    z = np.empty_like(x)
    kernels.binary(name, x, -x, z)
    np.testing.assert_array_equal(np.signbit(z), np.signbit(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_mod_of_operands_of_any_magnitude_equals_the_reference(dtype):
    rng = np.random.default_rng(5)
    x, y = (rng.normal(0, 1, 40000).astype(dtype) for _ in range(2))
    x[:10000] = np.round(50 * x[:10000]) * y[:10000]
    x[10000:20000] *= (2.0 ** rng.integers(20, 36, 10000)).astype(dtype)
    smallest = np.finfo(dtype).smallest_subnormal
    x[20000:20300], y[20000:20300] = 7 * smallest, -3 * smallest
    x[30000], y[31000] = np.finfo(dtype).max, np.finfo(dtype).tiny
    z = np.empty_like(x)
    kernels.binary("mod", x, y, z)
    np.testing.assert_array_equal(z, np.remainder(x, y))
    np.testing.assert_array_equal(np.signbit(z), np.signbit(np.remainder(x, y)))


def test_operation_with_an_operand_that_does_not_repeat_raises_value_error():
    with pytest.raises(ValueError, match=r"y of shape \(4,\) does not repeat to 6 elements"):
        kernels.binary("add", np.zeros(6), np.zeros(4), np.zeros(6))
    with pytest.raises(ValueError, match="unknown operation 'sum'"):
        kernels.binary("sum", np.zeros(6), np.zeros(6), np.zeros(6))
    with pytest.raises(ValueError, match="unknown reduction 'mean'"):
        kernels.reduce("mean", np.zeros(6), np.zeros(2), 2, 3, 1)


# outer, count, inner
REDUCED = [(1, 1, 1), (3, 5, 7), (1, 100003, 1), (2, 70001, 3), (5, 1, 300), (1, 700, 257),
           (400, 300, 2), (1, 3, 50000), (7, 129, 256), (301, 127, 1), (9000, 8, 1), (3, 5001, 1),
           (2, 135, 2049), (1, 1000003, 1)]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", REDUCED, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_reduction_of_any_axis_equals_the_reference(threads, sizes, dtype):
    x = np.random.default_rng(6).normal(1, 1, sizes).astype(dtype)
    before = kernels.threads()
    kernels.set_threads(threads)
    try:
        y = np.empty((sizes[0], sizes[2]), dtype)
        kernels.reduce("sum", x, y, *sizes)
        close = 40 * np.finfo(dtype).eps * math.sqrt(sizes[1])
        np.testing.assert_allclose(y, x.sum(axis=1, dtype=np.float64), rtol=close, atol=close)
        near = np.exp(np.float64(1e-3) * (x - 1)).astype(dtype)
        kernels.reduce("prod", near, y, *sizes)
        np.testing.assert_allclose(y, near.prod(axis=1, dtype=np.float64), rtol=10 * close)
        x[0, -1, 0], x[-1, 0, -1] = np.nan, np.inf
        for name in ("max", "min"):
            kernels.reduce(name, x, y, *sizes)
            np.testing.assert_array_equal(y, getattr(x, name)(axis=1))
    finally:
        kernels.set_threads(before)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sizes", REDUCED, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_gradient_of_an_extremum_is_shared_by_equal_elements(threads, sizes, dtype):
    rng = np.random.default_rng(9)
    x = rng.integers(0, 4 * sizes[1], sizes).astype(dtype)  # with and without ties
    g = rng.normal(1, 1, (sizes[0], sizes[2])).astype(dtype)
    before = kernels.threads()
    kernels.set_threads(threads)
    try:
        for special in (0, np.inf, np.nan):
            x[-1, sizes[1] // 2, -1] = special
            top, dx = x.max(axis=1), np.full_like(x, 7)
            kernels.extremum_gradient(x, top, g, dx, *sizes)
            hits = (x == top[:, None]).astype(dtype)
            with np.errstate(all="ignore"):
                expected = hits * (g / hits.sum(axis=1, dtype=dtype))[:, None]
            np.testing.assert_array_equal(dx, expected)
    finally:
        kernels.set_threads(before)
    with pytest.raises(ValueError, match="sizes must be at least 1"):
        kernels.extremum_gradient(x, top, g, dx, sizes[0], 0, sizes[2])


@pytest.mark.parametrize("axes", [(0,), (1, 2), (0, 2), (0, 1, 2), (2,)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_gradient_of_an_extremum_over_several_axes_equals_numpy(axes, keepdims):
    x = np.random.default_rng(10).integers(0, 50, (30, 41, 17)).astype(np.float32)
    weight = Variable(x)
    with GradientTape() as tape:
        top = ops.reduce_min(weight, axis=axes, keepdims=keepdims)
    hits = x == x.min(axis=axes, keepdims=True)
    expected = hits / hits.sum(axis=axes, keepdims=True).astype(np.float32)
    np.testing.assert_array_equal(tape.gradient(top, weight), expected)


@pytest.mark.parametrize("sizes", REDUCED, ids=str)
def test_reduction_with_other_numbers_of_threads_gives_the_same_bits(sizes):
    x = np.random.default_rng(8).normal(0, 1, sizes).astype(np.float32)
    before = kernels.threads()
    results = []
    try:
        for threads in (1, 2, 5):
            kernels.set_threads(threads)
            results.append(np.empty((sizes[0], sizes[2]), np.float32))
            kernels.reduce("sum", x, results[-1], *sizes)
    finally:
        kernels.set_threads(before)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("axes", [(0,), (3,), (1, 2), (0, 2), (0, 1, 3), (0, 1, 2, 3), ()])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reduction_over_several_axes_equals_numpy(axes, keepdims):
    x = np.random.default_rng(7).normal(0, 1, (6, 5, 41, 17))
    for array in (x, x.transpose(2, 0, 3, 1), x[:0]):
        found = reduced("sum", array, axes, keepdims)
        expected = array.sum(axis=axes, keepdims=keepdims)
        assert np.shape(found) == np.shape(expected)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("bounds", [(-0.5, 0.75), (0, 0), (1, -1), (-np.inf, 0.25), (0, np.nan)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("size", [12, 40_003])
def test_clip_by_numbers_equals_clip_by_tensors_and_its_gradient(size, dtype, bounds):
    """Numbers as bounds have a kernel. With tensors, the operation is a minimum of a maximum."""
    x = np.random.default_rng(11).normal(0, 1, size).astype(dtype)
    x[:7] = np.nan, np.inf, -np.inf, -0.5, 0.75, 0, -0.0
    found = []
    for low, high in (bounds, (ops.cast(b, dtype) for b in bounds)):
        weight = Variable(x)
        with GradientTape() as tape:
            y = ops.clip_by_value(weight, low, high)
        weights = np.arange(1, size + 1).astype(dtype)
        found.append((y.numpy(), tape.gradient(y, weight, output_gradients=weights).numpy()))
    assert found[0][0].dtype == found[0][1].dtype == dtype
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tanh_keeps_the_sign_of_zero(dtype):
    x = np.array([0.0, -0.0] * 20, dtype)
    y = np.empty_like(x)
    kernels.activation("tanh", x, y)
    np.testing.assert_array_equal(np.signbit(y), np.signbit(x))
    assert not y.any()
