"""The same collectives on an MPI library, through mpi4py: for networks that only MPI knows.

`MPICore` stands in the core's place in a communicator, so that arguments are prepared and checked as
everywhere. Before each collective the ranks compare what they call, because MPI does not. All waiting
is looking again and again, with a deadline; what a rank has to tell the others besides (that it leaves,
that it fails the group) comes as a message that everyone who waits looks out for.
"""

from __future__ import annotations

import concurrent.futures
import copy
import hashlib
import importlib
import json
import platform
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycollective import _core
from pycollective.communicator.arrays import Array
from pycollective.errors import (
    AbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
)

__all__ = ["MPICore", "MPIGroup", "join"]

_LOOKS = 200
_PAUSE = 50e-6
_GRACE = 2.0
"""Seconds in which what a rank that has left had sent before must arrive."""
_NAME_BYTES = 256  # of a host
_HALVES = ("float16", "bfloat16")
# Halves MPI does not know; sums of short ints do not wrap around in every library.
_REDUCED_AS = dict.fromkeys(_HALVES, "float32") | dict.fromkeys(
    ("int8", "int16", "uint8", "uint16"), "int64"
)


def join(comm: Any) -> MPIGroup:
    """Return this rank's group, on duplicates of an MPI communicator."""
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except ImportError:
        raise ImportError("from_mpi needs mpi4py: pip install 'pycollective[mpi]'") from None
    if not isinstance(comm, mpi.Intracomm):
        raise TypeError(f"from_mpi needs an intracommunicator such as MPI.COMM_WORLD, not {comm!r}")
    return MPIGroup(mpi, comm)


_KINDS = {kind.__name__: kind for kind in (AbortedError, PeerLostError)}


