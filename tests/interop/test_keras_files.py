"""Files exchanged between this package and real Keras, in both directions."""

import json
import os
import zipfile

import numpy as np
import pytest

from pycollective import keras as ours
from pycollective.keras import layers as our_layers

os.environ.setdefault("KERAS_BACKEND", "jax")
theirs = pytest.importorskip("keras")
pytest.importorskip("h5py")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

RANDOM = np.random.default_rng(11)
IMAGES = RANDOM.standard_normal((4, 12, 10, 6)).astype(np.float32)
ROWS = RANDOM.standard_normal((4, 6)).astype(np.float32)
TOKENS = RANDOM.integers(0, 9, (4, 5)).astype(np.int32)
BYTES = RANDOM.integers(0, 256, (4, 12, 10, 3)).astype(np.uint8)

#: Name of the layer, its arguments, an input.
LAYERS = [
    ("Activation", {"activation": "gelu"}, ROWS),
    ("ActivityRegularization", {"l1": 0.1}, ROWS),
    ("AveragePooling2D", {"pool_size": 3, "strides": 2, "padding": "same"}, IMAGES),
    ("BatchNormalization", {"momentum": 0.9, "epsilon": 1e-2}, IMAGES),
    ("BatchNormalization", {"center": False, "gamma_constraint": "non_neg"}, ROWS),
    ("Conv2D", {"filters": 4, "kernel_size": 3, "strides": 2, "padding": "same"}, IMAGES),
    ("Conv2D", {"filters": 6, "kernel_size": (3, 2), "groups": 2, "activation": "relu"}, IMAGES),
    ("Conv2D", {"filters": 4, "kernel_size": 3, "dilation_rate": 2, "use_bias": False}, IMAGES),
    ("Conv2DTranspose", {"filters": 3, "kernel_size": 3, "strides": 2, "padding": "same"}, IMAGES),
    ("Dense", {"units": 3, "activation": "tanh", "kernel_initializer": "he_normal"}, ROWS),
    (
        "Dense",
        {
            "units": 3,
            "kernel_regularizer": {"l2": 0.01},
            "bias_initializer": "ones",
            "kernel_constraint": "max_norm",
            "activity_regularizer": "l1",
        },
        ROWS,
    ),
    ("DepthwiseConv2D", {"kernel_size": 3, "depth_multiplier": 2}, IMAGES),
    ("Dropout", {"rate": 0.3, "seed": 4}, ROWS),
    ("ELU", {"alpha": 0.7}, ROWS),
    ("Embedding", {"input_dim": 9, "output_dim": 4}, TOKENS),
    ("Flatten", {}, IMAGES),
    ("GlobalAveragePooling2D", {"keepdims": True}, IMAGES),
    ("GlobalMaxPooling2D", {}, IMAGES),
    ("Identity", {}, ROWS),
    ("LayerNormalization", {"epsilon": 1e-2}, ROWS),
    ("LeakyReLU", {"negative_slope": 0.2}, ROWS),
    ("MaxPooling2D", {"pool_size": (2, 3), "padding": "same"}, IMAGES),
    ("Normalization", {"mean": 1.0, "variance": 4.0}, ROWS),
    ("PReLU", {}, ROWS),
    ("Permute", {"dims": (2, 1, 3)}, IMAGES),
    ("RandomCrop", {"height": 8, "width": 6}, IMAGES),
    ("RandomCrop", {"height": 12, "width": 10}, IMAGES),
    ("RandomFlip", {"mode": "horizontal", "seed": 3}, IMAGES),
    ("ReLU", {"max_value": 1.0, "negative_slope": 0.1}, ROWS),
    ("Rescaling", {"scale": 1 / 255, "offset": -0.5}, BYTES),
    ("Reshape", {"target_shape": (3, -1)}, ROWS),
    ("Softmax", {"axis": -1}, ROWS),
    ("UpSampling2D", {"size": 2}, IMAGES),
    ("ZeroPadding2D", {"padding": (1, 2)}, IMAGES),
]
#: Layers of several inputs.
MERGES = [
    ("Add", {}),
    ("Average", {}),
    ("Concatenate", {"axis": 1}),
    ("Maximum", {}),
    ("Minimum", {}),
    ("Multiply", {}),
    ("Subtract", {}),
]
#: Names of layers that the tables do not need. Keras has no `StringLookup` without TensorFlow.
BASES = {"Input", "InputLayer", "InputSpec", "Layer", "StringLookup"}


