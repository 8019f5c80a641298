"""Activation functions, biases and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array, array_module, native
from ..errors import InvalidArgumentError
from ..tensor import compiled, ops, random
from ..tensor.ops import sigmoid, tanh
from ..tensor.ops._define import (
    binary,
    check_dtypes,
    differentiable,
    keep_dtype,
    operands,
    sum_to_shape,
    unary,
)
from ..tensor.ops.reductions import axes_of
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor
from ..workspace import workspace
from .erf import erf, normal_density
from .sums import column_sums

__all__ = [
    "add_relu",
    "bias_add",
    "dropout",
    "elu",
    "gelu",
    "hard_sigmoid",
    "hard_silu",
    "leaky_relu",
    "log_softmax",
    "mish",
    "prelu",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "softsign",
    "tanh",
]


def stable_sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))`` of a floating-point array without overflow, by tanh."""
    half: Array = (np.tanh(x / 2) + 1) / 2
    return half


def softplus_of(x: Array) -> Array:
    """Return ``log(1 + exp(x))`` without overflow."""
    result: Array = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return result


def _cut(x: Array) -> Array:
    cut: Array = np.maximum(x, x.dtype.type(0))
    return cut


def _masked(g: Array, _x: Array, y: Array) -> Array:
    masked: Array = g * (y > 0)
    return masked


relu = unary("relu", _cut, _masked, "Return ``max(x, 0)``; the gradient at 0 is 0.", kernel="relu")
_, _relu_gradient = compiled.unary("relu", _cut, _masked)


@differentiable
def add_relu(x: Any, y: Any) -> Tensor:
    """Return ``max(x + y, 0)`` of floating-point tensors of one dtype, whose shapes broadcast."""
    terms = operands(x, y)
    check_dtypes("add_relu", *terms)
    arrays = [term.array for term in terms]
    z = compiled.binary("add_relu", lambda a, b: _cut(a + b), *arrays)

    def vjp(g: Array, need: tuple[bool, ...]) -> list[Any]:
        # Result and sum are positive at the same places. Both terms share this gradient.
        masked = _relu_gradient(g, z, z)
        return [
            sum_to_shape(masked, term.shape) if needed else None
            for term, needed in zip(terms, need, strict=True)
        ]

    return record(z, terms, vjp)


prelu = binary(
    "prelu",
    lambda x, y: np.where(x < 0, x * y, x),
    lambda g, x, y, z: g * ((x > 0) + (x < 0) * y),
    lambda g, x, y, z: g * (x < 0) * x,
    "Return ``x`` if it is not negative, else ``x * y``; the gradient of ``x`` at 0 is 0.",
    kernel=True,
)
softplus = unary(
    "softplus",
    softplus_of,
    lambda g, x, y: g * stable_sigmoid(x),
    "Return ``log(1 + exp(x))``.",
    kernel="softplus",
)


def _silu_slope(x: Array, s: Array) -> Any:
    """Return the derivative at ``x``, whose sigmoid is ``s``."""
    return s * (1 + x * (1 - s))


silu = unary(
    "silu",
    lambda x: x * stable_sigmoid(x),
    lambda g, x, y: g * _silu_slope(x, stable_sigmoid(x)),
    "Return ``x * sigmoid(x)``.",
    kernel="silu",
)
relu6 = unary(
    "relu6",
    lambda x: np.clip(x, 0, 6),
    lambda g, x, y: g * ((x > 0) & (x < 6)),
    "Return ``x`` clipped to [0, 6]; the gradient at both ends is 0.",
    kernel="relu6",
)
softsign = unary(
    "softsign",
    lambda x: x / (1 + np.abs(x)),
    lambda g, x, y: g * np.square(1 - np.abs(y)),
    "Return ``x / (1 + |x|)``.",
    kernel="softsign",
)


def _inside(x: Array) -> Array:
    """Return the mask of the values at which the hard sigmoid rises."""
    inside: Array = (x > -3) & (x < 3)
    return inside


hard_sigmoid = unary(
    "hard_sigmoid",
    lambda x: np.clip(x / 6 + x.dtype.type(0.5), 0, 1),
    lambda g, x, y: g * _inside(x) / 6,
    "Return ``x / 6 + 1 / 2`` clipped to [0, 1].",
    kernel="hard_sigmoid",
)
hard_silu = unary(
    "hard_silu",
    lambda x: x * np.clip(x / 6 + x.dtype.type(0.5), 0, 1),
    lambda g, x, y: g * (np.clip(x / 6 + x.dtype.type(0.5), 0, 1) + x * _inside(x) / 6),
    "Return ``x * hard_sigmoid(x)``.",
    kernel="hard_silu",
)


def _mish_gradient(g: Array, x: Array, _y: Array) -> Array:
    t = np.tanh(softplus_of(x))
    gradient: Array = g * (t + x * (1 - t * t) * stable_sigmoid(x))
    return gradient


mish = unary(
    "mish",
    lambda x: x * np.tanh(softplus_of(x)),
    _mish_gradient,
    "Return ``x * tanh(softplus(x))`` (Misra, 2019).",
    kernel="mish",
)


