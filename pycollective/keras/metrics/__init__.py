"""Metrics, under the names of ``tf.keras.metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycollective.keras import configs, losses
from pycollective.keras.backend import find, name_of_class
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
from pycollective.keras.metrics.metric import Mean, MeanMetricWrapper, Metric, Sum

__all__ = ["Mean", "MeanMetricWrapper", "Metric", "Sum", "deserialize", "get", "serialize"]
# Losses that stand among the metrics, too.
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

_KNOWN: dict[str, Any] = {"Mean": Mean, "MeanMetricWrapper": MeanMetricWrapper, "Sum": Sum}
for _module in (accuracies, confusion, errors):
    for _name in _module.__all__:
        if _name[0].isupper():
            _KNOWN[_name] = getattr(_module, _name)
_KNOWN.update({name_of_class(_class): _class for _class in list(_KNOWN.values())})
for _short, _class in {
    "bce": errors.BinaryCrossentropy,
    "mae": errors.MeanAbsoluteError,
    "mape": errors.MeanAbsolutePercentageError,
    "mse": errors.MeanSquaredError,
    "msle": errors.MeanSquaredLogarithmicError,
}.items():
    _KNOWN[_short] = _KNOWN[_short.upper()] = _class

#: What a stored `MeanMetricWrapper` may be of.
_FUNCTIONS: dict[str, Any] = {
    name: getattr(module, name)
    for module in (accuracies, losses)
    for name in module.__all__
    if name[0].islower() and name not in ("deserialize", "get", "serialize")
}


def direction_of(name: str) -> str | None:
    """Return ``"up"`` if more of a metric of this name is better, ``"down"`` if less is, or None."""
    known = _KNOWN.get(name)
    return None if known is None else known._direction


def serialize(metric: Any) -> Any:
    """Return a metric, or a function, as a dictionary."""
    return configs.serialize(metric)


def deserialize(config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the metric or function that `serialize` described.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    return configs.deserialize(config, "metric", {**_FUNCTIONS, **_KNOWN}, custom_objects)


def get(identifier: Any) -> Any:
    """Return a metric: itself, or one by its name or dictionary.

    Raises
    ------
    ValueError
        For an unknown name, or what is neither a name nor callable.
    """
    if isinstance(identifier, Mapping):
        return deserialize(identifier)
    found = find("metric", _KNOWN, identifier) if isinstance(identifier, str) else identifier
    if found is not None and not callable(found):
        raise ValueError(f"{identifier!r} is no metric; give a name or a Metric")
    return found() if isinstance(found, type) else found
