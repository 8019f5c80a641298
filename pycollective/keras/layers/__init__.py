"""The layers, under the names of ``tf.keras.layers``."""

from __future__ import annotations

from pycollective.keras.layers import (
    activation,
    convolution,
    core,
    input_layer,
    input_spec,
    merging,
    normalization,
    pooling,
    preprocessing,
    regularization,
    reshaping,
    strings,
)
from pycollective.keras.layers.activation import *  # noqa: F403
from pycollective.keras.layers.convolution import *  # noqa: F403
from pycollective.keras.layers.core import *  # noqa: F403
from pycollective.keras.layers.input_layer import *  # noqa: F403
from pycollective.keras.layers.input_spec import *  # noqa: F403
from pycollective.keras.layers.layer import Layer
from pycollective.keras.layers.merging import *  # noqa: F403
from pycollective.keras.layers.normalization import *  # noqa: F403
from pycollective.keras.layers.pooling import *  # noqa: F403
from pycollective.keras.layers.preprocessing import *  # noqa: F403
from pycollective.keras.layers.regularization import *  # noqa: F403
from pycollective.keras.layers.reshaping import *  # noqa: F403
from pycollective.keras.layers.strings import *  # noqa: F403
from pycollective.keras.registration import publish

AvgPool2D = pooling.AveragePooling2D
Convolution2D = convolution.Conv2D
Convolution2DTranspose = convolution.Conv2DTranspose
GlobalAvgPool2D = pooling.GlobalAveragePooling2D
GlobalMaxPool2D = pooling.GlobalMaxPooling2D
MaxPool2D = pooling.MaxPooling2D

__all__ = ["Layer", "AvgPool2D", "Convolution2D", "Convolution2DTranspose"]
__all__ += ["GlobalAvgPool2D", "GlobalMaxPool2D", "MaxPool2D"]
__all__ += activation.__all__
__all__ += convolution.__all__
__all__ += core.__all__
__all__ += input_layer.__all__
__all__ += input_spec.__all__
__all__ += merging.__all__
__all__ += normalization.__all__
__all__ += pooling.__all__
__all__ += preprocessing.__all__
__all__ += regularization.__all__
__all__ += reshaping.__all__
__all__ += strings.__all__

publish("keras.layers", globals(), __all__)
