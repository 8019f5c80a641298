"""Files of whole models and of weights, and the configs of objects."""

import io
import json
import pathlib
import warnings
import zipfile

import numpy as np
import pytest
from fitting import mirrored

from pycollective import keras
from pycollective.errors import CheckpointError
from pycollective.keras import layers
from pycollective.keras.saving.weights import owners_of
from pycollective.tensor import function

h5py = pytest.importorskip("h5py")

RANDOM = np.random.default_rng(7)
A = RANDOM.standard_normal((8, 4)).astype(np.float32)
B = RANDOM.standard_normal((8, 3)).astype(np.float32)
Y = RANDOM.standard_normal((8, 2)).astype(np.float32)


def row(**compiled):
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, "relu"), layers.Dropout(0.2), layers.Dense(2)],
        name="row",
    )
    if compiled:
        model.compile(**compiled)
    return model


def graph():
    first, second = keras.Input((4,), name="first"), keras.Input((3,), name="second")
    shared = layers.Dense(2, name="shared")
    inner = keras.Sequential([layers.Dense(3), layers.Dense(4)], name="inner")
    x = shared(inner(first) - 1.0)
    y = shared(layers.Dense(4, name="side")(second))
    return keras.Model({"first": first, "second": second}, {"sum": x + y, "x": x}, name="graph")


class Block(layers.Layer):
    """A layer with sublayers, which its constructor makes."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = units
        self.many = [layers.Dense(units), layers.Dense(units)]

    def call(self, inputs):
        return self.many[1](self.many[0](inputs))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class Own(keras.Model):
    """A subclassed model."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = units
        self.z_last = layers.Dense(units)
        self.block = Block(3)

    def call(self, inputs):
        return self.z_last(self.block(inputs))

    def get_config(self):
        return {"units": self.units, "name": self.name}


