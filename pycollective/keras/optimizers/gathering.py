"""Accumulation of gradients over the batches of one step."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pycollective.tensor import Tensor, Variable, as_tensor

__all__ = ["Gathering", "gathered", "this_thread"]


class Gathering:
    """The sums of one replica's gradients over the batches of a step.

    Attributes
    ----------
    last : bool
        True in the last batch of the step.
    """

    def __init__(self) -> None:
        self.last = False
        self._sums: dict[tuple[int, int], Tensor] = {}

    def joined(
        self, optimizer: Any, pairs: Sequence[tuple[Any, Variable]]
    ) -> list[tuple[Any, Variable]] | None:
        """Add the gradients of a batch.

        Parameters
        ----------
        optimizer
            The optimizer; each has its own sums.
        pairs
            Pairs of a gradient, or None, and a variable.

        Returns
        -------
        list of tuple, or None
            The sums with their variables in the last batch, None in others.
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


class _Thread(threading.local):
    #: The sums of this thread's step, or None if each batch is a step.
    gathering: Gathering | None = None


this_thread = _Thread()


@contextmanager
def gathered(gathering: Gathering | None) -> Iterator[None]:
    """Accumulate the gradients of a block."""
    before, this_thread.gathering = this_thread.gathering, gathering
    try:
        yield
    finally:
        this_thread.gathering = before
