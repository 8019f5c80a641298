"""Operations on shapes, parts and dtypes, and tensors of given values."""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
from math import prod
from typing import Any

import numpy as np

from ...array_backend import (
    Array,
    array_module,
    copy,
    is_array,
    on_host,
)
from ...dtypes import as_dtype, float32
from ...errors import InvalidArgumentError
from ...workspace import workspace
from ..compiled import contiguous, placed, put, reduced
from ..tape import record
from ..tensor import Tensor, as_tensor, is_plain
from ._define import differentiable, sum_to_shape
from .reductions import axes_of

__all__ = [
    "broadcast_to",
    "cast",
    "constant",
    "convert_to_tensor",
    "expand_dims",
    "eye",
    "fill",
    "identity",
    "newaxis",
    "one_hot",
    "ones",
    "ones_like",
    "pad",
    "range",
    "rank",
    "reshape",
    "shape",
    "size",
    "squeeze",
    "stop_gradient",
    "tile",
    "transpose",
    "zeros",
    "zeros_like",
]

newaxis = None

# Making tensors ----------------------------------------------------------------------------------


def constant(value: Any, dtype: Any = None, shape: Any = None, name: str | None = None) -> Tensor:
    """Return a tensor of a copy of ``value``.

    Parameters
    ----------
    value
        A scalar, list or array. Python floats become float32 and ints int32; arrays keep their
        dtype.
    dtype
        The dtype of the result.
    shape
        The shape of the result; a value with one element fills it.
    name : str, optional
        Has no effect; accepted for compatibility with TensorFlow.

    Raises
    ------
    ValueError
        ``value`` has more than one element, and another number of elements than ``shape``.
    """
    array = as_tensor(value, dtype).array
    if shape is not None:
        target = shape_of(shape)
        if array.size == 1:
            array = np.broadcast_to(array.reshape(()), target)
        elif array.size != prod(target):
            raise InvalidArgumentError(
                f"constant: a value of shape {array.shape} does not fit shape {target}"
            )
        else:
            array = array.reshape(target)
    # NumPy copies numbers and lists; tensors do not change; other objects share their memory.
    fresh = isinstance(value, (bool, int, float, list, tuple, np.generic, Tensor))
    return Tensor(array if fresh and shape is None else copy(array))


def convert_to_tensor(
    value: Any, dtype: Any = None, dtype_hint: Any = None, name: str | None = None
) -> Tensor:
    """Return ``value`` as a tensor; an array is shared, not copied (see `as_tensor`).

    The result has the dtype ``dtype_hint`` if ``value`` can be converted to it. ``name`` has no effect.
    """
    if dtype is None and dtype_hint is not None:
        with contextlib.suppress(TypeError, ValueError):
            return as_tensor(value, dtype_hint)
    return as_tensor(value, dtype)


def shape_of(value: Any) -> tuple[int, ...]:
    """Return a shape that is a number, a tensor, or a list of numbers and tensors, as a tuple."""
    if isinstance(value, Tensor):
        value = value.array.tolist()
    items = value if isinstance(value, (list, tuple, np.ndarray)) else [value]
    try:
        return tuple(map(operator.index, items))
    except TypeError:
        raise TypeError(f"a shape must be a whole number or several, not {value!r}") from None


def _sizes_of(value: Any, name: str) -> tuple[int, ...]:
    sizes = shape_of(value)
    if any(n < 0 for n in sizes):
        raise InvalidArgumentError(f"{name}: shape {sizes} has a negative length")
    return sizes


def zeros(shape: Any, dtype: Any = float32, name: str | None = None) -> Tensor:
    """Return a tensor of zeros."""
    return Tensor(np.zeros(_sizes_of(shape, "zeros"), as_dtype(dtype)))


def ones(shape: Any, dtype: Any = float32, name: str | None = None) -> Tensor:
    """Return a tensor of ones."""
    array = workspace.empty(_sizes_of(shape, "ones"), as_dtype(dtype))
    put(array, 1)
    return Tensor(array)


