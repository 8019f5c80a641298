"""Cross-entropy of the results of softmax and sigmoid: the losses use the arguments of these."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import pycollective as tf

keras = tf.keras
layers, losses, metrics = keras.layers, keras.losses, keras.metrics

# Float32 softmax and sigmoid of these are 0 and 1, whose logarithms would be cut off.
LOGITS = np.array([[40.0, 0.0, -200.0], [-3.0, 90.0, 1.0]], "float32")
CLASSES = np.array([1, 2])


def softmax_loss(logits, classes):
    a = logits.astype(float)
    return np.log(np.exp(a - a.max(-1, keepdims=True)).sum(-1)) + a.max(-1) - a[[0, 1], classes]


def identity(activation=None, **options):
    return layers.Dense(3, activation, kernel_initializer="identity", **options)


ENDINGS = {
    "activation": lambda: [identity("softmax")],
    "tf.nn": lambda: [identity(tf.nn.softmax)],
    "Activation": lambda: [identity(), layers.Activation("softmax")],
    "Softmax": lambda: [identity(), layers.Softmax()],
}


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("ending", ENDINGS)
def test_model_that_ends_with_softmax_learns_from_its_logits(ending, one_hot):
    """A probability of 0 would have the gradient 0."""
    name = "categorical_crossentropy" if one_hot else "sparse_categorical_crossentropy"
    labels = np.eye(3, dtype="float32")[CLASSES] if one_hot else CLASSES
    model = keras.Sequential([keras.Input((3,)), *ENDINGS[ending]()])
    model.compile(keras.optimizers.SGD(0.01), name, metrics=[name])
    expected = softmax_loss(LOGITS, CLASSES).mean()
    # The layers before softmax are replayed from the fourth batch on.
    for before in [model.evaluate(LOGITS, labels, verbose=0) for _ in range(6)]:
        np.testing.assert_allclose(before, [expected, expected], rtol=1e-6)
    history = model.fit(LOGITS, labels, epochs=8, verbose=0).history
    np.testing.assert_allclose(history["loss"][0], expected, rtol=1e-6)
    assert history["loss"][-1] < 1e-3


def test_model_that_ends_with_sigmoid_learns_from_its_logits():
    logits, labels = np.array([[50.0], [-120.0], [2.0]], "float32"), np.array([0.0, 1.0, 1.0])
    expected = np.mean([50.0, 120.0, np.log1p(np.exp(-2.0))])
    model = keras.Sequential([layers.Dense(1, "sigmoid", kernel_initializer="ones")])
    model.compile(
        keras.optimizers.SGD(0.01), "binary_crossentropy", metrics=["binary_crossentropy"]
    )
    np.testing.assert_allclose(model.evaluate(logits, labels, verbose=0), [expected] * 2, rtol=1e-6)
    model.fit(logits, labels, epochs=1, verbose=0)
    assert model.evaluate(logits, labels, verbose=0)[0] < 0.9 * expected


def test_float16_predictions_of_a_policy_keep_their_logits():
    model = keras.Sequential([keras.Input((3,)), *ENDINGS["activation"]()])
    halves = keras.Sequential([keras.Input((3,)), identity("softmax", dtype="mixed_float16")])
    for each in (model, halves):
        each.compile("sgd", "sparse_categorical_crossentropy")
        found = each.evaluate(LOGITS, CLASSES, verbose=0)
        np.testing.assert_allclose(found, softmax_loss(LOGITS, CLASSES).mean(), rtol=1e-6)


def test_softmax_along_another_axis_than_the_classes_is_taken_as_it_is():
    predicted = keras.activations.softmax(tf.constant(LOGITS), axis=0)
    found = losses.sparse_categorical_crossentropy(CLASSES, predicted)
    expected = losses.sparse_categorical_crossentropy(CLASSES, tf.constant(predicted.numpy()))
    np.testing.assert_array_equal(found, expected)
    moved = keras.activations.softmax(tf.constant(LOGITS.T), axis=0)
    of_columns = losses.sparse_categorical_crossentropy(CLASSES, moved, axis=0)
    np.testing.assert_allclose(of_columns, softmax_loss(LOGITS, CLASSES), rtol=1e-6)


def test_sigmoid_is_no_distribution_over_classes():
    predicted = keras.activations.sigmoid(tf.constant(LOGITS))
    found = losses.sparse_categorical_crossentropy(CLASSES, predicted)
    expected = losses.sparse_categorical_crossentropy(CLASSES, tf.constant(predicted.numpy()))
    np.testing.assert_array_equal(found, expected)


def test_from_logits_of_probabilities_warns_and_uses_the_logits():
    predicted = keras.activations.softmax(tf.constant(LOGITS))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    with pytest.warns(
        UserWarning, match="from_logits=True, but softmax has computed the predictions"
    ):
        found = loss(CLASSES, predicted)
    np.testing.assert_allclose(found, softmax_loss(LOGITS, CLASSES), rtol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(CLASSES, tf.constant(LOGITS))


def test_gradient_of_the_loss_is_that_of_the_logits():
    x = tf.constant(LOGITS)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        probabilities = keras.activations.softmax(x)
        loss = losses.sparse_categorical_crossentropy(CLASSES, probabilities)
        score = tf.reduce_sum(probabilities * probabilities)  # another use of the same result
    expected = probabilities.numpy() - np.eye(3, dtype="float32")[CLASSES]
    np.testing.assert_allclose(tape.gradient(loss, x), expected, atol=1e-6)
    assert np.abs(tape.gradient(score, x)).max() < 1e-6


def test_metric_of_a_model_with_softmax_is_exact():
    metric = metrics.SparseCategoricalCrossentropy()
    metric.update_state(CLASSES, keras.activations.softmax(tf.constant(LOGITS)))
    np.testing.assert_allclose(metric.result(), softmax_loss(LOGITS, CLASSES).mean(), rtol=1e-6)
