"""Metrics, under the names of ``tf.keras.metrics``."""

from __future__ import annotations

from pycollective.keras import losses
from pycollective.keras.configs import by_name
from pycollective.keras.losses.functions import (
    binary_crossentropy,
    categorical_crossentropy,
    categorical_hinge,
    hinge,
    huber,
    kl_divergence,
    log_cosh,
    mean_absolute_error,
    mean_absolute_percentage_error,
    mean_squared_error,
    mean_squared_logarithmic_error,
    poisson,
    sparse_categorical_crossentropy,
    squared_hinge,
)
from pycollective.keras.metrics import accuracies, confusion, errors
from pycollective.keras.metrics.accuracies import *  # noqa: F403
from pycollective.keras.metrics.confusion import *  # noqa: F403
from pycollective.keras.metrics.errors import *  # noqa: F403
from pycollective.keras.metrics.metric import METRICS, Mean, MeanMetricWrapper, Metric, Sum
from pycollective.keras.registration import publish

__all__ = ["Mean", "MeanMetricWrapper", "Metric", "Sum", "deserialize", "get", "serialize"]
# Keras also exports these losses as metrics.
__all__ += [
    "binary_crossentropy",
    "categorical_crossentropy",
    "categorical_hinge",
    "hinge",
    "huber",
    "kl_divergence",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "poisson",
    "sparse_categorical_crossentropy",
    "squared_hinge",
]
__all__ += accuracies.__all__
__all__ += confusion.__all__
__all__ += errors.__all__

METRICS.known.update(by_name(Mean, MeanMetricWrapper, Sum))
for _module in (accuracies, confusion, errors):
    _classes = [getattr(_module, name) for name in _module.__all__ if name[0].isupper()]
    METRICS.known.update(by_name(*_classes))
for _short, _class in {
    "bce": errors.BinaryCrossentropy,
    "mae": errors.MeanAbsoluteError,
    "mape": errors.MeanAbsolutePercentageError,
    "mse": errors.MeanSquaredError,
    "msle": errors.MeanSquaredLogarithmicError,
}.items():
    METRICS.known[_short] = METRICS.known[_short.upper()] = _class
for _module in (accuracies, losses):
    for _name in _module.__all__:
        if _name[0].islower() and _name not in ("deserialize", "get", "serialize"):
            METRICS.functions[_name] = getattr(_module, _name)

serialize = METRICS.serialize
deserialize = METRICS.deserialize
get = METRICS.get
publish("keras.metrics", globals(), __all__)


def direction_of(name: str) -> str | None:
    """Return ``"up"`` if a larger value of this metric is better, ``"down"`` if a smaller, or None."""
    direction: str | None = getattr(METRICS.known.get(name), "direction", None)
    return direction
