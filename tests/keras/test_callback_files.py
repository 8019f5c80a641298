"""Callbacks that write files, resume training, or reduce the learning rate."""

from __future__ import annotations

import csv
import os
import signal
import sys

import numpy as np
import pytest
from fitting import STRATEGIES, TARGETS, X, dense, linear, mirrored

import pycollective as tf
from pycollective import keras
from pycollective.keras import callbacks

ONES = np.ones((8, 1), np.float32)


# Tables and plots ---------------------------------------------------------------------------------


def test_csv_logger_writes_one_line_per_epoch(tmp_path):
    path = tmp_path / "log.csv"
    model = linear(metrics=["mae"])
    for append in False, True:
        log = callbacks.CSVLogger(path, separator=";", append=append)
        logs = model.fit(
            ONES,
            ONES,
            epochs=2,
            verbose=0,
            callbacks=[log],
            validation_data=(ONES, ONES),
            validation_freq=2,
        ).history
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter=";"))
    assert list(rows[0]) == ["epoch", "loss", "mae", "val_loss", "val_mae"]
    assert [row["epoch"] for row in rows] == ["0", "1", "0", "1"]
    assert [row["val_mae"] == "NA" for row in rows] == [True, False, True, False]
    assert [float(row["loss"]) for row in rows[2:]] == logs["loss"]
    assert float(rows[3]["val_loss"]) == logs["val_loss"][0]


def test_history_plot_without_matplotlib_raises_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    history = callbacks.History()
    history.on_epoch_end(0, {"loss": 1.0})
    with pytest.raises(ImportError, match=r"pip install 'pycollective\[plot\]'"):
        history.plot()


def test_history_plot_draws_the_results(tmp_path):
    pytest.importorskip("matplotlib")
    history = linear(metrics=["mae"]).fit(
        ONES,
        ONES,
        epochs=4,
        verbose=0,
        validation_data=(ONES, ONES),
        validation_freq=[2, 4],
    )
    figure = history.plot()
    assert [axes.get_title() for axes in figure.axes] == ["loss", "mae"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[1].get_lines()}
    assert lines["mae"] == [[i + 1, v] for i, v in enumerate(history.history["mae"])]
    values = zip([2, 4], history.history["val_mae"], strict=True)
    assert lines["val_mae"] == [[epoch, value] for epoch, value in values]
    for axes in figure.axes:
        assert all(mark == int(mark) for mark in axes.get_xticks())
    assert [text.get_text() for text in figure.legends[0].texts] == ["training", "validation"]
    history.plot(["loss"]).savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="history has no .'accuracy'"):
        history.plot(["accuracy"])


def test_csv_logger_only_the_chief_worker_writes(tmp_path, monkeypatch):
    model = linear()
    monkeypatch.setattr(model.distribute_strategy.extended, "should_save_summary", False)
    log = callbacks.CSVLogger(tmp_path / "log.csv")
    model.fit(ONES, ONES, verbose=0, callbacks=[log])
    assert not list(tmp_path.iterdir())


# Interruptions ------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


class Interrupts(callbacks.Callback):
    """Records epochs and batches, and raises after `batch` of `epoch`, unless `epoch` is None."""

    def __init__(self, epoch, batch=1):
        super().__init__()
        self.epoch, self.batch = epoch, batch
        self.epochs, self.batches = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        if self.epochs[-1] == self.epoch and batch >= self.batch:
            raise Interrupted


@pytest.mark.parametrize("name", ["default", "mirrored 2", "central storage 2"])
def test_backup_interrupted_training_resumes_at_the_epoch(name, tmp_path):
    def new_model():
        with STRATEGIES[name]().scope():
            model = dense(2)
            model.compile(keras.optimizers.Adam(0.1), "mse")
        return model

    def fit(model, *more):
        return model.fit(X, TARGETS, 8, 5, shuffle=False, verbose=0, callbacks=list(more))

    uninterrupted = new_model()
    expected = fit(uninterrupted).history["loss"]
    directory = tmp_path / "backup"
    best = callbacks.ModelCheckpoint(directory / "best", "loss", save_weights_only=True)
    with pytest.raises(Interrupted):
        fit(new_model(), callbacks.BackupAndRestore(directory), best, Interrupts(3))
    assert directory.exists()
    watch = Interrupts(None)
    resumed = new_model()
    logs = fit(resumed, callbacks.BackupAndRestore(directory), watch).history["loss"]
    assert tf.train.latest_checkpoint(directory) == str(directory / "best")
    assert watch.epochs == [3, 4]
    np.testing.assert_allclose(logs, expected[3:], rtol=1e-5)
    for found, right in zip(resumed.get_weights(), uninterrupted.get_weights(), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)
    names = {path.name.split(".")[0] for path in directory.iterdir()}
    assert names == {"best", "checkpoint"}


BINARY_TARGETS = (TARGETS > 0).astype(np.float32)


