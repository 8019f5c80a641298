"""`.keras` and weights files from untrusted sources: damage, size limits, assets."""

import contextlib
import json
import zipfile

import numpy as np
import pytest
from json_nodes import wrong_copies

from pycollective import keras
from pycollective.errors import CheckpointError
from pycollective.keras import layers

h5py = pytest.importorskip("h5py")

#: The documented errors of `load_model` and `load_weights`.
DOCUMENTED = (CheckpointError, TypeError, ValueError)


def small():
    x = keras.Input((3,), name="x")
    y = layers.Dense(3, activation="relu", name="y")(x)
    model = keras.Model(x, layers.BatchNormalization(name="z")(y) + y, name="small")
    model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "m.keras"
    small().save(path)
    return path


def members_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def test_variable_in_two_lists_is_stored_once():
    layer = layers.Layer()
    layer.first = [layer.add_weight("w", (2,))]
    layer.second = list(layer.first)
    stored = {}
    layer.save_own_variables(stored)
    assert list(stored) == ["0"]
    layer.load_own_variables({"0": np.ones(2)})
    assert layer.first[0].numpy().tolist() == [1, 1]


# Damage -------------------------------------------------------------------------------------------


def damaged(whole, count):
    """Yield copies of bytes that are truncated, or changed at some positions."""
    random = np.random.default_rng(3)
    for number in range(count):
        if number % 3 == 0:
            yield whole[: random.integers(len(whole))]
            continue
        copy = bytearray(whole)
        for _ in range(random.integers(1, 5)):
            last = 400 if number % 3 == 1 else len(copy)  # the end holds the archive's directory
            copy[len(copy) - 1 - int(random.integers(last))] = int(random.integers(256))
        yield bytes(copy)


def test_load_model_damaged_archive_raises_documented_errors(saved):
    raised = 0
    whole = saved.read_bytes()
    far = whole[:-6] + b"\xff\xff\xff\x7f" + whole[-2:]  # the offset of the archive's directory
    for data in (far, *damaged(whole, 150)):
        saved.write_bytes(data)
        try:
            keras.models.load_model(saved)
        except DOCUMENTED:
            raised += 1
    assert raised > 75


@pytest.mark.parametrize("count", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_load_weights_damaged_file_raises_documented_errors(tmp_path, count):
    model = small()
    path = tmp_path / "m.weights.h5"
    model.save_weights(path)
    raised = 0
    for data in damaged(path.read_bytes(), count):
        path.write_bytes(data)
        try:
            model.load_weights(path)
        except DOCUMENTED:
            raised += 1
    assert raised > count // 8


def config_errors(saved, *, each):
    """Load copies of the file with nodes of wrong types; return the number that raised."""
    members = members_of(saved)
    config = json.loads(members["config.json"])
    raised = 0
    for _, _, changed in wrong_copies(config, each=each):
        text = json.dumps(changed)
        write(saved, {**members, "config.json": text.encode()})
        try:
            keras.models.load_model(saved)
        except DOCUMENTED:
            raised += 1
        with contextlib.suppress(DOCUMENTED):
            keras.models.model_from_json(text)
    return raised


def test_load_model_wrong_type_in_config_raises_documented_errors(saved):
    assert config_errors(saved, each=False) > 30


@pytest.mark.slow
def test_load_model_every_wrong_type_in_config_raises_documented_errors(saved):
    assert config_errors(saved, each=True) > 500


@pytest.mark.parametrize("depth", [300, 900, 5000])
def test_load_model_deep_config_raises_documented_errors(saved, depth):
    members = members_of(saved)
    text = members["config.json"].decode()
    deep = text.replace('"loss": "mse"', '"loss": ' + '{"a":' * depth + "1" + "}" * depth)
    assert deep != text
    write(saved, {**members, "config.json": deep.encode()})
    with pytest.raises(DOCUMENTED):
        keras.models.load_model(saved)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", "", "{}", "3", "[]", '{"class_name": "Functional"}']
)
def test_model_from_json_of_something_else_raises_documented_errors(text):
    with pytest.raises(DOCUMENTED):
        keras.models.model_from_json(text)


def test_load_model_reference_to_a_missing_call_names_the_layer(saved):
    members = members_of(saved)
    config = json.loads(members["config.json"])
    config["config"]["output_layers"] = [["y", 7, 0]]
    write(saved, {**members, "config.json": json.dumps(config).encode()})
    with pytest.raises(ValueError, match='call 7 of layer "y", which is not in it'):
        keras.models.load_model(saved)


class Stubborn(layers.Layer):
    """A layer that overrides the reading of its variables."""

    def build(self, input_shape):
        self.scale = self.add_weight("scale", (3,))

    def call(self, inputs):
        return inputs * self.scale

    def save_own_variables(self, store):
        store["scale"] = self.scale.numpy()

    def load_own_variables(self, store):
        self.scale.assign(store["scale"])


def test_load_own_variables_that_raises_names_the_layer(tmp_path):
    model = keras.Sequential([keras.Input((3,)), Stubborn(name="mine")])
    path = tmp_path / "m.weights.h5"
    model.save_weights(path)
    with h5py.File(path, "r+") as file:
        file["layers/stubborn/vars"].move("scale", "other")
    with pytest.raises(CheckpointError, match=r"layer 'mine'.*KeyError"):
        model.load_weights(path)


