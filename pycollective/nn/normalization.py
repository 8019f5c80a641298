"""Means and variances, and normalization by them: batch and layer normalization."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array, array_module, in_c_order, native
from ..tensor import ops
from ..tensor.ops._define import differentiable
from ..tensor.ops.reductions import axes_of
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor
from ..workspace import workspace
from . import normalization_on_gpu
from .sums import column_sums

__all__ = ["batch_normalization", "layer_normalization", "moments", "normalize_batch"]

# Blocks of rows take about this many bytes, so that they are still in cache at their second use.
_BLOCK_BYTES = 1 << 18
# The most rows whose float32 sum is accurate enough.
_BLOCK_ROWS = 4096


@differentiable
def moments(x: Any, axes: Any, shift: Any = None, keepdims: bool = False) -> tuple[Tensor, Tensor]:
    """Return mean and variance over ``axes``, as ``tf.nn.moments`` does.

    Parameters
    ----------
    x
        A floating-point tensor.
    axes
        An axis, several axes, or None for all.
    shift
        Has no effect; accepted for compatibility with TensorFlow. The mean itself is subtracted.
    keepdims : bool
        Keep the axes, with length 1.

    Returns
    -------
    tuple of Tensor
        The mean, and the mean of the squared distances from it.
    """
    values = as_tensor(x)
    mean = ops.reduce_mean(values, axes, keepdims=True)
    # The sum of the distances from the mean is 0, so that no gradient flows through the mean.
    squares = ops.squared_difference(values, ops.stop_gradient(mean))
    variance = ops.reduce_mean(squares, axes, keepdims=keepdims)
    return (mean if keepdims else ops.reshape(mean, variance.shape)), variance


@differentiable
def batch_normalization(
    x: Any, mean: Any, variance: Any, offset: Any, scale: Any, variance_epsilon: float
) -> Tensor:
    """Return ``scale * (x - mean) / sqrt(variance + variance_epsilon) + offset``.

    As ``tf.nn.batch_normalization``: the other arguments broadcast against ``x``, and ``offset`` and
    ``scale`` may be None.
    """
    factor = ops.rsqrt(as_tensor(variance) + variance_epsilon)
    if scale is not None:
        factor = factor * scale
    shift = as_tensor(mean) * factor
    return as_tensor(x) * factor + (-shift if offset is None else offset - shift)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which the statistics of a dtype are computed."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _empty(like: Array) -> Array:
    if like.__class__ is np.ndarray:
        return workspace.empty(like.shape, like.dtype)
    return np.empty_like(like)


def _blocks(rows: Array) -> Iterator[slice]:
    """Yield blocks of rows; on a device there is one block of all rows."""
    count = len(rows)
    step = max(count, 1)
    if rows.__class__ is np.ndarray:
        step = _BLOCK_BYTES // max(rows.itemsize * rows.shape[1], 1)
        step = min(max(step, 1), _BLOCK_ROWS)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _column_sums(blocks: Iterator[Array], like: Array) -> Array:
    """Return the sums of the columns over blocks of rows; BLAS adds the rows of a block."""
    xp = array_module(like)
    sums = (np.matmul(xp.ones(len(block), like.dtype), block) for block in blocks)
    if xp is not np:
        only: Array | None = next(sums, None)
        return xp.zeros(like.shape[1], like.dtype) if only is None else only
    total = np.zeros(like.shape[1], np.float64)
    for part in sums:
        total += part
    return total.astype(like.dtype, copy=False)


def _rows(values: Array, channels: int) -> Array:
    """Return ``[..., channels]`` as rows, in the layout of the kernels that can handle them."""
    rows: Array = values.reshape(values.size // max(channels, 1), channels)
    if rows.__class__ is np.ndarray:
        found = native(rows)
        return rows if found is None else found[0]
    return rows if rows.flags.c_contiguous else array_module(rows).ascontiguousarray(rows)


def _statistics(rows: Array) -> tuple[Array, Array]:
    """Return mean and variance of the columns, 0 if there are no rows."""
    if rows.shape[1] and native(rows) is not None:
        mean, variance = (np.empty(rows.shape[1], rows.dtype) for _ in range(2))
        kernels.batch_moments(rows, mean, variance)
        return mean, variance
    count = rows.dtype.type(max(len(rows), 1))
    mean = _column_sums((rows[block] for block in _blocks(rows)), rows) / count
    squares = (np.square(rows[block] - mean) for block in _blocks(rows))
    return mean, _column_sums(squares, rows) / count


def _gradient_sums(
    g: Array, rows: Array, mean: Array, cut: Sequence[Array] = ()
) -> tuple[Array, Array]:
    """Return the sums of the columns of ``g`` and of ``g * (rows - mean)``.

    ``cut`` is a factor and a shift, or empty. With a factor and a shift, which only kernels support, the
    sums include ``g`` only where ``(rows - mean) * factor + shift`` is positive.
    """
    if rows.shape[1] and native(g, rows, mean) is not None:
        sums, products = (np.empty(rows.shape[1], rows.dtype) for _ in range(2))
        kernels.batch_sums(g, rows, mean, sums, products, *cut)
        return sums, products
    if normalization_on_gpu.fits(g, rows, mean) and rows.shape[1]:
        return normalization_on_gpu.gradient_sums(g, rows, mean, cut)
    parts = (g[block] * (rows[block] - mean) for block in _blocks(rows))
    return _column_sums((g[block] for block in _blocks(rows)), rows), _column_sums(parts, rows)


def _scaled(
    rows: Array,
    mean: Array,
    factor: Array,
    shift: Array | None,
    more: Array | None = None,
    by_more: Array | None = None,
    *,
    relu: bool = False,
    cut: Sequence[Array] = (),
) -> Array:
    """Return ``(rows - mean) * factor + shift``, plus ``more * by_more``.

    Only kernels support ``relu``, and ``cut``, which masks ``more`` as in `_gradient_sums`.
    """
    on_gpu = rows.__class__ is not np.ndarray and rows.shape[1]
    if on_gpu and normalization_on_gpu.fits(rows, mean, factor, shift, more, by_more):
        if more is None or by_more is None or shift is None:
            return normalization_on_gpu.scale(rows, mean, factor, shift, relu)
        return normalization_on_gpu.combine(more, rows, mean, by_more, factor, shift, cut)
    y = _empty(rows)
    if rows.shape[1] and native(rows, factor) is not None:
        if shift is None:
            shift = np.zeros_like(factor)
        if more is None or by_more is None:
            kernels.batch_scale(rows, mean, factor, shift, y, relu)
        else:
            kernels.batch_combine(more, rows, mean, by_more, factor, shift, y, *cut)
        return y
    for block in _blocks(rows):
        part = y[block]
        np.subtract(rows[block], mean, out=part)
        part *= factor
        if more is not None:
            part += more[block] * by_more
        if shift is not None:
            part += shift
    return y


def _optional(value: Any, dtype: np.dtype[Any]) -> tuple[tuple[Tensor, ...], Array | None]:
    """Return an optional tensor as inputs of an operation, and as an array or None."""
    if value is None:
        return (), None
    tensor = as_tensor(value)
    return (tensor,), tensor.array.astype(dtype, copy=False).reshape(-1)


def _parameters(
    name: str, size: int, scale: Any, offset: Any, dtype: np.dtype[Any]
) -> tuple[tuple[Tensor, ...], Array | None, Array | None]:
    scales, factor = _optional(scale, dtype)
    offsets, shift = _optional(offset, dtype)
    for array in (factor, shift):
        if array is not None and array.size != size:
            raise ValueError(f"{name}: scale and offset need {size} numbers, got {array.size}")
    return (*scales, *offsets), factor, shift


def _like(gradients: Sequence[Array | None], inputs: Sequence[Tensor]) -> list[Array | None]:
    """Return gradients in the shapes and dtypes of their inputs."""
    return [
        None if g is None else g.astype(t.dtype, copy=False).reshape(t.shape)
        for g, t in zip(gradients, inputs, strict=True)
    ]


@differentiable
def normalize_batch(
    x: Any,
    scale: Any = None,
    offset: Any = None,
    epsilon: float = 1e-3,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize each channel (index of the last axis) by its mean and variance over all other axes.

    The result is ``scale * (x - mean) / sqrt(variance + epsilon) + offset``. Gradients flow through mean
    and variance, in few passes over memory (Ioffe and Szegedy, 2015).

    Parameters
    ----------
    x
        ``[..., channels]``, floating point. Halves are computed in float32.
    scale, offset
        ``[channels]`` or None.
    epsilon : float
        Added to the variance.
    activation : str, optional
        ``"relu"`` replaces negative results by 0 in the same passes.

    Returns
    -------
    tuple of Tensor
        The result, in the shape and dtype of ``x``. Mean and variance, ``[channels]``, as constants in
        float32 or float64; both are 0 if ``x`` is empty.

    Raises
    ------
    TypeError
        ``x`` does not have a floating-point dtype.
    ValueError
        ``x`` has no axis, ``scale`` or ``offset`` has another size, or ``activation`` is unknown.
    """
    if activation not in (None, "relu"):
        raise ValueError(f"activation must be None or 'relu', got {activation!r}")
    images = as_tensor(x)
    a = images.array
    if a.dtype.kind not in "fV":
        raise TypeError(f"normalize_batch needs a floating-point tensor, got {a.dtype}; use cast()")
    if not a.ndim:
        raise ValueError("normalize_batch needs at least one axis, the channels")
    channels = a.shape[-1]
    dtype = _wide(a.dtype)
    parameters, factor, shift = _parameters("normalize_batch", channels, scale, offset, dtype)
    rows = _rows(a.astype(dtype, copy=False), channels)
    count = dtype.type(max(len(rows), 1))
    on_gpu = channels > 0 and normalization_on_gpu.fits(rows, factor, shift)
    if on_gpu:
        mean, variance, inverse, slope = normalization_on_gpu.moments(rows, factor, epsilon)
    else:
        mean, variance = _statistics(rows)
        inverse = 1 / np.sqrt(variance + dtype.type(epsilon))
        slope = inverse if factor is None else inverse * factor
    relu = activation is not None
    # The kernels need `cut` to compute the mask of relu again; others use the result `y`.
    by_kernel = on_gpu or (channels > 0 and native(rows, slope) is not None)
    cut = (slope, np.zeros_like(slope) if shift is None else shift) if relu and by_kernel else ()
    y = _scaled(rows, mean, slope, shift, relu=relu)
    if relu and not by_kernel:
        y = np.maximum(y, y.dtype.type(0))

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        upstream = _rows(g.astype(dtype, copy=False), channels)
        if relu and not by_kernel:
            upstream = upstream * (y > 0)
        sums, products = _gradient_sums(upstream, rows, mean, cut)
        along_factor: Array | None
        if on_gpu:
            by_rows, constant, along_factor = normalization_on_gpu.gradient_factors(
                sums, products, inverse, slope, count
            )
        else:
            by_rows = -(slope * products * (inverse * inverse / count))
            constant = -slope * sums / count
            along_factor = None if factor is None else products * inverse
        dx = None
        if need[0]:
            dx = _scaled(rows, mean, by_rows, constant, upstream, slope, cut=cut).reshape(a.shape)
        by_factor = [] if factor is None else [along_factor]
        by_shift = [] if shift is None else [sums]
        return _like([dx, *by_factor, *by_shift], inputs)

    inputs = (images, *parameters)
    result = record(y.reshape(a.shape).astype(a.dtype, copy=False), inputs, vjp)
    return result, Tensor(mean), Tensor(variance)


