"""The engine for calls on an MPI library, through mpi4py: for networks that only MPI supports.

Before each collective the ranks compare their calls, because MPI does not. Every wait polls, with a
deadline. A rank that leaves or fails the group sends the others a message.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from pycollective import _core
from pycollective.comm.arrays import Array
from pycollective.comm.call import About, Call, HostEngine, Rows, present
from pycollective.comm.mpi_group import MPIGroup
from pycollective.comm.work import DONE, Work
from pycollective.errors import (
    CollectiveError,
    MismatchError,
)

T = TypeVar("T")

_HALVES = ("float16", "bfloat16")
# MPI has no 16-bit floats, and sums of short ints do not wrap around in every library.
_REDUCED_AS = dict.fromkeys(_HALVES, "float32") | dict.fromkeys(
    ("int8", "int16", "uint8", "uint16"), "int64"
)


class _Task:
    """An unfinished call in the communicator's thread."""

    def __init__(self, future: concurrent.futures.Future[tuple[float, float]]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    @property
    def times(self) -> tuple[float, float]:
        return self._future.result()

    def wait(self, timeout: float) -> bool:
        concurrent.futures.wait([self._future], timeout)
        return self._future.done()

    def check(self) -> None:
        self._future.result()


class _Receive(_Task):
    """A receive that waits for its message."""

    def __init__(self, call: Call) -> None:
        super().__init__(concurrent.futures.Future())
        self.call = call
        self.begin = time.monotonic()

    def end(self, error: BaseException | None = None) -> None:
        """Note that the message is in the target, or that an error occurred."""
        if error is None:
            self._future.set_result((self.begin, time.monotonic()))
        else:
            self._future.set_exception(error)


class MPICore(HostEngine):
    """The engine of one rank on MPI."""

    #: MPI chooses the algorithms.
    choices: Rows = []  # noqa: RUF012

    def __init__(self, group: MPIGroup) -> None:
        self._group = group
        self._mpi = group.mpi
        self.rank, self.size = group.rank, group.size
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._thread_id = 0  # the identifier of this thread; 0 before its first call
        self._unfinished: list[_Task] = []
        self._kept: dict[tuple[int, int], deque[tuple[str, Array]]] = defaultdict(deque)
        # In the order of the calls. Only the thread that calls MPI uses the list.
        self._receives: list[_Receive] = []

    # Properties and settings -------------------------------------------------------------------------

    def prefer(self, rows: Rows) -> None:
        """Ignore the rows: MPI chooses the algorithms."""

    def warn_after(self, seconds: float, warn: Callable[[str], object]) -> None:
        """Do nothing: MPI does not tell the calls of other ranks."""

    def select(self, collective: _core.Collective, bytes: int) -> str:
        """Return the name of the library instead of an algorithm."""
        return "MPI"

    def about(self, call: Call) -> About:
        return About("MPI")

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any], result: bool = False) -> Array:
        """Make an ordinary array."""
        return np.empty(shape, dtype)

    @property
    def outstanding(self) -> int:
        self._unfinished = [task for task in self._unfinished if not task.done]
        return len(self._unfinished)

    def wait_all(self) -> None:
        """Wait until all calls are done."""
        if threading.get_ident() == self._thread_id:  # a call that makes several calls
            return
        for task in self._unfinished:
            task.wait(1e9)
        self._unfinished.clear()

    def collect(self) -> None:
        """Do nothing: a finished call keeps no objects."""

    def mark_reported(self) -> None:
        """Do nothing: closing raises no error of an earlier call."""

    def run_later(self, call: Callable[[], object]) -> _Task:
        """Run a function in the engine's thread, after all calls so far.

        Raise a `CollectiveError` if the MPI library does not allow calls from two threads in turn.
        """

        def timed() -> tuple[float, float]:
            begin = time.monotonic()
            call()
            return begin, time.monotonic()

        task = _Task(self._in_thread(timed))
        self._unfinished.append(task)
        return task

    def _in_thread(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run a function in the engine's thread, after those before."""
        if self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED:
            raise CollectiveError(
                "async_op needs MPI_THREAD_SERIALIZED or more: set mpi4py.rc.thread_level before "
                "importing mpi4py.MPI"
            )
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "pycollective-mpi")

        def run() -> T:
            self._thread_id = threading.get_ident()
            return function()

        return self._thread.submit(run)

    # Every call ---------------------------------------------------------------------------------

    def submit(self, call: Call) -> Work[None]:
        """Execute a call; a collective after all ranks have compared their calls."""
        rank = call.peer if call.is_message else call.root
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not among the {self.size} ranks")
        if call.reproducible or call.algorithm not in ("auto", "direct"):
            raise ValueError(
                "on MPI the library chooses the algorithm: leave out algorithm and reproducible"
            )
        if call.op:
            _require_reduction(present(call.source).dtype, call.op)
        execute = functools.partial(self._execute, call)
        if call.async_op:
            is_receive = call.collective == "recv"
            return Work([self._receive_later(call) if is_receive else self.run_later(execute)])
        self.in_turn(execute)
        return DONE

    def in_turn(self, function: Callable[[], T]) -> T:
        """Call a function of MPI after all calls so far, except receives that wait for a message."""
        waits = any(isinstance(task, _Receive) and not task.done for task in self._unfinished)
        if waits and threading.get_ident() != self._thread_id:
            # The engine's thread polls for the message, and one thread at a time may call MPI.
            return self._in_thread(function).result()
        self.wait_all()
        return function()

    def _execute(self, call: Call) -> None:
        if call.collective == "send":
            self._send(present(call.source), call.peer, call.tag, call.timeout)
        elif call.collective == "recv":
            self._recv(call)
        else:
            self._group.begin(str(call))
            self._agree(str(call), call.timeout)
            if call.op:
                self._reduce(call)
            elif call.array is not None:
                self._move(call)

    def _agree(self, what: str, seconds: float) -> None:
        """Fail the group unless all ranks make the same call.

        The ranks compare digests, and exchange the texts of their calls only if the digests differ.
        """
        digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")
        digests, most = np.array([digest, -digest]), np.empty(2, np.int64)
        self._wait(self._group.comm.Iallreduce(digests, most, self._mpi.MAX), seconds)
        if most[0] != -most[1]:
            text = np.frombuffer(what.encode()[:200].ljust(200), np.uint8)
            texts = np.empty((self.size, 200), np.uint8)
            self._wait(self._group.comm.Iallgather(text, texts), seconds)
            calls = [t.tobytes().decode(errors="replace").strip() for t in texts]
            said = "; ".join(f"{self._group.title(r)} is in {t}" for r, t in enumerate(calls))
            error = MismatchError(
                f"the ranks' calls differ: {said}",
                calls=dict(enumerate(calls)),
                hosts=self._group.names,
            )
            self._group.fail(error)

    def _wait(self, request: Any, seconds: float) -> None:
        # A peer may wait until this rank receives its message, before it makes the same call.
        self._group.wait([request], seconds, self._receive_one)

    # Collectives --------------------------------------------------------------------------------

    @np.errstate(all="ignore")  # no warnings about infinities, as in the core
    def _reduce(self, call: Call) -> None:
        """Run a reduction of MPI; NaNs, 16-bit floats, bools and means give the core's results."""
        source, target, op = present(call.source), call.target, call.op
        if not source.size:
            return
        mpi, dtype = self._mpi, source.dtype
        logical = dtype == np.bool_
        if call.collective in ("scan", "exscan") and op == "mean":
            op = "sum"  # the caller divides it
        operations = {
            "sum": mpi.SUM, "mean": mpi.SUM, "prod": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX,
            "and": mpi.LAND if logical else mpi.BAND, "or": mpi.LOR if logical else mpi.BOR,
            "xor": mpi.LXOR if logical else mpi.BXOR,
        }  # fmt: skip
        if logical:
            operations |= {"min": mpi.LAND, "max": mpi.LOR}
        given = source.astype(_REDUCED_AS.get(dtype.name, dtype), copy=False)
        total = np.empty(source.shape if target is None else target.shape, given.dtype)
        self._reduce_by(call, given, total, operations[op])
        if op in ("min", "max") and given.dtype.kind == "f":
            is_nan = np.empty(total.shape, np.uint8)
            self._reduce_by(call, np.isnan(given).view(np.uint8), is_nan, mpi.MAX)
            total[is_nan.astype(bool)] = np.nan
        total = total.astype(given.dtype if dtype.name in _HALVES else dtype, copy=False)
        if op == "mean" and dtype.kind in "iu":  # round toward zero
            total = (total - np.fmod(total, dtype.type(self.size))) // dtype.type(self.size)
        elif op == "mean":
            total /= self.size
        if target is not None:
            target[...] = total.astype(dtype, copy=False)

    def _reduce_by(self, call: Call, given: Array, total: Array, op: Any) -> None:
        """Run one reduction of MPI."""
        arguments: list[Any] = [given, total, op]
        if call.collective == "reduce":
            arguments = [given, total if self.rank == call.root else None, op, call.root]
        suffix = "_block" if call.collective == "reduce_scatter" else ""
        self._start(f"{call.collective}{suffix}", arguments, call.timeout)

    def _move(self, call: Call) -> None:
        """Move whole arrays, equal parts, or parts of different lengths."""
        source, target, counts = call.source, call.target, call.counts
        root = [call.root] if call.has_root else []
        if call.collective == "broadcast":
            target = present(target)
            if self.rank == call.root:
                target[...] = present(source)
            return self._start("bcast", [self._bytes(target), *root], call.timeout)
        given = None if source is None else self._bytes(_disjoint(source, target))
        received = None if target is None else self._bytes(target)
        if counts is not None:
            size = present(call.array).dtype.itemsize
            if given is not None and call.collective in ("scatter", "all_to_all"):
                given[1:1] = [n * size for n in counts], None
            if received is not None and call.collective != "scatter":
                received[1:1] = [n * size for n in call.out_counts or counts], None
        name = call.collective.replace("_", "") + "v" * (counts is not None)
        return self._start(name, [given, received, *root], call.timeout)

    def _start(self, name: str, arguments: Sequence[Any], seconds: float) -> None:
        """Run a collective of MPI by the name of its method, such as ``Iallreduce``."""
        start = getattr(self._group.comm, f"I{name.replace('all_', 'all')}")
        self._wait(start(*arguments), seconds)

    # Messages -----------------------------------------------------------------------------------

    def _send(self, source: Array, dest: int, tag: int, seconds: float) -> None:
        """Send an array to another rank; receive other messages while waiting."""
        self._group.check()
        if dest == self.rank:
            self._kept[dest, tag].append((_kind(source), source.copy()))
            return
        envelope = np.frombuffer(f"{tag} {_kind(source)}".encode(), np.uint8)
        requests = [self._group.envelopes.Isend([envelope, self._mpi.BYTE], dest)]
        requests.append(self._group.data.Isend(self._bytes(source), dest))
        begin = time.monotonic()
        while not self._mpi.Request.Testall(requests):
            if not self._receive_one():
                self._group.pause(begin, seconds, dest)

    def _recv(self, call: Call) -> None:
        """Receive an array from another rank."""
        self._group.check()
        if not self._receives:
            begin, kept = time.monotonic(), self._kept[call.peer, call.tag]
            while not kept:
                if not self._receive_one():
                    self._group.pause(begin, call.timeout, call.peer)
            return self._take(call, *kept.popleft())
        receive = _Receive(call)
        self._receives.append(receive)
        while not receive.done:
            self._advance()
        receive.check()

    def _receive_later(self, call: Call) -> _Receive:
        """Receive an array from another rank, while the engine's thread also makes other calls."""
        receive = _Receive(call)

        def begin() -> None:
            self._receives.append(receive)
            if len(self._receives) == 1:  # nobody polls yet
                self._poll()

        self._in_thread(begin)
        self._unfinished.append(receive)
        return receive

    def _poll(self) -> None:
        """Advance the receives, and again after the calls that the program has made meanwhile."""
        if self._receives:  # else another thread may call MPI
            self._advance()
        if self._receives:
            self._in_thread(self._poll)

    def _advance(self) -> None:
        """Receive a message if one has arrived; end the receives that have theirs, or that failed."""
        has_come, error = False, None
        try:
            has_come = self._receive_one()
        except BaseException as raised:
            error = raised
        for receive in tuple(self._receives):
            call, failure = receive.call, error
            kept = self._kept[call.peer, call.tag]
            try:
                if kept:
                    self._take(call, *kept.popleft())
                elif failure is None:
                    self._group.expect(receive.begin, call.timeout, call.peer)
                    continue
            except BaseException as raised:
                failure = raised
            self._receives.remove(receive)
            receive.end(failure)
        if self._receives and not has_come:
            self._group.rest(self._receives[-1].begin)

    def _take(self, call: Call, kind: str, data: Array) -> None:
        """Copy a message into the target of its receive."""
        target, source, tag = present(call.target), call.peer, call.tag
        if kind != _kind(target):
            self._group.fail(
                MismatchError(
                    f"rank {source} sent {kind} with tag {tag}, but rank {self.rank} receives "
                    f"{_kind(target)}",
                    calls={
                        source: f"send({kind}, tag={tag})",
                        self.rank: f"recv({_kind(target)}, tag={tag})",
                    },
                )
            )
        target[...] = data.view(target.dtype).reshape(target.shape)

    def _receive_one(self) -> bool:
        """Receive and keep one message that has arrived; return False if there is none."""
        mpi, status = self._mpi, self._mpi.Status()
        message = self._group.envelopes.Improbe(mpi.ANY_SOURCE, mpi.ANY_TAG, status)
        if message is None:
            return False
        source = status.Get_source()
        envelope = np.empty(status.Get_count(mpi.BYTE), np.uint8)
        message.Recv([envelope, mpi.BYTE])
        tag, _, kind = envelope.tobytes().decode().partition(" ")
        status = mpi.Status()
        self._group.data.Probe(source, mpi.ANY_TAG, status)
        data = np.empty(status.Get_count(mpi.BYTE), np.uint8)
        self._group.data.Recv([data, mpi.BYTE], source)
        self._kept[source, int(tag)].append((kind, data))
        return True

    # Helpers ------------------------------------------------------------------------------------

    def _bytes(self, array: Array) -> list[Any]:
        return [array.reshape(-1).view(np.uint8), self._mpi.BYTE]


def _kind(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _disjoint(source: Array, target: Array | None) -> Array:
    """Return the input, or a copy if it overlaps the output, which MPI forbids."""
    return source.copy() if target is not None and np.shares_memory(source, target) else source


def _require_reduction(dtype: Any, op: str) -> None:
    """Raise the core's error if there is no such reduction."""
    one = np.zeros(1, dtype)
    _core.reduce_arrays(op, [one, one], [np.empty_like(one)])
