"""Two-dimensional convolution, alone or with bias, relu and max pooling in one pass.

Images are ``[n, height, width, channels]``, filters ``[kernel_h, kernel_w, channels, filters]``.
NumPy arrays of float32 use compiled kernels, one call in each direction. The shapes select the
kernel. Winograd's algorithm is for 3 x 3 filters at every pixel. Before pooling, a kernel that
reads patches in place serves images of one or three channels. Else the patches of a block of output
rows are copied side by side ("im2col"), multiplied, and finished while they are in cache.

Gradients through max pooling are sums over the few pixels that it selected. In float64, BLAS
multiplies the patches that a kernel has copied. GPU arrays use cuDNN if it is available (`cudnn`).
All other arrays (other dtypes, CuPy without cuDNN) use im2col with the functions of their array
module.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import FLOAT32, Array, in_c_order, native, on_host
from ..errors import InvalidArgumentError
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor
from ..workspace import workspace
from . import cudnn
from .blocks import Blocks, Gradients
from .halves import in_float32
from .pooling import max_pool2d
from .sums import column_sums
from .window import (
    Pair,
    Window,
    add_windows,
    check_format,
    is_same,
    make_window,
    padded,
    pair,
    windows,
)

# Numbers of channels for which there is a kernel without patches.
_DIRECT_CHANNELS = (1, 3)
# With fewer channels or filters, the products of the Winograd kernels are too narrow.
_WINOGRAD_CHANNELS = 8
# The largest number of pairs of a channel and a filter per output pixel. With more of them, the
# transforms of filters and of their gradients take longer than the saved products. All threads share
# the gradients of the filters in a call of one image.
_FILTERS_PER_PIXEL, _FILTERS_PER_PIXEL_OF_ONE_IMAGE = 150, 1_500
# With fewer channels, sums over single pixels need the kernel for 3 x 3 filters and 2 x 2 pooling.
_SPARSE_CHANNELS = 8


def _conv_window(
    x: Array, w: Array, b: Array | None, strides: Pair, padding: str, dilations: Pair
) -> Window:
    for other in (w, b):
        if other is not None and other.dtype != x.dtype:
            raise TypeError(
                f"images have dtype {x.dtype}, filters or bias {other.dtype}; cast one of them"
            )
    is_same(padding)  # raises the error for a list, which has no hash
    return _window_of_shapes(
        x.shape,
        w.shape,
        None if b is None else b.shape,
        strides if strides.__class__ is tuple else pair(strides, "strides"),
        padding,
        dilations if dilations.__class__ is tuple else pair(dilations, "dilations"),
    )


@functools.lru_cache(maxsize=512, typed=True)
def _window_of_shapes(
    x: tuple[int, ...],
    w: tuple[int, ...],
    b: tuple[int, ...] | None,
    strides: Pair,
    padding: str,
    dilations: Pair,
) -> Window:
    if len(x) != 4 or len(w) != 4:
        raise InvalidArgumentError(
            "conv2d needs images [n, height, width, channels] and filters [kernel_h, kernel_w, "
            f"channels, filters], got shapes {x} and {w}"
        )
    if x[3] != w[2]:
        raise InvalidArgumentError(
            f"images of shape {x} have {x[3]} channels, filters of shape {w} expect {w[2]}"
        )
    if b is not None and b != w[3:]:
        raise InvalidArgumentError(f"bias has shape {b}, filters of shape {w} need {w[3:]}")
    if min(w) < 1:
        raise InvalidArgumentError(f"filters of shape {w} have an empty axis")
    try:
        return make_window(
            x[1:], w[:2], pair(strides, "strides"), pair(dilations, "dilations"), is_same(padding)
        )
    except ValueError as error:
        raise InvalidArgumentError(f"conv2d of images {x} with filters {w}: {error}") from None


# Compiled ----------------------------------------------------------------------------------------


def _three_by_three(shape: tuple[int, ...], dtype: Any, window: Window) -> bool:
    """Return True for float32 filters of 3 x 3 taps at every pixel."""
    steps = (window.stride_h, window.stride_w, window.dilation_h, window.dilation_w)
    return bool(dtype == np.float32) and shape[:2] == (3, 3) and steps == (1, 1, 1, 1)


@functools.lru_cache(maxsize=512)
def _winograd(images: int, shape: tuple[int, ...], dtype: Any, window: Window) -> bool:
    """Return True for 3 x 3 filters at every pixel, if their number suits Winograd's kernels."""
    most = _FILTERS_PER_PIXEL_OF_ONE_IMAGE if images == 1 else _FILTERS_PER_PIXEL
    return (
        _three_by_three(shape, dtype, window)
        and min(shape[2:]) >= _WINOGRAD_CHANNELS
        and shape[2] * shape[3] <= most * images * window.out_h * window.out_w
    )


