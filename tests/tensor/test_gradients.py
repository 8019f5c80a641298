"""Every differentiable operation compared with finite differences in float64."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
from gradient_cases import CASES, gradients_of, numbers, weighted

import pycollective.tensor as tf
from pycollective import nn
from pycollective.tensor.ops._define import DIFFERENTIABLE

FLAT = [
    pytest.param(op, arrays, id=f"{name}-{i}")
    for name, cases in CASES.items()
    for i, (op, arrays) in enumerate(cases)
]


def test_every_differentiable_operation_has_a_case():
    # Convolution and pooling have their own tests.
    assert set(CASES) == {name for name in DIFFERENTIABLE if "2d" not in name}


@pytest.mark.parametrize(("op", "arrays"), FLAT)
def test_gradient_is_that_of_finite_differences(op, arrays):
    _, gradients = gradients_of(op, arrays)
    step = 1e-6
    for k, (array, gradient) in enumerate(zip(arrays, gradients, strict=True)):
        expected = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            ends = []
            for sign in (1, -1):
                moved = [np.array(a) for a in arrays]
                moved[k][place] += sign * step
                ends.append(float(weighted(op, moved)[1]))
            expected[place] = (ends[0] - ends[1]) / (2 * step)
        assert gradient.shape == array.shape
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=2e-7, atol=2e-8)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("op", "arrays"), [case for case in FLAT if not case.id.startswith("cast")]
)
def test_dtype_is_kept(op, arrays, dtype):
    outputs, gradients = gradients_of(op, [a.astype(dtype) for a in arrays])
    assert {t.dtype.name for t in [*outputs, *gradients]} == {dtype}


@pytest.mark.parametrize("name", ["reduce_sum", "reduce_mean"])
def test_reduction_of_no_elements_gives_no_warnings(name):
    x = tf.Variable(np.zeros((0, 3), np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tf.GradientTape() as tape:
            y = getattr(tf, name)(x)
        gradient = tape.gradient(y, x)
    assert gradient.shape == (0, 3)
    assert np.isnan(float(y)) == (name == "reduce_mean")


def test_equal_largest_elements_share_the_gradient():
    x = tf.constant([1.0, 3.0, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_max(x)
    assert tape.gradient(y, x).numpy().tolist() == [0.0, 0.5, 0.5]


def test_cast_carries_gradients_between_floating_dtypes():
    x = tf.constant([1.5, 2.5])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.cast(x, np.float64) * np.array([2.0, 3.0]))
    gradient = tape.gradient(y, x)
    assert gradient.dtype == np.float32
    assert gradient.numpy().tolist() == [2.0, 3.0]


def test_shuffle_has_its_gradient():
    x = tf.constant(numbers(5))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.random.shuffle(x)
        total = tf.reduce_sum(y * y * y)
    np.testing.assert_allclose(tape.gradient(total, x).numpy(), 3 * x.numpy() ** 2)


def test_penalties_are_added_to_other_gradients() -> None:
    from pycollective.nn.losses import sum_of_squares

    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    weight = tf.Variable(values)
    with tf.GradientTape(persistent=True) as tape:
        once = sum_of_squares(weight, 0.5)
        twice = once + sum_of_squares(weight, 2.0)
        first = tf.ops.reduce_sum(weight) + twice
        last = twice + tf.ops.reduce_sum(weight * weight)
    for target, expected in (
        (once, values),
        (twice, 5 * values),
        (first, 5 * values + 1),
        (last, 7 * values),
    ):
        for _ in range(2):
            found = tape.gradient(target, weight).numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(weight.numpy(), values)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(50, 3), (2000, 3, 5), (7,)])
def test_gradient_of_gather_has_the_rows_alone_and_their_sums(shape, dtype):
    table = tf.Variable(np.ones(shape, dtype))
    index = np.random.default_rng(1).integers(0, shape[0], (4, 9))
    weights = np.random.default_rng(2).normal(size=(4, 9, *shape[1:])).astype(dtype)
    with tf.GradientTape(persistent=True) as tape:
        rows = tf.gather(table, index)
        once = tf.reduce_sum(rows * weights)
        twice = once + tf.reduce_sum(tf.gather(table, [0, 0]))
        mixed = twice + tf.reduce_sum(table * 2.0)
    expected = np.zeros(shape)
    np.add.at(expected, index.reshape(-1), weights.reshape(36, *shape[1:]).astype(float))
    close = {"atol": 0.02 if dtype is np.float16 else 1e-5}
    for total, count in ((once, 36), (twice, 38)):
        slices = tape.gradient(total, table)
        assert isinstance(slices, tf.IndexedSlices) and slices.dtype == dtype
        assert slices.values.shape == (count, *shape[1:]) and tuple(slices.shape) == shape
        np.testing.assert_allclose(tf.convert_to_tensor(slices).numpy(), expected, **close)
        expected[0] += 2
    expected[0] -= 2
    np.testing.assert_allclose(tape.gradient(mixed, table).numpy(), expected + 2, **close)


def test_gradient_of_gather_of_no_rows_is_zero():
    table = tf.Variable(np.ones((5, 2), np.float32))
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(tf.gather(table, np.zeros(0, np.int32)))
    found = tape.gradient(total, table)
    assert not np.any(tf.convert_to_tensor(found).numpy())


@pytest.mark.parametrize("size", [1, 1 << 16])  # NumPy, and a kernel
@pytest.mark.parametrize("op", [tf.maximum, tf.minimum])
@pytest.mark.parametrize("operands", [(np.nan, 2), (2, np.nan), (np.nan, np.nan)])
def test_gradient_beside_nan_goes_to_the_second_operand(op, operands, size):
    x, y = (tf.Variable(np.full(size, each, np.float32)) for each in operands)
    with tf.GradientTape() as tape:
        z = op(x, y)
    by_x, by_y = tape.gradient(z, [x, y])
    assert not by_x.numpy().any() and by_y.numpy().all()
    assert np.isnan(z.numpy()).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_slope_of_selu_at_0_is_that_of_positive_numbers(dtype):
    x = tf.Variable(np.array([0, -0.0, 1], dtype))
    with tf.GradientTape() as tape:
        y = nn.selu(x)
    np.testing.assert_allclose(tape.gradient(y, x).numpy(), 1.0507009873554805, rtol=1e-3)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (5, 7, 3), (0, 4, 2), (3, 0, 2), (3, 4, 0), (300, 3600, 5), (40, 33, 65)]
)
def test_matmul_in_float32_and_its_gradients_equal_those_in_float64(sizes, order):
    """Matrices in C order have kernels, but not those with many rows and elements."""
    rows, inner, columns = sizes
    rng = np.random.default_rng(6)
    factors = [rng.normal(size=shape) for shape in ((rows, inner), (inner, columns))]
    upstream = rng.normal(size=(rows, columns))
    tensors = [tf.constant(np.asarray(factor, np.float32, order=order)) for factor in factors]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(tensors)
        y = tf.matmul(*tensors)
    np.testing.assert_allclose(y.numpy(), factors[0] @ factors[1], rtol=1e-4, atol=1e-3)
    expected = [upstream @ factors[1].T, factors[0].T @ upstream]
    g = tf.constant(upstream.astype(np.float32))
    for tensor, exact in zip(tensors, expected, strict=True):
        alone = tape.gradient(y, tensor, output_gradients=g)
        np.testing.assert_allclose(alone.numpy(), exact, rtol=1e-4, atol=1e-3)
    for found, exact in zip(tape.gradient(y, tensors, g), expected, strict=True):
        assert found.shape == exact.shape
        np.testing.assert_allclose(found.numpy(), exact, rtol=1e-4, atol=1e-3)


def test_gradient_of_a_scalar_in_an_l2_loss_and_a_product():
    v = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = v * 3.0 + 0.2 * nn.l2_loss(v) + v * v
    assert float(tape.gradient(y, v)) == pytest.approx(3.0 + 0.4 + 4.0)


@pytest.mark.parametrize("index", [True, np.True_])
def test_gradient_of_an_index_that_is_a_bool(index):
    x = tf.ones(3)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x[index] * 2.0
    assert tape.gradient(y, x).numpy().tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("function", "value", "dtype"),
    [
        (nn.silu, 3000.0, "float16"),
        (nn.silu, 300.0, "bfloat16"),
        (lambda x: nn.gelu(x, True), 1e3, "float16"),
        (lambda x: nn.gelu(x, True), 1e3, "bfloat16"),
    ],
)
def test_gradient_of_a_large_half_through_an_activation_is_one(function, value, dtype):
    x = tf.constant([value], dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    assert float(tape.gradient(y, x)[0]) == 1.0


def test_custom_gradient_takes_a_partial():
    def times(factor, x):
        return x * factor, lambda dy: dy * factor

    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.custom_gradient(functools.partial(times, 3.0))(x)
    assert (float(y), float(tape.gradient(y, x))) == (6.0, 3.0)
