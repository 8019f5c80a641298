"""Messages between two ranks: `send`, `recv` and `sendrecv`."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from pycollective import _core, array_backend
from pycollective.arguments import rank_number, sizes, switch, whole
from pycollective.comm.arrays import Array, apart, as_input, as_output, output_for
from pycollective.comm.call import Call
from pycollective.comm.member import Member
from pycollective.comm.signatures import DTypeOf, Later, Now, O, Options, S
from pycollective.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Messages(Member):
    """The calls of a `Communicator` in which two ranks alone take part."""

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
        seconds = self._seconds(timeout)
        return self._run(Call("send", as_input(x), None, seconds, later, peer=dest, tag=tag))

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
            out = self._core.empty(() if shape is None else sizes(shape), np.dtype(dtype), True)
        target, place = output_for(self._result, out, None, None)
        call = Call("recv", None, target, self._seconds(timeout), later, peer=source, tag=tag)
        return self._run(call, place)

    # fmt: off
    @overload
    def sendrecv(self, x: ArrayLike | None, dest: int | None, out: O, source: int | None,
                 tag: int = 0, *, recvtag: int | None = None, async_op: Now = False,
                 **options: Unpack[Options]) -> O: ...
    @overload
    def sendrecv(self, x: ArrayLike | None, dest: int | None, out: O, source: int | None,
                 tag: int = 0, *, recvtag: int | None = None, async_op: Later,
                 **options: Unpack[Options]) -> Work[O]: ...
    # fmt: on
    def sendrecv(
        self,
        x: ArrayLike | None,
        dest: int | None,
        out: object,
        source: int | None,
        tag: int = 0,
        *,
        recvtag: int | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Send an array to one rank and receive one from another, without a deadlock.

        A rank that is None is no neighbour, as ``MPI.PROC_NULL``: nothing is sent to it, and nothing is
        received from it.

        Parameters
        ----------
        x : array_like or None
            The array to send, as of `send`. Ignored if ``dest`` is None.
        dest : int or None
            The rank that gets it.
        out : array or None
            The array for what is received; ``out=x`` works in place. None: a new array like ``x``.
        source : int or None
            The rank that sends it. None: ``out`` stays as it is.
        tag : int
            Of what is sent, and of what is received unless ``recvtag`` is given.
        recvtag : int, optional
            The tag of the message to receive.
        async_op : bool
            Return a `Work` at once, as of `send`.
        timeout : float, optional
            Seconds to wait for the other ranks, in each direction.

        Returns
        -------
        ndarray, None or Work
            What was received: ``out`` when that was given. Without a source, ``out`` as it was given.

        Raises
        ------
        TypeError
            There is a source, and neither ``out`` nor ``x``.
        ValueError, MismatchError, CollectiveTimeoutError, PeerLostError, AbortedError
            As `send` and `recv`.
        """
        later, recvtag = switch("async_op", async_op), tag if recvtag is None else recvtag
        if source is not None and out is None:
            if x is None:
                raise TypeError("sendrecv needs out, or x, which says shape and dtype")
            x = as_input(x)
            out = self._result(x.shape, x)
        if dest is not None and x is None:
            raise TypeError(f"sendrecv needs x, the array to send to rank {dest}")
        sent = received = None
        # A blocking send waits for no receive of the other rank; with NCCL it may.
        together = later or not array_backend.on_host(x)
        if dest is not None and x is not None:
            if source is not None:  # before anything is sent, what is wrong with the receive
                rank_number("source", source, self.size)
                target = as_output(out)
                x = apart(as_input(x), target, None) if together else x
            # Overloads take literals, and async_op is none here.
            sent = self.send(x, dest, tag, async_op=together, timeout=timeout)  # type: ignore[call-overload]
        if source is not None:
            received = self.recv(out, source, recvtag, async_op=later, timeout=timeout)  # type: ignore[call-overload]
        if not later:
            if sent is not None:
                sent.wait()
            return out
        works = [work for work in (sent, received) if work is not None]
        return Work.joined(works, lambda: out)
