"""Pickling and copying of models, layers, optimizers and metrics; clones of compiled models."""

import copy
import pickle

import numpy as np
import pytest
from fitting import mirrored

from pycollective import keras
from pycollective.keras import layers
from pycollective.tensor import Variable

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.linspace(0, 1, 16, dtype=np.float32).reshape(8, 2)

WAYS = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


def squares(y_true, y_pred):
    return (y_true - y_pred) ** 2


class Own(keras.Model):
    """A model whose constructor takes no arguments."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(4, activation="relu")
        self.second = layers.Dense(2)

    def call(self, inputs):
        return self.second(self.first(inputs))


class Worst(keras.metrics.Metric):
    """The largest error."""

    def __init__(self, name="worst", dtype=None):
        super().__init__(name=name, dtype=dtype)
        self.worst = self.add_weight(name="worst", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.worst.assign(np.abs(np.asarray(y_true) - np.asarray(y_pred)).max())

    def result(self):
        return self.worst


def sequential():
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, "relu"), layers.BatchNormalization(), layers.Dense(2)]
    )


def functional():
    x = keras.Input((3,))
    return keras.Model(x, layers.Dense(2)(layers.Dense(3)(x) + x))


def train(model):
    return model.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history["loss"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [sequential, functional, Own])
@pytest.mark.parametrize("loss", ["mse", squares])
def test_copied_model_continues_training_like_the_original(way, make, loss):
    model = make()
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["mae"])
    train(model)
    other = WAYS[way](model)
    assert type(other) is type(model)
    assert not {id(v) for v in other.variables} & {id(v) for v in model.variables}
    np.testing.assert_array_equal(other(X).numpy(), model(X).numpy())
    assert train(other) == train(model)
    assert int(other.optimizer.iterations) == 4


def test_copy_uncompiled_or_unbuilt_model_works():
    for model in (sequential(), keras.Sequential([layers.Dense(2)])):
        other = copy.deepcopy(model)
        assert not other.compiled and len(other.weights) == len(model.weights)
        for a, b in zip(other.weights, model.weights, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_deepcopy_keeps_lambdas_and_functions_of_one_name():
    def named(factor):
        def error(y_true, y_pred):
            return factor * (y_true - y_pred) ** 2

        return error

    model = functional()
    model.compile("sgd", named(3.0), metrics=[named(1.0), lambda y_true, y_pred: 0 * y_pred])
    expected = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert copy.deepcopy(model).evaluate(X, Y, verbose=0, return_dict=True) == expected
    assert expected["loss"] == pytest.approx(3 * expected["error"])


def test_deepcopy_keeps_shared_layers_shared():
    shared = layers.Dense(3)
    x = keras.Input((3,))
    other = copy.deepcopy(keras.Model(x, shared(shared(x))))
    assert len(other.weights) == 2


@pytest.mark.parametrize("way", WAYS)
def test_copied_layer_gives_equal_outputs(way):
    layer = layers.Dense(2, kernel_regularizer="l2", name="d")
    assert not WAYS[way](layer).built
    layer(X)
    other = WAYS[way](layer)
    assert other.name == "d" and other.kernel is not layer.kernel
    np.testing.assert_array_equal(other(X).numpy(), layer(X).numpy())


@pytest.mark.parametrize("way", WAYS)
def test_copied_optimizer_continues_like_the_original(way):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    optimizer, start = keras.optimizers.Adam(schedule), np.float32([1.0, 2.0])
    weight = Variable(start, name="w")
    for _ in range(3):
        optimizer.apply_gradients([(np.float32([0.5, -1.0]), weight)])
    other, again = WAYS[way](optimizer), Variable(weight.numpy(), name="w")
    assert int(other.iterations) == 3
    for each, variable in ((optimizer, weight), (other, again)):
        each.apply_gradients([(np.float32([0.1, 0.2]), variable)])
    np.testing.assert_array_equal(again.numpy(), weight.numpy())
    assert int(other.iterations) == int(optimizer.iterations) == 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make", [keras.metrics.Mean, keras.metrics.MeanSquaredError, keras.metrics.AUC, Worst]
)
def test_metrics_keep_their_sums_in_a_copy(way, make):
    metric = make()
    values = (np.float32([0, 1, 1]), np.float32([0.1, 0.4, 0.8]))
    metric.update_state(*(values[1:] if make is keras.metrics.Mean else values))
    other = WAYS[way](metric)
    assert float(other.result()) == float(metric.result()) != 0
    metric.reset_state()
    assert float(other.result()) != 0


def test_deepcopy_keeps_the_strategy_and_unpickling_uses_the_current_one():
    with mirrored(2).scope():
        model = sequential()
        model.compile("adam", "mse")
    train(model)
    copied = copy.deepcopy(model)
    assert copied.distribute_strategy is model.distribute_strategy
    data = pickle.dumps(model)
    with mirrored(3).scope():
        unpickled = pickle.loads(data)
    assert unpickled.distribute_strategy.num_replicas_in_sync == 3
    for other in (copied, unpickled):
        for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    train(copied)


# Clones -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sequential, functional, Own])
def test_clone_compiled_model_is_compiled_with_reset_state(make):
    model = make()
    optimizer = keras.optimizers.Adam(0.01)
    model.compile(
        optimizer, lambda a, b: (a - b) ** 2, metrics=["mae", keras.metrics.MeanSquaredError()]
    )
    train(model)
    clone = keras.models.clone_model(model)
    assert clone.compiled and clone.optimizer is not optimizer
    assert int(clone.optimizer.iterations) == 0
    assert float(clone.optimizer.learning_rate) == float(optimizer.learning_rate)
    clone.build((None, 3))
    clone.set_weights(model.get_weights())
    assert clone.evaluate(X, Y, verbose=0) == model.evaluate(X, Y, verbose=0)
    train(clone)
    assert (int(clone.optimizer.iterations), int(optimizer.iterations)) == (2, 2)


def test_clone_uncompiled_model_is_not_compiled():
    assert not keras.models.clone_model(sequential()).compiled
