"""Callbacks that write files, go on after an interruption, or lower the learning rate."""

from __future__ import annotations

import csv
import os
import signal
import struct
import sys
import zlib

import numpy as np
import pytest
from fitting import STRATEGIES, TARGETS, X, dense, linear, mirrored

import pycollective as tf
from pycollective import keras
from pycollective.keras import callbacks
from pycollective.keras.callbacks.event_files import EventFile, masked_crc32c

ONES = np.ones((8, 1), np.float32)


# TensorBoard --------------------------------------------------------------------------------------


def records(path):
    """Yield the data of the records of a file, whose checksums are right."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body, rest = data[12 : 12 + length], data[12 + length :]
        assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
        assert struct.unpack("<I", rest[:4])[0] == masked_crc32c(body)
        yield body
        data = rest[4:]


def fields(message):
    """Return the fields of a protocol buffer by number, each a list of raw values."""
    found = {}
    place = 0

    def varint():
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        key = varint()
        if key & 7 == 0:
            value = varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            value, place = message[place : place + size], place + size
        found.setdefault(key >> 3, []).append(value)
    return found


def scalars(directory):
    """Return the numbers in a run's files by tag and step."""
    found = {}
    for path in directory.iterdir():
        for record in records(path):
            event = fields(record)
            for summary in event.get(5, []):
                (value,) = (fields(v) for v in fields(summary)[1])
                if 2 in value:
                    step = event.get(2, [0])[0]
                    found[value[1][0].decode(), step] = struct.unpack("<f", value[2][0])[0]
    return found


def test_the_checksum_is_that_of_the_standard():
    # RFC 3720, B.4: CRC-32C of 32 zeros, of 32 ones, of 0 to 31.
    for data, crc in (
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ):
        masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        assert masked_crc32c(data) == masked


def test_pictures_are_png_files(tmp_path):
    file = EventFile(tmp_path)
    image = np.array([[[0.0], [0.5]], [[1.0], [-1.0]], [[0.0], [1.0]]])
    file.image("weights", image, 3)
    file.close()
    *_, last = records(tmp_path / file.path)
    (value,) = fields(fields(last)[5][0])[1]
    picture = fields(fields(value)[4][0])
    assert (picture[1], picture[2], picture[3]) == ([3], [2], [1])
    png = picture[4][0]
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and png[12:29][:4] == b"IHDR"
    begin = png.index(b"IDAT") + 4
    (length,) = struct.unpack(">I", png[begin - 8 : begin - 4])
    rows = zlib.decompress(png[begin : begin + length])
    assert [*rows] == [0, 128, 191, 0, 255, 0, 0, 128, 255]


@pytest.mark.parametrize("name", ["default", "mirrored 2"])
def test_tensorboard(name, tmp_path):
    with STRATEGIES[name]().scope():
        model = dense(2)
        model.compile(keras.optimizers.SGD(0.03125), "mse", metrics=["mae"])
    board = callbacks.TensorBoard(
        tmp_path, histogram_freq=1, write_images=True, update_freq=2, write_steps_per_second=True
    )
    data = (X, TARGETS)
    logs = model.fit(*data, 4, epochs=2, verbose=0, callbacks=[board], validation_data=data).history
    train, held_out = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    for epoch in range(2):
        for name in ("loss", "mae"):
            assert train[f"epoch_{name}", epoch] == np.float32(logs[name][epoch])
            value = np.float32(logs[f"val_{name}"][epoch])
            assert held_out[f"epoch_{name}", epoch] == value
            assert held_out[f"evaluation_{name}_vs_iterations", 6 * (epoch + 1)] == value
        assert train["epoch_learning_rate", epoch] == 0.03125
        assert train["epoch_steps_per_second", epoch] > 0
    # Six batches in each epoch; after every second one.
    assert [s for tag, s in train if tag == "batch_loss"] == [2, 4, 6, 8, 10, 12]
    tags = {
        fields(v)[1][0].decode()
        for path in (tmp_path / "train").iterdir()
        for record in records(path)
        for summary in fields(record).get(5, [])
        for v in fields(summary)[1]
    }
    for weight in model.weights:
        assert {f"{weight.name}/histogram", f"{weight.name}/image"} <= tags
    assert "model" in tags


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"profile_batch": 2}, "PYCOLLECTIVE_TIMELINE"),
        ({"embeddings_freq": 1}, "embeddings_freq"),
        ({"update_freq": 0}, "update_freq must be"),
    ],
)
def test_what_tensorboard_cannot(settings, text):
    with pytest.raises(ValueError, match=text):
        callbacks.TensorBoard(**settings)


