"""Definition of operations: operands, broadcasting and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ... import _nn as kernels
from ...array_backend import Array, asarray, native
from ...workspace import workspace
from ..multiple import compute
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
    """Return two operands as tensors; scalars and lists take the dtype of the other one."""
    if x.__class__ is Tensor:
        if y.__class__ in _FAST and x.array.dtype.kind == "f":
            return x, Tensor(asarray(y, x.array.dtype, like=x.array))
        return x, as_tensor(y, like=x)
    if y.__class__ is Tensor:
        if x.__class__ in _FAST and y.array.dtype.kind == "f":
            return Tensor(asarray(x, y.array.dtype, like=y.array)), y
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
    total: Array = gradient.sum(axis=axes, keepdims=True, dtype=gradient.dtype).reshape(shape)
    return total


def compiled(
    kernel: str,
    forward: Callable[[Any], Any],
    derivative: Callable[[Array, Any, Any], Any],
    alpha: float = 1.0,
) -> tuple[Callable[[Any], Any], Callable[[Array, Any, Any], Any]]:
    """Return two functions that use a kernel for the arrays that kernels support."""

    def values(x: Array) -> Any:
        found = native(x)
        if found is None:
            return forward(x)
        y = workspace.empty(x.shape, x.dtype)
        kernels.activation(kernel, *found, y, alpha)
        return y

    def gradient(g: Array, x: Array, y: Array) -> Any:
        found = native(g, x)
        if found is None:
            return derivative(g, x, y)
        dx = workspace.empty(x.shape, x.dtype)
        kernels.activation_gradient(kernel, *found, dx, alpha)
        return dx

    return values, gradient


def unary(
    name: str,
    forward: Callable[[Any], Any],
    derivative: Callable[[Array, Any, Any], Any],
    doc: str,
    *,
    floating: bool = True,
    kernel: str = "",
) -> Callable[[Any], Tensor]:
    """Make an elementwise operation of one operand.

    The function ``derivative(g, x, y)`` returns the gradient of ``x`` from the gradient ``g`` of the
    result ``y``. With ``floating`` the operand must have a floating-point dtype. A ``kernel`` replaces
    both functions for the arrays that kernels support.
    """
    if kernel:
        forward, derivative = compiled(kernel, forward, derivative)

    def operation(x: Any) -> Tensor:
        if x.__class__ is not Tensor:
            x = as_tensor(x)
        a = x.array
        if floating and a.dtype.kind not in "fV":
            raise TypeError(f"{name} needs a floating-point tensor, got {a.dtype}; use cast()")
        result = keep_dtype(forward(a), a.dtype)
        if not thread_state.tapes:
            return Tensor(result)

        def vjp(g: Array, _need: tuple[bool, ...]) -> tuple[Any]:
            return (keep_dtype(derivative(g, a, result), a.dtype),)

        return record(result, (x,), vjp)

    return _named(operation, name, doc)


def binary(
    name: str,
    forward: Callable[[Any, Any], Any],
    by_x: Callable[[Array, Any, Any, Any], Any],
    by_y: Callable[[Array, Any, Any, Any], Any],
    doc: str,
    *,
    linear: bool = False,
) -> Callable[[Any, Any], Tensor]:
    """Make an elementwise operation of two operands that broadcast.

    The function ``by_x(g, x, y, z)`` gets the gradient ``g`` of the result ``z``. The function returns
    the gradient of ``x`` before its sum to the shape of ``x``. With ``linear`` all arguments other than
    ``g`` are None, and the arrays are not kept.
    """
    ufunc = isinstance(forward, np.ufunc)

    def operation(x: Any, y: Any) -> Tensor:
        if x.__class__ is not Tensor or y.__class__ is not Tensor:
            x, y = operands(x, y)
        a = x.array
        b = y.array
        if a.dtype is not b.dtype:
            check_dtypes(name, x, y)
        result = compute(forward, a, b) if ufunc else forward(a, b)
        if not thread_state.tapes:
            return Tensor(result)
        shape_a = a.shape
        shape_b = b.shape
        dtype = a.dtype
        kept = (None, None, None) if linear else (a, b, result)

        def vjp(g: Array, need: tuple[bool, ...]) -> list[Any]:
            by = []
            for needed, derivative, shape in ((need[0], by_x, shape_a), (need[1], by_y, shape_b)):
                part = derivative(g, *kept) if needed else None
                if part is not None and part.dtype != dtype:
                    part = part.astype(dtype)
                if part is not None and part.shape != shape:
                    part = sum_to_shape(part, shape)
                by.append(part)
            return by

        return record(result, (x, y), vjp)

    return _named(operation, name, doc)


def plain(name: str, forward: Callable[[Any, Any], Any], doc: str) -> Callable[[Any, Any], Tensor]:
    """Make an operation of two operands without gradient (comparisons, logic)."""

    def operation(x: Any, y: Any) -> Tensor:
        if x.__class__ is not Tensor or y.__class__ is not Tensor:
            x, y = operands(x, y)
        if x.array.dtype is not y.array.dtype:
            check_dtypes(name, x, y)
        return Tensor(forward(x.array, y.array))

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = doc
    return operation


def _named(operation: _Function, name: str, doc: str) -> _Function:
    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = doc
    return differentiable(operation)