@differentiable
def layer_normalization(
    x: Any, scale: Any = None, offset: Any = None, axis: Any = -1, epsilon: float = 1e-3
) -> Tensor:
    """Normalize each example by the mean and variance of its elements along ``axis``.

    ``scale * (x - mean) / sqrt(variance + epsilon) + offset`` (Ba et al., 2016).

    Parameters
    ----------
    x
        Floating point. Halves are computed in float32.
    scale, offset
        As many numbers as elements along ``axis``, or None.
    axis
        An axis, or several.
    epsilon : float
        Added to the variance.

    Returns
    -------
    Tensor
        A tensor in the shape and dtype of ``x``.

    Raises
    ------
    TypeError
        ``x`` does not have a floating-point dtype.
    ValueError
        An axis does not exist, or ``scale`` or ``offset`` has another size.
    """
    values = as_tensor(x)
    axes = sorted(axes_of(axis, values.ndim, "layer_normalization"))
    rest = [i for i in range(values.ndim) if i not in axes]
    order = rest + axes
    if order == list(range(values.ndim)):
        return _normalize_rows(values, scale, offset, len(rest), epsilon)
    moved = _normalize_rows(ops.transpose(values, order), scale, offset, len(rest), epsilon)
    return ops.transpose(moved, np.argsort(order).tolist())


