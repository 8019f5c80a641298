"""Transposed convolution, the operation that carries a convolution's gradient back to its images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..array_backend import Array, array_module, native
from ..errors import InvalidArgumentError
from ..tensor.ops import transpose
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor
from ..workspace import workspace
from .conv import conv2d, conv2d_backward, conv2d_forward
from .halves import in_float32
from .window import Pair, Window, check_format, is_same, make_window, pair

#: Numbers of rows above and below, or of columns left and right.
Sides = tuple[int, int]


def _spread(x: Tensor, strides: tuple[int, int], sides: Sequence[Sides]) -> Tensor:
    """Return images with ``stride - 1`` zeros between pixels, and zeros around them."""
    a = x.array
    n, height, width, channels = a.shape
    lengths, places = [], []
    for length, stride, (before, after) in zip((height, width), strides, sides, strict=True):
        end = before + max((length - 1) * stride + 1, 0)
        places.append(slice(before, end, stride))
        lengths.append(end + after)
    where = (slice(None), *places)
    result = array_module(a).zeros((n, *lengths, channels), a.dtype)
    result[where] = a

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        return (g[where],)

    return record(result, (x,), vjp)


def _window_of(
    x: tuple[int, ...],
    w: tuple[int, ...],
    strides: tuple[int, int],
    sides: Sequence[Sides],
    dilations: tuple[int, int],
) -> Window | None:
    """Return the window of the convolution whose gradient this is; None if TensorFlow has none."""
    lengths, pads = [], []
    for n, kernel, stride, (before, after), gap in zip(
        x[1:3], w[:2], strides, sides, dilations, strict=True
    ):
        extent = (kernel - 1) * gap + 1
        lengths.append((n - 1) * stride + 2 + before + after - extent)
        pads.append(extent - 1 - before)
    if min(*lengths, *w, *x[1:]) < 1:
        return None
    for same in (False, True):
        if same or all((k - 1) * d < n for k, d, n in zip(w, dilations, lengths, strict=False)):
            window = make_window((*lengths, w[2]), w[:2], strides, dilations, same)
            found = (window.pad_top, window.pad_left, window.out_h, window.out_w)
            if found == (*pads, *x[1:3]):
                return window
    return None


def _by_gradient(x: Tensor, w: Tensor, window: Window) -> Tensor:
    """Compute a transposed convolution with the kernels of the convolution's gradients."""
    a, filters = x.array, w.array
    shape = (a.shape[0], window.height, window.width, window.channels)
    # The gradient of the images does not depend on the images.
    unused = workspace.empty(shape, a.dtype)
    y = conv2d_backward(a, unused, filters, None, window, (True, False))[0]
    assert y is not None

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        return (
            conv2d_forward(g, filters, None, window, False) if need[0] else None,
            conv2d_backward(a, g, filters, None, window, (False, True))[1] if need[1] else None,
        )

    return record(y, (x, w), vjp)


@in_float32
def spread_conv2d(
    x: Any, w: Any, strides: tuple[int, int], sides: Sequence[Sides], dilations: tuple[int, int]
) -> Tensor:
    """Convolve images that are spread by the strides with filters rotated by 180 degrees.

    Images are ``[n, height, width, channels]``, filters ``[kernel_h, kernel_w, filters, channels]``.
    The strides are the distances of pixels in the spread images. The sides are the rows of zeros above
    and below, and the columns left and right. The dilations are the steps between the filters' taps.
    """
    images, filters = as_tensor(x), as_tensor(w)
    _check_shapes(images, filters)
    window = _window_of(images.shape, filters.shape, strides, sides, dilations)
    if window is not None and native(images.array, filters.array) is not None:
        return _by_gradient(images, filters, window)
    turned = transpose(filters[::-1, ::-1], [0, 1, 3, 2])
    return conv2d(_spread(images, strides, sides), turned, dilations=dilations)


def _check_shapes(images: Tensor, filters: Tensor) -> None:
    if images.ndim != 4 or filters.ndim != 4 or images.shape[3] != filters.shape[3]:
        raise InvalidArgumentError(
            "conv2d_transpose needs images [n, height, width, channels] and filters [kernel_h, "
            f"kernel_w, filters, channels], got shapes {images.shape} and {filters.shape}"
        )


def conv2d_transpose(
    input: Any,
    filters: Any,
    output_shape: Any,
    strides: Pair,
    padding: str = "SAME",
    data_format: str | None = "NHWC",
    dilations: Pair | None = None,
    name: str | None = None,
) -> Tensor:
    """Return the gradient of a `conv2d` for its images, as ``tf.nn.conv2d_transpose`` does.

    Parameters
    ----------
    input
        The gradient of the convolution's result, ``[n, height, width, channels]``.
    filters
        The convolution's filters, ``[kernel_h, kernel_w, filters, channels]``.
    output_shape
        The shape of the convolution's images, ``[n, out_h, out_w, filters]``, or the two lengths
        ``[out_h, out_w]``.
    strides, padding, data_format, dilations, name
        As in the convolution.

    Returns
    -------
    Tensor
        Images ``[n, out_h, out_w, filters]``.

    Raises
    ------
    ValueError
        No convolution of images of ``output_shape`` has a result of the shape of ``input``. Or a
        shape has another number of axes.
    """
    images, kernel = as_tensor(input), as_tensor(filters)
    check_format("conv2d_transpose", data_format)
    steps, gaps = pair(strides, "strides"), pair(1 if dilations is None else dilations, "dilations")
    same = is_same(padding)
    whole = tuple(int(n) for n in output_shape)
    _check_shapes(images, kernel)
    if len(whole) not in (2, 4):
        raise InvalidArgumentError(
            "conv2d_transpose: output_shape is [n, out_h, out_w, filters] or [out_h, out_w], not "
            f"{list(whole)}"
        )
    lengths = whole[1:3] if len(whole) == 4 else whole
    sides = []
    for place in range(2):
        n, length, step = images.shape[place + 1], lengths[place], steps[place]
        extent = (kernel.shape[place] - 1) * gaps[place] + 1
        if n != -(-(length if same else length - extent + 1) // step):
            raise InvalidArgumentError(
                f"conv2d_transpose: a convolution of images of shape {whole} with filters "
                f"{kernel.shape}, strides {steps} and padding {padding!r} does not have a result of "
                f"shape {images.shape}"
            )
        top = max((n - 1) * step + extent - length, 0) // 2 if same else 0
        before = extent - 1 - top
        sides.append((before, length + extent - 2 - (n - 1) * step - before))
    result = spread_conv2d(images, kernel, steps, sides, gaps)
    if len(whole) == 4 and result.shape != whole:
        raise InvalidArgumentError(
            f"conv2d_transpose: the result has shape {result.shape}, output_shape is {whole}"
        )
    return result
