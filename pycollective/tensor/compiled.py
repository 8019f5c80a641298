"""Operations on host arrays by compiled kernels, which use several threads and reuse memory.

The functions use NumPy for small arrays and for all others that the kernels do not support.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import FLOAT32, Array, array_module, copy, in_c_order, native
from ..workspace import SMALLEST_RESULT, workspace

# With more rows, and with a factor of more elements, BLAS is faster than this package's kernels.
_MOST_ROWS, _LARGEST = 256, 1 << 20


def _in_order(array: Array) -> bool:
    flags = array.flags
    return flags.c_contiguous and flags.aligned and array.dtype.isnative


def _supported(array: Any) -> bool:
    """Return True if an array is large enough for a kernel, and of a kind that kernels support."""
    return (
        array.__class__ is np.ndarray
        and array.nbytes >= SMALLEST_RESULT
        and array.dtype.kind == "f"
        and array.itemsize in (4, 8)
        and _in_order(array)
    )


def put(target: Array, source: Any) -> None:
    """Copy an array, or a number, to all elements of an array of the same dtype; shapes broadcast."""
    if target.__class__ is np.ndarray and target.nbytes >= SMALLEST_RESULT:
        fitting = np.broadcast_to(np.asarray(source, target.dtype), target.shape)
        if kernels.copy(fitting, target):
            return
    target[...] = source


def add_to(target: Array, source: Array, factor: float) -> None:
    """Add an array to another one of the same shape and dtype, or with the factor -1 subtract it."""
    if _supported(target) and _supported(source):
        kernels.add_multiple(source, factor, target, target)
    elif factor == 1.0:
        np.add(target, source, out=target)
    else:
        np.subtract(target, source, out=target)


def placed(source: Array, shape: Sequence[int], where: Any, fill: Any = 0) -> Array:
    """Return an array of ``fill`` in which ``source`` has the basic index ``where``."""
    if source.__class__ is not np.ndarray:
        full: Array = array_module(source).full(shape, fill, source.dtype)
        full[where] = source
        return full
    whole: Array = workspace.empty(tuple(shape), source.dtype)
    put(whole, fill)
    if source.ndim:
        put(whole[where], source)
    else:  # an index of one element gives no view
        whole[where] = source
    return whole


def contiguous(array: Array) -> Array:
    """Return the array if it is in C order and writable, else a copy of it."""
    if array.flags.c_contiguous and getattr(array.flags, "writeable", True):
        return array
    if array.__class__ is not np.ndarray:
        return copy(array)
    fresh = workspace.empty(array.shape, array.dtype)
    put(fresh, array)
    return fresh


def joined(arrays: Sequence[Array], place: int) -> Array:
    """Return arrays of one dtype joined along an axis."""
    if any(array.__class__ is not np.ndarray for array in arrays):
        return np.concatenate(arrays, axis=place)
    ends = [0, *accumulate(array.shape[place] for array in arrays)]
    shape = (*arrays[0].shape[:place], ends[-1], *arrays[0].shape[place + 1 :])
    if prod(shape) * arrays[0].itemsize < SMALLEST_RESULT:
        return np.concatenate(arrays, axis=place)
    whole = workspace.empty(shape, arrays[0].dtype)
    for array, start, end in zip(arrays, ends, ends[1:], strict=False):
        put(whole[(slice(None),) * place + (slice(start, end),)], array)
    return whole


def unary(
    kernel: str,
    forward: Callable[[Any], Any],
    derivative: Callable[[Array, Any, Any], Any],
    *parameters: float,
) -> tuple[Callable[[Any], Any], Callable[[Array, Any, Any], Any]]:
    """Return two functions that use a kernel for the arrays that kernels support."""

    def values(x: Array) -> Any:
        found = native(x)
        if found is None:
            return forward(x)
        y = workspace.empty(x.shape, x.dtype)
        kernels.activation(kernel, *found, y, *parameters)
        return y

    def gradient(g: Array, x: Array, y: Array) -> Any:
        found = native(g, x)
        if found is None:
            return derivative(g, x, y)
        dx = workspace.empty(x.shape, x.dtype)
        kernels.activation_gradient(kernel, *found, dx, *parameters)
        return dx

    return values, gradient


def has_product(x: Array, w: Array) -> bool:
    """Return True if kernels compute the product of two matrices on the host, faster than BLAS."""
    few = len(x) <= _MOST_ROWS or max(x.size, w.size) <= _LARGEST
    return few and x.dtype == w.dtype == FLOAT32


def matrix_product(x: Array, w: Array) -> tuple[Array, Callable[..., list[Array | None]]] | None:
    """Return the product of two matrices, and a function that computes its gradients.

    The function takes the gradient of the product, and two bools: True for a factor that needs its
    gradient. The result is None if this package has no kernel for the matrices, or BLAS is faster.
    """
    on_host = x.__class__ is np.ndarray is w.__class__
    if not (on_host and x.ndim == w.ndim == 2 and x.size and w.size and has_product(x, w)):
        return None
    if not (_in_order(x) and _in_order(w)):
        return None
    y: Array = workspace.empty((len(x), w.shape[1]), x.dtype)
    kernels.dense_forward(x, w, None, y, False)

    def gradients(g: Array, need: Sequence[bool]) -> list[Array | None]:
        parts = [
            workspace.empty(factor.shape, factor.dtype) if needed else None
            for factor, needed in zip((x, w), need, strict=True)
        ]
        kernels.dense_gradient(x, w, in_c_order(g), None, parts[0], parts[1], None)
        return parts

    return y, gradients


def _repeats(a: Any, b: Any) -> bool:
    """Return True if one operand has the result's shape, and the other one repeats along it."""
    long, short = (a, b) if (a.size, a.ndim) >= (b.size, b.ndim) else (b, a)
    if not _supported(long) or short.__class__ is not np.ndarray or short.dtype != long.dtype:
        return False
    rest = list(short.shape)
    while rest and rest[0] == 1:
        del rest[0]
    fits = short.ndim <= long.ndim and long.shape[long.ndim - len(rest) :] == tuple(rest)
    return fits and short.size > 0 and short.flags.c_contiguous and short.flags.aligned