def _compiled_forward(x: Array, w: Array, b: Array | None, window: Window, relu: bool) -> Array:
    y = workspace.empty((x.shape[0], window.out_h, window.out_w, w.shape[3]), x.dtype)
    if _winograd(len(x), w.shape, w.dtype, window):
        kernels.winograd_forward(x, w, b, y, None, window, None, relu)
        return y
    if x.dtype == FLOAT32:
        kernels.blocked_forward(x, w, b, y, None, window, None, relu)
        return y
    blocks = Blocks(x, w, window)
    matrix = y.reshape(-1, blocks.filters)
    for first, last in blocks.spans():
        z = blocks.pixels(matrix, first, last)
        np.matmul(blocks.patches(first, last), blocks.matrix, out=z)
        kernels.bias_relu(z, b, relu)
    return y


def _empty_gradients(
    x: Array, w: Array, need_x: bool, need_w: bool
) -> tuple[Array | None, Array | None]:
    return (
        workspace.empty(x.shape, x.dtype) if need_x else None,
        np.empty(w.shape, w.dtype) if need_w else None,
    )


def _compiled_backward(
    g: Array, x: Array, w: Array, y: Array | None, window: Window, need: Sequence[bool]
) -> tuple[Array | None, Array | None, Array | None]:
    need_x, need_w, need_b = need[0], need[1], any(need[2:])
    db = np.zeros(w.shape[3], w.dtype) if need_b else None
    if _winograd(len(x), w.shape, w.dtype, window):
        dx, dw = _empty_gradients(x, w, need_x, need_w)
        kernels.winograd_gradient(x, w, g, y, dx, dw, db, window)
        return dx, dw, db
    if x.dtype == FLOAT32:
        dx, dw = _empty_gradients(x, w, need_x, need_w)
        kernels.blocked_gradient(x, w, g, y, None, dx, dw, db, window, None)
        return dx, dw, db
    blocks = Blocks(x, w, window)
    gradients = Gradients(blocks, w, need_x, need_w)
    upstream = g.reshape(-1, blocks.filters)
    result = None if y is None else y.reshape(upstream.shape)
    for first, last in blocks.spans():
        dz = blocks.pixels(upstream, first, last)
        if result is not None:
            masked = workspace.scratch("dz", dz.shape, dz.dtype)
            kernels.relu_gradient(dz, blocks.pixels(result, first, last), masked, db)
            dz = masked
        elif db is not None:
            kernels.relu_gradient(dz, None, None, db)
        gradients.add(dz, first, last)
    return gradients.dx, gradients.dw, db


@functools.lru_cache(maxsize=64)
def _pool_pair(size: Pair) -> tuple[int, int]:
    return pair(size, "pool_size")


class _Pooled:
    """The geometry of convolution, relu and disjoint max pooling in one pass.

    Only the pixels that pooling uses are computed: ``window`` is cropped to them.
    """

    def __init__(self, window: Window, filters: int, size: tuple[int, int]) -> None:
        self.out_h = window.out_h // size[0]
        self.out_w = window.out_w // size[1]
        self.size = size
        self.window = window.cropped(self.out_h * size[0], self.out_w * size[1])
        area = (self.window.out_h, self.window.out_w, filters)
        self.pool = make_window(area, size, size, (1, 1), False)
        # One row of pooling windows, for blocks with a whole number of such rows.
        self.strip = make_window((size[0], *area[1:]), size, size, (1, 1), False)


@functools.lru_cache(maxsize=256)
def _pooled(window: Window, filters: int, size: tuple[int, int]) -> _Pooled:
    return _Pooled(window, filters, size)


def _direct(plan: _Pooled, shape: tuple[int, ...], dtype: Any) -> bool:
    """Return True if there is a kernel that reads patches in place."""
    three = _three_by_three(shape, dtype, plan.window)
    return three and plan.size == (2, 2) and shape[2] in _DIRECT_CHANNELS


