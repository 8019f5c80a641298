"""Constraints of weights, under the names of ``tf.keras.constraints``."""

from __future__ import annotations

from typing import Any

from pycollective.keras.backend import epsilon
from pycollective.keras.configs import Configured, Kind, by_name
from pycollective.keras.registration import publish
from pycollective.tensor import Tensor, as_tensor, ops

__all__ = [
    "Constraint",
    "MaxNorm",
    "MinMaxNorm",
    "NonNeg",
    "UnitNorm",
    "deserialize",
    "get",
    "max_norm",
    "min_max_norm",
    "non_neg",
    "serialize",
    "unit_norm",
]


class Constraint(Configured):
    """Base class of constraints; a subclass overrides `__call__`.

    After the update of a variable, an optimizer calls the variable's constraint with the new value,
    and stores the result.
    """

    def __call__(self, w: Any) -> Tensor:
        """Return the constrained weight, with the same shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} must override __call__()")


class NonNeg(Constraint):
    """Replace negative elements by 0."""

    def __call__(self, w: Any) -> Tensor:
        return ops.maximum(as_tensor(w), 0)


class _Norm(Constraint):
    """Base of constraints that scale each vector along ``axis`` to another Euclidean norm."""

    def __init__(self, axis: Any = 0) -> None:
        self.axis = axis

    def wanted(self, norms: Tensor) -> Tensor | float:
        """Return the norms to scale the vectors to."""
        raise NotImplementedError

    def __call__(self, w: Any) -> Tensor:
        weight = as_tensor(w)
        norms = ops.sqrt(ops.reduce_sum(ops.square(weight), axis=self.axis, keepdims=True))
        return weight * (self.wanted(norms) / (norms + epsilon()))


class MaxNorm(_Norm):
    """Scale vectors along ``axis`` down to the norm ``max_value`` if they are longer.

    Parameters
    ----------
    max_value : float
        The largest Euclidean norm.
    axis
        The axis, or axes, of a vector: 0 for the inputs of each unit of `Dense`, ``[0, 1, 2]`` for
        each filter of `Conv2D`.
    """

    def __init__(self, max_value: float = 2, axis: Any = 0) -> None:
        super().__init__(axis)
        self.max_value = max_value

    def wanted(self, norms: Tensor) -> Tensor:
        return ops.clip_by_value(norms, 0, self.max_value)


class UnitNorm(_Norm):
    """Scale vectors along ``axis`` to norm 1."""

    def wanted(self, norms: Tensor) -> float:
        return 1.0


class MinMaxNorm(_Norm):
    """Scale vectors along ``axis`` so that their norms are between two values.

    Parameters
    ----------
    min_value, max_value : float
        The smallest and the largest norm.
    rate : float
        The fraction of the distance to this range that a norm is moved in each step; 1: all of it.
    axis
        As for `MaxNorm`.
    """

    def __init__(
        self, min_value: float = 0.0, max_value: float = 1.0, rate: float = 1.0, axis: Any = 0
    ) -> None:
        super().__init__(axis)
        self.min_value = min_value
        self.max_value = max_value
        self.rate = rate

    def wanted(self, norms: Tensor) -> Tensor:
        inside = ops.clip_by_value(norms, self.min_value, self.max_value)
        return inside * self.rate + norms * (1 - self.rate)


max_norm = MaxNorm
min_max_norm = MinMaxNorm
non_neg = NonNeg
unit_norm = UnitNorm

_KIND = Kind("constraint", by_name(MaxNorm, MinMaxNorm, NonNeg, UnitNorm), "a callable(weight)")
serialize = _KIND.serialize
deserialize = _KIND.deserialize
get = _KIND.get
publish("keras.constraints", globals(), __all__)
