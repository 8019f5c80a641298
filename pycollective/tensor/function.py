"""``function``: TensorFlow's decorator, which has no effect here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Any = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    experimental_implements: Any = None,
    experimental_autograph_options: Any = None,
    experimental_attributes: Any = None,
    experimental_relax_shapes: bool | None = None,
    experimental_compile: bool | None = None,
    experimental_follow_type_hints: bool | None = None,
) -> Callable[..., Any]:
    """Return a function that calls ``func``; nothing is traced or compiled.

    Use it as ``@function`` or as ``@function(jit_compile=True)``. The arguments are those of
    ``tf.function``, and have no effect. The result has the attributes of ``func``, and ``func``
    itself as ``python_function``.

    Raises
    ------
    TypeError
        ``func`` is not callable.
    """

    def decorate(inner: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(inner):
            raise TypeError(f"function() decorates a callable, got {inner!r}")

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        call.python_function = inner  # type: ignore[attr-defined]
        return call

    return decorate if func is None else decorate(func)
