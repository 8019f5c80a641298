"""Tracking of metrics, layers and variables in all types of attributes."""

import numpy as np
import pytest
from fitting import mirrored

from pycollective import keras
from pycollective.keras import layers, metrics
from pycollective.tensor import (
    Variable,
    VariableAggregation,
    VariableSynchronization,
    as_tensor,
)

X = np.arange(12.0).reshape(4, 3)
Y = np.ones((4, 1))


class Nested(metrics.Metric):
    """A metric with its own variable, and with metrics as an attribute, in a list and in a dict."""

    def __init__(self, name="nested"):
        super().__init__(name=name)
        self.plain = metrics.Mean()
        self.listed = [metrics.Sum()]
        self.deeper = {"a": ({"b": metrics.Sum()},)}
        self.count = Variable(0.0, trainable=False)

    def all(self):
        return [self.plain, self.listed[0], self.deeper["a"][0]["b"]]

    def update_state(self, y_true, y_pred, sample_weight=None):
        for metric in self.all():
            metric.update_state(y_true)
        self.count.assign_add(1.0)

    def result(self):
        return self.plain.result()


def test_metric_nested_metrics_variables_are_tracked():
    nested = Nested()
    inside = [variable for metric in nested.all() for variable in metric.variables]
    assert {id(v) for v in nested.variables} == {id(nested.count), *map(id, inside)}
    assert len(nested.variables) == 1 + len(inside)


def test_metric_nested_metrics_reset_state_resets_all():
    nested = Nested()
    nested.update_state(Y, Y)
    nested.reset_state()
    assert [float(metric.result()) for metric in nested.all()] == [0.0, 0.0, 0.0]
    assert float(nested.count) == 0.0


def test_reset_state_of_a_metric_calls_that_of_a_nested_metric():
    class Python(metrics.Metric):
        total = 5

        def reset_state(self):
            self.total = 0

    class Outer(metrics.Metric):
        def __init__(self):
            super().__init__()
            self.inner = Python()

    outer = Outer()
    outer.reset_state()
    assert outer.inner.total == 0


def test_metric_twice_inside_another_is_tracked_once():
    class Outer(metrics.Metric):
        def __init__(self):
            super().__init__()
            self.first = metrics.Sum()
            self.again = [self.first]

    assert len(Outer().variables) == 1


class MeanOfMean(metrics.Metric):
    def __init__(self):
        super().__init__(name="inner")
        self.inner = metrics.Mean()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.inner.update_state(y_true)

    def result(self):
        return self.inner.result()


@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluate_resets_nested_metrics(replicas):
    with mirrored(replicas).scope():
        model = keras.Sequential([layers.Dense(1, input_shape=(3,))])
        model.compile("sgd", "mse", metrics=[MeanOfMean()])
    model.fit(X, 5 * Y, verbose=0)
    assert model.evaluate(X, Y, verbose=0, return_dict=True)["inner"] == 1.0
    assert model.evaluate(X, 3 * Y, verbose=0, return_dict=True)["inner"] == 3.0


class Measuring(layers.Layer):
    """A layer with metrics in every type of attribute."""

    def __init__(self):
        super().__init__()
        self.plain = metrics.Mean(name="plain")
        self.listed = [metrics.Mean(name="listed"), {"a": (metrics.Mean(name="deep"),)}]
        self.nested = Nested()

    def call(self, inputs):
        for metric in (self.plain, self.listed[0], self.listed[1]["a"][0]):
            metric.update_state(inputs)
        self.nested.update_state(inputs, inputs)
        return inputs


def test_layer_metrics_lists_those_of_all_attributes():
    layer = Measuring()
    assert [metric.name for metric in layer.metrics] == ["plain", "listed", "deep", "nested"]
    assert layer.weights == []
    assert len(layer.metrics_variables) == 3 * 2 + len(layer.nested.variables)


def test_layer_metrics_lists_those_of_layers_inside():
    model = keras.Sequential([keras.Sequential([Measuring()])])
    names = ["plain", "listed", "deep", "nested"]
    assert [metric.name for metric in model.metrics] == names
    assert [metric.name for metric in model.layers[0].layers[0].metrics] == names


