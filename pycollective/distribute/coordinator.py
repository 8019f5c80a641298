"""`ClusterCoordinator`: functions that the workers of a `ParameterServerStrategy` run asynchronously.

The coordinator is the program's own thread. A `RemoteValue` is the result of a function.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from pycollective import nest
from pycollective.arguments import number_of, whole
from pycollective.comm import tracing
from pycollective.data import Dataset
from pycollective.distribute.function_digests import take_digests
from pycollective.distribute.function_queue import (
    NO_ARGUMENTS,
    NO_VALUES,
    Closure,
    FunctionQueue,
    called,
    end_of_dataset,
    no_name,
)
from pycollective.distribute.input import DistributedDataset
from pycollective.distribute.parameter_server import ParameterServerStrategy
from pycollective.distribute.per_worker import (
    ClosureInputError,
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    RemoteValue,
    Worker,
    as_result,
    as_worker_0,
    refuse_in_worker,
)
from pycollective.distribute.server import Server
from pycollective.distribute.task_links import Link
from pycollective.distribute.task_values import decode, encode, error_message, error_of
from pycollective.distribute.worker_threads import current_worker
from pycollective.errors import (
    NotAvailableError,
)
from pycollective.tensor.function import ConcreteFunction

__all__ = [
    "ClosureInputError",
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]

PerWorkerValue = PerWorkerValues

#: Held while a strategy gets its coordinator.
_making = threading.Lock()

#: Seconds between two samples of the servers' load for timelines.
_SAMPLES = 0.1


class _ElementsOfChief:
    """A worker's iterator over a dataset that the chief reads, because only the chief has made it."""

    def __init__(self, chief: Link, name: tuple[int, int]) -> None:
        self._chief = chief
        self._name = name

    def __iter__(self) -> _ElementsOfChief:
        return self

    def __next__(self) -> Any:
        message, arrays = self._chief.call({"next": self._name}, spins=True)
        if "end" in message:
            raise StopIteration
        if "error" in message:
            error = error_of(message, self._chief.task)
            raise ClosureInputError(error) if "original" in message else error
        return decode(message.get("tokens"), arrays, no_name)

    get_next = __next__


