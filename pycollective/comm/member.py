"""One rank of a group: the parts that all of its calls share."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pycollective import _core, arguments, array_backend, other_names, tuning
from pycollective.algorithms import Algorithm
from pycollective.arguments import switch
from pycollective.comm import tracing
from pycollective.comm.arrays import OBJECTS_REFUSED, Array, CallerArray, deliver
from pycollective.comm.call import Call, Engine, GpuEngines, HostEngine, How
from pycollective.comm.host import HostCore
from pycollective.comm.mpi import MPICore
from pycollective.comm.mpi_group import MPIGroup
from pycollective.comm.signatures import DTypeOf, Later, Now, Options, S
from pycollective.comm.split import GroupFactory
from pycollective.comm.work import Work
from pycollective.errors import CollectiveError, MismatchError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


R = TypeVar("R")

live: weakref.WeakSet[Member] = weakref.WeakSet()
"""All ranks of this process, for the end of the process and for forks."""


class Member(_core.CommunicatorBase):
    """A rank of a group: its engines, and the way from a call to an engine."""

    if not TYPE_CHECKING:  # with this method, type checkers would accept every misspelt name

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            names = {one: one for one in dir(type(self)) if one[0] != "_"}
            meant = None if name.startswith("_") else other_names.meant(name, names)
            hint = (
                "" if meant is None else f"; did you mean {meant.removeprefix('Communicator.')!r}?"
            )
            raise AttributeError(text + hint, name=name, obj=self)

    def __init__(
        self,
        group: _core.Group | MPIGroup,
        rank: int,
        timeout: float,
        factory: GroupFactory | None,
        lane: int | None = None,
        choices: tuning.Rows | None = None,
    ) -> None:
        """``choices``: rows for algorithm="auto", the same on all ranks."""
        self._group = group
        self._factory = factory
        self._host: HostEngine | None = (
            MPICore(group) if isinstance(group, MPIGroup) else HostCore(group, rank)
        )
        self._closed = ""  # the reason why there is no engine
        self._gpu: GpuEngines | None = None  # made by the first call on GPU arrays
        self._tracer: tracing.Tracer | None = None
        self._lane = rank if lane is None else lane  # in timelines: the rank in the first group
        self._family: weakref.WeakSet[Member] = weakref.WeakSet(
            [self]
        )  # and all groups split from it
        self._set_place(rank, group.size)
        self.timeout = timeout
        if choices is not None:
            self._host.prefer(choices)
        self._trace(None)
        tracing.join(self)
        live.add(self)
        if isinstance(group, _core.Group):
            _core.use_arena(group)
            tuning.use_copies()

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self.transport}>"

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
        """Make an uninitialized array that calls can use without a copy.

        The ranks of this host can read and write the memory of the array. A call reads it in place, and
        an all-reduce also writes its result there. Other arrays of the same call, also those of other
        ranks, may be ordinary. In groups of several hosts, messages of 32 KiB or more within a host
        are read in place, too. Over TCP alone, through MPI, and among threads, the array is an
        ordinary one.

        The memory is part of this rank's arena, a range of addresses that all ranks of the host have
        mapped. No rank communicates. When the arena (``PYCOLLECTIVE_ARENA`` bytes) is full, the array is
        an ordinary one.

        On a GPU, NCCL allocates the memory (``ncclMemAlloc``) and registers it, so that it may move data
        without a copy. All ranks must make this call. In a collective, all ranks must give such
        arrays at the same offset, or none; messages refuse them. Without NCCL 2.19 the array is
        CuPy's.

        Parameters
        ----------
        shape : int or sequence of int
            The shape; on a GPU the same on every rank.
        dtype : dtype
            A dtype without Python objects; on a GPU the same on every rank.
        device : {"cpu", "gpu"}
            Host memory, or this thread's current CuPy device.
        timeout : float, optional
            On a GPU, seconds to wait for the other ranks.

        Returns
        -------
        ndarray
            The array, aligned to cache lines unless it is an ordinary one.

        Raises
        ------
        MemoryError
            There is not enough memory.
        ImportError
            ``device`` is "gpu", and CuPy is not installed.
        MismatchError, CollectiveTimeoutError, PeerLostError, AbortedError
            On a GPU, as in `all_reduce`.
        """
        if device not in ("cpu", "gpu"):
            raise ValueError(f"device must be 'cpu' or 'gpu', not {device!r}")
        lengths = arguments.sizes(shape)
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError(OBJECTS_REFUSED)
        if math.prod(lengths) * kind.itemsize > sys.maxsize // self.size - (1 << 20):
            raise MemoryError(
                f"an array of shape {lengths} and dtype {kind} is too large for the group"
            )
        if device == "gpu":
            return self._empty_on_gpu(lengths, kind, self._seconds(timeout))
        return self._core.empty(lengths, kind)

    def _empty_on_gpu(self, sizes: Sequence[int], kind: np.dtype[Any], seconds: float) -> Array:
        like = array_backend.empty_on_gpu(0, np.uint8)
        made = self._on_gpus(like).empty(sizes, kind, seconds)
        return array_backend.empty(sizes, kind, like) if made is None else made

    # fmt: off
    @overload
    def barrier(self, *, async_op: Now = False, **options: Unpack[Options]) -> None: ...
    @overload
    def barrier(self, *, async_op: Later, **options: Unpack[Options]) -> Work[None]: ...
    # fmt: on
    @_core.fast_call(_core.Collective.barrier)
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work[None] | None:
        """Wait until every rank has called this method; with ``async_op`` return a `Work` at once.

        ``timeout`` and the errors are those of `all_reduce`.
        """
        later = switch("async_op", async_op)
        work: Work[None] | None = self._run(
            Call("barrier", None, None, self._seconds(timeout), later)
        )
        return work

    def abort(self, reason: str) -> None:
        """Fail the group: every rank's current or next call raises ``AbortedError(reason)``."""
        self._group.abort(arguments.printable(reason), ranks=[self.rank])

    @property
    def hosts(self) -> list[int]:
        """The number of each rank's host, from 0; ranks with the same number share memory.

        Ranks have different numbers if TCP is forced, or if they cannot prove that they share a host.
        """
        return self._group.hosts

    @property
    def transport(self) -> str:
        """The transport between the ranks, such as ``"shared memory"``."""
        return self._group.transport

    @property
    def has_gpu_streams(self) -> bool:
        """True if calls on GPU arrays run in streams; False before the first such call."""
        return self._gpu is not None and self._gpu.by_streams

    def describe(self) -> str:
        """Return the state of each rank, as one line of text."""
        return self._group.describe()

    def close(self) -> None:
        """Finish the asynchronous calls and messages, each until its deadline, and leave the group.

        `Work.wait` raises the errors of these calls, and `close` raises none of them. No other thread
        may be in a collective call of this communicator. Peers that still wait for this rank get
        PeerLostError.

        As a context manager, a communicator closes at the end of the block. An error in the block first
        aborts the group: other ranks' calls raise an `AbortedError` with its text.

        Raises
        ------
        MismatchError
            Two ranks' calls differ, and no call of this rank has raised it. If no rank had to receive
            data in these calls, the rank that closes last raises it. A last call of some ranks only, in
            which they wait for no other rank, is no error: such as a `broadcast` of the root.
        """
        if self._host is not None:
            self._host.wait_all()
            self._host.collect()
            for engine in self._gpu.to_close if self._gpu is not None else ():
                engine.close()
            tracing.leave(self)
        self._gpu = None
        self._detach()
        try:
            self._group.close(self.rank)
        finally:
            self._release("this communicator is closed")

    def _release(self, why: str) -> None:
        self._host, self._closed, self._tracer = None, why, None

    def __enter__(self) -> Self:
        _ = self._core
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, SystemExit):
            self.close()
            return
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        self.abort(f"rank {self.rank} raised {text}")
        with contextlib.suppress(CollectiveError):  # Python raises the error of the block
            self.close()

    def _close_at_exit(self) -> None:
        """Leave at the end of the process, without waiting for the calls under way."""
        for engine in self._gpu.to_close if self._gpu is not None else ():
            engine.finish()
        if self._host is not None and self._host.outstanding:
            self.abort(f"rank {self.rank} ended while its calls were under way")
        try:
            self.close()
        except MismatchError as error:
            _exit_with(error)

    def _abandon_in_child(self) -> None:
        """Release everything in a forked child: the rank belongs to the parent."""
        for engine in self._gpu.to_close if self._gpu is not None else ():
            engine.abandon()
        self._detach()
        self._group.abandon()
        self._release(
            "this communicator belongs to the parent process: a forked child has no rank of its own"
        )

    # Every call ---------------------------------------------------------------------------------

    @property
    def _core(self) -> HostEngine:
        """The engine for host arrays."""
        if self._host is None:
            raise CollectiveError(self._closed)
        return self._host

    def _on_gpus(self, like: Array) -> GpuEngines:
        """Return the engines for GPU arrays; at the first call, all ranks choose them together."""
        raise NotImplementedError

    def _engine_for(self, call: Call) -> Engine:
        """Choose the engine for a call."""
        raise NotImplementedError

    def _submit(self, call: Call) -> Work[None]:
        """Choose an engine for a call, and submit the call to it."""
        return self._engine_for(call).submit(call)

    def _run(self, call: Call, place: CallerArray | None = None) -> Any:
        """Make a call; return its result or its work. The public methods' overloads have the types."""
        work = self._engine_for(call).submit(call)
        if call.async_op:
            return work.then(functools.partial(deliver, call.target, place))
        return call.target if place is None else deliver(call.target, place)

    def _result(self, shape: tuple[int, ...], like: Array) -> Array:
        """Make an array for a result; a large one lies in memory that the host's other ranks map."""
        if array_backend.on_host(like):
            return self._core.empty(shape, like.dtype, True)
        return array_backend.empty(shape, like.dtype, like)

    def _gathered(self, row: Array, seconds: float, label: str = "", async_op: bool = False) -> Any:
        """All-gather rows; return the table of all ranks' rows, or its work."""
        table = np.empty((self.size * len(row), *row.shape[1:]), row.dtype)
        call = Call(
            "all_gather", row, table, seconds, async_op,
            count=row.size, shape=row.shape, label=label,
        )  # fmt: skip
        return self._run(call)

    def _run_later(self, call: Callable[[], R], array: Array | None = None) -> Work[R]:
        """Run a function that makes several calls in the engine's thread, and return its work.

        For an array of a GPU the function runs at once: only this thread has its current stream.
        """
        if array is not None and array_backend.is_on_gpu(array):
            result = call()
            return Work((), lambda: result)
        _need_python.add(self)
        answer: _Answer[R] = _Answer()
        # The core keeps this function until the next call, invisibly to Python's garbage collector. A
        # reference to the communicator or to the result would keep the communicator alive.
        begin = functools.partial(_make, [call], weakref.ref(answer), self._group, self.rank)
        core = self._core

        def finish() -> R:
            if answer.error is not None:
                core.mark_reported()
                raise answer.error
            return answer.result

        return Work([core.run_later(begin)], finish, core.collect)

    def _trace(self, tracer: tracing.Tracer | None) -> None:
        """Record calls with a tracer; None: record none, and let plain arrays take the fast path."""
        self._tracer = tracer
        if tracer is None and isinstance(self._host, HostCore):
            self._attach(self._host)
        else:
            self._detach()

    def _how(self, algorithm: str | Algorithm, ragged: bool = False) -> How:
        if isinstance(algorithm, str):
            return algorithm
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                "algorithm must be one of pycollective.algorithms.names(collective), or be made with "
                f"pycollective.algorithms.algorithm, not {algorithm!r}"
            )
        if ragged and algorithm.num_scratch(self.size):
            raise ValueError(
                f"{algorithm.name} uses scratch, whose parts have one length: parts of different "
                "lengths need an algorithm without scratch"
            )
        return algorithm.for_ranks(self.size)

    @contextlib.contextmanager
    def _between(self, what: str) -> Iterator[None]:
        """Abort the group after an error between parts of a call: other ranks wait in the next part."""
        try:
            yield
        except CollectiveError:  # the other ranks have the error, or the group still works
            raise
        except BaseException as error:
            self.abort(
                f"rank {self.rank} left {what} because of an error of its own: {type(error).__name__}"
            )
            raise

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else arguments.seconds("timeout", timeout)

    def _own_part(self, whole: Array, count: int) -> Array:
        """Return this rank's part, of ``count`` elements, of a contiguous array of all parts."""
        return whole.reshape(-1)[self.rank * count : (self.rank + 1) * count]


