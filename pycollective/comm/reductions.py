"""The collectives that reduce: `all_reduce`, `reduce`, `reduce_scatter`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pycollective import _core
from pycollective.algorithms import Algorithm
from pycollective.arguments import op_name, rank_number, switch, whole
from pycollective.comm.arrays import (
    Array,
    Place,
    apart,
    as_input,
    check_one_place,
    check_out,
    input_and_output,
    output_for,
    part_shape,
)
from pycollective.comm.call import Call, How
from pycollective.comm.host import HostCore
from pycollective.comm.member import Member
from pycollective.comm.packing import joined, packs, split, spread
from pycollective.comm.signatures import (
    AllReduceOptions,
    Later,
    ManyOptions,
    MoveOptions,
    Now,
    O,
    Op,
    S,
)
from pycollective.comm.tracing import together
from pycollective.comm.ufuncs import operation
from pycollective.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_ALGORITHM = "auto"


class Reductions(Member):
    """The calls of a `Communicator` that combine the ranks' arrays."""

    # fmt: off
    @overload
    def all_reduce(self, x: NDArray[S], op: Op = "sum", *, out: None = None, async_op: Now = False,
                   **options: Unpack[AllReduceOptions]) -> NDArray[S]: ...
    @overload
    def all_reduce(self, x: ArrayLike, op: Op = "sum", *, out: None = None, async_op: Now = False,
                   **options: Unpack[AllReduceOptions]) -> Array: ...
    @overload
    def all_reduce(self, x: ArrayLike, op: Op = "sum", *, out: O, async_op: Now = False,
                   **options: Unpack[AllReduceOptions]) -> O: ...
    @overload
    def all_reduce(self, x: NDArray[S], op: Op = "sum", *, out: None = None, async_op: Later,
                   **options: Unpack[AllReduceOptions]) -> Work[NDArray[S]]: ...
    @overload
    def all_reduce(self, x: ArrayLike, op: Op = "sum", *, out: None = None, async_op: Later,
                   **options: Unpack[AllReduceOptions]) -> Work[Array]: ...
    @overload
    def all_reduce(self, x: ArrayLike, op: Op = "sum", *, out: O, async_op: Later,
                   **options: Unpack[AllReduceOptions]) -> Work[O]: ...
    # fmt: on
    @_core.fast_call(_core.Collective.all_reduce)
    def all_reduce(
        self,
        x: ArrayLike,
        op: Op = "sum",
        *,
        out: object = None,
        algorithm: str | Algorithm = DEFAULT_ALGORITHM,
        reproducible: bool = False,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Reduce the ranks' arrays element by element and give every rank the result.

        Parameters
        ----------
        x : array_like
            This rank's contribution: a NumPy array of any shape and layout, or anything with the buffer
            protocol, the array interface or DLPack in host memory; the same shape and dtype on every
            rank: bool, ints of 8 to 64 bits with and without sign, float16, bfloat16 (of
            ``ml_dtypes``), float32, float64, complex64 or complex128.
        op : {"sum", "prod", "min", "max", "mean", "and", "or", "xor"}
            Sums and products of ints wrap around, also before a mean divides; a mean of ints is
            rounded toward zero; min and max give NaN where any contribution is NaN; and, or, xor
            are bitwise for ints and logical for bools. float16 and bfloat16 are
            computed in float32 and rounded to nearest even: once at the end where ranks share
            memory ("direct"), after every step otherwise. Complex numbers have sum, prod and
            mean; bools have min, max, and, or, xor. NumPy's functions ``add``, ``multiply``,
            ``minimum``, ``maximum`` and ``bitwise_and``, and the members of ``ReduceOp``, are
            understood as well. So is any other function of NumPy's with two arguments, as
            ``np.hypot``, ``np.logaddexp`` or one of ``np.frompyfunc``. Python then combines the
            contributions in the order of the ranks; one rank makes each element.
        out : array, optional
            Where the result goes, an array of any of these kinds; ``out=x`` works in place.
        algorithm : str or Algorithm
            "auto" chooses by the size in bytes, the number of ranks and the transport, from a table that
            ``pycollective bench --tune`` can measure; other names are listed by
            `pycollective.algorithms.names`, and one's own are made by
            `pycollective.algorithms.algorithm`.
        reproducible : bool
            The bits of the result depend on the contributions alone, not on the transport: they are
            combined in the order of the ranks, float16 and bfloat16 rounded after each. Only "direct"
            does that, which "auto" then means; with another algorithm it is an error. Without it
            the same calls in the same group give the same bits again, too.
        async_op : bool
            Return a `Work` at once instead of the result.
        timeout : float, optional
            Seconds to wait for the other ranks.

        Returns
        -------
        ndarray or Work
            The result, in the shape and dtype of ``x``: ``out`` when that was given.

        Raises
        ------
        TypeError
            There is no such reduction: of this dtype, or of this op for this dtype.
        ValueError
            ``reproducible``, and an algorithm that combines in an order of its own.
        MismatchError
            The ranks' calls differ in kind, shape, dtype, op or algorithm.
        CollectiveTimeoutError
            A rank did not come in time; the message says what each rank is doing.
        AbortedError
            Another rank failed or aborted the group.
        """
        reproducible, later = switch("reproducible", reproducible), switch("async_op", async_op)
        source, target, result = input_and_output(self._result, x, out)
        name, function = operation(op, source.dtype)
        call = Call(
            "all_reduce", source, target, self._seconds(timeout), later, op=name, function=function,
            algorithm=self._how_reduced(algorithm, reproducible), reproducible=reproducible,
            count=source.size,
        )  # fmt: skip
        return self._run(call, result)

    def _how_reduced(self, algorithm: str | Algorithm, reproducible: bool) -> How:
        """Return how an all-reduce is made, where its bits may depend on the contributions alone."""
        how = self._how(algorithm)
        if not reproducible:
            return how
        if how not in ("auto", "direct"):
            name = how if isinstance(how, str) else how.name
            raise ValueError(
                "reproducible=True means the order of the ranks, which only the algorithm 'direct' "
                f"keeps; {name!r} has an order of its own: leave out algorithm= or reproducible="
            )
        return "direct"

    # fmt: off
    @overload
    def reduce(self, x: NDArray[S], op: Op = "sum", root: int = 0, *, out: None = None,
               async_op: Now = False, **options: Unpack[MoveOptions]) -> NDArray[S] | None: ...
    @overload
    def reduce(self, x: ArrayLike, op: Op = "sum", root: int = 0, *, out: None = None,
               async_op: Now = False, **options: Unpack[MoveOptions]) -> Array | None: ...
    @overload
    def reduce(self, x: ArrayLike, op: Op = "sum", root: int = 0, *, out: O, async_op: Now = False,
               **options: Unpack[MoveOptions]) -> O | None: ...
    @overload
    def reduce(self, x: NDArray[S], op: Op = "sum", root: int = 0, *, out: None = None,
               async_op: Later, **options: Unpack[MoveOptions]) -> Work[NDArray[S] | None]: ...
    @overload
    def reduce(self, x: ArrayLike, op: Op = "sum", root: int = 0, *, out: None = None,
               async_op: Later, **options: Unpack[MoveOptions]) -> Work[Array | None]: ...
    @overload
    def reduce(self, x: ArrayLike, op: Op = "sum", root: int = 0, *, out: O, async_op: Later,
               **options: Unpack[MoveOptions]) -> Work[O | None]: ...
    # fmt: on
    @_core.fast_call(_core.Collective.reduce)
    def reduce(
        self,
        x: ArrayLike,
        op: Op = "sum",
        root: int = 0,
        *,
        out: object = None,
        algorithm: str | Algorithm = DEFAULT_ALGORITHM,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Reduce the ranks' arrays element by element and give the root the result.

        Parameters
        ----------
        x : array_like
            This rank's contribution, as of `all_reduce`.
        op : {"sum", "min", "max", "prod", "mean"}
            As of `all_reduce`.
        root : int
            The rank that gets the result.
        out : array, optional
            Where the root's result goes; ``out=x`` works in place. Other ranks' is not looked at.
        algorithm : {"auto", "tree", "direct"} or Algorithm
            See `pycollective.algorithms`; one's own must be for reduce. Each combines in an order that
            depends on root and number of ranks alone. "auto" is "direct" where all ranks share memory,
            else "tree".
        async_op, timeout
            As of `all_reduce`.

        Returns
        -------
        ndarray, None or Work
            The result, in the shape and dtype of ``x``, on the root; None on the other ranks.

        Raises
        ------
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        root, later = rank_number("root", root, self.size), switch("async_op", async_op)
        how = self._how(algorithm)
        target: Array | None = None
        result: Place | None = None
        if self.rank == root:
            source, target, result = input_and_output(self._result, x, out)
        else:
            source = as_input(x)
        name, function = operation(op, source.dtype)
        call = Call(
            "reduce", source, target, self._seconds(timeout), later, op=name, function=function,
            root=root, algorithm=how, count=source.size,
        )  # fmt: skip
        return self._run(call, result)

    # fmt: off
    @overload
    def reduce_scatter(self, x: NDArray[S], op: Op = "sum", *, out: None = None,
                       async_op: Now = False, **options: Unpack[MoveOptions]) -> NDArray[S]: ...
    @overload
    def reduce_scatter(self, x: ArrayLike, op: Op = "sum", *, out: None = None,
                       async_op: Now = False, **options: Unpack[MoveOptions]) -> Array: ...
    @overload
    def reduce_scatter(self, x: ArrayLike, op: Op = "sum", *, out: O, async_op: Now = False,
                       **options: Unpack[MoveOptions]) -> O: ...
    @overload
    def reduce_scatter(self, x: NDArray[S], op: Op = "sum", *, out: None = None, async_op: Later,
                       **options: Unpack[MoveOptions]) -> Work[NDArray[S]]: ...
    @overload
    def reduce_scatter(self, x: ArrayLike, op: Op = "sum", *, out: None = None, async_op: Later,
                       **options: Unpack[MoveOptions]) -> Work[Array]: ...
    @overload
    def reduce_scatter(self, x: ArrayLike, op: Op = "sum", *, out: O, async_op: Later,
                       **options: Unpack[MoveOptions]) -> Work[O]: ...
    # fmt: on
    @_core.fast_call(_core.Collective.reduce_scatter)
    def reduce_scatter(
        self,
        x: ArrayLike,
        op: Op = "sum",
        *,
        out: object = None,
        algorithm: str | Algorithm = DEFAULT_ALGORITHM,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """Reduce the ranks' arrays element by element and give rank i the i-th part of the result.

        Parameters
        ----------
        x : array_like
            This rank's contribution, as of `all_reduce`; its first axis is cut into ``size`` equal
            parts.
        op : {"sum", "min", "max", "prod", "mean"}
            As of `all_reduce`.
        out : array, optional
            Where the result goes; this rank's own part of ``x`` works in place. Where a part is one
            row, ``out`` may be without the first axis.
        algorithm : {"auto", "ring", "halving", "direct"} or Algorithm
            See `pycollective.algorithms`; one's own must be for reduce_scatter. Each combines in an
            order of its own, the same over every transport; "auto" does not mean the same one there.
        async_op, timeout
            As of `all_reduce`.

        Returns
        -------
        ndarray or Work
            The part, of shape ``(len(x) // size, *x.shape[1:])``: ``out`` when that was given.

        Raises
        ------
        ValueError
            The first axis cannot be cut into equal parts.
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        later = switch("async_op", async_op)
        source = as_input(x)
        part = part_shape("x", source.shape, self.size)
        target, result = output_for(
            self._result, out, source, part, part[1:] if part[0] == 1 else None
        )
        name, function = operation(op, source.dtype)
        call = Call(
            "reduce_scatter", apart(source, target, self._place(source, target.size)), target,
            self._seconds(timeout), later, op=name, function=function,
            algorithm=self._how(algorithm), count=target.size,
        )  # fmt: skip
        return self._run(call, result)

    # fmt: off
    @overload
    def all_reduce_many(self, arrays: Iterable[NDArray[S]], op: Op = "sum", *, out: None = None,
                        async_op: Now = False, **options: Unpack[ManyOptions]) -> list[NDArray[S]]: ...
    @overload
    def all_reduce_many(self, arrays: Iterable[ArrayLike], op: Op = "sum", *, out: None = None,
                        async_op: Now = False, **options: Unpack[ManyOptions]) -> list[Array]: ...
    @overload
    def all_reduce_many(self, arrays: Iterable[ArrayLike], op: Op = "sum", *, out: Sequence[O],
                        async_op: Now = False, **options: Unpack[ManyOptions]) -> list[O]: ...
    @overload
    def all_reduce_many(self, arrays: Iterable[NDArray[S]], op: Op = "sum", *, out: None = None,
                        async_op: Later, **options: Unpack[ManyOptions]) -> Work[list[NDArray[S]]]: ...
    @overload
    def all_reduce_many(self, arrays: Iterable[ArrayLike], op: Op = "sum", *, out: None = None,
                        async_op: Later, **options: Unpack[ManyOptions]) -> Work[list[Array]]: ...
    @overload
    def all_reduce_many(self, arrays: Iterable[ArrayLike], op: Op = "sum", *, out: Sequence[O],
                        async_op: Later, **options: Unpack[ManyOptions]) -> Work[list[O]]: ...
    # fmt: on
    @_core.fast_reduce_many
    def all_reduce_many(
        self,
        arrays: Iterable[ArrayLike],
        op: Op = "sum",
        *,
        bytes_per_pack: int = 32 << 20,
        algorithm: str | Algorithm = DEFAULT_ALGORITHM,
        reproducible: bool = False,
        out: Sequence[object] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> object:
        """All-reduce several arrays, joined into packs so that small ones cost little.

        Parameters
        ----------
        arrays : iterable of array_like
            This rank's contributions; the same number, shapes and dtypes on every rank.
        op : {"sum", "min", "max", "prod", "mean"}
            As of `all_reduce`.
        bytes_per_pack : int
            A pack that has more bytes than this takes no further array; arrays of one dtype share
            packs. 0: each array for itself.
        algorithm, reproducible
            As of `all_reduce`.
        out : sequence of arrays, optional
            Where the results go; ``out=arrays`` works in place.
        async_op : bool
            Return a `Work` at once instead of the result.
        timeout : float, optional
            Seconds to wait for the other ranks, for each pack.

        Returns
        -------
        list of ndarray, or Work
            The results, in the order and the shapes of the arrays: those of ``out`` when that was given.

        Raises
        ------
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`; also where packs are made of arrays of different shapes.
        """
        reproducible, async_op = switch("reproducible", reproducible), switch("async_op", async_op)
        bytes_per_pack = whole("bytes_per_pack", bytes_per_pack, 0, sys.maxsize)
        sources = [as_input(x) for x in arrays]
        op = op_name(op, sources[0].dtype if sources else None)
        if any(type(x) is not np.ndarray for x in sources):
            check_one_place(sources)
        if out is not None:
            if len(out) != len(sources):
                raise ValueError(f"out has {len(out)} arrays for {len(sources)} contributions")
            views = [check_out(o, x) for o, x in zip(out, sources, strict=True)]

        how, seconds = self._how_reduced(algorithm, reproducible), self._seconds(timeout)
        members = packs(sources, bytes_per_pack)
        totals: list[Array] = []
        works: list[Work[None]] = []
        for pack in members:
            parts = [sources[i] for i in pack]
            source, target = joined(parts)
            call = Call(
                "all_reduce", source, target, seconds, async_op, op=op, algorithm=how,
                reproducible=reproducible, count=source.size, shape=_shape_of(parts),
            )  # fmt: skip
            works.append(self._submit(call))
            totals.append(target)

        def finish() -> list[object]:
            results: list[object] = [None] * len(sources) if out is None else list(out)
            for pack, total in zip(members, totals, strict=True):
                if out is not None:
                    spread(total, [views[i] for i in pack])
                    continue
                for i, part in zip(pack, split(total, [sources[i] for i in pack]), strict=True):
                    results[i] = part
            return results

        return Work.joined(works, finish) if async_op else finish()


def _shape_of(arrays: Sequence[Array]) -> list[int]:
    """Return what the ranks must agree on of a pack: the arrays' shapes, with -2 between them."""
    together: list[int] = []
    for x in arrays:
        together += [-2, *x.shape]
    return together[1:]


def all_reduce_together(
    communicators: Sequence[Member],
    inputs: Sequence[Array],
    op: str,
    algorithm: str | Algorithm = DEFAULT_ALGORITHM,
    outputs: Sequence[Array] | None = None,
) -> list[Array]:
    """All-reduce of every rank of a group, called by one thread that has all their arrays.

    The same schedule runs as when each rank calls `Communicator.all_reduce`.
    """
    sources = [as_input(x) for x in inputs]
    outputs = [np.empty(x.shape, x.dtype) for x in sources] if outputs is None else list(outputs)
    how, timeout = communicators[0]._how(algorithm), communicators[0].timeout
    cores = [c._core for c in communicators]
    compiled = [core for core in cores if isinstance(core, HostCore)]

    def call_of(rank: int) -> Call:
        x, y = sources[rank], outputs[rank]
        return Call("all_reduce", x, y, timeout, op=op, algorithm=how, count=x.size)

    with together(communicators, call_of):
        _core.all_reduce_together(compiled, sources, outputs, op, how, timeout)
    return outputs
