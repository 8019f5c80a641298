"""Softmax and cross-entropy of integer labels in one pass over the logits."""

from __future__ import annotations

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array, native
from ..errors import InvalidArgumentError
from ..workspace import workspace


def forward(logits: Array, labels: Array, gradient: bool) -> tuple[Array, Array | None]:
    """Return the loss of each row of logits ``[rows, classes]``, and with ``gradient`` its derivative.

    Logits are NumPy arrays of float32 or float64, labels are integers in ``[0, classes)``. The
    derivative is ``softmax(logits) - onehot(labels)``; None without ``gradient``.
    """
    found = native(logits)
    if found is None:
        raise InvalidArgumentError(
            f"logits must be NumPy float32 or float64, got dtype {logits.dtype}"
        )
    losses = np.empty(logits.shape[:1], logits.dtype)
    slope = workspace.empty(logits.shape, logits.dtype) if gradient else None
    rows = np.ascontiguousarray(labels, np.int64)
    try:
        kernels.softmax_cross_entropy(*found, rows, losses, slope)
    except ValueError as error:  # a label is out of range
        raise InvalidArgumentError(str(error)) from None
    return losses, slope
