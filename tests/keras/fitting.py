"""Models, data and strategies for the tests of training."""

from __future__ import annotations

import numpy as np

from pycollective import distribute, keras

#: Functions that make a strategy of each type and size. The first gives the expected results.
STRATEGIES = {
    "default": distribute.get_strategy,
    "one device": lambda: distribute.OneDeviceStrategy("cpu:0"),
    "mirrored 1": lambda: mirrored(1),
    "mirrored 2": lambda: mirrored(2),
    "mirrored 3": lambda: mirrored(3),
    "mirrored 4": lambda: mirrored(4),
    "central storage 2": lambda: distribute.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}
#: 21 examples, so that the last batch of 8 has 5 examples, and the last batch of 4 has 1.
RANDOM = np.random.default_rng(5)
X = RANDOM.standard_normal((21, 3))
LABELS = RANDOM.integers(0, 4, 21)
TARGETS = RANDOM.standard_normal((21, 2))
WEIGHTS = RANDOM.random(21)


def mirrored(replicas):
    return distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def dense(outputs, dtype=None, seed=1):
    """Return two dense layers with regularizers, and weights that are equal in every strategy."""
    random = np.random.default_rng(seed)
    layers = [
        keras.layers.Dense(5, "relu", input_shape=(3,), kernel_regularizer="l2", dtype=dtype),
        keras.layers.Dense(outputs, dtype=dtype),
    ]
    model = keras.Sequential(layers)
    model.set_weights([random.standard_normal(w.shape) for w in model.get_weights()])
    return model


def linear(weight=0.0, **compiled):
    """Return a compiled model with a single weight."""
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(1,), use_bias=False)])
    model.set_weights([[[weight]]])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return model