def randomized(model):
    """Give a model random weights instead of its initial ones."""
    model.set_weights(
        [
            (np.abs(RANDOM.standard_normal(w.shape)) + 0.1).astype(w.dtype)
            if w.dtype.kind == "f"
            else w
            for w in map(np.asarray, model.get_weights())
        ]
    )
    return model


def same(first, second, tolerance=1e-5):
    first, second = (value if isinstance(value, dict) else {"": value} for value in (first, second))
    assert first.keys() == second.keys()
    for key, value in first.items():
        several = value if isinstance(value, (list, tuple)) else [value]
        others = second[key] if isinstance(value, (list, tuple)) else [second[key]]
        for a, b in zip(several, others, strict=True):
            a, b = np.asarray(a), np.asarray(b)
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def both_ways(build, inputs, path, weights=False):
    """Save a model with each library and load it with the other one; outputs must agree."""
    for here, there in ((ours, theirs), (theirs, ours)):
        model = randomized(build(here))
        expected = model(inputs, training=False)
        model.save(path / "m.keras")
        loaded = there.models.load_model(path / "m.keras")
        same(loaded(inputs, training=False), expected)
        assert [layer.name for layer in loaded.layers] == [layer.name for layer in model.layers]
        if not weights:
            continue
        model.save_weights(path / "m.weights.h5")
        other = build(there)
        other.load_weights(path / "m.weights.h5")
        same(other(inputs, training=False), expected)


def make_layer(keras, name, arguments):
    given = dict(arguments)
    if isinstance(given.get("kernel_regularizer"), dict):
        given["kernel_regularizer"] = keras.regularizers.L2(**given["kernel_regularizer"])
    return getattr(keras.layers, name)(**given, name="layer")


def ids(table):
    return [f"{name}-{number}" for number, (name, *_) in enumerate(table)]


@pytest.mark.parametrize(("name", "arguments", "inputs"), LAYERS, ids=ids(LAYERS))
def test_file_of_every_layer_goes_both_ways(name, arguments, inputs, tmp_path):
    def build(keras):
        first = keras.Input(inputs.shape[1:], dtype=str(inputs.dtype), name="inputs")
        return keras.Sequential([first, make_layer(keras, name, arguments)])

    if name == "RandomCrop" and arguments["height"] < inputs.shape[1]:
        # Outside of training, Keras 3.15 returns images unchanged, contrary to its documentation.
        saved = build(theirs)
        saved.save(tmp_path / "m.keras")
        loaded = ours.models.load_model(tmp_path / "m.keras")
        assert loaded(inputs).shape == (4, 8, 6, 6)
        return
    both_ways(build, inputs, tmp_path)


@pytest.mark.parametrize(("name", "arguments"), MERGES, ids=ids(MERGES))
def test_layers_of_several_inputs_go_both_ways(name, arguments, tmp_path):
    def build(keras):
        first, second = keras.Input((6,), name="first"), keras.Input((6,), name="second")
        return keras.Model([first, second], make_layer(keras, name, arguments)([first, second]))

    both_ways(build, [ROWS, ROWS[::-1] * 2], tmp_path)


def test_the_tables_have_every_layer():
    known = {name for name, *_ in (*LAYERS, *MERGES)} | BASES
    classes = {name: getattr(our_layers, name) for name in our_layers.__all__ if name[0].isupper()}
    assert {cls.__name__ for cls in classes.values()} <= known


# Models -------------------------------------------------------------------------------------------


def convolutional(keras):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((12, 10, 6)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(3, activation="softmax"),
        ],
        name="tutorial",
    )


def branched(keras):
    """Return a model with shared layers, inner models, operators, two inputs and two outputs."""
    layers = keras.layers
    first, second = keras.Input((6,), name="first"), keras.Input((6,), name="second")
    shared = layers.Dense(4, activation="relu", name="shared")
    row = keras.Sequential([layers.Dense(5, name="a"), layers.Dense(4, name="b")], name="row")
    inner_in = keras.Input((4,), name="inner_in")
    inner_out = layers.Dense(2, name="deep")(layers.Dropout(0.2, name="drop")(inner_in))
    inner = keras.Model(inner_in, [inner_out, inner_in * 3.0], name="inner")
    x, x_kept = inner(row(first) - shared(second) / 2.0)
    y, _ = inner(shared(first))
    x_kept = x_kept + 1.0
    return keras.Model([first, second], [x * y, 2.0 - x_kept], name="branched")