class ClusterCoordinator:
    """Schedules functions on the workers of a `ParameterServerStrategy`.

    Parameters
    ----------
    strategy : ParameterServerStrategy
        The strategy. It has one coordinator: a second call returns the same object.

    Raises
    ------
    ValueError
        ``strategy`` is another strategy.

    Notes
    -----
    If a function raises an error, the next `schedule`, `join` or `done` cancels the functions that
    wait, waits for those that run, and raises the error once. The coordinator can then be used again.
    Errors of further functions are dropped; `RemoteValue.fetch` raises each function's own error.
    """

    strategy: ParameterServerStrategy
    #: None in the process of a worker.
    _queue: FunctionQueue | None
    #: The number of per-worker datasets, and the datasets themselves in the process of a worker.
    _created: int
    _datasets: list[PerWorkerDataset]
    #: The time of the last sample of the servers' load for timelines.
    _sampled: float

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        """Return the strategy's coordinator; make it if there is none."""
        if not isinstance(strategy, ParameterServerStrategy):
            raise ValueError(
                "Only `tf.distribute.experimental.ParameterServerStrategy` is supported to work with "
                "`tf.distribute.experimental.coordinator.ClusterCoordinator` currently, not "
                f"{strategy!r}."
            )
        with _making:
            known = strategy.coordinator
            if isinstance(known, ClusterCoordinator) and known.strategy is strategy:
                return known
            self = super().__new__(cls)
            self.strategy = strategy
            tasks = strategy.extended.tasks
            self._created, self._datasets = 0, []
            self._sampled = -math.inf
            self._queue = None
            if not isinstance(tasks, Server):
                self._queue = FunctionQueue(strategy.extended.num_parameter_workers, tasks)
                weakref.finalize(self, self._queue.close)
            strategy.coordinator = self
            return self

    def schedule(
        self, fn: Any, args: Any = None, kwargs: Any = None, *, steps_per_call: int = 1
    ) -> RemoteValue:
        """Run a function on the next free worker, and return at once.

        Parameters
        ----------
        fn : callable
            A function that ``tf.function`` returned, or a concrete function of it. It runs in the
            strategy's scope, at least once: again on another worker if its worker is lost.
        args, kwargs : sequence, dict, optional
            Its arguments. `PerWorkerValues` are replaced by the worker's own value.
        steps_per_call : int
            The number of times that the worker calls the function, one after the other. The result is
            that of the last call. Fewer messages are sent for a function that takes little time.

        Returns
        -------
        RemoteValue
            The result: a nest of tensors, arrays, numbers, texts and None.

        Raises
        ------
        TypeError
            ``fn`` was not made by ``tf.function``, or does not accept the arguments. Or ``args`` is not
            a list or tuple; ``kwargs`` is not a dict; ``steps_per_call`` is not a whole number.
        ValueError
            An argument is a `RemoteValue`, or a `PerWorkerValues` without one value for each worker;
            ``steps_per_call`` is less than 1.
        RuntimeError
            This is a scheduled function.
        Exception
            The error of a function that was scheduled before.
        """
        if not hasattr(fn, "python_function"):
            raise TypeError(
                "`tf.distribute.experimental.coordinator.ClusterCoordinator.schedule` only accepts a "
                f"`tf.function` or a concrete function, not {fn!r}; decorate it with @tf.function."
            )
        steps_per_call = whole("steps_per_call", steps_per_call)
        if steps_per_call < 1:
            raise ValueError(f"steps_per_call must be at least 1, got {steps_per_call}")
        if not isinstance(args, (list, tuple, type(None))):
            raise TypeError(f"args must be a list or a tuple of arguments, not {args!r}")
        if not isinstance(kwargs, (dict, type(None))):
            raise TypeError(f"kwargs must be a dict of arguments, not {kwargs!r}")
        self.become_worker()
        assert self._queue is not None
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        if isinstance(fn, ConcreteFunction):
            args, kwargs = fn.arguments(args, kwargs)
            fn = fn.function
        fn.bind(args, kwargs)
        closure = Closure(self.strategy, fn, args, kwargs, steps_per_call)
        self._queue.put(closure)
        if time.monotonic() >= self._sampled + _SAMPLES:
            self._sample()
        return closure.value

    def _sample(self) -> None:
        """Add the servers' load to this process's timelines; tell the servers of dropped variables."""
        self._sampled = time.monotonic()
        if self.strategy.extended.servers is not None:
            self.strategy.extended.servers.tell_dropped()
        tracing.sample(self.strategy.extended.load)

    def create_variables(self, make: Callable[[], Any]) -> None:
        """Call a function in a cluster, so that it creates its variables; no variable keeps a change.

        The chief and the workers then have the variables, in the same order.
        """
        servers = self.strategy.extended.servers
        assert servers is not None
        before, servers.private = servers.private, True
        try:
            with as_worker_0():
                make()
        finally:
            servers.forget_all()
            servers.private = before

    def become_worker(self) -> None:
        """Run the functions that the chief schedules, if this is the process of a worker.

        In the process of a worker, this method does not return. Elsewhere it only records that the
        program has started to schedule functions.
        """
        refuse_in_worker("schedule()")
        if not self.strategy.extended.started and self.strategy.extended.tasks is not None:
            take_digests()
        self.strategy.extended.started = True
        if self._queue is not None:
            return
        server, servers = self.strategy.extended.tasks, self.strategy.extended.servers
        assert isinstance(server, Server) and servers is not None
        worker = Worker(server.task_index)
        current_worker.set(worker.number)
        iterators: dict[tuple[int, int], PerWorkerIterator] = {}

        def named(token: list[Any]) -> Any:
            kind, dataset, number, oldest = token
            if kind != "iterator" or not isinstance(number, int):
                raise ValueError(f"a value of kind {kind!r}")
            for key in [key for key in iterators if key[0] == dataset and key[1] < oldest]:
                del iterators[key]  # the program no longer has this iterator
            if not 0 <= dataset < len(self._datasets):
                assert server.chief is not None
                return _ElementsOfChief(server.chief, (dataset, number))
            if (dataset, number) not in iterators:
                iterators[dataset, number] = self._datasets[dataset].iterator(number)
            return iterators[dataset, number].on(worker)

        def run(message: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
            function = called(message)
            steps = message["steps"]
            try:
                tokens = message.get("tokens")
                empty = tokens == NO_ARGUMENTS
                args, kwargs = NO_VALUES if empty else decode(tokens, arrays, named)
                servers.follow(message["servers"])
                for step in range(steps):
                    if step:
                        servers.end()
                    servers.begin(function.made)
                    result = function(*args, **kwargs)
                result = nest.map_structure(as_result, result)
                tokens, found = encode(result, lambda value: None)
            except StopIteration as end:
                raise end_of_dataset(end) from None
            except ClosureInputError as error:
                return {**error_message(error.original_exception), "original": True}, []
            except SystemExit as end:  # else each worker would end in turn
                name = function.made[0]
                raise RuntimeError(f"{name} called sys.exit({end.code!r}) on a worker") from None
            finally:
                servers.end()  # after an error, too: a mapped variable keeps the changes
            return {"tokens": tokens}, found

        servers.start()
        with self.strategy.scope():
            server.work(run)

    def join(self, timeout: float | None = None) -> None:
        """Wait until all scheduled functions have ended, or raise the error of the first that failed.

        Raises
        ------
        UnavailableError
            A parameter server in another process is lost; every later call raises this error, too. Or
            no worker has been connected for a minute.
        DeadlineExceededError
            Functions run or wait after ``timeout`` seconds; by default there is no limit.
        """
        timeout = (
            None if timeout is None else min(number_of("timeout", timeout), threading.TIMEOUT_MAX)
        )
        refuse_in_worker("join()")
        if self._queue is not None:  # a worker has no queue; its chief has scheduled nothing yet
            self._queue.join(timeout)
            self._sample()

    def cancel(self) -> None:
        """Cancel the functions that wait, wait for those that run, and drop their errors."""
        refuse_in_worker("cancel()")
        if self._queue is not None:
            self._queue.cancel()

    def done(self) -> bool:
        """Return True if all scheduled functions have ended; errors as `join`."""
        refuse_in_worker("done()")
        return self._queue is None or self._queue.is_done()

    def fetch(self, val: Any) -> Any:
        """Return a nest with the results of the `RemoteValue` objects in it; see `RemoteValue.fetch`."""
        return nest.map_structure(lambda v: v.fetch() if isinstance(v, RemoteValue) else v, val)

    def create_per_worker_dataset(self, dataset: Any) -> PerWorkerDataset:
        """Return a dataset for each worker, which iterates over all of its elements.

        In a cluster, each worker reads its own dataset if this method is called before the first
        `schedule`. The chief reads later datasets, and sends each worker the elements that it asks for.

        Parameters
        ----------
        dataset : Dataset, DistributedDataset, or callable
            The dataset, or a function without arguments that returns it. Each worker calls the function
            once for each iterator; it must not create variables.

        Raises
        ------
        TypeError
            ``dataset`` is something else.
        """
        if not (isinstance(dataset, (Dataset, DistributedDataset)) or callable(dataset)):
            raise TypeError(
                "create_per_worker_dataset() needs a Dataset, a distributed dataset or a function that "
                f"returns one, got {dataset!r}"
            )
        found = PerWorkerDataset(dataset, self._created)
        self._created += 1
        if self._queue is None:
            self._datasets.append(found)
        return found

    def simulate_worker_loss(self, worker: int) -> None:
        """Replace a worker, as if its machine had been preempted, to test a program.

        The worker's function is scheduled again. Its thread runs to the end of the function, whose
        result is dropped. The new worker makes its own iterators.

        Raises
        ------
        ValueError
            There is no such worker.
        NotAvailableError
            The workers are other processes.
        """
        workers = self.strategy.extended.num_parameter_workers
        if not 0 <= worker < workers:
            raise ValueError(f"there is no worker {worker}; there are 0 to {workers - 1}")
        if self.strategy.extended.tasks is not None:
            raise NotAvailableError(
                "simulate_worker_loss() replaces threads; in a cluster end the worker's process"
            )
        assert self._queue is not None
        self._queue.lose(worker)


def experimental_get_current_worker_index() -> int:
    """Return the number of the worker that runs a scheduled function.

    Raises
    ------
    RuntimeError
        This is not a scheduled function.
    """
    worker = current_worker.get()
    if worker is None:
        raise RuntimeError(
            "Cannot retrieve the worker index. `get_worker_idx_and_num_workers` should be called from "
            "within a tf.function being executed on a worker."
        )
    return worker
