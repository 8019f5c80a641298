"""`IndexedSlices`: its shape, conversion to a dense tensor, and refused arguments."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective as tf
from pycollective.tensor.indexed_slices import concatenated_slices


def test_rows_of_equal_indices_add_up():
    slices = tf.IndexedSlices([[1.0, 2.0], [10.0, 20.0], [3.0, 4.0]], [2, 0, 2], [4, 2])
    assert slices.shape == (4, 2)
    dense = tf.as_tensor(slices)
    np.testing.assert_array_equal(dense.array, [[10, 20], [0, 0], [4, 6], [0, 0]])


def test_wrong_arguments_raise_value_error():
    with pytest.raises(ValueError, match="2 indices need as many rows"):
        tf.IndexedSlices([[1.0]], [0, 1])
    with pytest.raises(ValueError, match="indices must be integers in one dimension"):
        tf.IndexedSlices([[1.0]], [0.5])
    with pytest.raises(ValueError, match="without a dense_shape"):
        tf.as_tensor(tf.IndexedSlices([[1.0]], [0]))
    with pytest.raises(ValueError, match="outside the 2 rows"):
        tf.as_tensor(tf.IndexedSlices([[1.0]], [2], [2, 1]))
    for wrong in ([], [2], [2, 3], [2, 1, 1]):
        with pytest.raises(ValueError, match="does not fit rows of shape"):
            tf.IndexedSlices([[1.0]], [0], wrong)


def test_concatenated_slices_keep_the_dense_shape_of_any_part():
    without, five, seven = (
        tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([0]), shape)
        for shape in (None, (5, 1), (7, 1))
    )
    assert concatenated_slices([without, five]).dense_shape == (5, 1)
    assert concatenated_slices([five, without]).dense_shape == (5, 1)
    with pytest.raises(ValueError, match="must be alike"):
        concatenated_slices([without, five, seven])
