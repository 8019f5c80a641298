"""`fit` against real Keras: the same numbers, under the same names, and the same weights."""

import os

import numpy as np
import pytest

from pycollective import distribute
from pycollective import keras as ours

os.environ.setdefault("KERAS_BACKEND", "jax")
theirs = pytest.importorskip("keras")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

RANDOM = np.random.default_rng(9)
X = RANDOM.standard_normal((20, 5)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 20)
SIZES = RANDOM.standard_normal((20, 2)).astype(np.float32)
WEIGHTS = RANDOM.random(20).astype(np.float32)
CLASS_WEIGHTS = {0: 1.0, 1: 3.0, 2: 0.5}


def strategy(replicas):
    return distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def start(model):
    random = np.random.default_rng(1)
    model.set_weights([random.standard_normal(w.shape) for w in model.get_weights()])
    return model


def one(keras, **compiled):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(4, "tanh", kernel_regularizer="l2"),
            layers.Dense(3, "softmax"),
        ]
    )
    model.compile(**compiled)
    return start(model)


def two(keras, named, **compiled):
    inputs = keras.Input((5,))
    x = keras.layers.Dense(4, "tanh")(inputs)
    kind = keras.layers.Dense(3, "softmax", name="kind")(x)
    size = keras.layers.Dense(2, name="size")(x)
    model = keras.Model(inputs, {"kind": kind, "size": size} if named else [kind, size])
    model.compile(**compiled)
    return start(model)


def compare(make, fit, replicas, **tolerance):
    reference = make(theirs)
    with strategy(replicas).scope():
        model = make(ours)
    expected = reference.fit(verbose=0, shuffle=False, **fit).history
    found = model.fit(verbose=0, shuffle=False, **fit).history
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    for a, b in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("weighted", "replicas"),
    [({"sample_weight": WEIGHTS}, 3), ({"class_weight": CLASS_WEIGHTS}, 2)],
    ids=["examples", "classes"],
)
def test_one_output(weighted, replicas):
    compare(
        lambda keras: one(
            keras,
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
            weighted_metrics=["sparse_categorical_crossentropy"],
        ),
        {"x": X, "y": LABELS, "batch_size": 5, "epochs": 2, "validation_split": 0.25, **weighted},
        replicas,
    )


@pytest.mark.parametrize("named", [True, False])
def test_several_outputs(named):
    def of(kind, size):
        return {"kind": kind, "size": size} if named else [kind, size]

    compare(
        lambda keras: two(
            keras,
            named,
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=1.0),
            loss=of("sparse_categorical_crossentropy", keras.losses.Huber()),
            loss_weights=of(0.5, 2.0),
            metrics=of(["accuracy"], ["mae", "mse"]),
        ),
        {"x": X, "y": of(LABELS, SIZES), "batch_size": 5, "epochs": 2},
        2,
    )