def fill(dims: Any, value: Any, name: str | None = None) -> Tensor:
    """Return a tensor of shape ``dims`` whose elements are ``value``, a scalar."""
    sizes, scalar = _sizes_of(dims, "fill"), as_tensor(value)
    if scalar.ndim:
        raise InvalidArgumentError(f"fill: the value must be a scalar, not of shape {scalar.shape}")
    return constant(value, shape=sizes) if is_plain(value) else broadcast_to(scalar, sizes)


def zeros_like(input: Any, dtype: Any = None, name: str | None = None) -> Tensor:
    """Return zeros in the shape of ``input``, by default in its dtype."""
    a = as_tensor(input).array
    return Tensor(array_module(a).zeros(a.shape, a.dtype if dtype is None else as_dtype(dtype)))


def ones_like(input: Any, dtype: Any = None, name: str | None = None) -> Tensor:
    """Return ones in the shape of ``input``, by default in its dtype."""
    a = as_tensor(input).array
    return Tensor(array_module(a).ones(a.shape, a.dtype if dtype is None else as_dtype(dtype)))


def eye(
    num_rows: Any,
    num_columns: Any = None,
    batch_shape: Any = None,
    dtype: Any = float32,
    name: str | None = None,
) -> Tensor:
    """Return a matrix with ones on its diagonal, or ``[*batch_shape, rows, columns]`` of them."""
    columns = None if num_columns is None else int(num_columns)
    matrix = np.eye(int(num_rows), columns, dtype=as_dtype(dtype))
    if batch_shape is not None:
        matrix = np.tile(matrix, (*shape_of(batch_shape), 1, 1))
    return Tensor(matrix)


def range(
    start: Any, limit: Any = None, delta: Any = 1, dtype: Any = None, name: str | None = None
) -> Tensor:
    """Return numbers from ``start`` (with one argument from 0) to below ``limit``, by ``delta``."""
    if limit is None:
        start, limit = 0, start
    ends = [as_tensor(item) for item in (start, limit, delta)]
    if dtype is None:
        floats = [t.dtype for t in ends if t.dtype.kind in "fV"]
        dtype = np.result_type(*(floats or [t.dtype for t in ends]))
    kind = as_dtype(dtype)
    # A Python number is not rounded to float32 first.
    numbers = [
        item if isinstance(item, (int, float)) else t.array.item()
        for item, t in zip((start, limit, delta), ends, strict=True)
    ]
    if not numbers[2]:
        raise InvalidArgumentError("range: delta must not be 0")
    if kind.kind not in "fV":
        return Tensor(np.arange(*numbers).astype(kind))
    # As in TensorFlow, the length is computed in the dtype: range(0.0, 0.3, 0.1) has 3 numbers.
    first, last, step = map(kind.type, numbers)
    count = max(math.ceil((last - first) / step), 0)
    return Tensor((float(first) + float(step) * np.arange(count)).astype(kind))


def one_hot(
    indices: Any,
    depth: Any,
    on_value: Any = None,
    off_value: Any = None,
    axis: int = -1,
    dtype: Any = None,
    name: str | None = None,
) -> Tensor:
    """Return vectors of ``depth`` elements: ``on_value`` at the index, ``off_value`` elsewhere.

    The values are by default 1 and 0. The result has their dtype if they are given, and is float32
    otherwise. An index outside 0 to ``depth - 1`` gives ``off_value`` everywhere, as in TensorFlow.
    """
    index = as_tensor(indices).array
    if index.dtype.kind not in "iu":
        raise TypeError(f"one_hot needs integer indices, got {index.dtype}; use cast()")
    (place,) = axes_of(axis, index.ndim + 1, "one_hot")
    hits = np.expand_dims(index, -1) == array_module(index).arange(int(depth))
    kind = _dtype_of(on_value, off_value) if dtype is None else as_dtype(dtype)
    on, off = (
        as_tensor(default if value is None else value, like=Tensor(np.empty(0, kind))).array
        for value, default in ((on_value, 1), (off_value, 0))
    )
    values = np.where(hits, on, off).astype(kind, copy=False)
    return Tensor(np.moveaxis(values, -1, place))


