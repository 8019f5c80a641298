"""Configs: every layer, initializer, regularizer and constraint can be restored from its config."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from test_zero_rows import exported, make

from pycollective import keras
from pycollective.keras import activations, constraints, initializers, layers, regularizers


@pytest.fixture(autouse=True)
def _fresh_names():
    keras.backend.clear_session()


def stored(config):
    """Return a config after a round trip through JSON."""
    return json.loads(json.dumps(config))


@pytest.mark.parametrize("cls", exported(layers, layers.Layer), ids=lambda c: c.__name__)
def test_layer_from_config_equals_the_original(cls):
    layer = make(cls, name="mine", dtype="float64")
    config = stored(layer.get_config())
    assert config["name"] == "mine"
    if cls is not layers.InputLayer:
        assert config["trainable"] is True
        assert config["dtype"]["config"] == {"name": "float64"}
    again = cls.from_config(config)
    assert again.name == "mine" and again.dtype == np.float64
    assert stored(again.get_config()) == config


def test_layer_config_keeps_all_settings():
    layer = layers.Conv2D(
        6,
        (3, 2),
        strides=2,
        padding="SAME",
        dilation_rate=1,
        groups=3,
        activation=keras.activations.gelu,
        use_bias=False,
        kernel_initializer=initializers.HeNormal(seed=4),
        kernel_regularizer=regularizers.L1L2(0.25, 0.5),
        bias_constraint="non_neg",
        kernel_constraint=constraints.MaxNorm(3, axis=[0, 1, 2]),
        activity_regularizer="l1",
        trainable=False,
    )
    config = stored(layer.get_config())
    assert config["padding"] == "same" and config["strides"] == [2, 2]
    assert config["activation"] == "gelu"
    assert config["kernel_initializer"] == {
        "module": "keras.initializers",
        "class_name": "HeNormal",
        "config": {"seed": 4},
        "registered_name": None,
    }
    assert config["kernel_constraint"]["config"] == {"max_value": 3, "axis": [0, 1, 2]}
    again = layers.Conv2D.from_config(config)
    assert again.groups == 3 and again.kernel_size == (3, 2) and again.use_bias is False
    assert again.activation is keras.activations.gelu and again.trainable is False
    assert isinstance(again.bias_constraint, constraints.NonNeg)
    assert (again.kernel_regularizer.l1, again.kernel_regularizer.l2) == (0.25, 0.5)
    assert stored(again.get_config()) == config


def test_custom_layer_with_plain_arguments_needs_no_get_config():
    class Scale(layers.Layer):
        def __init__(self, factor, parts=(1, 2), **options):
            super().__init__(**options)
            self.factor = factor

        def call(self, x):
            return x * self.factor

    layer = Scale(3.0, parts=[4], name="three")
    config = stored(layer.get_config())
    assert config["factor"] == 3.0 and config["parts"] == [4] and config["name"] == "three"
    assert Scale.from_config(config).factor == 3.0
    assert stored(Scale(2.0).get_config())["parts"] == [1, 2]
    with pytest.raises(NotImplementedError, match="Scale must override get_config.*'factor'"):
        Scale(np.zeros(2)).get_config()


def test_from_config_unsupported_keras_settings_raise():
    config = layers.BatchNormalization().get_config()
    layers.BatchNormalization.from_config(
        {**config, "renorm": False, "renorm_clipping": None, "renorm_momentum": 0.9}
    )
    with pytest.raises(ValueError, match="BatchNormalization: renorm=True is not supported"):
        layers.BatchNormalization.from_config({**config, "renorm": True})
    with pytest.raises(ValueError, match="lora_rank=4"):
        layers.Dense.from_config({**layers.Dense(2).get_config(), "lora_rank": 4})
    with pytest.raises(ValueError, match="mask_zero"):
        layers.Embedding(3, 2, mask_zero=True)


OBJECTS = [
    *(initializers.get(name) for name in ("zeros", "ones", "glorot_uniform", "LecunNormal")),
    initializers.Constant(0.5),
    initializers.Constant(np.array([1.0, 2.0])),
    initializers.Identity(2.0),
    initializers.Orthogonal(gain=2.0, seed=3),
    initializers.RandomNormal(1.0, 2.0, seed=3),
    initializers.TruncatedNormal(1.0, 2.0),
    initializers.RandomUniform(-1.0, 2.0),
    initializers.VarianceScaling(3.0, "fan_out", "uniform", input_axes=[0], output_axes=[1]),
    initializers.HeNormal(input_axes=[0], output_axes=[1]),
    regularizers.L1(0.1),
    regularizers.L2(0.1),
    regularizers.L1L2(0.1, 0.2),
    regularizers.OrthogonalRegularizer(0.1, "columns"),
    constraints.NonNeg(),
    constraints.MaxNorm(3, axis=1),
    constraints.UnitNorm(axis=[0, 1]),
    constraints.MinMaxNorm(0.5, 2.0, 0.5, axis=1),
]


@pytest.mark.parametrize("thing", OBJECTS, ids=lambda thing: type(thing).__name__)
def test_initializer_regularizer_constraint_configs_survive_json(thing):
    module = sys.modules[type(thing).__module__]
    config = stored(module.serialize(thing))
    assert f"pycollective.{config['module']}" == module.__name__
    for again in (module.get(config), module.deserialize(config)):
        assert type(again) is type(thing)
        assert stored(module.serialize(again)) == config
    x = np.arange(1.0, 5.0).reshape(2, 2)
    if module is initializers:
        if getattr(thing, "seed", 0) is None:
            return
        results = [one((2, 2), "float64").numpy() for one in (thing, again)]
    else:
        results = [one(x).numpy() for one in (thing, again)]
    np.testing.assert_array_equal(*results)


def test_activation_serialize_then_get_returns_the_function():
    for name in activations.__all__:
        if name in ("get", "serialize", "deserialize"):
            continue
        function = activations.get(name)
        stored_name = activations.serialize(function)
        assert activations.get(stored_name) is activations.deserialize(stored_name) is function
    assert activations.serialize(activations.swish) == "silu"
    assert activations.serialize(None) is None and activations.get(None) is activations.linear

    def mine(x):
        return x

    assert activations.serialize(mine)["config"] == "mine"
    with pytest.raises(ValueError, match="unknown activation 'mine'"):
        activations.get(activations.serialize(mine))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: constraints.get("max"), "unknown constraint 'max'; known names are .*max_norm"),
        (lambda: constraints.get(3), "3 is no constraint"),
        (lambda: constraints.get({"config": {}}), "describes no constraint"),
        (lambda: regularizers.get({"class_name": "L3", "config": {}}), "unknown regularizer 'L3'"),
        (lambda: initializers.get({"class_name": "Zeros", "config": 3}), "must be a dict"),
        (lambda: initializers.get(3), "3 is no initializer"),
        (lambda: regularizers.OrthogonalRegularizer(mode="all"), "'rows' or 'columns', got 'all'"),
        (lambda: initializers.Identity()((2,)), r"shape \(2,\)"),
        (lambda: initializers.Orthogonal()((2,)), r"shape \(2,\)"),
        (lambda: initializers.get(np.zeros(3))((2,)), "shape"),
        (lambda: initializers.VarianceScaling(distribution="x"), "distribution"),
    ],
)
def test_get_wrong_config_raises_value_error(call, text):
    with pytest.raises(ValueError, match=text):
        call()
