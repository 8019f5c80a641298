"""Cross-entropy and sums of squares on a GPU, by kernels that run on the host here."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective as tf

LABELS = [0, 3, 2, -1, 1, 7]


def results(values, labels):
    x = tf.Tensor(values)
    with tf.GradientTape() as tape:
        tape.watch(x)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)
        total = tf.reduce_sum(losses * losses)
    return [losses, tape.gradient(total, x)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("label", ["int8", "int32", "int64"])
@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4), (6, 300)], ids=str)
def test_cross_entropy_equals_that_of_the_host(cupy, dtype, label, shape):
    """Labels out of range give NaN on a GPU, and an error on the host."""
    logits = (np.random.default_rng(0).normal(size=shape) * 5).astype(dtype)
    logits.reshape(-1, shape[-1])[1, 2] = -np.inf
    labels = np.array(LABELS, label).reshape(shape[:-1])
    wrong = (labels < 0) | (labels >= shape[-1])
    expected = results(logits, np.where(wrong, 0, labels))
    found = results(cupy.asarray(logits), cupy.asarray(labels))
    for ours, theirs in zip(found, expected, strict=True):
        ours = ours.numpy()
        assert ours.dtype == dtype and np.isnan(ours[wrong]).all()
        np.testing.assert_allclose(ours[~wrong], theirs.numpy()[~wrong], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_sums_of_squares_and_their_gradients_equal_those_of_the_host(cupy, dtype):
    values = np.random.default_rng(0).random((3, 5)).astype(dtype)

    def computed(array):
        w = tf.Variable(tf.Tensor(array))
        with tf.GradientTape() as tape:
            penalty = tf.keras.regularizers.L2(0.1)
            total = penalty(w) * 3.0 + tf.reduce_sum(w * w) + penalty(w)
        return [total, tape.gradient(total, w)]

    for ours, theirs in zip(computed(cupy.asarray(values)), computed(values), strict=True):
        close = 1e-2 if dtype == "float16" else 1e-5
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=close)
