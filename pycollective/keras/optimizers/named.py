"""Optimizers by their names, and their JSON descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycollective.keras import configs
from pycollective.keras.optimizers.optimizer import Optimizer

#: The package's optimizers by their lower-case names; `pycollective.keras.optimizers` fills it.
KNOWN: dict[str, Any] = {}


def serialize(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer as a dictionary, without its variables."""
    description: dict[str, Any] = configs.serialize(optimizer)
    return description


def deserialize(
    config: Mapping[str, Any] | str, custom_objects: Mapping[str, Any] | None = None
) -> Optimizer:
    """Return the optimizer that `serialize` described; names are case-insensitive.

    Raises
    ------
    ValueError
        The name is unknown.
    """
    if isinstance(config, str):
        config = {"class_name": config, "config": {}}
    name = config.get("class_name")
    if isinstance(name, str) and name not in (custom_objects or {}):
        config = {**config, "class_name": name.lower()}
    optimizer: Optimizer = configs.deserialize(config, "optimizer", KNOWN, custom_objects)
    return optimizer


def get(identifier: Any) -> Optimizer | None:
    """Return an optimizer, given the object, its name (``"adam"``) or its dictionary.

    None stays None.

    Raises
    ------
    ValueError
        The name is unknown, or the argument has another type.
    """
    if identifier is None or isinstance(identifier, Optimizer):
        return identifier
    if isinstance(identifier, (str, Mapping)):
        return deserialize(identifier)
    raise ValueError(f"{identifier!r} is not an optimizer; give a name or an Optimizer")