def binary(kernel: str, function: Callable[..., Any], a: Any, b: Any) -> Any:
    """Return ``function(a, b)`` of arrays of one dtype, by the kernel of this name if possible."""
    if not kernel or max(a.nbytes, b.nbytes) < SMALLEST_RESULT or not _repeats(a, b):
        return function(a, b)
    shape = a.shape if (a.size, a.ndim) >= (b.size, b.ndim) else b.shape
    z = workspace.empty(shape, a.dtype)
    kernels.binary(kernel, a, b, z)
    return z


def binary_gradient(
    kernel: str, g: Array, a: Any, b: Any, need: Sequence[bool]
) -> list[Array | None] | None:
    """Return the gradients of both operands in the result's shape, or None without a kernel."""
    if not kernel or not _supported(g) or not _repeats(a, b) or g.dtype != a.dtype:
        return None
    parts = [workspace.empty(g.shape, g.dtype) if needed else None for needed in need]
    kernels.binary_gradient(kernel, g, a, b, *parts)
    return parts


def selected(mask: Array, a: Any, b: Any) -> Any:
    """Return ``numpy.where(mask, a, b)`` of arrays of one dtype."""
    shape = a.shape if (a.size, a.ndim) >= (b.size, b.ndim) else b.shape
    large = mask.size >= SMALLEST_RESULT and mask.flags.c_contiguous and mask.shape == shape
    if not large or not _repeats(a, b):
        return np.where(mask, a, b)
    z = workspace.empty(shape, a.dtype)
    kernels.select(mask, a, b, z)
    return z


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return True for float16 and bfloat16."""
    return dtype.itemsize == 2 and dtype.kind in "fV"


def narrowed(wide: Any, dtype: np.dtype[Any]) -> Any:
    """Return float32 numbers in a half dtype; numbers that are too large become infinite."""
    with np.errstate(over="ignore"):
        return wide.astype(dtype)


def reduced(name: str, a: Array, axes: tuple[int, ...], keepdims: bool = False) -> Any:
    """Return the sums, maxima, minima or products along axes.

    ``name`` is NumPy's method: ``"sum"``, ``"max"``, ``"min"`` or ``"prod"``. Sums and products of
    halves are computed in float32: in half precision, many small summands would be lost.
    """
    if not axes or not _supported(a):
        if is_half(a.dtype) and name in ("sum", "prod"):
            wide = getattr(a, name)(axis=axes, keepdims=keepdims, dtype=np.float32)
            return narrowed(wide, a.dtype)
        kind = {"dtype": a.dtype} if name in ("sum", "prod") else {}
        return getattr(a, name)(axis=axes, keepdims=keepdims, **kind)
    shape = list(a.shape)
    end = a.ndim
    # One pass reduces a run of adjacent axes; the runs are reduced from the last one to the first.
    while end:
        first = end
        while first and first - 1 in axes:
            first -= 1
        if first < end:
            sizes = prod(shape[:first]), prod(shape[first:end]), prod(shape[end:])
            shape[first:end] = [1] * (end - first)
            total = workspace.empty(tuple(shape), a.dtype)
            kernels.reduce(name, a, total, *sizes)
            a = total
        end = max(first - 1, 0)
    kept = a if keepdims else a.reshape([n for i, n in enumerate(shape) if i not in axes])
    return kept if kept.ndim else kept[()]


def extremum_gradient(a: Array, top: Any, g: Any, axes: tuple[int, ...]) -> Array | None:
    """Return the gradient of the maxima or minima ``top`` along axes, or None without a kernel."""
    run = sorted(axes)
    if not run or run[-1] - run[0] != len(run) - 1 or not _supported(a) or g.dtype != a.dtype:
        return None
    sizes = (
        prod(a.shape[: run[0]]),
        prod(a.shape[run[0] : run[-1] + 1]),
        prod(a.shape[run[-1] + 1 :]),
    )
    dx: Array = workspace.empty(a.shape, a.dtype)
    kernels.extremum_gradient(a, np.ascontiguousarray(top), np.ascontiguousarray(g), dx, *sizes)
    return dx
