"""Functions of tensors on symbolic tensors, such as ``tf.reduce_mean`` of a layer's symbolic output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class SymbolError(TypeError):
    """A symbolic tensor is used where values are needed."""


#: The functions that accept symbolic tensors, by name.
FUNCTIONS: dict[str, Callable[..., Any]] = {}

#: ``recorders[0](name, args, kwargs)`` records a call; `keras.graph` adds it.
recorders: list[Callable[[str, tuple[Any, ...], dict[str, Any]], Any]] = []


@functools.cache
def accepts_symbols(function: _Function) -> _Function:
    """Return a function that records its call if an argument is a symbolic tensor.

    The function is called first, so that calls on tensors cost one frame more and nothing else.
    """
    name = function.__name__
    FUNCTIONS[name] = function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except SymbolError:
            if not recorders:
                raise
        kwargs.pop("name", None)  # it has no effect, and need not be in the model's file
        return recorders[0](name, args, kwargs)

    return call  # type: ignore[return-value]  # it has the function's signature
