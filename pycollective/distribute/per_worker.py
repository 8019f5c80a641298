"""Values of the workers of a `ClusterCoordinator`: results, arguments, and datasets."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from pycollective import nest
from pycollective.array_backend import beside, copy
from pycollective.data import Dataset
from pycollective.distribute.default import get_strategy
from pycollective.distribute.input import DistributedDataset
from pycollective.distribute.task_links import Link
from pycollective.distribute.values import PerReplica
from pycollective.distribute.worker_threads import current_worker
from pycollective.tensor import IndexedSlices, Tensor, Variable, creator_scope


class Worker:
    """A worker: its number, the scheduled function that it runs, and the iterators that it has made.

    Attributes
    ----------
    link : Link or None
        The connection to a worker in another process.
    disconnected : bool
        True: the connection has ended, and the worker's thread makes a new one.
    retired : bool
        True: the worker gets no more functions, and its thread ends.
    """

    def __init__(self, number: int, link: Link | None = None) -> None:
        self.number = number
        self.link = link
        self.closure: Any = None
        self.retired = self.disconnected = False
        self.iterators: weakref.WeakKeyDictionary[PerWorkerIterator, Any] = (
            weakref.WeakKeyDictionary()
        )


class ClosureInputError(Exception):
    """An argument of a scheduled function could not be made on the worker.

    Attributes
    ----------
    original_exception : Exception
        The error of the function that makes the argument, such as a ``dataset_fn``.
    """

    def __init__(self, original_exception: BaseException) -> None:
        if isinstance(original_exception, ClosureInputError):
            original_exception = original_exception.original_exception
        self.original_exception: BaseException = original_exception
        super().__init__(
            f"Input has an error, the original exception is {original_exception!r}, error message is "
            f"{original_exception}."
        )


class RemoteValue:
    """The result of a function that `ClusterCoordinator.schedule` runs on a worker, perhaps later."""

    def __init__(self) -> None:
        # Locked until the result is set. An Event would cost more, because it is written in Python.
        self._pending = threading.Lock()
        self._pending.acquire()
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        #: Runs the function in the caller's thread, if it still waits for a worker.
        self.run_now: Callable[[], None] | None = None

    def fetch(self) -> Any:
        """Wait for the function, and return its result with NumPy arrays in the place of tensors.

        Raises
        ------
        CancelledError
            The function was cancelled: another one failed, or the program cancelled it.
        RuntimeError
            This is a scheduled function.
        Exception
            The error of the function.
        """
        return nest.map_structure(_as_numpy, self.get())

    def get(self) -> Any:
        """Wait for the function, and return its result with tensors; errors as `fetch`."""
        refuse_in_worker("RemoteValue.get()")
        if not self._done and self.run_now is not None:
            self.run_now()
        if not self._done:
            with self._pending:
                pass
        if self._error is not None:
            raise self._error
        return self._value

    def complete(self, value: Any, error: BaseException | None = None) -> None:
        """Set the result or the error, and wake the threads that wait for it."""
        self._value, self._error, self.run_now = value, error, None
        self._done = True
        self._pending.release()

    def __repr__(self) -> str:
        state = "not ready"
        if self._done:
            state = "ready" if self._error is None else f"failed: {self._error!r}"
        return f"<RemoteValue, {state}>"


class PerWorkerValues:
    """A value for each worker; a scheduled function gets the value of the worker that runs it."""

    #: The number of values, or None for any number of workers.
    count: int | None = None

    def __init__(self, values: Sequence[Any]) -> None:
        if not isinstance(values, (list, tuple)):
            raise TypeError(
                f"PerWorkerValues needs a list or a tuple with a value for each worker, not {values!r}"
            )
        self._values = tuple(values)
        self.count = len(self._values)

    def on(self, worker: Worker) -> Any:
        """Return the value for a worker."""
        return self._values[worker.number]


class PerWorkerIterator(PerWorkerValues):
    """An iterator for each worker, which the worker makes when a function first needs it.

    A worker that takes the place of a lost one makes its own iterator. ``name`` has the dataset's
    number, and this iterator's number among those of the dataset. Both are equal in all processes.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[Any]],
        name: tuple[int, int],
        alive: weakref.WeakSet[PerWorkerIterator],
    ) -> None:
        self._make = make
        self.name = name
        #: The iterators of the dataset that the program still has.
        self._alive = alive
        alive.add(self)

    @property
    def oldest(self) -> int:
        """The first number of the dataset's iterators that the program still has."""
        return min(iterator.name[1] for iterator in self._alive)

    def on(self, worker: Worker) -> Any:
        """Return the worker's iterator; raise ClosureInputError if it cannot be made."""
        found = worker.iterators.get(self)
        if found is None:
            try:
                found = self._make()
            except BaseException as error:
                found = ClosureInputError(error)
            worker.iterators[self] = found
        if isinstance(found, ClosureInputError):
            raise found
        return found

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        """Raise NotImplementedError: only workers iterate."""
        raise NotImplementedError(
            "the coordinator cannot iterate over a per-worker dataset: give the iterator to a function "
            "that ClusterCoordinator.schedule() runs on a worker, and call next() there"
        )

    get_next = __next__


