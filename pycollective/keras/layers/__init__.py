"""The layers, under the names of ``tf.keras.layers``."""

from __future__ import annotations

from pycollective.keras.layers.activation import (
    ELU,
    Activation,
    LeakyReLU,
    PReLU,
    ReLU,
    Softmax,
)
from pycollective.keras.layers.convolution import Conv2D, Conv2DTranspose, DepthwiseConv2D
from pycollective.keras.layers.core import Dense, Embedding, Identity
from pycollective.keras.layers.input_layer import Input, InputLayer
from pycollective.keras.layers.input_spec import InputSpec
from pycollective.keras.layers.layer import Layer
from pycollective.keras.layers.merging import (
    Add,
    Average,
    Concatenate,
    Maximum,
    Minimum,
    Multiply,
    Subtract,
    add,
    average,
    concatenate,
    maximum,
    minimum,
    multiply,
    subtract,
)
from pycollective.keras.layers.normalization import BatchNormalization, LayerNormalization
from pycollective.keras.layers.pooling import (
    AveragePooling2D,
    GlobalAveragePooling2D,
    GlobalMaxPooling2D,
    MaxPooling2D,
)
from pycollective.keras.layers.preprocessing import (
    Normalization,
    RandomCrop,
    RandomFlip,
    Rescaling,
)
from pycollective.keras.layers.regularization import ActivityRegularization, Dropout
from pycollective.keras.layers.reshaping import (
    Flatten,
    Permute,
    Reshape,
    UpSampling2D,
    ZeroPadding2D,
)
from pycollective.keras.registration import publish

AvgPool2D = AveragePooling2D
Convolution2D = Conv2D
Convolution2DTranspose = Conv2DTranspose
GlobalAvgPool2D = GlobalAveragePooling2D
GlobalMaxPool2D = GlobalMaxPooling2D
MaxPool2D = MaxPooling2D

__all__ = [
    "ELU",
    "Activation",
    "ActivityRegularization",
    "Add",
    "Average",
    "AveragePooling2D",
    "AvgPool2D",
    "BatchNormalization",
    "Concatenate",
    "Conv2D",
    "Conv2DTranspose",
    "Convolution2D",
    "Convolution2DTranspose",
    "Dense",
    "DepthwiseConv2D",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAveragePooling2D",
    "GlobalAvgPool2D",
    "GlobalMaxPool2D",
    "GlobalMaxPooling2D",
    "Identity",
    "Input",
    "InputLayer",
    "InputSpec",
    "Layer",
    "LayerNormalization",
    "LeakyReLU",
    "MaxPool2D",
    "MaxPooling2D",
    "Maximum",
    "Minimum",
    "Multiply",
    "Normalization",
    "PReLU",
    "Permute",
    "RandomCrop",
    "RandomFlip",
    "ReLU",
    "Rescaling",
    "Reshape",
    "Softmax",
    "Subtract",
    "UpSampling2D",
    "ZeroPadding2D",
    "add",
    "average",
    "concatenate",
    "maximum",
    "minimum",
    "multiply",
    "subtract",
]

publish("keras.layers", globals(), __all__)
