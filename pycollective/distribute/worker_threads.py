"""The state of code that runs scheduled functions, or creates variables on servers.

The replicas of a worker have the state of the thread that calls `Strategy.run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from pycollective.tensor import Tensor, Variable

current_worker: ContextVar[int | None] = ContextVar("current_worker", default=None)
"""The number of the worker that runs this code, or None outside of scheduled functions."""

created_beside: ContextVar[Variable | None] = ContextVar("created_beside", default=None)
"""Variables are created on the servers of this variable, if it is not None."""

cached_reads: ContextVar[dict[int, Tensor] | None] = ContextVar("cached_reads", default=None)
"""The values that were read in `cache_variable_reads`, by the ids of the variables."""


@contextmanager
def cache_variable_reads() -> Iterator[None]:
    """Read each variable of a parameter server at most once in the block.

    Later reads return the same value, until this thread updates the variable. Without the block, a
    function that maps the variables sees the updates of other workers at each read. The block has no
    effect for workers that are threads, and none over TCP, where a function reads each variable once.
    """
    token = cached_reads.set({})
    try:
        yield
    finally:
        cached_reads.reset(token)
