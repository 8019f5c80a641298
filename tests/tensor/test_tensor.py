"""`Tensor`: conversion, dtypes, operators, and functions of tensors."""

from __future__ import annotations

import array
import copy
import inspect
import pickle

import ml_dtypes
import numpy as np
import pytest

import pycollective
import pycollective.dtypes as dtypes
import pycollective.tensor as tf
from pycollective import math, nn


def test_tensors_work_as_in_tutorials():
    total_loss, num_batches = 0.0, 0
    for k in range(3):
        total_loss += tf.reduce_mean(tf.constant([1.0, 2.0]) * float(k))
        num_batches += 1
    train_loss = total_loss / num_batches
    assert train_loss.dtype == dtypes.float32
    assert f"Loss: {train_loss:.3f}, {train_loss}" == "Loss: 1.500, 1.5"
    assert float(train_loss) == 1.5
    assert train_loss.numpy() == np.float32(1.5)
    assert isinstance(train_loss.numpy(), np.float32)
    x = tf.constant([[1.0], [2.0]])
    assert x.shape[0] == len(x) == int(tf.shape(x)[0]) == 2
    assert tf.cast(tf.shape(x)[0], dtypes.float32) * 2.0 == 4.0
    assert tf.reshape(x, [tf.shape(x)[1], -1]).shape == (1, 2)
    assert [row.numpy().tolist() for row in x] == [[1.0], [2.0]]
    assert bool(tf.reduce_all(x > 0.0))
    assert [5, 6, 7][tf.argmax(tf.constant([0, 3, 1]))] == 6
    assert list(range(tf.constant(2))) == [0, 1]
    assert "%.2f" % train_loss == "1.50"  # noqa: UP031


def test_an_empty_list_has_any_dtype():
    assert tf.constant([], "int32").dtype == dtypes.int32
    assert tf.constant([[]], "float16").shape == (1, 0)
    assert tf.IndexedSlices(np.zeros((0, 2)), tf.constant([], "int64")).indices.shape == (0,)


def test_repr_and_str_are_those_of_tensorflow():
    x = tf.constant([[1.0, 2.0]])
    assert repr(x) == (
        "<tf.Tensor: shape=(1, 2), dtype=float32, numpy=array([[1., 2.]], dtype=float32)>"
    )
    assert str(x) == "tf.Tensor([[1. 2.]], shape=(1, 2), dtype=float32)"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.5, "float32"),
        (1, "int32"),
        (2**40, "int64"),
        (True, "bool"),
        ([1, 2], "int32"),
        ([1, 2.5], "float32"),
        ([], "float32"),
        ([[True]], "bool"),
        (np.float64(1), "float64"),
        ([np.float64(1)], "float64"),
        (np.zeros(2), "float64"),
        (np.int8(1), "int8"),
        (np.zeros(2, ml_dtypes.bfloat16), "bfloat16"),
        ([np.float32(1), 2.0], "float32"),
        ([[np.int64(1)], [2]], "int32"),
        ([np.float16(1)], "float16"),
        (range(3), "int32"),
    ],
)
def test_constant_has_the_dtype_of_its_values(value, dtype):
    assert tf.constant(value).dtype.name == dtype


def test_values_that_cannot_be_tensors_raise():
    for value, text in [
        (None, "None cannot"),
        ("abc", "str with dtype"),
        ([1, "a"], "list with dtype"),
        (object(), "object"),
        (1j, "complex"),
    ]:
        with pytest.raises(TypeError, match=text):
            tf.constant(value)
    with pytest.raises((ValueError, Warning), match=r"inhomogeneous|ragged"):
        tf.constant([[1.0], [2.0, 3.0]])
    with pytest.raises(TypeError, match=r"Tensor\(\) takes a NumPy or CuPy array, got list"):
        tf.Tensor([1.0])


def test_conversion_to_a_dtype_loses_nothing_or_raises():
    assert tf.constant([1, 2], dtypes.float32).dtype == np.float32
    assert tf.constant(np.ones(2), "float16").dtype == np.float16
    assert tf.constant(1.0, dtypes.bfloat16).dtype == ml_dtypes.bfloat16
    with pytest.raises(TypeError, match=r"1.5 of dtype float64 .* dtype int32 without loss"):
        tf.constant(1.5, np.int32)
    with pytest.raises(ValueError, match="300 does not fit dtype uint8, which holds 0 to 255"):
        tf.constant(300, np.uint8)
    with pytest.raises(
        TypeError, match=r"dtype float32 was given where float64 is needed; use cas"
    ):
        tf.convert_to_tensor(tf.constant(1.0), np.float64)
    with pytest.raises(TypeError, match="'float33' is not a dtype"):
        tf.constant(1.0, "float33")