def rewritten(path, change):
    """Return the path of a copy of an archive with members changed by ``change``."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    target = path.with_name("changed.keras")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return target


def with_config(change):
    def changed(members):
        config = json.loads(members["config.json"])
        change(config)
        members["config.json"] = json.dumps(config).encode()

    return changed


def with_weights(change):
    def changed(members):
        target = io.BytesIO(members["model.weights.h5"])
        with h5py.File(target, "r+") as file:
            change(file)
        members["model.weights.h5"] = target.getvalue()

    return changed


# Round trips --------------------------------------------------------------------------------------


def test_load_model_sequential_restores_the_optimizer(tmp_path):
    path = tmp_path / "m.keras"
    model = row(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    model.fit(A, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    model.save(path)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["metadata.json", "config.json", "model.weights.h5"]
        assert json.loads(archive.read("metadata.json"))["keras_version"].startswith("3.")
    loaded = keras.models.load_model(path)
    assert type(loaded) is keras.Sequential and loaded.name == "row"
    np.testing.assert_array_equal(loaded.predict(A, verbose=0), model.predict(A, verbose=0))
    assert loaded.evaluate(A, Y, verbose=0) == model.evaluate(A, Y, verbose=0)
    assert int(loaded.optimizer.iterations) == 4
    for kept, restored in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(restored.numpy(), kept.numpy())
    bare = keras.models.load_model(path, compile=False)
    assert not bare.compiled
    np.testing.assert_array_equal(bare(A).numpy(), model(A).numpy())


@pytest.mark.parametrize("late", ["an output without a loss", "unfrozen later"])
def test_load_model_keeps_slots_of_variables_that_had_no_gradient(tmp_path, late):
    """The slots of both layers have the same shapes, so that they could be exchanged."""
    x = keras.Input((4,))
    hidden = layers.Dense(4, name="one")(x)
    if late == "unfrozen later":
        model, loss = keras.Model(x, layers.Dense(4, name="two")(hidden)), "mse"
        model.layers[1].trainable = False
    else:
        model, loss = keras.Model(x, [hidden, layers.Dense(4, name="two")(x)]), [None, "mse"]
    outputs = 1 if loss == "mse" else 2

    def losses(model, epochs):
        # Without a gradient, a variable is named in a warning.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            targets = [A] * outputs if outputs > 1 else A
            made = model.fit(A, targets, epochs=epochs, shuffle=False, verbose=0)
        return made.history["loss"]

    model.compile(keras.optimizers.Adam(0.05), loss)
    losses(model, 2)
    if late == "unfrozen later":
        model.layers[1].trainable = True
        model.compile(model.optimizer, loss)
        losses(model, 2)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)
    assert losses(loaded, 3) == losses(model, 3)


def test_load_model_functional_is_restored(tmp_path):
    model = graph()
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert [layer.name for layer in loaded.layers] == [layer.name for layer in model.layers]
    given = {"first": A, "second": B}
    for key, value in model(given).items():
        np.testing.assert_array_equal(loaded(given)[key].numpy(), value.numpy())
    assert len(loaded.weights) == len(model.weights) == 8


def test_load_model_subclassed_is_restored(tmp_path):
    model = Own(2, name="mine")
    model(A)
    model.save(tmp_path / "m.keras")
    custom = {"Own": Own, "Block": Block}
    loaded = keras.models.load_model(tmp_path / "m.keras", custom_objects=custom)
    assert type(loaded) is Own and loaded.name == "mine"
    np.testing.assert_array_equal(loaded(A).numpy(), model(A).numpy())
    with h5py.File(io.BytesIO(zipfile.ZipFile(tmp_path / "m.keras").read("model.weights.h5"))) as f:
        # Paths consist of attribute names; attributes sorted after "layers" are stored under it.
        assert f["block/many/dense/vars/0"].shape == (4, 3)
        assert f["block/many/dense_1/vars/1"].shape == (3,)
        assert f["layers/dense/vars/0"].shape == (3, 2)


class Plain(keras.Model):
    """A subclassed model without `get_config`."""

    def __init__(self, units, factor=1.0, **options):
        super().__init__(**options)
        self.factor = factor
        self.block = Block(units)

    def call(self, inputs):
        return self.block(inputs) * self.factor


def test_load_model_custom_classes_without_get_config_are_restored(tmp_path):
    custom = {"Plain": Plain, "Block": Block}
    row = keras.Sequential([keras.Input((4,)), Block(3, name="b"), layers.Dense(2)])
    plain = Plain(2, factor=2.0)
    plain(A)
    for model in (row, plain):
        model.save(tmp_path / "m.keras")
        loaded = keras.models.load_model(tmp_path / "m.keras", custom)
        np.testing.assert_array_equal(loaded(A).numpy(), model(A).numpy())
    assert keras.saving.serialize_keras_object(plain)["config"]["factor"] == 2.0

    class Takes(Plain):
        def __init__(self, layer):
            super().__init__(1)

    with pytest.raises(NotImplementedError, match="Takes must override get_config"):
        Takes(layers.Dense(1)).get_config()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_load_model_into_another_number_of_replicas_continues_training(tmp_path, before, after):
    start = row().get_weights()
    with mirrored(before).scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(5, "relu"), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.set_weights(start)
    model.fit(A, Y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    model.save(tmp_path / "m.keras")
    with mirrored(after).scope():
        loaded = keras.models.load_model(tmp_path / "m.keras")
    assert loaded.distribute_strategy.num_replicas_in_sync == after
    for each in (model, loaded):
        each.fit(A, Y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_save_weights_and_load_weights_round_trip(tmp_path):
    model, other = row(), row()
    model.save_weights(tmp_path / "m.weights.h5")
    other.load_weights(tmp_path / "m.weights.h5")
    for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    with h5py.File(tmp_path / "m.weights.h5") as file:
        assert file["layers/dense/vars/0"].shape == (4, 5)
        assert file["layers/dense/vars"].attrs["name"] == model.layers[0].name
        assert file["layers/dense_1/vars/1"].shape == (2,)
    model.save(tmp_path / "m.keras")
    third = row()
    third.load_weights(tmp_path / "m.keras")
    np.testing.assert_array_equal(third(A).numpy(), model(A).numpy())


def test_save_every_layer_of_nested_models_is_stored():
    x = y = keras.Input((4,))
    for _ in range(20):
        first = keras.Input((4,))
        y = keras.Model(first, layers.Dense(4)(first))(y)
    model = keras.Model(x, y)
    paths = [path for path, owner in owners_of(model) if isinstance(owner, layers.Dense)]
    names = ["functional", *(f"functional_{number}" for number in range(1, 20))]
    assert paths == [f"layers/{name}/layers/dense" for name in names]


class Table(layers.Layer):
    """A layer that stores more than its variables, as in Keras's guide."""

    def __init__(self, **options):
        super().__init__(**options)
        self.names = []
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs):
        return inputs * self.scale + len(self.names)

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["names"] = np.array(self.names)

    def load_own_variables(self, store):
        self.names = store["names"].tolist()
        super().load_own_variables({"0": store["0"]})