# Tables and pictures ------------------------------------------------------------------------------


def test_csv_logger(tmp_path):
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


def test_a_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'pycollective\[plot\]'"):
        callbacks.History().plot()


def test_history_is_plotted(tmp_path):
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
    history.plot(["loss"]).savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="there is no .'accuracy'"):
        history.plot(["accuracy"])


def test_of_several_workers_the_chief_writes(tmp_path, monkeypatch):
    model = linear()
    monkeypatch.setattr(model.distribute_strategy.extended, "should_save_summary", False)
    writes = [
        callbacks.TensorBoard(tmp_path / "logs", histogram_freq=1, update_freq="batch"),
        callbacks.CSVLogger(tmp_path / "log.csv"),
    ]
    model.fit(ONES, ONES, verbose=0, callbacks=writes, validation_data=(ONES, ONES))
    assert not list(tmp_path.iterdir())


# Interruptions ------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


class Interrupts(callbacks.Callback):
    """Raises in an epoch (None: never) once a batch is done; notes what it hears of."""

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
def test_training_goes_on_where_it_was_interrupted(name, tmp_path):
    def model():
        with STRATEGIES[name]().scope():
            made = dense(2)
            made.compile(keras.optimizers.Adam(0.1), "mse")
        return made

    def fit(model, *more):
        return model.fit(X, TARGETS, 8, 5, shuffle=False, verbose=0, callbacks=list(more))

    straight = model()
    expected = fit(straight).history["loss"]
    directory = tmp_path / "backup"
    with pytest.raises(Interrupted):
        fit(model(), callbacks.BackupAndRestore(directory), Interrupts(3))
    assert directory.exists()
    watch = Interrupts(None)
    again = model()
    logs = fit(again, callbacks.BackupAndRestore(directory), watch).history["loss"]
    assert watch.epochs == [3, 4]
    np.testing.assert_allclose(logs, expected[3:], rtol=1e-5)
    for found, right in zip(again.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)
    assert not directory.exists()


ANSWERS = (TARGETS > 0).astype(np.float32)


class Batches:
    """5 batches of 21 examples, whose number nobody knows."""

    def __iter__(self):
        return ((X[i : i + 5], ANSWERS[i : i + 5]) for i in range(0, 21, 5))


def answering(name, **compiled):
    with STRATEGIES[name]().scope():
        model = dense(2)
        metrics = ["mae", keras.metrics.AUC(from_logits=True, name="auc")]
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=metrics, **compiled)
    return model


def answered(model, kind, *more):
    data = ([X, ANSWERS], {"batch_size": 5}) if kind == "arrays" else ([Batches()], {})
    return model.fit(*data[0], epochs=4, shuffle=False, verbose=0, callbacks=more, **data[1])


@pytest.mark.parametrize(
    ("name", "together", "kind"),
    [("default", 1, "arrays"), ("mirrored 2", 1, "batches"), ("mirrored 2", 2, "arrays")],
)
def test_an_epoch_goes_on_where_it_was_interrupted(name, together, kind, tmp_path):
    compiled = {"steps_per_execution": together}
    straight, again = answering(name, **compiled), answering(name, **compiled)
    expected = answered(straight, kind).history
    backup = {"backup_dir": tmp_path / "backup", "save_freq": 13}
    with pytest.raises(Interrupted):
        answered(
            answering(name, **compiled),
            kind,
            callbacks.BackupAndRestore(**backup),
            Interrupts(2, 2),
        )
    watch = Interrupts(None)
    logs = answered(again, kind, callbacks.BackupAndRestore(**backup), watch).history
    assert watch.epochs == [2, 3]
    assert watch.batches[0] == (3 if together == 1 else 4)
    for key, values in expected.items():
        np.testing.assert_allclose(logs[key], values[2:], rtol=1e-5, err_msg=key)
    for found, right in zip(again.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize("kind", ["arrays", "batches"])
def test_behind_the_last_batch_the_next_epoch_begins(kind, tmp_path):
    backup = {"backup_dir": tmp_path / "backup", "save_freq": 5}
    with pytest.raises(Interrupted):
        answered(answering("default"), kind, callbacks.BackupAndRestore(**backup), Interrupts(0, 4))
    straight, again = answering("default"), answering("default")
    answered(straight, kind)
    watch = Interrupts(None)
    logs = answered(again, kind, callbacks.BackupAndRestore(**backup), watch).history
    # How many batches an epoch has is not known in the first one.
    assert watch.epochs == ([1, 2, 3] if kind == "arrays" else [0, 1, 2, 3])
    assert len(watch.batches) == 15 and len(logs["loss"]) == 3
    for found, right in zip(again.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5)


def test_a_signal_saves_before_it_ends_training(tmp_path):
    backup = {
        "backup_dir": tmp_path / "backup",
        "save_freq": None,
        "save_before_preemption": True,
    }

    def told(batch, logs):
        if int(model.optimizer.iterations) == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    model, straight, again = (answering("mirrored 2") for _ in range(3))
    expected = answered(straight, "arrays").history
    tells = callbacks.LambdaCallback(on_train_batch_end=told)
    try:
        with pytest.raises(SystemExit) as ended:
            answered(model, "arrays", tells, callbacks.BackupAndRestore(**backup))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 42
    assert int(model.optimizer.iterations) == 8
    watch = Interrupts(None)
    logs = answered(again, "arrays", callbacks.BackupAndRestore(**backup), watch).history
    assert watch.epochs == [1, 2, 3] and watch.batches[0] == 3
    for key, values in expected.items():
        np.testing.assert_allclose(logs[key], values[1:], rtol=1e-5, err_msg=key)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ValueError, match=r"Either `save_freq` or `save_before_preemption` must"):
        callbacks.BackupAndRestore(tmp_path, save_freq=None)


