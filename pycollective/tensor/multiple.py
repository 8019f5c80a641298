"""Gradients that are computed only when they are needed: a multiple of an array, or some rows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import FLOAT32, Array, empty, native, scatter_add
from ..gpu_kernels import defines, launch
from ..workspace import workspace
from .compiled import put

# The kernel adds arrays of at least this many bytes; NumPy adds smaller ones.
_LARGE = 64 << 10


class Multiple:
    """``factor * scale * array``, of float32 or float64; an array on a GPU is in C order.

    A ``vjp`` may return it instead of an array. Its sum with another gradient then takes one pass over
    memory, or one launch on a GPU, instead of two.

    Parameters
    ----------
    array
        The array.
    factor
        A number. On a GPU also a scalar on the device.
    scale
        Another number to multiply by.
    """

    __slots__ = ("_array", "_factor", "_scale")

    def __init__(self, array: Array, factor: Any, scale: float = 1.0) -> None:
        self._array = array
        self._factor = factor
        self._scale = scale

    def computed(self) -> Array:
        """Return the product as a new array."""
        a = self._array
        if a.__class__ is not np.ndarray:
            product = empty(a.shape, a.dtype, a)
            self._add(None, product)
            return product
        product = workspace.empty(a.shape, a.dtype)
        np.multiply(a, a.dtype.type(self._factor * self._scale), out=product)
        return product

    def plus(self, other: Any) -> Array:
        """Return the sum with an array of the same shape and dtype, or with another multiple."""
        if isinstance(other, Multiple):
            other = other.computed()
        elif isinstance(other, np.generic):  # NumPy's sums of 0-d arrays
            other = np.asarray(other)
        a = self._array
        if not (a.flags.c_contiguous and other.flags.c_contiguous):
            total: Array = self.computed() + other
            return total
        total = (
            workspace.empty(a.shape, a.dtype)
            if a.__class__ is np.ndarray
            else empty(a.shape, a.dtype, a)
        )
        self._add(other, total)
        return total

    def add_to(self, total: Array) -> None:
        """Add the product to an array, in place."""
        if self._array.flags.c_contiguous and total.flags.c_contiguous:
            self._add(total, total)
        else:
            total += self.computed()

    def _add(self, other: Array | None, total: Array) -> None:
        """Write the product to ``total``, plus ``other`` if given; all arrays are in C order."""
        a = self._array
        if other is not None and a.__class__ is np.ndarray:
            kernels.add_multiple(a, self._factor * self._scale, other, total)
            return
        launch(
            _source(np.dtype(a.dtype)), "add_multiple", a.size, a,
            (a, self._factor, a.dtype.type(self._scale), other, total, np.int64(a.size)),
        )  # fmt: skip


_SOURCE = """
extern "C" __global__ void add_multiple(const REAL* x, const REAL* factor, REAL scale,
                                        const REAL* other, REAL* y, long long size) {
  const REAL by = *factor * scale;
  EACH_ELEMENT(i, size) y[i] = x[i] * by + (other == nullptr ? 0 : other[i]);
}
"""


@functools.cache
def _source(dtype: np.dtype[Any]) -> str:
    return defines(dtype, "long long") + _SOURCE


class Rows:
    """The gradient of a lookup of rows: zero except for some rows. Rows with one index add up.

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
    """Add an array, a `Multiple` or `Rows` to an array of the same shape and dtype, in place."""
    if part.__class__ is Rows:
        part = part.computed()
    if part.__class__ is Multiple:
        part.add_to(total)
    elif part.__class__ is np.ndarray and _for_kernel(total, part):
        kernels.add_multiple(part, 1.0, total, total)
    else:
        total += part


def _for_kernel(total: Array, part: Array) -> bool:
    return (
        total.__class__ is np.ndarray
        and total.flags.c_contiguous
        and part.flags.c_contiguous
        and total.nbytes >= _LARGE
        and total.dtype.kind == "f"
        and total.itemsize in (4, 8)
    )
