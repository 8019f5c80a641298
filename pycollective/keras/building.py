"""How objects that make variables late make them when replicas use them at the same time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pycollective.distribute.context import created_once, current_mode


def build_scope_of_new() -> Callable[[Any], AbstractContextManager[Any]]:
    """Return the scope, a function of the object, in which an object made here is to be built.

    An object that was made outside of the replicas is shared by them: whichever comes first builds
    it for all. One that a replica made is its own, and every replica has one like it: they are
    all built, and the strategy gives variables that are made at the same point to all of them.
    """
    mode = current_mode()
    if mode is None or mode.replica_context is None:
        return created_once
    return nullcontext
