"""Accumulation of gradients over the batches of one step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pycollective.tensor import GradientTape, Tensor, Variable, as_tensor


class GradientSums:
    """The sums of one replica's gradients over the batches of a step.

    Attributes
    ----------
    last : bool
        True in the last batch of the step.
    """

    def __init__(self) -> None:
        self.last = False
        self._sums: dict[tuple[int, int], Tensor] = {}

    def add(
        self, optimizer: Any, pairs: Sequence[tuple[Any, Variable]]
    ) -> list[tuple[Any, Variable]] | None:
        """Add the gradients of a batch.

        In the last batch of the step, return the sums with their variables. Return None before that.
        """
        totals = []
        for gradient, variable in pairs:
            key = (id(optimizer), id(variable))
            before = self._sums.pop(key, None)
            if gradient is None:
                total = before
            elif before is None:
                total = as_tensor(gradient)
            else:
                total = Tensor(before.array + as_tensor(gradient).array)
            totals.append((total, variable))
            if total is not None and not self.last:
                self._sums[key] = total
        return totals if self.last else None


class Recording:
    """The tape that `Optimizer.minimize` uses if it gets a loss tensor without a tape.

    Attributes
    ----------
    tape : GradientTape
        The tape of the current training step.
    share : callable
        A function that returns this replica's share of a loss.
    variables : callable
        A function that returns the trainable variables.
    optimizers : list of Optimizer
        The optimizers that used the tape.
    """

    def __init__(
        self,
        tape: GradientTape,
        share: Callable[[Any], Any],
        variables: Callable[[], list[Variable]],
    ) -> None:
        self.tape, self.share, self.variables = tape, share, variables
        self.optimizers: list[Any] = []


class _Thread(threading.local):
    #: The sums of this thread's step, or None if each batch is a step.
    sums: GradientSums | None = None
    #: The tape of this thread's step, or None if the program must pass a tape to `minimize`.
    recording: Recording | None = None


this_thread = _Thread()


class accumulated:
    """Let optimizers add the gradients of a block to ``sums``; None: do not accumulate gradients."""

    __slots__ = ("_before", "_inside")

    def __init__(self, sums: GradientSums | None) -> None:
        self._inside = sums

    def __enter__(self) -> None:
        self._before, this_thread.sums = this_thread.sums, self._inside

    def __exit__(self, *exc_info: object) -> None:
        this_thread.sums = self._before


@contextmanager
def recorded(recording: Recording) -> Iterator[Recording]:
    """Let `Optimizer.minimize` use the tape of a recording in a block."""
    before, this_thread.recording = this_thread.recording, recording
    try:
        yield recording
    finally:
        this_thread.recording = before
