"""Resizing of images."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array, asarray, in_c_order, native
from ..tensor import ops
from ..tensor.compiled import put
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor
from ..workspace import workspace
from .window import make_window


def upsample_nearest(images: Any, size: tuple[int, int]) -> Tensor:
    """Return images in which each pixel is repeated ``size[0]`` times down, ``size[1]`` across.

    Images ``[n, height, width, channels]`` become ``[n, height * size[0], width * size[1], channels]``.
    """
    x = as_tensor(images)
    n, height, width, channels = x.shape
    shape = (n, height * size[0], width * size[1], channels)
    if (found := native(x.array)) is not None and height and width and channels:
        y = workspace.empty(shape, found[0].dtype)
        # The columns of the small image are the last axis but one, so that long runs are copied.
        copies = y.reshape(n, height, size[0], width, size[1], channels).transpose(0, 1, 2, 4, 3, 5)
        put(copies, found[0].reshape(n, height, 1, 1, width, channels))
        # A pixel's gradient is the sum over a window that covers its copies.
        window = make_window(shape[1:], size, size, (1, 1), False)
        ones = np.ones((*size, channels), y.dtype)

        def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
            dx = workspace.empty(found[0].shape, g.dtype)
            kernels.depthwise_forward(in_c_order(g), ones, None, dx, window)
            return (dx,)

        return record(y, (x,), vjp)
    wide = ops.broadcast_to(
        ops.reshape(x, (n, height, 1, width, 1, channels)),
        (n, height, size[0], width, size[1], channels),
    )
    return ops.reshape(wide, shape)


def _weights(source: int, target: int, like: Array) -> Array:
    """Return the weights of the old pixels in each new pixel along an axis, ``[target, source]``."""
    centers = np.clip((np.arange(target) + 0.5) * source / target - 0.5, 0, source - 1)
    distance = np.abs(centers[:, None] - np.arange(source))
    return asarray(np.maximum(1 - distance, 0), like.dtype, like=like)


def resize_bilinear(images: Any, height: int, width: int) -> Tensor:
    """Return images ``[n, height, width, channels]``, interpolated between the centers of pixels.

    Parameters
    ----------
    images
        ``[n, old_height, old_width, channels]``, floating point.
    height, width : int
        The new size.

    Raises
    ------
    TypeError
        The images do not have a floating-point dtype.
    """
    x = as_tensor(images)
    if x.dtype.kind not in "fV":
        raise TypeError(f"resize_bilinear needs floating-point images, got {x.dtype}; use cast()")
    n, old_height, old_width, channels = x.shape
    down, across = _weights(old_height, height, x.array), _weights(old_width, width, x.array)
    if (found := native(x.array)) is not None and channels:
        y = workspace.empty((n, height, width, channels), x.array.dtype)
        kernels.resample(*found, down, across, y)

        def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
            dx = workspace.empty(found[0].shape, g.dtype)
            kernels.resample(in_c_order(g), in_c_order(down.T), in_c_order(across.T), dx)
            return (dx,)

        return record(y, (x,), vjp)
    rows = ops.reshape(x, (n, old_height, old_width * channels))
    if height != old_height:
        rows = ops.matmul(Tensor(down), rows)
    pixels = ops.reshape(rows, (n * height, old_width, channels))
    if width != old_width:
        pixels = ops.matmul(Tensor(across), pixels)
    return ops.reshape(pixels, (n, height, width, channels))
