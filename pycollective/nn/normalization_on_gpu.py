"""Batch normalization on a GPU, the counterpart of the host's kernels, in few launches.

Arrays are ``[rows, channels]``, in C order, of float32 or float64. `sums` adds up columns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..array_backend import Array, empty, on_host
from ..launching import defines, index_type, launch
from .sums import column_sums

_KINDS = frozenset((np.dtype(np.float32), np.dtype(np.float64)))

_SOURCE = """
extern "C" __global__ void squares(const REAL* x, const REAL* mean, REAL* y, int channels,
                                   long long size) {
  const INDEX count = static_cast<INDEX>(size);
  EACH_ELEMENT(i, count) {
    const REAL away = x[i] - mean[i % channels];
    y[i] = away * away;
  }
}

extern "C" __global__ void scale(const REAL* x, const REAL* mean, const REAL* factor,
                                 const REAL* shift, REAL* y, int relu, int channels,
                                 long long size) {
  const INDEX count = static_cast<INDEX>(size);
  EACH_ELEMENT(i, count) {
    const INDEX c = i % channels;
    const REAL value = (x[i] - mean[c]) * factor[c] + (shift == nullptr ? 0 : shift[c]);
    y[i] = relu && value <= 0 ? 0 : value;  // NaN stays
  }
}

// True where relu passes the value on; always true without relu.
__device__ bool passes(const REAL* cut, const REAL* cut_shift, REAL away, INDEX c) {
  return cut == nullptr || away * cut[c] + cut_shift[c] > 0;
}

extern "C" __global__ void products(const REAL* g, const REAL* x, const REAL* mean, const REAL* cut,
                                    const REAL* cut_shift, REAL* passed, REAL* product,
                                    int channels, long long size) {
  const INDEX count = static_cast<INDEX>(size);
  EACH_ELEMENT(i, count) {
    const INDEX c = i % channels;
    const REAL away = x[i] - mean[c];
    const REAL slope = passes(cut, cut_shift, away, c) ? g[i] : 0;
    if (passed != nullptr) passed[i] = slope;
    product[i] = slope * away;
  }
}

extern "C" __global__ void combine(const REAL* g, const REAL* x, const REAL* mean, const REAL* by_g,
                                   const REAL* factor, const REAL* shift, const REAL* cut,
                                   const REAL* cut_shift, REAL* y, int channels, long long size) {
  const INDEX count = static_cast<INDEX>(size);
  EACH_ELEMENT(i, count) {
    const INDEX c = i % channels;
    const REAL away = x[i] - mean[c];
    const REAL slope = passes(cut, cut_shift, away, c) ? g[i] * by_g[c] : 0;
    y[i] = away * factor[c] + slope + shift[c];
  }
}

extern "C" __global__ void slopes(const REAL* sums, const REAL* factor, REAL rows, REAL epsilon,
                                  REAL* variance, REAL* inverse, REAL* slope, long long size) {
  const INDEX count = static_cast<INDEX>(size);
  EACH_ELEMENT(c, count) {
    variance[c] = sums[c] / rows;
    inverse[c] = 1 / sqrt(variance[c] + epsilon);
    slope[c] = factor == nullptr ? inverse[c] : inverse[c] * factor[c];
  }
}

extern "C" __global__ void gradient_factors(const REAL* sums, const REAL* products,
                                            const REAL* inverse, const REAL* slope, REAL rows,
                                            REAL* by_x, REAL* constant, REAL* by_factor,
                                            long long size) {
  const INDEX count = static_cast<INDEX>(size);
  EACH_ELEMENT(c, count) {
    by_x[c] = -slope[c] * products[c] * (inverse[c] * inverse[c] / rows);
    constant[c] = -slope[c] * sums[c] / rows;
    by_factor[c] = products[c] * inverse[c];
  }
}
"""


@functools.cache
def source(dtype: np.dtype[Any], index: str) -> str:
    """Return the kernels' CUDA C++ source for a type of numbers and a type of indices."""
    return defines(dtype, index) + _SOURCE


def fits(*arrays: Array | None) -> bool:
    """Return True if the kernels support these arrays."""
    given = [array for array in arrays if array is not None]
    return all(
        not on_host(a) and a.dtype in _KINDS and a.dtype == given[0].dtype and a.flags.c_contiguous
        for a in given
    )


def _launch(name: str, over: Array, *arguments: Any) -> None:
    arrays = [a for a in arguments if hasattr(a, "flags") and a.ndim]
    text = source(np.dtype(over.dtype), index_type(arrays))
    launch(text, name, over.size, over, (*arguments, np.int64(over.size)))


def _channels(rows: Array) -> Any:
    return np.int32(rows.shape[1])


def _like(array: Array) -> Array:
    return empty(array.shape, array.dtype, array)


def moments(rows: Array, factor: Array | None, epsilon: float) -> tuple[Array, Array, Array, Array]:
    """Return mean, variance, ``1 / sqrt(variance + epsilon)``, and the last times ``factor``.

    All are computed by column. Without rows, mean and variance are 0.
    """
    real = rows.dtype.type
    count = real(max(len(rows), 1))
    mean = column_sums(rows) / count
    squares = _like(rows)
    _launch("squares", squares, rows, mean, squares, _channels(rows))
    sums = column_sums(squares)
    variance, inverse, slope = (_like(mean) for _ in range(3))
    _launch("slopes", mean, sums, factor, count, real(epsilon), variance, inverse, slope)
    return mean, variance, inverse, slope


def scale(rows: Array, mean: Array, factor: Array, shift: Array | None, relu: bool) -> Array:
    """Return ``(rows - mean) * factor + shift``, with ``relu`` clipped below at 0."""
    y = _like(rows)
    _launch("scale", y, rows, mean, factor, shift, y, np.int32(relu), _channels(rows))
    return y


def gradient_sums(g: Array, rows: Array, mean: Array, cut: Sequence[Array]) -> tuple[Array, Array]:
    """Return the sums of the columns of ``g`` and of ``g * (rows - mean)``.

    With ``cut``, a factor and a shift, the sums include ``g`` only where
    ``(rows - mean) * factor + shift`` is positive.
    """
    first, second = cut or (None, None)
    passed = _like(g) if cut else None
    product = _like(g)
    _launch("products", g, g, rows, mean, first, second, passed, product, _channels(rows))
    return column_sums(g if passed is None else passed), column_sums(product)


def gradient_factors(
    sums: Array, products: Array, inverse: Array, slope: Array, count: Any
) -> tuple[Array, Array, Array]:
    """Return the factor of ``rows - mean`` in the gradient, its constant, and ``factor``'s gradient."""
    by_x, constant, by_factor = (_like(sums) for _ in range(3))
    arguments = sums, products, inverse, slope, count, by_x, constant, by_factor
    _launch("gradient_factors", sums, *arguments)
    return by_x, constant, by_factor


def combine(
    g: Array,
    rows: Array,
    mean: Array,
    by_g: Array,
    factor: Array,
    shift: Array,
    cut: Sequence[Array],
) -> Array:
    """Return ``(rows - mean) * factor + shift + g * by_g``, with ``g`` masked by ``cut``."""
    y = _like(rows)
    first, second = cut or (None, None)
    arguments = g, rows, mean, by_g, factor, shift, first, second, y
    _launch("combine", y, *arguments, _channels(rows))
    return y
