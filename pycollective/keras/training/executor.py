"""`Executor`: the steps of `fit`, `evaluate` and `predict`, in this thread or on workers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pycollective.distribute.coordinator import ClusterCoordinator, RemoteValue
from pycollective.distribute.parameter_server import ParameterServerStrategy
from pycollective.distribute.strategy import Strategy
from pycollective.errors import NotAvailableError
from pycollective.tensor import function

#: The scheduled functions for each worker. More would keep batches in memory without need.
_AHEAD = 3


class Executor:
    """A function that makes a step with each of several elements.

    The workers of a `ParameterServerStrategy` make the steps while the program goes on. A call then
    returns no result; `finish` waits for the results. Other strategies return the results at once.

    Parameters
    ----------
    strategy
        The strategy.
    run
        The function: it takes a list of elements, and returns a list of results.
    keep_all
        True if `finish` returns the results of all calls, and not only those of the last one.
    """

    def __init__(
        self, strategy: Strategy, run: Callable[[list[Any]], list[Any]], keep_all: bool = False
    ) -> None:
        self._run = run
        self._coordinator: ClusterCoordinator | None = None
        if isinstance(strategy, ParameterServerStrategy):
            if strategy.extended.tasks is not None:
                raise NotAvailableError(
                    "fit, evaluate and predict are not implemented for parameter servers in other "
                    "processes: write the training loop with ClusterCoordinator.schedule(), or leave "
                    "out the cluster, so that servers and workers are threads"
                )
            self._coordinator = ClusterCoordinator(strategy)
            self._most = _AHEAD * strategy.extended.num_parameter_workers
            self._scheduled = function(lambda elements: run([_element(e) for e in elements]))
        self._under_way: deque[RemoteValue] = deque()
        self._kept: deque[RemoteValue] = deque(maxlen=None if keep_all else 1)

    def __call__(self, elements: list[Any]) -> list[Any]:
        """Make a step with each element; return the results, or none if workers make the steps."""
        if self._coordinator is None:
            return self._run(elements)
        if len(self._under_way) >= self._most:
            # The next call of schedule() raises the error of a function.
            with contextlib.suppress(Exception):
                self._under_way.popleft().get()
        value = self._coordinator.schedule(self._scheduled, args=(elements,))
        self._under_way.append(value)
        self._kept.append(value)
        return []

    def finish(self) -> list[Any]:
        """Wait for the workers, and return the results that are kept, in the order of the calls."""
        if self._coordinator is None:
            return []
        self._coordinator.join()
        self._under_way.clear()
        results = [result for value in self._kept for result in value.get()]
        self._kept.clear()
        return results


def _element(element: Any) -> Any:
    """Return a batch: the element itself, or the next one of this worker's iterator."""
    return next(element) if isinstance(element, Iterator) else element
