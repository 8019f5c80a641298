"""A product with a matrix, bias and relu as one operation: fewer steps for the tape and for Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._core import nn as kernels
from ..array_backend import Array
from ..tensor import ops
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor
from .activations import bias_add
from .activations import relu as relu_of
from .window import compiled, native
from .workspace import workspace

__all__ = ["dense"]


def dense(x: Any, w: Any, bias: Any = None, activation: str | None = None) -> Tensor:
    """Return ``x @ w + bias``, cut off at 0 with ``activation="relu"``.

    Parameters
    ----------
    x
        ``[n, inputs]``.
    w
        ``[inputs, units]``.
    bias
        ``[units]``.
    activation
        None or ``"relu"``.

    Raises
    ------
    ValueError, TypeError
        If shapes do not fit, or dtypes differ.
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
    result = workspace.empty((xa.shape[0], wa.shape[1]), xa.dtype)
    np.matmul(xa, wa, out=result)
    if relu or ba is not None:
        kernels.bias_relu(result, None if ba is None else native(ba), relu)

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        db = np.zeros(wa.shape[1], wa.dtype) if need[2:] == (True,) else None
        dz = native(g)
        if relu:
            dz = workspace.scratch("dense", result.shape, result.dtype)
            kernels.relu_gradient(native(g), result, dz, db)
        elif db is not None:
            kernels.relu_gradient(dz, None, None, db)
        dx = np.matmul(dz, wa.T, out=workspace.empty(xa.shape, xa.dtype)) if need[0] else None
        dw = np.matmul(xa.T, dz) if need[1] else None
        return (dx, dw, db)[: len(need)]

    return record(result, inputs, vjp)
