"""Definition of operations: operands, broadcasting and its gradient.

Operations ignore their argument ``name``, which TensorFlow's have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ...array_backend import Array, asarray
from ...errors import InvalidArgumentError
from .. import compiled
from ..tape import record, thread_state
from ..tensor import Tensor, as_tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Every differentiable operation by name; the tests check each one.
DIFFERENTIABLE: dict[str, Callable[..., Any]] = {}


def differentiable(function: _Function) -> _Function:
    """Register an operation in `DIFFERENTIABLE`."""
    DIFFERENTIABLE[function.__name__] = function
    return function


def operands(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Return two operands as tensors; arrays, scalars and lists take the dtype of the other one."""
    if x.__class__ is Tensor:
        if y.__class__ in _FAST and x.array.dtype.kind == "f":
            return x, Tensor(asarray(y, x.array.dtype, like=x.array))
        return x, as_tensor(y, like=x)
    if y.__class__ is Tensor:
        if x.__class__ in _FAST and y.array.dtype.kind == "f":
            return Tensor(asarray(x, y.array.dtype, like=y.array)), y
        return as_tensor(x, like=y), y
    if x.__class__ is np.ndarray and hasattr(y, "_read"):
        y = as_tensor(y)
        return as_tensor(x, like=y), y
    if not _takes_dtype(x) or (_takes_dtype(y) and as_tensor(y).dtype.kind != "f"):
        x = as_tensor(x)
        return x, as_tensor(y, like=x)
    y = as_tensor(y)
    return as_tensor(x, like=y), y


_FAST = frozenset((float, int))


def _takes_dtype(value: Any) -> bool:
    return isinstance(value, (bool, int, float, list, tuple, np.generic))


def check_dtypes(name: str, *tensors: Tensor) -> None:
    """Raise ``TypeError`` unless all tensors have one dtype."""
    first = tensors[0].array.dtype
    for tensor in tensors:
        if tensor.array.dtype != first:
            raise TypeError(
                f"{name}: operands have different dtypes, {first} and {tensor.dtype}; use cast() "
                "on one of them"
            )


def check_shapes(name: str, *arrays: Array) -> None:
    """Raise `InvalidArgumentError` unless the shapes of all arrays broadcast."""
    shapes = [array.shape for array in arrays]
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        raise InvalidArgumentError(
            f"{name}: shapes {' and '.join(map(str, shapes))} do not broadcast"
        ) from None


def keep_dtype(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return ``array`` in ``dtype``; NumPy 1 changes the dtype of 0-d values with Python numbers."""
    return array if array.dtype == dtype else array.astype(dtype)


def sum_to_shape(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum ``gradient`` over the axes along which an operand of this shape was broadcast."""
    if gradient.shape == shape:
        return gradient
    lead = gradient.ndim - len(shape)
    axes = tuple(range(lead)) + tuple(
        lead + i for i, n in enumerate(shape) if n == 1 and gradient.shape[lead + i] != 1
    )
    total: Array = compiled.reduced("sum", gradient, axes, True).reshape(shape)
    return total


def unary(
    title: str,
    forward: Callable[[Any], Any],
    derivative: Callable[[Array, Any, Any], Any],
    doc: str,
    *,
    floating: bool = True,
    kernel: str = "",
) -> Callable[..., Tensor]:
    """Make an elementwise operation of one operand.

    The function ``derivative(g, x, y)`` returns the gradient of ``x`` from the gradient ``g`` of the
    result ``y``. With ``floating`` the operand must have a floating-point dtype. A ``kernel`` replaces
    both functions for the arrays that kernels support.
    """
    if kernel:
        forward, derivative = compiled.unary(kernel, forward, derivative)

    def operation(x: Any, name: str | None = None) -> Tensor:
        if x.__class__ is not Tensor:
            x = as_tensor(x)
        a = x.array
        if floating and a.dtype.kind not in "fV":
            raise TypeError(f"{title} needs a floating-point tensor, got {a.dtype}; use cast()")
        result = keep_dtype(forward(a), a.dtype)
        if not thread_state.tapes:
            return Tensor(result)

        def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Any]:
            return (keep_dtype(derivative(g, a, result), a.dtype),)

        return record(result, (x,), vjp)

    return _named(operation, title, doc)


def binary(
    title: str,
    forward: Callable[[Any, Any], Any],
    by_x: Callable[[Array, Any, Any, Any], Any],
    by_y: Callable[[Array, Any, Any, Any], Any],
    doc: str,
    *,
    linear: bool = False,
    kernel: bool = False,
) -> Callable[..., Tensor]:
    """Make an elementwise operation of two operands that broadcast.

    The function ``by_x(g, x, y, z)`` gets the gradient ``g`` of the result ``z``. The function returns
    the gradient of ``x`` in the shape of ``z``; `sum_to_shape` then sums it to the shape of ``x``.
    ``by_y`` does the same for ``y``. With ``linear`` all arguments other than ``g`` are None, and the
    arrays are not kept. With ``kernel`` there is a kernel of this name.
    """
    chosen = title if kernel else ""

    def operation(x: Any, y: Any, name: str | None = None) -> Tensor:
        if x.__class__ is not Tensor or y.__class__ is not Tensor:
            x, y = operands(x, y)
        a = x.array
        b = y.array
        if a.dtype is not b.dtype:
            check_dtypes(title, x, y)
        try:
            result = compiled.binary(chosen, forward, a, b)
        except ValueError:
            check_shapes(title, a, b)
            raise
        if not thread_state.tapes:
            return Tensor(result)
        shape_a = a.shape
        shape_b = b.shape
        dtype = a.dtype
        kept = (None, None, None) if linear else (a, b, result)

        def vjp(g: Array, need: tuple[bool, ...]) -> list[Any]:
            parts = None if linear else compiled.binary_gradient(chosen, g, kept[0], kept[1], need)
            if parts is None:
                parts = [
                    keep_dtype(derivative(g, *kept), dtype) if needed else None
                    for needed, derivative in zip(need, (by_x, by_y), strict=False)
                ]
            return [
                part if part is None or part.shape == shape else sum_to_shape(part, shape)
                for part, shape in zip(parts, (shape_a, shape_b), strict=True)
            ]

        return record(result, (x, y), vjp)

    return _named(operation, title, doc)


def plain(title: str, forward: Callable[[Any, Any], Any], doc: str) -> Callable[[Any, Any], Tensor]:
    """Make an operation of two operands without gradient (comparisons, logic)."""

    def operation(x: Any, y: Any, name: str | None = None) -> Tensor:
        if x.__class__ is not Tensor or y.__class__ is not Tensor:
            x, y = operands(x, y)
        if x.array.dtype is not y.array.dtype:
            check_dtypes(title, x, y)
        try:
            return Tensor(forward(x.array, y.array))
        except ValueError:
            check_shapes(title, x.array, y.array)
            raise

    operation.__name__ = operation.__qualname__ = title
    operation.__doc__ = doc
    return operation


def _named(operation: _Function, name: str, doc: str) -> _Function:
    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = doc
    return differentiable(operation)
