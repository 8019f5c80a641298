"""Files restore the arguments of `compile`, and contain no pickles."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from fitting import TARGETS, WEIGHTS, X, dense, mirrored

import pycollective as tf
from pycollective import keras

pytest.importorskip("h5py")


def config_in(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("config.json"))


@pytest.mark.parametrize("replicas", [1, 2])
def test_load_model_accumulate_steps_is_restored(tmp_path, replicas):
    def fit(model):
        return model.fit(X, TARGETS, 4, shuffle=False, verbose=0).history["loss"]

    with mirrored(replicas).scope():
        model = dense(2, "float64")
        model.compile(keras.optimizers.Adam(0.1), "mse", accumulate_steps=3)
    fit(model)
    model.save(tmp_path / "m.keras")
    with mirrored(replicas).scope():
        loaded = keras.models.load_model(tmp_path / "m.keras")
        described = keras.models.model_from_json(model.to_json())
    assert fit(loaded) == pytest.approx(fit(model), rel=1e-12)
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    # Two epochs of 6 batches, 3 for each step.
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 4
    for other in (loaded, described):
        assert other.get_compile_config()["accumulate_steps"] == 3
    assert not keras.models.load_model(tmp_path / "m.keras", compile=False).compiled


def test_compile_settings_are_attributes_of_the_model():
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
    assert (model.run_eagerly, model.jit_compile, model.steps_per_execution) == (False, "auto", 1)
    model.compile("sgd", "mse", run_eagerly=True, jit_compile=False, steps_per_execution=3)
    assert (model.run_eagerly, model.jit_compile, model.steps_per_execution) == (True, False, 3)


def test_save_settings_unknown_to_keras_have_their_own_key(tmp_path):
    model = dense(2)
    model.compile("sgd", "mse")
    model.save(tmp_path / "m.keras")
    plain = config_in(tmp_path / "m.keras")
    model.compile("sgd", "mse", accumulate_steps=2, auto_scale_loss=False)
    model.save(tmp_path / "m.keras")
    config = config_in(tmp_path / "m.keras")
    assert config["pycollective_compile_config"] == {"accumulate_steps": 2}
    assert set(config) == {*plain, "pycollective_compile_config"}
    # Keras accepts this argument, but never writes it.
    assert config["compile_config"].pop("auto_scale_loss") is False
    assert set(config["compile_config"]) == set(plain["compile_config"])


@pytest.mark.parametrize("scaled", [True, False])
def test_load_model_auto_scale_loss_is_restored(tmp_path, scaled):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.layers.Dense(2, input_shape=(3,))])
    finally:
        keras.mixed_precision.set_global_policy(None)
    model.compile("adam", "mse", auto_scale_loss=scaled)
    model.fit(X, TARGETS, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer) is scaled
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("value", [0, "x"])
def test_load_model_invalid_accumulate_steps_raises(tmp_path, value):
    model = dense(2)
    model.compile("sgd", "mse")
    stored = keras.saving.serialize_keras_object(model)
    stored["pycollective_compile_config"] = {"accumulate_steps": value}
    with pytest.raises((ValueError, TypeError), match="accumulate_steps|'str'"):
        keras.saving.deserialize_keras_object(stored)


def test_load_model_loss_and_metric_objects_are_restored(tmp_path):
    model = keras.Sequential([keras.layers.Dense(2, "softmax", input_shape=(3,))])
    model.compile(
        keras.optimizers.SGD(
            keras.optimizers.schedules.PolynomialDecay(0.5, 4, power=2.0), clipvalue=0.01
        ),
        keras.losses.CategoricalCrossentropy(label_smoothing=0.2, reduction="sum"),
        metrics=[keras.metrics.TopKCategoricalAccuracy(1, name="top")],
        weighted_metrics=[keras.metrics.AUC(7, "PR", name="area")],
    )
    y = np.eye(2)[X.argmax(1) % 2]
    model.fit(X, y, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for _ in range(2):
        first, second = (
            each.evaluate(X, y, sample_weight=WEIGHTS, verbose=0, return_dict=True)
            for each in (model, loaded)
        )
        assert first == second and list(first) == ["loss", "top", "area"]
        for each in (model, loaded):
            each.fit(X, y, verbose=0, shuffle=False)


# Pickles ------------------------------------------------------------------------------------------

UNPICKLES = re.compile(
    r"^\s*(?:from|import)\s.*\b(?:_pickle|cloudpickle|dill|joblib|marshal|pickle|shelve)\b"
    r"|allow_pickle\s*=\s*(?!False)|\bnp\.save\w*\(",  # pickles arrays of objects
    re.MULTILINE,
)

# `objects.py` pickles if the program passes `pickle=True` on each rank. `spawn.py` pickles between
# a process and its own children, through pipes of `multiprocessing`.
TRUSTED = ["comm/objects.py", "launch/spawn.py"]


def test_package_never_unpickles_foreign_data():
    sources = list(Path(tf.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    found = [path for path in sources if UNPICKLES.search(path.read_text())]
    root = Path(tf.__file__).parent
    assert sorted(path.relative_to(root).as_posix() for path in found) == TRUSTED
    for line in ("import pickle", "    from a.joblib import b", "f(x, allow_pickle=True)"):
        assert UNPICKLES.search(f"x = 1\n{line}\n")


def test_files_are_written_and_read_without_pickles(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("a pickle was made or read")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    model = dense(2)
    model.compile("adam", "mse")
    saves = [
        keras.callbacks.ModelCheckpoint(tmp_path / "m.keras"),
        keras.callbacks.ModelCheckpoint(tmp_path / "m.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(tmp_path / "one", save_weights_only=True),
        keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1, delete_checkpoint=False),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
    ]
    data = tf.data.Dataset.from_tensor_slices((X, TARGETS)).batch(8).cache(str(tmp_path / "cached"))
    model.fit(data, epochs=2, verbose=0, callbacks=saves)
    loaded = keras.models.load_model(tmp_path / "m.keras")
    by_weights, by_checkpoint, by_backup = dense(2, seed=5), dense(2, seed=6), dense(2, seed=7)
    by_weights.load_weights(tmp_path / "m.weights.h5")
    tf.train.Checkpoint(model=by_checkpoint).restore(str(tmp_path / "one"))
    by_backup.compile("adam", "mse")
    by_backup.fit(data, epochs=2, verbose=0, callbacks=saves[3:4])
    for other in (loaded, by_weights, by_checkpoint, by_backup):
        for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    # The magic bytes of the pickle protocols.
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert path.read_bytes()[:2] not in {bytes([0x80, n]) for n in range(2, 6)}, path
