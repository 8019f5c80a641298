"""Reductions, and matrix products."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ...arguments import whole
from ...array_backend import Array, array_module, asarray, filled, on_host
from ...errors import InvalidArgumentError
from ...workspace import workspace
from ..compiled import binary, extremum_gradient, is_half, matrix_product, narrowed, reduced
from ..tape import record
from ..tensor import Tensor, as_tensor
from ._define import check_dtypes, differentiable, operands, sum_to_shape

__all__ = [
    "add_n",
    "argmax",
    "argmin",
    "matmul",
    "reduce_all",
    "reduce_any",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "tensordot",
]


# Up to this many elements, writing them is faster than making a broadcast view.
_FEW = 16 << 10


def axes_of(axis: Any, ndim: int, name: str) -> tuple[int, ...]:
    """Return the axes that ``axis`` (None, an integer or several) names, counted from 0."""
    if axis is None:
        return tuple(range(ndim))
    if axis.__class__ is int and -ndim <= axis < ndim:
        return (axis % ndim,)
    given = axis if isinstance(axis, (list, tuple)) else np.atleast_1d(np.asarray(axis)).tolist()
    axes = []
    for item in given:
        number = whole(f"{name}: axis", item, -(2**63), 2**63 - 1)
        if not -ndim <= number < ndim:
            raise InvalidArgumentError(
                f"{name}: axis {number} is out of range for a tensor with {ndim} axes"
            )
        axes.append(number % ndim)
    if len(set(axes)) != len(axes):
        raise InvalidArgumentError(f"{name}: axis {axis} names an axis twice")
    return tuple(axes)


def _with_axes(array: Any, axes: tuple[int, ...], ndim: int) -> Array:
    """Return a reduced array with its reduced axes restored as axes of length 1."""
    kept = iter(array.shape)
    expanded: Array = array.reshape([1 if i in axes else next(kept) for i in range(ndim)])
    return expanded


def _numbers(x: Tensor, name: str) -> Array:
    """Return the array of a tensor of numbers."""
    if x.array.dtype.kind == "b":
        raise TypeError(f"{name} needs numbers, got bool; use cast()")
    return x.array


@differentiable
def reduce_sum(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> Tensor:
    """Return the sums over ``axis`` (all axes by default), in the tensor's dtype."""
    x = as_tensor(input_tensor)
    a = _numbers(x, "reduce_sum")
    axes = axes_of(axis, a.ndim, "reduce_sum")
    shape = a.shape

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        return (_spread(g, axes, shape, keepdims),)

    return record(reduced("sum", a, axes, keepdims), (x,), vjp)


def _spread(g: Array, axes: tuple[int, ...], shape: tuple[int, ...], keepdims: bool) -> Array:
    few = g.__class__ is np.ndarray and prod(shape) <= _FEW
    if few and not g.ndim:
        return filled(shape, g.dtype, g)
    if not keepdims:
        g = _with_axes(g, axes, len(shape))
    if not few:
        return np.broadcast_to(g, shape)
    written = np.empty(shape, g.dtype)
    written[...] = g
    return written


@differentiable
def sum_over(input_tensor: Any, count: float) -> Tensor:
    """Return the sum of all elements divided by a nonzero number, as one operation."""
    x = as_tensor(input_tensor)
    a = x.array
    if a.dtype.kind not in "fV":
        raise TypeError(f"sum_over needs a floating-point tensor, got {a.dtype}; use cast()")
    axes, shape = tuple(range(a.ndim)), a.shape

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        return (_spread(asarray(_divided(g, count)), axes, shape, False),)

    return record(_mean(a, axes, count), (x,), vjp)


def _divided(a: Array, count: float) -> Any:
    """Return an array divided by a number, which may be too large for halves."""
    if is_half(a.dtype):
        return narrowed(a.astype(np.float32) / np.float32(count), a.dtype)
    return a / a.dtype.type(count)


def _mean(a: Array, axes: tuple[int, ...], count: float, keepdims: bool = False) -> Any:
    """Return the sums along axes, divided by a number; the sums may be too large for halves."""
    if is_half(a.dtype):
        total = a.sum(axis=axes, dtype=np.float32, keepdims=keepdims)
        return narrowed(total / np.float32(count), a.dtype)
    return reduced("sum", a, axes, keepdims) / a.dtype.type(count)


