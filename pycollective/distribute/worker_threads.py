"""The state of a thread that runs scheduled functions, or creates variables on servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pycollective.tensor import Tensor, Variable


class _Thread(threading.local):
    #: The number of the worker whose thread this is, or None outside of scheduled functions.
    worker: int | None = None
    #: Variables are created on the servers of this variable, if it is not None.
    beside: Variable | None = None
    #: The values that this thread has read in `cache_variable_reads`, by the ids of the variables.
    read: dict[int, Tensor] | None = None


this_thread = _Thread()


@contextmanager
def cache_variable_reads() -> Iterator[None]:
    """Read each variable of a parameter server at most once in the block.

    Later reads return the same value, until this thread updates the variable. Without the block, a
    function that maps the variables sees the updates of other workers at each read. The block has no
    effect for workers that are threads, and none over TCP, where a function reads each variable once.
    """
    before, this_thread.read = this_thread.read, {}
    try:
        yield
    finally:
        this_thread.read = before