class Batches:
    """21 examples in 5 batches, without a length."""

    def __iter__(self):
        return ((X[i : i + 5], BINARY_TARGETS[i : i + 5]) for i in range(0, 21, 5))


def compiled_model(name, **compiled):
    with STRATEGIES[name]().scope():
        model = dense(2)
        metrics = ["mae", keras.metrics.AUC(from_logits=True, name="auc")]
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=metrics, **compiled)
    return model


def fitted(model, kind, *more):
    data = ([X, BINARY_TARGETS], {"batch_size": 5}) if kind == "arrays" else ([Batches()], {})
    return model.fit(*data[0], epochs=4, shuffle=False, verbose=0, callbacks=more, **data[1])


@pytest.mark.parametrize(
    ("name", "steps_per_execution", "kind"),
    [("default", 1, "arrays"), ("mirrored 2", 1, "batches"), ("mirrored 2", 2, "arrays")],
)
def test_backup_interrupted_epoch_resumes_at_the_batch(name, steps_per_execution, kind, tmp_path):
    compiled = {"steps_per_execution": steps_per_execution}
    uninterrupted, resumed = compiled_model(name, **compiled), compiled_model(name, **compiled)
    expected = fitted(uninterrupted, kind).history
    backup = {"backup_dir": tmp_path / "backup", "save_freq": 13}
    with pytest.raises(Interrupted):
        fitted(
            compiled_model(name, **compiled),
            kind,
            callbacks.BackupAndRestore(**backup),
            Interrupts(2, 2),
        )
    watch = Interrupts(None)
    logs = fitted(resumed, kind, callbacks.BackupAndRestore(**backup), watch).history
    assert watch.epochs == [2, 3]
    assert watch.batches[0] == (3 if steps_per_execution == 1 else 4)
    for key, values in expected.items():
        np.testing.assert_allclose(logs[key], values[2:], rtol=1e-5, err_msg=key)
    for found, right in zip(resumed.get_weights(), uninterrupted.get_weights(), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize("kind", ["arrays", "batches"])
def test_backup_interrupted_after_last_batch_resumes_with_next_epoch(kind, tmp_path):
    backup = {"backup_dir": tmp_path / "backup", "save_freq": 5}
    with pytest.raises(Interrupted):
        fitted(
            compiled_model("default"), kind, callbacks.BackupAndRestore(**backup), Interrupts(0, 4)
        )
    uninterrupted, resumed = compiled_model("default"), compiled_model("default")
    fitted(uninterrupted, kind)
    watch = Interrupts(None)
    logs = fitted(resumed, kind, callbacks.BackupAndRestore(**backup), watch).history
    # `Batches` has no length: in the first epoch, training cannot know which batch is the last.
    assert watch.epochs == ([1, 2, 3] if kind == "arrays" else [0, 1, 2, 3])
    assert len(watch.batches) == 15 and len(logs["loss"]) == 3
    for found, right in zip(resumed.get_weights(), uninterrupted.get_weights(), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5)


def test_backup_sigterm_saves_then_exits(tmp_path):
    backup = {
        "backup_dir": tmp_path / "backup",
        "save_freq": None,
        "save_before_preemption": True,
    }

    def send_sigterm(batch, logs):
        if int(model.optimizer.iterations) == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    model, uninterrupted, resumed = (compiled_model("mirrored 2") for _ in range(3))
    expected = fitted(uninterrupted, "arrays").history
    sender = callbacks.LambdaCallback(on_train_batch_end=send_sigterm)
    try:
        with pytest.raises(SystemExit) as ended:
            fitted(model, "arrays", sender, callbacks.BackupAndRestore(**backup))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 42
    assert int(model.optimizer.iterations) == 8
    watch = Interrupts(None)
    logs = fitted(resumed, "arrays", callbacks.BackupAndRestore(**backup), watch).history
    assert watch.epochs == [1, 2, 3] and watch.batches[0] == 3
    for key, values in expected.items():
        np.testing.assert_allclose(logs[key], values[1:], rtol=1e-5, err_msg=key)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ValueError, match=r"Either `save_freq` or `save_before_preemption` must"):
        callbacks.BackupAndRestore(tmp_path, save_freq=None)


def test_backup_sigterm_after_last_step_exits(tmp_path):
    """The program must not use the model before it is restarted."""
    backup = {"backup_dir": tmp_path / "backup", "save_before_preemption": True}

    def fit(model, *more):
        more = (*more, callbacks.BackupAndRestore(**backup))
        return fitted(model, "arrays", *more).history

    def send_sigterm(logs):
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    model, resumed = compiled_model("mirrored 2"), compiled_model("mirrored 2")
    try:
        with pytest.raises(SystemExit) as ended:
            fit(model, callbacks.LambdaCallback(on_train_end=send_sigterm))
        assert ended.value.code == 42
        send_sigterm(None)  # a further signal does not change the exit code
    finally:
        signal.signal(signal.SIGTERM, before)
    assert int(model.optimizer.iterations) == 20
    assert fit(resumed) == {}
    assert int(resumed.optimizer.iterations) == 20
    for found, right in zip(resumed.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, right)
    assert not (tmp_path / "backup").exists()


