"""Replicas as threads, with their synchronization.

Replica 0 runs on the caller's thread, the others on threads that a strategy keeps. Each replica's thread
takes part in collectives. At merge points replica 0's thread runs a function for all replicas. If a
replica waits for a call that another one can no longer make, `ReplicaRun` raises an error in all
replicas. After the timeout the error names the replicas that the others wait for.
"""

from __future__ import annotations

import contextvars
import copy
import enum
import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from pycollective import _core
from pycollective._core import Arrivals
from pycollective.comm import Communicator
from pycollective.distribute.reducer import GradientReducer
from pycollective.errors import AbortedError, CollectiveTimeoutError
from pycollective.missed import Missed

_log = logging.getLogger("pycollective")

_MERGE_MISMATCH = "Some replicas made a different number of replica_context().merge_call() calls."

#: The most seconds between two looks at the clock.
_SLICE = 0.2

Job = Callable[[], None]


class _ReplicaState(enum.Enum):
    RUNNING = "is still running its function"
    COLLECTIVE = "waits in a collective"
    MERGE = "waits in {}"
    CREATION = "waits for replica 0 to create a variable"
    FINISHED = "has finished"


class _MergeCall(NamedTuple):
    """A replica's arguments at a merge point."""

    what: str
    merge: Callable[[list[tuple[Any, ...]]], list[Any]]
    key: Any
    args: tuple[Any, ...]


