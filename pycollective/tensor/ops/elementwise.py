"""Operations on the elements of one or two tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...array_backend import Array, asarray
from ...errors import InvalidArgumentError
from ..compiled import selected
from ..compiled import unary as unary_kernel
from ..tape import record
from ..tensor import Tensor, as_tensor
from ._define import (
    binary,
    check_dtypes,
    check_shapes,
    differentiable,
    keep_dtype,
    operands,
    plain,
    sum_to_shape,
    unary,
)

__all__ = [
    "abs",
    "add",
    "clip_by_value",
    "cos",
    "divide",
    "equal",
    "exp",
    "floor",
    "floordiv",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "log",
    "log1p",
    "logical_and",
    "logical_not",
    "logical_or",
    "maximum",
    "minimum",
    "mod",
    "multiply",
    "negative",
    "not_equal",
    "pow",
    "reciprocal",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sqrt",
    "square",
    "squared_difference",
    "subtract",
    "tanh",
    "where",
]

_negated, _ = unary_kernel("negative", np.negative, lambda g, x, y: -g)

# Two operands ------------------------------------------------------------------------------------

add = binary(
    "add",
    np.add,
    lambda g, x, y, z: g,
    lambda g, x, y, z: g,
    "Return ``x + y``; the shapes broadcast.",
    linear=True,
    kernel=True,
)
subtract = binary(
    "subtract",
    np.subtract,
    lambda g, x, y, z: g,
    lambda g, x, y, z: _negated(g),
    "Return ``x - y``; the shapes broadcast.",
    linear=True,
    kernel=True,
)
multiply = binary(
    "multiply",
    np.multiply,
    lambda g, x, y, z: g * y,
    lambda g, x, y, z: g * x,
    "Return ``x * y``; the shapes broadcast.",
    kernel=True,
)


def _divide(x: Any, y: Any) -> Any:
    if x.dtype.kind in "iu" and x.dtype.itemsize <= 2:
        x, y = x.astype(np.float32), y.astype(np.float32)  # NumPy would give float64, or float16
    return np.true_divide(x, y)


divide = binary(
    "divide",
    _divide,
    lambda g, x, y, z: g / y,
    lambda g, x, y, z: -(g * z / y),
    "Return ``x / y``; the shapes broadcast, and integers give floating-point numbers.",
    kernel=True,
)
maximum = binary(
    "maximum",
    np.maximum,
    lambda g, x, y, z: g * (x >= y),
    lambda g, x, y, z: g * ~(x >= y),
    "Return the larger of ``x`` and ``y``; if both are equal, ``x`` gets the gradient. The result of "
    "0.0 and -0.0 is one of them.",
    kernel=True,
)
minimum = binary(
    "minimum",
    np.minimum,
    lambda g, x, y, z: g * (x <= y),
    lambda g, x, y, z: g * ~(x <= y),
    "Return the smaller of ``x`` and ``y``; if both are equal, ``x`` gets the gradient. The result of "
    "0.0 and -0.0 is one of them.",
    kernel=True,
)
squared_difference = binary(
    "squared_difference",
    lambda x, y: np.square(x - y),
    lambda g, x, y, z: g * (x - y) * 2,
    lambda g, x, y, z: g * (y - x) * 2,
    "Return ``(x - y) ** 2``; the shapes broadcast.",
    kernel=True,
)


def _power(x: Array, y: Array) -> Any:
    if x.dtype.kind in "iu" and (y < 0).any():
        raise InvalidArgumentError(
            "pow: integers have no negative powers; cast() to a floating-point dtype"
        )
    return np.power(x, y)


def _power_by_x(g: Array, x: Array, y: Array, z: Array) -> Any:
    # The gradient for y = 0 is 0 also at x = 0, where x ** -1 is infinite.
    return g * y * np.power(x, np.where(y == 0, np.ones_like(y), y - 1))


def _power_by_y(g: Array, x: Array, y: Array, z: Array) -> Any:
    # The limit for x -> 0. For x < 0 there is no derivative; TensorFlow's result is 0.
    return g * z * np.log(np.where(x > 0, x, np.ones_like(x)))


pow = binary(
    "pow",
    _power,
    _power_by_x,
    _power_by_y,
    "Return ``x ** y``; the shapes broadcast. The gradient for ``y`` is 0 where ``x <= 0``.",
)


def _no_zero(name: str, y: Array) -> None:
    if y.dtype.kind in "iu" and not y.all():
        raise ZeroDivisionError(f"{name}: integer division by zero")


def _floor_divide(x: Array, y: Array) -> Any:
    _no_zero("floordiv", y)
    return np.floor_divide(x, y)


def _remainder(x: Array, y: Array) -> Any:
    _no_zero("mod", y)
    return np.remainder(x, y)


mod = binary(
    "mod",
    _remainder,
    lambda g, x, y, z: g,
    lambda g, x, y, z: -(g * np.floor_divide(x, y)),
    "Return the remainder of ``x / y`` with the sign of ``y``; the shapes broadcast.",
    kernel=True,
)
floordiv = plain("floordiv", _floor_divide, "Return ``x / y`` rounded down; the shapes broadcast.")
equal = plain("equal", np.equal, "Return ``x == y`` by element.")
not_equal = plain("not_equal", np.not_equal, "Return ``x != y`` by element.")
less = plain("less", np.less, "Return ``x < y`` by element.")
less_equal = plain("less_equal", np.less_equal, "Return ``x <= y`` by element.")
greater = plain("greater", np.greater, "Return ``x > y`` by element.")
greater_equal = plain("greater_equal", np.greater_equal, "Return ``x >= y`` by element.")
logical_and = plain("logical_and", np.logical_and, "Return True if both are true, by element.")
logical_or = plain("logical_or", np.logical_or, "Return True if one or both are true, by element.")


def _bits(symbol: str, function: Any) -> Any:
    """Return the function of an operator on the bits of integers, or on bools."""

    def forward(*arrays: Array) -> Any:
        if arrays[0].dtype.kind not in "biu":
            raise TypeError(f"{symbol} needs bools or integers, got {arrays[0].dtype}")
        return function(*arrays)

    return forward


bits_and = plain("bits_and", _bits("&", np.bitwise_and), "Return ``x & y``.")
bits_or = plain("bits_or", _bits("|", np.bitwise_or), "Return ``x | y``.")
bits_xor = plain("bits_xor", _bits("^", np.bitwise_xor), "Return ``x ^ y``.")
_inverted = _bits("~", np.invert)


def invert(x: Any) -> Tensor:
    """Return ``~x``."""
    return Tensor(_inverted(as_tensor(x).array))


def logical_not(x: Any, name: str | None = None) -> Tensor:
    """Return True for elements that are false, and False for others."""
    return Tensor(np.logical_not(as_tensor(x).array))


# One operand -------------------------------------------------------------------------------------


def _sigmoid(x: Array) -> Any:
    # The argument of exp is never positive, so that exp does not overflow.
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _used(g: Array, slope: Array) -> Any:
    """Return a factor of a gradient, and 1 where ``g`` is 0: the product is then 0 and never NaN."""
    return np.where(g == 0, slope.dtype.type(1), slope)


negative = unary(
    "negative", np.negative, lambda g, x, y: -g, "Return ``-x``.", floating=False, kernel="negative"
)
abs = unary(
    "abs",
    np.abs,
    lambda g, x, y: g * np.sign(x),
    "Return the absolute values; the gradient at 0 is 0.",
    floating=False,
    kernel="abs",
)
square = unary(
    "square",
    np.square,
    lambda g, x, y: g * x * 2,
    "Return ``x * x``.",
    floating=False,
    kernel="square",
)
sqrt = unary(
    "sqrt",
    np.sqrt,
    lambda g, x, y: g / _used(g, y + y),
    "Return the square roots.",
    kernel="sqrt",
)
rsqrt = unary(
    "rsqrt",
    lambda x: 1 / np.sqrt(x),
    lambda g, x, y: g * _used(g, y) / _used(g, x * -2),
    "Return ``1 / sqrt(x)``.",
    kernel="rsqrt",
)
reciprocal = unary(
    "reciprocal",
    lambda x: 1 / x,
    lambda g, x, y: -(g * _used(g, y) * _used(g, y)),
    "Return ``1 / x``.",
    kernel="reciprocal",
)
sign = unary(
    "sign",
    np.sign,
    lambda g, x, y: np.zeros_like(g),
    "Return -1, 0 or 1 by element; the gradient is 0.",
    floating=False,
)
exp = unary("exp", np.exp, lambda g, x, y: g * y, "Return ``e ** x``.", kernel="exp")
log = unary("log", np.log, lambda g, x, y: g / x, "Return the natural logarithms.", kernel="log")
log1p = unary(
    "log1p", np.log1p, lambda g, x, y: g / (1 + x), "Return ``log(1 + x)``.", kernel="log1p"
)
sin = unary(
    "sin", np.sin, lambda g, x, y: g * np.cos(x), "Return the sines (radians).", kernel="sin"
)
cos = unary(
    "cos", np.cos, lambda g, x, y: -(g * np.sin(x)), "Return the cosines (radians).", kernel="cos"
)
tanh = unary(
    "tanh",
    np.tanh,
    lambda g, x, y: g * (1 - y * y),
    "Return the hyperbolic tangents.",
    kernel="tanh",
)
sigmoid = unary(
    "sigmoid",
    _sigmoid,
    lambda g, x, y: g * y * (1 - y),
    "Return ``1 / (1 + exp(-x))``.",
    kernel="sigmoid",
)


def floor(x: Any, name: str | None = None) -> Tensor:
    """Return the largest integers that are not above ``x``, without gradient."""
    return Tensor(np.floor(as_tensor(x).array))


def round(x: Any, name: str | None = None) -> Tensor:
    """Return the nearest integers, halves rounded to even, without gradient."""
    a = as_tensor(x).array
    return Tensor(a if a.dtype.kind in "iu" else np.rint(a))


# Choices -----------------------------------------------------------------------------------------


@differentiable
def where(condition: Any, x: Any = None, y: Any = None, name: str | None = None) -> Tensor:
    """Return the elements of ``x`` where ``condition`` is True, else those of ``y``.

    All three broadcast. Without ``x`` and ``y``, return the indices of the true elements, or of
    numbers other than 0, as rows of int64.

    Raises
    ------
    TypeError
        ``condition`` is not bool, or ``x`` and ``y`` have different dtypes.
    ValueError
        Only one of ``x`` and ``y`` is given.
    """
    chosen = as_tensor(condition).array
    if x is None and y is None and chosen.dtype.kind != "b":
        chosen = chosen != 0
    if chosen.dtype.kind != "b":
        raise TypeError(f"where needs a bool condition, got dtype {chosen.dtype}; compare it first")
    if x is None and y is None:
        return Tensor(np.argwhere(chosen).astype(np.int64))
    if x is None or y is None:
        raise InvalidArgumentError("where needs both x and y, or neither")
    first, second = operands(x, y)
    check_dtypes("where", first, second)
    chosen = asarray(chosen, like=first.array)

    zero = asarray(0, first.dtype, like=first.array)

    def vjp(g: Array, need: tuple[bool, ...]) -> tuple[Any, Any]:
        return (
            sum_to_shape(selected(chosen, g, zero), first.shape) if need[0] else None,
            sum_to_shape(selected(chosen, zero, g), second.shape) if need[1] else None,
        )

    check_shapes("where", chosen, first.array, second.array)
    return record(selected(chosen, first.array, second.array), (first, second), vjp)


@differentiable
def clip_by_value(
    t: Any, clip_value_min: Any, clip_value_max: Any, name: str | None = None
) -> Tensor:
    """Return ``t`` with elements outside of the two bounds replaced by the nearer bound."""
    x = as_tensor(t)
    bounds = clip_value_min, clip_value_max
    ordered = all(isinstance(b, (int, float)) for b in bounds) and bounds[0] <= bounds[1]
    if x.dtype.kind != "f" or not ordered:
        return minimum(maximum(x, clip_value_min), clip_value_max)
    a = x.array
    low, high = map(a.dtype.type, bounds)
    values, gradient = unary_kernel(
        "clip",
        lambda a: np.minimum(np.maximum(a, low), high),
        lambda g, a, _y: g * ((a >= low) & (a <= high)),
        *map(float, bounds),
    )
    return record(keep_dtype(values(a), a.dtype), (x,), lambda g, _need: (gradient(g, a, None),))
