"""Errors of inputs that do not fit a layer's window or shape name the layer and both shapes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pycollective import keras
from pycollective.keras import layers
from pycollective.keras.layers.fusion import ConvReluPool


def error_text(name, needed, shape):
    return (
        f'Input 0 of layer "{name}" is incompatible with the layer: expected {needed}.*, but received '
        f"input with shape {re.escape(str(shape))}"
    )


WINDOW = "images at least as large as the window of 3 x 2"


@pytest.mark.parametrize(
    ("layer", "shape", "needed"),
    [
        (lambda: layers.MaxPooling2D((3, 2), name="one"), (2, 2, 5, 1), WINDOW),
        (lambda: layers.MaxPooling2D((3, 2), name="one"), (2, 5, 1, 1), WINDOW),
        (lambda: layers.MaxPooling2D((3, 2), name="one"), (2, 5, 5), "images of shape"),
        (lambda: layers.AveragePooling2D((3, 2), name="one"), (2, 2, 5, 1), WINDOW),
        (
            lambda: layers.GlobalMaxPooling2D(name="one"),
            (2, 0, 5, 1),
            "images at least as large as the window of 1 x 1",
        ),
        (lambda: layers.Reshape((4, 2), name="one"), (2, 3, 3), r"examples that .* \(4, 2\)"),
        (lambda: layers.Reshape((4, -1), name="one"), (2, 3, 3), r"examples that .* \(4, -1\)"),
        (lambda: layers.Reshape((0, -1), name="one"), (2, 3), r"examples that .* \(0, -1\)"),
        (lambda: layers.Permute((2, 1), name="one"), (2, 3), "examples with 2 axes"),
    ],
)
def test_shape_error_names_the_layer(layer, shape, needed):
    with pytest.raises(ValueError, match=error_text("one", needed, shape)):
        layer()(np.ones(shape, np.float32))
    with pytest.raises(ValueError, match=error_text("one", needed, (None, *shape[1:]))):
        layer()(keras.Input(shape[1:]))


@pytest.mark.parametrize("relu", ["own", "after"])
@pytest.mark.parametrize("functional", [False, True])
def test_shape_error_in_fused_layers_names_the_right_layer(relu, functional):
    x = keras.Input((None, None, 2))
    conv = layers.Conv2D(3, 4, activation="relu" if relu == "own" else None, name="conv")
    pool = layers.MaxPooling2D(3, name="pool")
    row = [conv, *([layers.ReLU()] if relu == "after" else []), pool]
    if functional:
        y = x
        for layer in row:
            y = layer(y)
        model = keras.Model(x, y)
    else:
        model = keras.Sequential([x, *row])

    def images(height, width):
        return np.ones((2, height, width, 2), np.float32)

    window = "images at least as large as the window of {0} x {0}"
    for _ in range(2):
        assert model(images(6, 7)).shape == (2, 1, 1, 3)
        # The input of the pooling is 2 x 4.
        with pytest.raises(ValueError, match=error_text("pool", window.format(3), (2, 2, 4, 3))):
            model(images(5, 7))
        with pytest.raises(ValueError, match=error_text("conv", window.format(4), (2, 7, 3, 2))):
            model(images(7, 3))
    assert model(images(7, 7)).shape == (2, 1, 1, 3)
    if not functional:
        assert isinstance(model._steps[0], ConvReluPool)