def _dtype_of(on_value: Any, off_value: Any) -> np.dtype[Any]:
    kinds = [as_tensor(value).dtype for value in (on_value, off_value) if value is not None]
    if len(set(kinds)) > 1:
        raise TypeError(f"one_hot: on_value is {kinds[0]} and off_value is {kinds[1]}")
    return kinds[0] if kinds else as_dtype(float32)


# About tensors -----------------------------------------------------------------------------------


def shape(input: Any, out_type: Any = np.int32, name: str | None = None) -> Tensor:
    """Return the shape as an integer tensor."""
    return Tensor(np.array(as_tensor(input).shape, dtype=as_dtype(out_type)))


def size(input: Any, out_type: Any = np.int32, name: str | None = None) -> Tensor:
    """Return the number of elements as an integer tensor."""
    return Tensor(np.array(as_tensor(input).array.size, dtype=as_dtype(out_type)))


def rank(input: Any, name: str | None = None) -> Tensor:
    """Return the number of axes as an integer tensor."""
    return Tensor(np.array(as_tensor(input).ndim, dtype=np.int32))


# Same elements -----------------------------------------------------------------------------------


@differentiable
def identity(input: Any, name: str | None = None) -> Tensor:
    """Return a new tensor with the same value; ``name`` has no effect."""
    x = as_tensor(input)
    return record(x.array, (x,), lambda g, _need: (g,))


def stop_gradient(input: Any, name: str | None = None) -> Tensor:
    """Return the value as a constant, through which no gradient flows."""
    return Tensor(as_tensor(input).array)


@differentiable
def cast(x: Any, dtype: Any, name: str | None = None) -> Tensor:
    """Return ``x`` in another dtype; floats are truncated to integers.

    Gradients flow between floating-point dtypes.

    Raises
    ------
    TypeError
        The dtype is bfloat16 on a GPU, which CuPy supports from version 14, for some operations only.
    """
    tensor = as_tensor(x)
    target = as_dtype(dtype)
    a = tensor.array
    if a.dtype == target:
        return tensor
    if target.kind == "V" and not on_host(a):
        raise TypeError(
            f"{target} on a GPU: CuPy supports this type from version 14, for some operations only. "
            "Use float16 there (the policy 'mixed_float16'), or CPU devices"
        )
    source = a.dtype
    return record(a.astype(target), (tensor,), lambda g, _need: (g.astype(source),))


@differentiable
def reshape(tensor: Any, shape: Any, name: str | None = None) -> Tensor:
    """Return the elements in another shape, in which one length may be -1 (the rest)."""
    x = as_tensor(tensor)
    a = x.array
    target = shape_of(shape)
    if not a.size and 0 in target and target.count(-1) == 1:  # NumPy does not find this length
        rest = prod(filter(None, a.shape)) // prod(n for n in target if n > 0)
        target = tuple(rest if n == -1 else n for n in target)
    try:
        result = a.reshape(target)
    except ValueError:
        raise InvalidArgumentError(
            f"reshape: a tensor of shape {a.shape} has {a.size} elements and does not fit shape "
            f"{target}"
        ) from None
    old = a.shape
    return record(result, (x,), lambda g, _need: (g.reshape(old),))


@differentiable
def transpose(a: Any, perm: Any = None, conjugate: bool = False, name: str | None = None) -> Tensor:
    """Return the tensor with its axes in the order ``perm``, by default reversed.

    ``conjugate`` is ignored: tensors hold no complex numbers.
    """
    x = as_tensor(a)
    order = (
        tuple(builtins.range(x.ndim))[::-1]
        if perm is None
        else axes_of(list(shape_of(perm)), x.ndim, "transpose")
    )
    if len(order) != x.ndim:
        raise InvalidArgumentError(
            f"transpose: perm {order} does not name every axis of shape {x.shape}"
        )
    back = np.argsort(order).tolist()
    return record(x.array.transpose(order), (x,), lambda g, _need: (g.transpose(back),))


