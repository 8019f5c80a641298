"""Steps that are made of several batches: gradients are gathered until the last of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pycollective.tensor import Tensor, Variable, as_tensor

__all__ = ["Gathering", "gathered", "this_thread"]


class Gathering:
    """The gradients of one replica in the batches of one step so far.

    Attributes
    ----------
    last : bool
        Whether the present batch is the step's last one.
    """

    def __init__(self) -> None:
        self.last = False
        self._sums: dict[tuple[int, int], Tensor] = {}

    def joined(
        self, optimizer: Any, pairs: Sequence[tuple[Any, Variable]]
    ) -> list[tuple[Any, Variable]] | None:
        """Add gradients to those of the batches before.

        Parameters
        ----------
        optimizer
            Whose step it is: several gather beside each other.
        pairs
            Of a gradient, or None, and a variable.

        Returns
        -------
        list of tuple, or None
            The pairs of the whole step in its last batch, before that None.
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
    #: What this thread's gradients are gathered in, or None if each batch is a step.
    gathering: Gathering | None = None


this_thread = _Thread()


@contextmanager
def gathered(gathering: Gathering | None) -> Iterator[None]:
    """Let the gradients of a block be gathered."""
    before, this_thread.gathering = this_thread.gathering, gathering
    try:
        yield
    finally:
        this_thread.gathering = before