def test_save_own_variables_override_round_trip(tmp_path):
    def new_model():
        return keras.Sequential([keras.Input((4,)), layers.Dense(4), Table(name="table")])

    model = new_model()
    model.layers[1].names = [3, 1, 2]
    model.layers[1].scale.assign(0.5)
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    loaded = keras.models.load_model(tmp_path / "m.keras", {"Table": Table})
    other = new_model()
    other.load_weights(tmp_path / "m.weights.h5")
    for each in loaded, other:
        assert each.layers[1].names == [3, 1, 2]
        np.testing.assert_array_equal(each(A).numpy(), model(A).numpy())
    with h5py.File(tmp_path / "m.weights.h5", "r+") as file:
        del file["layers/table/vars/0"]
        file["layers/table/vars/0"] = np.zeros(2, np.float32)
    with pytest.raises(
        ValueError, match=r"'table' has variables of shapes \[\(\)\], .* \[\(2,\)\]"
    ):
        new_model().load_weights(tmp_path / "m.weights.h5")
    with h5py.File(tmp_path / "m.weights.h5", "r+") as file:
        del file["layers/table/vars/0"]
        options = {"chunks": (1024, 1024), "compression": "gzip"}
        file["layers/table/vars"].create_dataset("0", (1 << 15, 1 << 15), "f4", **options)
    with pytest.raises(CheckpointError, match="would have 4294967296 bytes"):
        new_model().load_weights(tmp_path / "m.weights.h5")


def test_load_model_shared_layers_stay_shared(tmp_path):
    dense = layers.Dense(4, name="dense")
    first = keras.Sequential([keras.Input((4,)), dense], name="one")
    second = keras.Sequential([keras.Input((4,)), dense, layers.Dense(2)], name="two")
    x = keras.Input((4,))
    model = keras.Model(x, second(first(x)))
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert loaded.get_layer("one").layers[0] is loaded.get_layer("two").layers[0]
    assert len(loaded.weights) == 4
    np.testing.assert_array_equal(loaded(A).numpy(), model(A).numpy())


def test_json_keeps_frozen_layers_frozen():
    model = graph()
    model.get_layer("side").trainable = False
    again = keras.models.model_from_json(model.to_json(indent=1))
    assert again.get_config() == model.get_config()
    assert len(again.trainable_weights) == len(model.trainable_weights) == 6
    copy = keras.Model.from_config(model.get_config())
    assert copy.to_json() == model.to_json()


def test_save_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    model = row()
    model.save(tmp_path / "m.keras")
    before = (tmp_path / "m.keras").read_bytes()
    with pytest.raises(FileExistsError, match="overwrite=False"):
        model.save(tmp_path / "m.keras", overwrite=False)

    def broken(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="no space"):
        model.save(tmp_path / "m.keras")
    assert (tmp_path / "m.keras").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.keras"]


def test_save_in_replica_raises_runtime_error(tmp_path):
    strategy = mirrored(2)
    with strategy.scope():
        model = row()
    for method, name in (("save", "m.keras"), ("save_weights", "m.weights.h5")):
        with pytest.raises(RuntimeError, match=f"Model.{method}.. was called in a replica"):
            strategy.run(getattr(model, method), args=(tmp_path / name,))
    assert not list(tmp_path.iterdir())


