"""Convolution of each channel with its own filters, or of groups of channels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array, array_module, native
from ..errors import InvalidArgumentError
from ..tensor import ops
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor
from ..workspace import workspace
from .conv import conv2d
from .halves import in_float32
from .sums import column_sums
from .window import Pair, Window, check_format, checked_window, padded, padded_zeros, taps, unpadded


def _forward(x: Array, w: Array, b: Array | None, window: Window) -> Array:
    n, channels, multiplier = x.shape[0], w.shape[2], w.shape[3]
    found = native(x, w, b) if multiplier == 1 else None
    if found is not None:
        result: Array = workspace.empty((n, window.out_h, window.out_w, channels), x.dtype)
        kernels.depthwise_forward(*found, result, window)
        return result
    shape = (n, window.out_h, window.out_w, channels, multiplier)
    y: Array = array_module(x).zeros(shape, x.dtype)
    for i, j, tap in taps(padded(x, window, 0), window):
        y += tap[..., None] * w[i, j]
    y = y.reshape(*shape[:3], channels * multiplier)
    return y if b is None else y + b


def _by_images(g: Array, w: Array, shape: tuple[int, ...], window: Window) -> Array:
    found = native(g, w) if w.shape[3] == 1 else None
    if found is not None:
        dx: Array = workspace.empty(shape, g.dtype)
        kernels.depthwise_gradient(*found, dx, window)
        return dx
    total = padded_zeros(shape, window, g)
    for i, j, tap in taps(total, window):
        tap += np.einsum("nhwcm,cm->nhwc", g, w[i, j])
    return unpadded(total, shape, window)


def _by_filters(g: Array, x: Array, w: Array, window: Window) -> Array:
    dw = np.empty_like(w, order="C")
    found = native(x, g) if w.shape[3] == 1 else None
    if found is not None:
        kernels.depthwise_weight_gradient(*found, dw, window)
        return dw
    for i, j, tap in taps(padded(x, window, 0), window):
        dw[i, j] = np.einsum("nhwcm,nhwc->cm", g, tap)
    return dw


@in_float32
def depthwise_conv2d(
    input: Any,
    filter: Any,
    strides: Pair = 1,
    padding: str = "VALID",
    data_format: str | None = "NHWC",
    dilations: Pair | None = None,
    name: str | None = None,
    *,
    bias: Any = None,
) -> Tensor:
    """Convolve each channel of images with its own filters, as ``tf.nn.depthwise_conv2d`` does.

    Parameters
    ----------
    input
        Images ``[n, height, width, channels]``; ``n`` may be 0.
    filter
        ``[kernel_h, kernel_w, channels, multiplier]`` of the same dtype.
    strides, dilations
        Steps of the window and between its taps: an int, ``(height, width)`` or
        ``(1, height, width, 1)``; by default 1.
    padding, data_format, name
        As in `conv2d`.
    bias
        ``[channels * multiplier]``, added to each pixel.

    Returns
    -------
    Tensor
        ``[n, out_h, out_w, channels * multiplier]``; the results of a channel are adjacent.

    Raises
    ------
    TypeError, ValueError
        As in `conv2d`.
    """
    check_format("depthwise_conv2d", data_format)
    images, filters = as_tensor(input), as_tensor(filter)
    shifts = () if bias is None else (as_tensor(bias),)
    x, w = images.array, filters.array
    b = shifts[0].array if shifts else None
    if w.ndim != 4 or min(w.shape) < 1:
        raise InvalidArgumentError(
            "depthwise_conv2d needs filters [kernel_h, kernel_w, channels, multiplier], got shape "
            f"{w.shape}"
        )
    window = checked_window(
        "depthwise_conv2d", x, w.shape[:2], strides, padding, 1 if dilations is None else dilations
    )
    if x.shape[3] != w.shape[2]:
        raise InvalidArgumentError(
            f"images of shape {x.shape} have {x.shape[3]} channels, filters of shape {w.shape} "
            f"expect {w.shape[2]}"
        )
    outputs = w.shape[2] * w.shape[3]
    if b is not None and b.shape != (outputs,):
        raise InvalidArgumentError(
            f"bias has shape {b.shape}, filters of shape {w.shape} need ({outputs},)"
        )
    for other in (w, b):
        if other is not None and other.dtype != x.dtype:
            raise TypeError(
                f"images have dtype {x.dtype}, filters or bias {other.dtype}; cast one of them"
            )

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        gradient = g.reshape(*g.shape[:3], *w.shape[2:])
        return (
            _by_images(gradient, w, x.shape, window) if need[0] else None,
            _by_filters(gradient, x, w, window) if need[1] else None,
            column_sums(g.reshape(-1, outputs)) if any(need[2:]) else None,
        )[: len(need)]

    return record(_forward(x, w, b, window), (images, filters, *shifts), vjp)


# The convolution kernels need this many channels to fill their registers.
_FULL = 32


def _merged_groups(groups: int, width: int) -> int:
    """Return the number of groups of ``width`` channels to convolve together."""
    return max(
        n for n in range(1, groups + 1) if groups % n == 0 and (n == 1 or n * width <= _FULL)
    )


def _block_diagonal(w: Tensor, groups: int, merged: int) -> Tensor:
    """Return filters for ``groups // merged`` wide groups.

    A wide group convolves ``merged`` groups together. The filters of each of these groups are zero
    for the channels of the others.
    """
    height, width, channels, filters = w.shape
    per_group = filters // groups
    blocks = ops.reshape(w, (height, width, 1, channels, groups // merged, merged, per_group))
    same = ops.eye(merged, dtype=bool).array.reshape(merged, 1, 1, merged, 1)
    wide = ops.where(same, blocks, ops.zeros((), w.dtype))
    return ops.reshape(wide, (height, width, merged * channels, filters))


@in_float32
def grouped_conv2d(
    x: Any,
    w: Any,
    groups: int,
    bias: Any = None,
    strides: Pair = 1,
    padding: str = "VALID",
    dilations: Pair = 1,
    activation: str | None = None,
) -> Tensor:
    """Convolve groups of channels, each with its share of the filters.

    Parameters
    ----------
    x
        Images ``[n, height, width, channels]``.
    w
        Filters ``[kernel_h, kernel_w, channels / groups, filters]``: the first group's filters, then the
        second group's, and so on.
    groups : int
        Number of groups; it must divide the numbers of channels and of filters.
    bias, strides, padding, dilations, activation
        As in `conv2d`.

    Returns
    -------
    Tensor
        ``[n, out_h, out_w, filters]``.

    Raises
    ------
    TypeError
        As in `conv2d`.
    ValueError
        As in `conv2d`, or ``groups`` does not divide the numbers of channels and of filters.

    Notes
    -----
    Narrow groups are convolved together, with filters that are zero between groups. A NaN or an
    infinity in one group therefore also changes the results of the groups convolved with it.
    """
    images, filters = as_tensor(x), as_tensor(w)
    if images.ndim != 4 or filters.ndim != 4:
        raise InvalidArgumentError(
            "grouped_conv2d needs images [n, height, width, channels] and filters [kernel_h, kernel_w, "
            f"channels / groups, filters], got shapes {images.shape} and {filters.shape}"
        )
    if groups < 1:
        raise InvalidArgumentError(f"groups must be at least 1, got {groups}")
    channels, count = images.shape[-1], filters.shape[-1]
    if channels % groups or count % groups:
        raise InvalidArgumentError(
            f"{groups} groups must divide both the {channels} channels and the {count} filters"
        )
    convolve = functools.partial(
        conv2d, strides=strides, padding=padding, dilations=dilations, activation=activation
    )
    if groups == 1:
        return convolve(images, filters, bias=bias)
    merged = _merged_groups(groups, max(channels, count) // groups)
    filters = _block_diagonal(filters, groups, merged)
    groups //= merged
    if groups == 1:
        return convolve(images, filters, bias=bias)
    parts = zip(
        ops.split(images, groups, axis=-1),
        ops.split(filters, groups, axis=-1),
        [None] * groups if bias is None else ops.split(bias, groups),
        strict=True,
    )
    return ops.concat([convolve(x, w, bias=b) for x, w, b in parts], axis=-1)
