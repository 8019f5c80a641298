"""Training by two processes: files of callbacks, an interruption, accumulated batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pycollective import keras

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
import numpy as np
import pycollective as tf
from pycollective import keras

directory, stop = sys.argv[1], int(sys.argv[2])
x = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
with tf.distribute.MultiWorkerMirroredStrategy().scope():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [layers.Dense(4, "relu", input_shape=(3,)), layers.BatchNormalization(), layers.Dense(2)]
    )
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.01))
    model.compile(optimizer, "mse", metrics=["mae"], accumulate_steps=2)


class Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        # In the middle of the epoch: 2 of its 4 batches have been trained.
        if self.epoch == stop and batch == 1:
            raise SystemExit(7)


data = x, x[:, :2]
listeners = [
    keras.callbacks.TensorBoard(directory + "/logs", histogram_freq=1),
    keras.callbacks.CSVLogger(directory + "/log.csv", append=True),
    keras.callbacks.BackupAndRestore(directory + "/backup", save_freq=2),
    Stop(),
]
history = model.fit(
    *data, 10, 4, verbose=0, shuffle=False, callbacks=listeners, validation_data=data
)
print(history.epoch, *(f"{value:.7f}" for value in history.history["loss"]))
print(*(f"{w.sum():.6f}" for w in model.get_weights()))
"""


SAVING = """
import sys
import numpy as np
import pycollective as tf
from pycollective import keras

directory = sys.argv[1]
x = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
data = x, x[:, :2]


def same(first, second):
    for a, b in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [layers.Dense(4, "relu", input_shape=(3,)), layers.BatchNormalization(), layers.Dense(2)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", accumulate_steps=2)
listeners = [
    keras.callbacks.ModelCheckpoint(directory + "/m{epoch}.keras"),
    keras.callbacks.ModelCheckpoint(directory + "/best.keras", monitor="loss", save_best_only=True),
]
model.fit(*data, 10, 2, verbose=0, shuffle=False, callbacks=listeners)
with strategy.scope():
    loaded = keras.models.load_model(directory + "/m2.keras")
assert loaded.distribute_strategy is strategy
assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 4
same(loaded, model)
for each in (model, loaded):
    each.fit(*data, 10, 1, verbose=0, shuffle=False)
same(loaded, model)
model.save(directory + "/last.keras")
model.save_weights(directory + "/last.weights.h5")
with strategy.scope():
    # Each worker had a moving mean of its own; a file has the mean of these.
    last = keras.models.load_model(directory + "/last.keras")
print(*(f"{value:.5f}" for value in last.predict(x, verbose=0).sum(axis=0)))
print(f"{last.evaluate(*data, verbose=0):.5f}")
"""


def trained(program, directory, stop=99):
    """Return the exit code, and the lines that the two workers printed, each once."""
    directory.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pycollective",
        "run",
        "-n",
        "2",
        program,
        directory,
        str(stop),
    ]
    run = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    lines = run.stdout.splitlines()
    assert run.returncode in (0, 7) and (run.returncode or len(lines) == 4), run.stderr
    return run.returncode, sorted(set(lines))


def test_fit_two_workers_save_whole_models(tmp_path):
    pytest.importorskip("h5py")
    program = tmp_path / "save.py"
    program.write_text(SAVING)
    status, lines = trained(program, tmp_path / "to")
    # Both workers have equal results, and one of them wrote the file.
    assert status == 0 and len(lines) == 2
    names = {path.name for path in (tmp_path / "to").iterdir()}
    last = {"last.keras", "last.weights.h5"}
    assert names == {"m1.keras", "m2.keras", "best.keras", *last}
    x = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    # The model is loaded without a strategy.
    model = keras.models.load_model(tmp_path / "to" / "last.keras")
    found = [*model.predict(x, verbose=0).sum(axis=0), model.evaluate(x, x[:, :2], verbose=0)]
    printed = [float(word) for line in lines for word in line.split()]
    np.testing.assert_allclose(sorted(found), sorted(printed), rtol=1e-4, atol=2e-5)
    assert int(model.optimizer.iterations) == 6
    model.load_weights(tmp_path / "to" / "m1.keras")
    assert int(model.optimizer.iterations) == 2
    model.load_weights(tmp_path / "to" / "last.weights.h5")
    np.testing.assert_allclose(model.predict(x, verbose=0).sum(axis=0), found[:2], rtol=1e-6)


def test_fit_two_workers_backup_and_accumulate(tmp_path):
    pytest.importorskip("tensorboard")
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    status, uninterrupted = trained(program, tmp_path / "uninterrupted")
    assert status == 0 and len(uninterrupted) == 2
    assert trained(program, tmp_path / "parts", 2)[0] != 0
    assert (tmp_path / "parts" / "backup").exists()
    status, parts = trained(program, tmp_path / "parts")
    assert status == 0

    def numbers(lines, start):
        (line,) = (line for line in lines if line.startswith("[") == (start == "["))
        return np.array([float(word) for word in line.split("]")[-1].split()])

    np.testing.assert_allclose(numbers(parts, "["), numbers(uninterrupted, "[")[2:], rtol=1e-5)
    np.testing.assert_allclose(numbers(parts, ""), numbers(uninterrupted, ""), rtol=1e-4, atol=1e-5)
    for name, runs in (("uninterrupted", 1), ("parts", 2)):
        directory = Path(tmp_path / name)
        assert sorted(p.name for p in directory.iterdir()) == ["log.csv", "logs"]
        assert len((directory / "log.csv").read_text().splitlines()) == 5
        assert len(list((directory / "logs" / "train").iterdir())) == runs
