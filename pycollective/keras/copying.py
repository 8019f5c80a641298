"""`CopiedByConfig`: pickling and copying of layers, models, optimizers and metrics."""

from __future__ import annotations

from typing import Any

__all__ = ["CopiedByConfig"]


class CopiedByConfig:
    """Base of objects that are pickled and copied as their configs and the values of their variables.

    A copy has variables of its own. A pickled object is made again in the strategy whose scope it is
    unpickled in; a copied one stays in the strategy of its variables.
    """

    def __reduce__(self) -> Any:
        from pycollective.keras.saving.copies import reduced

        return reduced(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        from pycollective.keras.saving.copies import copied

        memo[id(self)] = made = copied(self)
        return made

    def __copy__(self) -> Any:
        return self.__deepcopy__({})
