"""The engine for calls on GPU arrays with NCCL."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import math
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pycollective import _core, array_backend, nccl
from pycollective.comm.arrays import Array
from pycollective.comm.call import About, Call, GpuEngine, present
from pycollective.comm.member import Member
from pycollective.comm.watch import Watch
from pycollective.comm.work import DONE, Work
from pycollective.errors import (
    AbortedError,
    CollectiveError,
    MismatchError,
    NcclError,
    with_text,
)
from pycollective.nccl import device
from pycollective.nccl.types import BYTES, count_and_type, reduction_of

_log = logging.getLogger("pycollective")
_REMEMBERED = 4096
"""The largest number of compared calls to remember."""
_TEXT_BYTES = 400


def exchange(member: Member, text: str, what: str) -> list[str]:
    """Return the texts of all ranks; a long text is cut, and ends with a hash of the whole text.

    ``what`` is the call that an error names. Raise a `MismatchError` if another rank makes another
    call.
    """
    data, limit = text.encode(), _TEXT_BYTES - 4
    if len(data) > limit:
        mark = f"... (BLAKE2 of the whole: {hashlib.blake2b(data, digest_size=16).hexdigest()})"
        data = data[: limit - len(mark)] + mark.encode()
    row = np.frombuffer(struct.pack("=I", len(data)) + data.ljust(limit), np.uint8)
    try:
        # The label appears in the error of a rank that gives a host array.
        table = member._gathered(row.reshape(1, -1), member.timeout, "a GPU array")
    except MismatchError as error:
        raise with_text(
            error,
            f"rank {member.rank} gave a GPU array to a call ({what}), but another rank gave a host "
            "array or made another call. Put the arrays of a call on GPUs on all ranks, or on none. "
            f"{error}",
        ) from None
    raw = [part.tobytes() for part in table]
    return [part[4 : 4 + struct.unpack("=I", part[:4])[0]].decode(errors="replace") for part in raw]


def _check_same(member: Member, calls: Sequence[str]) -> None:
    """Fail the group and raise an error unless the texts of all ranks' calls are the same."""
    if len(set(calls)) > 1:
        text = "; ".join(f"rank {r} is in {call}" for r, call in enumerate(calls))
        error = MismatchError(f"the ranks' calls differ: {text}", calls=dict(enumerate(calls)))
        member._group.abort(str(error), ranks=error.ranks)
        raise error


#: A function that enqueues operations of a communicator of NCCL on a stream.
_Enqueue: TypeAlias = Callable[[_core.nccl.Comm, int], None]


class _Span(NamedTuple):
    """A range of memory: its address, and its length in bytes."""

    address: int
    nbytes: int


def _span(array: Array, begin: int = 0, count: int | None = None) -> _Span:
    """Return the memory of ``count`` elements of a contiguous array, from ``begin`` on."""
    item = array.dtype.itemsize
    items = array.size if count is None else count
    return _Span(array_backend.address(array) + begin * item, items * item)


