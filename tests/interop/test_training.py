"""`fit` compared with real Keras: the same numbers, names and weights."""

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
# Class 0 has the weight 1, and there is no class 3.
CLASS_WEIGHTS = {3: 7.0, 1: 3.0, 2: 0.5}


def strategy(replicas):
    return distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def start(model):
    random = np.random.default_rng(1)
    model.set_weights([random.standard_normal(w.shape) for w in model.get_weights()])
    return model


def one_output(keras, **compiled):
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


def two_outputs(keras, named, **compiled):
    inputs = keras.Input((5,))
    x = keras.layers.Dense(4, "tanh")(inputs)
    kind = keras.layers.Dense(3, "softmax", name="kind")(x)
    size = keras.layers.Dense(2, name="size")(x)
    model = keras.Model(inputs, {"kind": kind, "size": size} if named else [kind, size])
    model.compile(**compiled)
    return start(model)


def compare(make, fit, replicas):
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
def test_fit_of_one_output_equals_keras(weighted, replicas):
    compare(
        lambda keras: one_output(
            keras,
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
            weighted_metrics=["sparse_categorical_crossentropy"],
        ),
        {"x": X, "y": LABELS, "batch_size": 5, "epochs": 2, "validation_split": 0.25, **weighted},
        replicas,
    )


