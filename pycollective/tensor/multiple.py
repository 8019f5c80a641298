"""Sums of gradients, and multiples of an array that are computed only when they are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array
from ..workspace import SMALLEST_RESULT, workspace

# In smaller arrays, the sum takes less time than starting other threads.
_LARGE = 64 << 10


class Multiple:
    """``factor * array``, for a NumPy array of float32 or float64.

    A ``vjp`` may return it instead of an array: its sum with another gradient takes one pass over
    memory instead of two.
    """

    __slots__ = ("_array", "_factor")

    def __init__(self, array: Array, factor: float) -> None:
        self._array = array
        self._factor = factor

    def computed(self) -> Array:
        """Return the product as a new array."""
        a = self._array
        product = workspace.empty(a.shape, a.dtype)
        np.multiply(a, a.dtype.type(self._factor), out=product)
        return product

    def plus(self, other: Any) -> Array:
        """Return the sum with an array of the same shape and dtype, or with another multiple."""
        if isinstance(other, Multiple):
            other = other.computed()
        a = self._array
        if not (a.flags.c_contiguous and other.flags.c_contiguous):
            total: Array = self.computed() + other
            return total
        total = workspace.empty(a.shape, a.dtype)
        kernels.add_multiple(a, self._factor, other, total)
        return total


def add_to(total: Array, part: Any) -> None:
    """Add an array or a `Multiple` to an array of the same shape and dtype, in place."""
    if part.__class__ is Multiple:
        part, factor = part._array, part._factor
    else:
        factor = 1.0
        if part.__class__ is not np.ndarray or not _for_kernel(total):
            total += part
            return
    if total.flags.c_contiguous and part.flags.c_contiguous:
        kernels.add_multiple(part, factor, total, total)
    else:
        total += part * total.dtype.type(factor)


def _for_kernel(total: Array) -> bool:
    return (
        total.__class__ is np.ndarray
        and total.nbytes >= _LARGE
        and total.dtype.kind == "f"
        and total.itemsize in (4, 8)
    )


def compute(function: Callable[..., Array], a: Array, b: Array) -> Array:
    """Return ``function(a, b)``; a large result of equal dtypes is in memory used before."""
    if (
        a.__class__ is np.ndarray is b.__class__
        and a.nbytes >= SMALLEST_RESULT
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.dtype.kind == "f"
        and a.flags.c_contiguous
    ):
        result = workspace.empty(a.shape, a.dtype)
        if function is np.add and a.dtype.itemsize in (4, 8) and b.flags.c_contiguous:
            # The kernel uses several threads, and releases the GIL.
            kernels.add_multiple(a, 1.0, b, result)
            return result
        return function(a, b, out=result)
    return function(a, b)
