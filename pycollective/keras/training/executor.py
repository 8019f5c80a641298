"""`Executor`: the steps of `fit`, `evaluate` and `predict`, in this thread or on workers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycollective.distribute.coordinator import ClusterCoordinator, RemoteValue
from pycollective.distribute.parameter_server import ParameterServerStrategy
from pycollective.distribute.strategy import Strategy

if TYPE_CHECKING:
    from typing_extensions import Self

#: The number of calls scheduled ahead for each worker. More would only keep more batches in memory.
_AHEAD = 3


class Executor:
    """A function that makes a step with each of several elements.

    Under a `ParameterServerStrategy`, a call schedules the steps on workers and returns no results;
    `finish` waits for the workers, and returns the results. Under any other strategy, a call makes
    the steps and returns their results.

    Call an executor in its ``with`` block. If the block ends by an exception, the scheduled steps that
    wait are cancelled, and those that run are waited for. No step changes the model afterwards.
    Other functions that wait for the coordinator of the strategy are cancelled, too.

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
        #: True if steps may have been scheduled since the last `finish`.
        self._in_use = False
        self._under_way: deque[RemoteValue] = deque()
        self._kept: deque[RemoteValue] = deque(maxlen=None if keep_all else 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """After an error, cancel the scheduled steps that wait, and wait for those that run."""
        if error is None or self._coordinator is None or not self._in_use:
            return
        self._in_use = False
        self._under_way.clear()
        self._kept.clear()
        with contextlib.suppress(Exception):  # the caller gets the error of the block
            self._coordinator.cancel()

    def __call__(self, elements: list[Any]) -> list[Any]:
        """Make a step with each element; return the results, or none if workers make the steps."""
        if self._coordinator is None:
            return self._steps(elements, *self._settings)
        if len(self._under_way) >= self._most:
            try:
                self._under_way.popleft().get()
            except Exception:
                self._coordinator.done()  # raises the first error, unless other code has got it
                raise
        self._in_use = True
        value = self._coordinator.schedule(self._steps, args=(elements, *self._settings))
        self._under_way.append(value)
        self._kept.append(value)
        return []

    def finish(self) -> list[Any]:
        """Wait for the workers, and return the results that are kept, in the order of the calls."""
        if self._coordinator is None:
            return []
        self._coordinator.join()
        for value in self._under_way:
            value.get()  # raises the error if other code has cancelled the step
        self._in_use = False
        self._under_way.clear()
        results = [result for value in self._kept for result in value.get()]
        self._kept.clear()
        return results