def test_constant_copies_and_convert_to_tensor_shares():
    array = np.zeros(2)
    copied, shared = tf.constant(array), tf.convert_to_tensor(array)
    array[0] = 1
    assert copied.numpy()[0] == 0
    assert shared.numpy()[0] == 1


def test_constant_with_shape_repeats_or_reshapes_values():
    assert tf.constant(1.0, shape=(2, 2)).numpy().tolist() == [[1, 1], [1, 1]]
    assert tf.constant([1, 2, 3, 4], shape=(2, 2)).numpy().tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match=r"shape \(3,\) does not fit shape \(2, 2\)"):
        tf.constant([1, 2, 3], shape=(2, 2))


def test_scalars_take_the_dtype_of_the_other_operand():
    half = tf.constant([1.0], np.float16)
    for other in (2, 2.0, np.float64(2), np.int64(2), [2.0]):
        for result in (half * other, other * half, half / other, half**other):
            assert isinstance(result, tf.Tensor)
            assert result.dtype == np.float16
    brain = tf.constant([1.0], dtypes.bfloat16)
    assert (brain * 3.0 + 1).dtype == dtypes.bfloat16
    assert (tf.constant([1], np.uint8) + 1).dtype == np.uint8
    assert tf.add(1, 2).dtype == np.int32
    assert tf.add(1, [2.5]).dtype == np.float32
    assert tf.add(1.0, [2, 3]).dtype == np.float32
    assert (tf.constant([1, 2]) / 2).numpy().tolist() == [0.5, 1.0]


def test_scalar_that_does_not_fit_the_other_operand_raises():
    with pytest.raises(TypeError, match=r"0.5 of dtype float64 .* int32"):
        tf.constant([1]) * 0.5
    with pytest.raises(ValueError, match="300 does not fit dtype uint8"):
        tf.constant([1], np.uint8) + 300
    with pytest.raises(TypeError, match="different dtypes, float32 and bool"):
        tf.constant([1.0]) * True


OPERATIONS = [
    lambda a, b: a + b,
    lambda a, b: b - a,
    lambda a, b: a == b,
    lambda a, b: tf.maximum(a, b),
    lambda a, b: tf.matmul(a, b),
    lambda a, b: tf.concat([a, b], 0),
    lambda a, b: tf.stack([a, b]),
    lambda a, b: tf.where(a.numpy() > 0, a, b),
    lambda a, b: tf.add_n([a, b]),
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_tensors_of_different_dtypes_do_not_mix(operation):
    a = tf.constant([[1.0]])
    for b in (tf.constant([[1]]), tf.constant(np.ones((1, 1)))):
        with pytest.raises(TypeError, match=r"different dtypes, .*float32.*; use cast\(\)"):
            operation(a, b)


def test_arrays_defer_to_tensors_and_keep_their_dtype():
    array = np.array([1.0, 2.0], np.float32)
    result = array - tf.constant([1.0, 1.0])
    assert isinstance(result, tf.Tensor)
    assert result.numpy().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("make", [tf.constant, tf.Variable])
def test_numpy_arrays_take_the_dtype_of_a_tensor_as_in_tensorflow(make):
    x = make([1.0, 2.0])
    for given in (np.array([1.0, 2.0]), np.array([1, 2]), np.array([1, 2], np.uint8)):
        for result in (x - given, given - x, tf.maximum(x, given), tf.stack([x, given])[0] - x):
            assert isinstance(result, tf.Tensor)
            assert result.dtype == np.float32
        assert (x - given).numpy().tolist() == [0.0, 0.0]
        assert (x == given).numpy().all()
    assert tf.matmul(tf.constant([[1.0, 2.0]]), np.ones((2, 1))).numpy().tolist() == [[3.0]]
    assert tf.equal(tf.argmax([[1, 2]], 1), np.array([1], np.int32)).numpy().all()
    with pytest.raises(TypeError, match="different dtypes, int32 and float64"):
        make([1, 2]) + np.array([0.5, 1.0])
    with pytest.raises(ValueError, match="does not fit dtype int32"):
        make([1, 2]) + np.array([2**40, 1])


def test_concat_of_one_tensor_is_the_tensor():
    for x in (tf.ones([2, 3]), tf.Variable(np.ones((2, 3))), np.ones((2, 3))):
        assert tf.concat(x, -1).shape == (2, 3)


def test_fill_has_the_gradient_of_its_value():
    v = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.fill([2, 2], v) * 2.0)
    assert float(y) == 24.0
    assert float(tape.gradient(y, v)) == 8.0
    assert tf.fill([2], 7).numpy().tolist() == [7, 7]
    with pytest.raises(ValueError, match="scalar"):
        tf.fill([2], [1, 2])


