"""The collectives that move arrays: `broadcast`, `scatter`, the gathers, `all_to_all`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pycollective import _core
from pycollective.algorithms import Algorithm
from pycollective.arguments import rank_number, switch
from pycollective.comm.arrays import (
    Array,
    Place,
    apart,
    as_input,
    check_counts,
    deliver,
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


class Moves(Member):
    """The calls of a `Communicator` that give arrays from rank to rank as they are."""

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
            The root's array is what everyone gets; the other ranks' only says the shape and dtype,
            which must be the root's, and may be None when ``out`` is given. Any dtype without Python
            objects.
        root : int
            The rank whose array it is.
        out : array, optional
            Where the result goes; ``out=x`` works in place.
        algorithm : {"auto", "tree", "chain"} or Algorithm
            See `pycollective.algorithms`; the chain is for large arrays. One's own must be for
            broadcast.
        async_op, timeout
            As of `all_reduce`.

        Returns
        -------
        ndarray or Work
            The root's array: ``out`` when that was given.

        Raises
        ------
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        root, later = rank_number("root", root, self.size), switch("async_op", async_op)
        given: Any = x
        if x is None:
            if out is None or self.rank == root:
                raise TypeError(
                    "broadcast needs x on the root, and on the other ranks x or out to say shape and "
                    "dtype"
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
        """Give every rank all ranks' arrays, one after the other along the first axis.

        Parameters
        ----------
        x : array_like
            This rank's part, of any dtype without Python objects; a scalar counts as one row. Shape
            and dtype are the same on every rank, except for the number of rows when ``ragged``.
        out : array, optional
            Where the result goes; also, unless ``ragged``, in the shape ``(size, *x.shape)`` that
            mpi4py's users write. ``x`` may be this rank's own part of it.
        ragged : bool
            The ranks' numbers of rows may differ; they are exchanged first.
        algorithm : {"auto", "ring", "doubling", "direct"} or Algorithm
            See `pycollective.algorithms`; one's own must be for all_gather.
        async_op, timeout
            As of `all_reduce`.

        Returns
        -------
        ndarray or Work
            The parts in rank order, of shape ``(sum of the numbers of rows, *x.shape[1:])``: ``out``
            when that was given.

        Raises
        ------
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        async_op, ragged = switch("async_op", async_op), switch("ragged", ragged)
        source = as_input(x)
        row = source.shape[1:]
        seconds = self._seconds(timeout)
        how = self._how(algorithm, ragged)
        if not ragged:
            whole = (self.size * num_rows(source), *row)
            target, result = output_for(
                self._result, out, source, whole, (self.size, *source.shape)
            )
            call = Call(
                "all_gather", apart(source, target, self._place(target, source.size)), target,
                seconds, async_op, algorithm=how, count=source.size, shape=source.shape,
            )  # fmt: skip
            return self._run(call, result)
        return self._gather_ragged("all_gather", source, None, out, how, seconds, async_op)

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
        """Give the root all ranks' arrays, one after the other along the first axis.

        Parameters
        ----------
        x : array_like
            This rank's part, as of `all_gather`.
        root : int
            The rank that gets them.
        out : array, optional
            Where the root's result goes, as of `all_gather`. Other ranks' is not looked at.
        ragged : bool
            As of `all_gather`.
        algorithm : str or Algorithm
            As of `broadcast`.
        async_op, timeout
            As of `all_reduce`.

        Returns
        -------
        ndarray, None or Work
            The parts in rank order on the root, None on the other ranks.

        Raises
        ------
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        async_op, ragged = switch("async_op", async_op), switch("ragged", ragged)
        root = rank_number("root", root, self.size)
        source = as_input(x)
        seconds = self._seconds(timeout)
        how = self._how(algorithm, ragged)
        if ragged:
            return self._gather_ragged("gather", source, root, out, how, seconds, async_op)
        target: Array | None = None
        result: Place | None = None
        agreed = source.shape
        if self.rank == root:
            whole = (self.size * num_rows(source), *source.shape[1:])
            target, result = output_for(
                self._result, out, source, whole, (self.size, *source.shape)
            )
            source = apart(source, target, self._place(target, source.size))
        call = Call(
            "gather", source, target, seconds, async_op,
            root=root, algorithm=how, count=source.size, shape=agreed,
        )  # fmt: skip
        return self._run(call, result)

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
            The root's array, of any dtype without Python objects; its first axis is cut into ``size``
            equal parts. On another rank it says shape and dtype only, and may be None when ``out`` is
            given.
        root : int
            The rank whose array it is.
        out : array, optional
            Where the part goes; on the root, its own part of ``x`` works in place. Where a part is one
            row, ``out`` may be without the first axis.
        ragged : bool
            The parts may have different numbers of rows: those of ``counts``, which the root tells the
            others first.
        counts : sequence of int, optional
            With ``ragged``, on the root: rows of ``x`` for each rank.
        algorithm : str or Algorithm
            As of `broadcast`.
        async_op, timeout
            As of `all_reduce`.

        Returns
        -------
        ndarray or Work
            The part, of shape ``(len(x) // size, *x.shape[1:])``, or with so many rows as the counts
            say: ``out`` when that was given.

        Raises
        ------
        ValueError
            The first axis cannot be cut into equal parts.
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`; leading axes of length 1 are not looked at.
        """
        async_op, ragged = switch("async_op", async_op), switch("ragged", ragged)
        root = rank_number("root", root, self.size)
        seconds = self._seconds(timeout)
        how = self._how(algorithm, ragged)
        if ragged:
            said, rows = self._check_ragged_scatter(x, root, out, counts)
            return self._at_once_or_later(
                async_op, lambda: self._scatter_ragged(said, rows, root, out, how, seconds), said
            )
        if counts is not None:
            raise TypeError("scatter takes counts with ragged=True only")
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
                "scatter needs x on the root, and on the other ranks x or out to say shape and dtype"
            )
        else:
            target, result = output_for(self._result, out, None, None)
            agreed = target.shape
        while agreed[:1] == (1,):  # of one row, out may be without the first axis
            agreed = agreed[1:]
        if self.rank == root and source is not None:
            source = apart(source, target, self._place(source, target.size))
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
            The parts for rank 0, 1, … one after the other along the first axis; any dtype without
            Python objects.
        counts : sequence of int, optional
            Rows of ``x`` for each rank; equal parts unless given. Either all ranks give it or none.
        out_counts : sequence of int, optional
            Rows that each rank sends to this one, with ``counts``; exchanged first unless given.
            Either all ranks give it or none.
        out : array, optional
            Where the result goes.
        algorithm : str or Algorithm
            As of `broadcast`; with ``counts`` there is "direct" alone.
        async_op, timeout
            As of `all_reduce`.

        Returns
        -------
        ndarray or Work
            The parts from rank 0, 1, … one after the other; without ``counts``, in the shape of
            ``x``: ``out`` when that was given.

        Raises
        ------
        ValueError
            The parts do not make up ``x``, or an algorithm is named that cannot have ``counts``.
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        async_op = switch("async_op", async_op)
        source = as_input(x)
        seconds = self._seconds(timeout)
        how = self._how(algorithm)
        if counts is None:
            if out_counts is not None:
                raise TypeError("all_to_all takes out_counts with counts only")
            part = part_shape("x", source.shape, self.size)
            target, result = output_for(self._result, out, source, source.shape)
            call = Call(
                "all_to_all", apart(source, target, None), target, seconds, async_op,
                algorithm=how, count=math.prod(part), shape=source.shape,
            )  # fmt: skip
            return self._run(call, result)
        if how != "direct" and how != "auto":
            name = how if isinstance(how, str) else how.name
            raise ValueError(
                f"all_to_all with counts has the algorithm 'direct' alone, not {name!r}: no rank "
                "knows all lengths"
            )
        sent = check_counts("counts", counts, self.size)
        if source.ndim == 0 or sum(sent) != len(source):
            raise ValueError(
                f"counts add up to {sum(sent)} rows, and x has the shape {list(source.shape)}"
            )
        if out_counts is None:

            def exchange() -> Any:
                told = self.all_to_all(np.array(sent, np.int64), timeout=timeout).tolist()
                with self._between("a ragged all_to_all"):
                    return self.all_to_all(source, sent, out_counts=told, out=out, timeout=timeout)

            return self._at_once_or_later(async_op, exchange, source)
        received = check_counts("out_counts", out_counts, self.size)
        if sent[self.rank] != received[self.rank]:
            raise ValueError(
                f"counts[{self.rank}] and out_counts[{self.rank}] are what this rank sends to "
                f"itself, and must be equal, not {sent[self.rank]} and {received[self.rank]}"
            )
        row = source.shape[1:]
        target, result = output_for(self._result, out, source, (sum(received), *row))
        items = math.prod(row)
        call = Call(
            "all_to_all", apart(source, target, None), target, seconds, async_op,
            # A part that is neither sent nor received here may be another rank's.
            count=max(*sent, *received, 1), shape=(-1, *row),
            counts=[n * items for n in sent], out_counts=[n * items for n in received],
        )  # fmt: skip
        return self._run(call, result)

    def _at_once_or_later(self, later: bool, call: Callable[[], Any], array: Array) -> Any:
        """Make a call that consists of several."""
        return self._run_later(call, array) if later else call()

    def _gather_ragged(
        self,
        collective: str,
        source: Array,
        root: int | None,
        out: object,
        how: How,
        seconds: float,
        later: bool,
    ) -> Any:
        """Make a gather, or an all_gather if there is no root, of parts that may differ in length."""
        row = source.shape[1:]

        def call() -> Any:
            told = self.all_gather(np.array([num_rows(source)], np.int64), timeout=seconds)
            rows = [int(n) for n in told]
            with self._between(f"a ragged {collective}"):
                given, target, result = source, None, None
                if root in (None, self.rank):
                    target, result = output_for(self._result, out, source, (sum(rows), *row))
                    given = apart(source, target, self._ragged_place(target, rows))
                self._move_ragged(collective, given, target, rows, row, root or 0, how, seconds)
            return deliver(target, result)

        return self._at_once_or_later(later, call, source)

    def _check_ragged_scatter(
        self, x: ArrayLike | None, root: int, out: object, counts: Sequence[int] | None
    ) -> tuple[Array, list[int] | None]:
        """Return what says dtype and rows, and the root's counts."""
        if self.rank == root:
            if x is None or counts is None:
                raise TypeError("a ragged scatter needs x and counts on the root")
            source, found = as_input(x), check_counts("counts", counts, self.size)
            if source.ndim == 0 or sum(found) != len(source):
                raise ValueError(
                    f"counts add up to {sum(found)} rows, and x has the shape {list(source.shape)}"
                )
            return source, found
        said: Any = out if x is None else x
        if said is None:
            raise TypeError("scatter needs x or out on the other ranks, to say dtype and row shape")
        return as_input(said), None

    def _scatter_ragged(
        self,
        source: Array,
        counts: list[int] | None,
        root: int,
        out: object,
        how: How,
        seconds: float,
    ) -> Any:
        row = source.shape[1:]
        told = np.array(counts or [0] * self.size, np.int64)
        rows = [int(n) for n in self.broadcast(told, root, timeout=seconds)]
        with self._between("a ragged scatter"):
            target, result = output_for(self._result, out, source, (rows[self.rank], *row))
            given = None
            if self.rank == root:
                given = apart(source, target, self._ragged_place(source, rows))
            self._move_ragged("scatter", given, target, rows, row, root, how, seconds)
        return deliver(target, result)

    def _ragged_place(self, whole: Array, rows: list[int]) -> Array:
        """Return this rank's part of an array of all parts."""
        flat, items = whole.reshape(-1), math.prod(whole.shape[1:])
        begin = sum(rows[: self.rank]) * items
        return flat[begin : begin + rows[self.rank] * items]

    def _move_ragged(
        self,
        collective: str,
        source: Array | None,
        target: Array | None,
        rows: list[int],
        row: tuple[int, ...],
        root: int,
        how: How,
        seconds: float,
    ) -> None:
        counts = [n * math.prod(row) for n in rows]
        call = Call(
            collective, source, target, seconds,
            root=root, algorithm=how, count=max(counts), shape=(-1, *row), counts=counts,
        )  # fmt: skip
        self._submit(call)
