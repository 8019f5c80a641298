"""Optimizers, under the names of ``tf.keras.optimizers``."""

from __future__ import annotations

from typing import Any

from pycollective.keras.backend import find
from pycollective.keras.optimizers import schedules
from pycollective.keras.optimizers.adam import Adam
from pycollective.keras.optimizers.optimizer import Optimizer
from pycollective.keras.optimizers.sgd import SGD

__all__ = ["SGD", "Adam", "Optimizer", "get", "schedules"]

_KNOWN: dict[str, Any] = {"adam": Adam, "sgd": SGD}


def get(identifier: Any) -> Optimizer:
    """Return an optimizer: itself, or one by its name (``"adam"``).

    Raises
    ------
    ValueError
        For an unknown name, or what is neither a name nor an optimizer.
    """
    if isinstance(identifier, Optimizer):
        return identifier
    if isinstance(identifier, str):
        optimizer: Optimizer = find("optimizer", _KNOWN, identifier.lower())()
        return optimizer
    raise ValueError(f"{identifier!r} is no optimizer; give a name or an Optimizer")