class MPIGroup:
    """What of a group is not a call: who is in it, and whether it is alive."""

    transport = "MPI"

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi = mpi
        # Collectives, messages' envelopes and data, and words to all must not meet.
        self.comm, self.envelopes, self.data, self.words = (comm.Dup() for _ in range(4))
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.names = self._host_names()
        self.hosts = [sorted(set(self.names)).index(name) for name in self.names]
        self._failure: CollectiveError | None = None
        self._left: dict[int, float] = {}  # ranks, and when that was heard
        self._told: list[Any] = []
        self._calls = 0
        self._call: str | None = None
        self._doing = "has made no call"
        self._titles = [f"rank {r}" for r in range(self.size)]

    def _host_names(self) -> list[str]:
        """Return each rank's host, told as plain bytes: nothing that others say is unpickled."""
        own = platform.node().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        names = np.empty((self.size, _NAME_BYTES), np.uint8)
        self.comm.Allgather(np.frombuffer(own, np.uint8), names)
        return [name.tobytes().rstrip(b"\0").decode(errors="replace") for name in names]

    @property
    def failure(self) -> str | None:
        """Why the group is dead, if it is."""
        return None if self._failure is None else str(self._failure)

    def begin(self, what: str) -> None:
        """Note a collective call; raise if the group is dead."""
        self.check()
        self._calls += 1
        self._call = f"{what} #{self._calls}"
        self._doing = f"is in {self._call}"

    def check(self) -> None:
        """Take in what others say; raise if the group is dead."""
        status = self.mpi.Status()
        while self.words.Iprobe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG, status):
            source = status.Get_source()
            word = np.empty(status.Get_count(self.mpi.BYTE), np.uint8)
            self.words.Recv([word, self.mpi.BYTE], source, status.Get_tag())
            said = json.loads(word.tobytes())
            if "left" in said:
                self._left[source] = time.monotonic()
            elif self._failure is None:
                self._failure = self._error_of(said)
        if self._failure is not None:
            raise copy.copy(self._failure)

    def wait(self, requests: list[Any], seconds: float, peer: int | None = None) -> None:
        """Wait for requests of MPI, of the whole group or one peer, until a deadline."""
        begin = time.monotonic()
        looks = 0
        while not self.mpi.Request.Testall(requests):
            looks += 1
            if looks < _LOOKS:
                continue
            self.check()
            now = time.monotonic()
            for rank, since in self._left.items():
                if peer in (None, rank) and now - max(since, begin) > _GRACE:
                    self._lose(rank, f"has left the group: {self.describe()}")
            if now - begin > seconds:
                self.fail(
                    CollectiveTimeoutError(
                        f"a rank did not come within {seconds:g} s: {self.describe()}",
                        call=self._call,
                    )
                )
            time.sleep(_PAUSE)

    def fail(self, error: CollectiveError) -> None:
        """Fail the group, unless it has failed, and raise why."""
        self._end(error)
        raise error

    def _lose(self, rank: int, how: str) -> None:
        """Fail the group because a rank is lost, and raise that."""
        text = f"{self.title(rank)} {how}"
        self.fail(PeerLostError(text, ranks=[rank], hosts=[self.names[rank]], call=self._call))

    def abort(
        self,
        message: str,
        peer_lost: bool = False,
        ranks: Sequence[int] = (),
        call: str | None = None,
    ) -> None:
        """Let every rank's present or next call fail."""
        ranks = sorted(ranks)
        hosts = [self.names[r] for r in ranks]
        kind = PeerLostError if peer_lost else AbortedError
        self._end(kind(message, ranks=ranks, hosts=hosts, call=call))

    def _end(self, error: CollectiveError) -> None:
        if self._failure is None:
            self._failure = error
            said = {"reason": str(error), "kind": type(error).__name__, "ranks": error.ranks}
            calls = list(error.calls.items()) if isinstance(error, MismatchError) else []
            self._tell({**said, "call": error.call, "calls": calls})

    def _error_of(self, said: dict[str, Any]) -> CollectiveError:
        """Return the error that another rank tells of."""
        hosts = [self.names[r] for r in said["ranks"]]
        if said["kind"] == "MismatchError":
            return MismatchError(said["reason"], calls=dict(said["calls"]), hosts=hosts)
        kind = _KINDS.get(said["kind"], AbortedError)
        return kind(said["reason"], ranks=said["ranks"], hosts=hosts, call=said["call"])

    def close(self, rank: int) -> None:
        """Leave in good order."""
        if not self._doing.startswith("has left"):
            self._doing = "has left"
            self._tell({"left": True})

    def _tell(self, said: dict[str, Any]) -> None:
        word = np.frombuffer(json.dumps(said).encode(), np.uint8)
        for rank in range(self.size):
            if rank != self.rank and not self.mpi.Is_finalized():
                request = self.words.Isend([word, self.mpi.BYTE], rank)
                self._told.append((word, request))  # kept until the end: nobody waits for it

    def abandon(self) -> None:
        """Let go in a forked child."""

    def calls(self, rank: int) -> int:
        """Return how many collective calls a rank has begun, as far as this one knows."""
        return self._calls if rank == self.rank else 0

    def address(self, rank: int) -> str:
        """Return the host of a rank that is not on this one; how it is reached MPI keeps to itself."""
        return "" if self.hosts[rank] == self.hosts[self.rank] else self.names[rank]

    def title(self, rank: int) -> str:
        """Return the rank's name in texts."""
        return self._titles[rank]

    def call_ranks(self, titles: Sequence[str]) -> None:
        """Give the ranks their names in texts."""
        self._titles = list(titles)

    def describe(self) -> str:
        """Say what this rank is doing; what the others do MPI does not tell."""
        return f"{self.title(self.rank)} {self._doing}"

    def split(self, color: int | None, key: int) -> MPIGroup | None:
        """Make groups of those with one color."""
        absent = color is None or color < 0
        part = self.comm.Split(self.mpi.UNDEFINED if absent else color, key)
        return None if absent else MPIGroup(self.mpi, part)

    def core(self) -> MPICore:
        """Return what makes this rank's calls."""
        return MPICore(self)


class _Task:
    """A call under way in the communicator's thread."""

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


