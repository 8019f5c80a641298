"""Batch normalization on a GPU, the counterpart of the host's kernels, in few launches.

Arrays are ``[rows, channels]``, in C order, of float32 or float64. `sums` adds up columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..array_backend import Array, empty, in_c_order
from ..gpu_kernels import defines, index_type, launch
from .sums import column_sums

#: Result, mean, variance, and the function for the gradients; see `normalized`.
Normalized = tuple[Array, Array, Array, Callable[[Array, bool], tuple[Array | None, Array, Array]]]

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
  return cut == nullptr || away * cut[c] + (cut_shift == nullptr ? 0 : cut_shift[c]) > 0;
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


def _launch(name: str, over: Array, *arguments: Any) -> None:
    arrays = [a for a in arguments if hasattr(a, "flags") and a.ndim]
    text = source(np.dtype(over.dtype), index_type(arrays))
    launch(text, name, over.size, over, (*arguments, np.int64(over.size)))


def _like(array: Array) -> Array:
    return empty(array.shape, array.dtype, array)


def normalized(
    rows: Array,
    factor: Array | None,
    shift: Array | None,
    known: tuple[Array, Array] | None,
    epsilon: float,
    relu: bool,
) -> Normalized:
    """Normalize the columns, and multiply and shift them; with ``relu``, clip the result below at 0.

    ``known`` is mean and variance, which are then constant. If it is None, they are those of the
    columns, and 0 without rows. Return the result, mean and variance, and a function. The function
    takes the gradient of the result. It returns the gradients of ``rows`` (None unless its second
    argument is True), ``factor`` and ``shift``.
    """
    rows = in_c_order(rows)
    real, channels = rows.dtype.type, np.int32(rows.shape[1])
    count = real(max(len(rows), 1))
    if known is None:
        mean = column_sums(rows) / count
        squares = _like(rows)
        _launch("squares", squares, rows, mean, squares, channels)
        sums, divisor = column_sums(squares), count
    else:
        (mean, sums), divisor = known, real(1)
    variance, inverse, slope = (_like(mean) for _ in range(3))
    _launch("slopes", mean, sums, factor, divisor, real(epsilon), variance, inverse, slope)
    y = _like(rows)
    _launch("scale", y, rows, mean, slope, shift, y, np.int32(relu), channels)
    # The kernels compute again where relu passes the result.
    cut = (slope, shift) if relu else (None, None)

    def gradients(g: Array, needs_dx: bool) -> tuple[Array | None, Array, Array]:
        g = in_c_order(g)
        passed = _like(g) if relu else None
        product = _like(g)
        _launch("products", g, g, rows, mean, *cut, passed, product, channels)
        by_shift, products = column_sums(g if passed is None else passed), column_sums(product)
        by_x, constant, by_factor = (_like(mean) for _ in range(3))
        arguments = by_shift, products, inverse, slope, count, by_x, constant, by_factor
        _launch("gradient_factors", mean, *arguments)
        if known is not None:
            by_x[...], constant[...] = 0, 0
        dx = _like(rows) if needs_dx else None
        if dx is not None:
            _launch("combine", dx, g, rows, mean, slope, by_x, constant, *cut, dx, channels)
        return dx, by_factor, by_shift

    return y, mean, variance, gradients
