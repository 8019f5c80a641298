"""Max pooling, which keeps the position of each window's maximum for the gradient, and mean pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array, array_module, asarray, in_c_order, native
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor
from ..workspace import workspace
from . import pooling_on_gpu
from .halves import in_float32
from .window import (
    Pair,
    Window,
    add_windows,
    check_format,
    checked_window,
    padded,
    padded_zeros,
    pair,
    taps,
    unpadded,
    windows,
)

__all__ = ["avg_pool2d", "max_pool2d"]


# Compiled ----------------------------------------------------------------------------------------


def _compiled_forward(x: Array, window: Window) -> tuple[Array, Array]:
    """Return the maxima, and for each maximum its position in the window as a code."""
    shape = (x.shape[0], window.out_h, window.out_w, x.shape[3])
    small = window.kernel_h * window.kernel_w < 255
    y = workspace.empty(shape, x.dtype)
    codes = workspace.empty(shape, np.uint8 if small else np.uint32)
    kernels.max_pool(x, None, y, codes, window, False)
    return y, codes


def _compiled_backward(g: Array, codes: Array, shape: tuple[int, ...], window: Window) -> Array:
    dx = workspace.empty(shape, g.dtype)
    kernels.max_pool_gradient(g, codes, dx, None, window)
    return dx


# Any array module --------------------------------------------------------------------------------


def _lowest(dtype: np.dtype[Any]) -> Any:
    """Return the smallest value of a dtype."""
    if dtype.kind in "iu":
        return np.iinfo(dtype).min
    return False if dtype.kind == "b" else -np.inf


def _all_taps(x: Array, window: Window, fill: Any) -> Array:
    """Return ``[n, out_h, out_w, taps, channels]``, with ``fill`` for taps outside the image."""
    view = windows(padded(x, window, fill), window)
    size = window.kernel_h * window.kernel_w
    return view.reshape(*view.shape[:3], size, x.shape[3])


def _generic_forward(x: Array, window: Window) -> tuple[Array, Array]:
    xp = array_module(x)
    values = _all_taps(x, window, _lowest(x.dtype))
    inside = _all_taps(xp.ones((1, *x.shape[1:3], 1), bool), window, False)
    # NaN differs from itself. In a window whose values are all the lowest one, padding must not count
    # as the maximum.
    hits = ((values == values.max(axis=3, keepdims=True)) | (values != values)) & inside
    codes = hits.argmax(axis=3)
    y = xp.take_along_axis(values, codes[:, :, :, None], axis=3)[:, :, :, 0]
    return y, codes


def _generic_backward(g: Array, codes: Array, shape: tuple[int, ...], window: Window) -> Array:
    xp = array_module(g)
    numbers = xp.arange(window.kernel_h * window.kernel_w)[:, None]
    values = np.where(codes[:, :, :, None] == numbers, g[:, :, :, None], g.dtype.type(0))
    kernel = (window.kernel_h, window.kernel_w)
    return add_windows(values.reshape(*g.shape[:3], *kernel, g.shape[3]), shape, window)


# Arrays ------------------------------------------------------------------------------------------


def max_pool_forward(x: Array, window: Window) -> tuple[Array, Array]:
    """Return the maxima and the codes that `max_pool_backward` needs."""
    if (found := native(x)) is not None:
        return _compiled_forward(*found, window)
    by_kernel = pooling_on_gpu.fits(x, window)
    return pooling_on_gpu.forward(x, window) if by_kernel else _generic_forward(x, window)


def max_pool_backward(g: Array, codes: Array, shape: tuple[int, ...], window: Window) -> Array:
    """Return the gradient of images of the given shape."""
    if codes.dtype.kind == "u" and (found := native(g)) is not None:
        return _compiled_backward(*found, codes, shape, window)
    if codes.dtype == np.uint8 and pooling_on_gpu.fits(g, window):
        return pooling_on_gpu.backward(g, codes, shape, window)
    return _generic_backward(g, codes, shape, window)


# Tensors -----------------------------------------------------------------------------------------


def max_pool2d(
    input: Any,
    ksize: Pair = 2,
    strides: Pair | None = None,
    padding: str = "VALID",
    data_format: str | None = "NHWC",
    name: str | None = None,
) -> Tensor:
    """Return the maximum of each window, as ``tf.nn.max_pool2d`` does.

    The first one of equal maxima, in row-major order, gets the gradient. A window with NaN gives NaN.

    Parameters
    ----------
    input
        Images ``[n, height, width, channels]``; ``n`` may be 0.
    ksize
        Height and width of the window: an int, ``(height, width)`` or ``(1, height, width, 1)``.
    strides
        Steps of the window, in the same forms; by default ``ksize``.
    padding : str
        ``"VALID"``: windows stay inside the image. ``"SAME"``: ``ceil(size / stride)`` rows and
        columns; pixels outside the image do not count.
    data_format, name
        As in `conv2d`.

    Returns
    -------
    Tensor
        ``[n, out_h, out_w, channels]``.

    Raises
    ------
    ValueError
        The images do not have four axes, a window is larger than an image, or an argument is not valid.
    """
    check_format("max_pool2d", data_format)
    images = as_tensor(input)
    array = images.array
    size = pair(ksize, "ksize")
    steps = size if strides is None else strides
    window = checked_window("max_pool2d", array, size, steps, padding)
    y, codes = max_pool_forward(array, window)
    shape = array.shape

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        return (max_pool_backward(g, codes, shape, window),)

    return record(y, (images,), vjp)


def _counts(shape: tuple[int, ...], window: Window, like: Array) -> Array:
    """Return the number of image pixels in each window, ``[out_h, out_w, 1]``."""
    ones = padded_zeros((1, *shape[1:3], 1), window, np.zeros(0))
    unpadded(ones, shape, window)[...] = 1
    counts = sum(tap for _, _, tap in taps(ones, window))
    return asarray(counts, like.dtype, like=like)


@in_float32
def avg_pool2d(
    input: Any,
    ksize: Pair = 2,
    strides: Pair | None = None,
    padding: str = "VALID",
    data_format: str | None = "NHWC",
    name: str | None = None,
) -> Tensor:
    """Return the mean of each window, as ``tf.nn.avg_pool2d`` does.

    Parameters, result and errors are those of `max_pool2d`. Pixels outside the image do not count.
    Raise a ``TypeError`` unless ``input`` has a floating-point dtype.
    """
    check_format("avg_pool2d", data_format)
    images = as_tensor(input)
    a = images.array
    if a.dtype.kind not in "fV":
        raise TypeError(f"avg_pool2d needs floating-point images, got {a.dtype}; use cast()")
    size = pair(ksize, "ksize")
    window = checked_window("avg_pool2d", a, size, size if strides is None else strides, padding)
    shape = a.shape
    if (found := native(a)) is not None:
        y = workspace.empty((shape[0], window.out_h, window.out_w, shape[3]), a.dtype)
        kernels.depthwise_forward(*found, None, None, y, window)

        def compiled_vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
            dx = workspace.empty(shape, g.dtype)
            kernels.depthwise_gradient(in_c_order(g), None, dx, window)
            return (dx,)

        return record(y, (images,), compiled_vjp)
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
