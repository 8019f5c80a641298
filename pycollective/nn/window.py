"""Windows over images, shared by convolution and pooling.

``kernels.Window`` holds the geometry; the rules for "VALID" and "SAME" are TensorFlow's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array, array_module
from ..errors import InvalidArgumentError

Window: TypeAlias = kernels.Window
#: One size for height and width, or two sizes.
Pair: TypeAlias = "int | Sequence[int]"


def pair(value: Pair, name: str) -> tuple[int, int]:
    """Return sizes for height and width from one number, two numbers, or TensorFlow's four."""
    values = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(values) == 4 and values[0] == values[3] == 1:
        values = values[1:3]
    if len(values) != 2 or not all(
        isinstance(v, (int, np.integer)) and not isinstance(v, bool) and v >= 1 for v in values
    ):
        raise InvalidArgumentError(
            f"{name} must be a positive int or a pair of them, got {value!r}"
        )
    return int(values[0]), int(values[1])


def is_same(padding: str) -> bool:
    """Return True if ``padding`` is "SAME", False if it is "VALID"."""
    text = padding.upper() if isinstance(padding, str) else padding
    if text not in ("SAME", "VALID"):
        raise InvalidArgumentError(f"padding must be 'SAME' or 'VALID', got {padding!r}")
    return bool(text == "SAME")


def check_format(name: str, data_format: str | None) -> None:
    """Raise ValueError unless images have the format "NHWC"."""
    if data_format not in (None, "NHWC"):
        raise InvalidArgumentError(
            f"{name}: data_format is {data_format!r}, but images are [n, height, width, channels] "
            "('NHWC'): transpose them"
        )


@functools.lru_cache(maxsize=512)
def make_window(
    image: tuple[int, ...],
    kernel: tuple[int, int],
    strides: tuple[int, int],
    dilations: tuple[int, int],
    same: bool,
) -> Window:
    """Return the geometry of a window over images of shape ``[height, width, channels]``."""
    height, width, channels = image
    return kernels.Window(height, width, channels, *kernel, *strides, *dilations, same)


def _reach(window: Window) -> tuple[int, int]:
    """Return the numbers of rows and columns that the windows cover, padding included."""
    return (
        (window.out_h - 1) * window.stride_h + (window.kernel_h - 1) * window.dilation_h + 1,
        (window.out_w - 1) * window.stride_w + (window.kernel_w - 1) * window.dilation_w + 1,
    )


def end_padding(window: Window, image: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of windows past the end of images ``[n, height, width, …]``."""
    height, width = _reach(window)
    bottom = max(height - window.pad_top - image[1], 0)
    return bottom, max(width - window.pad_left - image[2], 0)


def padded(x: Array, window: Window, fill: Any) -> Array:
    """Return the images surrounded by ``fill``, as far as the windows reach."""
    bottom, right = end_padding(window, x.shape)
    if not (window.pad_top or window.pad_left or bottom or right):
        return x
    around = ((0, 0), (window.pad_top, bottom), (window.pad_left, right), (0, 0))
    result: Array = array_module(x).pad(x, around, constant_values=fill)
    return result


def windows(x: Array, window: Window) -> Array:
    """Return a view ``[n, out_h, out_w, kernel_h, kernel_w, channels]`` of padded images."""
    n, down, across, depth = x.strides
    view: Array = array_module(x).lib.stride_tricks.as_strided(
        x,
        shape=(
            x.shape[0],
            window.out_h,
            window.out_w,
            window.kernel_h,
            window.kernel_w,
            x.shape[3],
        ),
        strides=(
            n,
            down * window.stride_h,
            across * window.stride_w,
            down * window.dilation_h,
            across * window.dilation_w,
            depth,
        ),
    )
    return view


def add_windows(values: Array, image: tuple[int, ...], window: Window) -> Array:
    """Return images in which each value is added to the pixel from which `windows` reads it."""
    total = padded_zeros(image, window, values)
    for i, j, tap in taps(total, window):
        tap += values[:, :, :, i, j]
    return unpadded(total, image, window)


def checked_window(
    name: str, x: Array, kernel: tuple[int, int], strides: Pair, padding: str, dilations: Pair = 1
) -> Window:
    """Return the geometry of a window over images; errors name the operation and the shapes."""
    if x.ndim != 4:
        raise InvalidArgumentError(
            f"{name} needs images [n, height, width, channels], got shape {x.shape}"
        )
    steps, gaps = pair(strides, "strides"), pair(dilations, "dilations")
    try:
        return make_window(x.shape[1:], kernel, steps, gaps, is_same(padding))
    except ValueError as error:
        raise InvalidArgumentError(f"{name} of images {x.shape}: {error}") from None


def padded_zeros(shape: tuple[int, ...], window: Window, like: Array) -> Array:
    """Return zeros for images of a shape, with the padding that the windows cover."""
    height, width = _reach(window)
    zeros: Array = array_module(like).zeros(
        (
            shape[0],
            max(height, window.pad_top + shape[1]),
            max(width, window.pad_left + shape[2]),
            shape[3],
        ),
        like.dtype,
    )
    return zeros


def unpadded(x: Array, shape: tuple[int, ...], window: Window) -> Array:
    """Return the part of a result of `padded_zeros` that holds the images."""
    top, left = window.pad_top, window.pad_left
    return x[:, top : top + shape[1], left : left + shape[2]]


def taps(x: Array, window: Window) -> Iterator[tuple[int, int, Array]]:
    """Yield row, column and ``[n, out_h, out_w, channels]`` of each tap, views of padded images."""
    step_h, step_w = window.stride_h, window.stride_w
    for i in range(window.kernel_h):
        top = i * window.dilation_h
        rows = slice(top, top + (window.out_h - 1) * step_h + 1, step_h)
        for j in range(window.kernel_w):
            left = j * window.dilation_w
            columns = slice(left, left + (window.out_w - 1) * step_w + 1, step_w)
            yield i, j, x[:, rows, columns]
