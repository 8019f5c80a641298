"""`fit` on a device: variables stay on the device, and no step fetches data from it."""

from __future__ import annotations

import numpy as np
import pytest
from device_arrays import DeviceArray

from pycollective import distribute, keras
from pycollective.keras import callbacks, layers
from pycollective.keras.training.numbers import DeviceLogs
from pycollective.tensor import GradientTape, Tensor, as_tensor, ops

RANDOM = np.random.default_rng(3)
IMAGES = RANDOM.random((10, 8, 8, 1), np.float32)
LABELS = RANDOM.integers(0, 3, 10)

CLIPPED = {"learning_rate": 0.1, "momentum": 0.9, "global_clipnorm": 0.5}

STRATEGIES = {
    "one device": lambda: distribute.OneDeviceStrategy("gpu:0"),
    "mirrored": lambda: distribute.MirroredStrategy(["gpu:0"]),
}


def convolutional(strategy, synchronized=False, **compiled):
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Conv2D(4, 3, activation="relu", input_shape=(8, 8, 1)),
                layers.MaxPooling2D(),
                layers.BatchNormalization(synchronized=synchronized),
                layers.Flatten(),
                layers.Dropout(0.0),
                layers.Dense(3, kernel_regularizer="l2"),
            ]
        )
        random = np.random.default_rng(1)
        model.set_weights([random.random(w.shape) for w in model.get_weights()])
        model.compile(
            **{
                "optimizer": "adam",
                "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "metrics": ["accuracy"],
                **compiled,
            }
        )
    return model


class Fetches(callbacks.Callback):
    """Records the number of fetches before and after each step, and the logs of each step."""

    def __init__(self, cupy):
        super().__init__()
        self.cupy = cupy
        self.counts = []
        self.logs = []

    def on_train_batch_begin(self, batch, logs=None):
        self.counts.append(self.cupy.fetched)

    def on_train_batch_end(self, batch, logs=None):
        self.counts.append(self.cupy.fetched)
        self.logs.append(logs)


def fitted(model, *listeners, epochs=2):
    data = IMAGES, LABELS
    return model.fit(
        *data,
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=data,
        callbacks=list(listeners),
    ).history


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("one device", {}),
        ("mirrored", {"steps_per_execution": 3, "accumulate_steps": 2}),
        ("mirrored", {"optimizer": {"class_name": "SGD", "config": CLIPPED}}),
    ],
    ids=["plain", "several at once", "clipped"],
)
def test_fit_step_fetches_nothing_from_the_device(cupy, name, compiled):
    expected = fitted(convolutional(distribute.get_strategy(), **compiled))
    model = convolutional(STRATEGIES[name](), **compiled)
    for variable in model.weights:
        component = getattr(variable, "values", (variable,))[0]
        assert type(component.current().array) is DeviceArray
    model.optimizer.build(model.trainable_variables)
    watch = Fetches(cupy)
    sent = cupy.sent
    found = fitted(model, watch)
    # Only images and labels were sent: 3 batches in 2 epochs, for training and validation.
    assert cupy.sent == sent + 2 * 3 * 2 * 2
    steps = len(watch.counts) // 2
    in_first_epoch = watch.counts[:steps]
    assert len(set(in_first_epoch)) == 1, "a step fetched something"
    assert len(set(watch.counts[steps:])) == 1, "a step fetched something"
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=2e-3, err_msg=key)
    for variable in model.weights:
        component = getattr(variable, "values", (variable,))[0]
        assert type(component.current().array) is DeviceArray


def test_fit_two_devices_fetch_only_for_sums(cupy):
    expected = fitted(convolutional(distribute.get_strategy()))
    strategy = distribute.MirroredStrategy(["gpu:0", "gpu:1"])
    model = convolutional(strategy, synchronized=True)
    watch = Fetches(cupy)
    found = fitted(model, watch)
    # Without NCCL, sums over replicas go through the host: 6 gradients, and 6 sums for
    # normalization and its gradient. Results of steps do not go through the host.
    counts = np.reshape(watch.counts, (-1, 2))
    assert set(counts[1:, 1] - counts[1:, 0]) <= set(range(2 * (6 + 6) + 1))
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=2e-3, err_msg=key)


def test_fit_callback_reads_logs_as_floats(cupy):
    model = convolutional(STRATEGIES["mirrored"]())
    watch = Fetches(cupy)
    fitted(model, watch, epochs=1)
    assert all(isinstance(logs, DeviceLogs) for logs in watch.logs)
    fetched = cupy.fetched
    assert list(watch.logs[0]) == ["loss", "accuracy"] and len(watch.logs[0]) == 2
    assert cupy.fetched == fetched
    # The results of later steps do not change these values.
    losses = [logs["loss"] for logs in watch.logs]
    assert all(type(loss) is float for loss in losses) and len(set(losses)) == len(losses)
    assert dict(watch.logs[0]) == {**watch.logs[0]} == watch.logs[0]
    # The end of the epoch has already fetched the results of the last step.
    assert cupy.fetched == fetched + 2 * (len(losses) - 1)
    watch.logs[1]["accuracy"] = 7
    assert watch.logs[1].copy()["accuracy"] == 7
    logs = model.evaluate(IMAGES, LABELS, verbose=0, return_dict=True)
    assert {type(value) for value in logs.values()} == {float}
    assert type(model.train_on_batch(IMAGES, LABELS)[0]) is float
    assert model.predict(IMAGES, verbose=0).__class__ is np.ndarray


def test_fit_loss_not_finite_warns_at_the_epoch_end(cupy):
    model = convolutional(STRATEGIES["one device"](), metrics=None)
    images = IMAGES.copy()
    images[9] = np.nan
    warned = []
    ends = callbacks.LambdaCallback(on_train_batch_end=lambda *_: warned.append(len(found)))
    with pytest.warns(RuntimeWarning, match="the loss is nan since step 3 of epoch 1\\.") as found:
        model.fit(images, LABELS, 4, 2, shuffle=False, verbose=0, callbacks=[ends])
    assert len(found) == 1
    assert warned == [0, 0, 0, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:the loss is nan:RuntimeWarning")
@pytest.mark.parametrize("wrong", [-1, 3])
def test_evaluate_wrong_label_gives_nan_on_a_device_and_raises_on_the_host(cupy, wrong):
    labels = LABELS.copy()
    labels[5] = wrong
    model = convolutional(STRATEGIES["mirrored"](), metrics=None)
    assert np.isnan(model.evaluate(IMAGES, labels, verbose=0))
    with pytest.raises(ValueError, match=f"label {wrong} at position"):
        convolutional(distribute.get_strategy()).evaluate(IMAGES, labels, verbose=0)


def test_embedding_number_out_of_range_gives_nan(cupy):
    with STRATEGIES["one device"]().scope():
        table = layers.Embedding(4, 2)
        rows = table(cupy.asarray(np.array([[0, 3], [4, -1]]))).numpy()
    assert np.isfinite(rows[0]).all() and np.isnan(rows[1]).all()


def test_gather_out_of_range_on_a_device_has_no_gradient(cupy):
    table = Tensor(cupy.asarray(np.ones((4, 2), np.float32)))
    with GradientTape() as tape:
        tape.watch(table)
        rows = ops.gather(table, cupy.asarray(np.array([0, 3, 4, -1, 3])))
    gradient = as_tensor(tape.gradient(rows, table)).numpy()
    np.testing.assert_array_equal(gradient, [[1, 1], [0, 0], [0, 0], [2, 2]])
