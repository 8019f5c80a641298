"""Matrix product, bias and relu as one operation, which saves steps of the tape and of Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array, in_c_order, native
from ..errors import InvalidArgumentError
from ..tensor import ops
from ..tensor.compiled import has_product
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor
from ..workspace import workspace
from .activations import bias_add
from .activations import relu as relu_of


def dense(x: Any, w: Any, bias: Any = None, activation: str | None = None) -> Tensor:
    """Return ``x @ w + bias``, with ``activation="relu"`` clipped below at 0.

    The shapes are ``[n, inputs]``, ``[inputs, units]`` and ``[units]``, all of one dtype.
    """
    if activation not in (None, "relu"):
        raise InvalidArgumentError(f"activation must be None or 'relu', got {activation!r}")
    relu = activation == "relu"
    inputs: tuple[Tensor, ...] = as_tensor(x), as_tensor(w)
    xa, wa = inputs[0].array, inputs[1].array
    ba = None
    if bias is not None:
        inputs = (*inputs, as_tensor(bias))
        ba = inputs[2].array
    rows, units = xa.shape, wa.shape
    fits = len(rows) == len(units) == 2 and rows[1] == units[0]
    fits = fits and (ba is None or ba.shape == units[1:])
    arrays = native(xa, wa, ba) if fits else None
    if arrays is None:
        y = ops.matmul(inputs[0], inputs[1])
        if bias is not None:
            y = bias_add(y, inputs[2])
        return relu_of(y) if relu else y
    if has_product(xa, wa):
        return _by_kernels(inputs, *arrays, relu)
    return _by_blas(inputs, *arrays, relu)


def _by_kernels(
    inputs: tuple[Tensor, ...], x: Array, w: Array, b: Array | None, relu: bool
) -> Tensor:
    """Compute everything with this package's kernels, in one call in each direction."""
    y = workspace.empty((x.shape[0], w.shape[1]), x.dtype)
    kernels.dense_forward(x, w, b, y, relu)

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        dx = workspace.empty(x.shape, x.dtype) if need[0] else None
        dw = workspace.empty(w.shape, w.dtype) if need[1] else None
        db = np.empty(w.shape[1], w.dtype) if need[2:] == (True,) else None
        kernels.dense_gradient(x, w, in_c_order(g), y if relu else None, dx, dw, db)
        return (dx, dw, db)[: len(need)]

    return record(y, inputs, vjp)


def _by_blas(inputs: tuple[Tensor, ...], x: Array, w: Array, b: Array | None, relu: bool) -> Tensor:
    """Compute the products with BLAS."""
    y = workspace.empty((x.shape[0], w.shape[1]), x.dtype)
    np.matmul(x, w, out=y)
    if y.size and (relu or b is not None):
        kernels.bias_relu(y, b, relu)

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        db = np.zeros(w.shape[1], w.dtype) if need[2:] == (True,) else None
        dz = in_c_order(g)
        if relu:
            masked = workspace.scratch("dense", y.shape, y.dtype)
            kernels.relu_gradient(dz, y, masked, db)
            dz = masked
        elif db is not None:
            kernels.relu_gradient(dz, None, None, db)
        dx = workspace.matmul(dz, w.T) if need[0] else None
        dw = workspace.matmul(x.T, dz) if need[1] else None
        return (dx, dw, db)[: len(need)]

    return record(y, inputs, vjp)
