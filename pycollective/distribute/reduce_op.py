"""Reductions over the replicas of a strategy."""

from __future__ import annotations

import enum
import functools
from typing import Any

import numpy as np

from pycollective import array_backend
from pycollective.array_backend import Array
from pycollective.tensor import VariableAggregation

# Dtypes that are reduced in another dtype, and cast back. Halves are then rounded once instead of at
# every rank. TensorFlow sums bools as numbers.
_REDUCED_AS = {"float16": "float32", "bfloat16": "float32", "bool": "int32"}

# The mean of ints is a fraction, and their sums must not wrap around.
_REDUCED_FOR_MEAN_AS = _REDUCED_AS | {
    "int8": "int32",
    "int16": "int32",
    "uint8": "int32",
    "uint16": "int32",
    "uint32": "int64",
}


class ReduceOp(enum.Enum):
    """The reductions over replicas."""

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, value: Any) -> ReduceOp:
        """Return the `ReduceOp` for ``value``, a `ReduceOp` or its name in any case.

        Raises
        ------
        TypeError
            ``value`` is neither.
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
        """Return the reduction of a `VariableAggregation`.

        Raises
        ------
        ValueError
            The aggregation is not SUM or MEAN.
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


@functools.lru_cache(maxsize=256)
def work_dtype(dtype: np.dtype[Any], reduce_op: ReduceOp) -> np.dtype[Any]:
    """Return the dtype in which arrays of a dtype are reduced."""
    names = _REDUCED_FOR_MEAN_AS if reduce_op is ReduceOp.MEAN else _REDUCED_AS
    name = names.get(dtype.name)
    return dtype if name is None else np.dtype(name)


def finished(total: Array, dtype: np.dtype[Any], reduce_op: ReduceOp, replicas: int) -> Array:
    """Return a total as the result for arrays of ``dtype``.

    The total of integers is their exact sum, from which this function computes the mean.
    """
    if reduce_op is ReduceOp.MEAN and dtype.kind in "iub":
        return array_backend.asarray(total / replicas)
    return total if total.dtype == dtype else total.astype(dtype)


def check_sum(call: str, op: ReduceOp, value: Any) -> None:
    """Raise TypeError for a sum of bools, which would count nothing."""
    if op is ReduceOp.SUM and getattr(value, "dtype", None) == np.dtype(bool):
        raise TypeError(f"{call}('SUM') needs numbers, got bool; use tf.cast() to count values")
