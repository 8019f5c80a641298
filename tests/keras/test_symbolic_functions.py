"""TensorFlow's functions on symbolic tensors: a functional model calls them as layers."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective as tf

RANDOM = np.random.default_rng(2)

CASES = {
    "mean": (lambda x: tf.reduce_mean(x, axis=1), (None, 6)),
    "math": (lambda x: tf.math.reduce_max(tf.math.square(x), axis=-1, keepdims=True), (None, 4, 1)),
    "whole": (lambda x: tf.reduce_sum(x), ()),
    "joined": (lambda x: tf.concat([x, x * 2.0], axis=1), (None, 8, 6)),
    "rows joined": (lambda x: tf.concat([x, x], axis=0), (None, 4, 6)),
    "shaped": (lambda x: tf.reshape(x, (-1, 24)), (None, 24)),
    "keyword": (lambda x: tf.transpose(a=x, perm=(0, 2, 1)), (None, 6, 4)),
    "constant": (lambda x: tf.multiply(x, np.float32(3)), (None, 4, 6)),
    "integers": (lambda x: tf.cast(tf.greater(x, 0.5), tf.int64), (None, 4, 6)),
}


@pytest.mark.parametrize("name", CASES)
def test_function_of_a_symbolic_tensor_is_recorded(name, tmp_path):
    use, shape = CASES[name]
    inputs = tf.keras.Input((4, 6))
    outputs = use(inputs)
    assert outputs.shape == shape
    model = tf.keras.Model(inputs, outputs)
    for rows in (1, 5):
        x = tf.constant(RANDOM.random((rows, 4, 6), np.float32))
        expected = use(x)
        assert expected.dtype == outputs.dtype
        np.testing.assert_array_equal(model(x).numpy(), expected.numpy())
    model.save(tmp_path / "m.keras")
    loaded = tf.keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded(x).numpy(), expected.numpy())


def test_gradients_pass_through_recorded_functions():
    inputs = tf.keras.Input((4, 6))
    model = tf.keras.Model(inputs, tf.reduce_mean(tf.keras.layers.Dense(3)(inputs), axis=1))
    x = tf.constant(RANDOM.random((5, 4, 6), np.float32))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x))
    kernel, _ = tape.gradient(loss, model.trainable_variables)
    expected = np.repeat(x.numpy().mean(1).sum(0)[:, None], 3, 1)
    np.testing.assert_allclose(kernel.numpy(), expected, rtol=1e-5)


def test_wrong_shapes_raise_the_error_of_the_function():
    inputs = tf.keras.Input((4, 6))
    with pytest.raises(ValueError, match="inner lengths differ"):
        tf.matmul(inputs, inputs)
    with pytest.raises(TypeError, match="is symbolic: it has no values"):
        np.mean(inputs)


def test_file_cannot_name_other_functions():
    from pycollective.keras.graph.operators import FunctionCall

    with pytest.raises(ValueError, match="no function 'system' takes symbolic tensors"):
        FunctionCall.from_config({"name": "x", "function": "system"})