def _with_alpha(
    name: str,
    features: Any,
    alpha: float,
    forward: Callable[[Array], Array],
    derivative: Callable[[Array, Array, Array], Array],
) -> Tensor:
    """Apply an activation that has a parameter, by its kernel or by NumPy's functions."""
    x = as_tensor(features)
    a = x.array
    if a.dtype.kind not in "fV":
        raise TypeError(f"{name} needs a floating-point tensor, got {a.dtype}; use cast()")
    values, gradient = compiled.unary(name, forward, derivative, alpha)
    y = keep_dtype(values(a), a.dtype)
    return record(y, (x,), lambda g, _need: (keep_dtype(gradient(g, a, y), a.dtype),))


def _elu(name: str, features: Any, alpha: float, scale: float) -> Tensor:
    """Return ``scale * x`` where ``x`` is positive, else ``scale * alpha * (exp(x) - 1)``."""

    def forward(x: Array) -> Array:
        return np.where(x > 0, scale * x, scale * alpha * np.expm1(np.minimum(x, 0)))

    def derivative(g: Array, x: Array, y: Array) -> Array:
        # As in TensorFlow, the slope of selu at 0 is that of positive numbers.
        is_upper = x >= 0 if name == "selu" else x > 0
        slope: Array = g * np.where(is_upper, x.dtype.type(scale), y + x.dtype.type(scale * alpha))
        return slope

    return _with_alpha(name, features, alpha, forward, derivative)


@differentiable
def elu(features: Any, alpha: float = 1.0, name: str | None = None) -> Tensor:
    """Return ``x`` if it is positive, else ``alpha * (exp(x) - 1)``, for each element."""
    return _elu("elu", features, alpha, 1.0)


@differentiable
def selu(features: Any, name: str | None = None) -> Tensor:
    """Return `elu` scaled to keep mean 0 and variance 1 (Klambauer et al., 2017)."""
    return _elu("selu", features, 1.6732632423543772, 1.0507009873554805)


def _slope(x: Array, alpha: float) -> Array:
    slope: Array = np.where(x > 0, x.dtype.type(1), x.dtype.type(alpha))
    return slope


@differentiable
def leaky_relu(features: Any, alpha: float = 0.2, name: str | None = None) -> Tensor:
    """Return ``x`` if it is positive, else ``alpha * x``, for each element."""
    return _with_alpha(
        "leaky_relu",
        features,
        alpha,
        lambda x: x * _slope(x, alpha),
        lambda g, x, _y: g * _slope(x, alpha),
    )


def _gelu_parts(x: Array) -> tuple[Array, Array]:
    """Return the tanh of the approximate gelu, and the derivative of the tanh's argument."""
    scale = x.dtype.type(np.sqrt(2 / np.pi))
    cubic = x.dtype.type(0.044715)
    x = np.clip(x, -10, 10)  # the tanh is 1 or -1 beyond, where halves could not hold the square
    return np.tanh(scale * (x + cubic * x * x * x)), scale * (1 + 3 * cubic * x * x)


def _gelu_gradient(g: Array, x: Array, _y: Array) -> Array:
    t, slope = _gelu_parts(x)
    gradient: Array = g * (1 + t + x * (1 - t * t) * slope) / 2
    return gradient


_gelu_by_tanh = unary(
    "gelu",
    lambda x: x * (1 + _gelu_parts(x)[0]) / 2,
    _gelu_gradient,
    "",
    kernel="gelu_tanh",
)


def _normal_distribution(x: Array) -> Array:
    share: Array = (1 + erf(x * x.dtype.type(np.sqrt(0.5)))) / 2
    return share


_gelu = unary(
    "gelu",
    lambda x: x * _normal_distribution(x),
    lambda g, x, y: g * (_normal_distribution(x) + x * normal_density(x)),
    "",
    kernel="gelu",
)


@differentiable
def gelu(features: Any, approximate: bool = False, name: str | None = None) -> Tensor:
    """Return ``x`` times the probability that a standard normal number is below ``x``.

    The function is that of Hendrycks and Gimpel (2016). With ``approximate``, use the approximation
    with tanh from the same paper.
    """
    return _gelu_by_tanh(features) if approximate else _gelu(features)


def log_softmax_of(logits: Array, axis: int) -> Array:
    """Return ``logits - log(sum(exp(logits)))`` along an axis, without overflow."""
    shifted: Array = logits - logits.max(axis=axis, keepdims=True)
    shifted -= np.log(compiled.reduced("sum", np.exp(shifted), (axis,), True))
    return shifted


def _classes(name: str, logits: Any, axis: int) -> tuple[Tensor, int]:
    """Return logits as a tensor, and the axis of the classes counted from 0."""
    x = as_tensor(logits)
    a = x.array
    if a.dtype.kind not in "fV":
        raise TypeError(f"{name} needs floating-point logits, got dtype {a.dtype}; use cast()")
    (place,) = axes_of(axis, a.ndim, name)
    if not a.shape[place]:
        raise InvalidArgumentError(f"{name}: axis {place} of shape {a.shape} has no classes")
    return x, place


