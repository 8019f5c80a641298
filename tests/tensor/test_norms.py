"""Norms of tensors, and clipping by them."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective.tensor as tf

X = np.random.default_rng(3).normal(size=(3, 4))


@pytest.mark.parametrize("axis", [None, 0, -1])
@pytest.mark.parametrize("ord", ["euclidean", 1, 2, 3.0, np.inf])
def test_norm_equals_that_of_numpy(ord, axis):
    order = 2 if ord == "euclidean" else ord
    flat = X.reshape(-1) if axis is None else X
    expected = np.linalg.norm(flat, order, 0 if axis is None else axis)
    np.testing.assert_allclose(tf.norm(X, ord, axis), expected, rtol=1e-12)
    kept = tf.norm(X, ord, axis, keepdims=True)
    assert kept.shape == {None: (1, 1), 0: (1, 4), -1: (3, 1)}[axis]


@pytest.mark.parametrize(("ord", "axis"), [("nuclear", None), (0, None), (1, (0, 1)), (-1, 0)])
def test_norm_of_another_order_raises(ord, axis):
    with pytest.raises(ValueError, match="give 'euclidean', or a positive number"):
        tf.norm(X, ord, axis)


def test_clip_by_norm_scales_only_longer_tensors():
    length = np.linalg.norm(X)
    np.testing.assert_allclose(tf.clip_by_norm(X, 1.0), X / length, rtol=1e-12)
    np.testing.assert_allclose(tf.clip_by_norm(X, 2 * length), X, rtol=1e-12)
    rows = np.linalg.norm(X, axis=1, keepdims=True)
    np.testing.assert_allclose(
        tf.clip_by_norm(X, 1.5, axes=[1]), X / rows * np.minimum(rows, 1.5), rtol=1e-12
    )
    x = tf.zeros([2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.clip_by_norm(x, 1.0)
    assert tape.gradient(y, x).numpy().tolist() == [1, 1]


def test_clip_by_global_norm_scales_all_tensors_by_one_factor():
    slices = tf.IndexedSlices(tf.constant([[3.0, 0.0]]), tf.constant([1]), [2, 2])
    given = [tf.constant([4.0]), None, slices]
    clipped, norm = tf.clip_by_global_norm(given, 1.0)
    assert float(norm) == 5 == float(tf.global_norm(given))
    assert float(clipped[0][0]) == pytest.approx(0.8) and clipped[1] is None
    np.testing.assert_allclose(clipped[2].values, [[0.6, 0.0]], rtol=1e-6)
    assert clipped[2].indices.numpy().tolist() == [1]
    same, _ = tf.clip_by_global_norm(given, 9.0)
    assert float(same[0][0]) == 4
    known, norm = tf.clip_by_global_norm([tf.constant([4.0])], 1.0, use_norm=8.0)
    assert float(known[0][0]) == 0.5 and float(norm) == 8
    endless, norm = tf.clip_by_global_norm([tf.constant([1.0, np.inf])], 1.0)
    assert np.isnan(endless[0].numpy()).all() and np.isinf(float(norm))
    assert tf.clip_by_global_norm([None], 1.0)[0] == [None] and tf.global_norm([None]) is None
    with pytest.raises(TypeError, match="should be a sequence of tensors"):
        tf.clip_by_global_norm(tf.constant([1.0]), 1.0)
