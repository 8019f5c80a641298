"""Communicators: the collectives of one rank, on NumPy arrays."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from pycollective import _core, tuning
from pycollective.algorithms import Algorithm
from pycollective.errors import CollectiveError

__all__ = ["DEFAULT_ALGORITHM", "DEFAULT_TIMEOUT", "Communicator", "local_group"]

DEFAULT_TIMEOUT = 600.0
"""Seconds that a collective call waits for the other ranks."""

DEFAULT_ALGORITHM = "auto"

Array = NDArray[Any]


def _as_input(x: ArrayLike) -> Array:
    """Return ``x`` as an array the core can read: C-contiguous and aligned."""
    if not isinstance(x, np.ndarray):
        if hasattr(x, "__cuda_array_interface__"):
            raise TypeError(
                f"{type(x).__name__} lies on a GPU, and this communicator moves host arrays: "
                "copy it to the host first (for CuPy: x.get())"
            )
        x = np.asarray(x)
    array: Array = x
    if array.dtype.hasobject:
        raise TypeError("arrays of Python objects cannot be sent: give a numeric dtype")
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy(order="C")


def _check_writable(out: Any) -> None:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, not {type(out).__name__}")
    if out.dtype.hasobject:
        raise TypeError("out holds Python objects: give an array of a numeric dtype")
    if not out.flags.writeable:
        raise ValueError("out is read-only: give an array that can be written")


def _check_out(out: Any, x: Array) -> None:
    _check_writable(out)
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(
            f"out must be like the input, {x.dtype}{list(x.shape)}, and is "
            f"{out.dtype}{list(out.shape)}"
        )


def _rows(x: Array) -> int:
    return len(x) if x.ndim else 1


def _part_shape(name: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Shape of one of ``size`` equal parts along the first axis."""
    if not shape or shape[0] % size:
        raise ValueError(
            f"{name} is cut into {size} equal parts along its first axis, and has the shape "
            f"{list(shape)}"
        )
    return (shape[0] // size, *shape[1:])


def _target(
    out: Any, dtype: Any, shape: tuple[int, ...] | None, other: tuple[int, ...] | None = None
) -> tuple[Array, Array | None]:
    """Array for the core to write, and where the result must be copied, if at all.

    ``out`` must be of ``dtype`` and one of the shapes; None: of any.
    """
    if out is None:
        assert shape is not None
        return np.empty(shape, dtype), None
    _check_writable(out)
    if shape is not None and (out.dtype != dtype or out.shape not in (shape, other)):
        raise ValueError(f"out must be {dtype}{list(shape)}, and is {out.dtype}{list(out.shape)}")
    if out.flags.c_contiguous and out.flags.aligned:
        return out, None
    return np.empty(out.shape, out.dtype), out


def _apart(source: Array, target: Array, place: Array | None) -> Array:
    """Return the input, or a copy where it overlaps the output in another way than in place.

    In place: the smaller of the two is ``place``, this rank's part of the larger.
    """
    if not np.may_share_memory(source, target):
        return source
    if place is not None:
        smaller = source if source.size < target.size else target
        if place.ctypes.data == smaller.ctypes.data:
            return source
    copied: Array = source.copy()
    return copied


def _check_counts(name: str, counts: Sequence[int], size: int) -> list[int]:
    found = [operator.index(n) for n in counts]
    if len(found) != size or any(n < 0 for n in found):
        raise ValueError(f"{name} must be {size} numbers of rows, one for each rank, not {found}")
    return found


def _packs(arrays: Sequence[Array], bytes_per_pack: int) -> list[list[int]]:
    """Places of the arrays that are joined; the same on all ranks."""
    packs: list[list[int]] = []
    open_packs: dict[Any, tuple[list[int], int]] = {}
    for i, x in enumerate(arrays):
        pack, held = open_packs.get(x.dtype, ([], 0))
        if not pack:
            packs.append(pack)
        pack.append(i)
        held += x.nbytes
        open_packs[x.dtype] = ([], 0) if held >= bytes_per_pack else (pack, held)
    return packs


class _Gone:
    """Stands for the core of a communicator that cannot be used any more."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise CollectiveError(self._why)


class Communicator(_core.CommunicatorBase):
    """One rank of a group.

    Every rank of the group makes the same calls in the same order, each from its own thread; a call
    returns when this rank's part is done. All ranks get bit-identical results. A call that fails
    leaves the whole group dead: every other rank's call fails too, with the same reason. Make a new
    group to go on.

    Communicators come from `local_group`.

    Attributes
    ----------
    rank, size : int
        This rank, 0 to size - 1, and the number of ranks.
    timeout : float
        Seconds a call waits for the other ranks, unless the call says otherwise.
    """

    def __init__(self, group: _core.Group, rank: int, timeout: float) -> None:
        self._group = group
        self._core: Any = _core.Communicator(group, rank)
        self._attach(self._core)
        self.rank = rank
        self.size = group.size
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self._group.transport}>"

    @_core.fast_all_reduce
    def all_reduce(
        self,
        x: ArrayLike,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str | Algorithm = DEFAULT_ALGORITHM,
        reproducible: bool = False,
        timeout: float | None = None,
    ) -> Array:
        """Reduce the ranks' arrays element by element and give every rank the result.

        Parameters
        ----------
        x : array_like
            This rank's contribution, of any shape and layout; the same shape and dtype on every
            rank: bool, ints of 8 to 64 bits with and without sign, float16, bfloat16 (of
            ``ml_dtypes``), float32, float64, complex64 or complex128.
        op : {"sum", "prod", "min", "max", "mean", "and", "or", "xor"}
            Sums and products of ints wrap around, also before a mean divides; a mean of ints is
            rounded toward zero; min and max give NaN where any contribution is NaN; and, or, xor
            are bitwise for ints and logical for bools. Every step of float16 and bfloat16 is
            computed in float32 and rounded to nearest even. Complex numbers have sum, prod and
            mean; bools have min, max, and, or, xor.
        out : ndarray, optional
            Where the result goes; ``out=x`` works in place.
        algorithm : str or Algorithm
            "auto" chooses by the size in bytes, the number of ranks and the transport, from a table that
            ``pycollective bench --tune`` can measure; other names are listed by
            `pycollective.algorithms.names`, and one's own are made by
            `pycollective.algorithms.algorithm`.
        reproducible : bool
            The bits of the result depend on the contributions alone, not on the transport: they are
            combined in the order of the ranks, float16 and bfloat16 rounded after each. Only "direct"
            does that, which "auto" then means. Without it the same calls in the same group give the
            same bits again, too.
        timeout : float, optional
            Seconds to wait for the other ranks.

        Returns
        -------
        ndarray
            The result, in the shape and dtype of ``x``: ``out`` when that was given.

        Raises
        ------
        TypeError
            There is no such reduction: of this dtype, or of this op for this dtype.
        MismatchError
            The ranks' calls differ in kind, shape, dtype, op or algorithm.
        CollectiveTimeoutError
            A rank did not come in time; the message says what each rank is doing.
        AbortedError
            Another rank failed or aborted the group.
        """
        source, target, result = self._arrays(x, out)
        how = algorithm if isinstance(algorithm, str) else algorithm.for_ranks(self.size)
        if reproducible:
            if how not in ("auto", "direct"):
                raise ValueError(
                    "reproducible=True needs the algorithm 'direct', which keeps the order of the "
                    f"ranks: leave out algorithm={how!r}"
                )
            how = "direct"
        self._core.all_reduce(source, target, op, how, reproducible, self._seconds(timeout))
        return self._deliver(target, result)

    def broadcast(
        self,
        x: ArrayLike,
        root: int = 0,
        *,
        out: Array | None = None,
        algorithm: str = DEFAULT_ALGORITHM,
        timeout: float | None = None,
    ) -> Array:
        """Give every rank the root's array.

        Parameters
        ----------
        x : array_like
            The root's array is what everyone gets; the other ranks' only says the shape and dtype,
            which must be the root's. Any dtype without Python objects.
        root : int
            The rank whose array it is.
        out : ndarray, optional
            Where the result goes; ``out=x`` works in place.
        algorithm : {"auto", "tree", "chain"}
            See `pycollective.algorithms`; the chain is for large arrays.
        timeout : float, optional
            Seconds to wait for the other ranks.

        Returns
        -------
        ndarray
            The root's array: ``out`` when that was given.

        Raises
        ------
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        source, target, result = self._arrays(x, out)
        self._core.broadcast(source, target, root, algorithm, self._seconds(timeout))
        return self._deliver(target, result)

    def reduce(
        self,
        x: ArrayLike,
        op: str = "sum",
        root: int = 0,
        *,
        out: Array | None = None,
        timeout: float | None = None,
    ) -> Array | None:
        """Reduce the ranks' arrays element by element and give the root the result (binomial tree).

        Parameters
        ----------
        x : array_like
            This rank's contribution, as of `all_reduce`.
        op : {"sum", "min", "max", "prod", "mean"}
            As of `all_reduce`.
        root : int
            The rank that gets the result.
        out : ndarray, optional
            Where the root's result goes; ``out=x`` works in place. Other ranks' is not looked at.
        timeout : float, optional
            Seconds to wait for the other ranks.

        Returns
        -------
        ndarray or None
            The result, in the shape and dtype of ``x``, on the root; None on the other ranks.

        Raises
        ------
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        if self.rank != root:
            self._core.reduce(_as_input(x), None, op, root, self._seconds(timeout))
            return None
        source, target, result = self._arrays(x, out)
        self._core.reduce(source, target, op, root, self._seconds(timeout))
        return self._deliver(target, result)

    def reduce_scatter(
        self,
        x: ArrayLike,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str = DEFAULT_ALGORITHM,
        timeout: float | None = None,
    ) -> Array:
        """Reduce the ranks' arrays element by element and give rank i the i-th part of the result.

        Parameters
        ----------
        x : array_like
            This rank's contribution, as of `all_reduce`; its first axis is cut into ``size`` equal
            parts.
        op : {"sum", "min", "max", "prod", "mean"}
            As of `all_reduce`.
        out : ndarray, optional
            Where the result goes; this rank's own part of ``x`` works in place. Where a part is one
            row, ``out`` may be without the first axis.
        algorithm : {"auto", "ring", "direct"}
            See `pycollective.algorithms`.
        timeout : float, optional
            Seconds to wait for the other ranks.

        Returns
        -------
        ndarray
            The part, of shape ``(len(x) // size, *x.shape[1:])``: ``out`` when that was given.

        Raises
        ------
        ValueError
            The first axis cannot be cut into equal parts.
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        source = _as_input(x)
        part = _part_shape("x", source.shape, self.size)
        target, result = _target(out, source.dtype, part, part[1:] if part[0] == 1 else None)
        source = _apart(source, target, self._place(source, target.size))
        self._core.reduce_scatter(source, target, op, algorithm, self._seconds(timeout))
        return self._deliver(target, result)

    def all_gather(
        self,
        x: ArrayLike,
        *,
        out: Array | None = None,
        ragged: bool = False,
        timeout: float | None = None,
    ) -> Array:
        """Give every rank all ranks' arrays, one after the other along the first axis (ring).

        Parameters
        ----------
        x : array_like
            This rank's part, of any dtype without Python objects; a scalar counts as one row. Shape
            and dtype are the same on every rank, except for the number of rows when ``ragged``.
        out : ndarray, optional
            Where the result goes; also, unless ``ragged``, in the shape ``(size, *x.shape)`` that
            mpi4py's users write. ``x`` may be this rank's own part of it.
        ragged : bool
            The ranks' numbers of rows may differ; they are exchanged first.
        timeout : float, optional
            Seconds to wait for the other ranks.

        Returns
        -------
        ndarray
            The parts in rank order, of shape ``(sum of the numbers of rows, *x.shape[1:])``: ``out``
            when that was given.

        Raises
        ------
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        source = _as_input(x)
        row = source.shape[1:]
        seconds = self._seconds(timeout)
        if not ragged:
            whole = (self.size * _rows(source), *row)
            target, result = _target(out, source.dtype, whole, (self.size, *source.shape))
            source = _apart(source, target, self._place(target, source.size))
            self._move("all_gather", source, target, source.size, source.shape, 0, seconds)
            return self._deliver(target, result)
        rows = self.all_gather(np.array([_rows(source)], np.int64), timeout=timeout)
        target, result = _target(out, source.dtype, (int(rows.sum()), *row))
        counts = [int(n) * math.prod(row) for n in rows]
        before = sum(counts[: self.rank])
        source = _apart(source, target, target.reshape(-1)[before : before + source.size])
        self._core.all_gather_ragged(source, target, counts, (-1, *row), seconds)
        return self._deliver(target, result)

    def gather(
        self,
        x: ArrayLike,
        root: int = 0,
        *,
        out: Array | None = None,
        timeout: float | None = None,
    ) -> Array | None:
        """Give the root all ranks' arrays, one after the other along the first axis.

        Parameters
        ----------
        x : array_like
            This rank's part, as of `all_gather`.
        root : int
            The rank that gets them.
        out : ndarray, optional
            Where the root's result goes, as of `all_gather`. Other ranks' is not looked at.
        timeout : float, optional
            Seconds to wait for the other ranks.

        Returns
        -------
        ndarray or None
            The parts in rank order on the root, None on the other ranks.

        Raises
        ------
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        source = _as_input(x)
        seconds = self._seconds(timeout)
        if self.rank != root:
            self._move("gather", source, None, source.size, source.shape, root, seconds)
            return None
        whole = (self.size * _rows(source), *source.shape[1:])
        target, result = _target(out, source.dtype, whole, (self.size, *source.shape))
        source = _apart(source, target, self._place(target, source.size))
        self._move("gather", source, target, source.size, source.shape, root, seconds)
        return self._deliver(target, result)

    def scatter(
        self,
        x: ArrayLike | None,
        root: int = 0,
        *,
        out: Array | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Give rank i the i-th part of the root's array.

        Parameters
        ----------
        x : array_like or None
            The root's array, of any dtype without Python objects; its first axis is cut into ``size``
            equal parts. On another rank it says shape and dtype only, and may be None when ``out`` is
            given.
        root : int
            The rank whose array it is.
        out : ndarray, optional
            Where the part goes; on the root, its own part of ``x`` works in place. Where a part is one
            row, ``out`` may be without the first axis.
        timeout : float, optional
            Seconds to wait for the other ranks.

        Returns
        -------
        ndarray
            The part, of shape ``(len(x) // size, *x.shape[1:])``: ``out`` when that was given.

        Raises
        ------
        ValueError
            The first axis cannot be cut into equal parts.
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`; of the shape, the number of elements must agree.
        """
        seconds = self._seconds(timeout)
        source: Array | None = None
        if x is not None:
            source = _as_input(x)
            part = _part_shape("x", source.shape, self.size)
            target, result = _target(out, source.dtype, part, part[1:] if part[0] == 1 else None)
        elif out is None or self.rank == root:
            raise TypeError(
                "scatter needs x on the root, and on the other ranks x or out to say shape and dtype"
            )
        else:
            target, result = _target(out, None, None)
        if self.rank == root and source is not None:
            source = _apart(source, target, self._place(source, target.size))
        else:
            source = None
        self._move("scatter", source, target, target.size, (target.size,), root, seconds)
        return self._deliver(target, result)

    def all_to_all(
        self,
        x: ArrayLike,
        counts: Sequence[int] | None = None,
        *,
        out_counts: Sequence[int] | None = None,
        out: Array | None = None,
        timeout: float | None = None,
    ) -> Array:
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
        out : ndarray, optional
            Where the result goes.
        timeout : float, optional
            Seconds to wait for the other ranks.

        Returns
        -------
        ndarray
            The parts from rank 0, 1, … one after the other; without ``counts``, in the shape of
            ``x``: ``out`` when that was given.

        Raises
        ------
        ValueError
            The parts do not make up ``x``.
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        source = _as_input(x)
        seconds = self._seconds(timeout)
        if counts is None:
            if out_counts is not None:
                raise TypeError("all_to_all takes out_counts with counts only")
            part = _part_shape("x", source.shape, self.size)
            target, result = _target(out, source.dtype, source.shape)
            source = _apart(source, target, None)
            self._move("all_to_all", source, target, math.prod(part), source.shape, 0, seconds)
            return self._deliver(target, result)
        sent = _check_counts("counts", counts, self.size)
        if source.ndim == 0 or sum(sent) != len(source):
            raise ValueError(
                f"counts add up to {sum(sent)} rows, and x has the shape {list(source.shape)}"
            )
        if out_counts is None:
            received = self.all_to_all(np.array(sent, np.int64), timeout=timeout).tolist()
        else:
            received = _check_counts("out_counts", out_counts, self.size)
            if sent[self.rank] != received[self.rank]:
                raise ValueError(
                    f"counts[{self.rank}] and out_counts[{self.rank}] are what this rank sends to "
                    f"itself, and must be equal, not {sent[self.rank]} and {received[self.rank]}"
                )
        row = source.shape[1:]
        target, result = _target(out, source.dtype, (sum(received), *row))
        source = _apart(source, target, None)
        items = math.prod(row)
        self._core.all_to_all_ragged(
            source, target, [n * items for n in sent], [n * items for n in received],
            (-1, *row), seconds,
        )  # fmt: skip
        return self._deliver(target, result)

    def all_reduce_many(
        self,
        arrays: Iterable[ArrayLike],
        op: str = "sum",
        *,
        bytes_per_pack: int = 32 << 20,
        algorithm: str | Algorithm = DEFAULT_ALGORITHM,
        timeout: float | None = None,
    ) -> list[Array]:
        """All-reduce several arrays, joined into packs so that small ones cost little.

        Parameters
        ----------
        arrays : iterable of array_like
            This rank's contributions; the same number, shapes and dtypes on every rank.
        op : {"sum", "min", "max", "prod", "mean"}
            As of `all_reduce`.
        bytes_per_pack : int
            A pack is full when it has this many bytes or more; arrays of one dtype share packs. 0:
            each array for itself.
        algorithm : str or Algorithm
            As of `all_reduce`.
        timeout : float, optional
            Seconds to wait for the other ranks, for each pack.

        Returns
        -------
        list of ndarray
            The results, in the order and the shapes of the arrays.

        Raises
        ------
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`. Only the lengths of packs are compared, not the shapes within.
        """
        if bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be 0 or more, not {bytes_per_pack}")
        sources = [_as_input(x) for x in arrays]
        results: list[Array] = [np.empty(0)] * len(sources)
        for pack in _packs(sources, bytes_per_pack):
            joined = np.concatenate([sources[i].reshape(-1) for i in pack])
            self.all_reduce(joined, op, out=joined, algorithm=algorithm, timeout=timeout)
            begin = 0
            for i in pack:
                end = begin + sources[i].size
                results[i] = joined[begin:end].reshape(sources[i].shape)
                begin = end
        return results

    def empty(
        self, shape: int | Sequence[int], dtype: DTypeLike = float, *, timeout: float | None = None
    ) -> Array:
        """Make an array that `all_reduce` reduces without a copy; every rank calls it.

        Processes of one host reach each other's such arrays: an all-reduce in place, or from one of
        them to another, reads and writes them where they are. Everywhere else it is an ordinary
        array. What it holds is whatever was there.

        Parameters
        ----------
        shape : int or sequence of int
            The same on every rank.
        dtype : dtype
            The same on every rank; without Python objects.
        timeout : float, optional
            Seconds to wait for the other ranks.

        Returns
        -------
        ndarray
            On a cache line at least. Its memory is given back when all ranks have dropped theirs.

        Raises
        ------
        MemoryError
            On every rank, if one of them finds no memory.
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        sizes = [shape] if isinstance(shape, (int, np.integer)) else list(shape)
        sizes = [operator.index(n) for n in sizes]
        kind = np.dtype(dtype)
        if any(n < 0 for n in sizes):
            raise ValueError(f"a shape has no negative numbers, as {sizes} does")
        if kind.hasobject:
            raise TypeError("arrays of Python objects cannot be sent: give a numeric dtype")
        if math.prod(sizes) * kind.itemsize > sys.maxsize // self.size - (1 << 20):
            raise MemoryError(f"no memory has room for {sizes} of {kind} from each rank")
        try:
            shared: Array | None = self._core.empty(sizes, kind, self._seconds(timeout))
        except MemoryError:
            raise MemoryError(
                f"a rank of the group has no memory for {math.prod(sizes) * kind.itemsize} bytes "
                "that are shared"
            ) from None
        return np.empty(sizes, kind) if shared is None else shared

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it."""
        self._core.barrier(self._seconds(timeout))

    def abort(self, reason: str) -> None:
        """Fail the group: every rank's present or next call raises ``AbortedError(reason)``."""
        self._group.abort(reason)

    @property
    def hosts(self) -> list[int]:
        """Each rank's host, by number from 0: ranks of one number share memory.

        Where TCP is forced, or nothing proved that two ranks are on one host, each has its own number.
        """
        return self._group.hosts

    def describe(self) -> str:
        """Say what each rank is doing, in one line."""
        return self._group.describe()

    def close(self) -> None:
        """Leave the group in good order; peers that still wait for this rank get PeerLostError."""
        self._detach()
        self._group.leave(self.rank)
        self._core = _Gone("this communicator is closed")

    def _disown(self) -> None:
        """After a fork, in the child: the rank is the parent's."""
        self._detach()
        self._group.abandon()
        self._core = _Gone(
            "this communicator belongs to the parent process: a forked child has no rank of its own"
        )

    def _prefer(self, choices: tuning.Rows) -> None:
        """Take rows for algorithm="auto", the same on all ranks, before the first call."""
        self._core.prefer(choices)

    def _place(self, whole: Array, count: int) -> Array:
        """Return this rank's part, of ``count`` elements, of a contiguous array of all parts."""
        return whole.reshape(-1)[self.rank * count : (self.rank + 1) * count]

    def _move(
        self,
        collective: str,
        source: Array | None,
        target: Array | None,
        count: int,
        shape: tuple[int, ...],
        root: int,
        seconds: float,
    ) -> None:
        which = _core.Collective.__members__[collective]
        self._core.move_parts(which, source, target, count, shape, root, seconds)

    def _seconds(self, timeout: float | None) -> float:
        seconds = self.timeout if timeout is None else float(timeout)
        if not seconds > 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
        return seconds

    @staticmethod
    def _arrays(x: ArrayLike, out: Array | None) -> tuple[Array, Array, Array | None]:
        """Arrays for the core to read and to write, and where the result must be copied, if at all."""
        source = _as_input(x)
        if out is None:
            return source, np.empty(source.shape, source.dtype), None
        _check_out(out, source)
        if not (out.flags.c_contiguous and out.flags.aligned):
            return source, np.empty(source.shape, source.dtype), out
        if out is not x and np.may_share_memory(source, out):
            same = source.ctypes.data == out.ctypes.data
            source = source if same else source.copy()
        return source, out, None

    @staticmethod
    def _deliver(target: Array, result: Array | None) -> Array:
        if result is None:
            return target
        result[...] = target
        return result


def local_group(size: int, *, timeout: float = DEFAULT_TIMEOUT) -> list[Communicator]:
    """Make a group of ``size`` ranks that are threads of this process.

    Parameters
    ----------
    size : int
        Number of ranks, at least 1.
    timeout : float
        Seconds that a call waits for the other ranks.

    Returns
    -------
    list of Communicator
        One for each rank; each is used by one thread at a time.

    Examples
    --------
    >>> import threading, numpy as np, pycollective as pc
    >>> def work(comm):
    ...     print(comm.all_reduce(np.ones(3)))
    >>> threads = [threading.Thread(target=work, args=(c,)) for c in pc.local_group(2)]
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    group = _core.ThreadGroup(size)
    choices = tuning.rows(group.transport, size)
    communicators = [Communicator(group, rank, timeout) for rank in range(size)]
    for communicator in communicators:
        communicator._prefer(choices)
    return communicators


def all_reduce_together(
    communicators: Sequence[Communicator],
    inputs: Sequence[Array],
    op: str,
    algorithm: str | Algorithm = DEFAULT_ALGORITHM,
) -> list[Array]:
    """All-reduce of every rank of a group, called by one thread that has all their arrays.

    The same schedule runs as when each rank calls `Communicator.all_reduce`.
    """
    sources = [_as_input(x) for x in inputs]
    outputs = [np.empty(x.shape, x.dtype) for x in sources]
    how = algorithm if isinstance(algorithm, str) else algorithm.for_ranks(len(communicators))
    _core.all_reduce_together(
        [c._core for c in communicators], sources, outputs, op, how, communicators[0].timeout
    )
    return outputs
