"""Operations in half precision by way of float32, where the host has no fast form of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..tensor.ops import cast
from ..tensor.tensor import Tensor, as_tensor

__all__ = ["in_float32"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def in_float32(function: _Function) -> _Function:
    """Let an operation on NumPy arrays of halves compute in float32, and round at the end."""

    @functools.wraps(function)
    def computed(x: Any, *args: Any, **kwargs: Any) -> Any:
        images = as_tensor(x)
        dtype = images.array.dtype
        if dtype.itemsize != 2 or dtype.kind not in "fV" or type(images.array) is not np.ndarray:
            return function(images, *args, **kwargs)
        wide = [_widened(value) for value in (images, *args)]
        found = function(*wide, **{name: _widened(value) for name, value in kwargs.items()})
        with np.errstate(over="ignore"):
            return cast(found, dtype)

    return computed  # type: ignore[return-value]


def _widened(value: Any) -> Any:
    """Return what is a tensor or variable of floating-point numbers in float32."""
    if not isinstance(value, Tensor) and not hasattr(value, "_read"):
        return value
    tensor = as_tensor(value)
    return cast(tensor, np.float32) if tensor.array.dtype.kind in "fV" else tensor