def test_save_without_h5py_raises_import_error(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(ImportError, match=r"pip install 'pycollective\[files\]'"):
        row().save(tmp_path / "m.keras")
    assert not list(tmp_path.iterdir())


# Configs of objects -------------------------------------------------------------------------------


def test_serialize_layer_equals_keras_format():
    dense = layers.Dense(3, activation="relu", name="d")
    dense.build((None, 4))
    stored = keras.saving.serialize_keras_object(dense)
    assert {key: stored[key] for key in ("module", "class_name", "registered_name")} == {
        "module": "keras.layers",
        "class_name": "Dense",
        "registered_name": None,
    }
    assert stored["build_config"] == {"input_shape": (None, 4)}
    assert stored["config"]["units"] == 3 and stored["config"]["activation"] == "relu"
    again = keras.saving.deserialize_keras_object(json.loads(json.dumps(stored)))
    assert again.built and again.units == 3 and again.name == "d"


def test_serialize_graph_equals_keras_format():
    x = keras.Input((4,), name="x")
    y = layers.Dense(2, name="y")(x) * 2.0
    config = json.loads(keras.Model(x, y, name="m").to_json())
    assert (config["module"], config["class_name"]) == ("keras.src.models.functional", "Functional")
    assert config["build_config"] == {"input_shape": None}
    inside = config["config"]
    assert inside["input_layers"] == ["x", 0, 0] and inside["name"] == "m"
    first, second, third = inside["layers"]
    assert first["inbound_nodes"] == [] and first["config"]["batch_shape"] == [None, 4]
    assert second["inbound_nodes"] == [
        {
            "args": [
                {
                    "class_name": "__keras_tensor__",
                    "config": {
                        "shape": [None, 4],
                        "dtype": "float32",
                        "keras_history": ["x", 0, 0],
                    },
                }
            ],
            "kwargs": {},
        }
    ]
    assert (third["module"], third["class_name"], third["registered_name"]) == (
        "keras.src.ops.numpy",
        "Multiply",
        "Multiply",
    )
    assert third["inbound_nodes"][0]["args"][1] == 2.0
    assert inside["output_layers"] == [third["name"], 0, 0]


def test_load_graph_default_call_arguments_of_keras_are_dropped():
    x = keras.Input((4,), name="x")
    inner = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5)], name="inner")
    model = keras.Model(x, inner(layers.Dropout(0.5, name="drop")(x)))
    config = json.loads(model.to_json())
    inside = config["config"]
    assert inside["output_layers"] == ["inner", 0, 0]
    for layer in inside["layers"][1:]:
        # Keras writes these defaults. For a nested model, they count as the program's arguments.
        layer["inbound_nodes"][0]["kwargs"] = {"training": False, "mask": None}
    loaded = keras.saving.deserialize_keras_object(config)
    share = (loaded(np.ones((100, 4)), training=True).numpy() == 0).mean()
    assert 0.4 < share < 0.6


def test_serialize_nested_model_outputs_are_numbered_as_in_keras():
    first = keras.Input((4,))
    inner = keras.Model(first, layers.Dense(2)(first), name="inner")
    x = keras.Input((4,), name="x")
    model = keras.Model(x, [inner(x), inner(x * 2.0)])
    stored = json.loads(model.to_json())
    assert stored["config"]["output_layers"] == [["inner", 1, 0], ["inner", 2, 0]]
    loaded = keras.saving.deserialize_keras_object(stored)
    loaded.set_weights(model.get_weights())
    for a, b in zip(loaded(A), model(A), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "text",
        [1, 2.5, None],
        {"a": {"b": True}},
        b"bytes",
        slice(1, None, 2),
        Ellipsis,
        np.arange(6.0).reshape(2, 3),
    ],
    ids=repr,
)
def test_serialize_values_round_trip(value):
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(value)))
    np.testing.assert_equal(keras.saving.deserialize_keras_object(stored), value)


def test_serialize_registered_classes_and_functions_keeps_their_names():
    @keras.saving.register_keras_serializable("mine", "Twice")
    class Double(layers.Layer):
        def call(self, inputs):
            return inputs * 2.0

        def compute_output_shape(self, input_shape):
            return input_shape

        def get_config(self):
            return super().get_config()

    stored = keras.saving.serialize_keras_object(Double(name="d"))
    assert stored["registered_name"] == "mine>Twice"
    assert type(keras.saving.deserialize_keras_object(stored)) is Double
    assert keras.saving.get_registered_name(Double) == "mine>Twice"
    assert keras.saving.get_registered_object("mine>Twice") is Double
    del keras.saving.get_custom_objects()["mine>Twice"]
    with pytest.raises(TypeError, match=r"Could not locate class 'mine>Twice'"):
        keras.saving.deserialize_keras_object(stored)
    with keras.saving.custom_object_scope({"mine>Twice": Double}):
        assert type(keras.saving.deserialize_keras_object(stored)) is Double

    def mean_of_squares(y_true, y_pred):
        return (y_true - y_pred) ** 2

    stored = keras.saving.serialize_keras_object(mean_of_squares)
    assert stored["config"] == "mean_of_squares"
    with pytest.raises(TypeError, match="Could not locate function"):
        keras.saving.deserialize_keras_object(stored)
    assert (
        keras.saving.deserialize_keras_object(stored, {"mean_of_squares": mean_of_squares})
        is mean_of_squares
    )
    decorated = function(mean_of_squares)
    assert keras.saving.serialize_keras_object(decorated) == stored
    assert (
        keras.saving.deserialize_keras_object(stored, {"mean_of_squares": decorated}) is decorated
    )
    with pytest.raises(ValueError, match="files hold no code"):
        keras.saving.serialize_keras_object(lambda x: x)
    with pytest.raises(TypeError, match="get_config"):
        keras.saving.serialize_keras_object(object())
    with pytest.raises(ValueError, match="does not have a get_config"):
        keras.saving.register_keras_serializable()(type("No", (), {}))


