"""`ClusterCoordinator`: functions that the workers of a `ParameterServerStrategy` run asynchronously.

The coordinator is the program's own thread. `_Queue` holds the scheduled functions. Each worker is a
thread that takes one function after the other. A `RemoteValue` is the result of a function.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from pycollective import nest
from pycollective.arguments import number_of, whole
from pycollective.comm import tracing
from pycollective.data import Dataset
from pycollective.distribute.blas_threads import shared_among
from pycollective.distribute.context import current_mode
from pycollective.distribute.function_digests import digest_of, globals_of, take_digests
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
from pycollective.distribute.server import Chief, Server
from pycollective.distribute.task_links import Link, LinkLostError
from pycollective.distribute.task_values import decode, encode, error_message, error_of
from pycollective.distribute.worker_threads import this_thread
from pycollective.errors import (
    CancelledError,
    CollectiveError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotAvailableError,
    NotFoundError,
    OutOfRangeError,
    UnavailableError,
)
from pycollective.tensor.function import function_made
from pycollective.tensor.tape import thread_state
from pycollective.tensor.variable import creators

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

#: The number of functions that wait for a worker before `schedule` waits, as in TensorFlow.
_QUEUE_SIZE = 262_144


#: Seconds that a lost worker has to return, as in TensorFlow, and seconds without any worker until an
#: error.
_RECOVERY, _NO_WORKER = 3600.0, 60.0

#: Seconds. After the program's own thread has run a function, `put` wakes no worker's thread. One
#: thread polls for functions instead: for the first time, at intervals of the second.
_POLL_SECONDS, _POLL_INTERVAL = 0.05, 0.001

#: Seconds between two samples of the servers' load for timelines.
_SAMPLES = 0.1

_log = logging.getLogger("pycollective")


#: No arguments, and their tokens.
_NO_VALUES: Any = ((), {})
_NO_ARGUMENTS = [["tuple", 2], ["tuple", 0], ["dict", 0]]


def call_of(function: Any, arguments: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the message that calls a function on a worker in another process."""
    if getattr(function, "__self__", None) is not None:
        raise TypeError(
            f"schedule() in a cluster cannot send the object of the method {function!r} to a worker: "
            "decorate a function with @tf.function"
        )

    def named(value: Any) -> list[Any] | None:
        if isinstance(value, PerWorkerIterator):
            return ["iterator", *value.name, value.oldest]
        return None

    args, kwargs = arguments
    tokens, arrays = encode(arguments, named) if args or kwargs else (_NO_ARGUMENTS, [])
    name = [*function.made, digest_of(function)]
    return {"request": "call", "function": name, "tokens": tokens}, arrays


def called(message: dict[str, Any]) -> Any:
    """Return this program's function for a message of `call_of`."""
    name, number, digest = message["function"]
    function = function_made(name, number)
    if function is None:
        raise NotFoundError(
            f"function {name!r} (number {number} of this name) is not known to the worker: a worker "
            "runs the chief's program up to the first ClusterCoordinator.schedule(), so decorate all "
            "functions with @tf.function before that, and keep them"
        )
    if digest_of(function) != digest:
        names = ", ".join(globals_of(function)) or "none"
        raise FailedPreconditionError(
            f"function {name!r} differs between the chief and the worker, or a function, a class or a "
            "global that it uses: a worker with another program version, or another version of Python. "
            "Start the same program on all tasks, and give its globals the same values on all tasks "
            f"before the first schedule(): {names[:400]}"
        )
    return function


def _no_name(token: list[Any]) -> NoReturn:
    raise ValueError(f"a result of kind {token[0]!r}")


