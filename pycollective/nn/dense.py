"""Matrix product, bias and relu as one operation, which saves steps of the tape and of Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array
from ..tensor import ops
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor
from ..workspace import workspace
from .activations import bias_add
from .activations import relu as relu_of
from .window import FLOAT32, compiled, native

# Larger factors do not stay in caches, and BLAS, which divides products into blocks in both directions,
# is faster.
_LARGEST = 1 << 20


def dense(x: Any, w: Any, bias: Any = None, activation: str | None = None) -> Tensor:
    """Return ``x @ w + bias``, with ``activation="relu"`` clipped below at 0.

    The shapes are ``[n, inputs]``, ``[inputs, units]`` and ``[units]``, all of one dtype.
    """
    if activation not in (None, "relu"):
        raise ValueError(f"activation must be None or 'relu', got {activation!r}")
    relu = activation == "relu"
    inputs = (as_tensor(x), as_tensor(w), *(() if bias is None else (as_tensor(bias),)))
    xa, wa = inputs[0].array, inputs[1].array
    ba = None if bias is None else inputs[2].array
    fits = xa.ndim == wa.ndim == 2 and xa.shape[1] == wa.shape[0]
    if not (fits and compiled(xa, wa, ba) and (ba is None or ba.shape == wa.shape[1:])):
        y = ops.matmul(*inputs[:2])
        if bias is not None:
            y = bias_add(y, inputs[2])
        return relu_of(y) if relu else y
    if xa.dtype == FLOAT32 and max(xa.size, wa.size) <= _LARGEST:
        return _own(inputs, relu)
    return _blas(inputs, relu)


def _own(inputs: tuple[Tensor, ...], relu: bool) -> Tensor:
    """Compute everything with this package's kernels, in one call in each direction."""
    x, w, b = _arrays(inputs)
    y = workspace.empty((x.shape[0], w.shape[1]), x.dtype)
    kernels.dense_forward(x, w, b, y, relu)

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        dx = workspace.empty(x.shape, x.dtype) if need[0] else None
        dw = workspace.empty(w.shape, w.dtype) if need[1] else None
        db = np.empty(w.shape[1], w.dtype) if need[2:] == (True,) else None
        kernels.dense_gradient(x, w, native(g), y if relu else None, dx, dw, db)
        return (dx, dw, db)[: len(need)]

    return record(y, inputs, vjp)


def _blas(inputs: tuple[Tensor, ...], relu: bool) -> Tensor:
    """Compute the products with BLAS."""
    x, w, b = _arrays(inputs)
    y = workspace.empty((x.shape[0], w.shape[1]), x.dtype)
    np.matmul(x, w, out=y)
    if relu or b is not None:
        kernels.bias_relu(y, b, relu)

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        db = np.zeros(w.shape[1], w.dtype) if need[2:] == (True,) else None
        dz = native(g)
        if relu:
            dz = workspace.scratch("dense", y.shape, y.dtype)
            kernels.relu_gradient(native(g), y, dz, db)
        elif db is not None:
            kernels.relu_gradient(dz, None, None, db)
        dx = workspace.matmul(dz, w.T) if need[0] else None
        dw = workspace.matmul(x.T, dz) if need[1] else None
        return (dx, dw, db)[: len(need)]

    return record(y, inputs, vjp)


def _arrays(inputs: tuple[Tensor, ...]) -> tuple[Array, Array, Array | None]:
    x, w = native(inputs[0].array), native(inputs[1].array)
    return x, w, native(inputs[2].array) if len(inputs) > 2 else None
