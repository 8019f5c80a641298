"""Asynchronous calls: `Work`, the result of ``async_op=True``."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pycollective import _core

if TYPE_CHECKING:
    from typing_extensions import Self

_FOREVER = 1e9  # seconds
_NO_LOCK = contextlib.nullcontext()

R = TypeVar("R", covariant=True)
T = TypeVar("T")


class Task(Protocol):
    """An unfinished call in an engine."""

    @property
    def done(self) -> bool:
        """True if the call has ended or failed; on a device, if its result can be used."""

    @property
    def times(self) -> tuple[float, float]:
        """The begin and the end of an ended call, in seconds of `time.monotonic`."""

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds; return True if the call has ended."""

    def check(self) -> None:
        """Raise the error of the call, if there is one."""


class Work(Generic[R]):
    """A call that runs while the program does something else.

    Until the call is done, do not change its inputs or use ``out``, and keep the communicator. The
    arrays stay alive while the call runs. Call `wait`, or `done` until it returns True, for each
    work: this also writes results to an ``out`` that is not contiguous. `wait` and `result` raise the
    error of the call. A ``with`` block waits at its end::

        with comm.all_reduce(a, out=a, async_op=True), comm.all_reduce(b, out=b, async_op=True):
            ...  # both calls run
    """

    # The fast path makes works without `__init__`, and sets `_result` and `_tasks`.
    _tasks: Sequence[Task] = ()
    _finish: Callable[[], R] | None = None
    _collect: Callable[[], object] | None = None
    _lock: threading.RLock | None = None
    _result: Any = None

    def __init__(
        self,
        tasks: Sequence[Task],
        finish: Callable[[], R] | None = None,
        collect: Callable[[], object] | None = None,
    ) -> None:
        self._tasks = tasks
        self._finish = finish  # called once, after the end of the tasks
        self._collect = collect  # called before, also after an error
        if finish is not None or collect is not None:
            self._lock = threading.RLock()  # several threads may wait

    def __repr__(self) -> str:
        return f"<Work {'done' if self.done() else 'under way'}>"

    def wait(self, timeout: float | None = None) -> R:
        """Wait until the call is done, and return its result.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; the call continues after them. By default wait for the call's own deadline.

        Returns
        -------
        object
            The result that the call has without ``async_op``, such as an array or None.

        Raises
        ------
        TimeoutError
            The call still runs after ``timeout`` seconds.
        ValueError
            ``timeout`` is negative or NaN.
        CollectiveError
            The call failed.
        """
        if timeout is None:
            for task in self._tasks:
                task.wait(_FOREVER)
            return self.result()
        try:
            timeout = float(timeout)
        except (TypeError, ValueError):
            raise TypeError(f"timeout must be a number of seconds, not {timeout!r}") from None
        except OverflowError:
            timeout = math.inf
        if not timeout >= 0:
            raise ValueError(f"timeout must be a number of seconds, at least 0, not {timeout!r}")
        until = time.monotonic() + timeout
        for task in self._tasks:
            if not task.wait(max(0.0, until - time.monotonic())):
                raise TimeoutError(
                    f"the call is not done after {timeout:g} s; it still runs: wait() for it again"
                )
        return self.result()

    def done(self) -> bool:
        """Return True if the call has ended or failed, without waiting. Then ``out`` has the result."""
        if not all(task.done for task in self._tasks):
            return False
        if self._finish is not None:
            with contextlib.suppress(Exception):  # `result` raises it
                self.result()
        return True

    def exception(self) -> BaseException | None:
        """Return the error of a call that is done, or None if it succeeded.

        Raises
        ------
        RuntimeError
            The call still runs.
        """
        try:
            self.result()
        except _StillRunningError:
            raise
        except Exception as error:  # not KeyboardInterrupt, which is not the call's error
            return error
        return None

    def result(self) -> R:
        """Return the result of a call that is done, or raise its error.

        Raises
        ------
        RuntimeError
            The call still runs.
        """
        for task in self._tasks:
            if not task.done:
                raise _StillRunningError("the call still runs: wait() for it first")
        with self._lock or _NO_LOCK:
            if self._collect is not None:
                self._collect()
                self._collect = None
            for task in self._tasks:
                task.check()
            if self._finish is not None:
                self._result, self._finish = self._finish(), None
        result: R = self._result
        return result

    def then(self, finish: Callable[[], T]) -> Work[T]:
        """Return a work for this call and then ``finish``, which returns the result."""
        before = self._finish
        if before is None:
            return Work(self._tasks, finish, self._collect)

        def both() -> T:
            before()
            return finish()

        return Work(self._tasks, both, self._collect)

    @staticmethod
    def joined(works: Sequence[Work[Any]], finish: Callable[[], T]) -> Work[T]:
        """Return a work for several calls and then ``finish``, which returns the result.

        The results of the calls can have any type, because nothing reads them.
        """

        def all_of_them() -> T:
            for work in works:
                work.result()
            return finish()

        return Work([task for work in works for task in work._tasks], all_of_them)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()


class _StillRunningError(RuntimeError):
    pass


_core.use_work(Work)

DONE: Work[None] = Work(())
"""The work of a call that was done when its engine returned."""
