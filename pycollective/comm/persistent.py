"""Calls that are repeated on the same arrays, as MPI's persistent requests."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

from pycollective.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
R = TypeVar("R")


class Persistent(Generic[R]):
    """A call with its arguments, which can be started many times.

    Every rank starts it at the same position among its calls. Each start uses the current values of the
    arrays: do not change them between `start` and the end of `wait`. Calling the object combines `start`
    and `wait`. A persistent call is not faster than a plain call.

    Parameters
    ----------
    call : method
        A method of a communicator that takes ``async_op``: ``comm.all_reduce``, ``comm.send``.
    *args, **options
        Its arguments, without ``async_op``.

    Raises
    ------
    TypeError
        The method has no ``async_op``, or does not take these arguments.

    Examples
    --------
    >>> request = pc.Persistent(comm.all_reduce, x, out=x)
    >>> for step in range(1000):
    ...     compute(x)
    ...     request.start()
    ...     compute(other)
    ...     request.wait()
    """

    def __init__(self, call: Callable[P, R], *args: P.args, **options: P.kwargs) -> None:
        try:
            signature = inspect.signature(call)
        except ValueError:  # a function of Python itself
            signature = inspect.Signature()
        if "async_op" not in signature.parameters or "async_op" in options:
            raise TypeError(
                "Persistent takes a method that has async_op, such as comm.all_reduce, and the method's "
                f"other arguments, not {call!r} with {', '.join(options) or 'none'}"
            )
        signature.bind(*args, **options)
        again: Any = [_kept(value) for value in args]
        named: Any = {name: _kept(value) for name, value in options.items()}
        self._call = functools.partial(call, *again, **named)
        begin = functools.partial(call, *again, **{**named, "async_op": True})
        self._begin = cast(Callable[[], Work[R]], begin)
        self._work: Work[R] | None = None

    def __call__(self) -> R:
        """Make the call, and return its result."""
        self._refuse_second_start()
        return self._call()

    def start(self) -> Self:
        """Begin the call; raise RuntimeError if `wait` has not ended the previous start."""
        self._refuse_second_start()
        self._work = self._begin()
        return self

    def wait(self, timeout: float | None = None) -> R:
        """Wait until the call is done, and return its result, as `Work.wait`.

        Raises
        ------
        RuntimeError
            The call was not started.
        TimeoutError
            The call still runs after ``timeout`` seconds; `wait` can be called again.
        CollectiveError
            The call failed.
        """
        work = self._work
        if work is None:
            raise RuntimeError("this call was not started: call start() first")
        try:
            result = work.wait(timeout)
        except BaseException:
            if work.done():
                self._work = None
            raise
        self._work = None
        return result

    def done(self) -> bool:
        """Return True if the call has ended or was not started."""
        return self._work is None or self._work.done()

    def _refuse_second_start(self) -> None:
        if self._work is not None:
            raise RuntimeError("this call was started already: call wait() first")


def _kept(value: Any) -> Any:
    """Return a value that each start can read; an iterator can be read once."""
    return list(value) if isinstance(value, Iterator) else value
