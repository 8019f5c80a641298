"""`dry_run`: calls of layers that only find out shapes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pycollective.tensor import Tensor, Variable


class _Thread(threading.local):
    #: In a dry run: the components of variables by their ids, each with the value to go back to.
    kept: dict[int, tuple[Variable, Tensor]] | None = None


_thread = _Thread()


def in_dry_run() -> bool:
    """Return True if this thread is in a `dry_run`."""
    return _thread.kept is not None


@contextmanager
def dry_run(variables: Iterable[Variable]) -> Iterator[None]:
    """Undo what calls of layers inside the block assign to variables.

    Layers that are built inside the block go back to the values after their ``build``.
    """
    if in_dry_run():
        yield
        return
    _thread.kept = {}
    keep_values(variables)
    try:
        yield
    finally:
        kept, _thread.kept = _thread.kept, None
        for variable, value in kept.values():
            # The value is still there: variables copy what somebody holds before they write.
            variable._tensor = value


def keep_values(variables: Iterable[Variable]) -> None:
    """Make the present values those that a `dry_run` goes back to."""
    if _thread.kept is None:
        return
    for variable in variables:
        for component in getattr(variable, "values", (variable,)):
            _thread.kept[id(component)] = component, component._current()