@pytest.mark.parametrize("named", [True, False])
def test_fit_of_several_outputs_equals_keras(named):
    def of(kind, size):
        return {"kind": kind, "size": size} if named else [kind, size]

    compare(
        lambda keras: two_outputs(
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


def test_output_without_a_loss_equals_that_of_keras():
    """Targets for the other outputs only are enough."""
    for y in ([SIZES], SIZES):
        compare(
            lambda keras: two_outputs(keras, False, optimizer="sgd", loss=[None, "mse"]),
            {"x": X, "y": y, "batch_size": 5},
            1,
        )


SERIES = [
    [3.0, 2.0, 2.5, 2.2, 1.0, 0.5, 0.4, 0.45, 0.4, 0.41, 0.42],
    [1.0, 0.9, 0.8, 0.7, 0.75, 0.74, 0.73, 0.72, 0.71, 0.6, 0.5],
    [2.0, 1.0, 0.9, 0.95, 0.2, 0.96, 0.97, 0.98, 0.99, 0.1, 0.3],
]
RULES = [
    {},
    {"patience": 2},
    {"patience": 2, "baseline": 0.85, "restore_best_weights": True},
    {"patience": 3, "min_delta": 0.15, "start_from_epoch": 2},
    {"patience": 2, "mode": "max", "baseline": 0.9, "restore_best_weights": True},
]


def actions_of(keras, callback, series):
    """Return the actions of a callback that gets these numbers, one in each epoch."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.stop_training = False
    callback.set_model(model)
    callback.set_params({"epochs": len(series)})
    callback.on_train_begin()
    found = []
    for epoch, value in enumerate(series):
        model.set_weights([np.full((1, 1), float(epoch))])
        logs = {"loss": value, "val_loss": value}
        callback.on_epoch_begin(epoch)
        callback.on_epoch_end(epoch, logs)
        found.append((epoch, round(float(model.optimizer.learning_rate), 6), sorted(logs)))
        if model.stop_training:
            break
    callback.on_train_end()
    return found, np.asarray(model.get_weights()[0]).item()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_early_stopping_acts_like_that_of_keras(rule):
    for series in SERIES:
        first, second = (
            actions_of(keras, keras.callbacks.EarlyStopping("val_loss", **rule), series)
            for keras in (theirs, ours)
        )
        assert first == second


@pytest.mark.parametrize(
    "rule",
    [
        {"patience": 1},
        {"patience": 2, "factor": 0.5, "cooldown": 2},
        {"patience": 2, "min_delta": 0.3, "factor": 0.1, "min_lr": 0.005, "cooldown": 1},
    ],
    ids=str,
)
def test_reduce_lr_on_plateau_acts_like_that_of_keras(rule):
    for series in SERIES:
        first, second = (
            actions_of(keras, keras.callbacks.ReduceLROnPlateau("val_loss", **rule), series)
            for keras in (theirs, ours)
        )
        assert first == second


@pytest.mark.parametrize(
    "metric",
    ["accuracy", "Precision", "mae", "CosineSimilarity"],
)
def test_monitored_metric_determines_the_direction(metric):
    modes = []
    for keras in (theirs, ours):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, "sigmoid")])
        named = metric if metric.islower() else getattr(keras.metrics, metric)(name="own")
        model.compile("sgd", "mse", metrics=[named])
        monitor = f"val_{named if metric.islower() else 'own'}"
        early = keras.callbacks.EarlyStopping(monitor)
        model.fit(
            X, np.abs(SIZES) / 4, verbose=0, callbacks=[early], validation_data=(X, 0 * SIZES)
        )
        # Keras stores the comparison as a function.
        op = getattr(early, "monitor_op", None)
        modes.append(early.mode if op is None else {"less": "min", "greater": "max"}[op.__name__])
    assert modes[0] == modes[1]


IMAGES = RANDOM.standard_normal((20, 8, 8, 2)).astype(np.float32)


def convolutional(keras, penalty=None, **options):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(4, 2, padding="same", use_bias=False, activity_regularizer=penalty),
            layers.BatchNormalization(momentum=0.8, **options),
            layers.ReLU(),
            layers.Dropout(0.0),
            layers.Flatten(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    random = np.random.default_rng(2)
    values = [0.5 * random.standard_normal(w.shape) for w in model.weights]
    # A variance is not negative.
    values = [
        abs(v) + 0.5 if "variance" in w.name else v
        for v, w in zip(values, model.weights, strict=True)
    ]
    model.set_weights(values)
    return model


def test_fit_of_images_equals_keras():
    """Train convolution, relu, pooling and normalization for 12 steps; each equals Keras's."""

    def trained(model):
        logs = model.fit(IMAGES, LABELS, 5, 3, verbose=0, shuffle=False).history
        return logs, model.evaluate(IMAGES, LABELS, verbose=0), model.get_weights()

    expected, evaluated, weights = trained(convolutional(theirs, "l2"))
    assert np.ptp(expected["loss"]) > 0.1
    for replicas in (1, 2):
        with strategy(replicas).scope():
            # Keras normalizes by the batch of all replicas.
            model = convolutional(ours, "l2", synchronized=replicas > 1)
        logs, found, values = trained(model)
        for name, value in expected.items():
            np.testing.assert_allclose(logs[name], value, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(found, evaluated, rtol=1e-3)
        for a, b in zip(values, weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_fit_in_mixed_bfloat16_equals_keras():
    def made(keras, policy):
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(16, "relu", dtype=policy),
                layers.Dense(8, "tanh", dtype=policy),
                layers.Dense(2, dtype="float32"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return start(model)

    models = [made(keras, "mixed_bfloat16") for keras in (theirs, ours)]
    assert {str(model.layers[1](model.layers[0](X)).dtype) for model in models} == {"bfloat16"}
    expected, found = (np.asarray(model(X)) for model in models)
    whole = np.asarray(made(ours, "float32")(X))
    # Rounded to 8 bits, both results are nearer to each other than to the unrounded result.
    assert np.abs(found - expected).max() < 0.5 * np.abs(whole - expected).max()
    before = models[0].get_weights()
    losses, weights = zip(
        *(
            (
                model.fit(X, SIZES, 5, verbose=0, shuffle=False).history["loss"],
                model.get_weights(),
            )
            for model in models
        ),
        strict=True,
    )
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)
    for a, b, old in zip(*weights, before, strict=True):
        assert a.dtype == b.dtype == np.float32
        # Compare the changes of the weights by 4 steps.
        np.testing.assert_allclose(b - old, a - old, rtol=0.03, atol=0.03 * np.abs(a - old).max())


def test_fit_in_mixed_float16_equals_keras():
    """Compare steps with scaled losses."""

    def trained(keras):
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            layers = keras.layers
            model = keras.Sequential(
                [
                    keras.Input((5,)),
                    layers.Dense(16, "relu"),
                    layers.Dense(3),
                    layers.Activation("linear", dtype="float32"),
                ]
            )
            # Keras on JAX does not use the logits of softmax. Keras on TensorFlow does, and so do we.
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss)
            kinds = type(model.optimizer).__name__, {str(w.dtype) for w in model.weights}
            inner = keras.optimizers.SGD(0.1, momentum=0.9)
            # With 2**15 an intermediate result overflows in Keras, but not here.
            optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10)
            model.compile(optimizer, loss)
        finally:
            keras.mixed_precision.set_global_policy("float32")
        before = start(model).get_weights()
        losses = model.fit(X, LABELS, 5, 3, verbose=0, shuffle=False).history["loss"]
        changes = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
        return kinds, losses, changes, float(model.optimizer.dynamic_scale)

    expected = trained(theirs)
    assert expected[0] == ("LossScaleOptimizer", {"float32"})
    for replicas in (1, 2):
        with strategy(replicas).scope():
            found = trained(ours)
        assert found[0] == expected[0] and found[3] == expected[3]
        np.testing.assert_allclose(found[1], expected[1], rtol=2e-3)
        for a, b in zip(found[2], expected[2], strict=True):
            np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max())


def test_fit_of_summed_losses_equals_keras():
    compare(
        lambda keras: one_output(
            keras,
            optimizer=keras.optimizers.SGD(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(reduction="sum"),
        ),
        {"x": X, "y": LABELS, "batch_size": 5, "epochs": 2},
        2,
    )
