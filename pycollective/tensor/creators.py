"""The creators of variables: what makes a variable in the place of `Variable` itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["creator_scope", "creators", "set_creators"]


class _Creators(threading.local):
    """The creators of this thread, innermost last."""

    stack: tuple[Callable[..., Any], ...] = ()


_creators = _Creators()


@contextmanager
def creator_scope(creator: Callable[..., Any]) -> Iterator[None]:
    """Let ``creator(next_creator, **kwargs)`` make the variables of this thread inside the block.

    ``kwargs`` are the arguments of `Variable` by name. ``next_creator(**kwargs)`` calls the creator
    of the block outside of this one, and in the end makes a plain `Variable`. Subclasses of
    `Variable` are made directly. As ``tf.variable_creator_scope``.

    Raises
    ------
    RuntimeError
        At the end of the block, if scopes were not left in the opposite order of their entry.
    """
    before = _creators.stack
    inside = _creators.stack = (*before, creator)
    try:
        yield
    finally:
        found = _creators.stack
        # Whatever is left inside this scope ends with it.
        _creators.stack = found if len(found) < len(inside) else before
        if found is not inside:
            raise RuntimeError("Exiting variable_creator_scope without proper nesting.")


def creators() -> tuple[Callable[..., Any], ...]:
    """Return the creators of this thread, innermost last."""
    return _creators.stack


def set_creators(stack: tuple[Callable[..., Any], ...]) -> None:
    """Replace the creators of this thread."""
    _creators.stack = stack
