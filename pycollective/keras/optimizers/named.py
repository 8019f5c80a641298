"""Optimizers by their names, and as what JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycollective.keras import configs
from pycollective.keras.optimizers.optimizer import Optimizer

__all__ = ["KNOWN", "deserialize", "get", "serialize"]

#: The package's optimizers by their names in small letters; `pycollective.keras.optimizers` fills it.
KNOWN: dict[str, Any] = {}


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
    optimizer: Optimizer = configs.deserialize(config, "optimizer", KNOWN, custom_objects)
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