@functools.lru_cache(maxsize=256)
def _pooled_kernel(images: int, plan: _Pooled, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the forward kernel for filters of this shape and dtype; None means BLAS."""
    if plan.size == (2, 2) and _winograd(images, shape, dtype, plan.window):
        return kernels.winograd_forward
    if _direct(plan, shape, dtype):
        return kernels.direct_forward
    return kernels.blocked_forward if dtype == np.float32 else None


def _pooled_forward(x: Array, w: Array, b: Array | None, plan: _Pooled) -> tuple[Array, Array]:
    """Return the pooled result and the codes of the maxima (see csrc/nn/kernels.h)."""
    shape = (x.shape[0], plan.out_h, plan.out_w, w.shape[3])
    y = workspace.empty(shape, x.dtype)
    codes = workspace.empty(shape, np.uint8)
    kernel = _pooled_kernel(len(x), plan, w.shape, w.dtype)
    if kernel is not None:
        kernel(x, w, b, y, codes, plan.window, plan.pool, True)
        return y, codes
    blocks = Blocks(x, w, plan.window, plan.size[0])
    results = y.reshape(-1, plan.out_w * blocks.filters)
    taps = codes.reshape(results.shape)
    for first, last in blocks.spans():
        patches = blocks.patches(first, last)
        z = workspace.scratch("z", (len(patches), blocks.filters), x.dtype)
        np.matmul(patches, blocks.matrix, out=z)
        rows = slice(first // plan.size[0], last // plan.size[0])
        kernels.max_pool(z, b, results[rows], taps[rows], plan.strip, True)
    return y, codes


@functools.lru_cache(maxsize=256)
def _sparse(plan: _Pooled, shape: tuple[int, ...], dtype: Any) -> bool:
    """Return True if sums over the pixels of the maxima are faster than products of matrices."""
    if dtype != np.float32 or not kernels.sparse_fits(plan.window, shape[3]):
        return False
    usual = _three_by_three(shape, dtype, plan.window) and plan.size == (2, 2)
    return usual or shape[2] >= _SPARSE_CHANNELS


def _pooled_backward(
    g: Array, codes: Array, x: Array, w: Array, plan: _Pooled, need: Sequence[bool]
) -> tuple[Array | None, Array | None, Array | None]:
    need_x, need_w, need_b = need[0], need[1], any(need[2:])
    db = np.zeros(w.shape[3], w.dtype) if need_b else None
    if _sparse(plan, w.shape, w.dtype):
        dx, dw = _empty_gradients(x, w, need_x, need_w)
        kernels.sparse_gradient(x, w, g, codes, dx, dw, db, plan.window, plan.pool)
        return dx, dw, db
    if x.dtype == FLOAT32:
        dx, dw = _empty_gradients(x, w, need_x, need_w)
        kernels.blocked_gradient(x, w, g, None, codes, dx, dw, db, plan.window, plan.pool)
        return dx, dw, db
    blocks = Blocks(x, w, plan.window, plan.size[0])
    gradients = Gradients(blocks, w, need_x, need_w)
    upstream = g.reshape(-1, plan.out_w * blocks.filters)
    taps = codes.reshape(upstream.shape)
    for first, last in blocks.spans():
        rows = slice(first // plan.size[0], last // plan.size[0])
        shape = ((last - first) * blocks.out_w, blocks.filters)
        dz = workspace.scratch("dz", shape, g.dtype)
        kernels.max_pool_gradient(upstream[rows], taps[rows], dz, db, plan.strip)
        gradients.add(dz, first, last)
    return gradients.dx, gradients.dw, db


# Any array module --------------------------------------------------------------------------------


def _patches(x: Array, w: Array, window: Window) -> Array:
    view = windows(padded(x, window, 0), window)
    rows = x.shape[0] * window.out_h * window.out_w
    return view.reshape(rows, w.size // w.shape[3])


def _generic_forward(x: Array, w: Array, b: Array | None, window: Window, relu: bool) -> Array:
    y = None if on_host(x) else cudnn.forward(x, w, window)
    if y is None:
        y = workspace.matmul(_patches(x, w, window), w.reshape(-1, w.shape[3]))
        y = y.reshape(x.shape[0], window.out_h, window.out_w, w.shape[3])
    if b is not None:
        np.add(y, b, out=y)
    return np.maximum(y, y.dtype.type(0), out=y) if relu else y


def _generic_backward(
    g: Array, x: Array, w: Array, y: Array | None, window: Window, need: Sequence[bool]
) -> tuple[Array | None, Array | None, Array | None]:
    masked = g if y is None else np.where(y > 0, g, g.dtype.type(0))
    dx = dw = db = None
    if not on_host(g):
        dx, dw = cudnn.gradients(masked, x, w, window, need[0], need[1])
    dz = masked.reshape(-1, w.shape[3])
    if need[0] and dx is None:
        columns = workspace.matmul(dz, w.reshape(-1, w.shape[3]).T)
        shape = (x.shape[0], window.out_h, window.out_w, *w.shape[:3])
        dx = add_windows(columns.reshape(shape), x.shape, window)
    if need[1] and dw is None:
        dw = workspace.matmul(_patches(x, w, window).T, dz).reshape(w.shape)
    if any(need[2:]):
        db = column_sums(dz)
    return dx, dw, db


# Arrays ------------------------------------------------------------------------------------------


def conv2d_forward(x: Array, w: Array, b: Array | None, window: Window, relu: bool) -> Array:
    """Convolve arrays of checked shapes; their kind selects the kernel."""
    if (found := native(x, w, b)) is not None:
        return _compiled_forward(*found, window, relu)
    return _generic_forward(x, w, b, window, relu)


def conv2d_backward(
    g: Array, x: Array, w: Array, y: Array | None, window: Window, need: Sequence[bool]
) -> tuple[Array | None, Array | None, Array | None]:
    """Return the gradients of images, filters and bias, None for those that ``need`` excludes.

    ``y`` is the result after relu, or None without relu.
    """
    if (found := native(g, x, w, y)) is not None:
        return _compiled_backward(*found, window, need)
    return _generic_backward(g, x, w, y, window, need)


# Tensors -----------------------------------------------------------------------------------------


def _tensors(
    x: Any, w: Any, bias: Any
) -> tuple[tuple[Tensor, ...], tuple[Array, Array, Array | None]]:
    """Return the inputs as tensors and as arrays."""
    images, filters = as_tensor(x), as_tensor(w)
    if bias is None:
        return (images, filters), (images.array, filters.array, None)
    shift = as_tensor(bias)
    return (images, filters, shift), (images.array, filters.array, shift.array)


@in_float32
def conv2d(
    input: Any,
    filters: Any,
    strides: Pair = 1,
    padding: str = "VALID",
    data_format: str | None = "NHWC",
    dilations: Pair | None = None,
    name: str | None = None,
    *,
    bias: Any = None,
    activation: str | None = None,
) -> Tensor:
    """Convolve images with filters, as ``tf.nn.conv2d`` does (a cross-correlation).

    Parameters
    ----------
    input
        Images ``[n, height, width, channels]``; ``n`` may be 0.
    filters
        Filters ``[kernel_h, kernel_w, channels, filters]`` of the same dtype.
    strides, dilations
        Steps of the window and between its taps: an int, ``(height, width)`` or
        ``(1, height, width, 1)``; by default 1.
    padding : str
        ``"VALID"``: the window stays inside the image. ``"SAME"``: zeros around the image, so that
        the result has ``ceil(size / stride)`` rows and columns.
    data_format : {"NHWC"}
        The order of the images' axes.
    name : str, optional
        Ignored.
    bias
        ``[filters]``, added to each pixel.
    activation : str, optional
        ``"relu"`` replaces negative results by 0 in the same pass.

    Returns
    -------
    Tensor
        ``[n, out_h, out_w, filters]``.

    Raises
    ------
    TypeError
        Images, filters and bias do not have one dtype.
    ValueError
        The shapes do not fit, a window is larger than an image, or another argument is not valid.
    """
    if activation not in (None, "relu"):
        raise InvalidArgumentError(f"activation must be None or 'relu', got {activation!r}")
    relu = activation == "relu"
    check_format("conv2d", data_format)
    inputs, (xa, wa, ba) = _tensors(input, filters, bias)
    window = _conv_window(xa, wa, ba, strides, padding, 1 if dilations is None else dilations)
    y = conv2d_forward(xa, wa, ba, window, relu)
    kept = y if relu else None

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        return conv2d_backward(g, xa, wa, kept, window, need)[: len(need)]

    return record(y, inputs, vjp)


def conv2d_relu_max_pool(
    x: Any,
    w: Any,
    bias: Any = None,
    strides: Pair = 1,
    padding: str = "VALID",
    dilations: Pair = 1,
    pool_size: Pair = 2,
) -> Tensor:
    """Return convolution with relu, then max pooling with a stride of its window and no padding.

    Values and gradients are those of ``max_pool2d(conv2d(..., activation="relu"), pool_size)``.
    With NumPy arrays of float32 or float64, the convolution's result is pooled while it is in cache
    and never stored. Then rows and columns that pooling would drop are not computed.

    Parameters
    ----------
    x, w, bias, strides, padding, dilations
        As in `conv2d`.
    pool_size
        Height and width of the pooling window, and its stride.

    Returns
    -------
    Tensor
        ``[n, out_h // pool_h, out_w // pool_w, filters]``.

    Raises
    ------
    TypeError, ValueError
        As in `conv2d` and `max_pool2d`.
    """
    inputs, (xa, wa, ba) = _tensors(x, w, bias)
    window = _conv_window(xa, wa, ba, strides, padding, dilations)
    size = _pool_pair(pool_size) if pool_size.__class__ is tuple else pair(pool_size, "pool_size")
    fits = size[0] <= window.out_h and size[1] <= window.out_w and size[0] * size[1] < 255
    arrays = native(xa, wa, ba) if fits else None
    if arrays is None:
        result = conv2d(
            inputs[0],
            inputs[1],
            strides,
            padding,
            dilations=dilations,
            bias=bias,
            activation="relu",
        )
        return max_pool2d(result, size)
    plan = _pooled(window, wa.shape[3], size)
    y, codes = _pooled_forward(*arrays, plan)

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        return _pooled_backward(in_c_order(g), codes, *arrays[:2], plan, need)[: len(need)]

    return record(y, inputs, vjp)
