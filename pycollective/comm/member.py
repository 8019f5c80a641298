"""One rank of a group: what all of its calls need."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pycollective import _core, arguments, array_backend, tuning
from pycollective.algorithms import Algorithm
from pycollective.arguments import switch
from pycollective.comm import tracing
from pycollective.comm.arrays import Array, Place, deliver
from pycollective.comm.call import Call, Engine, HostEngine, How
from pycollective.comm.host import HostCore
from pycollective.comm.mpi import MPICore
from pycollective.comm.mpi_group import MPIGroup
from pycollective.comm.signatures import DTypeOf, Later, Now, Options, S
from pycollective.comm.split import Family
from pycollective.comm.work import Work
from pycollective.errors import CollectiveError, MismatchError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from pycollective.comm.gpu import Engines

R = TypeVar("R")

live: weakref.WeakSet[Member] = weakref.WeakSet()
"""All ranks of this process: its end concerns them, and a fork."""


class Member(_core.CommunicatorBase):
    """A rank's place in its group: how every call of it is made."""

    def __init__(
        self,
        group: _core.Group | MPIGroup,
        rank: int,
        timeout: float,
        family: Family | None,
        lane: int | None = None,
    ) -> None:
        self._group = group
        self._family = family
        self._host: HostEngine | None = (
            MPICore(group) if isinstance(group, MPIGroup) else HostCore(group, rank)
        )
        self._closed = ""  # why there is no such engine any more
        self._gpu: Engines | None = None  # since the first call on GPU arrays
        self._tracer: tracing.Tracer | None = None
        self._lane = rank if lane is None else lane  # in timelines: of a part, the whole's rank
        self.rank = rank
        self.size = group.size
        self.timeout = timeout
        self._trace(None)
        tracing.join(self)
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
        """Return when every rank has called it; with ``async_op``, a `Work` at once."""
        later = switch("async_op", async_op)
        work: Work[None] | None = self._run(
            Call("barrier", None, None, self._seconds(timeout), later)
        )
        return work

    def abort(self, reason: str) -> None:
        """Fail the group: every rank's present or next call raises ``AbortedError(reason)``."""
        self._group.abort(str(reason), ranks=[self.rank])

    @property
    def hosts(self) -> list[int]:
        """Each rank's host, by number from 0: ranks of one number share memory.

        Where TCP is forced, or nothing proved that two ranks are on one host, each has its own number.
        """
        return self._group.hosts

    @property
    def has_gpu_streams(self) -> bool:
        """True if calls on GPU arrays are known to be made in streams: no host waits for them."""
        return self._gpu is not None and self._gpu.by_streams

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
        if self._host is not None:
            self._host.settle()
            self._host.collect()
            for engine in self._gpu.to_close if self._gpu is not None else ():
                engine.close()
            tracing.leave(self)
        self._gpu = None
        self._detach()
        try:
            self._group.close(self.rank)
        finally:
            self._let_go("this communicator is closed")

    def _let_go(self, why: str) -> None:
        self._host, self._closed, self._tracer = None, why, None

    def __enter__(self) -> Self:
        _ = self._core
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
        for engine in self._gpu.to_close if self._gpu is not None else ():
            engine.finish()
        if self._host is not None and self._host.outstanding:
            self.abort(f"rank {self.rank} ended while calls of it were under way")
        try:
            self.close()
        except MismatchError as error:
            _end_in_vain(error)

    def _disown(self) -> None:
        """After a fork, in the child: the rank is the parent's."""
        for engine in self._gpu.to_close if self._gpu is not None else ():
            engine.abandon()
        self._detach()
        self._group.abandon()
        self._let_go(
            "this communicator belongs to the parent process: a forked child has no rank of its own"
        )

    def _prefer(self, choices: tuning.Rows) -> None:
        """Take rows for algorithm="auto", the same on all ranks, before the first call."""
        self._core.prefer(choices)

    # Every call ---------------------------------------------------------------------------------

    @property
    def _core(self) -> HostEngine:
        """The engine for arrays in the host's memory."""
        if self._host is None:
            raise CollectiveError(self._closed)
        return self._host

    def _on_gpus(self, like: Array) -> Engines:
        """Return the engines for arrays of GPUs; all ranks come here at their first such call."""
        raise NotImplementedError

    def _engine_for(self, call: Call) -> Engine:
        """Choose the engine that carries a call out."""
        raise NotImplementedError

    def _submit(self, call: Call) -> Work[None]:
        """Let an engine carry a call out."""
        return self._engine_for(call).submit(call)

    def _run(self, call: Call, place: Place | None = None) -> Any:
        """Make a call; return its target, copied to where it must be, or the work that will have it.

        That is Any: the overloads of the public methods say the type.
        """
        work = self._engine_for(call).submit(call)
        if call.async_op:
            return work.then(functools.partial(deliver, call.target, place))
        return call.target if place is None else deliver(call.target, place)

    def _result(self, shape: tuple[int, ...], like: Array) -> Array:
        """Make an array for a result: a large one where the other ranks of the host reach it."""
        if array_backend.on_host(like):
            return self._core.empty(shape, like.dtype, True)
        return array_backend.empty(shape, like.dtype, like)

    def _gathered(self, row: Array, seconds: float, label: str = "", async_op: bool = False) -> Any:
        """Tell all ranks rows; return the rows of all, by rank, or the work that will have them."""
        table = np.empty((self.size * len(row), *row.shape[1:]), row.dtype)
        call = Call(
            "all_gather", row, table, seconds, async_op,
            count=row.size, shape=row.shape, label=label,
        )  # fmt: skip
        return self._run(call)

    def _run_later(self, call: Callable[[], R], array: Array | None = None) -> Work[R]:
        """Make a call that consists of several, with what Python does between them, as a work.

        On an array of a GPU it is made at once, on this thread's stream, which another thread does not
        have.
        """
        if array is not None and array_backend.is_on_gpu(array):
            result = call()
            return Work((), lambda: result)
        _need_python.add(self)
        answer: _Answer[R] = _Answer()
        # The core keeps this until the next call, and Python's collector cannot see that reference. It
        # must not refer to the communicator or to the result then, or nobody could free the
        # communicator.
        begin = functools.partial(_make, [call], weakref.ref(answer), self._group, self.rank)
        core = self._core

        def finish() -> R:
            if answer.error is not None:
                core.note_told()
                raise answer.error
            return answer.result

        return Work([core.run_later(begin)], finish, core.collect)

    def _trace(self, tracer: tracing.Tracer | None) -> None:
        """Record calls by a tracer; None: record none, and let plain arrays take the compiled path."""
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


class _Answer(Generic[R]):
    """The result or the error of a call that Python made."""

    result: R
    error: BaseException | None = None


def _make(
    calls: list[Callable[[], R]],
    answers: weakref.ref[_Answer[R]],
    group: _core.Group | MPIGroup,
    rank: int,
) -> None:
    """Make the call, which is taken out of ``calls``, and leave its result or its error."""
    problem = None
    result: Any = None
    try:
        result = calls.pop()()
    except BaseException as error:
        problem = error
        if not isinstance(error, CollectiveError):  # later calls of the others would differ
            group.abort(
                f"rank {rank} left an asynchronous call because of an error of its own: "
                f"{type(error).__name__}"
            )
    if (asked := answers()) is not None:
        asked.result, asked.error = result, problem


_need_python: weakref.WeakSet[Member] = weakref.WeakSet()


@atexit.register
def _end_calls() -> None:
    """No thread may ask for the interpreter when it is gone."""
    for member in list(_need_python):
        member._close_at_exit()


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