class Nccl(GpuEngine):
    """The engine for one rank's calls on GPU arrays, with NCCL.

    A call returns when NCCL has enqueued it. Later work of this thread's stream sees its result, as with
    CuPy's operations. The ranks compare the first call of each kind (collective, shape, dtype,
    reduction) through the core.
    """

    def __init__(
        self,
        member: Member,
        library: _core.nccl.Library,
        unique_id: bytes,
        here: int,
        make_group: Callable[[], Member],
    ) -> None:
        self._member = weakref.ref(member)
        self.rank, self.size = member.rank, member.size
        self._library = library
        self._agreed: set[str] = set()
        self._deferred: list[Message] = []
        self._beginning = threading.Lock()
        self._watch = Watch(member, make_group)
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

    def about(self, call: Call) -> About:
        return About("NCCL", gpu=self._nccl.device)

    # Collectives --------------------------------------------------------------------------------

    def submit(self, call: Call) -> Work[None]:
        """Execute a call; a collective after all ranks have compared their calls."""
        rank = call.peer if call.is_message else call.root
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not among the {self.size} ranks")
        if call.is_message:
            return self._message(call)
        enqueue = self._enqueue_of(call)
        kept = [array for array in (call.source, call.target) if array is not None]
        self._check_devices(kept)
        self.begin()
        what = str(call)
        what += self._registered(what, kept)
        if what not in self._agreed:
            self._agree(what)
        if not call.count or not any(array.size for array in kept):
            enqueue = _nothing
            if not call.async_op:
                self._nccl.skip()
                return DONE
        made = self._nccl.enqueue(what, enqueue, kept, call.timeout, call.async_op, call.timed)
        return Work([made])

    def _check_devices(self, arrays: Sequence[Array]) -> None:
        for array in arrays:
            if array_backend.device_of(array)[1] != self._nccl.device:
                raise ValueError(
                    f"the array is on GPU {array_backend.device_of(array)[1]}, but rank {self.rank} "
                    f"uses GPU {self._nccl.device}: a rank has one GPU"
                )

    def _enqueue_of(self, call: Call) -> _Enqueue:
        """Return a function that enqueues a collective."""
        source, target, name = call.source, call.target, call.collective
        is_one_operation = name == "broadcast" or (name == "all_gather" and call.counts is None)
        if not call.op and not is_one_operation:
            sent = call.counts or [call.count] * self.size
            return self._messages(name, source, target, sent, call.out_counts or sent, call.root)
        source = present(source)
        send, recv = _span(source), _span(source if target is None else target)
        arguments = [send.nbytes, BYTES]
        if call.op:
            arguments = [*count_and_type(self._library, call.count, source.dtype)]
            arguments.append(reduction_of(call.op, source.dtype))
        if call.has_root:
            arguments.append(call.root)
        return lambda comm, stream: getattr(comm, name)(
            send.address, recv.address, *arguments, stream
        )

    def _messages(
        self, name: str, source: Array | None, target: Array | None, sent: Sequence[int],
        received: Sequence[int], root: int,
    ) -> _Enqueue:  # fmt: skip
        """Return a function that enqueues a move as sends and receives, which NCCL joins.

        ``sent`` and ``received`` are numbers of elements for each rank. Empty parts, and a part that is
        already in its place, are not sent.
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

        def enqueue(comm: _core.nccl.Comm, stream: int) -> None:
            for rank, span in outgoing:
                comm.send(span.address, span.nbytes, BYTES, rank, stream)
            for rank, span in incoming:
                comm.recv(span.address, span.nbytes, BYTES, rank, stream)

        return enqueue

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any], seconds: float) -> Array | None:
        """Make an array in NCCL's memory, registered by all ranks; None if NCCL is too old."""
        member, problem, block = self._member(), "", None
        assert member is not None
        self.begin()
        what = f"empty({dtype}{list(shape)})"
        try:
            block = self._nccl.allocate(math.prod(shape) * dtype.itemsize, seconds)
        except NcclError as error:
            problem = str(error)
        texts = [text.split("\n", 1) for text in exchange(member, f"{what}\n{problem}", what)]
        _check_same(member, [call for call, _ in texts])
        for rank, (_, failure) in enumerate(texts):
            if failure:
                raise MemoryError(f"rank {rank} has no memory for {what} on its GPU: {failure}")
        if block is None:
            return None
        made: Array = device.array(block, shape, dtype, self._nccl.device)
        return made

    # Messages -----------------------------------------------------------------------------------

    def _message(self, call: Call) -> Work[None]:
        """Defer a message until `begin`; a blocking message begins all deferred messages."""
        array = present(call.array)
        self._check_message(array, call)
        span, peer = _span(array), call.peer

        def enqueue(comm: _core.nccl.Comm, stream: int) -> None:
            move = comm.send if call.collective == "send" else comm.recv
            move(span.address, span.nbytes, BYTES, peer, stream)

        message = Message(self, str(call), enqueue, array, call.timeout, call.timed)
        with self._beginning:
            self._deferred.append(message)
        if not call.async_op:
            self.begin(False)
        return Work([message])

    def begin(self, later: bool = True) -> None:
        """Enqueue all deferred messages as one operation of NCCL, which runs them concurrently.

        Separate operations would run one after the other. NCCL buffers little, so that two ranks that
        both send first would wait for each other.
        """
        with self._beginning:
            messages, self._deferred = self._deferred, []
            if not messages:
                return

            def enqueue(comm: _core.nccl.Comm, stream: int) -> None:
                for message in messages:
                    message.enqueue(comm, stream)

            try:
                operation = self._nccl.enqueue(
                    "; ".join([message.what for message in messages]), enqueue,
                    [message.array for message in messages],
                    max([message.seconds for message in messages]), later,
                    any([message.timed for message in messages]),
                    [message.after for message in messages], counts=False,
                )  # fmt: skip
            except BaseException as error:
                for message in messages:
                    message.error = (
                        error
                        if isinstance(error, Exception)
                        else AbortedError(f"{message.what}: interrupted")
                    )
                raise
            for message in messages:
                message.operation = operation

    def _agree(self, what: str) -> None:
        member = self._member()
        assert member is not None
        self._nccl.check()
        _check_same(member, exchange(member, what, what))
        if len(self._agreed) >= _REMEMBERED:
            self._agreed.clear()
        self._agreed.add(what)

    def _registered(self, what: str, arrays: Sequence[Array]) -> str:
        """Return a text about arrays in registered memory, on which all ranks must agree."""
        if not self._nccl.memory:
            return ""
        found = [array for array in arrays if array.size]
        offsets = [self._nccl.memory.offset(array_backend.address(array)) for array in found]
        if all(offset is None for offset in offsets):
            return ""
        if None in offsets:
            places = ("elsewhere" if offset is None else "there" for offset in offsets)
            return f", partly in memory of empty(): {', '.join(places)}"
        if not what.startswith(("all_reduce", "all_gather", "reduce_scatter")):
            return ", in memory of empty()"
        # In-place calls use parts of larger arrays: the offsets of the largest arrays must agree.
        whole = max(array.size for array in found)
        at = [n for n, array in zip(offsets, found, strict=True) if array.size == whole]
        return f", in memory of empty() from byte {at} on"

    def _check_message(self, array: Array, call: Call) -> None:
        self._check_devices([array])
        if call.peer == self.rank:
            raise ValueError(
                "a rank cannot send a GPU array to itself: its stream would wait for itself"
            )
        if call.tag:
            raise ValueError("NCCL has no tags: use tag 0 for messages of GPU arrays")
        if self._registered("message", [array]):
            raise ValueError(
                "a message needs ordinary memory, not that of empty(), on both ranks: give a copy"
            )

    # The end ------------------------------------------------------------------------------------

    def close(self) -> None:
        with contextlib.suppress(CollectiveError):
            self.begin()
        self._nccl.close()
        self._watch.close()
        self._nccl.join()

    def finish(self) -> None:
        self._watch.abandon()
        self._nccl.finish()

    def abandon(self) -> None:
        self._watch.abandon()
        self._nccl.abandon()


