"""Models whose device work is recorded as graphs give the results of their layers in every step."""

from __future__ import annotations

import numpy as np
import pytest

import pycollective as tf
from pycollective import array_backend, config, distribute
from pycollective.nccl import device

STEPS = 9
RANDOM = np.random.default_rng(3)
IMAGES = RANDOM.random((STEPS, 4, 6, 6, 2))
LABELS = RANDOM.integers(0, 3, (STEPS, 4))


@pytest.fixture(autouse=True)
def _gpus(cupy, monkeypatch):
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (2, ""))
    monkeypatch.setattr(config, "_state", config._State())
    monkeypatch.setattr(device, "_host_work", lambda graph: "")


def sequential(dtype):
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Conv2D(4, 3, activation="relu", dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.MaxPooling2D(dtype=dtype),
            layers.Flatten(dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
    )


def functional(dtype):
    layers = tf.keras.layers
    inputs = tf.keras.Input((6, 6, 2), dtype=dtype.removeprefix("mixed_"))
    x = layers.Conv2D(4, 3, padding="same", use_bias=False, dtype=dtype)(inputs)
    y = layers.BatchNormalization(dtype=dtype)(x)
    y = layers.Conv2D(4, 3, padding="same", dtype=dtype)(layers.ReLU(dtype=dtype)(y))
    x = layers.ReLU(dtype=dtype)(layers.Add(dtype=dtype)([x, y]))
    x = layers.GlobalAveragePooling2D(dtype=dtype)(x)
    return tf.keras.Model(inputs, layers.Dense(3, dtype=dtype)(x))


class Training:
    """A model, and its training one batch at a time."""

    def __init__(self, build, strategy, policy="float64"):
        self.strategy = strategy
        with strategy.scope():
            tf.keras.utils.set_random_seed(3)
            self.model = build(policy)
            self.model.build((None, 6, 6, 2))
            self.optimizer = tf.keras.optimizers.SGD(0.1)
        self.between = lambda *_: None

    def step(self, images, labels):
        def replica(images, labels):
            with tf.GradientTape() as tape:
                outputs = tf.cast(self.model(images, training=True), "float64")
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
                loss = tf.reduce_sum(losses) / 4
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.between(outputs, gradients)
            self.optimizer.apply_gradients(
                zip(gradients, self.model.trainable_variables, strict=True)
            )
            return loss

        data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(len(images))
        (batch,) = self.strategy.experimental_distribute_dataset(data)
        return self.strategy.run(replica, args=batch)

    def all_steps(self):
        for images, labels in zip(IMAGES, LABELS, strict=True):
            self.step(images, labels)
        return self.model.get_weights()


def on_host(build, policy="float64"):
    return Training(build, distribute.get_strategy(), policy).all_steps()


def on_device(build, policy="float64"):
    return Training(build, distribute.OneDeviceStrategy("gpu:0"), policy)


def same(found, expected, close=1e-9):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=close, atol=close)


@pytest.mark.parametrize("build", [sequential, functional])
@pytest.mark.parametrize("policy", ["float64", "mixed_float16"])
def test_replayed_steps_give_the_weights_of_the_host(cupy, build, policy):
    training = on_device(build, policy)
    same(training.all_steps(), on_host(build, policy), 1e-9 if policy == "float64" else 1e-2)
    assert cupy.cuda.runtime.launched == 2 * (STEPS - 4)


def test_replicas_of_one_device_have_their_own_graphs(cupy):
    config.set_logical_device_configuration("gpu:0", 2)
    training = Training(functional, distribute.MirroredStrategy(["gpu:0", "gpu:1"]))
    training.all_steps()
    host = Training(functional, distribute.MirroredStrategy(["cpu:0", "cpu:1"]))
    same(training.model.get_weights(), host.all_steps())
    assert cupy.cuda.runtime.launched == 4 * (STEPS - 4)


@pytest.mark.parametrize("held", ["outputs", "gradients", "variables"])
def test_results_that_a_program_keeps_do_not_change(cupy, held):
    training = on_device(functional)
    kept = []

    def keep(outputs, gradients):
        found = {"outputs": [outputs], "gradients": gradients}.get(held)
        if found is None:
            found = [tf.Tensor(v.local().current().array) for v in training.model.weights]
        kept.append((found, [tensor.numpy().copy() for tensor in found]))

    training.between = keep
    same(training.all_steps(), on_host(functional))
    for tensors, values in kept:
        for tensor, value in zip(tensors, values, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), value)


def test_another_batch_size_and_assigned_weights_are_used(cupy):
    training, host = on_device(sequential), Training(sequential, distribute.get_strategy())
    for number in range(STEPS):
        size = 2 if number % 4 == 3 else 4
        for each in (training, host):
            each.step(IMAGES[number][:size], LABELS[number][:size])
            if number == 6:
                each.model.set_weights([w * 0.5 for w in each.model.get_weights()])
    same(training.model.get_weights(), host.model.get_weights())
    assert cupy.cuda.runtime.launched


def test_two_calls_on_one_tape_give_the_gradients_of_the_host(cupy):
    def gradients(training):
        model, found = training.model, []
        for images in IMAGES:

            def replica(a, b):
                with tf.GradientTape() as tape:
                    total = tf.reduce_sum(model(a, training=True) * model(b, training=True))
                return tape.gradient(total, model.trainable_variables)

            data = tf.data.Dataset.from_tensor_slices((images, images[::-1].copy())).batch(4)
            (batch,) = training.strategy.experimental_distribute_dataset(data)
            found += [g.numpy() for g in training.strategy.run(replica, args=batch)]
        return found

    same(
        gradients(on_device(sequential)),
        gradients(Training(sequential, tf.distribute.get_strategy())),
    )


@pytest.mark.parametrize("number", [1, 2])
def test_work_that_needs_the_host_is_not_replayed(cupy, monkeypatch, number):
    """The forward pass is refused, or the backward pass; no statistics are counted twice."""
    answers = iter(["", "a copy from or to the host"][2 - number :])
    monkeypatch.setattr(device, "_host_work", lambda graph: next(answers))
    same(on_device(functional).all_steps(), on_host(functional))
    assert cupy.cuda.runtime.launched == 0


@pytest.mark.parametrize("number", [0, 1])
def test_wrong_replays_are_noticed_and_not_used(cupy, monkeypatch, caplog, number):
    """The graph of the forward or of the backward pass does nothing when it is launched."""
    runtime = cupy.cuda.runtime
    launch = runtime.graphLaunch

    def partly(graph, stream):
        if runtime.launched % 2 == number:
            runtime.launched += 1
        else:
            launch(graph, stream)

    monkeypatch.setattr(runtime, "graphLaunch", partly)
    caplog.set_level("INFO", "pycollective")
    same(on_device(functional).all_steps(), on_host(functional))
    assert f"a replay gave {'other gradients' if number else 'another output'}" in caplog.text
    assert runtime.launched == 1 + number


def test_predictions_that_are_replayed_are_separate_arrays(cupy):
    training = on_device(functional)
    found = [training.model(images, training=False) for images in IMAGES]
    host = Training(functional, distribute.get_strategy())
    host.model.set_weights(training.model.get_weights())
    for ours, images in zip(found, IMAGES, strict=True):
        np.testing.assert_allclose(ours.numpy(), host.model(images, training=False).numpy())
    assert cupy.cuda.runtime.launched == STEPS - 4
