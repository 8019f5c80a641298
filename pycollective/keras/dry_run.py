"""`dry_run`: calls of layers that only compute shapes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pycollective.tensor import Tensor, Variable


class _Thread(threading.local):
    #: In a dry run: each replica's component of a variable, by id, with the value to restore.
    kept: dict[int, tuple[Variable, Tensor]] | None = None


_thread = _Thread()


def in_dry_run() -> bool:
    """Return True if this thread is in a `dry_run`."""
    return _thread.kept is not None


@contextmanager
def dry_run(variables: Iterable[Variable]) -> Iterator[None]:
    """Undo the assignments of layer calls inside the block.

    Variables of layers that are built inside the block are restored to their values after ``build``.
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
            # The saved value is unchanged, because a variable copies a shared value before a write.
            variable._tensor = value


def keep_values(variables: Iterable[Variable]) -> None:
    """Let the enclosing `dry_run`, if any, restore the variables' current values."""
    if _thread.kept is None:
        return
    for variable in variables:
        for component in getattr(variable, "values", (variable,)):
            _thread.kept[id(component)] = component, component.current()
