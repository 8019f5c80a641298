"""Calls on arrays that lie on GPUs: by NCCL, by the project's own executor, or over the host.

What stands here takes the core's place for such arrays: arguments are prepared and checked as for
host arrays, and come here instead. At the first call the ranks tell each other, through the core,
which GPUs they are on and whether they have NCCL; all of them then go the same way.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import math
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from pycollective import _core, array_backend, nccl, observe
from pycollective.communicator import on_device
from pycollective.communicator.arrays import Array
from pycollective.communicator.on_device import CoreByAlgorithm, DeviceCore
from pycollective.communicator.staged import StagedCore
from pycollective.communicator.watch import Watch
from pycollective.errors import (
    AbortedError,
    CollectiveError,
    MismatchError,
    NcclError,
    NcclNotFoundError,
    with_text,
)
from pycollective.nccl import device
from pycollective.nccl.loading import may_share_gpus, require_cuda
from pycollective.nccl.types import BYTES, count_and_type, reduction_of

if TYPE_CHECKING:
    from pycollective.communicator import Communicator

__all__ = ["GpuCore", "NcclCore", "core_for"]

_log = logging.getLogger("pycollective")
_REMEMBERED = 4096
"""Kinds of calls that are known to be the same on all ranks."""
_WORDS = 400
#: The name tells a rank with a host array what this one has: the core's messages show it.
_TOLD = np.dtype([("a GPU array", f"V{_WORDS}")])


def core_for(member: Communicator, array: Array) -> GpuCore:
    """Return what makes this rank's calls on GPU arrays; every rank comes here at its first one.

    That is NCCL, and where it cannot be used, or an algorithm is asked for by name, the device executor
    for ranks that are threads of one process; else the host.

    Raises
    ------
    MismatchError
        Another rank has called something with a host array.
    NcclError
        The ranks have several versions of NCCL, or NCCL or CUDA refuses to work on one of them.
    """
    here = array_backend.device_of(array)[1]
    told = _told_by_all(member, lambda: _says(here), "make the first call on a GPU")
    why = _why_not(*zip(*(text.split("\n", 3) for text in told), strict=True))
    on_host = StagedCore(member)
    own = DeviceCore(member) if on_device.is_possible(member) else None
    if why:
        if own is not None:
            if member.rank == 0:
                _log.info("GPU arrays are reduced by pycollective's own device executor: %s", why)
            return own
        if member.rank == 0:
            _log.warning(
                "GPU arrays go over the host's memory, which is slow, because NCCL cannot be used: "
                "%s; %s",
                why,
                on_device.why_not(member),
            )
        return on_host
    library = nccl.library()
    ids = _told_by_all(
        member,
        lambda: "" if member.rank else library.unique_id().hex(),
        "make the identifier of NCCL's communicator",
    )
    unique_id = bytes.fromhex(ids[0])
    by_nccl = NcclCore(member, library, unique_id, here)
    return CoreByAlgorithm(by_nccl, own or on_host, member)


def _says(here: int) -> str:
    """Return what a rank tells of its NCCL and its GPU."""
    problem, version, gpu, process = "", 0, "", 0
    try:
        library = nccl.library()
        require_cuda(library, device.driver_version())
        version, gpu = library.version, device.identity(here)
        process = os.getpid() if may_share_gpus(library) else 0
    except NcclNotFoundError as error:
        problem = str(error)
    return f"{version}\n{gpu}\n{process}\n{problem}"


def _why_not(
    versions: Sequence[str], gpus: Sequence[str], processes: Sequence[str], problems: Sequence[str]
) -> str:
    """Return why the ranks cannot use NCCL together, or nothing.

    Processes may share a GPU where NCCL is set so; each tells its number, or 0. Threads may not: the
    calls of two ranks would wait for each other in one stream.
    """
    for rank, problem in enumerate(problems):
        if problem:
            return f"rank {rank}: {problem}"
    if len(set(versions)) > 1:
        raise NcclError(
            "the ranks have several versions of NCCL, which do not talk to each other: "
            + ", ".join(f"rank {r} has {v}" for r, v in enumerate(versions))
        )
    for rank, gpu in enumerate(gpus):
        for other in range(rank):
            both = {processes[other], processes[rank]}
            if gpus[other] != gpu or (len(both) == 2 and "0" not in both):
                continue
            return f"ranks {other} and {rank} are on one GPU ({gpu}), which NCCL refuses"
    return ""


def _exchange(member: Communicator, text: str, what: str) -> list[str]:
    """Return what every rank says, through the core; of a long text the beginning, and a hash of it."""
    words, room = text.encode(), _WORDS - 4
    if len(words) > room:
        mark = f"... (BLAKE2 of the whole: {hashlib.blake2b(words, digest_size=16).hexdigest()})"
        words = words[: room - len(mark)] + mark.encode()
    row = np.frombuffer(struct.pack("=I", len(words)) + words.ljust(_WORDS - 4), _TOLD)
    try:
        table = member.all_gather(row)
    except MismatchError as error:
        raise with_text(
            error,
            f"rank {member.rank} has given a GPU array, to {what}, and another rank a host array or "
            f"another call: the arrays of one call must all be on GPUs, or all on the host. {error}",
        ) from None
    raw = [bytes(part) for part in table.view(f"V{_WORDS}").tolist()]
    return [part[4 : 4 + struct.unpack("=I", part[:4])[0]].decode(errors="replace") for part in raw]


def _told_by_all(member: Communicator, say: Callable[[], str], what: str) -> list[str]:
    """Return what every rank has to say; where one fails at it, all raise why, and none waits for it."""
    failure = None
    try:
        text = f"={say()}"
    except Exception as error:
        failure, text = error, f"!{type(error).__name__}: {error}"
    told = _exchange(member, text, what)
    for rank, said in enumerate(told):
        if said.startswith("!"):
            raise NcclError(f"rank {rank} cannot {what}: {said[1:]}") from failure
    return [said[1:] for said in told]


def _check_same(member: Communicator, told: Sequence[str]) -> None:
    """Raise, and fail the group, unless all ranks call the same."""
    if len(set(told)) > 1:
        calls = "; ".join(f"rank {r} is in {text}" for r, text in enumerate(told))
        error = MismatchError(f"the ranks' calls differ: {calls}", calls=dict(enumerate(told)))
        member._group.abort(str(error), ranks=error.ranks)
        raise error


#: Calls of NCCL, on a stream.
_Calls: TypeAlias = Callable[[_core.nccl.Comm, int], None]


class _Span(NamedTuple):
    """Memory of an array that is moved: an address and a number of bytes."""

    address: int
    nbytes: int


def _span(array: Array, begin: int = 0, count: int | None = None) -> _Span:
    """Return the memory of some elements of a contiguous array."""
    item = array.dtype.itemsize
    items = array.size if count is None else count
    return _Span(array_backend.address(array) + begin * item, items * item)


class NcclCore:
    """A rank's calls on GPU arrays, by NCCL.

    A call returns when NCCL has it: what this thread's stream is given afterwards finds its result, as
    with CuPy's own operations. The first call of each kind (collective, shape, dtype, reduction) is
    compared between the ranks, through the core.
    """

    def __init__(
        self, member: Communicator, library: _core.nccl.Library, unique_id: bytes, here: int
    ) -> None:
        self._member = weakref.ref(member)
        self.rank, self.size = member.rank, member.size
        self._library = library
        self._agreed: set[str] = set()
        self._put_off: list[Message] = []
        self._beginning = threading.Lock()
        self._watch = Watch(member)
        try:
            self._nccl = nccl.NcclCommunicator(
                library, unique_id, member.size, member.rank, here, self._watch, member.timeout
            )
        except CollectiveError as error:
            self._watch.fail(error)
            raise
        self._watch.start(self._nccl)
        if member.rank == 0:
            _log.info("NCCL %s among %d ranks", library.version_text, member.size)

    # Reductions ---------------------------------------------------------------------------------

    def all_reduce(
        self, source: Array, target: Array, op: str, how: Any, reproducible: bool,
        seconds: float, async_op: bool = False, shape: Sequence[int] | None = None,
    ) -> nccl.Operation | None:  # fmt: skip
        """Reduce to all ranks, who agree on ``shape`` where the source has been made of others."""
        made_of = "" if shape is None else f" of shapes {list(shape)}"
        what = f"all_reduce({_kind(source)}{made_of}, {op})"
        count, kind = count_and_type(self._library, source.size, source.dtype)
        number = reduction_of(op, source.dtype)
        send, recv = _span(source), _span(target)

        def call(comm: _core.nccl.Comm, stream: int) -> None:
            comm.all_reduce(send.address, recv.address, count, kind, number, stream)

        return self._call(what, call, how, (source, target), seconds, async_op, op=op)

    def reduce(
        self, source: Array, target: Array | None, op: str, root: int, how: Any,
        seconds: float, async_op: bool = False,
    ) -> nccl.Operation | None:  # fmt: skip
        """Reduce to the root."""
        self._check_rank(root)
        count, kind = count_and_type(self._library, source.size, source.dtype)
        number = reduction_of(op, source.dtype)
        send, recv = _span(source), _span(source if target is None else target)

        def call(comm: _core.nccl.Comm, stream: int) -> None:
            comm.reduce(send.address, recv.address, count, kind, number, root, stream)

        what = f"reduce({_kind(source)}, {op}, root={root})"
        return self._call(what, call, how, (source, target), seconds, async_op, op=op, root=root)

    def reduce_scatter(
        self, source: Array, target: Array, op: str, how: Any, seconds: float,
        async_op: bool = False,
    ) -> nccl.Operation | None:  # fmt: skip
        """Reduce, and give each rank its part."""
        count, kind = count_and_type(self._library, target.size, source.dtype)
        number = reduction_of(op, source.dtype)
        send, recv = _span(source), _span(target)

        def call(comm: _core.nccl.Comm, stream: int) -> None:
            comm.reduce_scatter(send.address, recv.address, count, kind, number, stream)

        what = f"reduce_scatter({_kind(source)}, {op})"
        return self._call(what, call, how, (source, target), seconds, async_op, op=op)

    # Moves --------------------------------------------------------------------------------------

    def broadcast(
        self, source: Array, target: Array, root: int, how: Any, seconds: float,
        async_op: bool = False,
    ) -> nccl.Operation | None:  # fmt: skip
        """Give everyone the root's array."""
        self._check_rank(root)
        send, recv = _span(source), _span(target)

        def call(comm: _core.nccl.Comm, stream: int) -> None:
            comm.broadcast(send.address, recv.address, send.nbytes, BYTES, root, stream)

        what = f"broadcast({_kind(source)}, root={root})"
        return self._call(what, call, how, (source, target), seconds, async_op, root=root)

    def move_parts(
        self, which: Any, source: Array | None, target: Array | None, count: int,
        shape: Sequence[int], root: int, how: Any, seconds: float, async_op: bool = False,
    ) -> nccl.Operation | None:  # fmt: skip
        """Move equal parts of ``count`` elements."""
        self._check_rank(root)
        array = source if source is not None else target
        assert array is not None
        what = f"{which.name}({array.dtype}{list(shape)}, root={root})"
        counts = [count] * self.size
        call = self._messages(which.name, source, target, counts, counts, root)
        if which.name == "all_gather":
            assert source is not None and target is not None
            call = self._all_gather(_span(source), _span(target))
        others = {"root": root} if which.name in ("gather", "scatter") else {}
        return self._call(what, call, how, (source, target), seconds, async_op, count, **others)

    def _all_gather(self, send: _Span, recv: _Span) -> _Calls:
        def call(comm: _core.nccl.Comm, stream: int) -> None:
            comm.all_gather(send.address, recv.address, send.nbytes, BYTES, stream)

        return call

    def move_ragged(
        self, which: Any, source: Array | None, target: Array | None, counts: Sequence[int],
        shape: Sequence[int], root: int, how: Any, seconds: float, async_op: bool = False,
    ) -> nccl.Operation | None:  # fmt: skip
        """Move parts of several lengths."""
        self._check_rank(root)
        array = source if source is not None else target
        assert array is not None
        what = f"{which.name}({array.dtype}{list(shape)}, counts={list(counts)}, root={root})"
        call = self._messages(which.name, source, target, counts, counts, root)
        others = {"root": root} if which.name in ("gather", "scatter") else {}
        moved = sum(counts)
        return self._call(what, call, how, (source, target), seconds, async_op, moved, **others)

    def all_to_all_ragged(
        self, source: Array, target: Array, sent: Sequence[int], received: Sequence[int],
        shape: Sequence[int], seconds: float, async_op: bool = False,
    ) -> nccl.Operation | None:  # fmt: skip
        """Move parts of several lengths from all to all."""
        call = self._messages("all_to_all", source, target, sent, received, 0)
        what = f"all_to_all({source.dtype}{list(shape)}, ragged)"
        return self._call(what, call, "auto", (source, target), seconds, async_op, 1)

    def _messages(
        self, name: str, source: Array | None, target: Array | None, sent: Sequence[int],
        received: Sequence[int], root: int,
    ) -> _Calls:  # fmt: skip
        """Return the sends and receives that a move is made of, of which NCCL makes one operation.

        ``sent`` and ``received`` are numbers of elements for each rank. Nothing is sent where there is
        nothing, or where a part is in its place already.
        """
        me = self.rank
        outgoing: list[tuple[int, _Span]] = []
        incoming: list[tuple[int, _Span]] = []
        if source is not None and name in ("scatter", "all_to_all"):
            outgoing = [(r, _span(source, sum(sent[:r]), sent[r])) for r in range(self.size)]
        elif source is not None:
            ranks = range(self.size) if name == "all_gather" else [root]
            outgoing = [(r, _span(source)) for r in ranks]
        if target is not None and name != "scatter":
            incoming = [
                (r, _span(target, sum(received[:r]), received[r])) for r in range(self.size)
            ]
        elif target is not None:
            incoming = [(root, _span(target))]
        in_place = {r: span for r, span in incoming if r == me}
        outgoing = [(r, s) for r, s in outgoing if s.nbytes and not (r == me and in_place[r] == s)]
        kept = {r for r, _ in outgoing}
        incoming = [(r, s) for r, s in incoming if s.nbytes and (r != me or r in kept)]

        def call(comm: _core.nccl.Comm, stream: int) -> None:
            for rank, span in outgoing:
                comm.send(span.address, span.nbytes, BYTES, rank, stream)
            for rank, span in incoming:
                comm.recv(span.address, span.nbytes, BYTES, rank, stream)

        return call

    def registered_empty(
        self, shape: Sequence[int], dtype: np.dtype[Any], seconds: float
    ) -> Array | None:
        """Make an array in memory of NCCL's, registered by all ranks; None where NCCL has none."""
        member, problem, block = self._member(), "", None
        assert member is not None
        self.begin()
        what = f"empty({dtype}{list(shape)})"
        try:
            block = self._nccl.allocate(math.prod(shape) * dtype.itemsize, seconds)
        except NcclError as error:
            problem = str(error)
        told = [text.split("\n", 1) for text in _exchange(member, f"{what}\n{problem}", what)]
        _check_same(member, [text for text, _ in told])
        for rank, (_, text) in enumerate(told):
            if text:
                raise MemoryError(f"rank {rank} has no memory for {what} on its GPU: {text}")
        if block is None:
            return None
        made: Array = device.array(block, shape, dtype, self._nccl.device)
        return made

    # Messages -----------------------------------------------------------------------------------

    def send(
        self, source: Array, dest: int, tag: int, seconds: float, async_op: bool = False
    ) -> Message | None:
        """Send an array to another rank, when `begin` is called if it is to be done later."""
        self._check_message(source, dest, tag)
        span = _span(source)

        def call(comm: _core.nccl.Comm, stream: int) -> None:
            comm.send(span.address, span.nbytes, BYTES, dest, stream)

        what = f"send({_kind(source)}, dest={dest})"
        return self._message(what, call, source, seconds, async_op, {"to rank": dest})

    def recv(
        self, target: Array, source: int, tag: int, seconds: float, async_op: bool = False
    ) -> Message | None:
        """Receive an array from another rank; as `send`."""
        self._check_message(target, source, tag)
        span = _span(target)

        def call(comm: _core.nccl.Comm, stream: int) -> None:
            comm.recv(span.address, span.nbytes, BYTES, source, stream)

        what = f"recv({_kind(target)}, source={source})"
        return self._message(what, call, target, seconds, async_op, {"from rank": source})

    def _message(
        self, what: str, call: _Calls, array: Array, seconds: float, async_op: bool,
        others: dict[str, Any],
    ) -> Message | None:  # fmt: skip
        """Put a message off until `begin`, or make it at once with all that were put off."""

        def make(timed: bool) -> Message:
            message = Message(self, what, call, array, seconds, timed)
            with self._beginning:
                self._put_off.append(message)
            if not async_op:
                self.begin(False)
            return message

        name, gpu = what.partition("(")[0], self._nccl.device
        made: Message = observe.enqueue(self._member(), name, (array,), others, "NCCL", gpu, make)
        return made if async_op else None

    def begin(self, later: bool = True) -> None:
        """Give NCCL the messages that were put off, as one operation: they go on at the same time.

        Each by itself would wait for the one before it. NCCL buffers little, so that of two ranks that
        both send first none would come to receive.
        """
        with self._beginning:
            messages, self._put_off = self._put_off, []
            if not messages:
                return

            def call(comm: _core.nccl.Comm, stream: int) -> None:
                for message in messages:
                    message.call(comm, stream)

            try:
                operation = self._nccl.enqueue(
                    "; ".join([message.what for message in messages]), call,
                    [message.array for message in messages],
                    max([message.seconds for message in messages]), later,
                    any([message.timed for message in messages]),
                    [message.after for message in messages], counts=False,
                )  # fmt: skip
            except CollectiveError as error:
                for message in messages:
                    message.error = error
                raise
            for message in messages:
                message.operation = operation

    # The way of every call ----------------------------------------------------------------------

    def _call(
        self, what: str, call: _Calls, how: Any, kept: Sequence[Array | None],
        seconds: float, async_op: bool, count: int = 1, **others: Any,
    ) -> nccl.Operation | None:  # fmt: skip
        """Make a collective, once all ranks are found to call the same."""
        for array in kept:
            if array is not None and array_backend.device_of(array)[1] != self._nccl.device:
                raise ValueError(
                    f"the array lies on GPU {array_backend.device_of(array)[1]}, and rank {self.rank} "
                    f"makes its calls on GPU {self._nccl.device}: a rank has one GPU"
                )
        self.begin()
        what += self._registered(what, kept)
        if what not in self._agreed:
            self._agree(what)
        if not count or not any(array is not None and array.size for array in kept):
            call = _nothing
            if not async_op:
                self._nccl.skip()
                return None
        return self._enqueue(what, call, kept, seconds, async_op, others)

    def _agree(self, what: str) -> None:
        member = self._member()
        assert member is not None
        self._nccl.check()
        _check_same(member, _exchange(member, what, what))
        if len(self._agreed) >= _REMEMBERED:
            self._agreed.clear()
        self._agreed.add(what)

    def _registered(self, what: str, arrays: Sequence[Array | None]) -> str:
        """Say which arrays are registered memory: NCCL needs it to be the same on all ranks."""
        if not self._nccl.memory:
            return ""
        found = [array for array in arrays if array is not None and array.size]
        offsets = [self._nccl.memory.offset(array_backend.address(array)) for array in found]
        if all(offset is None for offset in offsets):
            return ""
        if None in offsets:
            places = ("elsewhere" if offset is None else "there" for offset in offsets)
            return f", partly in memory of empty(): {', '.join(places)}"
        if not what.startswith(("all_reduce", "all_gather", "reduce_scatter")):
            return ", in memory of empty()"
        # The whole arrays, of which in-place calls read or write parts, are at the same place of it.
        whole = max(array.size for array in found)
        at = [n for n, array in zip(offsets, found, strict=True) if array.size == whole]
        return f", in memory of empty() from byte {at} on"

    def _enqueue(
        self, what: str, call: _Calls, kept: Sequence[Array | None],
        seconds: float, async_op: bool, others: dict[str, Any],
    ) -> nccl.Operation | None:  # fmt: skip
        def make(timed: bool) -> nccl.Operation:
            return self._nccl.enqueue(what, call, kept, seconds, async_op, timed)

        name, gpu = what.partition("(")[0], self._nccl.device
        made = observe.enqueue(self._member(), name, kept, others, "NCCL", gpu, make)
        return made if async_op else None

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not among the {self.size} ranks")

    def _check_message(self, array: Array, rank: int, tag: int) -> None:
        self._check_rank(rank)
        if rank == self.rank:
            raise ValueError(
                "on a GPU no rank can send to itself: its stream would wait for itself"
            )
        if tag:
            raise ValueError("NCCL knows no tags: messages of GPU arrays have tag 0")
        if self._registered("message", [array]):
            raise ValueError(
                "messages cannot be in memory of empty(), which NCCL needs to be so on both sides: give "
                "a copy of the array"
            )

    # The end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what is under way, and leave."""
        with contextlib.suppress(CollectiveError):
            self.begin()
        self._nccl.close()
        self._watch.close()
        self._nccl.join()

    def finish(self) -> None:
        """Leave when the process ends, without waiting for anybody."""
        self._watch.abandon()
        self._nccl.finish()

    def abandon(self) -> None:
        """Let go of it in a forked child."""
        self._watch.abandon()
        self._nccl.abandon()