class ReplicaRun:
    """The state that the replicas of one call of ``Strategy.run`` share."""

    def __init__(
        self, threads: ReplicaThreads, abort: Callable[[str], None], timeout: float
    ) -> None:
        self.threads = threads
        self.size = threads.size
        self.timeout = timeout
        self._abort = abort  # ends the collectives of all replicas
        self._changed = threading.Condition()
        self._states = [_ReplicaState.RUNNING] * self.size
        self._ended = [False] * self.size  # with a result or an error
        self._collectives = [0] * self.size  # begun by each replica
        self._merges: dict[int, _MergeCall] = {}
        self._merging = False
        self._merge_round = 0
        self._merge_results: list[Any] = []
        self._merge_error: Exception | None = None
        self._created: list[Any] = []
        self._creations = [0] * self.size  # variables that each replica has requested
        self._error: BaseException | None = None  # the first one
        self._late: list[int] = []  # replicas that missed a deadline
        self._missed = Missed()  # deadlines are later by this time

    # Endings ------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Record the first error, and wake all replicas.

        The others may report the abort of a collective before the failed replica reports its error.
        The failed replica's error then replaces the AbortedError.
        """
        with self._changed:
            if self._error is None:
                self._error = error
                self._abort(f"another replica raised {type(error).__name__}: {error}")
            elif isinstance(self._error, AbortedError) and not isinstance(error, AbortedError):
                self._error = error
            self._changed.notify_all()

    def abort(self, reason: str) -> None:
        """End the collectives of all replicas."""
        with self._changed:
            if self._error is None:
                self._error = AbortedError(reason)
                self._abort(reason)
                self._changed.notify_all()

    def finish(self, replica: int) -> None:
        """Record that a replica's function has returned."""
        with self._changed:
            states = self._states
            states[replica] = _ReplicaState.FINISHED
            ended = states.count(_ReplicaState.FINISHED)
            if ended + states.count(_ReplicaState.RUNNING) < self.size:
                self._enter(replica, _ReplicaState.FINISHED)

    def end(self, replica: int) -> None:
        """Record that a replica's thread has finished."""
        with self._changed:
            self._ended[replica] = True
            self._changed.notify_all()

    def wait_for_ends(self) -> bool:
        """Wait until all replicas have ended; return False if one does not end."""
        begin = time.monotonic()
        with self._changed:
            while not all(self._ended):
                left = begin + self.timeout + self._missed.seconds - time.monotonic()
                missing = [r for r in range(self.size) if not self._ended[r]]
                if left <= 0 and self._error is None:
                    self._expire(time.monotonic() - begin)
                if left <= 0 or set(missing) <= set(self._late):
                    return False
                self._sleep(left)
        return True

    def raise_error(self) -> None:
        """Raise the first error of any replica."""
        error = self._error
        if error is None:
            return
        if all(self._ended):
            # The error's traceback refers to this run. A reference from the run to the error would be a
            # cycle, which keeps the strategy and its threads alive.
            self._error = None
        try:
            raise error
        finally:
            del error

    # Merge points -------------------------------------------------------------------------------

    def merge(
        self,
        replica: int,
        what: str,
        merge: Callable[[list[tuple[Any, ...]]], list[Any]],
        args: tuple[Any, ...],
        key: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Wait for all replicas, call ``merge`` on replica 0's thread, return this replica's result.

        ``merge`` gets the arguments of all replicas, and returns a result for each. ``what`` names the
        call in messages; ``what`` and ``key`` must be the same in every replica.
        """
        begin = time.monotonic()
        with self._changed:
            self._check_alive()
            self._merges[replica] = _MergeCall(what, merge, key, args)
            turn = self._merge_round
            self._enter(replica, _ReplicaState.MERGE)
            while replica != 0 and self._merge_round == turn:
                self._wait(begin, timeout)
            while replica == 0 and len(self._merges) < self.size:
                self._wait(begin, timeout)
            self._check_alive()
            if replica != 0:
                if self._merge_error is not None:
                    raise self._merge_error
                return self._merge_results[replica]
            calls = [self._merges[r] for r in range(self.size)]
            self._merging = True
        # All other replicas wait, so that replica 0 does not need the lock.
        results: list[Any] = []
        failure: Exception | None = None
        try:
            for r, call in enumerate(calls):
                if (call.what, call.key) != (what, key):
                    raise RuntimeError(
                        f"replica 0 is in {what}, while replica {r} is in {call.what}"
                        f"{' of another function' if call.what == what else ''}: every replica "
                        "must make the same calls"
                    )
            results = merge([call.args for call in calls])
        except Exception as error:  # every replica gets it, so that all of them can handle it
            failure = error
        with self._changed:
            self._merging = False
            self._merge_results, self._merge_error = results, failure
            self._merges = {}
            self._merge_round += 1
            # A replica that has not woken yet must not count as waiting.
            self._states = [_ReplicaState.RUNNING] * self.size
            self._changed.notify_all()
        if failure is not None:
            try:
                raise failure
            finally:
                del failure
        return results[0]

    def create(self, replica: int, make: Callable[[], Any]) -> Any:
        """Return a variable: replica 0 creates it, and the other replicas get the same one."""
        begin = time.monotonic()
        with self._changed:
            self._check_alive()
            number = self._creations[replica]
            self._creations[replica] += 1
            if replica != 0:
                if len(self._created) <= number:
                    self._enter(replica, _ReplicaState.CREATION)
                while len(self._created) <= number:
                    self._wait(begin)
                self._check_alive()
                self._states[replica] = _ReplicaState.RUNNING
                return self._created[number]
        variable = make()
        with self._changed:
            self._created.append(variable)
            for r, state in enumerate(self._states):
                if state is _ReplicaState.CREATION and self._creations[r] <= len(self._created):
                    self._states[r] = _ReplicaState.RUNNING
            self._changed.notify_all()
        return variable

    # Deadlocks ----------------------------------------------------------------------------------

    def _wait(self, begin: float, timeout: float | None = None) -> None:
        """Wait for a change, until the deadline of a call that began at ``begin``."""
        self._check_alive()
        limit = self.timeout if timeout is None else timeout
        # A merge function may take any time: no replica is late.
        left = None if self._merging else begin + limit + self._missed.seconds - time.monotonic()
        if left is not None and left <= 0:
            self._expire(time.monotonic() - begin)
            self._check_alive()
        self._sleep(_SLICE if left is None else left)

    def _sleep(self, left: float) -> None:
        """Wait for a change. Time in which the process was stopped makes no replica late."""
        self._missed.during(self._changed.wait, min(left, _SLICE))

    def _check_alive(self, cause: BaseException | None = None) -> None:
        if self._error is not None:
            if isinstance(self._error, CollectiveTimeoutError):
                raise copy.copy(self._error) from cause
            raise AbortedError(f"another replica failed: {self._error}") from self._error

    def _expire(self, waited: float) -> None:
        """Record the error that replicas missed a deadline."""
        if self._error is not None:
            return
        self._late = [
            r
            for r in range(self.size)
            if self._states[r] is _ReplicaState.RUNNING and not self._ended[r]
        ]
        late = ", ".join(str(r) for r in self._late)
        others = "; ".join(
            f"replica {r} {self._doing(r)}" for r in range(self.size) if r not in self._late
        )
        text = (
            f"replica {late} {_ReplicaState.RUNNING.value} and made no call in {waited:.3g} s, while "
            f"{others}. Every replica must make the same calls and return. If the function needs more "
            "time, set strategy.extended.timeout (seconds)"
        )
        # The caller of run() gets the error only when replica 0's function returns, so it is logged.
        if 0 in self._late:
            _log.error("%s", text)
        self._error = CollectiveTimeoutError(text, ranks=self._late)
        self._abort(text)
        self._changed.notify_all()

    def _doing(self, replica: int) -> str:
        call = self._merges.get(replica)
        return self._states[replica].value.format(call.what if call else "merge_call()")

    def _enter(self, replica: int, state: _ReplicaState) -> None:
        """Change a replica's state; raise an error if a replica now waits for ever."""
        self._states[replica] = state
        self._changed.notify_all()
        problem = self._stuck()
        if problem and self._error is None:
            self._error = RuntimeError(problem)
            self._abort(problem)
        if problem and state is not _ReplicaState.FINISHED:
            raise self._error or RuntimeError(problem)

    def _waits(self) -> bool:
        """Return True if a replica waits for others, or has finished, and is not in a collective."""
        states = self._states
        return (
            states.count(_ReplicaState.RUNNING) + states.count(_ReplicaState.COLLECTIVE) < self.size
        )

    def _stuck(self) -> str:
        """Return the reason why replicas wait for ever, or an empty string."""
        states = self._states
        # A replica in its k-th collective waits for the k-th collective of all others.
        for q in range(self.size):
            if states[q] is not _ReplicaState.COLLECTIVE:
                continue
            for p in range(self.size):
                waits = states[p] not in (_ReplicaState.RUNNING, _ReplicaState.COLLECTIVE)
                if waits and self._collectives[p] < self._collectives[q]:
                    return (
                        f"replica {q} is in collective number {self._collectives[q]} of this run, "
                        f"while replica {p} {self._doing(p)} and has begun only "
                        f"{self._collectives[p]}. Every replica must make the same all_reduce calls"
                    )
        if _ReplicaState.MERGE in states and _ReplicaState.FINISHED in states:
            p, q = states.index(_ReplicaState.FINISHED), states.index(_ReplicaState.MERGE)
            return f"{_MERGE_MISMATCH} Replica {q} {self._doing(q)}, while replica {p} has finished"
        if _ReplicaState.CREATION in states and states[0] in (
            _ReplicaState.MERGE,
            _ReplicaState.FINISHED,
        ):
            q = states.index(_ReplicaState.CREATION)
            return (
                f"replica {q} creates a variable that replica 0, which {self._doing(0)}, did not "
                "create: every replica must create the same variables in the same order"
            )
        return ""


class Collective:
    """The block of one collective call of a replica."""

    __slots__ = ("_begin", "_replica", "_run")

    def __init__(self, run: ReplicaRun, replica: int) -> None:
        self._run = run
        self._replica = replica

    def __enter__(self) -> None:
        run, replica = self._run, self._replica
        with run._changed:
            if run._error is not None:
                run._check_alive()
            run._collectives[replica] += 1
            run._states[replica] = _ReplicaState.COLLECTIVE
            if run._waits():
                run._enter(replica, _ReplicaState.COLLECTIVE)
        self._begin = time.monotonic()

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        run = self._run
        with run._changed:
            try:
                if (
                    isinstance(error, CollectiveTimeoutError)
                    and _ReplicaState.RUNNING in run._states
                ):
                    run._expire(time.monotonic() - self._begin)
                    run._check_alive(error)
            finally:
                run._states[self._replica] = _ReplicaState.RUNNING


class ReplicaThreads:
    """The threads of a strategy's replicas other than replica 0.

    The threads end at `close`, or when this object is deleted.

    Attributes
    ----------
    communicators, reducers : list
        A communicator and a reducer for each replica, if the strategy makes them in `begin_run`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.communicators: list[Communicator] = []
        self.reducers: list[GradientReducer] = []
        self._jobs: list[queue.SimpleQueue[Job | None]] = [
            queue.SimpleQueue() for _ in range(size - 1)
        ]
        #: Counts of jobs and of ends. Threads spin on them if each replica has its own core.
        spins = size <= _core.usable_cores()
        self._begun = Arrivals() if spins else None
        self._ended = Arrivals() if spins else None
        self._runs = 0
        for number, jobs in enumerate(self._jobs, start=1):
            threading.Thread(
                target=_serve,
                args=(jobs, self._begun),
                name=f"pycollective-replica-{number}",
                daemon=True,
            ).start()
        self.close = weakref.finalize(self, _stop, self._jobs)

    @property
    def usable(self) -> bool:
        """True unless a replica of an earlier run still uses its thread."""
        return self.close.alive

    def run(
        self,
        function: Callable[[int, ReplicaRun], Any],
        abort: Callable[[str], None],
        timeout: float,
    ) -> list[Any]:
        """Call ``function(replica, run)`` for every replica at the same time.

        Return the results in replica order. After the first exception of any replica, the others stop
        at their next collective or merge point, and the exception is raised here. A replica that does
        not end in time keeps its thread, and these threads are no longer `usable`.
        """
        run = ReplicaRun(self, abort, timeout)
        results: list[Any] = [None] * self.size

        def replica(number: int) -> None:
            try:
                results[number] = function(number, run)
                run.finish(number)
            except BaseException as error:
                run.fail(error)

        def job(number: int, context: contextvars.Context) -> Job:
            def work() -> None:
                try:
                    context.run(replica, number)
                finally:
                    run.end(number)
                    if self._ended is not None:
                        self._ended.add()

            return work

        for number, jobs in enumerate(self._jobs, start=1):
            # Every replica gets the caller's context variables, such as NumPy's error state.
            jobs.put(job(number, contextvars.copy_context()))
        self._runs += 1
        if self._begun is not None:
            self._begun.add()
        replica(0)
        run.end(0)
        try:
            if self._ended is not None:
                self._ended.spin_until(self._runs * len(self._jobs))
            if not (all(run._ended) or run.wait_for_ends()):
                self.close()
        except BaseException as error:  # Ctrl-C, while other replicas run
            run.fail(error)
            self.close()
            raise
        run._merge_error = None  # its traceback refers to the run
        if run._error is not None:
            run.raise_error()
        return results


def _serve(jobs: queue.SimpleQueue[Job | None], begun: Arrivals | None) -> None:
    for number in itertools.count(1):
        if begun is not None:
            begun.spin_until(number)
        job = jobs.get()
        if job is None:
            return
        job()
        del job  # refers to the user's function and its data


def _stop(queues: list[queue.SimpleQueue[Job | None]]) -> None:
    for jobs in queues:
        jobs.put(None)
