"""Messages between two ranks: `send`, `recv` and `sendrecv`."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from pycollective import _core, array_backend
from pycollective.arguments import rank_number, sizes, switch, whole
from pycollective.comm.arrays import Array, as_input, as_output, disjoint, output_for
from pycollective.comm.call import Call
from pycollective.comm.member import Member
from pycollective.comm.signatures import DTypeOf, Later, Now, O, Options, S
from pycollective.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Messages(Member):
    """The calls of a `Communicator` between two ranks."""

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

        Messages are independent of collectives: other ranks take no part, and the order of messages and
        collective calls does not matter, except through NCCL. Messages to one rank with one tag arrive
        in order.

        The call returns when ``x`` can be used again. Through shared memory, up to 2 MiB to one rank
        (less in large groups) are buffered. For more, and for arrays of `empty` or `shared_arrays` from
        32 KiB on, the other rank must be in `recv` or in `send`. Two ranks may both send first: a rank
        that waits receives and keeps the messages for it.

        Parameters
        ----------
        x : array_like
            The array to send, of any layout and any dtype without Python objects.
        dest : int
            The rank that gets the array; may be this one, unless NCCL sends the array.
        tag : int
            The tag of the `recv`, 0 or more.
        async_op : bool
            Return a `Work` at once. Sends and receives are independent of each other.
        timeout : float, optional
            Seconds to wait for the other rank, by default those of the communicator.

        Returns
        -------
        None or Work

        Raises
        ------
        ValueError
            The rank or the tag is not valid.
        MismatchError
            The other rank asked for another shape or dtype. This call or the next one raises it.
        CollectiveTimeoutError, PeerLostError, AbortedError
            As in `all_reduce`.
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
            The array for the message, of its shape and dtype.
        source : int
            The rank that sends.
        tag : int
            The tag of the `send`.
        shape, dtype : int or tuple of int, dtype
            Shape and dtype of the message, instead of ``out``.
        async_op, timeout
            As in `send`.

        Returns
        -------
        ndarray or Work
            The message: ``out`` if that was given.

        Raises
        ------
        TypeError
            ``source`` is missing, or neither or both of ``out`` and ``shape`` with ``dtype`` are given.
        ValueError
            The rank or the tag is not valid.
        MismatchError
            The message has another shape or dtype; the group has failed.
        CollectiveTimeoutError, PeerLostError, AbortedError
            As in `all_reduce`.
        """
        if source is None:
            raise TypeError("recv needs source=, the rank that sends")
        source, tag = rank_number("source", source, self.size), whole("tag", tag, 0)
        later = switch("async_op", async_op)
        if (out is None) != (shape is not None and dtype is not None) or (
            out is not None and (shape is not None or dtype is not None)
        ):
            raise TypeError("recv needs out, or shape and dtype of the message")
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

        A rank of None means no neighbour, as ``MPI.PROC_NULL``: no message is sent or received.

        Parameters
        ----------
        x : array_like or None
            The array to send, as in `send`. Ignored if ``dest`` is None.
        dest, source : int or None
            The rank that gets ``x``, and the rank that sends. Without a source, ``out`` is unchanged.
        out : array or None
            The array for the message; ``out=x`` works in place. None: a new array like ``x``.
        tag, recvtag : int
            The tags of the message to send and of the message to receive; by default the same.
        async_op, timeout
            As in `send`; the timeout applies in each direction.

        Returns
        -------
        ndarray, None or Work
            The message: ``out`` if that was given.

        Raises
        ------
        TypeError
            There is a source, but neither ``out`` nor ``x``; or there is a destination, but no
            ``x``.
        ValueError, MismatchError, CollectiveTimeoutError, PeerLostError, AbortedError
            As in `send` and `recv`.
        """
        tag = whole("tag", tag, 0)
        later, recvtag = switch("async_op", async_op), tag if recvtag is None else recvtag
        if source is not None and out is None:
            if x is None:
                raise TypeError("sendrecv needs out, or x, which has the shape and the dtype")
            x = as_input(x)
            out = self._result(x.shape, x)
        if dest is not None and x is None:
            raise TypeError(f"sendrecv needs x, the array to send to rank {dest}")
        sent = received = None
        # Two ranks may both wait in a blocking send of a host array, but not in NCCL's.
        together = later or not array_backend.on_host(x)
        if dest is not None and x is not None:
            if source is not None:  # raise errors of the receive before anything is sent
                rank_number("source", source, self.size)
                whole("recvtag", recvtag, 0)
                target = as_output(out)
                x = disjoint(as_input(x), target, None) if together else x
            # The overloads need a literal async_op.
            sent = self.send(x, dest, tag, async_op=together, timeout=timeout)  # type: ignore[call-overload]
        if source is not None:
            received = self.recv(out, source, recvtag, async_op=later, timeout=timeout)  # type: ignore[call-overload]
        if not later:
            if sent is not None:
                sent.wait()
            return out
        works = [work for work in (sent, received) if work is not None]
        return Work.joined(works, lambda: out)
