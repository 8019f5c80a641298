"""The error function, which NumPy does not have."""

from __future__ import annotations

import functools
import math

import numpy as np

from ..array_backend import Array, asarray

# Known values per unit of x; beyond the last known value, at _END, erf is 1 in float64.
_STEPS = 64
_END = 6
# Degree of the Taylor polynomial about the nearest known value, which is at most 1/128 away: the
# remainder is below 1e-17.
_DEGREE = 7


@functools.lru_cache(maxsize=1)
def _table() -> Array:
    """Return the Taylor coefficients of erf about each known value, one row for each power."""
    places = np.arange(_END * _STEPS + 1) / _STEPS
    rows = [np.array([math.erf(x) for x in places])]
    # The derivatives of f(x) = exp(-x^2) are (-1)^k H_k(x) f(x), with Hermite's polynomials H_k.
    density = 2 / math.sqrt(math.pi) * np.exp(-(places**2))
    before, hermite = np.zeros_like(places), np.ones_like(places)
    for power in range(1, _DEGREE + 1):
        rows.append((-1) ** (power - 1) * hermite * density / math.factorial(power))
        before, hermite = hermite, 2 * places * hermite - 2 * (power - 1) * before
    return np.stack(rows)


def erf(x: Array) -> Array:
    """Return ``2 / sqrt(pi)`` times the integral of ``exp(-t**2)`` from 0 to each number.

    The error is below 1e-15. ``x`` has a floating-point dtype, which the result has too.
    """
    wide = x.astype(np.float64)
    size = np.minimum(np.abs(wide), _END)
    table = asarray(_table(), like=x)
    # NaN gets any index; the distance, which is NaN, makes the result NaN.
    nearest = np.nan_to_num(np.rint(size * _STEPS)).astype(np.int64)
    distance = size - nearest / _STEPS
    result = np.take(table[_DEGREE], nearest)
    for power in range(_DEGREE - 1, -1, -1):
        result = result * distance + np.take(table[power], nearest)
    signed: Array = np.copysign(result, wide).astype(x.dtype)
    return signed


def normal_density(x: Array) -> Array:
    """Return ``exp(-x**2 / 2) / sqrt(2 pi)`` in the dtype of ``x``."""
    density: Array = np.exp(-x * x / 2) * x.dtype.type(1 / math.sqrt(2 * math.pi))
    return density
