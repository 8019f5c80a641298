"""Losses, under the names of ``tf.keras.losses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycollective.keras import configs
from pycollective.keras.backend import find
from pycollective.keras.losses import functions, objects
from pycollective.keras.losses.functions import *  # noqa: F403
from pycollective.keras.losses.loss import Loss, Reduction
from pycollective.keras.losses.objects import *  # noqa: F403

__all__ = ["Loss", "Reduction", "deserialize", "get", "serialize"]
__all__ += functions.__all__
__all__ += objects.__all__

_KNOWN: dict[str, Any] = {
    **{name: getattr(functions, name) for name in functions.__all__},
    **{name: getattr(objects, name) for name in objects.__all__},
}
for _short, _long in {
    "bce": "binary_crossentropy",
    "kld": "kl_divergence",
    "mae": "mean_absolute_error",
    "mape": "mean_absolute_percentage_error",
    "mse": "mean_squared_error",
    "msle": "mean_squared_logarithmic_error",
}.items():
    _KNOWN[_short] = _KNOWN[_short.upper()] = _KNOWN[_long]


def serialize(loss: Any) -> Any:
    """Return a loss, or a function, as a dictionary."""
    return configs.serialize(loss)


def deserialize(name: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the loss or function that `serialize` described.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    return configs.deserialize(name, "loss", _KNOWN, custom_objects)


def get(identifier: Any) -> Any:
    """Return a loss: itself, one by its class's name or dictionary, or a function by its name.

    Raises
    ------
    ValueError
        For an unknown name, or what is neither a name nor callable.
    """
    if isinstance(identifier, Mapping):
        return deserialize(identifier)
    found = find("loss", _KNOWN, identifier) if isinstance(identifier, str) else identifier
    if found is not None and not callable(found):
        raise ValueError(f"{identifier!r} is no loss; give a name or a callable(y_true, y_pred)")
    return found() if isinstance(found, type) else found
