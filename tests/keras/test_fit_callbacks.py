"""Callbacks: the order of calls, and their effects."""

from __future__ import annotations

import io
import re
import threading
import time

import numpy as np
import pytest
from fitting import STRATEGIES, linear, mirrored

import pycollective as tf
from pycollective import keras
from pycollective.keras import callbacks

ONES = np.ones((10, 1), np.float32)


class Recorder(callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda *args: self.calls.append((name[3:], *args))

    def named_calls(self):
        """Return each call's name, batch or epoch, and names in the logs."""
        return [
            tuple(" ".join(a) if isinstance(a, dict) else a for a in call if a != {})
            for call in self.calls
        ]


def test_callbacks_order_equals_that_of_keras():
    """Expected order from TensorFlow 2.21."""
    recorder = Recorder()
    model = linear(metrics=["mae"])
    model.fit(
        ONES, ONES, batch_size=5, verbose=0, epochs=1, validation_split=0.5, callbacks=[recorder]
    )
    assert recorder.named_calls() == [
        ("train_begin",),
        ("epoch_begin", 0),
        ("train_batch_begin", 0),
        ("train_batch_end", 0, "loss mae"),
        ("test_begin",),
        ("test_batch_begin", 0),
        ("test_batch_end", 0, "loss mae"),
        ("test_end", "loss mae"),
        ("epoch_end", 0, "loss mae val_loss val_mae"),
        ("train_end", "loss mae val_loss val_mae"),
    ]
    recorder.calls.clear()
    model.predict(ONES, batch_size=6, verbose=0, callbacks=[recorder])
    assert recorder.named_calls() == [
        ("predict_begin",),
        ("predict_batch_begin", 0),
        ("predict_batch_end", 0, "outputs"),
        ("predict_batch_begin", 1),
        ("predict_batch_end", 1, "outputs"),
        ("predict_end",),
    ]


@pytest.mark.parametrize("name", ["default", "mirrored 2"])
def test_callbacks_steps_per_execution_joins_batch_calls(name):
    recorder = Recorder()
    with STRATEGIES[name]().scope():
        model = linear(steps_per_execution=2, optimizer=keras.optimizers.SGD(0.0))
    model.fit(ONES, ONES, batch_size=2, verbose=0, callbacks=recorder)
    batches = [call[:2] for call in recorder.calls if call[0].startswith("train_batch")]
    assert batches == [
        ("train_batch_begin", 0),
        ("train_batch_end", 1),
        ("train_batch_begin", 2),
        ("train_batch_end", 3),
        ("train_batch_begin", 4),
        ("train_batch_end", 4),
    ]
    assert int(model.optimizer.iterations) == 5
    losses = [call[-1]["loss"] for call in recorder.calls if call[0] == "train_batch_end"]
    assert losses == [1, 1, 1]


def test_callbacks_older_names_and_lambda_callback_work():
    seen = []

    class Older(callbacks.Callback):
        def on_batch_begin(self, batch, logs=None):
            seen.append(("begin", batch))

        def on_batch_end(self, batch, logs=None):
            seen.append(("end", batch, logs["loss"]))
            assert self.model is model
            assert self.params == {"verbose": 0, "epochs": 1, "steps": 2}

    function = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(("e", epoch)))
    model = linear()
    model.fit(ONES, ONES, batch_size=5, verbose=0, callbacks=[Older(), function])
    assert [entry[:2] for entry in seen] == [
        ("begin", 0),
        ("end", 0),
        ("begin", 1),
        ("end", 1),
        ("e", 0),
    ]
    started = callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append(("t", logs)),
        on_epoch_begin=lambda epoch, logs: seen.append((epoch, logs)),
        on_train_batch_begin=lambda batch, logs: seen.append((batch, logs)),
    )
    seen.clear()
    model.fit(ONES, ONES, verbose=0, callbacks=[started])
    assert seen == [("t", {}), (0, {}), (0, {})]
    with pytest.raises(TypeError, match="on_epoch"):
        callbacks.LambdaCallback(on_epoch=print)
    with pytest.raises(TypeError, match="not a keras.callbacks.Callback"):
        model.fit(ONES, ONES, verbose=0, callbacks=[print])


def test_fit_callback_list_is_used_unchanged(capsys):
    recorder = Recorder()
    callback_list = callbacks.CallbackList([recorder], add_progbar=True)
    assert [type(callback) for callback in callback_list] == [Recorder, callbacks.ProgbarLogger]
    model = linear()
    assert (
        model.fit(ONES, ONES, epochs=2, verbose=0, callbacks=callback_list) is callback_list.history
    )
    assert callback_list.history.epoch == [0, 1]
    assert [call[1] for call in recorder.calls if call[0] == "epoch_end"] == [0, 1]
    assert capsys.readouterr().out.startswith("Epoch 1/2\n1/1 - ")


