"""Softmax and cross-entropy of integer labels on a GPU, in one launch."""

from __future__ import annotations

import functools

import numpy as np

from ..array_backend import REAL_DTYPES, Array, empty, on_host
from ..gpu_kernels import defines, launch

_LABELS = {np.dtype(np.int32): "int", np.dtype(np.int64): "long long"}
_MOST_CLASSES = 256
"""A thread reads a whole row; with more classes, the reads of adjacent threads are too far apart."""

_SOURCE = """
extern "C" __global__ void cross_entropy(const REAL* logits, const LABEL* labels, REAL* losses,
                                         REAL* slopes, int classes, long long size) {
  EACH_ELEMENT(row, size) {
    const REAL* x = logits + row * classes;
    const LABEL label = labels[row];
    REAL largest = x[0];
    for (int c = 1; c < classes; ++c) largest = x[c] > largest ? x[c] : largest;
    REAL sum = 0;
    for (int c = 0; c < classes; ++c) sum += exp(x[c] - largest);
    const bool wrong = label < 0 || label >= classes;
    const REAL nan = sqrt(static_cast<REAL>(-1));
    losses[row] = wrong ? nan : log(sum) - (x[wrong ? 0 : label] - largest);
    for (int c = 0; c < classes; ++c) {
      const REAL share = exp(x[c] - largest) / sum;
      slopes[row * classes + c] = wrong ? nan : share - (c == label ? 1 : 0);
    }
  }
}
"""


@functools.cache
def source(dtype: np.dtype[np.floating], label: np.dtype[np.integer]) -> str:
    """Return the kernel's CUDA C++ source for a type of numbers and a type of labels."""
    return defines(dtype, "long long") + f"#define LABEL {_LABELS[label]}\n" + _SOURCE


def fits(logits: Array) -> bool:
    """Return True if the kernel supports these logits, ``[rows, classes]``."""
    return (
        not on_host(logits)
        and logits.dtype in REAL_DTYPES
        and 0 < logits.shape[1] <= _MOST_CLASSES
        and logits.flags.c_contiguous
    )


def forward(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the loss of each row of logits, ``[rows, classes]``, and its derivative by the logits.

    Both are NaN for a label that is not in ``[0, classes)``.
    """
    if labels.dtype not in _LABELS:
        labels = labels.astype(np.int64)
    losses = empty(logits.shape[:1], logits.dtype, logits)
    slopes = empty(logits.shape, logits.dtype, logits)
    launch(
        source(np.dtype(logits.dtype), np.dtype(labels.dtype)), "cross_entropy", len(logits), logits,
        (logits, labels, losses, slopes, np.int32(logits.shape[1]), np.int64(len(logits))),
    )  # fmt: skip
    return losses, slopes
