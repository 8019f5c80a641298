"""Calls that are made again and again on the same arrays: MPI's persistent requests."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar, cast

from pycollective.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
R = TypeVar("R")


class Persistent(Generic[R]):
    """A call with its arguments, to be started many times.

    Every rank starts it at the same place among its calls. What the arrays hold at each start is sent;
    leave them alone from `start` until `wait` has returned. Calling the object is `start` and `wait` in
    one. It is no faster than the plain call, which checks its arguments in compiled code.

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
        signature = inspect.signature(call)
        if "async_op" not in signature.parameters or "async_op" in options:
            raise TypeError(
                "Persistent takes a method that has async_op, such as comm.all_reduce, and the method's "
                f"other arguments: not {call!r} with {', '.join(options) or 'none'}"
            )
        signature.bind(*args, **options)
        self._call = functools.partial(call, *args, **options)
        begin = functools.partial(call, *args, **{**options, "async_op": True})  # type: ignore[arg-type]
        self._begin = cast(Callable[[], Work[R]], begin)
        self._work: Work[R] | None = None

    def __call__(self) -> R:
        """Make the call and return what it returns."""
        self._refuse_second_start()
        return self._call()

    def start(self) -> Self:
        """Begin the call; raises RuntimeError if `wait` has not ended the one before."""
        self._refuse_second_start()
        self._work = self._begin()
        return self

    def wait(self, timeout: float | None = None) -> R:
        """Wait until the call is done and return what it returns, as `Work.wait`.

        Raises
        ------
        RuntimeError
            `start` comes first.
        TimeoutError
            The call is still under way after ``timeout`` seconds, and can be waited for again.
        CollectiveError
            As the call.
        """
        work = self._work
        if work is None:
            raise RuntimeError("this call is not under way: call start() first")
        try:
            result = work.wait(timeout)
        except BaseException:
            if work.done():
                self._work = None
            raise
        self._work = None
        return result

    def done(self) -> bool:
        """Return True if the call is over, or was not started."""
        return self._work is None or self._work.done()

    def _refuse_second_start(self) -> None:
        if self._work is not None:
            raise RuntimeError("this call is under way already: call wait() first")
