"""Convolution and pooling by their definition, in float64, one output at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def places(size: int, kernel: int, stride: int, dilation: int, padding: str) -> list[list[int]]:
    """Return the taps' positions of each output along one axis; outside [0, size) is padding."""
    extent = (kernel - 1) * dilation + 1
    if padding == "SAME":
        count = math.ceil(size / stride)
        before = max((count - 1) * stride + extent - size, 0) // 2
    else:
        count, before = (size - extent) // stride + 1, 0
    return [[o * stride - before + k * dilation for k in range(kernel)] for o in range(count)]


def conv2d(x: Any, w: Any, b: Any, strides: Any, padding: str, dilations: Any) -> Any:
    """Sum over the taps, by einsum per output pixel."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    rows = places(x.shape[1], w.shape[0], strides[0], dilations[0], padding)
    cols = places(x.shape[2], w.shape[1], strides[1], dilations[1], padding)
    y = np.zeros((x.shape[0], len(rows), len(cols), w.shape[3]))
    for oy, ys in enumerate(rows):
        for ox, xs in enumerate(cols):
            for i, yy in enumerate(ys):
                for j, xx in enumerate(xs):
                    if 0 <= yy < x.shape[1] and 0 <= xx < x.shape[2]:
                        y[:, oy, ox] += np.einsum("nc,cf->nf", x[:, yy, xx], w[i, j])
    return y if b is None else y + b


def max_pool(x: Any, size: Any, strides: Any, padding: str) -> tuple[Any, Any]:
    """Return the maxima, and the flat index into x of the first tap that holds each."""
    rows = places(x.shape[1], size[0], strides[0], 1, padding)
    cols = places(x.shape[2], size[1], strides[1], 1, padding)
    y = np.zeros((x.shape[0], len(rows), len(cols), x.shape[3]), x.dtype)
    where = np.zeros(y.shape, np.int64)
    for n, oy, ox, c in np.ndindex(*y.shape):
        best: Any = None
        for yy in rows[oy]:
            for xx in cols[ox]:
                if not (0 <= yy < x.shape[1] and 0 <= xx < x.shape[2]):
                    continue
                value = x[n, yy, xx, c]
                better = best is None or value > best or (np.isnan(value) and not np.isnan(best))
                if better:
                    best = value
                    where[n, oy, ox, c] = np.ravel_multi_index((n, yy, xx, c), x.shape)
        y[n, oy, ox, c] = best
    return y, where