def _normalize_rows(x: Tensor, scale: Any, offset: Any, lead: int, epsilon: float) -> Tensor:
    """Normalize over all axes from number ``lead`` on."""
    a = x.array
    if a.dtype.kind not in "fV":
        raise TypeError(
            f"layer_normalization needs a floating-point tensor, got {a.dtype}; use cast()"
        )
    dtype = _wide(a.dtype)
    size = int(np.prod(a.shape[lead:]))
    parameters, factor, shift = _parameters("layer_normalization", size, scale, offset, dtype)
    rows = a.astype(dtype, copy=False).reshape(a.size // max(size, 1), size)
    inputs = (x, *parameters)
    if size and (found := native(rows, factor, shift)) is not None:
        return _normalize_by_kernel(inputs, *found, epsilon)
    count = dtype.type(max(size, 1))

    def mean_of(values: Array) -> Array:
        mean: Array = values.sum(axis=1, keepdims=True) / count
        return mean

    normal = rows - mean_of(rows)
    inverse = 1 / np.sqrt(mean_of(normal * normal) + dtype.type(epsilon))
    normal *= inverse
    y = normal if factor is None else normal * factor
    if shift is not None:
        y = y + shift

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        upstream = g.astype(dtype, copy=False).reshape(rows.shape)
        dx = None
        if need[0]:
            scaled = upstream if factor is None else upstream * factor
            along = normal * mean_of(scaled * normal)
            dx = (inverse * (scaled - mean_of(scaled) - along)).reshape(a.shape)
        by_factor = [] if factor is None else [column_sums(upstream * normal)]
        by_shift = [] if shift is None else [column_sums(upstream)]
        return _like([dx, *by_factor, *by_shift], inputs)

    return record(y.reshape(a.shape).astype(a.dtype, copy=False), inputs, vjp)


def _normalize_by_kernel(
    inputs: tuple[Tensor, ...],
    rows: Array,
    factor: Array | None,
    shift: Array | None,
    epsilon: float,
) -> Tensor:
    """Normalize rows that kernels support."""
    a, (count, size) = inputs[0].array, rows.shape
    y = _empty(rows)
    means, inverses = (np.empty(count, rows.dtype) for _ in range(2))
    by = np.ones(size, rows.dtype) if factor is None else factor
    plus = np.zeros(size, rows.dtype) if shift is None else shift
    kernels.normalize_rows(rows, by, plus, y, means, inverses, epsilon)

    def vjp(g: Array, _need: tuple[bool, ...]) -> Sequence[Any]:
        upstream = in_c_order(g.astype(rows.dtype, copy=False).reshape(rows.shape))
        dx, sums = _empty(rows), [np.empty(size, rows.dtype) for _ in range(2)]
        kernels.normalize_rows_gradient(upstream, rows, by, means, inverses, dx, *sums)
        present = [s for s, given in zip(sums, (factor, shift), strict=True) if given is not None]
        return _like([dx, *present], inputs)

    return record(y.reshape(a.shape).astype(a.dtype, copy=False), inputs, vjp)
