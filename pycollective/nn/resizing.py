"""Resizing of images."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array_backend import Array, asarray
from ..tensor import ops
from ..tensor.tensor import Tensor, as_tensor


def upsample_nearest(images: Any, size: tuple[int, int]) -> Tensor:
    """Return images in which each pixel is repeated ``size[0]`` times down, ``size[1]`` across."""
    x = as_tensor(images)
    n, height, width, channels = x.shape
    wide = ops.broadcast_to(
        ops.reshape(x, (n, height, 1, width, 1, channels)),
        (n, height, size[0], width, size[1], channels),
    )
    return ops.reshape(wide, (n, height * size[0], width * size[1], channels))


def _weights(source: int, target: int, like: Array) -> Tensor:
    """Return the weight of each old pixel in each new pixel, ``[target, source]``."""
    centers = np.clip((np.arange(target) + 0.5) * source / target - 0.5, 0, source - 1)
    distance = np.abs(centers[:, None] - np.arange(source))
    return Tensor(asarray(np.maximum(1 - distance, 0), like.dtype, like=like))


def resize_bilinear(images: Any, height: int, width: int) -> Tensor:
    """Return images of another height and width, interpolated between the centers of pixels.

    Parameters
    ----------
    images
        ``[n, height, width, channels]``, floating point.
    height, width
        The new size.
    """
    x = as_tensor(images)
    n, old_height, old_width, channels = x.shape
    rows = ops.reshape(x, (n, old_height, old_width * channels))
    if height != old_height:
        rows = ops.matmul(_weights(old_height, height, x.array), rows)
    pixels = ops.reshape(rows, (n * height, old_width, channels))
    if width != old_width:
        pixels = ops.matmul(_weights(old_width, width, x.array), pixels)
    return ops.reshape(pixels, (n, height, width, channels))