class _Answer(Generic[R]):
    """The result or the error of a function that ran in the engine's thread."""

    result: R
    error: BaseException | None = None


def _make(
    calls: list[Callable[[], R]],
    answers: weakref.ref[_Answer[R]],
    group: _core.Group | MPIGroup,
    rank: int,
) -> None:
    """Run the function in ``calls``, remove it, and store its result or its error."""
    problem = None
    result: Any = None
    try:
        result = calls.pop()()
    except BaseException as error:
        problem = error
        if not isinstance(error, CollectiveError):  # the other ranks' next calls would differ
            group.abort(
                f"rank {rank} left an asynchronous call because of an error of its own: "
                f"{type(error).__name__}"
            )
    if (answer := answers()) is not None:
        answer.result, answer.error = result, problem


_need_python: weakref.WeakSet[Member] = weakref.WeakSet()


@atexit.register
def _end_calls() -> None:
    """Close communicators whose threads run Python, before the interpreter ends."""
    for member in list(_need_python):
        member._close_at_exit()


def abort_with_parts(member: Member, reason: str) -> None:
    """Abort a group and all groups that were split from it on this rank, directly or not."""
    member.abort(reason)  # first: its failure is the cause
    for part in list(member._family):
        if part is not member and not part._closed:
            part.abort(reason)


def leave_processes() -> None:
    """Leave all groups of processes, at the end of this process; threads end with it."""
    for member in list(live):
        if member.transport != "threads":
            member._close_at_exit()


def _exit_with(error: MismatchError) -> None:
    """Print an error at the end of the process: its results are wrong, so the exit status is 1."""
    print(f"MismatchError at the end of the process: {error}", file=sys.stderr, flush=True)
    _core.exit_in_failure()


def _forget_after_fork() -> None:
    """Release all ranks in a forked child: they belong to the parent."""
    for communicator in list(live):
        communicator._abandon_in_child()
    live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
