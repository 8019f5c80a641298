"""Sums of columns, for few columns and many rows, as in gradients of biases and of normalization."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..array_backend import Array, empty, on_host
from ..tensor.compiled import reduced
from .launching import defines, launch

#: Number of rows that a thread adds in one pass.
_RUN = 64
_KINDS = frozenset((np.dtype(np.float32), np.dtype(np.float64)))

# The number of threads (lanes) is a multiple of the columns, so that each thread stays in its column.
_SOURCE = """
extern "C" __global__ void column_sums(const REAL* x, REAL* y, long long elements, long long size) {
  EACH_ELEMENT(lane, size) {
    REAL total = 0;
    for (INDEX i = lane; i < elements; i += size) total += x[i];
    y[lane] = total;
  }
}
"""


@functools.cache
def source(dtype: np.dtype[Any]) -> str:
    """Return the kernel's CUDA C++ source for a type of numbers."""
    return defines(dtype, "long long") + _SOURCE


def column_sums(rows: Array) -> Array:
    """Return the sums of the columns of ``[rows, columns]``.

    On a GPU each thread adds a few rows in each of several passes. CuPy's sum along the first axis would
    use a single block for few columns. Halves are added in float32.
    """
    if on_host(rows) or rows.dtype.kind != "f" or not rows.size:
        floats = rows.dtype.kind == "f"
        total: Array = reduced("sum", rows, (0,)) if floats else rows.sum(axis=0)
        return total
    if rows.dtype not in _KINDS:
        halves: Array = column_sums(rows.astype(np.float32)).astype(rows.dtype)
        return halves
    count, columns = rows.shape
    left = rows if rows.flags.c_contiguous else rows.copy(order="C")
    text = source(np.dtype(rows.dtype))
    while True:
        groups = -(-count // _RUN)
        sums = empty((groups, columns), rows.dtype, rows)
        launch(
            text, "column_sums", sums.size, sums,
            (left, sums, np.int64(left.size), np.int64(sums.size)),
        )  # fmt: skip
        if groups == 1:
            found: Array = sums.reshape(columns)
            return found
        left, count = sums, groups