@differentiable
def reduce_mean(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> Tensor:
    """Return the means over ``axis`` (all axes by default), in the tensor's dtype.

    The mean of no elements is NaN, and raises ``ZeroDivisionError`` for integers. Means of integers
    are rounded towards 0, as in TensorFlow.
    """
    x = as_tensor(input_tensor)
    a = _numbers(x, "reduce_mean")
    axes = axes_of(axis, a.ndim, "reduce_mean")
    shape = a.shape
    count = prod([shape[i] for i in axes])
    if a.dtype.kind in "iu":
        if not count:
            raise ZeroDivisionError(f"reduce_mean: integers of shape {shape} have no mean")
        # The sum and the count may not fit a.dtype.
        wide = np.dtype(np.int64 if a.dtype.kind == "i" else np.uint64)
        totals, divisor = asarray(a.sum(axis=axes, dtype=wide, keepdims=keepdims)), wide.type(count)
        multiples = totals - array_module(totals).fmod(totals, divisor)
        return Tensor((multiples // divisor).astype(a.dtype))
    if count:
        mean = _mean(a, axes, count, keepdims)
    else:
        mean = reduced("sum", a, axes, keepdims) + a.dtype.type(np.nan)

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        return (_spread(_divided(g, count or 1), axes, shape, keepdims),)

    return record(mean, (x,), vjp)


def _extremum_of_none(x: Tensor, method: str, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Return the extrema of no elements, as in TensorFlow: infinities, or the limits of integers."""
    a = x.array
    shape = [1 if i in axes else n for i, n in enumerate(a.shape) if keepdims or i not in axes]
    least: Any
    greatest: Any
    if a.dtype.kind in "iu":
        least, greatest = np.iinfo(a.dtype).min, np.iinfo(a.dtype).max
    elif a.dtype.kind == "b":
        least, greatest = False, True
    else:
        least, greatest = -np.inf, np.inf
    result = array_module(a).full(shape, least if method == "max" else greatest, a.dtype)
    return record(result, (x,), lambda g, _need: (array_module(a).zeros(a.shape, a.dtype),))


def _extremum(title: str, method: str, doc: str) -> Callable[..., Tensor]:
    def operation(
        input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
    ) -> Tensor:
        x = as_tensor(input_tensor)
        a = x.array
        axes = axes_of(axis, a.ndim, title)
        if not all(a.shape[i] for i in axes):
            return _extremum_of_none(x, method, axes, keepdims)
        result = reduced(method, a, axes, keepdims)

        def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
            found = extremum_gradient(a, result, g, axes)
            if found is not None:
                return (found,)
            if keepdims:
                top, spread = result, g
            else:
                top, spread = _with_axes(result, axes, a.ndim), _with_axes(g, axes, a.ndim)
            hits = (a == top).astype(a.dtype)
            return (hits * (spread / reduced("sum", hits, axes, True)),)

        return record(result, (x,), vjp)

    operation.__name__ = operation.__qualname__ = title
    operation.__doc__ = doc
    return differentiable(operation)


reduce_max = _extremum(
    "reduce_max",
    "max",
    "Return the largest elements along ``axis``; equal elements share the gradient. The largest of no "
    "elements is -inf, or the least integer.",
)
reduce_min = _extremum(
    "reduce_min",
    "min",
    "Return the smallest elements along ``axis``; equal elements share the gradient. The smallest of no "
    "elements is inf, or the greatest integer.",
)


@differentiable
def reduce_prod(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> Tensor:
    """Return the products over ``axis`` (all axes by default), in the tensor's dtype."""
    x = as_tensor(input_tensor)
    a = _numbers(x, "reduce_prod")
    axes = axes_of(axis, a.ndim, "reduce_prod")

    product = reduced("prod", a, axes, keepdims)
    size = np.abs(product)
    kind = np.finfo(a.dtype) if a.dtype.kind == "f" else None

    def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Array]:
        if kind is not None and on_host(a) and ((size >= kind.tiny) & (size <= kind.max)).all():
            return (_spread(g * product, axes, a.shape, keepdims) / a,)
        # Multiply the products of the elements before and after, which is correct for zeros too.
        rest = tuple(i for i in range(a.ndim) if i not in axes)
        order = rest + axes
        moved = a.transpose(order)
        count = prod(a.shape[i] for i in axes)
        if not a.size:
            return (array_module(a).zeros(a.shape, a.dtype),)
        rows = moved.reshape([*(a.shape[i] for i in rest), count])
        ones = array_module(a).ones((*rows.shape[:-1], 1), a.dtype)
        left = np.cumprod(np.concatenate([ones, rows[..., :-1]], axis=-1), axis=-1)
        right = np.cumprod(np.concatenate([ones, rows[..., :0:-1]], axis=-1), axis=-1)[..., ::-1]
        others = (left * right).reshape(moved.shape).transpose(np.argsort(order).tolist())
        return (others * _spread(g, axes, a.shape, keepdims),)

    return record(product, (x,), vjp)


def reduce_all(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> Tensor:
    """Return True if all elements along ``axis`` are true."""
    a = as_tensor(input_tensor).array
    return Tensor(np.all(a, axis=axes_of(axis, a.ndim, "reduce_all"), keepdims=keepdims))


def reduce_any(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> Tensor:
    """Return True if an element along ``axis`` is true."""
    a = as_tensor(input_tensor).array
    return Tensor(np.any(a, axis=axes_of(axis, a.ndim, "reduce_any"), keepdims=keepdims))


def _arg(name: str, input: Any, axis: Any, output_type: Any) -> Tensor:
    a = as_tensor(input).array
    (number,) = axes_of(0 if axis is None else axis, a.ndim, name)
    if not a.shape[number]:
        raise InvalidArgumentError(
            f"{name}: a tensor of shape {a.shape} has no elements along axis {number}"
        )
    return Tensor(getattr(a, name)(axis=number).astype(output_type, copy=False))


def argmax(
    input: Any, axis: Any = None, output_type: Any = np.int64, name: str | None = None
) -> Tensor:
    """Return the indices of the (first) largest elements along ``axis``, by default 0."""
    return _arg("argmax", input, axis, output_type)


def argmin(
    input: Any, axis: Any = None, output_type: Any = np.int64, name: str | None = None
) -> Tensor:
    """Return the indices of the (first) smallest elements along ``axis``, by default 0."""
    return _arg("argmin", input, axis, output_type)


@differentiable
def add_n(inputs: Any, name: str | None = None) -> Tensor:
    """Return the sum of a list of tensors of one shape and dtype."""
    tensors = tuple(map(as_tensor, inputs))
    if not tensors:
        raise InvalidArgumentError("add_n needs at least one tensor")
    check_dtypes("add_n", *tensors)
    arrays = [tensor.array for tensor in tensors]
    shape = arrays[0].shape
    for array in arrays:
        if array.shape != shape:
            raise InvalidArgumentError(f"add_n: shapes {shape} and {array.shape} differ")
    # Scalars add up faster than 0-d arrays.
    if not shape:
        arrays = [x[()] if x.__class__ is np.ndarray else x for x in arrays]
    total = functools.reduce(functools.partial(binary, "add", operator.add), arrays)

    def vjp(g: Array, need: tuple[bool, ...]) -> list[Array | None]:
        return [g if needed else None for needed in need]

    return record(total, tensors, vjp)


@differentiable
def matmul(
    a: Any,
    b: Any,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    name: str | None = None,
) -> Tensor:
    """Return the product of matrices, or of stacks of matrices that broadcast.

    The operands need at least two axes; ``transpose_a`` and ``transpose_b`` first swap the last two.
    ``adjoint_a`` and ``adjoint_b`` do the same, because tensors hold real numbers.

    Raises
    ------
    TypeError
        The operands have different dtypes.
    ValueError
        An operand has fewer than two axes, the inner lengths differ, or the stacks do not
        broadcast. Or an operand has both a transpose and an adjoint.
    """
    x, y = operands(a, b)
    if adjoint_a or adjoint_b:
        if (transpose_a and adjoint_a) or (transpose_b and adjoint_b):
            raise InvalidArgumentError("matmul: the adjoint of an operand excludes its transpose")
        transpose_a, transpose_b = transpose_a or adjoint_a, transpose_b or adjoint_b
    check_dtypes("matmul", x, y)
    left, right = x.array, y.array
    if left.ndim < 2 or right.ndim < 2:
        raise InvalidArgumentError(
            f"matmul needs operands with at least two axes, got shapes {left.shape} and "
            f"{right.shape}; use expand_dims() or tensordot()"
        )
    if transpose_a:
        left = left.swapaxes(-1, -2)
    if transpose_b:
        right = right.swapaxes(-1, -2)
    if left.shape[-1] != right.shape[-2]:
        raise InvalidArgumentError(
            f"matmul: inner lengths differ, shapes are {left.shape} and {right.shape}"
            f"{' after transposing' if transpose_a or transpose_b else ''}"
        )

    found = None if transpose_a or transpose_b else matrix_product(left, right)
    if found is not None:
        return record(found[0], (x, y), found[1])

    def vjp(g: Array, need: tuple[bool, ...]) -> tuple[Any, Any]:
        by_left = by_right = None
        if need[0]:
            by_left = sum_to_shape(_product(g, right.swapaxes(-1, -2)), left.shape)
            if transpose_a:
                by_left = by_left.swapaxes(-1, -2)
        if need[1]:
            by_right = sum_to_shape(_product(left.swapaxes(-1, -2), g), right.shape)
            if transpose_b:
                by_right = by_right.swapaxes(-1, -2)
        return by_left, by_right

    return record(_product(left, right), (x, y), vjp)


def _product(left: Array, right: Array) -> Array:
    """Return the product of matrices; halves are summed in float32, because BLAS has no halves."""
    dtype = left.dtype
    if isinstance(left, np.ndarray) and dtype.kind in "fV" and dtype.itemsize == 2:
        halves = np.matmul(left.astype(np.float32), right.astype(np.float32))
        with np.errstate(over="ignore"):
            narrow: Array = halves.astype(dtype)
        return narrow
    return workspace.matmul(left, right)


@differentiable
def tensordot(a: Any, b: Any, axes: Any, name: str | None = None) -> Tensor:
    """Return the sum of products over pairs of axes.

    Parameters
    ----------
    a, b
        The operands, of one dtype.
    axes
        A number n, for the last n axes of ``a`` and the first n of ``b``; or two lists of
        corresponding axes.

    Raises
    ------
    TypeError
        The operands have different dtypes.
    ValueError
        An axis does not exist, or the lengths of corresponding axes differ.
    """
    x, y = operands(a, b)
    check_dtypes("tensordot", x, y)
    left, right = x.array, y.array
    if isinstance(axes, int):
        if not 0 <= axes <= min(left.ndim, right.ndim):
            raise InvalidArgumentError(
                f"tensordot: axes={axes} for tensors with {left.ndim} and {right.ndim} axes"
            )
        axes_a = tuple(range(left.ndim - axes, left.ndim))
        axes_b = tuple(range(axes))
    else:
        axes_a = axes_of(axes[0], left.ndim, "tensordot")
        axes_b = axes_of(axes[1], right.ndim, "tensordot")
    free_a = [i for i in range(left.ndim) if i not in axes_a]
    free_b = [i for i in range(right.ndim) if i not in axes_b]
    pairs = [(left.shape[i], right.shape[j]) for i, j in zip(axes_a, axes_b, strict=False)]
    if len(axes_a) != len(axes_b) or any(m != n for m, n in pairs):
        raise InvalidArgumentError(
            f"tensordot: axes {axes_a} of shape {left.shape} do not fit axes {axes_b} of shape "
            f"{right.shape}"
        )

    def vjp(g: Array, need: tuple[bool, ...]) -> tuple[Any, Any]:
        by_left = by_right = None
        split = len(free_a)
        if need[0]:
            product = np.tensordot(g, right, (list(range(split, g.ndim)), free_b))
            # The product's last axes are the summed ones, in b's order.
            summed = [axes_a[axes_b.index(j)] for j in sorted(axes_b)]
            by_left = product.transpose(np.argsort([*free_a, *summed]).tolist())
        if need[1]:
            product = np.tensordot(g, left, (list(range(split)), free_a))
            summed = [axes_b[axes_a.index(i)] for i in sorted(axes_a)]
            by_right = product.transpose(np.argsort([*free_b, *summed]).tolist())
        return by_left, by_right

    return record(np.tensordot(left, right, (axes_a, axes_b)), (x, y), vjp)
