"""Half precision of every layer from float32 variables, within rounding errors."""

from __future__ import annotations

import numpy as np
import pytest
from test_zero_rows import INPUTS, RANDOM, exported, fitting, make

import pycollective as tf
from pycollective import keras
from pycollective.keras import layers

#: The rounding error of each policy: half a unit in the last place.
PRECISION = {"mixed_float16": 2.0**-11, "mixed_bfloat16": 2.0**-8}


@pytest.mark.parametrize("policy", PRECISION)
@pytest.mark.parametrize("cls", exported(layers, layers.Layer), ids=lambda c: c.__name__)
def test_layer_half_precision_is_accurate(cls, policy):
    if policy.endswith("bfloat16"):
        pytest.importorskip("ml_dtypes")

    def rows(shape):
        if isinstance(shape, list):
            return [rows(one) for one in shape]
        return tf.Tensor(np.float32(RANDOM.integers(1, 9, (3, *shape)) / 8))

    def result(dtype, x):
        keras.utils.set_random_seed(1)
        layer = make(cls, dtype=dtype)
        layer(x)
        keras.utils.set_random_seed(2)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            total = tf.reduce_sum(tf.cast(y, "float32") * 0.125)
        sources = [*(x if isinstance(x, list) else [x]), *layer.trainable_variables]
        slopes = tape.gradient(total, sources)
        return layer, y, [g if g is None else tf.convert_to_tensor(g) for g in slopes]

    def use(shape):
        y = make(cls, dtype="float32")(rows(shape))
        if isinstance(y, list) or len(y) != 3:
            raise ValueError("the list was not taken for several inputs")

    for shape in fitting(INPUTS, use):
        x = rows(shape)
        _, expected, slopes = result("float32", x)
        half, found, others = result(policy, x)
        assert found.dtype == half.compute_dtype == policy.removeprefix("mixed_")
        assert {str(v.dtype) for v in half.trainable_variables} <= {"float32"}
        close = {"rtol": 16 * PRECISION[policy], "atol": 16 * PRECISION[policy]}
        np.testing.assert_allclose(np.float32(found.numpy()), expected.numpy(), **close)
        for a, b in zip(others, slopes, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == np.float32
                size = np.abs(b.numpy()).max(initial=1)
                np.testing.assert_allclose(a.numpy() / size, b.numpy() / size, **close)


def gradient_of(variable, function):
    with tf.GradientTape() as tape:
        result = function(variable)
    return np.asarray(tf.convert_to_tensor(tape.gradient(result, variable)), np.float64)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: tf.reduce_sum(x), 5000),
        (lambda x: tf.reduce_sum(tf.reshape(x, [5000, 1]), axis=0), 5000),
        (lambda x: tf.reduce_mean(100 * x), 100),
        (lambda x: tf.reduce_mean(tf.broadcast_to(100 * x, [40, 5000])), 100),
        (lambda x: tf.nn.avg_pool2d(tf.reshape(x, [1, 50, 100, 1]), 50)[0, 0, :, 0], 1),
        (lambda x: 5000 * tf.reduce_max(tf.nn.softmax(x)), 1),
        (lambda x: 5000 * tf.reduce_max(tf.nn.softmax(tf.reshape(x, [5000, 1]), axis=0)), 1),
        (lambda x: -tf.reduce_max(tf.nn.log_softmax(x)), np.log(5000)),
        (lambda x: tf.nn.softmax_cross_entropy_with_logits(x / 5000, x), np.log(5000)),
        (lambda x: gradient_of(tf.Variable(x[0]), lambda v: tf.reduce_sum(v * x)), 5000),
        (lambda x: gradient_of(tf.Variable(x[:1]), lambda v: tf.tile(v, [5000])), 5000),
        (lambda x: gradient_of(tf.Variable(x[:1]), lambda v: tf.gather(v, [0] * 5000)), 5000),
        (lambda x: gradient_of(tf.Variable(x[:1]), lambda v: v[tf.zeros([5000], tf.int32)]), 5000),
        (
            lambda x: tf.convert_to_tensor(tf.IndexedSlices(x, tf.zeros([5000], tf.int32), [1])),
            5000,
        ),
        (
            lambda x: gradient_of(
                tf.Variable(x[:1]), lambda v: tf.nn.bias_add(tf.reshape(0 * x, [-1, 1]), v)
            ),
            5000,
        ),
        (
            lambda x: 5000 * tf.reduce_max(gradient_of(tf.Variable(x), tf.reduce_max)),
            1,
        ),
        (
            lambda x: (
                8e4
                * gradient_of(
                    tf.Variable(x[0]), lambda v: tf.reduce_mean(tf.pad([v], [[0, 79_999]]))
                )
            ),
            1,
        ),
    ],
)
def test_sums_of_many_halves_keep_small_summands(function, expected, dtype):
    found = np.asarray(function(tf.ones([5000], dtype)), np.float64)
    np.testing.assert_allclose(found, expected, rtol=2.0**-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "make_layer",
    [
        lambda dtype: layers.Dense(2, dtype=dtype),
        lambda dtype: layers.Conv2DTranspose(2, 1, dtype=dtype),
        lambda dtype: layers.DepthwiseConv2D(1, dtype=dtype),
    ],
)
def test_layer_bias_gradient_of_many_rows_is_their_number(make_layer, dtype):
    layer = make_layer(dtype)
    images = tf.cast(tf.zeros([5, 40, 40, 3]), dtype)
    layer(images)
    with tf.GradientTape() as tape:
        result = layer(images)
    (gradient,) = tape.gradient(result, [layer.bias])
    np.testing.assert_allclose(np.asarray(gradient, np.float64), 8000, rtol=2.0**-7)
