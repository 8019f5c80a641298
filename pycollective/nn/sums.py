"""Sums of columns, for few columns and many rows, as in gradients of biases and of normalization."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..array_backend import REAL_DTYPES, Array, empty, on_host
from ..gpu_kernels import defines, launch
from ..tensor.compiled import reduced

#: The number of threads that keeps a GPU busy, and the least number of rows for each, in the first pass.
_LANES = 1 << 17
_LEAST_ROWS = 8
#: The most rows that one thread adds at the end.
_LAST_ROWS = 64

# The number of threads (lanes) is a multiple of the columns, so that each thread stays in its column.
_SOURCE = """
extern "C" __global__ void column_sums(const REAL* x, REAL* y, long long elements, long long size) {
  EACH_ELEMENT(lane, size) {
    // Four sums, so that a thread waits for several reads at a time.
    REAL a = 0, b = 0, c = 0, d = 0;
    INDEX i = lane;
    for (; i + 3 * size < elements; i += 4 * size) {
      a += x[i];
      b += x[i + size];
      c += x[i + 2 * size];
      d += x[i + 3 * size];
    }
    for (; i < elements; i += size) a += x[i];
    y[lane] = (a + b) + (c + d);
  }
}
"""


@functools.cache
def source(dtype: np.dtype[Any]) -> str:
    """Return the kernel's CUDA C++ source for a type of numbers."""
    return defines(dtype, "long long") + _SOURCE


def column_sums(rows: Array) -> Array:
    """Return the sums of the columns of ``[rows, columns]``.

    On a GPU each thread adds some rows in each of several passes. CuPy's sum along the first axis would
    use a single block for few columns. Halves are added in float32.
    """
    if on_host(rows) or rows.dtype.kind != "f" or not rows.size:
        floats = rows.dtype.kind in "fV"
        total: Array = reduced("sum", rows, (0,)) if floats else rows.sum(axis=0)
        return total
    if rows.dtype not in REAL_DTYPES:
        halves: Array = column_sums(rows.astype(np.float32)).astype(rows.dtype)
        return halves
    count, columns = rows.shape
    left = rows if rows.flags.c_contiguous else rows.copy(order="C")
    text = source(np.dtype(rows.dtype))
    run = count if count <= _LAST_ROWS else max(_LEAST_ROWS, -(-left.size // _LANES))
    while True:
        groups = -(-count // run)
        sums = empty((groups, columns), rows.dtype, rows)
        launch(
            text, "column_sums", sums.size, sums,
            (left, sums, np.int64(left.size), np.int64(sums.size)),
        )  # fmt: skip
        if groups == 1:
            found: Array = sums.reshape(columns)
            return found
        left, count = sums, groups
        run = count if count <= _LAST_ROWS else math.isqrt(count - 1) + 1
