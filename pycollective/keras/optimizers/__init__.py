"""Optimizers, under the names of ``tf.keras.optimizers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycollective.keras import configs
from pycollective.keras.optimizers import schedules
from pycollective.keras.optimizers.adagrad import Adadelta, Adagrad
from pycollective.keras.optimizers.adam import Adam, AdamW
from pycollective.keras.optimizers.adamax import Adamax, Nadam
from pycollective.keras.optimizers.loss_scale import LossScaleOptimizer
from pycollective.keras.optimizers.optimizer import Optimizer
from pycollective.keras.optimizers.rmsprop import RMSprop
from pycollective.keras.optimizers.sgd import SGD
from pycollective.keras.registration import publish

publish("keras.optimizers", globals(), [name for name in globals() if name[0].isupper()])
publish("keras.optimizers.schedules", vars(schedules), schedules.__all__)

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "LossScaleOptimizer",
    "Nadam",
    "Optimizer",
    "RMSprop",
    "deserialize",
    "get",
    "schedules",
    "serialize",
]

_KNOWN: dict[str, Any] = {
    cls.__name__.lower(): cls
    for cls in (Adadelta, Adagrad, Adam, AdamW, Adamax, LossScaleOptimizer, Nadam, RMSprop, SGD)
}


def serialize(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer as a dictionary, without what it has learnt."""
    description: dict[str, Any] = configs.serialize(optimizer)
    return description


def deserialize(
    config: Mapping[str, Any] | str, custom_objects: Mapping[str, Any] | None = None
) -> Optimizer:
    """Return the optimizer that `serialize` described; large and small letters are alike.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if isinstance(config, str):
        config = {"class_name": config, "config": {}}
    name = config.get("class_name")
    if isinstance(name, str) and name not in (custom_objects or {}):
        config = {**config, "class_name": name.lower()}
    optimizer: Optimizer = configs.deserialize(config, "optimizer", _KNOWN, custom_objects)
    return optimizer


def get(identifier: Any) -> Optimizer | None:
    """Return an optimizer: itself, one by its name (``"adam"``), or by its dictionary.

    Raises
    ------
    ValueError
        For an unknown name, or what is no optimizer.
    """
    if identifier is None or isinstance(identifier, Optimizer):
        return identifier
    if isinstance(identifier, (str, Mapping)):
        return deserialize(identifier)
    raise ValueError(f"{identifier!r} is no optimizer; give a name or an Optimizer")