class Message:
    """A message that is put off, or under way; what `Work` waits for.

    Parameters
    ----------
    core : NcclCore
        Whose it is.
    what : str
        The call in words.
    call : callable
        Gives it to NCCL.
    array : array
        What is sent, or received into.
    seconds : float
        Its deadline.
    timed : bool
        Let the device note its times.
    """

    def __init__(
        self, core: NcclCore, what: str, call: _Calls, array: Array, seconds: float, timed: bool
    ) -> None:
        self._core = weakref.ref(core)
        self.what, self.call, self.array = what, call, array
        self.seconds, self.timed = seconds, timed
        self._made = time.monotonic()
        self.after = device.event(device.stream_on(array_backend.device_of(array)[1]))
        self.operation: nccl.Operation | None = None
        self.error: CollectiveError | None = None

    number = 0  # it is none of the calls that all ranks make

    def begin(self) -> None:
        """See that it is under way."""
        core = self._core()
        if self.operation is None and self.error is None and core is not None:
            with contextlib.suppress(CollectiveError):  # which this has, too
                core.begin()

    @property
    def ended(self) -> bool:
        """Whether it is over, or will never be."""
        return self.error is not None or (self.operation is not None and self.operation.ended)

    @property
    def times(self) -> tuple[float, float]:
        """When it began and ended."""
        if self.operation is None:
            return self._made, time.monotonic()
        return self.operation.times

    @property
    def done(self) -> bool:
        """Whether its result can be used on this thread's stream."""
        self.begin()
        return self.operation is None or self.operation.done

    def wait(self, timeout: float) -> bool:
        """Wait, as for other calls; from now on it is under way."""
        self.begin()
        return self.operation is None or self.operation.wait(timeout)

    def check(self) -> None:
        """Raise why it has failed, if it has."""
        if self.error is not None:
            raise copy.copy(self.error)
        if self.operation is None:
            raise AbortedError(f"{self.what}: its communicator is gone")
        self.operation.check()


def _nothing(comm: _core.nccl.Comm, stream: int) -> None:
    """Stand for a call of arrays without elements."""


def _kind(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


GpuCore: TypeAlias = CoreByAlgorithm | DeviceCore | StagedCore
