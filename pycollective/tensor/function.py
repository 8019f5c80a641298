"""``function``: TensorFlow's decorator, which has no effect here."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

#: The functions that `function` has returned, by name and number, and the next number of each name.
_made: weakref.WeakValueDictionary[tuple[str, int], Callable[..., Any]] = (
    weakref.WeakValueDictionary()
)
_counts: dict[str, int] = {}


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
        kind = getattr(inner, "__qualname__", type(inner).__qualname__)
        name = f"{getattr(inner, '__module__', '')}.{kind}"
        number = _counts[name] = _counts.get(name, -1) + 1
        call.made = name, number  # type: ignore[attr-defined]
        _made[name, number] = call
        return call

    return decorate if func is None else decorate(func)


def function_made(name: str, number: int) -> Callable[..., Any] | None:
    """Return the function that `function` made as number ``number`` (from 0) of a name, or None."""
    return _made.get((name, number))


def functions_made() -> list[Callable[..., Any]]:
    """Return the functions that `function` has made, and that the program still has."""
    return list(_made.values())
