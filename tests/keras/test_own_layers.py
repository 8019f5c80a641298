"""Custom layers, by the conventions of Keras 3."""

from __future__ import annotations

import numpy as np
import pytest

from pycollective import keras
from pycollective.keras import layers
from pycollective.keras.layers import InputSpec
from pycollective.tensor import Tensor, as_tensor, ops

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


class Doubling(layers.Layer):
    def call(self, x):
        return 2.0 * x


# Several arguments --------------------------------------------------------------------------------


class Attending(layers.Layer):
    """A layer whose `build` takes the shapes of two arguments of `call`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def build(self, query_shape, value_shape):
        self.kernel = self.add_weight(shape=(query_shape[-1], value_shape[-1]), initializer="ones")

    def call(self, query, value, scale=None):
        self.seen.append((value, scale))
        return query @ self.kernel + value


def test_build_takes_the_shapes_of_several_arguments():
    layer = Attending()
    result = layer(X, X[:, :2])
    assert layer.kernel.shape == (3, 2)
    np.testing.assert_array_equal(result.numpy(), X.sum(axis=1, keepdims=True) + X[:, :2])
    by_name = Attending()
    by_name(X, value=X[:, :2])
    assert by_name.kernel.shape == (3, 2)


@pytest.mark.parametrize(
    "build",
    [
        lambda layer: layer.build((None, 3), (None, 2)),
        lambda layer: layer.build(query_shape=(None, 3), value_shape=(None, 2)),
        lambda layer: layer.build_from_config(build_config()),
    ],
)
def test_build_explicit_call_takes_several_shapes(build):
    layer = Attending()
    build(layer)
    assert layer.built and layer.kernel.shape == (3, 2)


def build_config():
    layer = Attending()
    layer(X, X[:, :2])
    config = layer.get_build_config()
    assert config == {"shapes_dict": {"query_shape": (None, 3), "value_shape": (None, 2)}}
    return config


def test_build_takes_several_shapes_in_a_functional_model():
    query, value = keras.Input((3,)), keras.Input((2,))
    layer = Attending()
    model = keras.Model([query, value], layer(query, value))
    assert layer.kernel.shape == (3, 2)
    assert model([X, X[:, :2]]).shape == (2, 2)


@pytest.mark.parametrize("by_name", [False, True])
def test_compute_output_shape_takes_several_shapes_in_a_functional_model(by_name):
    class Shaped(Attending):
        def compute_output_shape(self, query_shape, value_shape):
            return value_shape

    query, value = keras.Input((3,)), keras.Input((2,))
    result = Shaped()(query=query, value=value) if by_name else Shaped()(query, value)
    assert result.shape == (None, 2)
    assert keras.Model([query, value], result)([X, X[:, :2]]).shape == (2, 2)


def test_call_arrays_in_all_arguments_become_tensors_of_the_layers_dtype():
    layer = Attending()
    layer(X, X[:, :2].astype(np.float64), scale=np.ones(1, np.float64))
    ((value, scale),) = layer.seen
    assert isinstance(value, Tensor) and value.dtype == np.float32
    assert isinstance(scale, Tensor) and scale.dtype == np.float32
    layer(X, X[:, :2], scale={"a": (np.arange(3), "text", 1.5, None)})
    assert layer.seen[1][1]["a"][0].dtype == np.int64
    assert layer.seen[1][1]["a"][1:] == ("text", 1.5, None)


def test_call_symbol_in_a_later_argument_is_recorded():
    value = keras.Input((2,))
    constant = np.ones((1, 3), np.float32)
    model = keras.Model(value, Attending()(constant, value))
    np.testing.assert_array_equal(model(X[:, :2]).numpy(), 3 + X[:, :2])


def test_call_takes_inputs_by_name():
    np.testing.assert_array_equal(Doubling()(x=X).numpy(), 2 * X)
    assert Attending()(query=X, value=X[:, :2]).shape == (2, 2)
    with pytest.raises(TypeError, match="called without inputs; give 'x', the first argument of"):
        Doubling()()


# Weights ------------------------------------------------------------------------------------------


def test_add_weight_takes_arguments_in_the_order_of_keras():
    layer = layers.Layer()
    first = layer.add_weight((3, 2), "ones")
    second = layer.add_weight((2,), "zeros", "float64")
    assert first.numpy().tolist() == [[1.0, 1.0]] * 3
    assert (second.shape, second.dtype) == ((2,), np.float64)
    assert layer.add_weight((4,)).shape == (4,)
    # In TensorFlow 2 the first argument is the name.
    assert layer.add_weight("own", (5,)).shape == (5,)
    third = layer.add_variable((2,), "ones", trainable=False, name="third")
    assert (third.numpy().tolist(), third.trainable) == ([1.0, 1.0], False)


def test_layer_attribute_set_of_layers_raises():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = {layers.Dense(1)}

    with pytest.raises(TypeError, match="are in a set, which has no order"):
        _ = Model().weights


def test_layer_added_to_a_set_attribute_raises():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = set()
            self.words = {"a", "b"}

        def call(self, inputs):
            return inputs

    model = Model()
    model(X)
    assert model.weights == []
    model.parts.add(layers.Dense(1))
    with pytest.raises(TypeError, match="are in a set, which has no order"):
        _ = model.weights


# Accepted inputs ----------------------------------------------------------------------------------

REFUSED = {
    "ndim": (InputSpec(ndim=3), "expected ndim=3, found ndim=2"),
    "min_ndim": (InputSpec(min_ndim=3), "expected min_ndim=3, found ndim=2"),
    "max_ndim": (InputSpec(max_ndim=1), "expected max_ndim=1, found ndim=2"),
    "axes": (InputSpec(axes={-1: 4}), "expected axis -1 of input shape to have value 4"),
    "no such axis": (InputSpec(axes={3: 4}), "expected axis 3 of input shape to have value 4"),
    "shape": (InputSpec(shape=(None, 4)), r"expected shape=\(None, 4\)"),
    "dtype": (InputSpec(dtype="int32"), "expected dtype=int32, found dtype=float32"),
    "several": ([InputSpec(ndim=2)] * 2, r"expects 2 input\(s\), but it received 1"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("symbolic", [False, True])
def test_input_spec_other_inputs_raise(case, symbolic):
    layer = Doubling()
    layer.input_spec, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        layer(keras.Input((3,)) if symbolic else X)


@pytest.mark.parametrize(
    "spec",
    [
        {"a": InputSpec(shape=(None, 3)), "b": InputSpec(ndim=1)},
        [InputSpec(shape=(None, 3), name="a"), InputSpec(ndim=1, name="b")],
    ],
)
def test_input_spec_of_a_dict_is_matched_by_name(spec):
    class Sums(keras.layers.Layer):
        def call(self, inputs):
            return inputs["a"][:, 0] + inputs["b"]

    layer = Sums()
    layer.input_spec = spec
    rows = np.ones(len(X), np.float32)
    np.testing.assert_array_equal(layer({"b": rows, "a": X}).numpy(), X[:, 0] + 1)
    with pytest.raises(ValueError, match='Missing data for input "b"'):
        layer({"a": X})
    with pytest.raises(ValueError, match="expected ndim=1, found ndim=2"):
        layer({"b": X, "a": X})


@pytest.mark.parametrize(
    "spec",
    [
        InputSpec(ndim=2, axes={-1: 3, 0: None}),
        InputSpec(shape=(None, 3)),
        InputSpec(shape=(None, 3, 1), allow_last_axis_squeeze=True),
        InputSpec(min_ndim=1, max_ndim=2, dtype="float32"),
        [InputSpec(shape=(2, None))],
    ],
    ids=str,
)
def test_input_spec_matching_inputs_are_accepted(spec):
    layer = Doubling()
    layer.input_spec = spec
    assert layer(X).shape == (2, 3)
    assert layer(keras.Input((3,))).shape == (None, 3)


def test_input_spec_of_a_dict_checks_each_input():
    class Sum(layers.Layer):
        def __init__(self):
            super().__init__()
            self.input_spec = {"a": InputSpec(ndim=2), "b": InputSpec(ndim=1)}

        def call(self, inputs):
            return ops.reduce_sum(inputs["a"]) + ops.reduce_sum(inputs["b"])

    assert float(Sum()({"b": X[0], "a": X})) == X.sum() + X[0].sum()
    with pytest.raises(ValueError, match="Input 1 .*expected ndim=1, found ndim=2"):
        Sum()({"a": X, "b": X})


def test_input_spec_from_its_config_is_equal():
    spec = InputSpec(dtype="float32", ndim=2, axes={1: 3})
    assert InputSpec.from_config(spec.get_config()).get_config() == spec.get_config()


def test_input_spec_axis_beyond_the_last_raises():
    with pytest.raises(ValueError, match="Axis 2 is greater than the maximum allowed value: 1"):
        InputSpec(ndim=2, axes={2: 3})


def test_dense_one_axis_raises():
    with pytest.raises(ValueError, match="expected at least two axes"):
        layers.Dense(2)(np.ones(3, np.float32))


# Models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_model_overriding_an_unused_method_raises_type_error(kind):
    with pytest.raises(TypeError, match=f"overrides make_{kind}_function.*override {kind}_step"):
        type("Own", (keras.Model,), {f"make_{kind}_function": lambda self, force=False: None})


def test_dtype_policy_assignment_changes_dtypes():
    layer = layers.Dense(2)
    layer.dtype_policy = "float64"
    assert (layer(X).dtype, layer.kernel.dtype) == (np.float64, np.float64)
    layer = layers.Dense(2)
    layer(X)
    layer.dtype_policy = "mixed_float16"
    assert (layer(X).dtype, layer.kernel.dtype) == (np.float16, np.float32)


def test_training_by_position_or_default_reaches_the_layers():
    x = np.ones((8, 30), np.float32)
    dropout = keras.Sequential([layers.Input((30,)), layers.Dropout(0.9, seed=1)])
    assert 0 in dropout(x, True).numpy()
    assert 0 not in dropout(x, False).numpy()

    class Passing(keras.Model):
        def __init__(self):
            super().__init__()
            self.dropout = layers.Dropout(0.9, seed=1)

        def call(self, x, training=None):
            return self.dropout(x, training)

    class Training(Passing):
        def call(self, x, training=True):
            return self.dropout(x)

    assert 0 in Passing()(x, training=True).numpy()
    assert 0 in Training()(x).numpy()
    with pytest.raises(TypeError, match="training twice"):
        dropout(x, True, training=True)


def test_nested_lists_of_tensors_reach_the_layer_as_they_are():
    given = []

    class Taking(layers.Layer):
        def call(self, inputs):
            given.append(inputs)
            return as_tensor(X)

    a = as_tensor(X)
    for inputs in ([(a, a), (a, a)], [{"a": a}], [[a], [a, a]]):
        Taking()(inputs)
        assert type(given[-1]) is list


def test_add_weight_takes_the_shape_first():
    class Weighted(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight((3, 4), "zeros", name="w")

        def call(self, x):
            return x

    layer = Weighted()
    layer(X)
    assert (layer.w.shape, layer.w.name) == ((3, 4), "weighted/w")


def test_output_shape_of_an_own_layer_keeps_unknown_lengths():
    class Padded(keras.layers.Layer):
        def call(self, inputs):
            return ops.pad(inputs, [[0, 0], [1, 2], [0, 0]])

    layer = Padded()
    assert layer.compute_output_shape((None, 5, 3)) == (None, 8, 3)
    assert layer.compute_output_shape((4, None, 3)) == (None, None, 3)


def test_layer_with_an_invalid_name_raises():
    with pytest.raises(ValueError, match="the name of a layer must be a text, not 3"):
        keras.layers.Dense(2, name=3)
