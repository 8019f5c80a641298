"""Messages between two ranks: `send` and `recv`."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from pycollective import _core
from pycollective.arguments import rank_number, sizes, switch, whole
from pycollective.communicator.arrays import Array, as_input, output_for
from pycollective.communicator.member import Member
from pycollective.communicator.signatures import DTypeOf, Later, Now, O, Options, S
from pycollective.communicator.work import Work, nothing, outcome

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Messages"]


class Messages(Member):
    """What of a `Communicator` concerns two ranks only."""

    # fmt: off
    @overload
    def send(self, x: ArrayLike, dest: int, tag: int = 0, *,
             async_op: Now = False, **options: Unpack[Options]) -> None: ...
    @overload
    def send(self, x: ArrayLike, dest: int, tag: int = 0, *,
             async_op: Later, **options: Unpack[Options]) -> Work[None]: ...
    # fmt: on
    @_core.fast_send
    def send(
        self,
        x: ArrayLike,
        dest: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Send an array to another rank, which calls `recv`.

        Messages go beside the collectives: other ranks take no part, and the order of collective calls
        and messages among each other does not matter. Messages to one rank with one tag arrive in the
        order in which they were sent.

        The call returns when ``x`` can be used again. Through shared memory, up to 2 MiB to one rank
        (less in large groups) are under way without it; beyond that, and for longer arrays of
        `empty` or `shared_arrays`, the other rank must be in `recv` or in `send`. Two ranks may both
        send first, whatever the length: a rank that waits in `send` or `recv` receives what comes for
        it, and keeps it until it is asked for.

        Parameters
        ----------
        x : array_like
            What is sent: any layout, any dtype without Python objects.
        dest : int
            The rank that gets it; may be this one.
        tag : int
            Must be that of the `recv`, 0 or more.
        async_op : bool
            Return a `Work` at once. Works of `send` and `recv` go on at the same time, whichever was
            called first.
        timeout : float, optional
            Seconds to wait for the other rank.

        Returns
        -------
        None or Work

        Raises
        ------
        ValueError
            There is no such rank or tag.
        MismatchError
            The other rank asked for another shape or dtype. It is found out there, and heard of here in
            this call or in the next one.
        CollectiveTimeoutError, PeerLostError, AbortedError
            As `all_reduce`.
        """
        dest, tag = rank_number("dest", dest, self.size), whole("tag", tag, 0)
        later = switch("async_op", async_op)
        source, seconds = as_input(x), self._seconds(timeout)
        return nothing(self._core_for(source).send(source, dest, tag, seconds, later))

    # fmt: off
    @overload
    def recv(self, out: O, source: int, tag: int = 0, *,
             async_op: Now = False, **options: Unpack[Options]) -> O: ...
    @overload
    def recv(self, out: None = None, *, source: int, tag: int = 0, shape: int | tuple[int, ...],
             dtype: DTypeOf[S], async_op: Now = False, **options: Unpack[Options]) -> NDArray[S]: ...
    @overload
    def recv(self, out: None = None, *, source: int, tag: int = 0, shape: int | tuple[int, ...],
             dtype: DTypeLike, async_op: Now = False, **options: Unpack[Options]) -> Array: ...
    @overload
    def recv(self, out: O, source: int, tag: int = 0, *,
             async_op: Later, **options: Unpack[Options]) -> Work[O]: ...
    @overload
    def recv(self, out: None = None, *, source: int, tag: int = 0, shape: int | tuple[int, ...],
             dtype: DTypeOf[S], async_op: Later, **options: Unpack[Options]) -> Work[NDArray[S]]: ...
    @overload
    def recv(self, out: None = None, *, source: int, tag: int = 0, shape: int | tuple[int, ...],
             dtype: DTypeLike, async_op: Later, **options: Unpack[Options]) -> Work[Array]: ...
    # fmt: on
    @_core.fast_recv
    def recv(
        self,
        out: object = None,
        source: int | None = None,
        tag: int = 0,
        *,
        shape: int | tuple[int, ...] | None = None,
        dtype: DTypeLike | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Receive an array that another rank sends.

        Parameters
        ----------
        out : array, optional
            Where it goes, of the shape and dtype that are sent.
        source : int
            The rank that sends it.
        tag : int
            As of `send`.
        shape, dtype : int or tuple of int, dtype
            Instead of ``out``: what is sent.
        async_op : bool
            Return a `Work` at once, as of `send`.
        timeout : float, optional
            Seconds to wait for the other rank.

        Returns
        -------
        ndarray or Work
            What was sent: ``out`` when that was given.

        Raises
        ------
        TypeError
            Neither ``out`` nor ``shape`` and ``dtype`` are given, or no ``source``.
        ValueError
            There is no such rank or tag.
        MismatchError
            What was sent has another shape or dtype; the group has failed.
        CollectiveTimeoutError, PeerLostError, AbortedError
            As `all_reduce`.
        """
        if source is None:
            raise TypeError("recv needs source=, the rank that sends")
        source, tag = rank_number("source", source, self.size), whole("tag", tag, 0)
        later = switch("async_op", async_op)
        if (out is None) == (shape is None or dtype is None):
            raise TypeError("recv needs out, or shape and dtype of what is sent")
        if out is None:
            out = np.empty(() if shape is None else sizes(shape), dtype)
        target, place = output_for(out, None, None)
        seconds = self._seconds(timeout)
        core = self._core_for(target)
        task = core.recv(target, source, tag, seconds, later)
        return outcome(task, target, place)