class Message(nccl.DeviceTask):
    """A deferred or running message; ``enqueue`` enqueues its operation of NCCL."""

    def __init__(
        self, engine: Nccl, what: str, enqueue: _Enqueue, array: Array, seconds: float, timed: bool
    ) -> None:
        here = array_backend.device_of(array)[1]
        super().__init__(here, seconds)
        self._engine = weakref.ref(engine)
        self.what, self.enqueue, self.array, self.timed = what, enqueue, array, timed
        with device.on(here):
            self.after = device.event(device.present_stream())
        self.operation: nccl.Operation | None = None
        self.error: Exception | None = None

    def start(self) -> None:
        """Begin the message if it is deferred."""
        engine = self._engine()
        if self.operation is None and self.error is None and engine is not None:
            with contextlib.suppress(Exception):  # `begin` stores the error in this message
                engine.begin()

    @property
    def ended(self) -> bool:
        """True if the message has ended, or never will."""
        return self.error is not None or (self.operation is not None and self.operation.ended)

    def device_times(self) -> tuple[float, float] | None:
        """Return the begin and the end of the message, in seconds of `time.monotonic`."""
        return None if self.operation is None else self.operation.times

    @property
    def done(self) -> bool:
        """True if this thread's stream can use the result."""
        self.start()
        return self.operation is None or self.operation.done

    def wait(self, timeout: float) -> bool:
        """Begin the message if it is deferred, and wait as for other calls."""
        self.start()
        return self.operation is None or self.operation.wait(timeout)

    def check(self) -> None:
        """Raise the error of the message, if there is one."""
        if self.error is not None:
            raise copy.copy(self.error)
        if self.operation is None:
            raise AbortedError(f"{self.what}: its communicator was closed")
        self.operation.check()


def _nothing(comm: _core.nccl.Comm, stream: int) -> None:
    """Enqueue nothing, for arrays without elements."""