def operated(keras):
    """Return a model of operators and indices of symbolic tensors."""
    first, second = keras.Input((6,), name="first"), keras.Input((6,), name="second")
    x = keras.layers.Dense(6, name="dense")(first)
    rows = x[:, None, :4] @ second[:, :, None][:, 2:]
    parts = [x[:, 0], abs(x)[..., ::-2], rows[:, 0, 0], x // 0.5, second % 0.75, x[1:, -1:]]
    return keras.Model([first, second], [*parts, (x**2 + 2.0**second) / 3.0, -x - 1.0])


def named(keras):
    first, second = keras.Input((6,), name="b"), keras.Input((6,), name="a")
    dense = keras.layers.Dense
    outputs = {"y": dense(2, name="y")(first), "x": dense(3, name="x")(second)}
    return keras.Model({"b": first, "a": second}, outputs)


def test_sequential_model_goes_both_ways(tmp_path):
    both_ways(convolutional, IMAGES, tmp_path, weights=True)


def test_branched_graph_goes_both_ways(tmp_path):
    both_ways(branched, [ROWS, ROWS[::-1]], tmp_path, weights=True)


def test_graph_of_operators_and_indices_goes_both_ways(tmp_path):
    both_ways(operated, [ROWS, ROWS[::-1]], tmp_path)


def test_graph_with_names_goes_both_ways(tmp_path):
    both_ways(named, {"a": ROWS, "b": ROWS[::-1]}, tmp_path)


def subclassed(keras):
    """Return a subclassed model: layers in lists, dicts and layers, shared, and with private names."""
    layers = keras.layers

    class Block(layers.Layer):
        def __init__(self, shared):
            super().__init__()
            self.shared = shared
            self._last = layers.Dense(6)
            self.outer = layers.Dense(6, "tanh")
            self.many = [layers.Dense(6), [layers.Dense(6), layers.BatchNormalization()]]

        def build(self, input_shape):
            self.scale = self.add_weight(name="scale", shape=(input_shape[-1],))

        def call(self, inputs):
            first, (second, third) = self.many
            x = third(second(first(self.outer(inputs))))
            return self.shared(self._last(x)) * self.scale

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.zeta = layers.Dense(6)
            upper = layers.Dense(6)
            self.block = Block(upper)
            self.Upper = upper
            self.parts = {"b": layers.Dense(6), "a": layers.Dense(6), "same": self.zeta}
            self.alpha = layers.Dense(6)
            self.beta = self.alpha
            self.inner = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.ReLU()])
            self.offset = self.add_weight(name="offset", shape=(6,), trainable=False)

        def call(self, inputs):
            x = self.Upper(self.block(self.zeta(inputs)))
            for part in self.parts.values():
                x = part(x)
            return self.inner(self.beta(self.alpha(x))) + self.offset

    model = Own()
    model(ROWS)
    return model


def test_weights_of_a_subclassed_model_go_both_ways(tmp_path):
    path = tmp_path / "m.weights.h5"
    for here, there in ((ours, theirs), (theirs, ours)):
        model, other = randomized(subclassed(here)), subclassed(there)
        for each, library in ((model, here), (other, there)):
            each.compile(library.optimizers.Adam(), "mse")
            each.optimizer.build(each.trainable_variables)
        model.optimizer.iterations.assign(7)
        model.save_weights(path)
        other.load_weights(path)
        same(other(ROWS, training=False), model(ROWS, training=False))
        assert len(model.weights) == 26
        for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        assert int(np.asarray(other.optimizer.iterations)) == 7


def table(keras):
    """Return a model with a layer that stores itself."""

    class Table(keras.layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.names = []
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, inputs):
            return inputs * self.scale

        def save_own_variables(self, store):
            super().save_own_variables(store)
            store["names"] = np.array(self.names)

        def load_own_variables(self, store):
            self.names = np.array(store["names"]).tolist()
            super().load_own_variables({"0": store["0"]})

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), Table()])