# Bad files ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "m.keras"
    row().save(path)
    return path


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_load_model_truncated_archive_raises_checkpoint_error(saved, share):
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"m\.keras.*truncated"):
        keras.models.load_model(saved)


def lambda_layer(config):
    config["config"]["layers"][2] = {
        "module": "keras.layers",
        "class_name": "Lambda",
        "config": {"function": {"class_name": "__lambda__", "config": {"code": "4wEA"}}},
        "registered_name": None,
    }


def rename(index, **changed):
    return with_config(lambda config: config["config"]["layers"][index].update(changed))


def wrong_shape(file):
    del file["layers/dense/vars/0"]
    file["layers/dense/vars/0"] = np.zeros((4, 6), np.float32)


def bomb(file):
    del file["layers/dense/vars/0"]
    file["layers/dense/vars"].create_dataset(
        "0", (1 << 20, 1 << 20), "f4", chunks=(1024, 1024), compression="gzip"
    )


def linked(file):
    del file["layers/dense/vars/0"]
    file["layers/dense/vars/0"] = h5py.ExternalLink("/etc/passwd", "/x")


def external(file):
    del file["layers/dense/vars/0"]
    file["layers/dense/vars"].create_dataset("0", (4, 5), "f4", external=[("/etc/hostname", 0, 80)])


def text(file):
    del file["layers/dense/vars/1"]
    file["layers/dense/vars/1"] = np.array([b"abc"] * 5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            rename(1, class_name="Mystery"),
            TypeError,
            "Could not locate class 'Mystery'.*custom_objects",
        ),
        (rename(1, module="os", class_name="system"), TypeError, "class 'system'"),
        (
            rename(1, module="keras.utils", class_name="set_random_seed"),
            TypeError,
            "class 'set_random_seed'",
        ),
        (rename(1, module="keras.models", class_name="Trainer"), TypeError, "class 'Trainer'"),
        (with_config(lambda_layer), ValueError, "potential risk of arbitrary code execution"),
        (with_config(lambda c: c["config"].pop("layers")), ValueError, "'layers' keys"),
        (with_config(lambda c: c.pop("class_name")), CheckpointError, "describes none"),
        (
            with_config(lambda c: c.update(compile_config=[1])),
            CheckpointError,
            "'compile_config' in its config.json is no object",
        ),
        (lambda m: m.update({"config.json": b"{"}), CheckpointError, "not JSON"),
        (lambda m: m.update({"config.json": b"[" * 100_000}), CheckpointError, "not JSON"),
        (lambda m: m.pop("config.json"), CheckpointError, "there is no config.json"),
        (lambda m: m.pop("model.weights.h5"), CheckpointError, "there is no model.weights.h5"),
        (lambda m: m.update({"../evil": b""}), CheckpointError, "'../evil' in it leads out"),
        (lambda m: m.update({"/etc/x": b""}), CheckpointError, "leads out"),
        (lambda m: m.update({"a\\..\\b": b""}), CheckpointError, "leads out"),
        (
            lambda m: m.update({"config.json": b" " * (65 << 20)}),
            CheckpointError,
            "would be 68157440 unpacked, at most 67108864",
        ),
        (
            lambda m: m.update({"model.weights.h5": b"\0" * (65 << 20)}),
            CheckpointError,
            r"model\.weights\.h5 has .* unpacked, at most",
        ),
        (
            lambda m: m.update({"model.weights.h5": m["model.weights.h5"][:900]}),
            CheckpointError,
            "truncated",
        ),
        (
            with_weights(wrong_shape),
            CheckpointError,
            r"'dense.*' \(layers/dense\): kernel has shape \(4, 5\), in the file \(4, 6\)",
        ),
        (with_weights(bomb), CheckpointError, r"in the file \(1048576, 1048576\)"),
        (with_weights(linked), CheckpointError, "is a ExternalLink"),
        (with_weights(external), CheckpointError, "are in another file"),
        (with_weights(text), CheckpointError, "which is not numeric"),
        (
            with_weights(lambda file: file.pop("layers/dense_1")),
            CheckpointError,
            r"\(layers/dense_1\) has 2 variables \(kernel \(5, 2\), bias \(2,\)\), the file 0",
        ),
        (
            with_weights(
                lambda f: f.create_group("layers/conv2d/vars").create_dataset("0", (1,), "f4")
            ),
            CheckpointError,
            "1 variables for layers/conv2d, where the model has no layer",
        ),
    ],
)
def test_load_model_invalid_archive_raises(saved, change, error, message):
    with pytest.raises(error, match=message):
        keras.models.load_model(rewritten(saved, change))


