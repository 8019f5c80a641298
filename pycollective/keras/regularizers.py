"""Penalties on weights, under the names of ``tf.keras.regularizers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycollective import nn
from pycollective.keras.backend import find
from pycollective.tensor import Tensor, as_tensor, ops

__all__ = ["L1", "L1L2", "L2", "Regularizer", "get", "l1", "l1_l2", "l2"]


class Regularizer:
    """Base class: one of your own overrides `__call__`."""

    def __call__(self, x: Any) -> Tensor:
        """Return the penalty for a weight: a scalar."""
        raise NotImplementedError(f"{type(self).__name__} must override __call__()")


class L1L2(Regularizer):
    """``l1 * sum(|x|) + l2 * sum(x²)``.

    Raises
    ------
    ValueError
        If a factor is negative or no finite number.
    """

    def __init__(self, l1: float = 0.0, l2: float = 0.0) -> None:
        self.l1 = _factor("l1", l1)
        self.l2 = _factor("l2", l2)

    def __call__(self, x: Any) -> Tensor:
        """Return the penalty for a weight: a scalar in its dtype."""
        weight = as_tensor(x)
        parts = []
        if self.l1:
            parts.append(ops.reduce_sum(ops.abs(weight)) * self.l1)
        if self.l2 or not parts:
            # l2_loss is half the sum of the squares.
            parts.append(nn.l2_loss(weight) * (2 * self.l2))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


class L1(L1L2):
    """``l1 * sum(|x|)``."""

    def __init__(self, l1: float = 0.01) -> None:
        super().__init__(l1=l1)


class L2(L1L2):
    """``l2 * sum(x²)``."""

    def __init__(self, l2: float = 0.01) -> None:
        super().__init__(l2=l2)


def l1_l2(l1: float = 0.01, l2: float = 0.01) -> L1L2:
    """Return `L1L2` with Keras's default factors."""
    return L1L2(l1, l2)


l1 = L1
l2 = L2


def _factor(name: str, value: float) -> float:
    factor = float(value)
    if not 0 <= factor < float("inf"):
        raise ValueError(f"{name} must be at least 0 and finite, got {value}")
    return factor


_KNOWN: dict[str, Any] = {
    "L1": L1,
    "L2": L2,
    "L1L2": L1L2,
    "l1": L1,
    "l2": L2,
    "l1_l2": l1_l2,
}


def get(identifier: Any) -> Callable[[Any], Any] | None:
    """Return a regularizer: itself, or one by its name (``"l2"``).

    Raises
    ------
    ValueError
        For an unknown name, or what is neither a name nor callable.
    """
    if isinstance(identifier, str):
        regularizer: Callable[[Any], Any] = find("regularizer", _KNOWN, identifier)()
        return regularizer
    if identifier is None or callable(identifier):
        found: Callable[[Any], Any] | None = identifier
        return found
    raise ValueError(f"{identifier!r} is no regularizer; give a name or a callable(weight)")
