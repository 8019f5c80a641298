"""Activation functions, biases and dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array_backend import Array, array_module
from ..tensor import random
from ..tensor.ops import sigmoid, tanh
from ..tensor.ops._define import check_dtypes, differentiable, operands, unary
from ..tensor.ops.reductions import axes_of
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor

__all__ = [
    "bias_add",
    "dropout",
    "elu",
    "gelu",
    "leaky_relu",
    "log_softmax",
    "relu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "tanh",
]


def stable_sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))`` without overflow: by tanh, of any floating-point array."""
    half: Array = (np.tanh(x / 2) + 1) / 2
    return half


def softplus_of(x: Array) -> Array:
    """Return ``log(1 + exp(x))`` without overflow."""
    result: Array = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return result


relu = unary(
    "relu",
    lambda x: np.maximum(x, x.dtype.type(0)),
    lambda g, x, y: g * (y > 0),
    "Return ``max(x, 0)``; the gradient at 0 is 0.",
)
softplus = unary(
    "softplus",
    softplus_of,
    lambda g, x, y: g * stable_sigmoid(x),
    "Return ``log(1 + exp(x))``.",
)
silu = unary(
    "silu",
    lambda x: x * stable_sigmoid(x),
    lambda g, x, y: g * (stable_sigmoid(x) * (1 - y) + y),
    "Return ``x * sigmoid(x)``.",
)
elu = unary(
    "elu",
    lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    lambda g, x, y: g * np.where(x > 0, np.ones_like(y), y + 1),
    "Return ``x`` where it is positive, else ``exp(x) - 1``.",
)


@differentiable
def leaky_relu(features: Any, alpha: float = 0.2) -> Tensor:
    """Return ``x`` where it is positive, else ``alpha * x``."""
    x = as_tensor(features)
    a = x.array
    slope = np.where(a > 0, a.dtype.type(1), a.dtype.type(alpha))
    return record(a * slope, (x,), lambda g, _need: (g * slope,))


def _gelu_parts(x: Array) -> tuple[Array, Array]:
    """Return the tanh in the function below, and the derivative of what it is taken of."""
    scale = x.dtype.type(np.sqrt(2 / np.pi))
    cubic = x.dtype.type(0.044715)
    return np.tanh(scale * (x + cubic * x * x * x)), scale * (1 + 3 * cubic * x * x)


def _gelu_gradient(g: Array, x: Array, _y: Array) -> Array:
    t, slope = _gelu_parts(x)
    gradient: Array = g * (1 + t + x * (1 - t * t) * slope) / 2
    return gradient


_gelu = unary("gelu", lambda x: x * (1 + _gelu_parts(x)[0]) / 2, _gelu_gradient, "")


def gelu(features: Any, approximate: bool = True) -> Tensor:
    """Return the Gaussian error linear unit by its tanh form (Hendrycks and Gimpel, 2016).

    Raises
    ------
    NotImplementedError
        For ``approximate=False``, which needs an error function that NumPy does not have.
    """
    if not approximate:
        raise NotImplementedError("gelu: only approximate=True is implemented")
    return _gelu(features)


def log_softmax_of(logits: Array, axis: int) -> Array:
    """Return ``logits - log(sum(exp(logits)))`` along an axis, without overflow."""
    shifted: Array = logits - logits.max(axis=axis, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=axis, keepdims=True, dtype=shifted.dtype))
    return shifted


def _classes(name: str, logits: Any, axis: int) -> tuple[Tensor, int]:
    """Return logits as a tensor, and the axis of the classes counted from 0."""
    x = as_tensor(logits)
    if x.dtype.kind not in "fV":
        raise TypeError(f"{name} needs floating-point logits, got dtype {x.dtype}; use cast()")
    (place,) = axes_of(axis, x.ndim, name)
    if not x.shape[place]:
        raise ValueError(f"{name}: axis {place} of shape {x.shape} has no classes")
    return x, place


@differentiable
def softmax(logits: Any, axis: int = -1) -> Tensor:
    """Return ``exp(logits)`` divided by their sum along ``axis``."""
    x, place = _classes("softmax", logits, axis)
    e = np.exp(x.array - x.array.max(axis=place, keepdims=True))
    e /= e.sum(axis=place, keepdims=True)

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        return (e * (g - (g * e).sum(axis=place, keepdims=True)),)

    return record(e, (x,), vjp)


@differentiable
def log_softmax(logits: Any, axis: int = -1) -> Tensor:
    """Return the logarithms of `softmax`, also where that is too small to be a number."""
    x, place = _classes("log_softmax", logits, axis)
    result = log_softmax_of(x.array, place)

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        return (g - np.exp(result) * g.sum(axis=place, keepdims=True),)

    return record(result, (x,), vjp)


@differentiable
def bias_add(value: Any, bias: Any) -> Tensor:
    """Return ``value + bias``, where ``bias`` has one number for each place of the last axis."""
    x, b = operands(value, bias)
    check_dtypes("bias_add", x, b)
    if b.ndim != 1 or not x.ndim or x.shape[-1] != b.shape[0]:
        raise ValueError(
            f"bias_add: bias of shape {b.shape} does not fit the last axis of shape {x.shape}"
        )
    channels = b.shape[0]

    def vjp(g: Array, need: tuple[bool, ...]) -> tuple[Any, Any]:
        return (
            g if need[0] else None,
            g.reshape(-1, channels).sum(axis=0) if need[1] and channels else None,
        )

    return record(x.array + b.array, (x, b), vjp)


@differentiable
def dropout(x: Any, rate: float, seed: int | None = None) -> Tensor:
    """Return ``x`` with a share ``rate`` of its elements, chosen by chance, set to 0.

    The others are divided by ``1 - rate``, so that sums stay the same on average.

    Raises
    ------
    ValueError
        If ``rate`` is not in 0 to 1, without 1.
    """
    tensor = as_tensor(x)
    a = tensor.array
    rate = float(rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate must be at least 0 and below 1, got {rate}")
    if a.dtype.kind not in "fV":
        raise TypeError(f"dropout needs a floating-point tensor, got {a.dtype}; use cast()")
    if rate == 0:
        return tensor
    drawn = array_module(a).asarray(random.uniform(a.shape, seed=seed).array)
    mask = (drawn >= rate) * a.dtype.type(1 / (1 - rate))
    return record(a * mask, (tensor,), lambda g, _need: (g * mask,))
