"""Resizing of images without antialiasing, with the results of TensorFlow and Keras.

A new pixel is a weighted mean of a fixed number of old pixels around its center. So a much smaller
image ignores some old pixels. Only "area" uses all old pixels that the new pixel covers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from pycollective.array_backend import Array


def _bilinear(x: Array) -> Array:
    weight: Array = np.maximum(1 - abs(x), 0)
    return weight


def _bicubic(x: Array) -> Array:
    """Return the cubic of Keys (1981) with a = -1/2."""
    x = abs(x)
    inner, outer = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return np.where(x < 1, inner, np.where(x < 2, outer, 0))


def _lanczos(radius: int) -> Callable[[Array], Array]:
    def kernel(x: Array) -> Array:
        return np.where(abs(x) < radius, np.sinc(x) * np.sinc(x / radius), 0)

    return kernel


#: The radius and function of each kernel, by name; "nearest" and "area" have no kernel.
_KERNELS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "bicubic": (2, _bicubic),
    "bilinear": (1, _bilinear),
    "lanczos3": (3, _lanczos(3)),
    "lanczos5": (5, _lanczos(5)),
}
#: The names of all interpolations.
INTERPOLATIONS = ("area", *_KERNELS, "nearest")


@lru_cache(maxsize=256)
def _taps(source: int, target: int, interpolation: str) -> tuple[Array, Array]:
    """Return the indices and weights of the old pixels for each new pixel, along one axis.

    Both arrays are ``[target, taps]``: ``taps`` old pixels contribute to each new pixel.
    """
    scale = source / target
    if interpolation == "area":
        # The weight of an old pixel is the length of its overlap with the new pixel.
        begin = np.arange(target) * scale
        first = np.floor(begin).astype(np.int64)
        indices = first[:, None] + np.arange(int(np.ceil(scale)) + 1)
        covered = np.minimum(indices + 1, (begin + scale)[:, None]) - np.maximum(
            indices, begin[:, None]
        )
        weights = np.maximum(covered, 0)
    elif interpolation == "nearest":
        indices = np.floor((np.arange(target) + 0.5) * scale).astype(np.int64)[:, None]
        weights = np.ones(indices.shape)
    else:
        radius, kernel = _KERNELS[interpolation]
        center = (np.arange(target) + 0.5) * scale - 0.5
        indices = np.floor(center).astype(np.int64)[:, None] + np.arange(1 - radius, 1 + radius)
        weights = kernel(indices - center[:, None])
    # Positions outside of the image have no weight.
    weights = np.where((indices >= 0) & (indices < source), weights, 0)
    weights = weights / weights.sum(axis=1, keepdims=True)
    return np.clip(indices, 0, source - 1), weights.astype(np.float32)


def resized(picture: Array, size: tuple[int, int], interpolation: str) -> Array:
    """Return an image ``[height, width, channels]`` in another size, as float32.

    ``interpolation`` is one of `INTERPOLATIONS`.
    """
    result = picture
    for axis in (0, 1):
        if result.shape[axis] == size[axis]:
            continue
        indices, weights = _taps(result.shape[axis], size[axis], interpolation)
        shape = (-1, 1, 1) if axis == 0 else (1, -1, 1)
        # The sum runs over single taps, so that only the needed pixels are converted to float.
        total = None
        for index, weight in zip(indices.T, weights.T, strict=True):
            part = result.take(index, axis).astype(np.float32)
            part *= weight.reshape(shape)
            total = part if total is None else np.add(total, part, out=total)
        assert total is not None
        result = total
    return result.astype(np.float32, copy=False)


def cropped(picture: Array, size: tuple[int, int]) -> Array:
    """Return the largest centered part of an image with the proportions of ``size``."""
    height, width = picture.shape[:2]
    high = max(min(height, int(width * size[0] / size[1])), 1)
    wide = max(min(width, int(height * size[1] / size[0])), 1)
    top, left = (height - high) // 2, (width - wide) // 2
    return picture[top : top + high, left : left + wide]


def padded(picture: Array, size: tuple[int, int], interpolation: str) -> Array:
    """Return an image in another size, with its own proportions and black margins."""
    height, width = picture.shape[:2]
    ratio = max(height / size[0], width / size[1])
    high, wide = height / ratio, width / ratio
    inner = max(int(high), 1), max(int(wide), 1)
    result = np.zeros((*size, picture.shape[2]), np.float32)
    # The margins depend on the lengths before rounding, as in TensorFlow.
    top, left = int((size[0] - high) / 2), int((size[1] - wide) / 2)
    result[top : top + inner[0], left : left + inner[1]] = resized(picture, inner, interpolation)
    return result
