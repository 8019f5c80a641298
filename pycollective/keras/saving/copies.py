"""Objects as what `pickle` and `copy` make them of: configs, and the values of variables."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from pycollective.keras.saving.objects import (
    deserialize_keras_object,
    serialize_with_own,
    sharing,
)
from pycollective.train.checkpoint import contents_of
from pycollective.train.files import Contents
from pycollective.train.restoration import Restoration, variables_of

__all__ = ["copied", "reduced"]


def reduced(obj: Any) -> tuple[Any, ...]:
    """Return the value that an object's ``__reduce__`` returns."""
    stored, own = serialize_with_own(obj)
    return _rebuilt, (stored, own, contents_of(obj))


def copied(obj: Any) -> Any:
    """Return a copy with variables of its own, in the strategy of the object's variables."""
    strategies = (variable._distribute_strategy for _, variable in variables_of(obj))
    strategy = next((each for each in strategies if each is not None), None)
    function, arguments = reduced(obj)
    with nullcontext() if strategy is None else strategy.scope():
        return function(*arguments)


def _rebuilt(stored: Any, own: dict[str, Any], contents: Contents) -> Any:
    with sharing():
        made = deserialize_keras_object(stored, own)
    # Variables that are made later, such as the slots of an optimizer, start with their values too.
    restoration = Restoration(f"copy of {type(made).__name__}", contents)
    restoration.carry_out(restoration.plan(made, 0))
    return made