def test_evaluate_resets_metrics_in_layers():
    model = keras.Sequential([layers.Input((3,)), Measuring(), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(10 * X, Y, verbose=0)
    found = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert [found[name] for name in ("plain", "listed", "deep", "nested")] == [X.mean()] * 4


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_evaluate_metrics_in_layers_and_made_late_count_all_replicas(replicas):
    class Late(metrics.Metric):
        def __init__(self):
            super().__init__(name="late")
            self.parts = []

        def update_state(self, y_true, y_pred, sample_weight=None):
            if not self.parts:
                self.parts.append(metrics.Sum())
            self.parts[0].update_state(y_true)

        def result(self):
            return self.parts[0].result()

    class Summing(layers.Layer):
        def __init__(self):
            super().__init__()
            self.parts = {"a": [metrics.Sum(name="rows")]}

        def call(self, inputs):
            self.parts["a"][0].update_state(inputs[:, 0] * 0 + 1)
            return inputs

    with mirrored(replicas).scope():
        model = keras.Sequential([Summing(), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Late()])
    model.fit(X, Y, batch_size=3, verbose=0)
    for _ in range(2):
        found = model.evaluate(X, Y, batch_size=3, verbose=0, return_dict=True)
        assert (found["late"], found["rows"]) == (4.0, 4.0)


@pytest.mark.parametrize("container", [lambda v: v, lambda v: [v]])
def test_metric_variable_without_sum_aggregation_raises(container):
    class Own(metrics.Metric):
        def __init__(self, **options):
            super().__init__(name="own")
            self.total = container(Variable(np.zeros(()), trainable=False, **options))

    summed = {"synchronization": VariableSynchronization.ON_READ}
    for replicas, options in ((1, {}), (2, {**summed, "aggregation": VariableAggregation.SUM})):
        with mirrored(replicas).scope():
            assert len(Own(**options).variables) == 1
    with mirrored(2).scope():
        own = Own()
        model = keras.Sequential([layers.Dense(1, input_shape=(3,))])
        with pytest.raises(
            ValueError, match="metric 'own' has the variable 'Variable' with aggregat"
        ):
            model.compile("sgd", "mse", metrics=[own])
    with pytest.raises(ValueError, match="Make the variable with add_weight"):
        own.reset_state()


# Initial values -----------------------------------------------------------------------------------

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "int64", "uint64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_weight_without_initializer_not_floating_starts_at_zero(dtype):
    weight = layers.Layer().add_weight(shape=(3, 2), dtype=dtype, trainable=False)
    assert weight.dtype == dtype
    np.testing.assert_array_equal(weight.numpy(), np.zeros((3, 2), dtype))
    of_metric = metrics.Metric().add_weight(shape=(2,), dtype=dtype)
    np.testing.assert_array_equal(of_metric.numpy(), np.zeros(2, dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_add_weight_without_initializer_floating_starts_random(dtype):
    weight = layers.Layer().add_weight(shape=(30, 2), dtype=dtype)
    assert weight.dtype == dtype
    assert 0 < np.abs(as_tensor(weight).numpy()).max() <= np.sqrt(6 / 32) + 1e-3


def test_losses_regularizers_of_untrained_weights_do_not_count():
    layer = layers.Layer()
    for trainable in (False, True):
        layer.add_weight(shape=(2,), initializer="ones", regularizer="l2", trainable=trainable)
    assert [float(loss) for loss in layer.losses] == [pytest.approx(0.02)]


# Means with the expected values of Keras 3 --------------------------------------------------------

BATCHES = {
    "several values of an example": ([([1.0, 2, 3], [0.0, 1, 1]), ([[4.0, 5]], [[1.0, 0]])], 2.8),
    "sequences of two lengths": ([([[1.0, 0, 1], [1, 1, 1]], None), ([[0.0], [0]], None)], 5 / 12),
    "one weight for all": ([([[0.0, 1], [2, 3], [4, 5]], 0.5), ([0.0, 1, 2, 3], None)], 7.25 / 4.5),
    "a weight for each value": (
        [([[[1.0, 2], [3, 4]]], [[1.0, 0]]), ([2.0], None)],
        (1.5 * 0.5 + 2) / 1.5,
    ),
}


@pytest.mark.parametrize("case", BATCHES)
def test_mean_weights_examples_as_keras(case):
    batches, expected = BATCHES[case]
    mean = metrics.Mean()
    for values, weights in batches:
        mean.update_state(values, sample_weight=weights)
    assert float(mean.result()) == pytest.approx(expected)