def test_layer_that_stores_more_than_its_variables_goes_both_ways(tmp_path):
    for here, there in ((ours, theirs), (theirs, ours)):
        model, other = randomized(table(here)), table(there)
        model.layers[-1].names = [3, 1, 2]
        model.save_weights(tmp_path / "m.weights.h5")
        other.load_weights(tmp_path / "m.weights.h5")
        same(other(ROWS), model(ROWS))
        assert other.layers[-1].names == [3, 1, 2]


def test_synchronized_batch_normalization_goes_both_ways(tmp_path):
    """Keras supports ``synchronized=True`` with TensorFlow only; otherwise the file is the same."""

    def build(keras, **options):
        layers = keras.layers
        row = [keras.Input((6,)), layers.Dense(4), layers.BatchNormalization(**options)]
        return randomized(keras.Sequential(row))

    def with_synchronized(path, synchronized):
        """Return the path of a copy with another value of ``synchronized``."""
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        config = json.loads(members["config.json"])
        (settings,) = (
            layer["config"]
            for layer in config["config"]["layers"]
            if layer["class_name"] == "BatchNormalization"
        )
        assert settings["synchronized"] is not synchronized
        settings["synchronized"] = synchronized
        members["config.json"] = json.dumps(config)
        with zipfile.ZipFile(tmp_path / "other.keras", "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        return tmp_path / "other.keras"

    model = build(ours, synchronized=True)
    model.save(tmp_path / "m.keras")
    with pytest.raises(Exception, match="synchronized=True is only supported with the TensorFlow"):
        theirs.models.load_model(tmp_path / "m.keras")
    loaded = theirs.models.load_model(with_synchronized(tmp_path / "m.keras", False))
    same(loaded(ROWS), model(ROWS))
    model = build(theirs)
    model.save(tmp_path / "m.keras")
    loaded = ours.models.load_model(with_synchronized(tmp_path / "m.keras", True))
    assert loaded.layers[-1].synchronized
    same(loaded(ROWS), model(ROWS))


def test_configs_are_the_same():
    """Both libraries write the same config of a model, except for the newest keys."""
    for build in (convolutional, branched):
        here, there = (build(keras).get_config() for keras in (ours, theirs))
        compare(here, there, "")


#: Keys that only some versions of Keras 3 write.
VERSIONS = {
    "input_axes",
    "optional",
    "output_axes",
    "quantization_config",
    "ragged",
    "shared_object_id",
}
#: Keys with counted names, whose numbers continue from model to model.
COUNTED = {"name", "keras_history"}


def compare(here, there, where):
    if isinstance(there, dict):
        assert isinstance(here, dict), where
        # Layers without variables have a build config in some classes only.
        skipped = VERSIONS | (set(here) ^ set(there)) & {"build_config"}
        if where.endswith("/kwargs"):
            # Keras stores defaults that were not given.
            skipped |= {"mask", "training"}
        assert set(here) - skipped == set(there) - skipped, where
        for key in set(here) - skipped:
            if key not in COUNTED and not key.endswith("put_layers"):
                compare(here[key], there[key], f"{where}/{key}")
    elif isinstance(there, (list, tuple)):
        assert len(here) == len(there), where
        for number, (a, b) in enumerate(zip(here, there, strict=True)):
            compare(a, b, f"{where}/{number}")
    else:
        assert here == there, where


# Training -----------------------------------------------------------------------------------------

OPTIMIZERS = [
    ("SGD", {"learning_rate": 0.1}),
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"learning_rate": 0.01}),
    ("Adam", {"learning_rate": 0.01, "amsgrad": True}),
    ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.01}),
    ("RMSprop", {"learning_rate": 0.01, "momentum": 0.5, "centered": True}),
    ("Adagrad", {"learning_rate": 0.1}),
    ("Nadam", {"learning_rate": 0.01}),
    ("Adamax", {"learning_rate": 0.01}),
    ("Adadelta", {"learning_rate": 1.0}),
    ("Ftrl", {"learning_rate": 0.1}),
    ("SGD", {"learning_rate": "schedule", "momentum": 0.9, "global_clipnorm": 0.3}),
]
SCHEDULE = {"initial_learning_rate": 0.5, "decay_steps": 2, "decay_rate": 0.3, "staircase": True}
TARGETS = RANDOM.standard_normal((4, 3)).astype(np.float32)