def readers():
    """Return the threads that prefetch batches."""
    return {thread for thread in threading.enumerate() if "prefetch" in thread.name}


@pytest.mark.parametrize("name", ["default", "mirrored 2"])
def test_callbacks_stop_training_ends_fit(name):
    before = readers()

    with STRATEGIES[name]().scope():
        model = linear()

    def stop(batch, logs):
        model.stop_training = batch == 1

    stops = callbacks.LambdaCallback(on_train_batch_end=stop)
    model.fit(ONES, ONES, batch_size=2, epochs=3, verbose=0, callbacks=[stops])
    assert int(model.optimizer.iterations) == 2
    assert model.history.epoch == [0]
    model.fit(ONES, ONES, batch_size=2, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 12
    # The prefetching thread must end too.
    deadline = time.monotonic() + 10
    while readers() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not readers() - before


@pytest.mark.parametrize("name", ["default", "mirrored 2", "central storage 2"])
def test_learning_rate_scheduler_sets_the_rate(name, capsys):
    with STRATEGIES[name]().scope():
        model = linear()
    rates = callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1), verbose=1)
    history = model.fit(ONES, ONES, epochs=2, verbose=0, callbacks=[rates]).history
    np.testing.assert_allclose(history["learning_rate"], [0.1, 0.05])
    # The weight is 0, then 0.2, then 0.2 + 2 * 0.05 * 0.8.
    np.testing.assert_allclose(model.get_weights()[0], [[0.28]], rtol=1e-6)
    assert (
        "Epoch 2: LearningRateScheduler setting learning rate to 0.05." in capsys.readouterr().out
    )
    halves = callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    history = model.fit(ONES, ONES, epochs=2, verbose=0, callbacks=[halves]).history
    np.testing.assert_allclose(history["learning_rate"], [0.025, 0.0125])
    with pytest.raises(TypeError, match="schedule must be callable, got 0.1"):
        callbacks.LearningRateScheduler(0.1)
    wrong = callbacks.LearningRateScheduler(lambda epoch: "fast")
    with pytest.raises(ValueError, match="should be float. Got: 'fast'"):
        model.fit(ONES, ONES, verbose=0, callbacks=[wrong])


@pytest.mark.filterwarnings("ignore:the loss is nan:RuntimeWarning")
def test_terminate_on_nan_ends_training(capsys):
    with mirrored(2).scope():
        model = linear()
    x = ONES.copy()
    x[5] = np.nan
    ends = callbacks.TerminateOnNaN()
    model.fit(x, ONES, batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=[ends])
    assert int(model.optimizer.iterations) == 3
    assert capsys.readouterr().out == "Batch 2: Invalid loss, terminating training\n"


def stopped(losses, **settings):
    """Return the epoch at which early stopping ends training on these losses, and the callback."""
    early = callbacks.EarlyStopping(**{"monitor": "loss", **settings})

    class Given(keras.Model):
        def train_step(self, data):
            return {"loss": losses[len(self.history.epoch)], "accuracy": 0.0}

    model = Given()
    model.compile()
    model.fit(ONES, epochs=len(losses), verbose=0, callbacks=[early])
    return model.history.epoch[-1], early


def test_early_stopping_stops_after_patience():
    assert stopped([3.0, 2.0, 1.0, 0.0])[0] == 3
    assert stopped([3.0, 2.0, 2.5, 0.0])[0] == 2
    assert stopped([3.0, 2.0, 2.5, 2.2, 1.0, 0.5], patience=2)[0] == 3
    assert stopped([3.0, 2.0, 2.5, 1.9, 2.5, 0.5], patience=2)[0] == 5
    assert stopped([3.0, 2.0, 1.95, 0.0], min_delta=0.1)[0] == 2
    assert stopped([3.0, 4.0, 3.5, 9.0], mode="max")[0] == 2
    # An improvement never ends training, even if it does not beat the baseline.
    assert stopped([3.0, 2.0, 1.0, 1.5, 0.6], baseline=0.5, patience=2)[0] == 3
    assert stopped([3.0, 0.4, 0.5, 0.45, 0.3], baseline=0.5, patience=2)[0] == 3
    assert stopped([3.0, 5.0, 4.0, 9.0], start_from_epoch=2)[0] == 3
    assert stopped([3.0, 2.0], monitor="accuracy")[1].mode == "max"
    assert stopped([3.0, 2.0, 2.5])[1].best == 2.0
    with pytest.warns(
        UserWarning, match=r"metric `val_loss` which is not available.*loss,accuracy"
    ):
        stopped([1.0], monitor="val_loss")
    with pytest.raises(ValueError, match="mode"):
        callbacks.EarlyStopping(mode="least")


