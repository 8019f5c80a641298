"""The scope in which objects make variables after their construction, also in replicas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pycollective.distribute.context import created_once, current_mode


def build_scope_of_new() -> Callable[[Any], AbstractContextManager[Any]]:
    """Return a function of an object that returns the scope in which to build the object.

    Replicas share an object that was made outside of them: the first replica builds it for all. If
    each replica made its own object, all objects are built, and the strategy joins the variables
    that the replicas make at the same point.
    """
    mode = current_mode()
    if mode is None or mode.replica_context is None:
        return created_once
    return nullcontext
