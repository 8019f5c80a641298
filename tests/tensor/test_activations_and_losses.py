"""`tf.nn`: activations, cross-entropies and dropout; extreme values and wrong arguments."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

import pycollective.nn as nn
import pycollective.tensor as tf
from pycollective.nn.erf import erf


@pytest.fixture(autouse=True)
def _errors_in_numpy():
    with np.errstate(all="raise"):
        yield


def test_extreme_logits_neither_overflow_nor_warn():
    with np.errstate(under="ignore"):
        x = tf.constant([[-1000.0, 0.0, 1000.0]])
        assert nn.softmax(x).numpy().tolist() == [[0, 0, 1]]
        assert nn.log_softmax(x).numpy().tolist() == [[-2000, -1000, 0]]
        assert nn.sigmoid(x).numpy().tolist() == [[0, 0.5, 1]]
        assert nn.softplus(x).numpy()[0, ::2].tolist() == [0, 1000]
        assert nn.elu(x).numpy().tolist() == [[-1, 0, 1000]]
        assert nn.silu(x).numpy().tolist() == [[0, 0, 1000]]
        loss = nn.sparse_softmax_cross_entropy_with_logits([0], x)
        assert loss.numpy().tolist() == [2000]
        loss = nn.sigmoid_cross_entropy_with_logits([[1.0, 1.0, 1.0]], x)
        np.testing.assert_allclose(loss.numpy(), [[1000, np.log(2), 0]], rtol=1e-6)


def test_l2_loss_of_integers_raises():
    with pytest.raises(TypeError, match="needs a floating-point tensor, got int32; use cast"):
        nn.l2_loss([3, 4])


def test_sparse_and_dense_cross_entropy_agree():
    x = tf.constant(np.random.default_rng(0).normal(size=(5, 4)))
    labels = np.array([0, 3, 1, 1, 2])
    sparse = nn.sparse_softmax_cross_entropy_with_logits(labels, x)
    dense = nn.softmax_cross_entropy_with_logits(tf.one_hot(labels, 4, dtype=np.float64), x)
    expected = -np.log(np.exp(x.numpy())[range(5), labels] / np.exp(x.numpy()).sum(1))
    np.testing.assert_allclose(sparse.numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(dense.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0], np.array([0, 200], np.uint8)])
def test_labels_out_of_range_raise(labels):
    wrong = next(int(n) for n in labels if not 0 <= n < 3)
    with pytest.raises(ValueError, match=rf"labels must be in 0 to 2 .* got {wrong}"):
        nn.sparse_softmax_cross_entropy_with_logits(labels, tf.zeros([2, 3]))


def test_zero_rows_give_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for op in (nn.softmax, nn.log_softmax, nn.relu):
            assert op(tf.zeros([0, 3])).shape == (0, 3)
        x = tf.Variable(tf.zeros([0, 3]))
        with tf.GradientTape() as tape:
            loss = nn.sparse_softmax_cross_entropy_with_logits(tf.zeros([0], np.int64), x)
            total = tf.reduce_sum(loss)
        assert loss.shape == (0,)
        assert tape.gradient(total, x).shape == (0, 3)


def test_wrong_shapes_and_arguments_raise():
    logits = tf.zeros([2, 3])
    for call, text in [
        (lambda: nn.sparse_softmax_cross_entropy_with_logits([[0], [1]], logits), r"\(2, 1\)"),
        (lambda: nn.sparse_softmax_cross_entropy_with_logits([0.0, 1.0], logits), "integers"),
        (lambda: nn.softmax_cross_entropy_with_logits([1.0, 0.0, 0.0], logits), r"\(3,\)"),
        (lambda: nn.sigmoid_cross_entropy_with_logits([1.0], logits), r"\(1,\)"),
        (lambda: nn.sigmoid_cross_entropy_with_logits([1], [3]), "floating-point tensors, got int"),
        (lambda: nn.normalize_batch(logits, moments=([0.0], [1.0])), "moments need 3 numbers"),
        (lambda: nn.softmax(tf.zeros([2, 0])), "has no classes"),
        (lambda: nn.softmax([[1, 2]]), "floating-point logits"),
        (lambda: nn.bias_add(logits, [1.0, 2.0]), r"bias of shape \(2,\)"),
        (lambda: nn.dropout(logits, 1.5), "from 0 to 1, got 1.5"),
        (lambda: nn.dropout(logits, 0.5, (2, 2)), r"noise_shape \(2, 2\) does not fit.*\(2, 3\)"),
        (lambda: nn.dropout(logits, 0.5, (2,)), "noise_shape"),
        (lambda: nn.normalize_batch(logits, [1.0, 2.0]), "need 3 numbers, got 2"),
        (lambda: nn.normalize_batch([[1, 2]]), "floating-point"),
        (lambda: nn.normalize_batch(1.0), "at least one axis"),
        (lambda: nn.layer_normalization(logits, [1.0]), "need 3 numbers, got 1"),
        (lambda: nn.layer_normalization([[1, 2]]), "floating-point"),
    ]:
        with pytest.raises((ValueError, TypeError), match=text):
            call()


def test_dropout_of_everything_is_zero():
    assert nn.dropout(np.array([1.0, np.inf, np.nan]), 1.0).numpy().tolist() == [0.0] * 3


def test_dropout_keeps_the_mean():
    tf.random.set_seed(0)
    x = tf.ones([200, 200])
    y = nn.dropout(x, 0.25).numpy()
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(y.mean() - 1) < 0.02
    assert nn.dropout(x, 0.0) is x


def test_exact_gelu_and_erf_equal_those_of_math():
    x = np.concatenate([np.linspace(-7, 7, 2001), [0.0, -0.0, np.inf, -np.inf, np.nan]])
    expected = [math.erf(v) for v in x]
    np.testing.assert_allclose(erf(x), expected, rtol=2e-15)
    assert erf(x.astype(np.float32)).dtype == np.float32
    values = x[np.isfinite(x)]
    gelu = [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in values]
    np.testing.assert_allclose(nn.gelu(values).numpy(), gelu, rtol=1e-13, atol=1e-15)


def test_dropout_with_a_noise_shape_repeats_its_mask():
    tf.random.set_seed(0)
    y = nn.dropout(tf.ones([50, 3, 4]), 0.5, noise_shape=(None, 1, 4)).numpy()
    assert (y == y[:, :1]).all()
    assert not (y == y[:, :, :1]).all()
    assert set(np.unique(y)) == {0.0, 2.0}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradient_of_mish_for_large_numbers_is_one(dtype):
    """The second summand of the gradient falls faster than the number grows."""
    x = tf.Variable(np.geomspace(30, 1e30, 100).astype(dtype))
    with tf.GradientTape() as tape:
        y = nn.mish(x)
    np.testing.assert_allclose(
        tape.gradient(y, x).numpy(), 1, rtol=1e-6 if dtype == np.float32 else 1e-15
    )


def test_l2_loss_of_halves_does_not_overflow_before_it_is_halved():
    assert float(nn.l2_loss(tf.fill([100], tf.constant(30.0, "float16")))) == 44992.0


def test_dropout_sets_infinities_to_zero():
    x = tf.constant([np.inf] * 64)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = nn.dropout(x, 0.5, seed=1)
    gradient = tape.gradient(y, x, tf.constant([np.inf] * 64)).numpy()
    for found in (y.numpy(), gradient):
        assert set(found.tolist()) == {0.0, np.inf}
    assert set(nn.dropout(tf.ones(4, "float16"), 0.99999, seed=3).numpy().tolist()) <= {0.0, np.inf}
