"""Half-precision operations computed in float32, for operations without a kernel for halves."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..tensor.ops import cast
from ..tensor.tensor import Tensor, as_tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def in_float32(function: _Function) -> _Function:
    """Make an operation on NumPy arrays of halves compute in float32, and round its result."""
    first = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        if not args and first in kwargs:
            args = (kwargs.pop(first),)
        if not args:
            return function(**kwargs)  # raises the error about missing arguments
        images, args = as_tensor(args[0]), args[1:]
        dtype = images.array.dtype
        if dtype.itemsize != 2 or dtype.kind not in "fV" or type(images.array) is not np.ndarray:
            return function(images, *args, **kwargs)
        given = [images, *(_as_given(value) for value in args)]
        named = {name: _as_given(value) for name, value in kwargs.items()}
        tensors = [v for v in (*given, *named.values()) if isinstance(v, Tensor)]
        if any(tensor.dtype != dtype for tensor in tensors):
            # The operation raises the error about dtypes.
            return function(*given, **named)
        wide = {id(tensor): cast(tensor, np.float32) for tensor in tensors}
        found = function(
            *(wide.get(id(value), value) for value in given),
            **{name: wide.get(id(value), value) for name, value in named.items()},
        )
        with np.errstate(over="ignore"):
            return cast(found, dtype)

    return computed  # type: ignore[return-value]


def _as_given(value: Any) -> Any:
    """Return arrays and variables as tensors, and other values unchanged."""
    known = isinstance(value, (Tensor, np.ndarray)) or hasattr(value, "_read")
    return as_tensor(value) if known else value
