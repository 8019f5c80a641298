"""The collectives that reduce: `all_reduce`, `reduce`, `reduce_scatter`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from pycollective import _core
from pycollective.algorithms import Algorithm
from pycollective.communicator.arrays import (
    Array,
    apart,
    as_input,
    deliver,
    input_and_output,
    output_for,
    packs,
    part_shape,
)
from pycollective.communicator.member import Member

__all__ = ["DEFAULT_ALGORITHM", "Reductions", "all_reduce_together"]

DEFAULT_ALGORITHM = "auto"


class Reductions(Member):
    """What of a `Communicator` combines the ranks' arrays."""

    def all_reduce(
        self,
        x: ArrayLike,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str | Algorithm = DEFAULT_ALGORITHM,
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
            "auto" chooses by the size in bytes and the number of ranks; other names are listed by
            `pycollective.algorithms.names`, and one's own are made by
            `pycollective.algorithms.algorithm`.
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
        source, target, result = input_and_output(x, out)
        how = algorithm if isinstance(algorithm, str) else algorithm.for_ranks(self.size)
        self._core.all_reduce(source, target, op, how, self._seconds(timeout))
        return deliver(target, result)

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
            self._core.reduce(as_input(x), None, op, root, self._seconds(timeout))
            return None
        source, target, result = input_and_output(x, out)
        self._core.reduce(source, target, op, root, self._seconds(timeout))
        return deliver(target, result)

    def reduce_scatter(
        self,
        x: ArrayLike,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str = "ring",
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
        algorithm : {"ring", "direct"}
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
        source = as_input(x)
        part = part_shape("x", source.shape, self.size)
        target, result = output_for(out, source.dtype, part, part[1:] if part[0] == 1 else None)
        source = apart(source, target, self._place(source, target.size))
        self._core.reduce_scatter(source, target, op, algorithm, self._seconds(timeout))
        return deliver(target, result)

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
        sources = [as_input(x) for x in arrays]
        results: list[Array] = [np.empty(0)] * len(sources)
        for pack in packs(sources, bytes_per_pack):
            joined = np.concatenate([sources[i].reshape(-1) for i in pack])
            self.all_reduce(joined, op, out=joined, algorithm=algorithm, timeout=timeout)
            begin = 0
            for i in pack:
                end = begin + sources[i].size
                results[i] = joined[begin:end].reshape(sources[i].shape)
                begin = end
        return results


def all_reduce_together(
    communicators: Sequence[Member],
    inputs: Sequence[Array],
    op: str,
    algorithm: str | Algorithm = DEFAULT_ALGORITHM,
) -> list[Array]:
    """All-reduce of every rank of a group, called by one thread that has all their arrays.

    The same schedule runs as when each rank calls `Communicator.all_reduce`.
    """
    sources = [as_input(x) for x in inputs]
    outputs = [np.empty(x.shape, x.dtype) for x in sources]
    how = algorithm if isinstance(algorithm, str) else algorithm.for_ranks(len(communicators))
    _core.all_reduce_together(
        [c._core for c in communicators], sources, outputs, op, how, communicators[0].timeout
    )
    return outputs