def test_hints_and_names_of_dtypes():
    assert tf.convert_to_tensor(3, dtype_hint=np.float32).dtype == np.float32
    assert tf.convert_to_tensor(0.5, dtype_hint=np.int32).dtype == np.float32
    assert tf.cast(1, "float").dtype == np.float32
    assert tf.where([1.0, 0.0, -2.0]).numpy().tolist() == [[0], [2]]


def test_arithmetic_follows_python_operators():
    a, b = tf.constant([7, -7]), tf.constant([2, 2])
    assert (a // b).numpy().tolist() == [3, -4]
    assert (a % b).numpy().tolist() == [1, 1]
    assert (10 // b).numpy().tolist() == [5, 5]
    assert (2**b).numpy().tolist() == [4, 4]
    assert (-a).numpy().tolist() == [-7, 7]
    assert (+a).numpy().tolist() == [7, -7]
    assert abs(a).numpy().tolist() == [7, 7]
    yes, no = tf.constant([True, True]), tf.constant([True, False])
    assert (yes & ~no).numpy().tolist() == [False, True]
    assert (yes ^ no).numpy().tolist() == [False, True]
    assert (no | no).numpy().tolist() == [True, False]
    with pytest.raises(ZeroDivisionError, match="floordiv: integer division by zero"):
        a // tf.constant([1, 0])
    with pytest.raises(ZeroDivisionError, match="mod"):
        a % 0
    with pytest.raises(ValueError, match="negative powers"):
        a**-1
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        a + tf.constant([1, 2, 3])
    with pytest.raises(TypeError, match="exp needs a floating-point tensor, got int32"):
        tf.exp(a)


def test_comparison_with_none_is_a_bool_and_hash_is_of_the_object():
    x = tf.constant([1.0, 2.0])
    assert (x == None) is False  # noqa: E711
    assert (x != None) is True  # noqa: E711
    assert (x != 1.0).numpy().tolist() == [False, True]
    assert {x: "a"}[x] == "a"


def test_only_one_element_becomes_a_number():
    x = tf.constant([1.0, 2.0])
    for convert in (float, int, bool):
        with pytest.raises(ValueError, match=r"only a tensor with one element .* shape \(2,\)"):
            convert(x)
        with pytest.raises(ValueError, match=r"shape \(0,\)"):
            convert(tf.constant([]))
    assert int(tf.constant([[3.7]])) == 3
    with pytest.raises(TypeError, match="only an integer tensor"):
        [1, 2][tf.constant(1.0)]
    with pytest.raises(TypeError, match="no length"):
        len(tf.constant(1.0))
    with pytest.raises(TypeError, match="no length"):
        list(tf.constant(1.0))


def test_numpy_views_are_read_only():
    x = tf.constant([1.0, 2.0])
    for view in (x.numpy(), np.asarray(x)):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    assert np.shares_memory(x.numpy(), x.array)
    assert x.array.flags.writeable
    fresh = np.array(x)
    fresh[0] = 5
    assert x.numpy()[0] == 1.0
    assert np.asarray(x, np.float64).dtype == np.float64
    assert np.mean(x) == 1.5


def test_copies_are_tensors_of_their_own():
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        twin = pickle.loads(pickle.dumps(x))
        other = copy.deepcopy(x)
        y = tf.reduce_sum(twin * other * x)
    assert tape.gradient(y, x).numpy().tolist() == [1.0, 4.0]


def test_indexing_follows_numpy():
    x = tf.constant(np.arange(12).reshape(3, 4))
    assert x[1, -1] == 7
    assert x[tf.constant(1) :, tf.constant(0)].numpy().tolist() == [4, 8]
    assert x[..., tf.newaxis].shape == (3, 4, 1)
    assert x[[0, 2]].shape == (2, 4)
    assert x[x > 8].numpy().tolist() == [9, 10, 11]
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        x[3]


def test_objects_with_the_tensor_method_are_converted():
    inner = tf.constant([1.0, 2.0])

    class PerReplica:
        def __tensor__(self):
            return inner

    assert tf.as_tensor(PerReplica()) is inner
    assert (inner + PerReplica()).numpy().tolist() == [2.0, 4.0]
    assert tf.reduce_sum([PerReplica(), inner]).numpy() == 6.0


def test_created_tensors_have_their_shapes_and_dtypes():
    assert tf.zeros([2, tf.constant(3)]).shape == (2, 3)
    assert tf.ones(3, np.int32).numpy().tolist() == [1, 1, 1]
    assert tf.fill([2], 5.0).numpy().tolist() == [5, 5]
    assert tf.zeros_like([1, 2]).dtype == np.int32
    assert tf.ones_like(tf.constant([1, 2]), dtype="float32").dtype == np.float32
    assert tf.range(3).numpy().tolist() == [0, 1, 2]
    assert tf.range(3).dtype == np.int32
    assert tf.range(1.0, 2.0, 0.5).numpy().tolist() == [1.0, 1.5]
    assert tf.range(1.0, 2.0, 0.5).dtype == np.float32
    assert tf.eye(2).numpy().tolist() == [[1, 0], [0, 1]]
    assert tf.one_hot([0, 2, 5], 3).numpy().tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert tf.one_hot([[1]], 2, axis=0).shape == (2, 1, 1)
    assert tf.size([[1, 2]]) == 2
    assert tf.rank([[1, 2]]) == 2
    assert tf.cast([1.9, -1.9], np.int32).numpy().tolist() == [1, -1]
    with pytest.raises(ValueError, match=r"zeros: shape \(-1,\)"):
        tf.zeros([-1])
    with pytest.raises(ValueError, match="delta must not be 0"):
        tf.range(0, 3, 0)


def test_operators_of_integers_work_on_bits():
    x, y = tf.constant([5, 6]), tf.constant([3, 3])
    assert (x & y).numpy().tolist() == [1, 2] and (x & 1).dtype == np.int32
    assert (x | y).numpy().tolist() == [7, 7]
    assert (x ^ 3).numpy().tolist() == [6, 5]
    assert (~x).numpy().tolist() == [-6, -7]
    flags = tf.constant([True, False])
    assert (flags ^ True).numpy().tolist() == (~flags).numpy().tolist() == [False, True]
    for call in (lambda: x & tf.ones([2]), lambda: tf.ones([2]) | 1.0, lambda: ~tf.ones([2])):
        with pytest.raises(
            TypeError, match="different dtypes|needs bools or integers, got float32"
        ):
            call()


def test_results_of_integers_have_the_dtypes_of_tensorflow():
    assert tf.round([1, 2]).dtype == np.int32
    small = tf.constant([7, 1], np.int8)
    assert (small / tf.constant([2, 2], np.int8)).dtype == np.float32
    assert (tf.constant([7]) / 2).dtype == np.float64
    assert tf.one_hot([0, 1], 2, on_value=True, off_value=False).dtype == np.bool_
    assert tf.one_hot([0, 1], 2, on_value=5, off_value=2).numpy().tolist() == [[5, 2], [2, 5]]
    assert tf.one_hot([0], 2).dtype == np.float32
    with pytest.raises(TypeError, match="on_value is int32 and off_value is float32"):
        tf.one_hot([0], 2, on_value=1, off_value=0.5)


def test_lists_beside_lists_with_tensors_take_their_dtype():
    x = tf.constant(3, np.int64)
    assert tf.concat([[x], [7]], 0).dtype == np.int64
    assert tf.stack([[1.0, 2.0], [tf.constant(3.0, np.float64), 4.0]]).dtype == np.float64


@pytest.mark.parametrize("reduce", [tf.reduce_sum, tf.reduce_mean, tf.reduce_prod])
def test_sums_of_bools_raise(reduce):
    with pytest.raises(TypeError, match="reduce_.* needs numbers, got bool; use cast"):
        reduce([True, False])


def test_error_texts_name_the_values():
    x = tf.constant(np.zeros((2, 3), np.float32))
    for call, text in [
        (lambda: tf.reduce_sum(x, 2), r"reduce_sum: axis 2 is out of range for a tensor with 2"),
        (lambda: tf.reduce_mean(x, [0, -2]), "names an axis twice"),
        (lambda: tf.argmax(tf.zeros([0])), "no elements"),
        (lambda: tf.matmul(x, x), r"inner lengths differ, shapes are \(2, 3\) and \(2, 3\)"),
        (lambda: x @ tf.constant([1.0, 2.0, 3.0]), r"at least two axes.*\(3,\)"),
        (lambda: tf.tensordot(x, x, 1), "do not fit"),
        (lambda: tf.reshape(x, [4, 2]), r"shape \(2, 3\) has 6 elements .* \(4, 2\)"),
        (lambda: tf.squeeze(x, 0), "does not have length 1"),
        (lambda: tf.transpose(x, [0]), "does not name every axis"),
        (lambda: tf.concat([x, tf.zeros([2, 2])], 0), "differ besides axis 0"),
        (lambda: tf.stack([x, tf.zeros([2, 2])]), "differ"),
        (lambda: tf.add_n([]), "at least one"),
        (lambda: tf.split(x, 2, axis=1), "cannot be cut into 2 equal parts"),
        (lambda: tf.pad(x, [[1, 1]]), "pair"),
        (lambda: tf.gather(x, [2]), r"indices from 2 to 2 are not all in 0 to 1"),
        (
            lambda: tf.gather([x, x], [[0], [2]], batch_dims=1),
            r"indices from 0 to 2 are not all in 0 to 1, axis 1 of shape \(2, 2, 3\)",
        ),
        (lambda: tf.gather(x, [[0.5], [1.0]], batch_dims=1), "integer indices, got float32"),
        (lambda: tf.gather(x, [[0], [2]], axis=0, batch_dims=1), "batch_dims 1 and axis 0 do not"),
        (
            lambda: tf.gather(x, [0, 1, 1], batch_dims=1),
            r"do not fit the shapes \(2, 3\) and \(3,\)",
        ),
        (lambda: tf.matmul(x, x, transpose_a=True, adjoint_a=True), "excludes its transpose"),
        (lambda: tf.where([1, 0], x, x), "needs a bool condition, got dtype int32"),
        (lambda: tf.gather(x, [0.5]), "integer indices"),
    ]:
        with pytest.raises((ValueError, TypeError, IndexError), match=text):
            call()


@pytest.mark.parametrize(
    ("shape", "target", "result"),
    [
        ([0, 4, 2], [-1, 8], (0, 8)),
        ([0, 4, 2], [0, -1], (0, 8)),
        ([0, 4, 2], [-1, 0], (8, 0)),
        ([0, 4, 2], [2, -1, 0], (2, 4, 0)),
        ([0], [0, -1], (0, 1)),
    ],
)
def test_reshape_without_elements_finds_the_length_of_tensorflow(shape, target, result):
    """A step function for a replica without rows calls ``reshape(x, [tf.shape(x)[0], -1])``."""
    x = tf.Variable(np.zeros(shape, np.float32))
    with tf.GradientTape() as tape:
        y = tf.reshape(x, target)
    assert y.shape == result
    assert tape.gradient(y, x).shape == x.shape


def test_extrema_of_no_elements_are_those_of_tensorflow():
    x = tf.Variable(np.zeros((2, 0), np.float32))
    with tf.GradientTape() as tape:
        y = tf.reduce_max(x, axis=1, keepdims=True)
    assert y.numpy().tolist() == [[-np.inf], [-np.inf]]
    assert tape.gradient(y, x).shape == (2, 0)
    assert tf.reduce_min(tf.zeros([0, 2], np.float16), axis=0).numpy().tolist() == [np.inf] * 2
    assert tf.reduce_max(tf.zeros([0], np.int32)) == np.iinfo(np.int32).min
    assert tf.reduce_min(tf.zeros([0], np.uint8)) == 255
    assert tf.reduce_max(tf.zeros([0, 0]), axis=0).shape == (0,)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", ["sqrt", "rsqrt", "reciprocal"])
def test_gradient_is_zero_where_the_upstream_gradient_is(name, dtype):
    """The slope at 0 is infinite. A masked loss gives it the gradient 0, and the product is NaN."""
    x = tf.Variable(np.tile(np.array([0.0, 4.0], dtype), 40))
    with tf.GradientTape() as tape, np.errstate(all="ignore"):
        y = tf.reduce_sum(tf.where(x > 0.0, getattr(tf, name)(x), tf.zeros_like(x)))
    gradient = tape.gradient(y, x).numpy().reshape(-1, 2)
    slope = {"sqrt": 0.25, "rsqrt": -0.0625, "reciprocal": -0.0625}[name]
    assert (gradient == [0.0, slope]).all()


def test_gradient_of_sign_is_zero_and_not_none():
    x = tf.Variable([0.0, -2.0])
    with tf.GradientTape() as tape:
        y = tf.sign(x)
    assert y.numpy().tolist() == [0.0, -1.0]
    assert tape.gradient(y, x).numpy().tolist() == [0.0, 0.0]
    assert tf.sign(tf.constant([-3, 5])).dtype == np.int32


def test_reductions_have_the_values_and_dtypes_of_tensorflow():
    x = tf.constant([[1, 2], [3, 4]])
    assert tf.reduce_mean(x, axis=0).numpy().tolist() == [2, 3]
    assert tf.reduce_mean(x).dtype == np.int32
    assert tf.reduce_mean(tf.constant([-1, -2])) == -1  # as in TensorFlow
    assert tf.reduce_mean(tf.constant([[250], [4]], np.uint8), 0).numpy().tolist() == [127]
    assert tf.reduce_mean(tf.ones([300], np.int8)) == 1
    assert tf.reduce_mean(tf.constant([2**31 - 1, 2**31 - 1])) == 2**31 - 1
    assert tf.reduce_prod(x) == 24
    assert tf.reduce_sum(tf.constant([200, 100], np.uint8)).dtype == np.uint8
    assert tf.reduce_any(x > 3)
    assert not tf.reduce_all(x > 3)
    assert tf.argmin(x, axis=1).numpy().tolist() == [0, 0]
    assert tf.where(tf.constant([False, True])).numpy().tolist() == [[1]]
    assert tf.argmax(x, output_type=np.int32).dtype == np.int32
    assert [t.numpy() for t in tf.unstack(tf.constant([1, 2]))] == [1, 2]
    assert tf.sign([-2.0, 0.0]).numpy().tolist() == [-1, 0]
    assert tf.floor([-1.5]).numpy().tolist() == [-2]
    assert tf.round([2.5, 3.5]).numpy().tolist() == [2, 4]
    assert tf.logical_not([True]).numpy().tolist() == [False]


# function ----------------------------------------------------------------------------------------


def test_function_decorator_keeps_results_and_attributes():
    def plain(x, *, y=1):
        """Doc."""
        return x + y

    plain.note = "kept"
    for decorated in (tf.function(plain), tf.function(jit_compile=True)(plain)):
        assert decorated(1, y=2) == 3
        assert (decorated.__name__, decorated.__doc__, decorated.note) == ("plain", "Doc.", "kept")
        assert decorated.python_function is plain

    class Model:
        @tf.function
        def call(self, x):
            return self, x

    model = Model()
    assert model.call(1) == (model, 1)
    with pytest.raises(TypeError, match="decorates a callable, got 3"):
        tf.function(3)
    with pytest.raises(TypeError, match="unknown"):
        tf.function(unknown=1)


# random ------------------------------------------------------------------------------------------


def draws():
    return [
        tf.random.normal([3]).numpy().tolist(),
        tf.random.uniform([2], 1, 5, dtype=np.int32).numpy().tolist(),
        tf.random.normal([2], seed=3).numpy().tolist(),
        tf.random.normal([2], seed=3).numpy().tolist(),
        tf.random.shuffle(tf.range(10)).numpy().tolist(),
        [g.random() for g in tf.random.spawn(2)],
    ]


def test_spawning_leaves_the_default_numbers_as_they_are():
    tf.random.set_seed(5)
    plain = tf.random.normal([3]).numpy().tolist()
    tf.random.set_seed(5)
    a, b = tf.random.spawn(2)
    assert tf.random.normal([3]).numpy().tolist() == plain
    assert a.random() != b.random() != tf.random.spawn(1)[0].random()


def test_equal_seeds_give_equal_numbers():
    tf.random.set_seed(5)
    first = draws()
    tf.random.set_seed(5)
    assert draws() == first
    assert first[2] != first[3]
    tf.random.set_seed(6)
    assert draws() != first
    with tf.random.generator_scope(np.random.default_rng(1)):
        drawn = tf.random.normal([3]).numpy()
    with tf.random.generator_scope(np.random.default_rng(1)):
        assert (tf.random.normal([3]).numpy() == drawn).all()


def test_random_numbers_have_their_shapes_types_and_limits():
    tf.random.set_seed(0)
    x = tf.random.normal([1000, 10], mean=3.0, stddev=2.0, dtype=np.float64)
    assert x.dtype == np.float64
    assert abs(float(tf.reduce_mean(x)) - 3) < 0.1
    assert float(tf.reduce_max(abs(tf.random.truncated_normal([10000], 1.0, 2.0) - 1.0))) <= 4.0
    u = tf.random.uniform([20000], -1, 1, dtype=np.float16).numpy()
    assert u.dtype == np.float16
    assert u.min() >= -1 and u.max() < 1
    assert tf.random.normal([]).shape == ()
    assert tf.random.uniform([]).shape == ()
    with pytest.raises(ValueError, match="need a maxval"):
        tf.random.uniform([2], dtype=np.int32)
    with pytest.raises(TypeError, match="normal makes floating-point numbers, got dtype int32"):
        tf.random.normal([2], dtype=np.int32)


@pytest.mark.parametrize("name", math.__all__)
def test_math_has_the_operation_of_the_shorter_path(name):
    """``tf.math.exp`` is ``tf.exp``; names that TensorFlow has in `tf.math` alone are listed here."""
    longer = {"floormod": tf.mod, "truediv": tf.divide}
    longer |= {name: getattr(nn, name) for name in ("softmax", "log_softmax", "softplus")}
    # Both functions take symbolic tensors too.
    assert getattr(math, name).__wrapped__ is (longer.get(name) or getattr(tf, name))
    if name not in longer:
        assert getattr(math, name) is getattr(pycollective, name)


def test_an_array_in_another_byte_order_becomes_a_tensor_of_this_machine():
    """Kernels and NumPy give the same sums, with few elements and with many."""
    for count in (3, 100_000):
        swapped = np.arange(count).astype(np.dtype(np.float32).newbyteorder())
        x = tf.convert_to_tensor(swapped)
        assert x.dtype == np.float32 and x.dtype.isnative
        assert np.array_equal((x + x).numpy(), 2 * np.arange(count, dtype=np.float32))
        assert float(tf.reduce_max(x)) == count - 1


@pytest.mark.parametrize("parts", [2, np.int64(2), tf.constant(2)], ids=repr)
def test_split_takes_the_number_of_parts_of_any_integer_type(parts):
    assert [part.shape for part in tf.split(tf.ones(4), parts)] == [(2,), (2,)]


def test_range_of_floats_ends_below_the_limit_and_keeps_float64():
    np.testing.assert_allclose(tf.range(0.0, 0.3, 0.1).numpy(), [0, 0.1, 0.2], rtol=1e-6)
    assert tf.range(0, 1, 0.1, dtype="float64").numpy()[1] == 0.1
    assert tf.range(1.0, 0.0, -0.25).numpy().tolist() == [1.0, 0.75, 0.5, 0.25]
    assert tf.range(2.0, 1.0).shape == (0,)


def test_constant_copies_a_buffer():
    numbers = array.array("f", [1, 2])
    value, viewed = tf.constant(numbers), tf.constant(memoryview(numbers))
    numbers[0] = 9
    assert value.numpy().tolist() == viewed.numpy().tolist() == [1, 2]


def test_comparison_of_shapes_that_do_not_broadcast_is_false():
    two, three = tf.constant([1, 2]), tf.constant([1, 2, 3])
    assert not bool(two.__eq__(three))
    assert bool(two != three)
    assert tf.Variable([1.0, 2.0]) not in [tf.Variable([1.0, 2.0, 3.0])]
    with pytest.raises(ValueError, match="broadcast"):
        tf.equal(two, three)


def test_negative_seeds_give_numbers_that_can_be_repeated():
    found = []
    for _ in range(2):
        tf.random.set_seed(-1)
        found.append([tf.random.uniform([3], seed=-3).numpy(), tf.random.uniform([3]).numpy()])
    np.testing.assert_array_equal(found[0], found[1])
    tf.random.set_seed(None)


def test_uniform_with_bounds_in_reverse_order_is_between_them():
    numbers = tf.random.uniform([99], 1.0, 0.0).numpy()
    assert len(set(numbers.tolist())) > 50 and numbers.min() >= 0 and numbers.max() <= 1


def test_gather_with_batch_dims_uses_the_indices_of_each_place():
    x = np.arange(120).reshape(2, 3, 4, 5)
    index = np.array([[2, 0], [1, 1]])
    rows = np.stack([x[n][index[n]] for n in range(2)])
    assert tf.gather(x, index, batch_dims=1).numpy().tolist() == rows.tolist()
    columns = np.stack([x[n][:, :, index[n]] for n in range(2)])
    assert tf.gather(x, index, axis=-1, batch_dims=1).numpy().tolist() == columns.tolist()
    one_each = tf.gather(x, index[:, 0], batch_dims=1)
    assert one_each.numpy().tolist() == [x[0, 2].tolist(), x[1, 1].tolist()]
    last = tf.gather(x[0, 0, :2], index, batch_dims=-1)  # the axis is -1, too
    assert last.numpy().tolist() == np.take_along_axis(x[0, 0, :2], index, 1).tolist()


def test_arguments_of_tensorflow_without_an_effect_or_with_a_default_are_accepted():
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    assert tf.eye(2, batch_shape=[3], name="i").shape == (3, 2, 2)
    assert [part.shape for part in tf.split(x, [1, 1], num=2)] == [(1, 2)] * 2
    assert tf.transpose(x, conjugate=True).numpy().tolist() == [[1, 3], [2, 4]]
    images = tf.zeros([1, 3, 2, 2])
    shifted = nn.bias_add(images, [1.0, 2.0, 3.0], data_format="NCHW").numpy()
    assert shifted[0, :, 1, 1].tolist() == [1, 2, 3]
    variable = tf.Variable(1.0)
    assert float(variable.assign(2.0, False, "name", True)) == 2
    with pytest.raises(ValueError, match="data_format is 'NCHW'.* transpose"):
        nn.max_pool2d(images, 2, data_format="NCHW")


def test_operations_accept_a_name_and_ignore_it():
    for name in math.__all__:
        assert "name" in inspect.signature(getattr(math, name)).parameters, name
    x = tf.constant([1.0, 4.0])
    assert tf.sqrt(x, name="root").numpy().tolist() == [1, 2]
    assert tf.add(x, x, "sum").numpy().tolist() == [2, 8]
    assert bool(tf.reduce_all(tf.equal(x, x, name="same"), name="all"))
    assert nn.relu(x - 2, name="relu").numpy().tolist() == [0, 2]
    numbers = pycollective.data.Dataset.range(4).map(lambda x: x + 1, name="next")
    batch = next(iter(numbers.batch(4, name="all").take(1, name="first")))
    assert batch.numpy().tolist() == [1, 2, 3, 4]


def test_wrong_shapes_and_indices_are_invalid_arguments():
    """TensorFlow's programs catch this class. The errors are Python's as well."""
    ones = tf.ones([2, 3])
    variable = tf.Variable(ones)
    for call, kind in (
        (lambda: ones + tf.ones([2, 2]), ValueError),
        (lambda: ones < tf.ones([2, 2]), ValueError),
        (lambda: tf.matmul(ones, ones), ValueError),
        (lambda: tf.reshape(ones, [4]), ValueError),
        (lambda: tf.broadcast_to(ones, [4, 2]), ValueError),
        (lambda: tf.where(ones > 0, tf.ones([2, 2]), 0.0), ValueError),
        (lambda: tf.concat([ones, tf.ones([3, 2])], 0), ValueError),
        (lambda: nn.sparse_softmax_cross_entropy_with_logits([0, 5], ones), ValueError),
        (lambda: tf.gather([1, 2], 5), IndexError),
        (lambda: ones[5], IndexError),
        (
            lambda: variable.scatter_add(pycollective.IndexedSlices(tf.ones([1, 3]), [7])),
            IndexError,
        ),
    ):
        with pytest.raises(pycollective.errors.InvalidArgumentError) as caught:
            call()
        assert isinstance(caught.value, kind)


def test_one_hot_of_values_that_the_dtype_cannot_hold_raises():
    with pytest.raises(
        TypeError, match="2.7 of dtype float64 cannot become a tensor of dtype int32"
    ):
        tf.one_hot([0], 2, on_value=2.7, dtype=np.int32)


def test_reductions_and_gathers_of_nothing_have_the_results_of_their_dtype():
    nothing = np.zeros((0, 3), bool)
    assert tf.reduce_max(nothing, 0).numpy().tolist() == [False] * 3
    assert tf.reduce_min(nothing, 0).numpy().tolist() == [True] * 3
    rows = tf.gather(np.zeros((0, 3), "f4"), np.zeros((0, 2), "i4"), batch_dims=1)
    assert rows.shape == (0, 2)
    unsigned = np.array([[0], [1]], "u8")
    assert tf.gather(np.arange(6.0).reshape(2, 3), unsigned, batch_dims=1).numpy().tolist() == [
        [0.0],
        [4.0],
    ]
    for dtype in ("float32", "bfloat16"):
        x = tf.cast(tf.ones((2, 0)), dtype)
        with tf.GradientTape() as tape:
            tape.watch(x)
            product = tf.reduce_prod(x, axis=1)
        assert tape.gradient(product, x).shape == (2, 0)
