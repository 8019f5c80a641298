"""Layers, models, losses, optimizers and metrics, under the names of ``tf.keras``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycollective.keras import (
        activations,
        backend,
        callbacks,
        constraints,
        datasets,
        initializers,
        layers,
        losses,
        metrics,
        mixed_precision,
        models,
        optimizers,
        regularizers,
        saving,
        utils,
    )
    from pycollective.keras.graph import KerasTensor
    from pycollective.keras.initializers import Initializer
    from pycollective.keras.layers import Input, InputSpec, Layer
    from pycollective.keras.losses import Loss
    from pycollective.keras.metrics import Metric
    from pycollective.keras.models import Model, Sequential
    from pycollective.keras.optimizers import Optimizer
    from pycollective.keras.policy import DTypePolicy
    from pycollective.keras.regularizers import Regularizer

__all__ = [
    "DTypePolicy",
    "Initializer",
    "Input",
    "InputSpec",
    "KerasTensor",
    "Layer",
    "Loss",
    "Metric",
    "Model",
    "Optimizer",
    "Regularizer",
    "Sequential",
    "activations",
    "backend",
    "callbacks",
    "constraints",
    "datasets",
    "initializers",
    "layers",
    "losses",
    "metrics",
    "mixed_precision",
    "models",
    "optimizers",
    "regularizers",
    "saving",
    "utils",
]

#: The module of each public name that is no module itself. A module is imported at its first use.
_ORIGIN = {
    "DTypePolicy": "policy",
    "Initializer": "initializers",
    "Input": "layers",
    "InputSpec": "layers",
    "KerasTensor": "graph",
    "Layer": "layers",
    "Loss": "losses",
    "Metric": "metrics",
    "Model": "models",
    "Optimizer": "optimizers",
    "Regularizer": "regularizers",
    "Sequential": "models",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_ORIGIN.get(name, name)}")
    value = getattr(module, name) if name in _ORIGIN else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