def test_monitor_auto_mode_uses_the_metric_direction():
    """As in Keras 3, metrics whose names lack "acc" may also be better if larger."""

    class Own(keras.metrics.Metric):
        def update_state(self, y_true, y_pred, sample_weight=None):
            pass

        def result(self):
            return tf.constant(1.0)

    given = [
        keras.metrics.Precision(name="right"),
        "cosine_similarity",
        "mse",
        keras.metrics.FalseNegatives(name="missed"),
        Own("float32", "own"),
    ]
    model = linear(weighted_metrics=["mae"], metrics=given)
    expected = {"right": "max", "val_cosine_similarity": "max", "mse": "min", "missed": "min"}
    expected |= {"loss": "min", "val_mae": "min", "own": None, "val_own": None}
    for monitor, mode in expected.items():
        early = callbacks.EarlyStopping(monitor, restore_best_weights=True)
        fit = {"epochs": 1, "verbose": 0, "callbacks": [early], "validation_split": 0.5}
        if mode is None:
            with pytest.raises(ValueError, match=f"monitor={monitor}, whose direction is unknown"):
                model.fit(ONES, ONES, **fit)
        else:
            model.fit(ONES, ONES, **fit)
            assert early.mode == mode
    for early in (
        callbacks.EarlyStopping("val_acuracy"),
        callbacks.ReduceLROnPlateau("val_acuracy"),
        callbacks.ModelCheckpoint("best.keras", "val_acuracy", save_best_only=True),
    ):
        with pytest.raises(ValueError, match="correct the name, which may be one of loss, .*right"):
            model.fit(ONES, ONES, **(fit | {"callbacks": [early]}))
    # Here an overridden step returns a value under the name of a metric.
    assert stopped([3.0, 2.0], monitor="accuracy")[1].mode == "max"


@pytest.mark.parametrize("name", ["default", "mirrored 2"])
def test_early_stopping_restores_the_best_weights(name):
    with STRATEGIES[name]().scope():
        model = linear(weight=1.0, optimizer=keras.optimizers.SGD(2.0))
    early = callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    model.fit(
        ONES, 2 * ONES, epochs=9, verbose=0, callbacks=[early], validation_data=(ONES, 2 * ONES)
    )
    # The learning rate is too high: each step triples the distance from 2.
    assert model.history.epoch == [0, 1, 2]
    np.testing.assert_allclose(model.get_weights()[0], [[5.0]])
    assert early.best_epoch == 0


@pytest.mark.parametrize("name", STRATEGIES)
def test_model_checkpoint_saves_each_epoch(name, tmp_path):
    with STRATEGIES[name]().scope():
        model = linear(optimizer="adam")
    saves = callbacks.ModelCheckpoint(tmp_path / "ckpt_{epoch}_{loss:.0f}", save_weights_only=True)
    model.fit(ONES, 3 * ONES, epochs=2, verbose=0, callbacks=[saves])
    latest = tf.train.latest_checkpoint(str(tmp_path))
    assert latest == str(tmp_path / "ckpt_2_9")
    with mirrored(3).scope():
        other = linear(optimizer="adam")
    tf.train.Checkpoint(model=other).restore(latest).assert_existing_objects_matched()
    np.testing.assert_array_equal(other.get_weights()[0], model.get_weights()[0])
    assert int(other.optimizer.iterations) == 2
    model.fit(ONES, 3 * ONES, verbose=0)
    other.fit(ONES, 3 * ONES, verbose=0)
    np.testing.assert_allclose(other.get_weights()[0], model.get_weights()[0], rtol=1e-6)


def test_model_checkpoint_options_select_the_saves(tmp_path):
    model = linear(weight=1.0, optimizer=keras.optimizers.SGD(2.0))
    saves = [
        callbacks.ModelCheckpoint(
            tmp_path / "best_{epoch}", "loss", save_best_only=True, save_weights_only=True
        ),
        callbacks.ModelCheckpoint(
            tmp_path / "step_{epoch}_{batch}", save_weights_only=True, save_freq=5
        ),
    ]
    model.fit(ONES, 2 * ONES, 4, epochs=4, verbose=0, callbacks=saves)
    names = {path.name.split(".")[0] for path in tmp_path.iterdir()} - {"checkpoint"}
    # Saved after the 5th and the 10th of 12 batches.
    assert names == {"best_1", "step_2_2", "step_4_1"}
    missing = callbacks.ModelCheckpoint(
        tmp_path / "missing", save_best_only=True, save_weights_only=True
    )
    with pytest.warns(UserWarning, match="`val_loss` which is not available"):
        model.fit(ONES, ONES, verbose=0, callbacks=[missing])
    assert (tmp_path / "missing.index.json").exists()
    for path, weights_only in (tmp_path / "m.keras", True), (tmp_path / "m", False):
        with pytest.raises(ValueError, match="save_weights_only=True"):
            callbacks.ModelCheckpoint(path, save_weights_only=weights_only)
    with pytest.raises(ValueError, match="save_freq"):
        callbacks.ModelCheckpoint(tmp_path / "m", save_weights_only=True, save_freq=0)


