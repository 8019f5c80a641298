"""Calls that are under way: what ``async_op=True`` returns."""

from __future__ import annotations

import atexit
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pycollective import _core, array_backend
from pycollective.communicator.arrays import Array, Place, deliver
from pycollective.errors import CollectiveError

if TYPE_CHECKING:
    from typing_extensions import Self

    from pycollective.communicator.member import Member

__all__ = ["Work", "outcome"]

_FOR_EVER = 1e9  # seconds


R = TypeVar("R", covariant=True)


class Work(Generic[R]):
    """A call that goes on while the program does something else.

    The arrays of the call must be left alone until it is done: the input is still read, and ``out``
    is whole when `wait` has returned. They are kept for the call, also when nobody keeps the work. An
    error of the call is raised by `wait` and `result`. As a context manager, the work is waited for at
    the end::

        with comm.all_reduce(a, out=a, async_op=True), comm.all_reduce(b, out=b, async_op=True):
            ...  # both are under way
    """

    _tasks: Sequence[_core.Task] = ()
    _core: Any = None
    _finish: Callable[[], R] | None = None
    _result: Any = None

    def __init__(
        self, tasks: Sequence[_core.Task], finish: Callable[[], R], core: Any = None
    ) -> None:
        self._tasks = tasks
        self._core = core  # of a communicator that the call itself keeps
        self._finish = finish

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
        if self._core is not None:
            self._core.collect()
            self._core = None
        for task in self._tasks:
            task.check()
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        result: R = self._result
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()


class _StillUnderWayError(RuntimeError):
    pass


def outcome(task: _core.Task | None, target: Array, place: Place | None) -> Any:
    """Return what a call gives: its result, or the work that will have it."""
    if task is None:
        return deliver(target, place)
    return Work([task], lambda: deliver(target, place))


_core.use_work(Work)


def nothing(task: _core.Task | None) -> Work[None] | None:
    """Return what a call gives that has no result on this rank."""
    return None if task is None else Work([task], lambda: None)


_need_python: weakref.WeakSet[Member] = weakref.WeakSet()


def in_python(member: Member, call: Callable[[], Any], array: Array | None = None) -> Work[Any]:
    """Make a call that consists of several, with what Python does between them, as a work.

    On an array of a GPU it is made at once, on this thread's stream, which another thread does not have.
    """
    if array is not None and array_backend.is_on_gpu(array):
        result = call()
        return Work([], lambda: result)
    _need_python.add(member)
    answer = _Answer()
    # The core keeps this until the next call, and Python's collector cannot see that reference. It
    # must not refer to the communicator or to the result then, or nobody could free the communicator.
    begin = functools.partial(_make, [call], weakref.ref(answer), member._group, member.rank)

    core = member._core

    def finish() -> Any:
        if answer.error is not None:
            core.note_told()
            raise answer.error
        return answer.result

    return Work([core.submit(begin)], finish, core)


def _make(
    calls: list[Callable[[], Any]], answers: weakref.ref[_Answer], group: Any, rank: int
) -> None:
    """Make the call, which is taken out of ``calls``, and leave its result or its error."""
    result, problem = None, None
    try:
        result = calls.pop()()
    except BaseException as error:
        problem = error
        if not isinstance(error, CollectiveError):  # later calls of the others would differ
            group.abort(
                f"rank {rank} left an asynchronous call because of an error of its own: "
                f"{type(error).__name__}"
            )
    if (asked := answers()) is not None:
        asked.result, asked.error = result, problem


class _Answer:
    """The result or the error of a call that Python made."""

    result: Any = None
    error: BaseException | None = None


@atexit.register
def _end_calls() -> None:
    """No thread may ask for the interpreter when it is gone."""
    for member in list(_need_python):
        member._close_at_exit()
