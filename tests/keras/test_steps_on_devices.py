"""Custom training steps on a device do not wait for it, nor make more calls than earlier steps."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from device_arrays import DeviceArray

import pycollective as tf
from pycollective import array_backend, config, distribute
from pycollective.keras import layers, optimizers

RANDOM = np.random.default_rng(5)
IMAGES = RANDOM.random((24, 6, 6, 1))
LABELS = RANDOM.integers(0, 3, 24)
STEPS = 6
#: The number of steps that "scaled too far" skips, because gradients are not finite.
LEFT_OUT = 3

STRATEGIES = {
    "one device": lambda: distribute.OneDeviceStrategy("gpu:0"),
    "mirrored": lambda: distribute.MirroredStrategy(["gpu:1"]),
    "central": lambda: distribute.experimental.CentralStorageStrategy(["gpu:1"]),
    "default": distribute.get_strategy,
}
DECAY = optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.01),
    "momentum": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.01),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "schedule": lambda: optimizers.Adam(DECAY),
    "clipvalue": lambda: optimizers.SGD(0.01, clipvalue=0.01),
    "clipnorm": lambda: optimizers.SGD(0.01, clipnorm=0.1),
    "global norm": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
    "means": lambda: optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "accumulated": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), 1024.0, 2),
    "scaled too far": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(DECAY, clipnorm=1.0, use_ema=True), 2.0**127, 3
    ),
}


@pytest.fixture(autouse=True)
def _two_gpus(cupy, monkeypatch):
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (2, ""))
    monkeypatch.setattr(config, "_state", config._State())


def train(strategy, make_optimizer, cupy, policy="float64"):
    """Return model, optimizer, accuracy and losses, and the fetches and calls of each step."""
    exact = "float64" if policy == "float64" else "float32"
    with strategy.scope():
        tf.keras.utils.set_random_seed(3)
        model = tf.keras.Sequential(
            [
                layers.Conv2D(4, 3, activation="relu", dtype=policy),
                layers.MaxPooling2D(dtype=policy),
                layers.BatchNormalization(dtype=policy),
                layers.Flatten(dtype=policy),
                layers.Dropout(0.3, seed=7, dtype=policy),
                layers.Dense(3, dtype=policy, kernel_regularizer="l2"),
            ]
        )
        model.build((None, 6, 6, 1))
        optimizer = make_optimizer()
        optimizer.build(model.trainable_variables)
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
        cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )

    def step(images, labels):
        with tf.GradientTape() as tape:
            outputs = tf.cast(model(images, training=True), exact)
            loss = tf.nn.compute_average_loss(cross_entropy(labels, outputs))
            loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        optimizer.minimize(loss, model.trainable_variables, tape=tape)
        accuracy.update_state(labels, outputs)
        return loss

    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(4)
    batches = list(strategy.experimental_distribute_dataset(dataset))
    assert len(batches) == STEPS
    counts = [(cupy.fetched, cupy.calls)]
    losses = []
    for batch in batches:
        losses.append(strategy.run(step, args=batch))
        counts.append((cupy.fetched, cupy.calls))
    return model, optimizer, accuracy, losses, np.diff(counts, axis=0)


def weights_of(model):
    return [getattr(v, "_values", (v,))[0].current().array for v in model.weights]


@pytest.mark.parametrize(
    ("where", "name"),
    [("mirrored", name) for name in OPTIMIZERS]
    + [
        (where, name)
        for where in ("one device", "central")
        for name in ("adam", "scaled too far", "global norm")
    ],
)
def test_step_does_not_wait_for_the_device(cupy, name, where):
    far = name == "scaled too far"
    options = OPTIMIZERS[name], cupy, "float32" if far else "float64"
    with np.errstate(over="ignore", invalid="ignore"):
        host, other, accuracy, losses, _ = train(STRATEGIES["default"](), *options)
        model, optimizer, there, found, counts = train(STRATEGIES[where](), *options)
    assert (counts[:, 0] == 0).all(), "a step fetched something"
    assert len(set(counts[2:, 1][::2])) == len(set(counts[2:, 1][1::2])) == 1, "steps differ"
    assert all(type(array) is DeviceArray for array in weights_of(model))
    close = {"rtol": 5e-3, "atol": 5e-3} if far else {"rtol": 1e-7, "atol": 1e-9}
    np.testing.assert_allclose([float(x) for x in found], [float(x) for x in losses], **close)
    assert float(there.result()) == pytest.approx(float(accuracy.result()))
    assert int(optimizer.iterations) == int(other.iterations)
    for ours, theirs in zip(model.get_weights(), host.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, **close)
    if name.startswith("scaled"):
        assert float(optimizer.dynamic_scale) == float(other.dynamic_scale)
        assert int(optimizer.step_counter) == int(other.step_counter)
        assert int(optimizer.iterations) == STEPS - LEFT_OUT * far


@pytest.mark.parametrize("devices", [["gpu:1"], ["gpu:1", "gpu:0"]], ids=len)
@pytest.mark.parametrize("name", ["adam", "scaled"])
def test_variables_may_stay_on_the_host(cupy, devices, name):
    hosts = [device.replace("gpu", "cpu") for device in devices]
    central = distribute.experimental.CentralStorageStrategy
    host, _, _, losses, _ = train(central(hosts, "cpu:0"), OPTIMIZERS[name], cupy)
    model, _, _, found, _ = train(central(devices, "cpu:0"), OPTIMIZERS[name], cupy)
    for variable in model.trainable_weights:
        assert type(variable.local().current().array) is np.ndarray
    for ours, theirs in zip(found, losses, strict=True):
        parts = (getattr(v, "values", (v,)) for v in (ours, theirs))
        for part, expected in zip(*parts, strict=True):
            assert type(part.array) is DeviceArray
            assert float(part) == pytest.approx(float(expected), rel=1e-7)
    for ours, theirs in zip(model.get_weights(), host.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-9)


def test_loss_scale_step_result_is_read_one_step_later(cupy):
    *_, counts = train(STRATEGIES["one device"](), OPTIMIZERS["scaled"], cupy)
    this_thread = threading.current_thread().name
    lags = [calls for thread, calls in cupy.waits if thread == this_thread]
    # Each step but the first reads the flag after its forward and backward pass were launched.
    assert len(lags) == STEPS - 1
    assert min(lags) > 0.6 * counts[-1, 1]


def test_step_makes_at_most_the_known_number_of_launches(cupy):
    """Compare with the known number of launches, which may only decrease."""
    found = {}
    for name in ("adam", "adamw", "momentum", "scaled", "global norm"):
        *_, counts = train(STRATEGIES["one device"](), OPTIMIZERS[name], cupy)
        found[name] = int(counts[-1, 1])
    # SGD and Adam need one launch, weight decay one more, loss scaling five more.
    assert found["momentum"] == found["adam"] == found["adamw"] - 1
    assert found["adam"] <= CALLS
    assert found["scaled"] <= found["adam"] + 5
    # For the 6 variables: the sums of squares, their sum, and a product for each variable.
    assert found["global norm"] <= found["adam"] + 6 * 5 + 8


#: The launches of the model above: forward, backward, metrics and update.
CALLS = 73


def test_step_half_precision_fetches_nothing(cupy):
    make = OPTIMIZERS["scaled"]
    _, _, _, losses, _ = train(STRATEGIES["default"](), make, cupy, "mixed_float16")
    model, _, _, found, counts = train(STRATEGIES["one device"](), make, cupy, "mixed_float16")
    assert (counts[:, 0] == 0).all(), "a step fetched something"
    assert {str(array.dtype) for array in weights_of(model)} == {"float32"}
    np.testing.assert_allclose([float(x) for x in found], [float(x) for x in losses], rtol=2e-2)


def test_bfloat16_on_device_raises(cupy):
    pytest.importorskip("ml_dtypes")
    with pytest.raises(TypeError, match="bfloat16 on a GPU: .* from version 14.* Use float16"):
        train(STRATEGIES["one device"](), OPTIMIZERS["adam"], cupy, "mixed_bfloat16")


def test_batches_are_copied_on_a_separate_stream(cupy):
    strategy = STRATEGIES["mirrored"]()
    words = np.array(list("abcdefgh"))
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(8.0), words)).batch(3)
    sent = cupy.sent
    batches = list(strategy.experimental_distribute_dataset(dataset))
    assert [x.numpy().tolist() for x, _ in batches] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert all(x.array.device.id == 1 for x, _ in batches)
    assert batches[0][1].numpy().tolist() == [b"a", b"b", b"c"]
    assert cupy.sent == sent + 3
    # Only the prefetching thread waits for the copies.
    assert [thread for thread, _ in cupy.waits] == ["pycollective-prefetch"] * 3


def test_evaluate_and_predict_fetch_only_their_results(cupy):
    strategy = STRATEGIES["mirrored"]()
    with strategy.scope():
        model = tf.keras.Sequential([layers.Flatten(), layers.Dense(3)])
        model.compile(
            "adam", tf.keras.losses.SparseCategoricalCrossentropy(True), metrics=["accuracy"]
        )
        model.build((None, 6, 6, 1))
    seen = []
    watch = tf.keras.callbacks.LambdaCallback(
        on_test_batch_end=lambda batch, logs: seen.append(cupy.fetched),
        on_predict_batch_end=lambda batch, logs: seen.append(cupy.fetched),
    )
    model.evaluate(IMAGES, LABELS, batch_size=4, verbose=0, callbacks=[watch])
    assert len(seen) == STEPS and len(set(seen)) == 1, "a step fetched something"
    seen.clear()
    before = cupy.fetched
    assert model.predict(IMAGES, batch_size=4, verbose=0, callbacks=[watch]).shape == (24, 3)
    assert cupy.fetched - before <= STEPS