@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS, ids=ids(OPTIMIZERS))
def test_training_continues_in_the_other_library(name, arguments, tmp_path):
    """Two steps in one library, saved, and two in the other one equal four steps."""

    def trained(keras, model=None):
        if model is None:
            layers = [keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)]
            model = keras.Sequential(layers)
            model.set_weights(start)
            given = dict(arguments)
            if given["learning_rate"] == "schedule":
                schedule = keras.optimizers.schedules.ExponentialDecay(**SCHEDULE)
                given["learning_rate"] = schedule
            optimizer = getattr(keras.optimizers, name)(**given)
            model.compile(optimizer, loss="mse", metrics=["mae"])
        model.fit(ROWS, TARGETS, batch_size=4, epochs=2, verbose=0)
        return model

    start = [
        RANDOM.standard_normal(shape).astype(np.float32) for shape in ((6, 4), (4,), (4, 3), (3,))
    ]
    whole = trained(theirs)
    whole = [np.asarray(w) for w in trained(theirs, whole).get_weights()]
    for here, there in ((ours, theirs), (theirs, ours)):
        model = trained(here)
        model.save(tmp_path / "m.keras")
        loaded = there.models.load_model(tmp_path / "m.keras")
        assert int(np.asarray(loaded.optimizer.iterations)) == 2
        for a, b in zip(trained(there, loaded).get_weights(), whole, strict=True):
            # Tolerance of a hundredth of a step: Adam makes whole steps for gradients near 0.
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=2e-4)


def test_losses_and_metrics_that_are_objects_go_both_ways(tmp_path):
    y = np.eye(3, dtype=np.float32)[[0, 2, 1, 2]]
    weights = np.array([1, 2, 0.5, 3], np.float32)
    for here, there in ((ours, theirs), (theirs, ours)):
        dense = here.layers.Dense(3, "softmax")
        model = randomized(here.Sequential([here.Input((6,)), dense]))
        model.compile(
            here.optimizers.SGD(),
            here.losses.CategoricalCrossentropy(label_smoothing=0.2, reduction="sum"),
            metrics=[here.metrics.TopKCategoricalAccuracy(2, name="top")],
            weighted_metrics=[here.metrics.AUC(7, curve="PR", name="area"), "mse"],
        )
        model.save(tmp_path / "m.keras")
        loaded = there.models.load_model(tmp_path / "m.keras")
        found, expected = (
            each.evaluate(ROWS, y, sample_weight=weights, verbose=0, return_dict=True)
            for each in (loaded, model)
        )
        assert set(found) == {"loss", "top", "area", "mse"}
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("scaled", [True, False])
def test_settings_unknown_to_keras_do_not_prevent_loading(scaled, tmp_path):
    ours.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = ours.Sequential([ours.Input((6,)), ours.layers.Dense(3)])
    finally:
        ours.mixed_precision.set_global_policy(None)
    model.compile(ours.optimizers.Adam(), "mse", accumulate_steps=2, auto_scale_loss=scaled)
    model.fit(ROWS, TARGETS, 2, epochs=2, verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = theirs.models.load_model(tmp_path / "m.keras")
    same(loaded(ROWS), model(ROWS), 1e-3)
    assert type(loaded.optimizer).__name__ == ("LossScaleOptimizer" if scaled else "Adam")
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_mixed_precision_continues_in_the_other_library(tmp_path):
    for here, there in ((ours, theirs), (theirs, ours)):
        dense = here.layers.Dense
        here.mixed_precision.set_global_policy("mixed_float16")
        try:
            model = here.Sequential([here.Input((6,)), dense(4, "relu"), dense(3, dtype="float32")])
            model.compile(here.optimizers.Adam(0.01), loss="mse")
            model.fit(ROWS, TARGETS, epochs=2, verbose=0)
        finally:
            here.mixed_precision.set_global_policy(None if here is ours else "float32")
        model.save(tmp_path / "m.keras")
        loaded = there.models.load_model(tmp_path / "m.keras")
        same(loaded(ROWS), model(ROWS), 1e-3)
        kept, found = model.optimizer, loaded.optimizer
        assert type(kept).__name__ == type(found).__name__ == "LossScaleOptimizer"
        for a, b in zip(kept.variables, found.variables, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
