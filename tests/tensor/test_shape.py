"""`TensorShape`: TensorFlow's methods on a tuple."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest

import pycollective as tf
from pycollective import nest

S = tf.TensorShape
UNKNOWN = S(None)


def test_shape_of_tensor_and_variable_is_a_tensor_shape():
    for x in (tf.zeros([2, 3]), tf.Variable(np.zeros((2, 3)))):
        shape = x.shape
        assert type(shape) is type(tf.convert_to_tensor(x).get_shape()) is S
        assert shape == (2, 3) and shape == [2, 3] and shape == S([2, 3])
        assert shape != (2, 4) and shape != [2] and shape != S([2, None])
        assert (shape.rank, shape.ndims, shape.as_list(), shape.dims) == (2, 2, [2, 3], [2, 3])
        assert shape.num_elements() == 6
        assert isinstance(shape, tuple)
        assert np.zeros(shape).shape == np.zeros(shape[:1] + shape[1:]).shape == (2, 3)
        rows, columns = shape
        assert (rows, columns, shape[-1], len(shape)) == (2, 3, 3, 2)
    assert tf.constant(1.0).shape.rank == 0
    assert tf.reshape(tf.zeros([6]), x.shape).shape == (2, 3)
    assert tf.zeros(x.shape).shape == tf.ones(S([2, 3])).shape == x.shape


def test_shape_is_made_of_lists_numbers_and_shapes():
    assert S((2, None)) == S([2, None]) == (2, None)
    assert S(5) == (5,)
    assert S([np.int64(2), tf.constant(3)]) == (2, 3)
    assert S(S([1, 2])) == (1, 2)
    assert S(S(None)) == UNKNOWN
    with pytest.raises(ValueError, match="Dimension -1 must be >= 0"):
        S([2, -1])
    with pytest.raises(TypeError):
        S([2.5])


def test_text_of_a_shape_is_that_of_tensorflow():
    assert [str(S(x)) for x in ([], [2], [2, None], None)] == [
        "()",
        "(2,)",
        "(2, None)",
        "<unknown>",
    ]
    assert repr(S([2, None])) == "TensorShape([2, None])"
    assert repr(UNKNOWN) == "TensorShape(None)"
    assert f"{S([2, 3])} {S([2, 3]):>8}" == "(2, 3)   (2, 3)"


def test_shape_is_true_if_its_rank_is_known():
    assert S([])
    assert tf.constant(1.0).shape
    assert not UNKNOWN


def test_slices_and_sums_are_shapes():
    shape, a_tuple, a_list = S([2, None, 4]), (7,), [7]
    for found in (shape[1:], shape[:2] + shape[2:], a_tuple + shape, a_list + shape):
        assert type(found) is S
    assert shape[1:] == (None, 4)
    assert shape + a_tuple == shape + a_list == shape.concatenate(7) == (2, None, 4, 7)
    assert a_tuple + shape == a_list + shape == (7, 2, None, 4)
    assert shape + UNKNOWN == UNKNOWN
    assert (UNKNOWN[0], UNKNOWN[:2], UNKNOWN[1:]) == (None, (None, None), UNKNOWN)


def test_shape_of_unknown_rank_has_no_lengths():
    assert (UNKNOWN.rank, UNKNOWN.ndims, UNKNOWN.dims, UNKNOWN.num_elements()) == (None,) * 4
    assert not UNKNOWN.is_fully_defined()
    assert UNKNOWN not in (S([]), ())
    with pytest.raises(ValueError, match=r"as_list\(\) is not defined on an unknown TensorShape"):
        UNKNOWN.as_list()
    for call in (len, list):
        with pytest.raises(ValueError, match="unknown rank"):
            call(UNKNOWN)


def test_merge_of_two_shapes_has_their_common_lengths():
    one, two = S([2, None]), S([None, 3])
    assert one.merge_with(two) == (2, 3)
    assert one.merge_with(None) == UNKNOWN.merge_with(one) == one
    assert one.most_specific_compatible_shape(two) == (None, None)
    assert one.most_specific_compatible_shape([2, 5]) == (2, None)
    assert one.most_specific_compatible_shape([2]) == UNKNOWN
    assert one.is_compatible_with(two) and one.is_compatible_with(UNKNOWN)
    assert one.is_compatible_with((2, 7))
    for other in ([3, None], [2], [2, 3, 4]):
        assert not one.is_compatible_with(other)
        with pytest.raises(ValueError, match="are not compatible"):
            one.merge_with(other)
        with pytest.raises(ValueError, match="are incompatible"):
            one.assert_is_compatible_with(other)
    one.assert_is_compatible_with([2, 3])


def test_shape_of_another_rank_than_required_raises():
    shape = S([2, None])
    assert shape.with_rank(2) == shape.with_rank_at_least(1) == shape.with_rank_at_most(2) == shape
    assert UNKNOWN.with_rank(2) == (None, None)
    shape.assert_has_rank(2)
    shape.assert_same_rank([1, 1])
    for call, message in (
        (lambda: shape.with_rank(1), r"Shape \(2, None\) must have rank 1"),
        (lambda: shape.with_rank_at_least(3), r"Shape \(2, None\) must have rank at least 3"),
        (lambda: shape.with_rank_at_most(1), r"Shape \(2, None\) must have rank at most 1"),
        (lambda: shape.assert_has_rank(3), "must have rank 3"),
        (lambda: shape.assert_same_rank([1]), "must have the same rank"),
        (shape.assert_is_fully_defined, r"Shape \(2, None\) is not fully defined"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_copies_pickles_and_json_of_shapes_are_equal():
    for shape in (S([]), S([2, None]), UNKNOWN):
        for copied in (pickle.loads(pickle.dumps(shape)), copy.deepcopy(shape), copy.copy(shape)):
            assert type(copied) is S
            assert copied == shape
    assert json.dumps(S([2, None])) == "[2, null]"
    assert {S([2, 3]): 1}[(2, 3)] == 1


def test_shape_is_one_value_in_structures_and_elements():
    assert nest.flatten({"a": S([2, 3]), "b": (1, 2)}) == [(2, 3), 1, 2]
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])

    def lengths():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.zeros([int(replica) + 1]).shape

    assert strategy.run(lengths).values == ((1,), (2,))
    dataset = tf.data.Dataset.from_tensors(np.zeros((2, 3))).map(lambda x: x.shape)
    assert [x.numpy().tolist() for x in dataset] == [[2, 3]]
    assert tf.TensorSpec(S([2, None])) == tf.TensorSpec((2, None))
    assert tf.TensorSpec(UNKNOWN) == tf.TensorSpec(None)
    assert tf.constant([1, 2]).shape.as_list() == [2]
    slices = tf.IndexedSlices(tf.zeros([2, 3]), tf.constant([0, 1]))
    assert slices.shape.as_list() == [None, 3]


def test_newaxis_adds_an_axis():
    assert "newaxis" in dir(tf)
    assert tf.zeros([2])[:, tf.newaxis].shape == (2, 1)
    assert tf.zeros([2])[tf.newaxis, ..., tf.newaxis].shape == (1, 2, 1)


def test_bool_is_a_dtype():
    assert tf.bool == np.bool_ and "bool" in dir(tf)
    assert tf.cast(tf.constant([0.0, 2.0]), tf.bool).numpy().tolist() == [False, True]


def test_sum_of_a_shape_and_minus_one_is_a_tuple():
    x = tf.zeros([2, 3])
    a_tuple, a_list = (-1,), [-1]
    for found in (a_tuple + x.shape[1:], a_list + x.shape[1:]):
        assert type(found) is tuple
        assert tf.reshape(x, found).shape == (2, 3)
    assert tf.reshape(x, x.shape[:1] + a_tuple).shape == (2, 3)


def test_shape_of_a_spec_is_a_tensor_shape():
    spec = tf.data.Dataset.range(3).batch(2).element_spec
    assert type(spec.shape) is S
    assert (spec.shape.as_list(), spec.shape.rank) == ([None], 1)
    assert repr(spec) == "TensorSpec(shape=(None,), dtype=dtype('int64'), name=None)"
    assert spec.is_compatible_with(tf.zeros([7], tf.int64))
    assert not spec.is_compatible_with(tf.zeros([7]))
    assert not spec.is_compatible_with(tf.zeros([7, 1], tf.int64))
    assert spec.is_compatible_with(tf.TensorSpec(None, tf.int64))
    assert tf.TensorSpec(None).is_compatible_with(tf.zeros([1, 2]))
    assert tf.TensorSpec.from_tensor(tf.zeros([2])) == tf.TensorSpec([2])
