"""The mean of each window of images."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array_backend import Array, array_module, asarray
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor
from .taps import checked_window, padded_zeros, taps, unpadded
from .window import Pair, Window, padded, pair

__all__ = ["avg_pool2d"]


def _counts(shape: tuple[int, ...], window: Window, like: Array) -> Array:
    """Return how many pixels of the image each window has in it, ``[out_h, out_w, 1]``."""
    ones = padded_zeros((1, *shape[1:3], 1), window, np.zeros(0))
    unpadded(ones, shape, window)[...] = 1
    counts = sum(tap for _, _, tap in taps(ones, window))
    return asarray(counts, like.dtype, like=like)


def avg_pool2d(
    x: Any, pool_size: Pair = 2, strides: Pair | None = None, padding: str = "VALID"
) -> Tensor:
    """Take the mean of each window, as ``tf.nn.avg_pool2d`` does.

    Parameters
    ----------
    x
        Images ``[n, height, width, channels]``; ``n`` may be 0.
    pool_size
        Height and width of the window: an int, ``(height, width)`` or ``(1, height, width, 1)``.
    strides
        Steps of the window, in the same forms; by default ``pool_size``.
    padding
        ``"VALID"``: windows stay inside the image. ``"SAME"``: ``ceil(size / stride)`` rows and
        columns; what lies outside of the image does not count.

    Returns
    -------
    Tensor
        ``[n, out_h, out_w, channels]``.

    Raises
    ------
    ValueError
        If ``x`` is not a batch of images, a size is not positive, or the window is larger than
        the image.
    TypeError
        If ``x`` is not of a floating-point dtype.
    """
    images = as_tensor(x)
    a = images.array
    if a.dtype.kind not in "fV":
        raise TypeError(f"avg_pool2d needs floating-point images, got {a.dtype}; use cast()")
    size = pair(pool_size, "pool_size")
    window = checked_window("avg_pool2d", a, size, size if strides is None else strides, padding)
    shape = a.shape
    counts = _counts(shape, window, a)
    y = array_module(a).zeros((shape[0], window.out_h, window.out_w, shape[3]), a.dtype)
    for _, _, tap in taps(padded(a, window, 0), window):
        y += tap
    y /= counts

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        share = g / counts
        total = padded_zeros(shape, window, a)
        for _, _, tap in taps(total, window):
            tap += share
        return (unpadded(total, shape, window),)

    return record(y, (images,), vjp)
