"""The queue of scheduled functions, and the threads of the workers that run them.

A `Closure` is a function with its arguments and its result. `FunctionQueue` holds the closures. Each
worker is a thread that takes one closure after the other.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from functools import partial
from typing import Any, NoReturn

from pycollective import nest
from pycollective.distribute.blas_threads import shared_among
from pycollective.distribute.context import current_mode
from pycollective.distribute.function_digests import digest_of, globals_of
from pycollective.distribute.parameter_server import ParameterServerStrategy
from pycollective.distribute.per_worker import (
    ClosureInputError,
    PerWorkerIterator,
    PerWorkerValues,
    RemoteValue,
    Worker,
    as_result,
)
from pycollective.distribute.server import Chief
from pycollective.distribute.task_links import LinkLostError
from pycollective.distribute.task_values import decode, encode, error_message, error_of
from pycollective.distribute.worker_threads import created_beside, current_worker
from pycollective.errors import (
    CancelledError,
    CollectiveError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    OutOfRangeError,
    UnavailableError,
)
from pycollective.tensor.function import function_made
from pycollective.tensor.tape import thread_state
from pycollective.tensor.variable import creators

#: The number of functions that wait for a worker before `schedule` waits, as in TensorFlow.
_QUEUE_SIZE = 262_144

#: Seconds that a lost worker has to return, as in TensorFlow, and seconds without any worker until an
#: error.
_RECOVERY, _NO_WORKER = 3600.0, 60.0

#: After the program's own thread has run a function, `put` wakes no worker's thread. Instead, one
#: thread polls for functions, for ``_POLL_SECONDS``, every ``_POLL_INTERVAL`` seconds.
_POLL_SECONDS, _POLL_INTERVAL = 0.05, 0.001

_log = logging.getLogger("pycollective")


#: No arguments, and their tokens.
NO_VALUES: Any = ((), {})
NO_ARGUMENTS = [["tuple", 2], ["tuple", 0], ["dict", 0]]


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
    tokens, arrays = encode(arguments, named) if args or kwargs else (NO_ARGUMENTS, [])
    name = [*function.made, digest_of(function)]
    return {"request": "call", "function": name, "tokens": tokens}, arrays


def called(message: dict[str, Any]) -> Any:
    """Return this program's function for a message of `call_of`."""
    name, number, digest = message["function"]
    function = function_made(name, number)
    if function is None:
        raise NotFoundError(
            f"function {name!r} (number {number} of this name) is not known to the worker. A worker "
            "runs the chief's program up to the first ClusterCoordinator.schedule(). Decorate all "
            "functions with @tf.function before that, and keep them"
        )
    if digest_of(function) != digest:
        names = ", ".join(globals_of(function)) or "none"
        raise FailedPreconditionError(
            f"function {name!r} differs between the chief and the worker, or something that it uses "
            "does. The worker has another version of the program or of Python, or a global has another "
            "value. Start the same program on all tasks. These globals need the same values before the "
            f"first schedule(): {names[:400]}"
        )
    return function


def end_of_dataset(end: StopIteration) -> OutOfRangeError:
    """Return the error of a function that found the end of a dataset."""
    if isinstance(end, OutOfRangeError) and str(end) != "End of sequence":
        return end
    return OutOfRangeError(
        "End of sequence: the dataset of a worker has no more elements; repeat() it"
    )


def no_name(token: list[Any]) -> NoReturn:
    """Raise ValueError: a result cannot have a value that is sent by its name."""
    raise ValueError(f"a result of kind {token[0]!r}")


class Closure:
    """A scheduled function with its arguments, and the value for its result."""

    def __init__(
        self, strategy: ParameterServerStrategy, function: Any, args: Any, kwargs: Any, steps: int
    ) -> None:
        self.strategy = strategy
        self.function = function
        self.arguments = args, kwargs
        self._steps = steps
        self.value = RemoteValue()
        leaves = nest.flatten(self.arguments) if args or kwargs else ()
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
        #: True if this process replaces values of the arguments. In a cluster, iterators are not
        #: replaced: each worker process has its own.
        self._differs = any(
            isinstance(leaf, PerWorkerValues)
            and not (in_cluster and isinstance(leaf, PerWorkerIterator))
            for leaf in leaves
        )
        #: The call for a worker in another process.
        self.message: tuple[dict[str, Any], list[Any]] | None = None
        if in_cluster:
            # The values of any worker are enough: `call_of` raises the same errors for each.
            arguments = self._arguments_on(Worker(0)) if self._differs else self.arguments
            self.message = call_of(function, arguments)

    def _arguments_on(self, worker: Worker) -> Any:
        """Return the arguments for a worker."""
        if not self._differs:
            return self.arguments
        kept = PerWorkerIterator if self.strategy.extended.tasks is not None else ()

        def value_on_worker(value: Any) -> Any:
            replaced = isinstance(value, PerWorkerValues) and not isinstance(value, kept)
            return value.on(worker) if replaced else value

        return nest.map_structure(value_on_worker, self.arguments)

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
            return decode(message.get("tokens"), arrays, no_name)
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