class _Closure:
    """A scheduled function with its arguments, and the value for its result."""

    def __init__(
        self, strategy: ParameterServerStrategy, function: Any, args: Any, kwargs: Any, steps: int
    ) -> None:
        self.strategy = strategy
        self.function = function
        self.arguments = args, kwargs
        self._steps = steps
        self.value = RemoteValue()
        leaves = nest.flatten(self.arguments)
        if any(isinstance(leaf, RemoteValue) for leaf in leaves):
            raise ValueError(
                "`tf.distribute.experimental.coordinator.RemoteValue` used as an input to scheduled "
                "function is not yet supported. Fetch it first."
            )
        in_cluster = strategy.extended.tasks is not None
        workers = strategy.extended.num_parameter_workers
        for leaf in leaves:
            if isinstance(leaf, PerWorkerValues) and leaf.count not in (None, workers):
                raise ValueError(
                    f"PerWorkerValues needs a value for each of the {workers} workers, and has "
                    f"{leaf.count}"
                )
        #: True if the arguments have values that are replaced here. A worker process finds iterators.
        self._differs = any(
            isinstance(leaf, PerWorkerValues)
            and not (in_cluster and isinstance(leaf, PerWorkerIterator))
            for leaf in leaves
        )
        #: The call for a worker in another process.
        self.message: tuple[dict[str, Any], list[Any]] | None = None
        if in_cluster:
            # With the values of any worker this raises the errors of all.
            own = self._arguments_on(Worker(0)) if self._differs else self.arguments
            self.message = call_of(function, own)

    def _arguments_on(self, worker: Worker) -> Any:
        """Return the arguments for a worker."""
        if not self._differs:
            return self.arguments
        keeps = PerWorkerIterator if self.strategy.extended.tasks is not None else ()

        def own(value: Any) -> Any:
            replaced = isinstance(value, PerWorkerValues) and not isinstance(value, keeps)
            return value.on(worker) if replaced else value

        return nest.map_structure(own, self.arguments)

    def run(self, worker: Worker, spins: bool) -> Any:
        """Call the function on a worker, and return its result; ``spins`` as in `Link.receive`."""
        if worker.link is not None:
            assert self.message is not None
            message, arrays = self.message
            if self._differs:
                message, arrays = call_of(self.function, self._arguments_on(worker))
            assert self.strategy.extended.servers is not None
            restarts = tuple(self.strategy.extended.servers.restarts)
            message = {**message, "servers": restarts, "steps": self._steps}
            message, arrays = worker.link.call(message, arrays, spins=spins)
            while "next" in message:
                reply, found = self._element(message["next"], worker)
                message, arrays = worker.link.call(reply, found, spins=spins)
            if "original" in message:
                raise ClosureInputError(error_of(message, worker.link.task))
            if "error" in message:
                error = error_of(message, worker.link.task)
                raise _ServerLost(error) if message.get("server") is True else error
            return decode(message.get("tokens"), arrays, _no_name)
        with self.strategy.scope():
            args, kwargs = self._arguments_on(worker)
            for _ in range(self._steps - 1):
                self.function(*args, **kwargs)
            return nest.map_structure(as_result, self.function(*args, **kwargs))

    def _element(self, name: Any, worker: Worker) -> tuple[dict[str, Any], list[Any]]:
        """Return the message with the next element of a dataset that the chief reads for a worker."""
        leaves = nest.flatten(self.arguments)
        iterators = [leaf for leaf in leaves if isinstance(leaf, PerWorkerIterator)]
        try:
            with self.strategy.scope():
                (iterator,) = {leaf for leaf in iterators if [*leaf.name] == name}
                tokens, arrays = encode(next(iterator.on(worker)), lambda value: None)
            return {"tokens": tokens}, arrays
        except StopIteration:
            return {"end": True}, []
        except ClosureInputError as error:
            return {**error_message(error.original_exception), "original": True}, []
        except Exception as error:
            return error_message(error), []


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
        return decode(message.get("tokens"), arrays, _no_name)

    get_next = __next__


def is_plain_thread() -> bool:
    """Return True if a function runs in this thread as it does in a new one."""
    return (
        current_mode() is None
        and not thread_state.tapes
        and thread_state.reads_as is None
        and not creators.stack
        and this_thread.beside is None
    )


class _ServerLost(Exception):
    """A parameter server is lost; the argument is the error to raise."""


