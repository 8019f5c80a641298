"""`describe_records` of models and of functions: texts about the layers that are replayed."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import pycollective as tf
from pycollective import keras
from pycollective.keras import layers

X = tf.constant(np.linspace(0, 1, 24, dtype=np.float32).reshape(8, 3))


def stack(*inner):
    return keras.Sequential([keras.Input((3,)), *inner], name="stack")


def dense(name, **options):
    return layers.Dense(3, name=name, **options)


def gradients(model, x=X):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x, training=True))
    return tape.gradient(loss, model.trainable_variables)


def line_of(text):
    """Return the number of the first line of this file that contains a text."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    return next(n for n, line in enumerate(lines, 1) if text in line)


def test_records_of_model_have_names_state_and_line():
    model = stack(dense("one"), dense("two", activation="relu"), layers.Dropout(0.0, name="drop"))
    assert model.describe_records() == "stack: no steps are known yet"
    gradients(model)
    text = model.describe_records()
    assert "input float32[8, 3], training, with a tape: not replayed yet; calls so far: 1" in text
    for _ in range(4):
        gradients(model)
    head, inference, training, first, record, drop, reason = model.describe_records().splitlines()
    assert (head, inference) == ("stack:", "  in inference: one, two, drop")
    assert (training, first, drop) == ("  in training:", "    one, two", "    drop")
    record, reason = record[2:], reason[2:]
    assert record.startswith("    input float32[8, 3], training, with a tape: replayed, with ")
    line = line_of("loss = tf.reduce_sum(model(")
    assert record.endswith(f"; recorded at {__file__}:{line}, in gradients")
    assert reason == "    runs from Python: the kernels of Dropout are not recorded"


def test_records_of_function_are_those_of_its_calls():
    model, other = stack(dense("one"), dense("two")), stack(dense("three"), dense("four"))

    @tf.function
    def step(x):
        return gradients(model, x)

    assert step.describe_records() == "no layers were recorded in calls of step"
    for _ in range(4):
        step(X)
        gradients(other)
    head, record = step.describe_records().splitlines()
    assert head == "one, two" and record.startswith("  input float32[8, 3]")
    assert "three" not in step.describe_records()


class Own(layers.Dense):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: [Own(3)], "the kernels of Own are not recorded"),
        (lambda: [dense("a", activity_regularizer="l2")], "it has an activity_regularizer"),
        (lambda: [dense("a", activation=lambda x: x)], "its activation is not one of this"),
        (lambda: [dense("a")], "no layer beside it can be recorded"),
        (
            lambda: [layers.BatchNormalization(synchronized=True)],
            "BatchNormalization is recorded over the last axis and without synchronized=True only",
        ),
        (lambda: [dense("a", dtype="float64"), dense("b", dtype="float64")], "not replayed yet"),
        (lambda: [layers.ReLU(), layers.ELU()], "the layers have no variables"),
        (lambda: [dense("a", activation="softmax")], "softmax or sigmoid ends it"),
        (lambda: [layers.Dense(1500), layers.Dense(1500)], "9,030,000 bytes, more than 8,388,608"),
    ],
)
def test_records_of_layers_from_python_have_the_reason(make, reason):
    model = stack(*make())
    for _ in range(2):
        gradients(model) if model.trainable_variables else model(X)
    assert reason in model.describe_records()


def test_records_of_float64_and_missing_gradients_have_the_reason():
    model = stack(dense("a", dtype="float64"), dense("b", dtype="float64"))
    for _ in range(5):
        gradients(model, tf.cast(X, tf.float64))
    assert "runs from Python: a kernel" in model.describe_records()

    model = stack(dense("a"), dense("b"))
    for _ in range(70):
        with tf.GradientTape():
            model(X)
    assert (
        "runs from Python: the gradients of 64 calls were not computed" in model.describe_records()
    )

    model = stack(dense("a"), dense("b"))
    for _ in range(5):
        gradients(model)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(X, training=True))
    tape.gradient(loss, model.layers[0].kernel)
    assert "the program needs other gradients than the recorded ones" in model.describe_records()


def test_records_under_mixed_precision_have_the_reason():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = stack(dense("one"), dense("two"))
        gradients(model)
        assert "runs from Python: under mixed precision" in model.describe_records()
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_records_of_nested_and_functional_models_are_listed():
    inner = stack(dense("one"), dense("two"))
    first = keras.Input((3,))
    model = keras.Model(first, layers.Add(name="add")([inner(first), first]), name="outer")
    model(X)
    lines = model.describe_records().splitlines()
    assert lines[:5] == [
        "outer:",
        "  stack",
        "    has layers of its own",
        "  add",
        "    runs from Python: the kernels of Add are not recorded",
    ]
    assert lines[5:7] == ["stack:", "  one, two"]