def test_a_signal_behind_the_last_step_ends_training_too(tmp_path):
    """What the program does with the model has to wait until it is started again."""
    backup = {"backup_dir": tmp_path / "backup", "save_before_preemption": True}

    def fit(model, *more):
        more = (*more, callbacks.BackupAndRestore(**backup))
        return answered(model, "arrays", *more).history

    def told(logs):
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    model, again = answering("mirrored 2"), answering("mirrored 2")
    try:
        with pytest.raises(SystemExit) as ended:
            fit(model, callbacks.LambdaCallback(on_train_end=told))
        assert ended.value.code == 42
        told(None)  # an exit has its status, whatever more signals come
    finally:
        signal.signal(signal.SIGTERM, before)
    assert int(model.optimizer.iterations) == 20
    assert fit(again) == {}
    assert int(again.optimizer.iterations) == 20
    for found, right in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, right)
    assert not (tmp_path / "backup").exists()


def test_a_signal_that_training_did_not_answer_is_not_lost(tmp_path):
    """It goes to whoever was to get it before, who gets all signals again."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))

    def told(epoch, logs):
        os.kill(os.getpid(), signal.SIGTERM)
        raise Interrupted

    backup = callbacks.BackupAndRestore(tmp_path, save_before_preemption=True)
    try:
        tells = callbacks.LambdaCallback(on_epoch_end=told)
        with pytest.raises(Interrupted):
            answered(answering("default"), "arrays", backup, tells)
        assert heard == [1]
        signal.raise_signal(signal.SIGTERM)
        assert heard == [1, 1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_backups_after_batches(tmp_path):
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


def test_whole_models_are_saved(tmp_path):
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


# The course of training ---------------------------------------------------------------------------


class Says(callbacks.Callback):
    """Puts numbers into the logs, one for each epoch."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        logs["said"] = self.values[epoch]


def test_reduce_on_plateau(capsys):
    values = [5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    plateau = callbacks.ReduceLROnPlateau(
        "said", factor=0.5, patience=2, cooldown=3, min_lr=0.3, verbose=1, mode="min"
    )
    model = linear(optimizer=keras.optimizers.SGD(1.0))
    logs = model.fit(ONES, ONES, epochs=9, verbose=0, callbacks=[Says(values), plateau]).history
    # Two epochs as good as the second; three are let pass, but for the last, which counts again.
    assert logs["learning_rate"] == pytest.approx([1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.3])
    assert "Epoch 4: ReduceLROnPlateau reducing learning rate to 0.5." in capsys.readouterr().out
    with pytest.raises(ValueError, match="does not support a factor >= 1.0"):
        callbacks.ReduceLROnPlateau(factor=1.0)
    lacking = callbacks.ReduceLROnPlateau("nothing")
    with pytest.warns(UserWarning, match="metric `nothing` which is not available"):
        model.fit(ONES, ONES, verbose=0, callbacks=[lacking])


def test_terminate_by_an_error():
    model = linear(weight=1e30)
    stop = callbacks.TerminateOnNaN(raise_error=True)
    with (
        pytest.warns(RuntimeWarning, match="since step 1 of epoch 1"),
        pytest.raises(RuntimeError, match="NaN or Inf loss encountered at batch 0"),
        np.errstate(over="ignore"),
    ):
        model.fit(ONES, ONES, verbose=0, callbacks=[stop])
