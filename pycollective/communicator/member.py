"""One rank of a group: what all of its calls need."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pycollective import _core, arguments, array_backend, observe, tuning
from pycollective.algorithms import Algorithm
from pycollective.arguments import switch
from pycollective.communicator.arrays import Array
from pycollective.communicator.gpu import GpuCore, core_for
from pycollective.communicator.signatures import DTypeOf, Later, Now, Options, S
from pycollective.communicator.split import Family
from pycollective.communicator.work import Work, nothing
from pycollective.errors import CollectiveError, MismatchError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["Member", "live"]

live: weakref.WeakSet[Member] = weakref.WeakSet()
"""All ranks of this process: its end concerns them, and a fork."""


class _Gone:
    """Stands for the core of a communicator that cannot be used any more."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise CollectiveError(self._why)


class Member(_core.CommunicatorBase):
    """A rank's place in its group."""

    def __init__(
        self,
        group: _core.Group,
        rank: int,
        timeout: float,
        family: Family | None,
        lane: int | None = None,
    ) -> None:
        self._group = group
        self._family = family
        # MPI's groups have a core of their own.
        own = getattr(group, "core", None)
        self._core: Any = _core.Communicator(group, rank) if own is None else own()
        self._gpu: GpuCore | None = None  # in the core's place for GPU arrays
        self._choices: tuning.Rows = []
        self._lane = rank if lane is None else lane  # in timelines: of a part, the whole's rank
        self.rank = rank
        self.size = group.size
        self.timeout = timeout
        observe.join(self)
        live.add(self)
        if isinstance(group, _core.Group):
            _core.use_arena(group)
            tuning.use_copies()

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self._group.transport}>"

    # fmt: off
    @overload
    def empty(self, shape: int | Sequence[int], dtype: DTypeOf[S], *,
              device: Literal["cpu", "gpu"] = "cpu", timeout: float | None = None) -> NDArray[S]: ...
    @overload
    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = float, *,
              device: Literal["cpu", "gpu"] = "cpu", timeout: float | None = None) -> Array: ...
    # fmt: on
    def empty(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = float,
        *,
        device: Literal["cpu", "gpu"] = "cpu",
        timeout: float | None = None,
    ) -> Array:
        """Make an array that the ranks of this host reach, so that calls need not copy it.

        A call reads the array of another rank where it is; an all-reduce also writes its result there.
        Each array of a call counts on its own: those of other ranks may be ordinary. In groups of
        several hosts, messages of 128 KiB or more within a host are read in place, too. Over TCP
        alone, and among threads, this is an ordinary array. What it holds is whatever was there.

        The memory lies in this rank's arena, a range of addresses that all ranks of the host have
        mapped. Making an array concerns this rank alone. When the arena (``PYCOLLECTIVE_ARENA`` bytes)
        is full, this is an ordinary array.

        On a GPU its memory is NCCL's (``ncclMemAlloc``) and registered with its communicator, which may
        then move it without a copy. All ranks must give such arrays to a collective call, at the same
        offset, or none; messages do not take them. Without NCCL 2.19 it is an ordinary array of CuPy's.

        Parameters
        ----------
        shape : int or sequence of int
            On a GPU, the same on every rank.
        dtype : dtype
            On a GPU, the same on every rank; without Python objects.
        device : {"cpu", "gpu"}
            Where: in the host's memory, or on this thread's present CuPy device.
        timeout : float, optional
            Seconds to wait for the other ranks, on a GPU.

        Returns
        -------
        ndarray
            On a cache line at least.

        Raises
        ------
        MemoryError
            There is no memory.
        ImportError
            A GPU is asked for without CuPy.
        MismatchError, CollectiveTimeoutError, AbortedError
            As `all_reduce`.
        """
        if device not in ("cpu", "gpu"):
            raise ValueError(f"device is 'cpu' or 'gpu', not {device!r}")
        lengths = arguments.sizes(shape)
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError("arrays of Python objects cannot be sent: give a numeric dtype")
        if math.prod(lengths) * kind.itemsize > sys.maxsize // self.size - (1 << 20):
            raise MemoryError(f"no memory has room for {lengths} of {kind} from each rank")
        if device == "gpu":
            return self._empty_on_gpu(lengths, kind, self._seconds(timeout))
        made: Array = self._core.empty(lengths, kind)
        return made

    def _empty_on_gpu(self, sizes: Sequence[int], kind: np.dtype[Any], seconds: float) -> Array:
        like = array_backend.empty_on_gpu(0, np.uint8)
        registered = getattr(self._core_for(like), "registered_empty", None)
        made: Array | None = registered and registered(sizes, kind, seconds)
        return array_backend.empty(sizes, kind, like) if made is None else made

    # fmt: off
    @overload
    def barrier(self, *, async_op: Now = False, **options: Unpack[Options]) -> None: ...
    @overload
    def barrier(self, *, async_op: Later, **options: Unpack[Options]) -> Work[None]: ...
    # fmt: on
    @_core.fast_call(_core.Collective.barrier)
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work[None] | None:
        """Return when every rank has called it; with ``async_op``, a `Work` at once."""
        later = switch("async_op", async_op)
        return nothing(self._core.barrier(self._seconds(timeout), later))

    def abort(self, reason: str) -> None:
        """Fail the group: every rank's present or next call raises ``AbortedError(reason)``."""
        self._group.abort(str(reason), ranks=[self.rank])

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
        """Leave the group in good order; peers that still wait for this rank get PeerLostError.

        Calls that are under way are waited for first, each until its own deadline. A communicator is a
        context manager that closes itself at the end of the block. An error in the block aborts the
        group first: the other ranks' calls raise `AbortedError`, which names the error.

        Raises
        ------
        MismatchError
            Two ranks' calls differ, and no call of this rank has raised that. Where nobody had to
            receive anything in these calls, the rank that closes last finds it.
        """
        if not isinstance(self._core, _Gone):
            self._core.settle()
            self._core.collect()
            if self._gpu is not None:
                self._gpu.close()
            observe.leave(self)
        self._gpu = None
        self._detach()
        try:
            self._group.close(self.rank)
        finally:
            self._core = _Gone("this communicator is closed")

    def __enter__(self) -> Self:
        if isinstance(self._core, _Gone):
            self._core.check()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, SystemExit):
            self.close()
            return
        self.abort(f"rank {self.rank} raised {type(error).__name__}: {error}")
        with contextlib.suppress(CollectiveError):  # the error of the block is the one to raise
            self.close()

    def _close_at_exit(self) -> None:
        """Leave when the process ends: nobody will wait for the calls that are under way."""
        if self._gpu is not None:
            self._gpu.finish()
        if not isinstance(self._core, _Gone) and self._core.outstanding:
            self.abort(f"rank {self.rank} ended while calls of it were under way")
        try:
            self.close()
        except MismatchError as error:
            _end_in_vain(error)

    def _disown(self) -> None:
        """After a fork, in the child: the rank is the parent's."""
        if self._gpu is not None:
            self._gpu.abandon()
        self._detach()
        self._group.abandon()
        self._core = _Gone(
            "this communicator belongs to the parent process: a forked child has no rank of its own"
        )

    def _prefer(self, choices: tuning.Rows) -> None:
        """Take rows for algorithm="auto", the same on all ranks, before the first call."""
        self._choices = choices
        self._core.prefer(choices)

    def _core_for(self, array: Array | None) -> Any:
        """Return what makes calls on an array: the core, or what has its place for GPU arrays."""
        if array is None or type(array) is np.ndarray or isinstance(self._core, _Gone):
            return self._core
        if self._gpu is None:
            self._gpu = core_for(cast(Any, self), array)
        return self._gpu

    def _how(self, algorithm: str | Algorithm, ragged: bool = False) -> str | _core.Algorithm:
        if isinstance(algorithm, str):
            return algorithm
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                "algorithm must be a name, of which pycollective.algorithms.names() lists those of a "
                "collective, or what pycollective.algorithms.algorithm makes of a function, not "
                f"{algorithm!r}"
            )
        if ragged and algorithm.num_scratch(self.size):
            raise ValueError(
                f"{algorithm.name} has scratch, of which no step says how long a part in it is: parts "
                "of different lengths need an algorithm without"
            )
        return algorithm.for_ranks(self.size)

    @contextlib.contextmanager
    def _between(self, what: str) -> Iterator[None]:
        """Tell the others, who are in the next part of a call, of an error between its parts."""
        try:
            yield
        except CollectiveError:  # they know, or the group goes on
            raise
        except BaseException as error:
            self.abort(
                f"rank {self.rank} left {what} because of an error of its own: "
                f"{type(error).__name__}"
            )
            raise

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else arguments.seconds("timeout", timeout)

    def _place(self, whole: Array, count: int) -> Array:
        """Return this rank's part, of ``count`` elements, of a contiguous array of all parts."""
        return whole.reshape(-1)[self.rank * count : (self.rank + 1) * count]


def _end_in_vain(error: MismatchError) -> None:
    """Report at the end of the process that its results are wrong, and let it end with status 1."""
    print(f"MismatchError at the end of the process: {error}", file=sys.stderr, flush=True)
    _core.exit_in_failure()


def _forget_after_fork() -> None:
    """In a forked child: the ranks are the parent's."""
    for communicator in list(live):
        communicator._disown()
    live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