def test_backup_unhandled_sigterm_reaches_the_previous_handler(tmp_path):
    """The previous handler gets this signal and all later ones."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))

    def send_sigterm(epoch, logs):
        os.kill(os.getpid(), signal.SIGTERM)
        raise Interrupted

    backup = callbacks.BackupAndRestore(tmp_path, save_before_preemption=True)
    try:
        sender = callbacks.LambdaCallback(on_epoch_end=send_sigterm)
        with pytest.raises(Interrupted):
            fitted(compiled_model("default"), "arrays", backup, sender)
        assert received == [1]
        signal.raise_signal(signal.SIGTERM)
        assert received == [1, 1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_backup_save_freq_number_saves_after_batches(tmp_path):
    backup = callbacks.BackupAndRestore(
        tmp_path, save_freq=2, double_checkpoint=True, delete_checkpoint=False
    )
    with pytest.raises(Interrupted):
        linear().fit(ONES, ONES, 2, 3, verbose=0, callbacks=[backup, Interrupts(1)])
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert len(state.all_model_checkpoint_paths) == 2
    watch = Interrupts(None)
    linear().fit(ONES, ONES, 2, 3, verbose=0, callbacks=[backup, watch])
    assert watch.epochs == [1, 2]
    assert (tmp_path / "checkpoint").exists()
    with pytest.raises(ValueError, match="Empty `backup_dir`"):
        callbacks.BackupAndRestore("")
    for wrong in (0, -1, 1.5, True, "batch"):
        with pytest.raises(ValueError, match="save_freq"):
            callbacks.BackupAndRestore(tmp_path, wrong)


def test_model_checkpoint_saves_whole_models(tmp_path):
    pytest.importorskip("h5py")
    with mirrored(2).scope():
        model = dense(2)
        model.compile("adam", "mse", metrics=["mae"])
    saves = [
        callbacks.ModelCheckpoint(tmp_path / "to" / "m{epoch}.keras"),
        callbacks.ModelCheckpoint(tmp_path / "w{epoch}.weights.h5", save_weights_only=True),
    ]
    model.fit(X, TARGETS, epochs=2, verbose=0, callbacks=saves)
    loaded = keras.models.load_model(tmp_path / "to" / "m2.keras")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-6)
    np.testing.assert_allclose(
        loaded.evaluate(X, TARGETS, verbose=0),
        model.evaluate(X, TARGETS, verbose=0),
        rtol=1e-6,
    )
    assert int(loaded.optimizer.iterations) == 2
    other = dense(2, seed=5)
    other.load_weights(tmp_path / "w2.weights.h5")
    for found, right in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, right)


# Monitored values ---------------------------------------------------------------------------------


class SetsValues(callbacks.Callback):
    """Sets a given value in the logs of each epoch."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        logs["said"] = self.values[epoch]


def test_reduce_on_plateau_lowers_the_learning_rate(capsys):
    values = [5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    plateau = callbacks.ReduceLROnPlateau(
        "said", factor=0.5, patience=2, cooldown=3, min_lr=0.3, verbose=1, mode="min"
    )
    model = linear(optimizer=keras.optimizers.SGD(1.0))
    logs = model.fit(
        ONES, ONES, epochs=9, verbose=0, callbacks=[SetsValues(values), plateau]
    ).history
    # The third and fourth epochs do not improve. The cooldown covers three epochs, and
    # `patience` counts the last of them.
    assert logs["learning_rate"] == pytest.approx([1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.3])
    assert "Epoch 4: ReduceLROnPlateau reducing learning rate to 0.5." in capsys.readouterr().out
    with pytest.raises(ValueError, match="does not support a factor >= 1.0"):
        callbacks.ReduceLROnPlateau(factor=1.0)
    lacking = callbacks.ReduceLROnPlateau("nothing", mode="min")
    with pytest.warns(UserWarning, match="metric `nothing` which is not available"):
        model.fit(ONES, ONES, verbose=0, callbacks=[lacking])


def test_terminate_on_nan_raise_error_raises():
    model = linear(weight=1e30)
    stop = callbacks.TerminateOnNaN(raise_error=True)
    with (
        pytest.warns(RuntimeWarning, match="since step 1 of epoch 1"),
        pytest.raises(RuntimeError, match="NaN or Inf loss encountered at batch 0"),
        np.errstate(over="ignore"),
    ):
        model.fit(ONES, ONES, verbose=0, callbacks=[stop])


def test_error_of_fit_closes_the_files_of_callbacks(tmp_path):
    class Fails(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("stop")

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    table = callbacks.CSVLogger(str(tmp_path / "log.csv"))
    with pytest.raises(RuntimeError, match="stop"):
        model.fit(X, X[:, :1], callbacks=[table, Fails()], verbose=0)
    assert table._file is None