@pytest.mark.parametrize("count", [1, 40])
def test_load_weights_values_that_expand_too_far_raise(tmp_path, count):
    model = keras.Sequential([keras.Input((3,)), Stubborn(name="mine")])
    path = tmp_path / "m.weights.h5"
    model.save_weights(path)
    each = (65 << 20) // count
    with h5py.File(path, "r+") as file:
        group = file["layers/stubborn/vars"]
        for number in range(count):
            group.create_dataset(f"x{number}", (each,), "u1", chunks=(1 << 20,), compression="gzip")
    assert path.stat().st_size < 500_000
    with pytest.raises(CheckpointError, match="too large for a file of"):
        model.load_weights(path)


def test_load_weights_items_of_gigabytes_raise_before_reading(tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1000, name="d")])
    path = tmp_path / "m.weights.h5"
    model.save_weights(path)
    with h5py.File(path, "r+") as file:
        del file["layers/dense/vars/1"]
        file["layers/dense/vars"].create_dataset("1", (1000,), "S1000000000")
    assert path.stat().st_size < 1 << 20
    with pytest.raises(CheckpointError, match="which is not numeric"):
        model.load_weights(path)


# Size limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 40])
def test_load_model_assets_that_expand_too_far_raise(saved, count):
    each = (65 << 20) // count
    bomb = {f"assets/y/{number}": b"\0" * each for number in range(count)}
    write(saved, {**members_of(saved), **bomb}, zipfile.ZIP_DEFLATED)
    assert saved.stat().st_size < 1 << 20
    with pytest.raises(CheckpointError, match=r"is refused: assets/y/\d+ has .* at most \d+ are"):
        keras.models.load_model(saved)


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_load_model_compression_unknown_to_keras_raises(saved, compression):
    write(saved, members_of(saved), compression)
    with pytest.raises(CheckpointError, match="has a compression that Keras does not use"):
        keras.models.load_model(saved)


# Assets -------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("assets")
class Vocabulary(layers.Layer):
    """A layer that stores words in a file, and in a file of a subfolder."""

    def __init__(self, words=(), **options):
        super().__init__(**options)
        self.words = list(words)
        self.seen = []

    def call(self, inputs):
        return inputs

    def get_config(self):
        return {"name": self.name}

    def save_assets(self, inner_path):
        (keras_path(inner_path) / "words.txt").write_text("\n".join(self.words))
        (keras_path(inner_path) / "sub").mkdir()
        (keras_path(inner_path) / "sub" / "count").write_bytes(bytes([len(self.words)]))

    def load_assets(self, inner_path):
        folder = keras_path(inner_path)
        self.words = (folder / "words.txt").read_text().split("\n")
        self.seen.append((folder / "sub" / "count").read_bytes())


def keras_path(path):
    """Return a path as a `Path`; Keras passes it as a string."""
    from pathlib import Path

    assert isinstance(path, str)
    return Path(path)


def test_assets_of_layers_are_saved_and_loaded(tmp_path):
    inner = keras.Sequential([keras.Input((3,)), Vocabulary(["c"])], name="inner")
    model = keras.Sequential([keras.Input((3,)), Vocabulary(["a", "b"]), layers.Dense(2), inner])
    path = tmp_path / "m.keras"
    model.save(path)
    assert {
        "assets/layers/vocabulary/words.txt",
        "assets/layers/vocabulary/sub/count",
        "assets/layers/sequential/layers/vocabulary/words.txt",
    } <= members_of(path).keys()
    loaded = keras.models.load_model(path)
    assert loaded.layers[0].words == ["a", "b"] and loaded.layers[0].seen == [b"\2"]
    assert loaded.layers[2].layers[0].words == ["c"]
    # As in Keras, a weights file has no assets.
    loaded.layers[0].words = []
    loaded.load_weights(path)
    assert loaded.layers[0].words == []


def test_assets_with_conflicting_names_raise_checkpoint_error(tmp_path):
    path = tmp_path / "m.keras"
    keras.Sequential([keras.Input((3,)), layers.Dense(2)]).save(path)
    write(path, {**members_of(path), "assets/a": b"", "assets/a/b": b""})
    with pytest.raises(CheckpointError, match="its assets have bad names"):
        keras.models.load_model(path)


# Configs of Keras ---------------------------------------------------------------------------------


def test_load_model_empty_registered_name_is_none(saved):
    members = members_of(saved)
    text = members["config.json"].replace(b'"registered_name": null', b'"registered_name": ""')
    assert text != members["config.json"]
    write(saved, {**members, "config.json": text})
    assert type(keras.models.load_model(saved).get_layer("y")) is layers.Dense


@pytest.mark.parametrize("activation", [layers.ReLU(max_value=0.5), layers.LeakyReLU(0.3)])
def test_load_model_layers_as_activations_are_restored(tmp_path, activation):
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, activation=activation)])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded.layers[0].activation) is type(activation)
    np.testing.assert_array_equal(loaded(x).numpy(), model(x).numpy())
    again = layers.Dense.from_config(model.layers[0].get_config())
    assert again.activation.get_config() == activation.get_config()


@keras.saving.register_keras_serializable("assets")
class Scaled(layers.Layer):
    """An activation with a variable."""

    def build(self, input_shape):
        self.scale = self.add_weight("scale", (), initializer="ones")

    def call(self, inputs):
        return inputs * self.scale


def test_load_model_custom_layers_as_activations_are_restored(tmp_path):
    x = np.ones((1, 3), np.float32)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, activation=Scaled())])
    model.layers[0].activation.scale.assign(3.0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert float(loaded.layers[0].activation.scale) == 3
    np.testing.assert_array_equal(loaded(x).numpy(), model(x).numpy())