class MPICore:
    """A rank's calls, as the core has them."""

    def __init__(self, group: MPIGroup) -> None:
        self._group = group
        self._mpi = group.mpi
        self.rank, self.size = group.rank, group.size
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._within = 0  # that thread, once it runs
        self._under_way: list[_Task] = []
        self._kept: dict[tuple[int, int], deque[tuple[str, Array]]] = defaultdict(deque)

    # The core's surroundings --------------------------------------------------------------------

    def prefer(self, rows: object) -> None:
        """MPI chooses its algorithms itself."""

    def warn_after(self, seconds: float, warn: object) -> None:
        """What other ranks are doing is not known."""

    def select(self, collective: object, nbytes: int) -> str:
        """Return what runs."""
        return "MPI"

    @property
    def outstanding(self) -> int:
        """How many calls are under way."""
        self._under_way = [task for task in self._under_way if not task.done]
        return len(self._under_way)

    def settle(self) -> None:
        """Wait for the calls that are under way."""
        if threading.get_ident() == self._within:  # a call that consists of several
            return
        for task in self._under_way:
            task.wait(1e9)
        self._under_way.clear()

    def collect(self) -> None:
        """What is done keeps nothing."""

    def note_told(self) -> None:
        """MPI does not compare calls: no error is raised by close()."""

    def submit(self, call: Callable[[], object]) -> _Task:
        """Make a call in a thread, after those before it."""
        if self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED:
            raise CollectiveError(
                "async_op needs MPI with MPI_THREAD_SERIALIZED at least: set "
                "mpi4py.rc.thread_level before MPI is imported"
            )
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "pycollective-mpi")

        def timed() -> tuple[float, float]:
            self._within = threading.get_ident()
            begin = time.monotonic()
            call()
            return begin, time.monotonic()

        task = _Task(self._thread.submit(timed))
        self._under_way.append(task)
        return task

    def _call(
        self, what: str, call: Callable[[], object], seconds: float, async_op: bool
    ) -> _Task | None:
        """Make a collective, once all ranks are found to call the same."""

        def agreed() -> None:
            self._group.begin(what)
            self._agree(what, seconds)
            call()

        if async_op:
            return self.submit(agreed)
        self.settle()
        agreed()
        return None

    def _agree(self, what: str, seconds: float) -> None:
        digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")
        mine, most = np.array([digest, -digest]), np.empty(2, np.int64)
        self._wait(self._group.comm.Iallreduce(mine, most, self._mpi.MAX), seconds)
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
        self._group.wait([request], seconds)

    # Reductions ---------------------------------------------------------------------------------

    def all_reduce(
        self, source: Array, target: Array, op: str, how: Any, reproducible: bool,
        seconds: float, async_op: bool = False, shape: Sequence[int] | None = None,
    ) -> _Task | None:  # fmt: skip
        """Reduce to all ranks, who agree on ``shape`` where the source has been made of others."""
        _require_own_choice(how, reproducible)
        comm = self._group.comm

        def reduce(given: Array, total: Array, mpi_op: Any) -> None:
            self._wait(comm.Iallreduce(given, total, mpi_op), seconds)

        made_of = "" if shape is None else f" of shapes {list(shape)}"
        what = f"all_reduce({_kind(source)}{made_of}, {op})"
        return self._reduction(what, source, target, op, reduce, seconds, async_op)

    def reduce(
        self, source: Array, target: Array | None, op: str, root: int, how: Any,
        seconds: float, async_op: bool = False,
    ) -> _Task | None:  # fmt: skip
        """Reduce to the root."""
        self._check_root(root)
        comm = self._group.comm

        def reduce(given: Array, total: Array, mpi_op: Any) -> None:
            there = total if self.rank == root else None
            self._wait(comm.Ireduce(given, there, mpi_op, root), seconds)

        what = f"reduce({_kind(source)}, {op}, root={root})"
        return self._reduction(what, source, target, op, reduce, seconds, async_op)

    def reduce_scatter(
        self, source: Array, target: Array, op: str, how: Any, seconds: float,
        async_op: bool = False,
    ) -> _Task | None:  # fmt: skip
        """Reduce, and give each rank its part."""
        comm = self._group.comm

        def reduce(given: Array, total: Array, mpi_op: Any) -> None:
            self._wait(comm.Ireduce_scatter_block(given, total, mpi_op), seconds)

        what = f"reduce_scatter({_kind(source)}, {op})"
        return self._reduction(what, source, target, op, reduce, seconds, async_op)

    def scan(
        self, source: Array, target: Array | None, op: str, exclusive: bool, how: Any,
        seconds: float, async_op: bool = False,
    ) -> _Task | None:  # fmt: skip
        """Reduce over the ranks before this one; the caller divides the sum of a mean."""
        comm = self._group.comm

        def reduce(given: Array, total: Array, mpi_op: Any) -> None:
            start = comm.Iexscan if exclusive else comm.Iscan
            self._wait(start(given, total, mpi_op), seconds)

        what = f"{'exscan' if exclusive else 'scan'}({_kind(source)}, {op})"
        op = "sum" if op == "mean" else op
        return self._reduction(what, source, target, op, reduce, seconds, async_op)

    def _reduction(
        self, what: str, source: Array, target: Array | None, op: str,
        reduce: Callable[[Array, Array, Any], None], seconds: float, async_op: bool,
    ) -> _Task | None:  # fmt: skip
        """Run a reduction of MPI, with what MPI leaves open decided as the core does."""
        _require_reduction(source.dtype, op)
        mpi, dtype = self._mpi, source.dtype
        logical = dtype == np.bool_
        operations = {
            "sum": mpi.SUM, "mean": mpi.SUM, "prod": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX,
            "and": mpi.LAND if logical else mpi.BAND, "or": mpi.LOR if logical else mpi.BOR,
            "xor": mpi.LXOR if logical else mpi.BXOR,
        }  # fmt: skip
        if logical and op in ("min", "max"):
            operations |= {"min": mpi.LAND, "max": mpi.LOR}

        @np.errstate(all="ignore")  # as the core, which warns of no infinities
        def call() -> None:
            if not source.size:
                return
            given = source.astype(_REDUCED_AS.get(dtype.name, dtype), copy=False)
            shape = source.shape if target is None else target.shape
            total = np.empty(shape, given.dtype)
            reduce(given, total, operations[op])
            if op in ("min", "max") and given.dtype.kind == "f":
                absent = np.empty(shape, np.uint8)
                reduce(np.isnan(given).view(np.uint8), absent, mpi.MAX)
                total[absent.astype(bool)] = np.nan
            total = total.astype(given.dtype if dtype.name in _HALVES else dtype, copy=False)
            if op == "mean" and dtype.kind in "iu":  # rounded toward zero
                total = (total - np.fmod(total, dtype.type(self.size))) // dtype.type(self.size)
            elif op == "mean":
                total /= self.size
            if target is not None:
                target[...] = total.astype(dtype, copy=False)

        return self._call(what, call, seconds, async_op)

    # Moves --------------------------------------------------------------------------------------

    def broadcast(
        self, source: Array, target: Array, root: int, how: Any, seconds: float,
        async_op: bool = False,
    ) -> _Task | None:  # fmt: skip
        """Give everyone the root's array."""
        self._check_root(root)

        def call() -> None:
            if self.rank == root:
                target[...] = source
            self._wait(self._group.comm.Ibcast(self._bytes(target), root), seconds)

        return self._call(f"broadcast({_kind(source)}, root={root})", call, seconds, async_op)

    def move_parts(
        self, which: Any, source: Array | None, target: Array | None, count: int,
        shape: Sequence[int], root: int, how: Any, seconds: float, async_op: bool = False,
    ) -> _Task | None:  # fmt: skip
        """Move equal parts."""
        self._check_root(root)
        array = source if source is not None else target
        assert array is not None
        what = f"{which.name}({array.dtype}{list(shape)}, root={root})"

        def call() -> None:
            given = None if source is None else self._bytes(_apart(source, target))
            taken = None if target is None else self._bytes(target)
            comm = self._group.comm
            calls: dict[str, Callable[[], Any]] = {
                "all_gather": lambda: comm.Iallgather(given, taken),
                "gather": lambda: comm.Igather(given, taken, root),
                "scatter": lambda: comm.Iscatter(given, taken, root),
                "all_to_all": lambda: comm.Ialltoall(given, taken),
            }
            self._wait(calls[which.name](), seconds)

        return self._call(what, call, seconds, async_op)

    def move_ragged(
        self, which: Any, source: Array | None, target: Array | None, counts: Sequence[int],
        shape: Sequence[int], root: int, how: Any, seconds: float, async_op: bool = False,
    ) -> _Task | None:  # fmt: skip
        """Move parts of several lengths."""
        self._check_root(root)
        array = source if source is not None else target
        assert array is not None
        size = array.dtype.itemsize
        lengths = [n * size for n in counts]
        what = f"{which.name}({array.dtype}{list(shape)}, counts={list(counts)}, root={root})"

        def call() -> None:
            given = None if source is None else _apart(source, target)
            comm, mpi = self._group.comm, self._mpi
            flat = None if given is None else given.reshape(-1).view(np.uint8)
            taken = None if target is None else target.reshape(-1).view(np.uint8)
            calls: dict[str, Callable[[], Any]] = {
                "all_gather": lambda: comm.Iallgatherv(
                    [flat, mpi.BYTE], [taken, lengths, None, mpi.BYTE]
                ),
                "gather": lambda: comm.Igatherv(
                    [flat, mpi.BYTE],
                    None if taken is None else [taken, lengths, None, mpi.BYTE],
                    root,
                ),
                "scatter": lambda: comm.Iscatterv(
                    None if flat is None else [flat, lengths, None, mpi.BYTE],
                    [taken, mpi.BYTE],
                    root,
                ),
            }
            self._wait(calls[which.name](), seconds)

        return self._call(what, call, seconds, async_op)

    def all_to_all_ragged(
        self, source: Array, target: Array, sent: Sequence[int], received: Sequence[int],
        shape: Sequence[int], seconds: float, async_op: bool = False,
    ) -> _Task | None:  # fmt: skip
        """Move parts of several lengths from all to all."""
        size = source.dtype.itemsize

        def call() -> None:
            given = _apart(source, target).reshape(-1).view(np.uint8)
            out = target.reshape(-1).view(np.uint8)
            request = self._group.comm.Ialltoallv(
                [given, [n * size for n in sent], None, self._mpi.BYTE],
                [out, [n * size for n in received], None, self._mpi.BYTE],
            )
            self._wait(request, seconds)

        what = f"all_to_all({source.dtype}{list(shape)}, ragged)"
        return self._call(what, call, seconds, async_op)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Make an ordinary array."""
        return np.empty(shape, dtype)

    def barrier(self, seconds: float, async_op: bool = False) -> _Task | None:
        """Meet."""
        return self._call("barrier()", lambda: None, seconds, async_op)

    # Messages -----------------------------------------------------------------------------------

    def send(
        self, source: Array, dest: int, tag: int, seconds: float, async_op: bool = False
    ) -> _Task | None:
        """Send an array to another rank; takes in what comes meanwhile."""
        self._check_root(dest)

        def call() -> None:
            self._group.check()
            if dest == self.rank:
                self._kept[dest, tag].append((_kind(source), source.copy()))
                return
            envelope = np.frombuffer(f"{tag} {_kind(source)}".encode(), np.uint8)
            comms = self._group.envelopes, self._group.data
            requests = [comms[0].Isend([envelope, self._mpi.BYTE], dest)]
            requests.append(comms[1].Isend(self._bytes(source), dest))
            begin = time.monotonic()
            while not self._mpi.Request.Testall(requests):
                if not self._take_in(seconds):
                    self._pause(begin, seconds, dest)

        if async_op:
            return self.submit(call)
        self.settle()
        call()
        return None

    def recv(
        self, target: Array, source: int, tag: int, seconds: float, async_op: bool = False
    ) -> _Task | None:
        """Receive an array from another rank."""
        self._check_root(source)

        def call() -> None:
            self._group.check()
            begin, kept = time.monotonic(), self._kept[source, tag]
            while not kept:
                if not self._take_in(seconds):
                    self._pause(begin, seconds, source)
            kind, data = kept.popleft()
            if kind != _kind(target):
                self._group.fail(
                    MismatchError(
                        f"rank {source} sent {kind} with tag {tag}, and rank {self.rank} asks for "
                        f"{_kind(target)}",
                        calls={
                            source: f"send({kind}, tag={tag})",
                            self.rank: f"recv({_kind(target)}, tag={tag})",
                        },
                    )
                )
            target[...] = data.view(target.dtype).reshape(target.shape)

        if async_op:
            return self.submit(call)
        self.settle()
        call()
        return None

    def _pause(self, begin: float, seconds: float, peer: int) -> None:
        """Look for words of others, and at the deadline."""
        waited = time.monotonic() - begin
        if waited > 0.001:
            self._group.check()
            left = self._group._left.get(peer)
            if left is not None and time.monotonic() - max(left, begin) > _GRACE:
                self._group._lose(peer, "has left the group")
        if waited > seconds:
            self._group.fail(
                CollectiveTimeoutError(
                    f"rank {peer} did not answer within {seconds:g} s",
                    ranks=[peer],
                    hosts=[self._group.names[peer]],
                )
            )
        time.sleep(_PAUSE if waited > 0.001 else 0)

    def _take_in(self, seconds: float) -> bool:
        """Receive a message that has come, if there is one."""
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

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"there is no rank {root} among {self.size}")


def _kind(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _apart(source: Array, target: Array | None) -> Array:
    """Return the input where MPI may read it while it writes the output."""
    return source.copy() if target is not None and np.shares_memory(source, target) else source


def _require_reduction(dtype: Any, op: str) -> None:
    """Raise what the core raises if there is no such reduction."""
    one = np.zeros(1, dtype)
    _core.reduce_arrays(op, [one, one], [np.empty_like(one)])


def _require_own_choice(how: Any, reproducible: bool) -> None:
    if reproducible or how not in ("auto", "direct"):
        raise ValueError(
            "on MPI the library chooses the algorithm: leave out algorithm and reproducible"
        )
