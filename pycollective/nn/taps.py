"""Windows over images, one tap at a time: what averages and channelwise filters are made of.

Where each channel is computed for itself there is no product of matrices to be gained from patches;
a tap is then one slice of all images.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..array_backend import Array, array_module
from .window import Pair, Window, is_same, make_window, pair

__all__ = ["checked_window", "padded_zeros", "taps", "unpadded"]


def checked_window(
    name: str, x: Array, kernel: tuple[int, int], strides: Pair, padding: str, dilations: Pair = 1
) -> Window:
    """Return the geometry of a window over images, or raise what names the operation and shapes."""
    if x.ndim != 4:
        raise ValueError(f"{name} needs images [n, height, width, channels], got shape {x.shape}")
    steps, gaps = pair(strides, "strides"), pair(dilations, "dilations")
    try:
        return make_window(x.shape[1:], kernel, steps, gaps, is_same(padding))
    except ValueError as error:
        raise ValueError(f"{name} of images {x.shape}: {error}") from None


def _reach(window: Window) -> tuple[int, int]:
    """Return how many rows and columns the windows cover, counted from the first padded one."""
    return (
        (window.out_h - 1) * window.stride_h + (window.kernel_h - 1) * window.dilation_h + 1,
        (window.out_w - 1) * window.stride_w + (window.kernel_w - 1) * window.dilation_w + 1,
    )


def padded_zeros(shape: tuple[int, ...], window: Window, like: Array) -> Array:
    """Return zeros for images of a shape with what the windows reach around them."""
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
    """Return the images of a shape inside of what `padded_zeros` made."""
    top, left = window.pad_top, window.pad_left
    return x[:, top : top + shape[1], left : left + shape[2]]


def taps(x: Array, window: Window) -> Iterator[tuple[int, int, Array]]:
    """Yield row, column and ``[n, out_h, out_w, channels]`` of each tap; views of padded images."""
    step_h, step_w = window.stride_h, window.stride_w
    for i in range(window.kernel_h):
        top = i * window.dilation_h
        rows = slice(top, top + (window.out_h - 1) * step_h + 1, step_h)
        for j in range(window.kernel_w):
            left = j * window.dilation_w
            columns = slice(left, left + (window.out_w - 1) * step_w + 1, step_w)
            yield i, j, x[:, rows, columns]