def test_progbar_pipe_prints_one_line_per_epoch(capsys):
    model = linear(optimizer=keras.optimizers.SGD(0.0), metrics=["mae"])
    for verbose in 1, 2, "auto":
        model.fit(ONES, ONES, batch_size=4, epochs=2, verbose=verbose, validation_data=(ONES, ONES))
        out = re.sub(r"\d+s - \d+(ms|us)/step", "TIME", capsys.readouterr().out)
        numbers = "loss: 1.0000 - mae: 1.0000 - val_loss: 1.0000 - val_mae: 1.0000"
        assert out == f"Epoch 1/2\n3/3 - TIME - {numbers}\nEpoch 2/2\n3/3 - TIME - {numbers}\n"
    model.fit(ONES, ONES, verbose=0)
    model.evaluate(ONES, 1e-2 * ONES, verbose=0)
    model.predict(ONES, verbose=0)
    assert capsys.readouterr().out == ""
    model.evaluate((ONES, 1e-2 * ONES) for _ in range(2))
    out = re.sub(r"\d+s - \d+(ms|us)/step", "TIME", capsys.readouterr().out)
    assert out == "2/Unknown - TIME - loss: 1.0000e-04 - mae: 0.0100\n"
    model.predict(ONES, batch_size=3)
    out = re.sub(r"\d+s - \d+(ms|us)/step", "TIME", capsys.readouterr().out)
    assert out == "4/4 - TIME\n"


def test_progbar_terminal_updates_one_line(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("pycollective.keras.callbacks.progress._INTERVAL", 0.0)
    model = linear(optimizer=keras.optimizers.SGD(0.0))
    model.fit(ONES, ONES, batch_size=5)
    lines = re.sub(r"\d+s - \d+(ms|us)/step", "TIME", terminal.getvalue()).split("\r")
    assert [line.rstrip() for line in lines] == [
        "",
        "1/2 ━━━━━━━━━━────────── - TIME - loss: 1.0000",
        "2/2 ━━━━━━━━━━━━━━━━━━━━ - TIME - loss: 1.0000",
        "2/2 - TIME - loss: 1.0000",
    ]
    assert terminal.getvalue().endswith("\n")


@pytest.mark.parametrize("name", ["default", "mirrored 2"])
def test_callbacks_stop_flags_end_evaluate_and_predict(name):
    with STRATEGIES[name]().scope():
        model = linear()
    seen = []

    class Stops(callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            seen.append(("test", batch))
            self.model.stop_evaluating = batch == 1

        def on_predict_batch_end(self, batch, logs=None):
            seen.append(("predict", batch))
            self.model.stop_predicting = batch == 1

    model.evaluate(ONES, ONES, batch_size=2, verbose=0, callbacks=[Stops()])
    assert len(model.predict(ONES, batch_size=2, verbose=0, callbacks=[Stops()])) == 4
    assert seen == [("test", 0), ("test", 1), ("predict", 0), ("predict", 1)]
    # The next calls reset the flags.
    assert len(model.predict(ONES, batch_size=2, verbose=0)) == 10
    assert model.evaluate(np.arange(4.0), np.zeros(4), batch_size=2, verbose=0) == 0.0
    seen.clear()
    model.fit(
        ONES,
        ONES,
        epochs=2,
        validation_data=(ONES, ONES),
        validation_batch_size=2,
        verbose=0,
        callbacks=[Stops()],
    )
    assert seen == [("test", 0), ("test", 1)] * 2


def test_callback_list_forwards_the_older_names():
    seen = []

    class Older(callbacks.Callback):
        def on_batch_begin(self, batch, logs=None):
            seen.append(("begin", batch, logs))

        def on_batch_end(self, batch, logs=None):
            seen.append(("end", batch, logs))

    group = callbacks.CallbackList([Older()])
    group.on_batch_begin(0)
    group.on_batch_end(0, {"loss": 1.0})
    group.on_train_batch_begin(1)
    group.on_train_batch_end(1, {"loss": 2.0})
    assert seen == [
        ("begin", 0, {}),
        ("end", 0, {"loss": 1.0}),
        ("begin", 1, {}),
        ("end", 1, {"loss": 2.0}),
    ]
