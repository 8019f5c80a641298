"""Regularizers of weights, under the names of ``tf.keras.regularizers``."""

from __future__ import annotations

from typing import Any

from pycollective.keras.configs import Configured, Kind
from pycollective.keras.registration import publish
from pycollective.nn.losses import sum_of_squares
from pycollective.tensor import Tensor, as_tensor, ops

__all__ = [
    "L1",
    "L1L2",
    "L2",
    "OrthogonalRegularizer",
    "Regularizer",
    "deserialize",
    "get",
    "l1",
    "l1_l2",
    "l2",
    "orthogonal_regularizer",
    "serialize",
]


class Regularizer(Configured):
    """Base class of regularizers; a subclass overrides `__call__`."""

    def __call__(self, x: Any) -> Tensor:
        """Return the loss of a weight, a scalar."""
        raise NotImplementedError(f"{type(self).__name__} must override __call__()")

    def get_config(self) -> dict[str, Any]:
        if not self._config_names:
            raise NotImplementedError(f"{type(self).__name__} must override get_config()")
        return super().get_config()


class L1L2(Regularizer):
    """``l1 * sum(|x|) + l2 * sum(x²)``."""

    def __init__(self, l1: float = 0.0, l2: float = 0.0) -> None:
        self.l1 = _factor("l1", l1)
        self.l2 = _factor("l2", l2)

    def __call__(self, x: Any) -> Tensor:
        parts = []
        if self.l1:
            parts.append(ops.reduce_sum(ops.abs(x)) * self.l1)
        if self.l2 or not parts:
            parts.append(sum_of_squares(x, self.l2))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


class L1(L1L2):
    """``l1 * sum(|x|)``."""

    def __init__(self, l1: float = 0.01) -> None:
        super().__init__(l1=l1)


class L2(L1L2):
    """``l2 * sum(x²)``."""

    def __init__(self, l2: float = 0.01) -> None:
        super().__init__(l2=l2)


class OrthogonalRegularizer(Regularizer):
    """The mean absolute cosine between the rows, or columns, of a matrix, times ``factor``."""

    def __init__(self, factor: float = 0.01, mode: str = "rows") -> None:
        self.factor = _factor("factor", factor)
        if mode not in ("rows", "columns"):
            raise ValueError(f"mode must be 'rows' or 'columns', got {mode!r}")
        self.mode = mode

    def __call__(self, inputs: Any) -> Tensor:
        matrix = as_tensor(inputs)
        if matrix.ndim != 2:
            raise ValueError(
                f"OrthogonalRegularizer needs a matrix, got a weight of shape {matrix.shape}"
            )
        if self.mode == "columns":
            matrix = ops.transpose(matrix)
        vectors = len(matrix)
        if vectors < 2:
            return ops.reduce_sum(matrix) * 0.0
        squares = ops.reduce_sum(ops.square(matrix), axis=1, keepdims=True)
        unit = matrix * ops.rsqrt(ops.maximum(squares, 1e-12))
        cosines = ops.abs(ops.matmul(unit, unit, transpose_b=True))
        others = ops.reduce_sum(cosines) - ops.reduce_sum(ops.square(unit))
        return others * (self.factor / (vectors * (vectors - 1)))


def l1_l2(l1: float = 0.01, l2: float = 0.01) -> L1L2:
    """Return `L1L2` with the default factors of ``tf.keras``; Keras 3's defaults are 0."""
    return L1L2(l1, l2)


l1 = L1
l2 = L2
orthogonal_regularizer = OrthogonalRegularizer


def _factor(name: str, value: float) -> float:
    factor = float(value)
    if not 0 <= factor < float("inf"):
        raise ValueError(f"{name} must be at least 0 and finite, got {value}")
    return factor


_KIND = Kind(
    "regularizer",
    {
        "L1": L1,
        "L2": L2,
        "L1L2": L1L2,
        "OrthogonalRegularizer": OrthogonalRegularizer,
        "l1": L1,
        "l2": L2,
        "l1_l2": l1_l2,
        "l1l2": L1L2,
        "orthogonal_regularizer": OrthogonalRegularizer,
    },
    "a callable(weight)",
)
serialize = _KIND.serialize
deserialize = _KIND.deserialize


def get(identifier: Any) -> Any:
    """Return a regularizer, given as itself, a name such as ``"l2"``, a config or None.

    Raises
    ------
    ValueError
        For an unknown name, and for a value that is neither a name, a config nor callable.
    """
    found = _KIND.get(identifier)
    return l1_l2() if found is l1_l2 else found


publish("keras.regularizers", globals(), __all__)
