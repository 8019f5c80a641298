"""Max pooling on a GPU, with one kernel in each direction.

Array functions would take ten passes over memory, and eight bytes for the position of each maximum.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..array_backend import REAL_DTYPES, Array, empty, in_c_order, on_host
from ..gpu_kernels import defines, index_type, launch
from .window import Window

_SHAPE = np.dtype(
    [
        (name, np.int32)
        for name in (
            *("height", "width", "channels", "out_h", "out_w", "kernel_h", "kernel_w"),
            *("stride_h", "stride_w", "pad_top", "pad_left", "unused"),
        )
    ]
)

_SOURCE = """
struct Shape {
  int height, width, channels, out_h, out_w, kernel_h, kernel_w;
  int stride_h, stride_w, pad_top, pad_left, unused;
};

#ifdef HALF
// Halves are compared by their bits: sign and magnitude.
typedef unsigned short Number;
__device__ bool is_nan(Number value) { return (value & 0x7fff) > 0x7c00; }
__device__ int rank_of(Number value) { return value >> 15 ? -(value & 0x7fff) : value; }
// Windows of halves do not overlap.
__device__ void add(Number* total, Number value) { *total = value; }
#else
typedef REAL Number;
__device__ bool is_nan(Number value) { return value != value; }
__device__ Number rank_of(Number value) { return value; }
__device__ void add(Number* total, Number value) { *total += value; }
#endif

extern "C" __global__ void max_pool(const Number* x, Number* y, unsigned char* codes,
                                    const Shape s, long long size) {
  const INDEX count = static_cast<INDEX>(size);
  EACH_ELEMENT(i, count) {
    const INDEX channel = i % s.channels, place = i / s.channels;
    const int across = place % s.out_w, down = place / s.out_w % s.out_h;
    const INDEX image = place / s.out_w / s.out_h;
    const int top = down * s.stride_h - s.pad_top, left = across * s.stride_w - s.pad_left;
    Number best = 0;
    int code = -1;
    for (int ky = 0; ky < s.kernel_h; ++ky) {
      const int row = top + ky;
      if (row < 0 || row >= s.height) continue;
      for (int kx = 0; kx < s.kernel_w; ++kx) {
        const int column = left + kx;
        if (column < 0 || column >= s.width) continue;
        const Number value = x[((image * s.height + row) * s.width + column) * s.channels + channel];
        if (code < 0 || (!is_nan(best) && (is_nan(value) || rank_of(value) > rank_of(best)))) {
          best = value;
          code = ky * s.kernel_w + kx;
        }
      }
    }
    y[i] = best;
    codes[i] = static_cast<unsigned char>(code);
  }
}

extern "C" __global__ void max_pool_gradient(const Number* g, const unsigned char* codes, Number* dx,
                                             const Shape s, long long size) {
  const INDEX count = static_cast<INDEX>(size);
  EACH_ELEMENT(i, count) {
    const INDEX channel = i % s.channels, place = i / s.channels;
    const int top = static_cast<int>(place / s.width % s.height) + s.pad_top;
    const int left = static_cast<int>(place % s.width) + s.pad_left;
    const INDEX image = place / s.width / s.height;
    // The windows that this pixel is in.
    const int first_down = top < s.kernel_h ? 0 : (top - s.kernel_h) / s.stride_h + 1;
    const int first_across = left < s.kernel_w ? 0 : (left - s.kernel_w) / s.stride_w + 1;
    Number total = 0;
    for (int down = first_down; down < s.out_h && down * s.stride_h <= top; ++down) {
      for (int across = first_across; across < s.out_w && across * s.stride_w <= left; ++across) {
        const INDEX at = ((image * s.out_h + down) * s.out_w + across) * s.channels + channel;
        const int tap = (top - down * s.stride_h) * s.kernel_w + left - across * s.stride_w;
        if (codes[at] == tap) add(&total, g[at]);
      }
    }
    dx[i] = total;
  }
}
"""

_KINDS = REAL_DTYPES | {np.dtype(np.float16)}


@functools.cache
def source(dtype: np.dtype[Any], index: str) -> str:
    """Return the kernels' CUDA C++ source for a type of numbers and a type of indices."""
    return defines(dtype, index) + _SOURCE


def _launch(name: str, of: Array, *arrays: Array, window: Window, image: tuple[int, ...]) -> None:
    """Launch a kernel that computes each element of ``of``, one of its arrays."""
    shape = np.zeros(1, _SHAPE)
    shape["height"], shape["width"], shape["channels"] = image[1:]
    for field in ("out_h", "out_w", "kernel_h", "kernel_w", "stride_h", "stride_w"):
        shape[field] = getattr(window, field)
    shape["pad_top"], shape["pad_left"] = window.pad_top, window.pad_left
    text = source(np.dtype(of.dtype), index_type(arrays))
    launch(text, name, of.size, of, (*arrays, shape, np.int64(of.size)))


def fits(x: Array, window: Window) -> bool:
    """Return True if the kernels support these images."""
    disjoint = window.stride_h >= window.kernel_h and window.stride_w >= window.kernel_w
    return (
        not on_host(x)
        and x.dtype in _KINDS
        and window.kernel_h * window.kernel_w < 255
        and (disjoint or x.dtype != np.float16)
    )


def forward(x: Array, window: Window) -> tuple[Array, Array]:
    """Return the maxima, and the tap of each window that held its maximum; `fits` must hold."""
    images = in_c_order(x)
    shape = (x.shape[0], window.out_h, window.out_w, x.shape[3])
    y, codes = empty(shape, x.dtype, x), empty(shape, np.uint8, x)
    _launch("max_pool", y, images, y, codes, window=window, image=x.shape)
    return y, codes


def backward(g: Array, codes: Array, shape: tuple[int, ...], window: Window) -> Array:
    """Return the gradient of images of the given shape, from the codes that `forward` returned."""
    upstream = in_c_order(g)
    dx = empty(shape, g.dtype, g)
    _launch("max_pool_gradient", dx, upstream, codes, dx, window=window, image=shape)
    return dx
