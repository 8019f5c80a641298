"""`CopiedByConfig`: pickling and copying of layers, models, optimizers and metrics."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from pycollective.keras.serialization import deserialize_keras_object, serialize_with_own, sharing
from pycollective.train.checkpoint import contents_of
from pycollective.train.files import Contents
from pycollective.train.restoration import Restoration, variables_of
from pycollective.train.trackable import Trackable


class CopiedByConfig(Trackable):
    """Base of objects that are pickled and copied by their config and their variables' values.

    A copy has its own variables. Unpickling makes an object in the current strategy; copying makes it
    in the strategy of the original's variables.
    """

    def __reduce__(self) -> Any:
        stored, own = serialize_with_own(self)
        # Unpickling the class imports its module, which registers the names in the config.
        module = None if type(self) in own.values() else type(self)
        return _rebuilt, (stored, own, contents_of(self), module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        strategies = (variable.distribute_strategy for _, variable in variables_of(self))
        strategy = next((each for each in strategies if each is not None), None)
        function, arguments = self.__reduce__()
        with nullcontext() if strategy is None else strategy.scope():
            memo[id(self)] = copy = function(*arguments)
        return copy

    def __copy__(self) -> Any:
        return self.__deepcopy__({})


def _rebuilt(stored: Any, own: dict[str, Any], contents: Contents, _: type | None) -> Any:
    with sharing():
        copy = deserialize_keras_object(stored, own)
    # The restoration also covers variables that are made later, such as an optimizer's slots.
    restoration = Restoration(f"copy of {type(copy).__name__}", contents)
    restoration.carry_out(restoration.plan(copy, 0))
    return copy
