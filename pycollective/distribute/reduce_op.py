"""The reductions of the strategy level."""

from __future__ import annotations

import enum
from typing import Any

from pycollective.tensor import VariableAggregation

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
        if isinstance(value, str) and (op := _NAMED.get(value.upper())):
            return op
        raise TypeError(
            "Expected `reduce_op` to be a `tf.distribute.ReduceOp`: ReduceOp.SUM, ReduceOp.MEAN or "
            f"their names, not {value!r}"
        )

    @staticmethod
    def from_variable_aggregation(aggregation: Any) -> ReduceOp:
        """Return the reduction that a `VariableAggregation` means.

        Raises
        ------
        ValueError
            If it means none.
        """
        if aggregation is VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation is VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise ValueError(
            f"Could not convert from `tf.VariableAggregation` {aggregation} to"
            "`tf.distribute.ReduceOp` type"
        )


_NAMED = dict(ReduceOp.__members__)