class PerWorkerDataset:
    """A dataset for each worker; ``iter()`` returns an iterator for each worker.

    ``number`` is the dataset's number among those of its coordinator.
    """

    def __init__(self, source: Any, number: int) -> None:
        self._source = source
        self.number = number
        self._iterators = 0
        self._alive: weakref.WeakSet[PerWorkerIterator] = weakref.WeakSet()

    def _dataset(self) -> Any:
        if isinstance(self._source, (Dataset, DistributedDataset)):
            return self._source
        with creator_scope(_no_variable):
            return self._source()

    def __iter__(self) -> PerWorkerIterator:
        if current_worker.get() is not None:
            raise RuntimeError(
                "__iter__() of a per-worker dataset is not supported inside of a scheduled function: "
                "call iter() on the coordinator, and give the function the result"
            )
        self._iterators += 1
        return self.iterator(self._iterators - 1)

    def iterator(self, number: int) -> PerWorkerIterator:
        """Return a new iterator with a number."""
        return PerWorkerIterator(lambda: iter(self._dataset()), (self.number, number), self._alive)

    @property
    def element_spec(self) -> Any:
        """The spec of the elements; a function that makes the dataset is called for it."""
        with as_worker_0():
            return self._dataset().element_spec

    def first(self) -> Any:
        """Return the first element that worker 0 would read, or None if the dataset is empty."""
        with as_worker_0():
            return next(iter(self._dataset()), None)


@contextmanager
def as_worker_0() -> Iterator[None]:
    """Run the block as worker 0."""
    token = current_worker.set(0)
    try:
        yield
    finally:
        current_worker.reset(token)


def _no_variable(next_creator: Callable[..., Variable], **kwargs: Any) -> NoReturn:
    raise ValueError("Creating variables in `dataset_fn` is not allowed.")


def refuse_in_worker(call: str) -> None:
    """Raise RuntimeError in a scheduled function."""
    if current_worker.get() is not None:
        raise RuntimeError(
            f"{call} was called in a scheduled function, where it could wait for itself; call it on the "
            "coordinator"
        )


_PLAIN = (int, float, complex, bool, str, bytes, type(None), np.generic)


def as_result(value: Any) -> Any:
    """Return a leaf of a function's result, which the program and later updates do not change.

    A variable becomes its present value, and arrays are copied.
    """
    if isinstance(value, Tensor):
        return _own_tensor(value)
    if isinstance(value, Variable):
        return _copied(value.current())
    if isinstance(value, IndexedSlices):
        values, indices = _own_tensor(value.values), _own_tensor(value.indices)
        return IndexedSlices(values, indices, value.dense_shape)
    if isinstance(value, PerReplica):
        return PerReplica([as_result(component) for component in value.values])
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(
        f"a scheduled function returned a {type(value).__name__}, which cannot be sent from a worker: "
        "return a nest of tensors, arrays, numbers, texts and None"
    )


def _own_tensor(tensor: Tensor) -> Tensor:
    # In a cluster the result is sent before the next function runs.
    is_sent = getattr(get_strategy().extended, "tasks", None) is not None
    return tensor if is_sent else _copied(tensor)


def _copied(tensor: Tensor) -> Tensor:
    with beside(tensor.array):
        return Tensor(copy(tensor.array))


def _as_numpy(value: Any) -> Any:
    if isinstance(value, PerReplica):
        return PerReplica([_as_numpy(component) for component in value.values])
    return value.numpy() if isinstance(value, Tensor) else value