@differentiable
def expand_dims(input: Any, axis: Any, name: str | None = None) -> Tensor:
    """Return the tensor with a new axis of length 1 at ``axis``."""
    x = as_tensor(input)
    (place,) = axes_of(axis, x.ndim + 1, "expand_dims")
    old = x.shape
    return record(
        x.array.reshape((*old[:place], 1, *old[place:])), (x,), lambda g, _need: (g.reshape(old),)
    )


@differentiable
def squeeze(input: Any, axis: Any = None, name: str | None = None) -> Tensor:
    """Return the tensor without its axes of length 1, or without those in ``axis``."""
    x = as_tensor(input)
    old = x.shape
    if axis is None or (isinstance(axis, (list, tuple)) and not axis):
        axes = tuple(i for i, n in enumerate(old) if n == 1)
    else:
        axes = axes_of(axis, x.ndim, "squeeze")
    for i in axes:
        if old[i] != 1:
            raise InvalidArgumentError(f"squeeze: axis {i} of shape {old} does not have length 1")
    kept = [n for i, n in enumerate(old) if i not in axes]
    return record(x.array.reshape(kept), (x,), lambda g, _need: (g.reshape(old),))


@differentiable
def broadcast_to(input: Any, shape: Any, name: str | None = None) -> Tensor:
    """Return the tensor repeated along axes of length 1 and new leading axes."""
    x = as_tensor(input)
    old, target = x.shape, shape_of(shape)
    try:
        result = np.broadcast_to(x.array, target)
    except ValueError:
        raise InvalidArgumentError(
            f"broadcast_to: shape {old} does not broadcast to {target}"
        ) from None
    return record(result, (x,), lambda g, _need: (sum_to_shape(g, old),))


@differentiable
def tile(input: Any, multiples: Any, name: str | None = None) -> Tensor:
    """Return the tensor repeated ``multiples[i]`` times along axis i."""
    x = as_tensor(input)
    times = _sizes_of(multiples, "tile")
    old = x.shape
    if len(times) != x.ndim:
        raise InvalidArgumentError(
            f"tile: multiples {times} must have a number for each axis of shape {old}"
        )

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        parts = g.reshape([n for pair in zip(times, old, strict=True) for n in pair])
        return (reduced("sum", parts, tuple(builtins.range(0, 2 * len(old), 2))),)

    return record(np.tile(x.array, times), (x,), vjp)


@differentiable
def pad(
    tensor: Any,
    paddings: Any,
    mode: str = "CONSTANT",
    constant_values: Any = 0,
    name: str | None = None,
) -> Tensor:
    """Return the tensor padded by ``paddings[i] = (before, after)`` elements along axis i."""
    x = as_tensor(tensor)
    if mode.upper() != "CONSTANT":
        raise InvalidArgumentError(f"pad: mode must be 'CONSTANT', got {mode!r}")
    widths = [_sizes_of(pair, "pad") for pair in _matrix_rows(paddings)]
    if len(widths) != x.ndim or any(len(pair) != 2 for pair in widths):
        raise InvalidArgumentError(
            f"pad: paddings {widths} must have a pair (before, after) for each axis of shape "
            f"{x.shape}"
        )
    a = x.array
    inner = tuple(slice(before, before + n) for (before, _), n in zip(widths, a.shape, strict=True))
    if a.__class__ is np.ndarray:
        shape = [n + sum(pair) for pair, n in zip(widths, a.shape, strict=True)]
        result = placed(a, shape, inner, constant_values)
    else:
        result = np.pad(a, widths, mode="constant", constant_values=constant_values)
    return record(result, (x,), lambda g, _need: (contiguous(g[inner]),))


def _matrix_rows(value: Any) -> list[Any]:
    """Return the rows of a matrix that is a list of lists or a tensor."""
    rows = value.array.tolist() if isinstance(value, Tensor) else value
    return [row.tolist() if is_array(row) else row for row in rows]
