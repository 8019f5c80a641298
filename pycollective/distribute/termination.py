"""`TerminationConfig`: the reaction of a program to the preemption of its machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["TerminationConfig"]


@dataclass(eq=False)
class TerminationConfig:
    """The notice on which a program ends, and the way it ends.

    Parameters
    ----------
    termination_watcher_fn : callable, optional
        Called repeatedly; returns True when the program must end.
    exit_fn : callable, optional
        Called after the checkpoint was saved.
    grace_period : float, optional
        The seconds between the notice and the end.
    save_fn : callable, optional
        Called to save; by default the checkpoint manager's `save`.

    Raises
    ------
    TypeError
        One of the functions is not callable.
    ValueError
        ``grace_period`` is negative.
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
