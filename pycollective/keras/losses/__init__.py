"""Losses, under the names of ``tf.keras.losses``."""

from __future__ import annotations

from pycollective.keras.losses import functions, objects
from pycollective.keras.losses.functions import *  # noqa: F403
from pycollective.keras.losses.loss import LOSSES, Loss, Reduction
from pycollective.keras.losses.objects import *  # noqa: F403
from pycollective.keras.registration import publish

__all__ = ["Loss", "Reduction", "deserialize", "get", "serialize"]
__all__ += functions.__all__
__all__ += objects.__all__

for _module in (functions, objects):
    LOSSES.known.update({name: getattr(_module, name) for name in _module.__all__})
for _short, _long in {
    "bce": "binary_crossentropy",
    "kld": "kl_divergence",
    "mae": "mean_absolute_error",
    "mape": "mean_absolute_percentage_error",
    "mse": "mean_squared_error",
    "msle": "mean_squared_logarithmic_error",
}.items():
    LOSSES.known[_short] = LOSSES.known[_short.upper()] = LOSSES.known[_long]

serialize = LOSSES.serialize
deserialize = LOSSES.deserialize
get = LOSSES.get
publish("keras.losses", globals(), __all__)
