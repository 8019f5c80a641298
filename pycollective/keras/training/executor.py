"""`Executor`: the steps of `fit`, `evaluate` and `predict`, in this thread or on workers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from pycollective.distribute.coordinator import ClusterCoordinator, RemoteValue
from pycollective.distribute.parameter_server import ParameterServerStrategy
from pycollective.distribute.strategy import Strategy

#: The number of steps scheduled ahead for each worker. More would only keep more batches in memory.
_AHEAD = 3


class Executor:
    """A function that makes a step with each of several elements.

    Under a `ParameterServerStrategy`, a call schedules the steps on workers and returns no results;
    `finish` waits for the workers, and returns the results. Under any other strategy, a call makes
    the steps and returns their results.

    Parameters
    ----------
    strategy
        The model's strategy.
    steps : callable
        ``steps(elements, *settings)``, which makes the steps and returns their results in a list.
    settings : tuple
        Further arguments of ``steps``.
    keep_all : bool
        True to keep the results of all scheduled calls for `finish`, False to keep the last call's.
    """

    def __init__(
        self,
        strategy: Strategy,
        steps: Callable[..., list[Any]],
        settings: tuple[Any, ...],
        keep_all: bool = False,
    ) -> None:
        self._steps, self._settings = steps, settings
        self._coordinator: ClusterCoordinator | None = None
        if isinstance(strategy, ParameterServerStrategy):
            self._coordinator = ClusterCoordinator(strategy)
            self._most = _AHEAD * strategy.extended.num_parameter_workers
        self._under_way: deque[RemoteValue] = deque()
        self._kept: deque[RemoteValue] = deque(maxlen=None if keep_all else 1)

    def __call__(self, elements: list[Any]) -> list[Any]:
        """Make a step with each element; return the results, or none if workers make the steps."""
        if self._coordinator is None:
            return self._steps(elements, *self._settings)
        if len(self._under_way) >= self._most:
            # Errors are ignored here, because the next call of schedule() or join() raises them.
            with contextlib.suppress(Exception):
                self._under_way.popleft().get()
        value = self._coordinator.schedule(self._steps, args=(elements, *self._settings))
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