def _softmax(name: str, logits: Any, axis: int, logarithm: bool) -> Tensor:
    x, place = _classes(name, logits, axis)
    a = x.array
    shape = a.shape
    rows = native(a) if place == a.ndim - 1 else None
    if rows is not None:
        y = workspace.empty(shape, a.dtype)
        matrix = (-1 if a.size else 0, shape[-1])
        kernels.softmax(rows[0].reshape(matrix), y.reshape(matrix), logarithm)
    elif logarithm:
        y = log_softmax_of(a, place)
    else:
        y = np.exp(a - a.max(axis=place, keepdims=True))
        y /= compiled.reduced("sum", y, (place,), True)

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        if rows is not None and (upstream := native(g, y)) is not None:
            dx = workspace.empty(shape, a.dtype)
            above, result = (v.reshape(matrix) for v in upstream)
            kernels.softmax_gradient(above, result, dx.reshape(matrix), logarithm)
            return (dx,)
        if logarithm:
            return (g - np.exp(y) * compiled.reduced("sum", g, (place,), True),)
        return (y * (g - compiled.reduced("sum", g * y, (place,), True)),)

    return record(y, (x,), vjp)


@differentiable
def softmax(logits: Any, axis: int = -1, name: str | None = None) -> Tensor:
    """Return ``exp(logits)`` divided by their sum along ``axis``."""
    return _softmax("softmax", logits, axis, False)


@differentiable
def log_softmax(logits: Any, axis: int = -1, name: str | None = None) -> Tensor:
    """Return the logarithm of `softmax`, accurate also if the softmax underflows."""
    return _softmax("log_softmax", logits, axis, True)


@differentiable
def bias_add(
    value: Any, bias: Any, data_format: str | None = None, name: str | None = None
) -> Tensor:
    """Return ``value + bias``; ``bias`` has one number for each index of the last axis.

    With a ``data_format`` such as "NCHW" it is the second axis.
    """
    x, b = operands(value, bias)
    check_dtypes("bias_add", x, b)
    if data_format is not None and data_format.startswith("NC") and x.ndim > 2:
        moved = bias_add(ops.transpose(x, (0, *range(2, x.ndim), 1)), b)
        return ops.transpose(moved, (0, x.ndim - 1, *range(1, x.ndim - 1)))
    if b.ndim != 1 or not x.ndim or x.shape[-1] != b.shape[0]:
        raise InvalidArgumentError(
            f"bias_add: bias of shape {b.shape} does not fit the last axis of shape {x.shape}"
        )
    channels = b.shape[0]

    def vjp(g: Array, need: tuple[bool, ...]) -> tuple[Any, Any]:
        return (
            g if need[0] else None,
            column_sums(g.reshape(-1, channels)) if need[1] and channels else None,
        )

    return record(compiled.binary("add", np.add, x.array, b.array), (x, b), vjp)


@differentiable
def dropout(
    x: Any, rate: float, noise_shape: Any = None, seed: int | None = None, name: str | None = None
) -> Tensor:
    """Set randomly chosen elements of ``x`` to 0 and divide the others by ``1 - rate``.

    The division keeps the expected value of each element.

    Parameters
    ----------
    x
        A floating-point tensor.
    rate : float
        The share of elements that are set to 0, from 0 to 1.
    noise_shape
        Shape of the random mask, by default that of ``x``. Each length is 1, or that of the axis of
        ``x``; None means the latter. Elements along an axis of length 1 are dropped together.
    seed : int, optional
        Seed of the mask; each seed has its own generator.

    Raises
    ------
    TypeError
        ``x`` does not have a floating-point dtype.
    ValueError
        ``rate`` is out of range, or ``noise_shape`` does not fit the shape of ``x``.
    """
    tensor = as_tensor(x)
    a = tensor.array
    rate = float(rate)
    if not 0 <= rate <= 1:
        raise InvalidArgumentError(f"dropout: rate must be from 0 to 1, got {rate}")
    if a.dtype.kind not in "fV":
        raise TypeError(f"dropout needs a floating-point tensor, got {a.dtype}; use cast()")
    if rate == 0:
        return tensor
    shape = a.shape
    if noise_shape is not None:
        shape = tuple(noise_shape)
        if len(shape) != a.ndim or any(
            n not in (None, 1, m) for n, m in zip(shape, a.shape, strict=True)
        ):
            raise InvalidArgumentError(
                f"dropout: noise_shape {shape} does not fit shape {a.shape}; each length must be "
                "None, 1 or that of the axis"
            )
        shape = tuple(m if n is None else n for n, m in zip(shape, a.shape, strict=True))
    drawn = array_module(a).asarray(random.uniform(shape, seed=seed).array)
    kept, zero = drawn >= rate, a.dtype.type(0)
    with np.errstate(over="ignore"):
        factor = a.dtype.type(1 / (1 - rate) if rate < 1 else 1)

    def masked(values: Array) -> Array:
        # A product with 0 would be NaN for infinite numbers and NaN.
        result: Array = np.where(kept, values * factor, zero)
        return result

    return record(masked(a), (tensor,), lambda g, _need: (masked(g),))
