"""Calls that are under way: what ``async_op=True`` returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pycollective import _core

if TYPE_CHECKING:
    from typing_extensions import Self

_FOR_EVER = 1e9  # seconds

R = TypeVar("R", covariant=True)
T = TypeVar("T")


class Task(Protocol):
    """A call that is under way in an engine."""

    @property
    def done(self) -> bool:
        """True if the call is over, well or not; on a device, if its result can be used."""

    @property
    def times(self) -> tuple[float, float]:
        """The begin and the end of a call that is over, as `time.monotonic`."""

    def wait(self, timeout: float) -> bool:
        """Return True if the call is over within ``timeout`` seconds."""

    def check(self) -> None:
        """Raise the error of the call, if it has one."""


class Work(Generic[R]):
    """A call that goes on while the program does something else.

    The arrays of the call must be left alone until it is done: the input is still read, and ``out``
    is whole when `wait` has returned. They are kept for the call, also when nobody keeps the work. An
    error of the call is raised by `wait` and `result`. As a context manager, the work is waited for at
    the end::

        with comm.all_reduce(a, out=a, async_op=True), comm.all_reduce(b, out=b, async_op=True):
            ...  # both are under way
    """

    # The compiled calls make works without `__init__`, and set `_result` and `_tasks`.
    _tasks: Sequence[Task] = ()
    _finish: Callable[[], R] | None = None
    _collect: Callable[[], object] | None = None
    _result: Any = None

    def __init__(
        self,
        tasks: Sequence[Task],
        finish: Callable[[], R] | None = None,
        collect: Callable[[], object] | None = None,
    ) -> None:
        self._tasks = tasks
        self._finish = finish  # called once, by the first that asks for the result
        self._collect = collect  # called before, whether the call went well or not

    def __repr__(self) -> str:
        return f"<Work {'done' if self.done() else 'under way'}>"

    def wait(self, timeout: float | None = None) -> R:
        """Wait until the call is done and return what it returns.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait here; the call goes on after them. By default until the call is done, which
            has a deadline of its own.

        Returns
        -------
        ndarray or None
            What the call returns without ``async_op``.

        Raises
        ------
        TimeoutError
            The call is still under way.
        CollectiveError
            As the call without ``async_op``.
        """
        if timeout is None:
            for task in self._tasks:
                task.wait(_FOR_EVER)
            return self.result()
        until = time.monotonic() + float(timeout)
        for task in self._tasks:
            if not task.wait(max(0.0, until - time.monotonic())):
                raise TimeoutError(
                    f"the call is not done after {timeout:g} s; it goes on, and can be waited for again"
                )
        return self.result()

    def done(self) -> bool:
        """Whether the call is over, well or not; never waits."""
        return all(task.done for task in self._tasks)

    def exception(self) -> BaseException | None:
        """Return the error of a call that is done, or None if it went well."""
        try:
            self.result()
        except _StillUnderWayError:
            raise
        except Exception as error:  # Ctrl-C is none of the call's
            return error
        return None

    def result(self) -> R:
        """Return what a call that is done returns, or raise its error; never waits.

        Raises
        ------
        RuntimeError
            The call is still under way.
        """
        for task in self._tasks:
            if not task.done:
                raise _StillUnderWayError("the call is still under way: wait() for it first")
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
        """Return the work of this call with another end: ``finish`` follows, and has the result."""
        before = self._finish
        if before is None:
            return Work(self._tasks, finish, self._collect)

        def both() -> T:
            before()
            return finish()

        return Work(self._tasks, both, self._collect)

    @staticmethod
    def joined(works: Sequence[Work[Any]], finish: Callable[[], T]) -> Work[T]:
        """Return the work of several calls, of which ``finish`` has the result."""

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


class _StillUnderWayError(RuntimeError):
    pass


_core.use_work(Work)

DONE: Work[None] = Work(())
"""The work of a call that is over when its engine returns."""
