"""Sums of gradients, some of which become arrays only when they are needed: multiples, and rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import FLOAT32, Array, native, scatter_add
from ..workspace import workspace
from .compiled import put

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


class Rows:
    """The gradient of a lookup of rows: zero except for some rows, which add up.

    A ``vjp`` may return it instead of an array. If it is the whole gradient of a variable, the tape
    returns an `IndexedSlices`.
    """

    __slots__ = ("indices", "shape", "values")

    def __init__(self, indices: Array, values: Array, shape: tuple[int, ...]) -> None:
        self.indices = indices
        self.values = values
        self.shape = shape

    def computed(self) -> Array:
        """Return the whole gradient as a new array."""
        dtype = self.values.dtype
        # Sum halves in float32: in half precision many small summands would be lost.
        wide = FLOAT32 if dtype.itemsize == 2 else dtype
        whole = workspace.empty(self.shape, wide)
        put(whole, 0)
        values = self.values.astype(wide, copy=False)
        found = native(values)
        if found is not None and whole.size:
            index = np.ascontiguousarray(self.indices, np.intp)
            kernels.add_rows(*found, index, whole.reshape(len(whole), -1))
        else:
            scatter_add(whole, self.indices, values)
        return whole.astype(dtype, copy=False)

    def plus(self, other: Any) -> Any:
        """Return the sum with an array of the whole shape, or with other rows."""
        if other.__class__ is Rows:
            indices = np.concatenate([self.indices, other.indices])
            return Rows(indices, np.concatenate([self.values, other.values]), self.shape)
        return (
            other.plus(self.computed()) if other.__class__ is Multiple else self.computed() + other
        )


def add_to(total: Array, part: Any) -> None:
    """Add an array or a `Multiple` to an array of the same shape and dtype, in place."""
    if part.__class__ is Rows:
        part = part.computed()
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
