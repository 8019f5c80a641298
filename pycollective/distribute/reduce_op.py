"""The reductions of the strategy level."""

from __future__ import annotations

import enum
from typing import Any

__all__ = ["ReduceOp"]


class ReduceOp(enum.Enum):
    """How values of the replicas become one."""

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, value: Any) -> ReduceOp:
        """Return the operation that ``value``, a `ReduceOp` or its name in any case, means.

        Raises
        ------
        TypeError
            If it is neither.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise TypeError(
            "Expected `reduce_op` to be a `tf.distribute.ReduceOp`: ReduceOp.SUM, ReduceOp.MEAN or "
            f"their names, not {value!r}"
        )
