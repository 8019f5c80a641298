"""Means and variances, and normalization by them: batch and layer normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _nn as kernels
from ..array_backend import Array, in_c_order, native, on_host
from ..errors import InvalidArgumentError
from ..tensor import ops
from ..tensor.ops._define import differentiable
from ..tensor.ops.reductions import axes_of
from ..tensor.tape import record
from ..tensor.tensor import Tensor, as_tensor
from ..workspace import workspace
from . import normalization_on_gpu
from .sums import column_sums

__all__ = [
    "batch_normalization",
    "layer_normalization",
    "moments",
    "moved_average",
    "normalize_batch",
]


@differentiable
def moments(
    x: Any, axes: Any, shift: Any = None, keepdims: bool = False, name: str | None = None
) -> tuple[Tensor, Tensor]:
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
    channels = _moments_of_channels(values, axes, keepdims)
    if channels is not None:
        return channels
    mean = ops.reduce_mean(values, axes, keepdims=True)
    # The sum of the distances from the mean is 0, so that no gradient flows through the mean.
    squares = ops.squared_difference(values, ops.stop_gradient(mean))
    variance = ops.reduce_mean(squares, axes, keepdims=keepdims)
    return (mean if keepdims else ops.reshape(mean, variance.shape)), variance


def _moments_of_channels(x: Tensor, axes: Any, keepdims: bool) -> tuple[Tensor, Tensor] | None:
    """Return mean and variance by a kernel; None if ``axes`` are not all axes but the last.

    The result is None too if the kernels do not support the array.
    """
    a = x.array
    last = a.ndim - 1
    if last < 1 or not a.size or sorted(axes_of(axes, a.ndim, "moments")) != list(range(last)):
        return None
    found = native(a)
    if found is None:
        return None
    channels = a.shape[-1]
    rows = found[0].reshape(-1, channels)
    mean, variance = np.empty(channels, a.dtype), np.empty(channels, a.dtype)
    kernels.batch_moments(rows, mean, variance)
    shape = (1,) * last + (channels,) if keepdims else (channels,)
    share = a.dtype.type(1 / len(rows))

    def by_mean(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        return (np.broadcast_to(g.reshape(channels) * share, a.shape),)

    def by_variance(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        dx: Array = workspace.empty(rows.shape, a.dtype)
        factor = g.reshape(channels) * (share + share)
        kernels.normalize_batch(rows, factor, None, mean, np.ones_like(mean), dx, 0.0)
        return (dx.reshape(a.shape),)

    return (
        record(mean.reshape(shape), (x,), by_mean),
        record(variance.reshape(shape), (x,), by_variance),
    )


@differentiable
def batch_normalization(
    x: Any,
    mean: Any,
    variance: Any,
    offset: Any,
    scale: Any,
    variance_epsilon: float,
    name: str | None = None,
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
            raise InvalidArgumentError(
                f"{name}: scale and offset need {size} numbers, got {array.size}"
            )
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
    moments: tuple[Any, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize each channel (index of the last axis) by its mean and variance over all other axes.

    The result is ``scale * (x - mean) / sqrt(variance + epsilon) + offset``. Gradients flow through mean
    and variance (Ioffe and Szegedy, 2015).

    Parameters
    ----------
    x
        ``[..., channels]``, floating point. Half-precision types are computed in float32.
    scale, offset
        ``[channels]`` or None.
    epsilon : float
        Added to the variance.
    activation : str, optional
        ``"relu"`` replaces negative results by 0 in the same passes.
    moments : tuple of tensor, optional
        Mean and variance, ``[channels]``, instead of those of ``x``. No gradient flows to them.

    Returns
    -------
    tuple of Tensor
        The result, in the shape and dtype of ``x``. Mean and variance, ``[channels]``, as constants in
        float32 or float64; both are 0 if ``x`` is empty.

    Raises
    ------
    TypeError
        ``x`` does not have a floating-point dtype, or the tensors are on different devices.
    ValueError
        ``x`` has no axis, ``scale``, ``offset`` or a moment has another size, or ``activation`` is
        unknown.
    """
    if activation not in (None, "relu"):
        raise InvalidArgumentError(f"activation must be None or 'relu', got {activation!r}")
    images = as_tensor(x)
    a = images.array
    if a.dtype.kind not in "fV":
        raise TypeError(f"normalize_batch needs a floating-point tensor, got {a.dtype}; use cast()")
    if not a.ndim:
        raise InvalidArgumentError("normalize_batch needs at least one axis, the channels")
    channels = a.shape[-1]
    dtype = _wide(a.dtype)
    parameters, factor, shift = _parameters("normalize_batch", channels, scale, offset, dtype)
    inputs = (images, *parameters)
    rows = a.astype(dtype, copy=False).reshape(a.size // max(channels, 1), channels)
    known = None
    if moments is not None:
        mean, variance = (_optional(value, dtype)[1] for value in moments)
        assert mean is not None and variance is not None
        if {mean.size, variance.size} != {channels}:
            raise InvalidArgumentError(
                f"normalize_batch: moments need {channels} numbers each, got {mean.size} and "
                f"{variance.size}"
            )
        known = mean, variance
    normalized = _batch_by_kernel if on_host(rows) else normalization_on_gpu.normalized
    relu = activation is not None
    y, mean, variance, gradients = normalized(rows, factor, shift, known, epsilon, relu)

    def vjp(g: Array, need: tuple[bool, ...]) -> Sequence[Any]:
        upstream = g.astype(dtype, copy=False).reshape(rows.shape)
        dx, by_factor, by_shift = gradients(upstream, need[0])
        present = [
            found for found, given in ((by_factor, factor), (by_shift, shift)) if given is not None
        ]
        return _like([None if dx is None else dx.reshape(a.shape), *present], inputs)

    result = record(y.reshape(a.shape).astype(a.dtype, copy=False), inputs, vjp)
    return result, Tensor(mean), Tensor(variance)


def _batch_by_kernel(
    rows: Array,
    factor: Array | None,
    shift: Array | None,
    known: tuple[Array, Array] | None,
    epsilon: float,
    relu: bool,
) -> normalization_on_gpu.Normalized:
    """Normalize the columns; see `normalization_on_gpu.normalized`."""
    channels = rows.shape[1]
    moments = known or (np.empty(channels, rows.dtype), np.empty(channels, rows.dtype))
    found = native(rows, factor, shift, *moments)
    if found is None:
        raise TypeError("normalize_batch: x and its factors must be on the same device")
    arrays = found
    y = workspace.empty(rows.shape, rows.dtype)
    if channels:
        if known is None:
            kernels.batch_moments(arrays[0], *moments)
        kernels.normalize_batch(*arrays, y, epsilon, relu)

    def gradients(g: Array, needs_dx: bool) -> tuple[Array | None, Array, Array]:
        dx = workspace.empty(rows.shape, rows.dtype) if needs_dx else None
        by_factor, by_shift = (np.empty(channels, rows.dtype) for _ in range(2))
        if channels:
            about = epsilon, relu, known is not None
            kernels.normalize_batch_gradient(
                in_c_order(g), *arrays, dx, by_factor, by_shift, *about
            )
        return dx, by_factor, by_shift

    return y, *moments, gradients


def moved_average(average: Array, value: Array, weight: Any) -> Array:
    """Return a moving average after one more value: ``average + (value - average) * weight``.

    Parameters
    ----------
    average, value
        Arrays of one shape. The result has the dtype of ``average``.
    weight
        The weight of the value, between 0 and 1: a number, or an array without axes.
    """
    found = native(average, value)
    if found is None:
        step = (value - average.astype(value.dtype, copy=False)) * weight
        moved: Array = average + step.astype(average.dtype, copy=False)
        return moved
    moved = np.empty(average.shape, average.dtype)
    kernels.move_average(*found, moved, float(weight))
    return moved


@differentiable
def layer_normalization(
    x: Any, scale: Any = None, offset: Any = None, axis: Any = -1, epsilon: float = 1e-3
) -> Tensor:
    """Normalize each example by the mean and variance of its elements along ``axis``.

    The result is ``scale * (x - mean) / sqrt(variance + epsilon) + offset`` (Ba et al., 2016).

    Parameters
    ----------
    x
        Floating point. Half-precision types are computed in float32.
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
    y = workspace.empty(rows.shape, rows.dtype)
    means, inverses = (np.empty(count, rows.dtype) for _ in range(2))
    by = np.ones(size, rows.dtype) if factor is None else factor
    plus = np.zeros(size, rows.dtype) if shift is None else shift
    kernels.normalize_rows(rows, by, plus, y, means, inverses, epsilon)

    def vjp(g: Array, _need: tuple[bool, ...]) -> Sequence[Any]:
        upstream = in_c_order(g.astype(rows.dtype, copy=False).reshape(rows.shape))
        dx = workspace.empty(rows.shape, rows.dtype)
        sums = [np.empty(size, rows.dtype) for _ in range(2)]
        kernels.normalize_rows_gradient(upstream, rows, by, means, inverses, dx, *sums)
        present = [s for s, given in zip(sums, (factor, shift), strict=True) if given is not None]
        return _like([dx, *present], inputs)

    return record(y.reshape(a.shape).astype(a.dtype, copy=False), inputs, vjp)
