"""Replicas as threads: run a function once for each, at the same time, and let them meet.

Replica 0 runs on the caller's thread, the others on threads that a strategy keeps. They meet in two
ways: in collectives, where each takes part from its own thread, and in merge points, where replica
0's thread runs a function for all of them. A replica that comes to a meeting that another can no
longer come to would wait for ever; `ReplicaRun` sees that and raises in all of them.
"""

from __future__ import annotations

import contextvars
import enum
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pycollective.errors import AbortedError

__all__ = ["ReplicaRun", "ReplicaThreads"]

_MERGE_MISMATCH = "Some replicas made a different number of replica_context().merge_call() calls."

Job = Callable[[], None]


class _State(enum.Enum):
    RUNNING = "is running"
    COLLECTIVE = "is in a collective"
    MERGE = "waits in merge_call()"
    CREATION = "waits for replica 0 to create a variable"
    FINISHED = "has finished"


class ReplicaRun:
    """One call of ``Strategy.run``: what its replicas share."""

    def __init__(self, size: int, abort: Callable[[str], None]) -> None:
        self.size = size
        self._abort = abort  # fails the communicators, so that nobody stays in a collective
        self._changed = threading.Condition()
        self._states = [_State.RUNNING] * size
        self._collectives = [0] * size  # begun by each replica
        self._merges: dict[int, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {}
        self._merge_round = 0
        self._merge_results: list[Any] = []
        self._created: list[Any] = []
        self._creations = [0] * size  # asked for by each replica
        self._error: BaseException | None = None  # the first one

    # Endings ------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Record a replica's error, if it is the first, and wake the others with it."""
        with self._changed:
            if self._error is None:
                self._error = error
                self._abort(f"another replica raised {type(error).__name__}: {error}")
            self._changed.notify_all()

    def finish(self, replica: int) -> None:
        """Record that a replica's function has returned."""
        with self._changed:
            self._enter(replica, _State.FINISHED)

    def raise_error(self) -> None:
        """Raise the first error of any replica."""
        if self._error is not None:
            raise self._error

    # Meetings -----------------------------------------------------------------------------------

    @contextmanager
    def collective(self, replica: int) -> Iterator[None]:
        """Bracket one collective call of a replica."""
        with self._changed:
            self._check_alive()
            self._collectives[replica] += 1
            self._enter(replica, _State.COLLECTIVE)
        try:
            yield
        finally:
            with self._changed:
                self._states[replica] = _State.RUNNING

    def merge(
        self,
        replica: int,
        merge: Callable[[list[tuple[Any, ...]], list[dict[str, Any]]], list[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Wait for all replicas, run ``merge`` once on replica 0's thread, return our component."""
        with self._changed:
            self._check_alive()
            self._merges[replica] = (merge, args, kwargs)
            turn = self._merge_round
            self._enter(replica, _State.MERGE)
            while replica != 0 and self._merge_round == turn:
                self._check_alive()
                self._changed.wait()
            while replica == 0 and len(self._merges) < self.size:
                self._check_alive()
                self._changed.wait()
            self._check_alive()
            if replica != 0:
                return self._merge_results[replica]
            calls = [self._merges[r] for r in range(self.size)]
        # Everyone else waits, so that replica 0 may work without the lock.
        results = merge([call[1] for call in calls], [call[2] for call in calls])
        with self._changed:
            self._merge_results = results
            self._merges = {}
            self._merge_round += 1
            # Those who have not woken yet wait no more, and must not count as waiting.
            self._states = [_State.RUNNING] * self.size
            self._changed.notify_all()
        return results[0]

    def create(self, replica: int, make: Callable[[], Any]) -> Any:
        """Return the variable of this creation: replica 0 makes it, the others get the same one."""
        with self._changed:
            self._check_alive()
            number = self._creations[replica]
            self._creations[replica] += 1
            if replica != 0:
                if len(self._created) <= number:
                    self._enter(replica, _State.CREATION)
                while len(self._created) <= number:
                    self._check_alive()
                    self._changed.wait()
                self._states[replica] = _State.RUNNING
                return self._created[number]
        variable = make()
        with self._changed:
            self._created.append(variable)
            for r, state in enumerate(self._states):
                if state is _State.CREATION and self._creations[r] <= len(self._created):
                    self._states[r] = _State.RUNNING
            self._changed.notify_all()
        return variable

    # Deadlocks ----------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._error is not None:
            raise AbortedError(f"another replica failed: {self._error}") from self._error

    def _enter(self, replica: int, state: _State) -> None:
        """Change a replica's state; raise when it, or one that waits, can no longer be met."""
        self._states[replica] = state
        self._changed.notify_all()
        problem = self._stuck()
        if problem and self._error is None:
            self._error = RuntimeError(problem)
            self._abort(problem)
        if problem and state is not _State.FINISHED:
            raise self._error or RuntimeError(problem)

    def _stuck(self) -> str:
        """Say why replicas wait for each other for ever, or return nothing."""
        states = self._states
        # A replica in its k-th collective needs all others to come to theirs.
        for q in range(self.size):
            if states[q] is not _State.COLLECTIVE:
                continue
            for p in range(self.size):
                waits = states[p] not in (_State.RUNNING, _State.COLLECTIVE)
                if waits and self._collectives[p] < self._collectives[q]:
                    return (
                        f"replica {q} is in collective number {self._collectives[q]} of this run, "
                        f"while replica {p} {states[p].value} and has begun only "
                        f"{self._collectives[p]}: every replica must make the same all_reduce calls"
                    )
        merging = _State.MERGE in states
        if merging and _State.FINISHED in states:
            return _MERGE_MISMATCH
        if _State.CREATION in states and states[0] in (_State.MERGE, _State.FINISHED):
            q = states.index(_State.CREATION)
            return (
                f"replica {q} creates a variable that replica 0, which {states[0].value}, did not "
                "create: every replica must create the same variables in the same order"
            )
        return ""


class ReplicaThreads:
    """The threads on which the replicas of a strategy run, replica 0 being the caller's.

    The threads end when this object is no longer used, or at `close`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: list[queue.SimpleQueue[Job | None]] = [
            queue.SimpleQueue() for _ in range(size - 1)
        ]
        for number, jobs in enumerate(self._jobs, start=1):
            threading.Thread(
                target=_serve, args=(jobs,), name=f"pycollective-replica-{number}", daemon=True
            ).start()
        self.close = weakref.finalize(self, _stop, self._jobs)

    def run(
        self, function: Callable[[int, ReplicaRun], Any], abort: Callable[[str], None]
    ) -> list[Any]:
        """Call ``function(replica, run)`` for every replica at the same time.

        Returns the results in replica order. The first exception of any replica stops the others at
        their next meeting and is raised here, when all have ended.
        """
        run = ReplicaRun(self.size, abort)
        results: list[Any] = [None] * self.size
        ended = threading.Semaphore(0)

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
                    ended.release()

            return work

        for number, jobs in enumerate(self._jobs, start=1):
            # The caller's context variables (NumPy's error state is one) hold in every replica.
            jobs.put(job(number, contextvars.copy_context()))
        replica(0)
        for _ in self._jobs:
            ended.acquire()
        run.raise_error()
        return results


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # holds the user's function and its data


def _stop(queues: list[queue.SimpleQueue[Job | None]]) -> None:
    for jobs in queues:
        jobs.put(None)
