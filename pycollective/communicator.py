"""Communicators: the collectives of one rank, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pycollective import _core
from pycollective.errors import CollectiveError

__all__ = ["DEFAULT_ALGORITHM", "DEFAULT_TIMEOUT", "Communicator", "local_group"]

DEFAULT_TIMEOUT = 600.0
"""Seconds that a collective call waits for the other ranks."""

DEFAULT_ALGORITHM = "ring"

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
        if x.dtype.hasobject:
            raise TypeError("arrays of Python objects cannot be sent: give a numeric dtype")
    return x if x.flags.c_contiguous and x.flags.aligned else x.copy(order="C")


def _check_out(out: Any, x: Array) -> Array:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, not {type(out).__name__}")
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(
            f"out must be like the input, {x.dtype}{list(x.shape)}, and is "
            f"{out.dtype}{list(out.shape)}"
        )
    if not out.flags.writeable:
        raise ValueError("out is read-only: give an array that can be written")
    return out


class _Gone:
    """Stands for the core of a communicator that cannot be used any more."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise CollectiveError(self._why)


class Communicator:
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
        self.rank = rank
        self.size = group.size
        self.timeout = timeout

    def __repr__(self) -> str:
        kind = "threads" if isinstance(self._group, _core.ThreadGroup) else "shared memory"
        return f"<Communicator rank {self.rank} of {self.size}, {kind}>"

    def all_reduce(
        self,
        x: ArrayLike,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str = DEFAULT_ALGORITHM,
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
        algorithm : {"ring", "hierarchical_copy", "reduce_to_one"}
            See `pycollective.algorithms`.
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
        self._core.all_reduce(source, target, op, algorithm, self._seconds(timeout))
        return self._deliver(target, result)

    def broadcast(
        self,
        x: ArrayLike,
        root: int = 0,
        *,
        out: Array | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Give every rank the root's array (binomial tree).

        Parameters
        ----------
        x : array_like
            The root's array is what everyone gets; the other ranks' only says the shape and dtype,
            which must be the root's. Any dtype without Python objects.
        root : int
            The rank whose array it is.
        out : ndarray, optional
            Where the result goes; ``out=x`` works in place.
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
        self._core.broadcast(source, target, root, self._seconds(timeout))
        return self._deliver(target, result)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it."""
        self._core.barrier(self._seconds(timeout))

    def abort(self, reason: str) -> None:
        """Fail the group: every rank's present or next call raises ``AbortedError(reason)``."""
        self._group.abort(reason)

    def describe(self) -> str:
        """Say what each rank is doing, in one line."""
        return self._group.describe()

    def close(self) -> None:
        """Leave the group in good order; peers that still wait for this rank get PeerLostError."""
        if isinstance(self._group, _core.ShmGroup):
            self._group.leave(self.rank)
        self._core = _Gone("this communicator is closed")

    def _disown(self) -> None:
        """After a fork, in the child: the rank is the parent's."""
        self._core = _Gone(
            "this communicator belongs to the parent process: a forked child has no rank of its own"
        )

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
    return [Communicator(group, rank, timeout) for rank in range(size)]


def all_reduce_together(
    communicators: Sequence[Communicator],
    inputs: Sequence[Array],
    op: str,
    algorithm: str = DEFAULT_ALGORITHM,
) -> list[Array]:
    """All-reduce of every rank of a group, called by one thread that has all their arrays.

    The same schedule runs as when each rank calls `Communicator.all_reduce`.
    """
    sources = [_as_input(x) for x in inputs]
    outputs = [np.empty(x.shape, x.dtype) for x in sources]
    _core.all_reduce_together(
        [c._core for c in communicators], sources, outputs, op, algorithm, communicators[0].timeout
    )
    return outputs