def test_load_model_reads_each_group_once_however_many_names_it_has(saved):
    """Otherwise the time would double with each level."""

    def names(file):
        group = file.create_group("seed")
        for level in range(40):
            inside = file.create_group(f"level_{level}")
            group["a"] = group["b"] = inside
            del file[f"level_{level}"]
            group = inside
        group["back"] = file["seed"]

    model = keras.models.load_model(rewritten(saved, with_weights(names)))
    assert len(model.layers) == 3


def test_load_model_duplicate_members_raise(saved):
    with pytest.warns(UserWarning, match="Duplicate name"):
        with zipfile.ZipFile(saved, "a") as archive:
            archive.writestr("config.json", "{}")
    with pytest.raises(CheckpointError, match="have the same name"):
        keras.models.load_model(saved)


def test_load_weights_mismatch_changes_nothing(saved):
    other = keras.Sequential([keras.Input((4,)), layers.Dense(5), layers.Dense(3)])
    before = other.get_weights()
    with pytest.raises(
        CheckpointError, match=r"(?s)kernel has shape \(5, 3\).*bias.*Nothing was changed"
    ):
        other.load_weights(saved)
    for a, b in zip(other.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.warns(UserWarning, match="These were skipped"):
        other.load_weights(saved, skip_mismatch=True)
    assert (other.get_weights()[0] != before[0]).any()
    np.testing.assert_array_equal(other.get_weights()[2], before[2])


def test_save_and_load_wrong_paths_or_models_raise(tmp_path):
    model = row()
    with pytest.raises(ValueError, match="Invalid filepath extension"):
        model.save(tmp_path / "m.h5")
    with pytest.raises(ValueError, match=r"must end in `\.weights\.h5`"):
        model.save_weights(tmp_path / "m.h5")
    with pytest.raises(ValueError, match="File format not supported"):
        keras.models.load_model(tmp_path / "m.h5")
    with pytest.raises(ValueError, match="File format not supported"):
        model.load_weights(tmp_path / "m.h5")
    with pytest.raises(FileNotFoundError, match="File not found"):
        keras.models.load_model(tmp_path / "m.keras")
    with pytest.raises(ValueError, match="has not yet been built"):
        keras.Sequential([layers.Dense(1)]).save_weights(tmp_path / "m.weights.h5")


def test_load_weights_other_optimizer_keeps_initial_values(tmp_path):
    model = row(optimizer="adam", loss="mse")
    model.fit(A, Y, verbose=0)
    model.save_weights(tmp_path / "m.weights.h5")
    other = row(optimizer="sgd", loss="mse")
    with pytest.warns(UserWarning, match="keeps its initial values"):
        other.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(other(A).numpy(), model(A).numpy())


class Described(layers.Layer):
    def __init__(self, text="", **options):
        super().__init__(**options)
        self.text = text

    def call(self, x):
        return x

    def get_config(self):
        return {**super().get_config(), "text": self.text}

    def save_assets(self, folder):
        if self.text == "colon":
            (pathlib.Path(folder) / "a:b").write_text("x")


@pytest.mark.slow
def test_saved_model_with_a_large_config_is_loaded(tmp_path):
    # A text that cannot be compressed: a file may expand to a hundred times its size.
    text = np.random.default_rng(1).bytes(33 << 20).hex()
    keras.Sequential([keras.Input((2,)), Described(text)]).save(tmp_path / "m.keras")
    model = keras.models.load_model(tmp_path / "m.keras", custom_objects={"Described": Described})
    assert model.layers[0].text == text


def test_save_of_an_asset_with_a_colon_raises(tmp_path):
    model = keras.Sequential([keras.Input((2,)), Described("colon")])
    with pytest.raises(ValueError, match="its name has a colon"):
        model.save(tmp_path / "m.keras")
