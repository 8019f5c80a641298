"""The layers, under the names of ``tf.keras.layers``."""

from __future__ import annotations

from pycollective.keras.layers.convolution import Conv2D, MaxPooling2D
from pycollective.keras.layers.core import (
    Activation,
    Dense,
    Dropout,
    Flatten,
    Reshape,
)
from pycollective.keras.layers.input_layer import Input, InputLayer
from pycollective.keras.layers.layer import Layer

MaxPool2D = MaxPooling2D

__all__ = [
    "Activation",
    "Conv2D",
    "Dense",
    "Dropout",
    "Flatten",
    "Input",
    "InputLayer",
    "Layer",
    "MaxPool2D",
    "MaxPooling2D",
    "Reshape",
]
