"""`PerWorkerVariable`: a variable with a value for each worker of a `ParameterServerStrategy`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from pycollective.array_backend import Array
from pycollective.distribute.worker_threads import current_worker
from pycollective.tensor import Tensor, Variable


class PerWorkerVariable(Variable):
    """A variable of which each worker has its own value; made by ``per_worker_variable=True``.

    A scheduled function reads and updates the value of the worker that runs it. The values are on the
    parameter servers, so a worker that replaces a lost one gets the value of the lost one.
    """

    def __init__(self, values: Sequence[Variable], name: str) -> None:
        first = values[0]
        self.set_attributes(first.trainable, name, first.synchronization, first.aggregation)
        self._distribute_strategy = first.distribute_strategy
        self._of_workers = tuple(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        values = [copy.deepcopy(variable, memo) for variable in self._of_workers]
        memo[id(self)] = copied = PerWorkerVariable(values, self._name)
        return copied

    def read_all(self) -> list[Tensor]:
        """Return the value of each worker."""
        return [Tensor(variable.numpy()) for variable in self._of_workers]

    def local(self) -> Variable:
        """Return this worker's variable.

        Raises
        ------
        RuntimeError
            This is not a scheduled function.
        """
        worker = current_worker.get()
        if worker is None:
            raise RuntimeError(
                f"variable {self._name!r} has a value for each worker: read it in a scheduled function, "
                "or call read_all()"
            )
        return self._of_workers[worker]

    def like(self) -> Tensor:
        return self._of_workers[0].like()

    def current(self) -> Tensor:
        return self.local().current()

    def _read(self) -> Tensor:
        return self.local()._read()

    def _write(self, method: str, value: Any) -> Variable:
        """Set this worker's value; outside of scheduled functions an `assign` sets every worker's."""
        if method != "assign":
            return super()._write(method, value)
        every = self._of_workers if current_worker.get() is None else (self.local(),)
        for variable in every:
            variable.assign(value)
        return self

    def set_array(self, array: Array) -> None:
        self.local().set_array(array)

    def update_inplace(self, update: Callable[[Array], Any]) -> None:
        self.local().update_inplace(update)

    @property
    def dtype(self) -> Any:
        return self.like().dtype

    @property
    def shape(self) -> Any:
        return self.like().shape

    @property
    def ndim(self) -> int:
        return self.like().ndim

    def __len__(self) -> int:
        return len(self.like())

    def __repr__(self) -> str:
        return f"<PerWorkerVariable {self._name!r}, {len(self._of_workers)} workers>"