def is_plain_thread() -> bool:
    """Return True if a function runs in this thread as it does in a new one."""
    return (
        current_mode() is None
        and not thread_state.tapes
        and thread_state.reads_as is None
        and not creators.stack
        and created_beside.get() is None
    )


class _ServerLost(Exception):
    """A parameter server is lost; the argument is the error to raise."""


class FunctionQueue:
    """The functions that wait, the workers that run them, and the first error.

    ``chief`` has the connections to workers in other processes, or is None.
    """

    def __init__(self, workers: int, chief: Chief | None = None) -> None:
        self._chief = chief
        self._process = os.getpid()
        # The garbage collector may call close() in a thread that holds the lock.
        # Blocks take the lock and not a condition, whose methods are written in Python.
        self._lock = threading.RLock()
        self._work, self._changed = (threading.Condition(self._lock) for _ in range(2))
        self._closures: deque[Closure] = deque()
        self._in_flight = 0
        self._error: BaseException | None = None
        self._closed = False
        self._divided: shared_among | None = None
        self._fatal: BaseException | None = None
        #: The last error that was stored because no worker was connected.
        self._no_worker: BaseException | None = None
        #: The last time at which the program's own thread began to run a function.
        self._own_thread_ran_at = -math.inf
        #: The worker whose thread polls for functions.
        self._poller: Worker | None = None
        self._workers = [
            Worker(number, None if chief is None else chief.worker(number))
            for number in range(workers)
        ]
        for worker in self._workers:  # some processes may begin later
            worker.disconnected = chief is not None and worker.link is None
        #: The last time at which a worker in another process was connected, as far as is known.
        self._had_worker_at = time.monotonic()
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

    def put(self, closure: Closure) -> None:
        """Add a function; wait while the queue is full."""
        self._check_process("schedule")
        with self._lock:
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
        until = math.inf if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self._error or not self._is_idle():
                left = None if timeout is None else max(0.0, until - time.monotonic())
                if not self._changed.wait_for(lambda: self._error or self._is_idle(), left):
                    raise DeadlineExceededError(
                        f"join: {self._in_flight} functions run and {len(self._closures)} wait after "
                        f"{timeout} seconds; they continue: call join() again"
                    )
                self._raise_error()
            self._raise_error()

    def is_done(self) -> bool:
        """Return True if no function waits or runs."""
        self._check_process("done")
        with self._lock:
            self._raise_error()
            return self._is_idle()

    def lose(self, number: int) -> None:
        """Replace a worker by a new one, and schedule its function again, before all others."""
        with self._lock:
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
        with self._lock:
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
        """Raise the first error of a function, if any, when no other function runs any more.

        One of several threads that find an error raises it. The functions that its program then
        schedules are not cancelled.
        """
        if self._chief is not None and self._fatal is None and not self._chief.recover:
            try:
                self._chief.servers.check()
            except UnavailableError as lost:
                self._fail(UnavailableError(str(lost)))
        if self._fatal is not None:
            raise self._fatal
        error = self._error
        if error is None:
            return
        self._cancel()
        self._changed.wait_for(lambda: self._error is not error or not self._in_flight)
        if self._error is error:  # else another thread has raised it
            self._cancel()  # the function of a worker that was lost meanwhile
            self._error = None
            raise error

    def cancel(self) -> None:
        """Cancel the functions that wait, wait for those that run, and drop their errors."""
        with self._lock:
            self._cancel()
            self._changed.wait_for(lambda: not self._in_flight)
            self._cancel()  # the function of a worker that was lost meanwhile
            self._error = self._fatal

    def _cancel(self, error: BaseException | None = None) -> None:
        """Let the functions that wait end with an error, by default `CancelledError`."""
        text = "The corresponding function is cancelled. Please reschedule the function."
        while self._closures:
            self._closures.popleft().value.complete(None, error or CancelledError(text))
        self._changed.notify_all()  # the queue is not full

    def _fail(self, error: UnavailableError) -> None:
        """End the functions that wait; every later call raises the error."""
        with self._lock:
            self._fatal = self._error = error
            self._cancel(error)
            self._changed.notify_all()

    # The workers -----------------------------------------------------------------------------

    def _serve(self, worker: Worker) -> None:
        """Run functions in the thread of a worker, until it is lost or the queue is closed."""
        current_worker.set(worker.number)
        while self._wait(worker):
            if worker.disconnected:
                self._find(worker)
            else:
                self._run(worker)

    def _wait(self, worker: Worker) -> bool:
        """Wait for a function, and give it to a worker; return False if the worker must end."""
        with self._lock:
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

    def _run_now(self, closure: Closure) -> None:
        """Run a waiting function in this thread, in the place of an idle worker's thread.

        This saves two context switches. The method does nothing if the function has begun or is not the
        first one, or if no worker is idle. Without other processes, it also does nothing in a thread
        with a scope or a tape.
        """
        if self._chief is None and not is_plain_thread():
            return
        with self._lock:
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
        token = current_worker.set(worker.number)
        try:
            self._run(worker, spins=True)
        finally:
            current_worker.reset(token)
        with self._lock:
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
                with self._lock:
                    worker.closure = None
                    self._closures.appendleft(closure)
                    self._ended()
                    self._work.notify_all()
                return
            error = lost.args[0]
            self._fail(lost.args[0])
        except StopIteration as end:
            error = end_of_dataset(end)
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

    def _return(self, worker: Worker, closure: Closure, lost: LinkLostError) -> None:
        """Schedule the function of a lost worker again, before all others."""
        _log.warning("%s; its function runs again on another worker", lost)
        with self._lock:
            self._had_worker_at = time.monotonic()
            worker.disconnected, worker.closure = True, None
            self._closures.appendleft(closure)
            self._ended()
            if self._closed:  # no worker takes a function any more
                self._cancel()
            self._work.notify_all()

    def _find(self, worker: Worker) -> None:
        """Wait for a worker in another process that is lost or has not begun.

        After ``_NO_WORKER`` seconds without any worker, waiting functions end with UnavailableError, and
        the next call of the coordinator raises it.
        """
        assert self._chief is not None
        # A worker that has not begun may wait for resources, for as long as the program runs.
        until = math.inf if worker.link is None else time.monotonic() + _RECOVERY
        state = "connected" if worker.link is None else "back"
        while not self._closed:
            try:
                if self._recovers() and self._chief.servers.lost():
                    self._find_servers()  # server 0 has the worker's address
                worker.link = self._chief.find(worker.number, 1.0)
            except (UnavailableError, CollectiveError) as error:
                if self._fatal is not None or time.monotonic() >= until:
                    worker.retired = True
                    return
                time.sleep(0.2)
                self._check_workers(error)
                continue
            worker.iterators.clear()
            with self._lock:
                worker.disconnected = False
                if self._error is self._no_worker:
                    self._error = self._no_worker = None
            _log.warning("/job:worker/task:%d is %s", worker.number, state)
            return

    def _check_workers(self, error: Exception) -> None:
        """Store an error after ``_NO_WORKER`` seconds without a worker; ``error`` is the reason."""
        assert self._chief is not None
        with self._lock:
            if self._chief.has_worker():
                self._had_worker_at = time.monotonic()
            if time.monotonic() - self._had_worker_at < _NO_WORKER:
                return
            found = UnavailableError(
                f"no worker has been connected for {_NO_WORKER:g} seconds: {error}"
            )
            if self._error is None or self._error is self._no_worker:
                self._error = self._no_worker = found
            self._cancel(found)
            self._changed.notify_all()

    def _finish(
        self,
        worker: Worker,
        closure: Closure,
        result: Any,
        error: BaseException | None,
        stored: bool = True,
    ) -> None:
        """Set the result of a function, unless its worker was lost meanwhile.

        With ``stored``, the next call of the coordinator raises the error.
        """
        with self._lock:
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
