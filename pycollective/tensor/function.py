"""``function``: TensorFlow's decorator, which has no effect here."""

from __future__ import annotations

import functools
import hashlib
import types
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


def digest_of(func: Callable[..., Any]) -> str:
    """Return a digest of a function's code, equal in processes that run the same program."""
    known = getattr(func, "digest", None)
    if isinstance(known, str):
        return known
    found = hashlib.sha256()
    codes = [getattr(getattr(func, "python_function", func), "__code__", None)]
    while codes:
        code = codes.pop()
        if not isinstance(code, types.CodeType):
            continue
        plain = []
        for value in code.co_consts:
            if isinstance(value, types.CodeType):
                codes.append(value)
            else:  # a set has its elements in another order in each process
                plain.append(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
        found.update(code.co_code)
        found.update(repr((code.co_names, code.co_varnames, code.co_freevars, plain)).encode())
    func.digest = found.hexdigest()[:16]  # type: ignore[attr-defined]
    return str(func.digest)  # type: ignore[attr-defined]
