"""The collectives that reduce: `all_reduce`, `reduce`, `reduce_scatter`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pycollective import _core
from pycollective.algorithms import Algorithm, names
from pycollective.arguments import OPS, check_name, op_name, rank_number, switch, whole
from pycollective.comm.arrays import (
    Array,
    CallerArray,
    as_input,
    check_one_device,
    check_out,
    disjoint,
    input_and_output,
    output_for,
    part_shape,
    several,
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
        """Give every rank the element-wise reduction of the ranks' arrays.

        Parameters
        ----------
        x : array_like
            This rank's contribution: a NumPy array of any layout, or an object with the buffer protocol,
            the array interface or DLPack. Shape and dtype are the same on every rank. The dtype is bool,
            an int of 8 to 64 bits, float16, bfloat16 (of ``ml_dtypes``), float32, float64, complex64 or
            complex128.
        op : {"sum", "prod", "min", "max", "mean", "and", "or", "xor"}, ufunc or ReduceOp
            Sums and products of ints wrap around, also before a mean divides. A mean of ints is rounded
            toward zero. A NaN in any contribution gives NaN in "min" and "max". Operations on bits are
            bitwise for ints and logical for bools. float16 and bfloat16 are computed in float32. They
            are rounded to nearest even: once at the end with "direct" among ranks that share memory,
            else after every step. Complex
            numbers have "sum", "prod" and "mean"; bools have "min", "max", "and", "or" and "xor".

            ``np.add``, ``np.multiply``, ``np.minimum``, ``np.maximum``, ``np.bitwise_and``,
            ``np.bitwise_or``, ``np.bitwise_xor`` and the members of ``ReduceOp`` stand for the
            names. With another NumPy function of two arguments, such as ``np.hypot`` or one of
            ``np.frompyfunc``, one rank computes each element in Python, in rank order.
        out : array, optional
            The array for the result, of any kind that ``x`` can be; ``out=x`` works in place.
        algorithm : str or Algorithm
            A name from `pycollective.algorithms.names`, or an algorithm made by
            `pycollective.algorithms.algorithm` for this collective. "auto" chooses by the bytes, the
            number of ranks and the transport: from the table that ``pycollective bench --tune`` has
            measured, else from a built-in one.
        reproducible : bool
            Let the bits of the result depend on the contributions alone, not on the transport. The
            contributions are combined in rank order, and float16 and bfloat16 are rounded after
            each. The algorithm must be "auto" or "direct". Without this option, the same calls in
            the same group still give the same bits.
        async_op : bool
            Return a `Work` at once instead of the result.
        timeout : float, optional
            Seconds to wait for the other ranks, by default those of the communicator.

        Returns
        -------
        ndarray or Work
            The result, in the shape and dtype of ``x``: ``out`` if that was given.

        Raises
        ------
        TypeError
            ``op`` is neither a name nor a function, or the operation does not exist for this dtype.
        ValueError
            No operation or algorithm has this name, ``reproducible`` excludes the algorithm, or
            ``out`` is not like the result.
        MismatchError
            The ranks' calls differ in collective, shape, dtype, op or algorithm.
        CollectiveTimeoutError
            A rank did not join in time; the message gives the state of each rank.
        PeerLostError
            A rank ended, failed or became unreachable.
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
        """Return the algorithm of an all-reduce: "direct" if it must be reproducible."""
        how = self._how(algorithm)
        if not reproducible:
            return how
        if how not in ("auto", "direct"):
            name = how if isinstance(how, str) else how.name
            raise ValueError(
                "reproducible=True combines in rank order, as only the algorithm 'direct' does, not "
                f"{name!r}: leave out algorithm= or reproducible="
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
        """Give the root the element-wise reduction of the ranks' arrays.

        Parameters
        ----------
        x, op
            As in `all_reduce`.
        root : int
            The rank that gets the result.
        out : array, optional
            On the root, the array for the result; ``out=x`` works in place. Ignored on other ranks.
        algorithm : {"auto", "tree", "direct"} or Algorithm
            See `pycollective.algorithms`. The order in which each combines depends only on the root and
            the number of ranks. "auto" is "direct" if all ranks share memory, else "tree".
        async_op, timeout
            As in `all_reduce`; so are the errors.

        Returns
        -------
        ndarray, None or Work
            On the root the result, in the shape and dtype of ``x``; None on other ranks.
        """
        root, later = rank_number("root", root, self.size), switch("async_op", async_op)
        how = self._how(algorithm)
        target: Array | None = None
        result: CallerArray | None = None
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
        """Give rank i the i-th part of the element-wise reduction of the ranks' arrays.

        Parameters
        ----------
        x : array_like
            This rank's contribution, as in `all_reduce`. Its first axis is cut into ``size`` equal
            parts.
        op
            As in `all_reduce`.
        out : array, optional
            The array for the part; this rank's part of ``x`` works in place. For parts of one row,
            ``out`` may lack the first axis.
        algorithm : {"auto", "ring", "halving", "direct"} or Algorithm
            See `pycollective.algorithms`. Each combines in its own order, the same over every
            transport; the choice of "auto" depends on the transport.
        async_op, timeout
            As in `all_reduce`; so are the other errors.

        Returns
        -------
        ndarray or Work
            The part, of shape ``(len(x) // size, *x.shape[1:])``: ``out`` if that was given.

        Raises
        ------
        ValueError
            The first axis cannot be cut into equal parts.
        """
        later = switch("async_op", async_op)
        source = as_input(x)
        part = part_shape("x", source.shape, self.size)
        target, result = output_for(
            self._result, out, source, part, part[1:] if part[0] == 1 else None
        )
        name, function = operation(op, source.dtype)
        call = Call(
            "reduce_scatter", disjoint(source, target, self._own_part(source, target.size)), target,
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
        """All-reduce several arrays, joined into buckets so that small arrays cost little.

        Parameters
        ----------
        arrays : iterable of array_like
            This rank's contributions, as in `all_reduce`; the same number, shapes and dtypes on every
            rank.
        op : {"sum", "prod", "min", "max", "mean", "and", "or", "xor"}
            As in `all_reduce`, but no other NumPy function.
        bytes_per_pack : int
            A bucket of more bytes takes no further array; arrays of one dtype share buckets. 0: each
            array has its own bucket.
        algorithm, reproducible, async_op
            As in `all_reduce`; so are the errors.
        out : sequence of arrays, optional
            Arrays for the results; ``out=arrays`` works in place.
        timeout : float, optional
            Seconds to wait for the other ranks, for each bucket.

        Returns
        -------
        list of ndarray, or Work
            The results, in the order and the shapes of ``arrays``: those of ``out`` if that was given.
        """
        reproducible, async_op = switch("reproducible", reproducible), switch("async_op", async_op)
        bytes_per_pack = whole("bytes_per_pack", bytes_per_pack, 0, sys.maxsize)
        sources = [as_input(x) for x in several("arrays", arrays)]
        if not sources:  # no call reaches the core, which checks the names
            check_name("op", op, OPS)
            check_name("algorithm", algorithm, (DEFAULT_ALGORITHM, *names("all_reduce")))
        op = op_name(op, sources[0].dtype if sources else None)
        if any(type(x) is not np.ndarray for x in sources):
            check_one_device(sources)
        if out is not None:
            out = several("out", out)
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
    """Return the shapes of a bucket's arrays with -2 between them, on which all ranks must agree."""
    shapes: list[int] = []
    for x in arrays:
        shapes += [-2, *x.shape]
    return shapes[1:]


def all_reduce_together(
    communicators: Sequence[Member],
    inputs: Sequence[Array],
    op: str,
    algorithm: str | Algorithm = DEFAULT_ALGORITHM,
    outputs: Sequence[Array] | None = None,
) -> list[Array]:
    """All-reduce the arrays of all ranks of a group, in one thread.

    The schedule is that of `Communicator.all_reduce`.
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
