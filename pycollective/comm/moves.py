"""The collectives that move arrays: `broadcast`, `scatter`, the gathers, `all_to_all`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pycollective import _core
from pycollective.algorithms import Algorithm
from pycollective.arguments import rank_number, switch
from pycollective.comm.arrays import (
    Array,
    as_input,
    check_counts,
    deliver,
    disjoint,
    input_and_output,
    num_rows,
    output_for,
    part_shape,
)
from pycollective.comm.call import Call, How
from pycollective.comm.member import Member
from pycollective.comm.signatures import (
    AllToAllOptions,
    GatherOptions,
    Later,
    MoveOptions,
    Now,
    O,
    S,
    ScatterOptions,
)
from pycollective.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack


#: Takes the place of the dtype in calls that exchange the lengths of parts. So no call of the program
#: can be mistaken for one of these.
_COUNTS = "counts"


class Moves(Member):
    """The calls of a `Communicator` that move arrays without combining them."""

    # fmt: off
    @overload
    def broadcast(self, x: NDArray[S], root: int = 0, *, out: None = None, async_op: Now = False,
                  **options: Unpack[MoveOptions]) -> NDArray[S]: ...
    @overload
    def broadcast(self, x: ArrayLike, root: int = 0, *, out: None = None, async_op: Now = False,
                  **options: Unpack[MoveOptions]) -> Array: ...
    @overload
    def broadcast(self, x: ArrayLike | None, root: int = 0, *, out: O, async_op: Now = False,
                  **options: Unpack[MoveOptions]) -> O: ...
    @overload
    def broadcast(self, x: NDArray[S], root: int = 0, *, out: None = None, async_op: Later,
                  **options: Unpack[MoveOptions]) -> Work[NDArray[S]]: ...
    @overload
    def broadcast(self, x: ArrayLike, root: int = 0, *, out: None = None, async_op: Later,
                  **options: Unpack[MoveOptions]) -> Work[Array]: ...
    @overload
    def broadcast(self, x: ArrayLike | None, root: int = 0, *, out: O, async_op: Later,
                  **options: Unpack[MoveOptions]) -> Work[O]: ...
    # fmt: on
    @_core.fast_call(_core.Collective.broadcast)
    def broadcast(
        self,
        x: ArrayLike | None,
        root: int = 0,
        *,
        out: object = None,
        algorithm: str | Algorithm = "auto",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Give every rank the root's array.

        Parameters
        ----------
        x : array_like or None
            On the root, the array to send, of any dtype without Python objects. On other ranks, an array
            of the same shape and dtype; or None if ``out`` is given.
        root : int
            The rank whose array is sent.
        out : array, optional
            The array for the result; ``out=x`` works in place.
        algorithm : {"auto", "tree", "chain", "direct"} or Algorithm
            See `pycollective.algorithms`; "chain" is for large arrays.
        async_op, timeout
            As in `all_reduce`; so are the errors.

        Returns
        -------
        ndarray or Work
            The root's array: ``out`` if that was given.
        """
        root, later = rank_number("root", root, self.size), switch("async_op", async_op)
        given: Any = x
        if x is None:
            if out is None or self.rank == root:
                raise TypeError(
                    "broadcast needs x on the root. Other ranks give out=, the array for the result, "
                    "or x of the same shape and dtype"
                )
            given = out
        source, target, result = input_and_output(self._result, given, out)
        call = Call(
            "broadcast", source, target, self._seconds(timeout), later,
            root=root, algorithm=self._how(algorithm), count=source.size,
        )  # fmt: skip
        return self._run(call, result)

    # fmt: off
    @overload
    def all_gather(self, x: NDArray[S], *, out: None = None, async_op: Now = False,
                   **options: Unpack[GatherOptions]) -> NDArray[S]: ...
    @overload
    def all_gather(self, x: ArrayLike, *, out: None = None, async_op: Now = False,
                   **options: Unpack[GatherOptions]) -> Array: ...
    @overload
    def all_gather(self, x: ArrayLike, *, out: O, async_op: Now = False,
                   **options: Unpack[GatherOptions]) -> O: ...
    @overload
    def all_gather(self, x: NDArray[S], *, out: None = None, async_op: Later,
                   **options: Unpack[GatherOptions]) -> Work[NDArray[S]]: ...
    @overload
    def all_gather(self, x: ArrayLike, *, out: None = None, async_op: Later,
                   **options: Unpack[GatherOptions]) -> Work[Array]: ...
    @overload
    def all_gather(self, x: ArrayLike, *, out: O, async_op: Later,
                   **options: Unpack[GatherOptions]) -> Work[O]: ...
    # fmt: on
    @_core.fast_call(_core.Collective.all_gather)
    def all_gather(
        self,
        x: ArrayLike,
        *,
        out: object = None,
        ragged: bool = False,
        algorithm: str | Algorithm = "auto",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Give every rank all ranks' arrays, joined along the first axis.

        Parameters
        ----------
        x : array_like
            This rank's part, of any dtype without Python objects; a scalar counts as one row. Shape and
            dtype are the same on every rank, except the number of rows if ``ragged``.
        out : array, optional
            The array for the result. Its shape may also be ``(size, *x.shape)``, as in mpi4py, unless
            ``ragged``. ``x`` may be this rank's part of it.
        ragged : bool
            Allow different numbers of rows, which the ranks exchange first.
        algorithm : {"auto", "ring", "doubling", "direct"} or Algorithm
            See `pycollective.algorithms`.
        async_op, timeout
            As in `all_reduce`; so are the errors.

        Returns
        -------
        ndarray or Work
            The parts in rank order, of shape ``(sum of the numbers of rows, *x.shape[1:])``: ``out`` if
            that was given.
        """
        return self._gather(None, x, out, ragged, algorithm, async_op, timeout)

    # fmt: off
    @overload
    def gather(self, x: NDArray[S], root: int = 0, *, out: None = None, async_op: Now = False,
               **options: Unpack[GatherOptions]) -> NDArray[S] | None: ...
    @overload
    def gather(self, x: ArrayLike, root: int = 0, *, out: None = None, async_op: Now = False,
               **options: Unpack[GatherOptions]) -> Array | None: ...
    @overload
    def gather(self, x: ArrayLike, root: int = 0, *, out: O, async_op: Now = False,
               **options: Unpack[GatherOptions]) -> O | None: ...
    @overload
    def gather(self, x: NDArray[S], root: int = 0, *, out: None = None, async_op: Later,
               **options: Unpack[GatherOptions]) -> Work[NDArray[S] | None]: ...
    @overload
    def gather(self, x: ArrayLike, root: int = 0, *, out: None = None, async_op: Later,
               **options: Unpack[GatherOptions]) -> Work[Array | None]: ...
    @overload
    def gather(self, x: ArrayLike, root: int = 0, *, out: O, async_op: Later,
               **options: Unpack[GatherOptions]) -> Work[O | None]: ...
    # fmt: on
    @_core.fast_call(_core.Collective.gather)
    def gather(
        self,
        x: ArrayLike,
        root: int = 0,
        *,
        out: object = None,
        ragged: bool = False,
        algorithm: str | Algorithm = "direct",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Give the root all ranks' arrays, joined along the first axis.

        Parameters
        ----------
        x, ragged
            As in `all_gather`.
        root : int
            The rank that gets the arrays.
        out : array, optional
            On the root, the array for the result, as in `all_gather`. Ignored on other ranks.
        algorithm : {"direct"} or Algorithm
            See `pycollective.algorithms`.
        async_op, timeout
            As in `all_reduce`; so are the errors.

        Returns
        -------
        ndarray, None or Work
            On the root the parts in rank order; None on other ranks.
        """
        root = rank_number("root", root, self.size)
        return self._gather(root, x, out, ragged, algorithm, async_op, timeout)

    # fmt: off
    @overload
    def scatter(self, x: NDArray[S], root: int = 0, *, out: None = None, async_op: Now = False,
                **options: Unpack[ScatterOptions]) -> NDArray[S]: ...
    @overload
    def scatter(self, x: ArrayLike, root: int = 0, *, out: None = None, async_op: Now = False,
                **options: Unpack[ScatterOptions]) -> Array: ...
    @overload
    def scatter(self, x: ArrayLike | None, root: int = 0, *, out: O, async_op: Now = False,
                **options: Unpack[ScatterOptions]) -> O: ...
    @overload
    def scatter(self, x: NDArray[S], root: int = 0, *, out: None = None, async_op: Later,
                **options: Unpack[ScatterOptions]) -> Work[NDArray[S]]: ...
    @overload
    def scatter(self, x: ArrayLike, root: int = 0, *, out: None = None, async_op: Later,
                **options: Unpack[ScatterOptions]) -> Work[Array]: ...
    @overload
    def scatter(self, x: ArrayLike | None, root: int = 0, *, out: O, async_op: Later,
                **options: Unpack[ScatterOptions]) -> Work[O]: ...
    # fmt: on
    @_core.fast_call(_core.Collective.scatter)
    def scatter(
        self,
        x: ArrayLike | None,
        root: int = 0,
        *,
        out: object = None,
        ragged: bool = False,
        counts: Sequence[int] | None = None,
        algorithm: str | Algorithm = "direct",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Give rank i the i-th part of the root's array.

        Parameters
        ----------
        x : array_like or None
            On the root, the array to send, of any dtype without Python objects; its first axis is cut
            into ``size`` equal parts. On other ranks, an array of the same shape and dtype; or None if
            ``out`` is given.
        root : int
            The rank whose array is sent.
        out : array, optional
            The array for the part. On the root, this rank's part of ``x`` works in place. For parts of
            one row, ``out`` may lack the first axis.
        ragged : bool
            Allow parts of different numbers of rows, which the root sends first.
        counts : sequence of int, optional
            With ``ragged``, on the root: the number of rows for each rank.
        algorithm : {"direct"} or Algorithm
            See `pycollective.algorithms`.
        async_op, timeout
            As in `all_reduce`.

        Returns
        -------
        ndarray or Work
            The part, of shape ``(len(x) // size, *x.shape[1:])``, or of this rank's number of rows:
            ``out`` if that was given.

        Raises
        ------
        ValueError
            The first axis cannot be cut into equal parts, or does not match ``counts``.
        MismatchError, CollectiveTimeoutError, PeerLostError, AbortedError
            As in `all_reduce`. The comparison of shapes ignores leading axes of length 1.
        """
        async_op, ragged = switch("async_op", async_op), switch("ragged", ragged)
        root = rank_number("root", root, self.size)
        seconds = self._seconds(timeout)
        how = self._how(algorithm, ragged)
        if ragged:
            like, rows = self._check_ragged_scatter(x, root, out, counts)
            call_later = partial(self._scatter_ragged, like, rows, root, out, how, seconds)
            return self._run_later(call_later, like) if async_op else call_later()
        if counts is not None:
            raise TypeError("scatter takes counts only with ragged=True")
        source: Array | None = None
        if x is not None:
            source = as_input(x)
            part = part_shape("x", source.shape, self.size)
            target, result = output_for(
                self._result, out, source, part, part[1:] if part[0] == 1 else None
            )
            agreed = part
        elif out is None or self.rank == root:
            raise TypeError(
                "scatter needs x on the root. Other ranks give out=, the array for the result, or x of "
                "the same shape and dtype"
            )
        else:
            target, result = output_for(self._result, out, None, None)
            agreed = target.shape
        while agreed[:1] == (1,):  # out may lack the first axis if parts have one row
            agreed = agreed[1:]
        if self.rank == root and source is not None:
            source = disjoint(source, target, self._own_part(source, target.size))
        else:
            source = None
        call = Call(
            "scatter", source, target, seconds, async_op,
            root=root, algorithm=how, count=target.size, shape=agreed,
        )  # fmt: skip
        return self._run(call, result)

    # fmt: off
    @overload
    def all_to_all(self, x: NDArray[S], counts: Sequence[int] | None = None, *, out: None = None,
                   async_op: Now = False, **options: Unpack[AllToAllOptions]) -> NDArray[S]: ...
    @overload
    def all_to_all(self, x: ArrayLike, counts: Sequence[int] | None = None, *, out: None = None,
                   async_op: Now = False, **options: Unpack[AllToAllOptions]) -> Array: ...
    @overload
    def all_to_all(self, x: ArrayLike, counts: Sequence[int] | None = None, *, out: O,
                   async_op: Now = False, **options: Unpack[AllToAllOptions]) -> O: ...
    @overload
    def all_to_all(self, x: NDArray[S], counts: Sequence[int] | None = None, *, out: None = None,
                   async_op: Later, **options: Unpack[AllToAllOptions]) -> Work[NDArray[S]]: ...
    @overload
    def all_to_all(self, x: ArrayLike, counts: Sequence[int] | None = None, *, out: None = None,
                   async_op: Later, **options: Unpack[AllToAllOptions]) -> Work[Array]: ...
    @overload
    def all_to_all(self, x: ArrayLike, counts: Sequence[int] | None = None, *, out: O,
                   async_op: Later, **options: Unpack[AllToAllOptions]) -> Work[O]: ...
    # fmt: on
    @_core.fast_call(_core.Collective.all_to_all)
    def all_to_all(
        self,
        x: ArrayLike,
        counts: Sequence[int] | None = None,
        *,
        out_counts: Sequence[int] | None = None,
        out: object = None,
        algorithm: str | Algorithm = "direct",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Give rank i the i-th part of every rank's array.

        Parameters
        ----------
        x : array_like
            The parts for ranks 0, 1, …, joined along the first axis; any dtype without Python objects.
        counts : sequence of int, optional
            The number of rows of ``x`` for each rank, by default equal. Give it on all ranks or on none.
        out_counts : sequence of int, optional
            With ``counts``, the number of rows from each rank; by default the ranks exchange them first.
            Give it on all ranks or on none.
        out : array, optional
            The array for the result.
        algorithm : {"direct"} or Algorithm
            See `pycollective.algorithms`; "direct" with ``counts``.
        async_op, timeout
            As in `all_reduce`; so are the other errors.

        Returns
        -------
        ndarray or Work
            The parts from ranks 0, 1, …, joined along the first axis; without ``counts`` in the shape of
            ``x``. ``out`` if that was given.

        Raises
        ------
        ValueError
            The rows of ``x`` do not match ``counts``, or cannot be cut into equal parts without it.
            Also: ``counts`` and ``out_counts`` differ for this rank, or a call with ``counts``
            names another algorithm than "direct".
        """
        async_op = switch("async_op", async_op)
        source = as_input(x)
        seconds = self._seconds(timeout)
        how = self._how(algorithm)
        if counts is None:
            if out_counts is not None:
                raise TypeError("all_to_all takes out_counts only with counts")
            part = part_shape("x", source.shape, self.size)
            target, result = output_for(self._result, out, source, source.shape)
            call = Call(
                "all_to_all", disjoint(source, target, None), target, seconds, async_op,
                algorithm=how, count=math.prod(part), shape=source.shape,
            )  # fmt: skip
            return self._run(call, result)
        if how != "direct" and how != "auto":
            name = how if isinstance(how, str) else how.name
            raise ValueError(
                f"algorithm must be 'direct' in all_to_all with counts, not {name!r}: no rank knows "
                "all lengths"
            )
        sent = check_counts("counts", counts, self.size, source)
        if out_counts is None:

            def exchange() -> Any:
                given, found = np.array(sent, np.int64), np.empty(self.size, np.int64)
                call = Call(
                    "all_to_all",
                    given,
                    found,
                    seconds,
                    algorithm="direct",
                    count=1,
                    shape=given.shape,
                    label=_COUNTS,
                )
                self._run(call)
                rows = found.tolist()
                with self._between("a ragged all_to_all"):
                    return self.all_to_all(source, sent, out_counts=rows, out=out, timeout=timeout)

            return self._run_later(exchange, source) if async_op else exchange()
        received = check_counts("out_counts", out_counts, self.size)
        if sent[self.rank] != received[self.rank]:
            raise ValueError(
                f"counts[{self.rank}] and out_counts[{self.rank}] must be equal on rank {self.rank}, "
                f"not {sent[self.rank]} and {received[self.rank]}"
            )
        row = source.shape[1:]
        target, result = output_for(self._result, out, source, (sum(received), *row))
        items = math.prod(row)
        call = Call(
            "all_to_all", disjoint(source, target, None), target, seconds, async_op,
            # At least 1: other ranks may exchange parts although this rank has none.
            count=max(*sent, *received, 1), shape=(-1, *row),
            counts=[n * items for n in sent], out_counts=[n * items for n in received],
        )  # fmt: skip
        return self._run(call, result)

    def _gather(
        self, root: int | None, x: ArrayLike, out: object, ragged: bool,
        algorithm: str | Algorithm, async_op: bool, timeout: float | None,
    ) -> Any:  # fmt: skip
        """Make a gather, or an all_gather if ``root`` is None."""
        name = "all_gather" if root is None else "gather"
        later, ragged = switch("async_op", async_op), switch("ragged", ragged)
        source, seconds, how = as_input(x), self._seconds(timeout), self._how(algorithm, ragged)
        row, is_receiver = source.shape[1:], root in (None, self.rank)
        given, target, result = source, None, None
        if not ragged:
            if is_receiver:
                whole = (self.size * num_rows(source), *row)
                target, result = output_for(
                    self._result, out, source, whole, (self.size, *source.shape)
                )
                given = disjoint(source, target, self._own_part(target, source.size))
            call = Call(
                name, given, target, seconds, later,
                root=root or 0, algorithm=how, count=source.size, shape=source.shape,
            )  # fmt: skip
            return self._run(call, result)

        def exchange() -> Any:
            given, target, result = source, None, None
            rows = self._gathered(np.array([num_rows(source)], np.int64), seconds, _COUNTS).tolist()
            with self._between(f"a ragged {name}"):
                if is_receiver:
                    target, result = output_for(self._result, out, source, (sum(rows), *row))
                    given = disjoint(source, target, self._own_ragged_part(target, rows))
                self._move_ragged(name, given, target, rows, row, root or 0, how, seconds)
            return deliver(target, result)

        return self._run_later(exchange, source) if later else exchange()

    def _check_ragged_scatter(
        self, x: ArrayLike | None, root: int, out: object, counts: Sequence[int] | None
    ) -> tuple[Array, list[int] | None]:
        """Return an array of the dtype and the row shape, and on the root the counts."""
        if self.rank == root:
            if x is None or counts is None:
                raise TypeError("a ragged scatter needs x and counts on the root")
            source = as_input(x)
            return source, check_counts("counts", counts, self.size, source)
        like: Any = out if x is None else x
        if like is None:
            raise TypeError("a ragged scatter needs x or out on ranks other than the root")
        return as_input(like), None

    def _scatter_ragged(
        self, like: Array, counts: list[int] | None, root: int, out: object, how: How,
        seconds: float,
    ) -> Any:  # fmt: skip
        """Send the counts, then the parts; on the root, ``like`` is the array to send."""
        row = like.shape[1:]
        sent = np.array(counts or [0] * self.size, np.int64)
        call = Call("broadcast", sent, sent, seconds, root=root, count=sent.size, label=_COUNTS)
        self._run(call)
        rows = sent.tolist()
        with self._between("a ragged scatter"):
            target, result = output_for(self._result, out, like, (rows[self.rank], *row))
            given = None
            if self.rank == root:
                given = disjoint(like, target, self._own_ragged_part(like, rows))
            self._move_ragged("scatter", given, target, rows, row, root, how, seconds)
        return deliver(target, result)

    def _own_ragged_part(self, whole: Array, rows: list[int]) -> Array:
        """Return this rank's part of an array of all parts."""
        flat, items = whole.reshape(-1), math.prod(whole.shape[1:])
        begin = sum(rows[: self.rank]) * items
        return flat[begin : begin + rows[self.rank] * items]

    def _move_ragged(
        self, collective: str, source: Array | None, target: Array | None, rows: list[int],
        row: tuple[int, ...], root: int, how: How, seconds: float,
    ) -> None:  # fmt: skip
        """Move parts of ``rows`` rows, each of the shape ``row``."""
        counts = [n * math.prod(row) for n in rows]
        call = Call(
            collective, source, target, seconds,
            root=root, algorithm=how, count=max(counts), shape=(-1, *row), counts=counts,
        )  # fmt: skip
        self._submit(call)
