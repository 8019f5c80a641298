"""`TerminationConfig`: what a program does when its machine is taken away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["TerminationConfig"]


@dataclass(eq=False)
class TerminationConfig:
    """How a program learns that it has to end, and how it ends.

    Parameters
    ----------
    termination_watcher_fn : callable, optional
        Called again and again; returns whether the program has to end.
    exit_fn : callable, optional
        Called when the checkpoint is saved.
    grace_period : float, optional
        For how many seconds the program may go on after it was told.
    save_fn : callable, optional
        Saves; by default the checkpoint is written.

    Raises
    ------
    TypeError
        If one of the functions cannot be called.
    ValueError
        If ``grace_period`` is negative.
    """

    termination_watcher_fn: Callable[[], Any] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"`{name}` must be callable, not {function!r}")
        if self.grace_period is not None and self.grace_period < 0:
            raise ValueError(f"`grace_period` must be >= 0 seconds, got {self.grace_period}")