class _Queue:
    """The functions that wait, the workers that run them, and the first error.

    ``chief`` has the connections to workers in other processes, or is None.
    """

    def __init__(self, workers: int, chief: Chief | None = None) -> None:
        self._chief = chief
        self._connected = workers  # the workers that are connected
        self._process = os.getpid()
        # The garbage collector may call close() in a thread that holds the lock.
        lock = threading.RLock()
        self._work, self._changed = threading.Condition(lock), threading.Condition(lock)
        self._closures: deque[_Closure] = deque()
        self._in_flight = 0
        self._error: BaseException | None = None
        self._closed = False
        self._divided: shared_among | None = None
        self._fatal: BaseException | None = None
        #: The last error that there was no worker.
        self._no_worker: BaseException | None = None
        #: The last time at which the program's own thread has begun to run a function.
        self._own_thread_ran_at = -math.inf
        #: The worker whose thread polls for functions.
        self._poller: Worker | None = None
        self._workers = [
            Worker(number, None if chief is None else chief.worker(number))
            for number in range(workers)
        ]
        for worker in self._workers:
            self._start(worker)

    def _start(self, worker: Worker) -> None:
        threading.Thread(
            target=self._serve,
            args=(worker,),
            name=f"pycollective-worker-{worker.number}",
            daemon=True,
        ).start()

    # The coordinator -------------------------------------------------------------------------

    def put(self, closure: _Closure) -> None:
        """Add a function; wait while the queue is full."""
        self._check_process("schedule")
        with self._changed:
            self._raise_error()
            if len(self._closures) >= _QUEUE_SIZE:
                self._changed.wait_for(lambda: self._error or len(self._closures) < _QUEUE_SIZE)
                self._raise_error()
            self._closures.append(closure)
            closure.value.run_now = partial(self._run_now, closure)
            if self._poller is None or len(self._closures) > 1 or self._in_flight:
                self._work.notify_all()

    def join(self, timeout: float | None) -> None:
        """Wait until no function waits or runs."""
        self._check_process("join")
        with self._changed:
            if not self._changed.wait_for(lambda: self._error or self._is_idle(), timeout):
                raise DeadlineExceededError(
                    f"join: {self._in_flight} functions run and {len(self._closures)} wait after "
                    f"{timeout} seconds; they continue: call join() again"
                )
            self._raise_error()

    def is_done(self) -> bool:
        """Return True if no function waits or runs."""
        self._check_process("done")
        with self._changed:
            self._raise_error()
            return self._is_idle()

    def lose(self, number: int) -> None:
        """Replace a worker by a new one, and schedule its function again, before all others."""
        with self._changed:
            lost, fresh = self._workers[number], Worker(number)
            self._workers[number] = fresh
            lost.retired = True
            if lost.closure is not None:
                self._closures.appendleft(lost.closure)
                self._ended()
            self._work.notify_all()
        self._start(fresh)

    def close(self) -> None:
        """End the workers; functions that still wait are cancelled."""
        if self._process != os.getpid():
            return  # the lock may be held by a thread that this process does not have
        with self._changed:
            self._closed = True
            self._cancel()
            self._work.notify_all()

    def _check_process(self, call: str) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"{call}(): the workers are threads of the process that forked this one; make a new "
                "strategy and a new coordinator"
            )

    def _is_idle(self) -> bool:
        return not self._closures and not self._in_flight

    def _raise_error(self) -> None:
        """Raise the first error of a function, if any, when no other function runs any more."""
        if self._chief is not None and self._fatal is None and not self._chief.recover:
            try:
                self._chief.servers.check()
            except UnavailableError as lost:
                self._fail(UnavailableError(str(lost)))
        if self._fatal is not None:
            raise self._fatal
        if self._error is None:
            return
        self._cancel()
        self._changed.wait_for(lambda: not self._in_flight)
        self._cancel()  # the function of a worker that was lost meanwhile
        error, self._error = self._error, None
        if error is not None:  # else another thread has raised it
            raise error

    def cancel(self) -> None:
        """Cancel the functions that wait, wait for those that run, and drop their errors."""
        with self._changed:
            self._cancel()
            self._changed.wait_for(lambda: not self._in_flight)
            self._cancel()  # the function of a worker that was lost meanwhile
            self._error = self._fatal

    def _cancel(self, error: BaseException | None = None) -> None:
        """Let the functions that wait end with an error, by default `CancelledError`."""
        text = "The corresponding function is cancelled. Please reschedule the function."
        while self._closures:
            self._closures.popleft().value.complete(None, error or CancelledError(text))

    def _fail(self, error: UnavailableError) -> None:
        """End the functions that wait; every later call raises the error."""
        with self._changed:
            self._fatal = self._error = error
            self._cancel(error)
            self._changed.notify_all()

    # The workers -----------------------------------------------------------------------------

    def _serve(self, worker: Worker) -> None:
        """Run functions in the thread of a worker, until it is lost or the queue is closed."""
        this_thread.worker = worker.number
        while self._wait(worker):
            if worker.disconnected:
                self._find_again(worker)
            else:
                self._run(worker)

    def _wait(self, worker: Worker) -> bool:
        """Wait for a function, and give it to a worker; return False if the worker must end."""
        with self._work:
            while not (self._closed or worker.retired or worker.disconnected):
                polls = self._poller in (None, worker)
                if self._closures and worker.closure is None:
                    if self._poller is worker:
                        self._poller, self._own_thread_ran_at = None, -math.inf
                    self._take(worker)
                    return True
                polls = polls and time.monotonic() - self._own_thread_ran_at < _POLL_SECONDS
                if polls or self._poller is worker:
                    self._poller = worker if polls else None
                self._work.wait(_POLL_INTERVAL if polls else None)
            if self._poller is worker:  # another worker's thread must poll, or be woken
                self._poller = None
            return not (self._closed or worker.retired)

    def _take(self, worker: Worker) -> None:
        """Give the first function to a worker; call with the lock held."""
        worker.closure = self._closures.popleft()
        self._in_flight += 1
        if self._in_flight > 1 and self._divided is None:
            # A function that runs alone uses all cores.
            self._divided = shared_among(1 if self._chief else len(self._workers))
            self._divided.__enter__()
        if len(self._closures) == _QUEUE_SIZE - 1:
            self._changed.notify_all()

    def _run_now(self, closure: _Closure) -> None:
        """Run the first function that waits in this thread, in the place of an idle worker's thread.

        This saves two changes of threads. The method returns if the function has begun, is not the
        first one, or if there is no idle worker.
        """
        if self._chief is None and not is_plain_thread():
            return
        with self._work:
            if not self._closures or self._closures[0] is not closure or self._closed:
                return
            idle = [
                w for w in self._workers if w.closure is None and not (w.retired or w.disconnected)
            ]
            if not idle:
                return
            worker = idle[0]
            self._take(worker)
            self._own_thread_ran_at = time.monotonic()
        this_thread.worker = worker.number
        try:
            self._run(worker, spins=True)
        finally:
            this_thread.worker = None
        with self._work:
            if self._closures:
                self._work.notify_all()

    def _run(self, worker: Worker, spins: bool = False) -> None:
        """Run the function of a worker."""
        closure = worker.closure
        assert closure is not None
        result: Any = None
        error: BaseException | None = None
        try:
            if self._recovers() and self._chief is not None and self._chief.servers.lost():
                self._find_servers()
            result = closure.run(worker, spins)
        except LinkLostError as lost:
            self._return(worker, closure, lost)
            return
        except _ServerLost as lost:
            if self._recovers():
                with self._changed:
                    worker.closure = None
                    self._closures.appendleft(closure)
                    self._ended()
                    self._work.notify_all()
                return
            error = lost.args[0]
            self._fail(lost.args[0])
        except StopIteration as end:
            text = "End of sequence: the dataset of a worker has no more elements; repeat() it"
            error = end if isinstance(end, OutOfRangeError) else OutOfRangeError(text)
        except KeyboardInterrupt as found:
            if threading.current_thread() is not threading.main_thread():
                error = found
            else:  # Ctrl-C while the program waits for the result
                text = (
                    "The corresponding function is cancelled by an interrupt. Please reschedule it."
                )
                self._finish(worker, closure, None, CancelledError(text), stored=False)
                raise
        except BaseException as found:
            error = found
        self._finish(worker, closure, result, error)

    def _recovers(self) -> bool:
        return self._chief is not None and self._chief.recover and not self._closed

    def _find_servers(self) -> None:
        """Wait for lost parameter servers; store the error if one is not started again."""
        assert self._chief is not None
        try:
            self._chief.find_servers_again(_RECOVERY)
        except UnavailableError as error:
            self._fail(error)
            raise

    def _return(self, worker: Worker, closure: _Closure, lost: LinkLostError) -> None:
        """Schedule the function of a lost worker again, before all others."""
        _log.warning("%s; its function runs again on another worker", lost)
        with self._changed:
            self._connected -= 1
            worker.disconnected, worker.closure = True, None
            self._closures.appendleft(closure)
            self._ended()
            self._work.notify_all()

    def _find_again(self, worker: Worker) -> None:
        """Wait for a lost worker in another process.

        As long as there is no worker, after some seconds, functions that wait end with
        UnavailableError, and the next call of the coordinator raises it.
        """
        assert self._chief is not None
        begun = time.monotonic()
        while not self._closed:
            try:
                worker.link = self._chief.find_again(worker.number, 1.0)
            except (UnavailableError, CollectiveError) as error:
                if time.monotonic() - begun < _RECOVERY:
                    time.sleep(0.2)
                    with self._changed:
                        if not self._connected and time.monotonic() - begun > _NO_WORKER:
                            found = UnavailableError(
                                f"no worker has been connected for {_NO_WORKER:g} seconds: {error}"
                            )
                            if self._error is None or self._error is self._no_worker:
                                self._error = self._no_worker = found
                            self._cancel(found)
                            self._changed.notify_all()
                    continue
                worker.retired = True
                return
            worker.made.clear()
            with self._changed:
                self._connected += 1
                worker.disconnected = False
                if self._error is self._no_worker:
                    self._error = self._no_worker = None
            _log.warning("/job:worker/task:%d is back", worker.number)
            return

    def _finish(
        self,
        worker: Worker,
        closure: _Closure,
        result: Any,
        error: BaseException | None,
        stored: bool = True,
    ) -> None:
        """Set the result of a function, unless its worker was lost meanwhile.

        With ``stored``, the next call of the coordinator raises the error.
        """
        with self._changed:
            if worker.retired:
                return
            worker.closure = None
            closure.value.complete(result, error)
            if stored and self._error is None:
                self._error = error
            self._ended()

    def _ended(self) -> None:
        self._in_flight -= 1
        if not self._in_flight and self._divided is not None:
            self._divided.__exit__()
            self._divided = None
        if self._error is not None or not self._in_flight:
            self._changed.notify_all()


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
    _queue: _Queue | None
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
                self._queue = _Queue(strategy.extended.num_parameter_workers, tasks)
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
            A function that ``tf.function`` returned. It runs in the strategy's scope, at least once:
            again on another worker if its worker is lost.
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
            ``fn`` was not made by ``tf.function``; ``args`` is not a list or tuple;
            ``kwargs`` is not a dict.
        ValueError
            An argument is a `RemoteValue`, or has too few values for the workers; ``steps_per_call`` is
            less than 1.
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
        closure = _Closure(self.strategy, fn, tuple(args or ()), dict(kwargs or {}), steps_per_call)
        self._queue.put(closure)
        if time.monotonic() >= self._sampled + _SAMPLES:
            self._sample()
        return closure.value

    def _sample(self) -> None:
        """Add the servers' load to the timelines of this process, and drop variables on servers."""
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
        this_thread.worker = worker.number
        iterators: dict[tuple[int, int], PerWorkerIterator] = {}

        def named(token: list[Any]) -> Any:
            kind, dataset, number, oldest = token
            if kind != "iterator" or not isinstance(number, int):
                raise ValueError(f"a value of kind {kind!r}")
            for key in [key for key in iterators if key[0] == dataset and key[1] < oldest]:
                del iterators[key]  # the program has it no more
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
                empty = tokens == _NO_ARGUMENTS
                args, kwargs = _NO_VALUES if empty else decode(tokens, arrays, named)
                servers.follow(message["servers"])
                for step in range(steps):
                    if step:
                        servers.end()
                    servers.begin(function.made)
                    result = function(*args, **kwargs)
                result = nest.map_structure(as_result, result)
                tokens, found = encode(result, lambda value: None)
            except StopIteration as end:
                text = "End of sequence: the dataset of a worker has no more elements; repeat() it"
                raise OutOfRangeError(str(end) or text) from None
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
            A parameter server in another process is lost, or all workers have been for a minute. Every
            later call raises this error.
        DeadlineExceededError
            Functions run or wait after ``timeout`` seconds; by default there is no limit.
        """
        timeout = None if timeout is None else number_of("timeout", timeout)
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
    worker = this_thread.worker
    if worker is None:
        raise RuntimeError(
            "Cannot retrieve the worker index. `get_worker_idx_and_num_workers` should be called from "
            "within a tf.function being executed on a worker."
        )
    return worker
