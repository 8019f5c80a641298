"""Gradient clipping."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pycollective.array_backend import Array


def clipped(
    gradients: list[Array],
    clipvalue: float | None,
    clipnorm: float | None,
    global_clipnorm: float | None,
) -> list[Array]:
    """Return gradients clipped by the one limit that is not None; see `Optimizer`."""
    if clipvalue is not None:
        return [gradient.clip(-clipvalue, clipvalue) for gradient in gradients]
    if clipnorm is not None:
        return [_times(g, _clip_factor(clipnorm, _sum_of_squares(g))) for g in gradients]
    if global_clipnorm is not None:
        total = sum(_sum_of_squares(gradient) for gradient in gradients)
        factor = _clip_factor(global_clipnorm, total)
        return [_times(gradient, factor) for gradient in gradients]
    return gradients


def divided(gradient: Array, divisor: Any) -> Array:
    """Return a gradient divided by a number, which may exceed the largest float16."""
    quotient: Array
    if gradient.dtype.itemsize >= 4:
        quotient = gradient / gradient.dtype.type(divisor)
    else:  # in float16 a divisor above 65504 would be infinite, and every gradient 0
        quotient = (gradient.astype(np.float32) / np.float32(divisor)).astype(gradient.dtype)
    return quotient


def _sum_of_squares(gradient: Array) -> Any:
    """Return the sum of the squares: a number, or an array on the gradient's device."""
    flat = gradient.reshape(-1)
    host = isinstance(flat, np.ndarray)
    if host and gradient.dtype == np.float32:
        with np.errstate(over="ignore"):
            total = float(np.dot(flat, flat))
        if math.isfinite(total):
            return total
    # Other dtypes, and sums that overflow float32.
    wide = flat.astype(np.float64)
    squares = np.dot(wide, wide)
    return float(squares) if host else squares


def _clip_factor(limit: float, sum_of_squares: Any) -> Any:
    """Return the factor that limits a norm: None for 1, or an array on the norm's device."""
    # A norm that is not finite makes the whole gradient NaN.
    if isinstance(sum_of_squares, float):
        norm = math.sqrt(sum_of_squares)
        if norm <= limit:
            return None
        return np.float64(limit / norm if norm < math.inf else math.nan)
    # On a device the factor is always computed, because a test of the norm would wait for the device.
    size = np.sqrt(sum_of_squares)
    return limit / np.maximum(size, limit) + (size - size)


def _times(gradient: Array, factor: Any) -> Array:
    if factor is None:
        return gradient
    scaled: Array = gradient * factor.astype(gradient.dtype)
    return scaled
