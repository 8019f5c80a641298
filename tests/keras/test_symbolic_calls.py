"""Shape inference changes no state; inputs of `Sequential`; settings of models."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from fitting import mirrored

from pycollective import keras
from pycollective.keras import layers, metrics, regularizers
from pycollective.tensor import ops

X = np.arange(6.0).reshape(2, 3)


class Counting(layers.Layer):
    """A layer with a variable that counts calls, a metric and a loss."""

    def __init__(self):
        super().__init__(activity_regularizer=regularizers.L2(0.5))
        self.mean = metrics.Mean()

    def build(self, input_shape):
        self.calls = self.add_weight("calls", initializer="ones", trainable=False)
        self.calls.assign(5.0)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        self.mean.update_state(inputs + 1.0)
        self.add_loss(ops.reduce_sum(inputs))
        return 2.0 * inputs


class Around(keras.Model):
    def __init__(self):
        super().__init__()
        self.inside = Counting()

    def call(self, inputs):
        return self.inside(inputs)


def untouched(layer):
    return float(layer.calls) == 5.0 and float(layer.mean.result()) == 0.0 and layer.losses == []


def on_symbol(layer):
    return layer(keras.Input((3,)))


def output_shape(layer):
    assert tuple(layer.compute_output_shape((None, 3))) == (None, 3)


FINDS_SHAPES = {
    "symbolic call": on_symbol,
    "two symbolic calls": lambda layer: on_symbol(layer) is on_symbol(layer),
    "compute_output_shape": output_shape,
    "inside a model": lambda layer: keras.Sequential([layers.Input((3,)), layer]),
}


@pytest.mark.parametrize("how", FINDS_SHAPES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_shape_inference_changes_no_state(how, replicas):
    with mirrored(replicas).scope():
        layer = Counting()
        FINDS_SHAPES[how](layer)
        assert untouched(layer)


def test_model_build_changes_nothing():
    model = Around()
    model.build((None, 3))
    assert untouched(model.inside)


def test_symbolic_call_after_a_call_on_values_changes_nothing():
    layer = Counting()
    layer(X)
    before = float(layer.calls), float(layer.mean.result())
    on_symbol(layer)
    assert before == (6.0, 3.5)
    assert (float(layer.calls), float(layer.mean.result())) == before


def test_symbolic_call_for_training_leaves_moving_averages():
    class Normal(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization()

        def call(self, inputs, training=None):
            return self.norm(inputs, training=training)

    model = Normal()
    model(keras.Input((3,)), training=True)
    np.testing.assert_array_equal(model.norm.moving_variance.numpy(), np.ones(3))


def test_losses_of_a_functional_model_are_those_of_its_last_call():
    x = keras.Input((3,))
    model = keras.Model(x, Counting()(x))
    assert model.losses == []
    model(X)
    assert [float(loss) for loss in model.losses] == [15.0, 0.5 * 4 * (X**2).sum() / 2]


# Sequential ---------------------------------------------------------------------------------------


def test_sequential_first_layer_takes_several_inputs():
    model = keras.Sequential([layers.Concatenate(), layers.Dense(2)])
    assert model([X, X]).shape == (2, 2)
    assert model.built and model.layers[1].kernel.shape == (6, 2)
    model.compile("sgd", "mse")
    model.fit([X, X], np.ones((2, 2)), verbose=0)
    assert model.predict([X, X], verbose=0).shape == (2, 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_sequential_first_layer_takes_several_inputs_built_by_fit(replicas):
    with mirrored(replicas).scope():
        model = keras.Sequential([layers.Add(), layers.Dense(2)])
        model.compile("sgd", "mse")
    model.fit([X, X], np.ones((2, 2)), verbose=0)
    assert model.layers[1].kernel.shape == (3, 2)


def test_sequential_first_layer_takes_several_symbolic_inputs():
    inside = keras.Sequential([layers.Concatenate(), layers.Dense(2)])
    x = keras.Input((3,))
    model = keras.Model(x, inside([x, x]))
    assert model(X).shape == (2, 2)


@pytest.mark.parametrize(
    ("declared", "given", "expected"),
    [((1,), (3,), (3, 2)), ((1,), (1,), (1, 2)), ((3,), (4, 3, 1), (4, 2))],
)
def test_sequential_a_last_axis_of_length_1_is_added_or_removed(declared, given, expected):
    model = keras.Sequential([layers.Input(declared), layers.Dense(2)])
    assert model(np.ones(given)).shape == expected
    assert model.predict(np.ones(given), verbose=0).shape == expected


class Same(layers.Layer):
    def call(self, inputs):
        return inputs


@pytest.mark.parametrize("given", ["uint8", "int64", "float32", "float64"])
def test_sequential_inputs_get_the_declared_dtype(given):
    x = np.ones((2, 3), given)
    assert keras.Sequential([layers.Input((3,)), Same()])(x).dtype == np.float32
    assert keras.Sequential([layers.Input((3,), dtype="int32"), Same()])(x).dtype == np.int32
    assert keras.Sequential([Same()])(x).dtype == np.float32


@pytest.mark.parametrize("replicas", [1, 2])
def test_sequential_built_by_fit_gets_the_declared_dtype(replicas):
    class Added(layers.Layer):
        def call(self, inputs):
            return inputs + ops.cast(100.0, inputs.dtype)

    with mirrored(replicas).scope():
        model = keras.Sequential([Added(), layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse")
    # In uint8 the sum would overflow at 256.
    x = np.full((2, 1), 200, np.uint8)
    assert model.fit(x, np.full((2, 1), 300.0), verbose=0).history["loss"] == [0.0]


def test_sequential_embedding_first_keeps_large_integers():
    inner = keras.Sequential([layers.Embedding(2**24 + 2, 1, embeddings_initializer="zeros")])
    model = keras.Sequential([inner])
    model(np.array([[0]]))
    (table,) = model.weights
    row = np.zeros((2**24 + 2, 1), np.float32)
    row[-1] = 7.0
    table.assign(row)
    assert float(model(np.array([[2**24 + 1]]))[0, 0, 0]) == 7.0


# Settings -----------------------------------------------------------------------------------------


def test_embedding_build_needs_no_shape():
    layer = layers.Embedding(3, 2)
    layer.build()
    assert layer.built and layer.embeddings.shape == (3, 2)


def test_model_settings_can_be_assigned():
    model = keras.Sequential([layers.Dense(1, input_shape=(3,))])
    model.run_eagerly, model.jit_compile = True, False
    assert (model.run_eagerly, model.jit_compile) == (True, False)
    model.compile("sgd", "mse")
    assert (model.run_eagerly, model.jit_compile, model.steps_per_execution) == (False, "auto", 1)
    model.run_eagerly, model.jit_compile, model.steps_per_execution = True, True, 2
    assert (model.run_eagerly, model.jit_compile, model.steps_per_execution) == (True, True, 2)
    ends = []
    counter = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, _: ends.append(batch))
    model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=1, verbose=0, callbacks=[counter])
    assert ends == [1, 3]
    with pytest.raises(ValueError, match="steps_per_execution must be at least 1, got 0"):
        model.steps_per_execution = 0
    with pytest.raises(TypeError, match="steps_per_execution must be a whole number, not 2.7"):
        model.steps_per_execution = 2.7


def test_from_config_outputs_in_a_tuple_stay_a_tuple():
    x = keras.Input((3,))
    model = keras.Model((x,), (layers.Dense(2)(x), layers.Dense(1)(x)))
    again = keras.Model.from_config(model.get_config())
    for each in (model, again, keras.models.clone_model(model)):
        assert isinstance(each(X), tuple) and isinstance(each.predict(X, verbose=0), tuple)
        assert isinstance(each.input, tuple)


class Halves(keras.layers.Layer):
    """The difference of the halves of a batch."""

    def call(self, inputs):
        first, second = ops.split(inputs, 2, axis=0)
        return first - second


def test_layer_that_cuts_the_batch_is_called_on_more_than_one_example():
    model = keras.Sequential([Halves(), keras.layers.Dense(3)])
    assert model(ops.ones([4, 5])).shape == (2, 3)
    inputs = keras.Input((5,))
    assert keras.Model(inputs, Halves()(inputs))(ops.ones([2, 5])).shape == (1, 5)


def test_error_of_a_layer_on_zeros_is_that_of_one_example():
    class Fails(keras.layers.Layer):
        def call(self, inputs):
            raise ValueError(f"{len(inputs)} examples")

    with pytest.raises(ValueError, match="1 examples") as caught:
        Fails(name="fails")(keras.Input((5,)))
    if sys.version_info >= (3, 11):
        assert "The layer 'fails' was called on zeros" in caught.value.__notes__[0]
