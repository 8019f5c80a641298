"""What weights are held to after each step, under the names of ``tf.keras.constraints``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pycollective.keras import configs
from pycollective.keras.backend import epsilon, name_of_class, resolve
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


class Constraint:
    """Base class: one of your own overrides `__call__`.

    Optimizers call it after they have updated a variable, with the new value, and store what it
    returns.
    """

    def __call__(self, w: Any) -> Tensor:
        """Return the weight as it shall be: the same shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} must override __call__()")

    def get_config(self) -> dict[str, Any]:
        """Return what the constructor gets."""
        return {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Make one of what `get_config` returned."""
        return cls(**config)


class NonNeg(Constraint):
    """Negative numbers become 0."""

    def __call__(self, w: Any) -> Tensor:
        """Return the weight without what is negative."""
        return ops.maximum(as_tensor(w), 0)


class _Norm(Constraint):
    """Base of what scales each vector along ``axis`` to another Euclidean norm."""

    def __init__(self, axis: Any = 0) -> None:
        self.axis = axis

    def wanted(self, norms: Tensor) -> Tensor | float:
        """Return the norms there shall be."""
        raise NotImplementedError

    def __call__(self, w: Any) -> Tensor:
        """Return the scaled weight."""
        weight = as_tensor(w)
        norms = ops.sqrt(ops.reduce_sum(ops.square(weight), axis=self.axis, keepdims=True))
        return weight * (self.wanted(norms) / (norms + epsilon()))


class MaxNorm(_Norm):
    """Vectors along ``axis`` that are longer than ``max_value`` are scaled down to it.

    Parameters
    ----------
    max_value
        The largest Euclidean norm.
    axis
        The axis, or axes, that a vector takes up: 0 for the inputs of each unit of `Dense`,
        ``[0, 1, 2]`` for each filter of `Conv2D`.
    """

    def __init__(self, max_value: float = 2, axis: Any = 0) -> None:
        super().__init__(axis)
        self.max_value = max_value

    def wanted(self, norms: Tensor) -> Tensor:
        """Return the norms, cut off."""
        return ops.clip_by_value(norms, 0, self.max_value)

    def get_config(self) -> dict[str, Any]:
        """Return what the constructor gets."""
        return {"max_value": self.max_value, "axis": self.axis}


class UnitNorm(_Norm):
    """Vectors along ``axis`` are scaled to norm 1."""

    def wanted(self, norms: Tensor) -> float:
        """Return 1."""
        return 1.0

    def get_config(self) -> dict[str, Any]:
        """Return what the constructor gets."""
        return {"axis": self.axis}


class MinMaxNorm(_Norm):
    """The norms of vectors along ``axis`` are brought between two values.

    Parameters
    ----------
    min_value, max_value
        The smallest and the largest norm.
    rate
        How far a norm outside is moved towards them in each step; 1: all the way.
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
        """Return the norms, moved towards the interval."""
        inside = ops.clip_by_value(norms, self.min_value, self.max_value)
        return inside * self.rate + norms * (1 - self.rate)

    def get_config(self) -> dict[str, Any]:
        """Return what the constructor gets."""
        return {
            "min_value": self.min_value,
            "max_value": self.max_value,
            "rate": self.rate,
            "axis": self.axis,
        }


max_norm = MaxNorm
min_max_norm = MinMaxNorm
non_neg = NonNeg
unit_norm = UnitNorm

_KNOWN: dict[str, Any] = {}
for _class in (MaxNorm, MinMaxNorm, NonNeg, UnitNorm):
    _KNOWN[_class.__name__] = _KNOWN[name_of_class(_class)] = _class


def serialize(constraint: Any) -> Any:
    """Return a constraint as a dictionary (None stays None)."""
    return configs.serialize(constraint)


def deserialize(config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the constraint that `serialize` described."""
    return configs.deserialize(config, "constraint", _KNOWN, custom_objects)


def get(identifier: Any) -> Callable[[Any], Any] | None:
    """Return a constraint: itself, or one by its name (``"non_neg"``) or config.

    Raises
    ------
    ValueError
        For an unknown name, or what is neither a name, a config nor callable.
    """
    found = resolve("constraint", _KNOWN, identifier)
    if found is None or callable(found):
        constraint: Callable[[Any], Any] | None = found
        return constraint
    raise ValueError(f"{identifier!r} is no constraint; give a name or a callable(weight)")
