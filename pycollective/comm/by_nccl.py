"""Calls on GPU arrays by NCCL."""

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
from pycollective.comm.call import About, Call, present
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
"""Kinds of calls that are known to be the same on all ranks."""
_WORDS = 400


def exchange(member: Member, text: str, what: str) -> list[str]:
    """Return the texts of all ranks, by the core; of a long text its beginning and its hash."""
    words, room = text.encode(), _WORDS - 4
    if len(words) > room:
        mark = f"... (BLAKE2 of the whole: {hashlib.blake2b(words, digest_size=16).hexdigest()})"
        words = words[: room - len(mark)] + mark.encode()
    row = np.frombuffer(struct.pack("=I", len(words)) + words.ljust(room), np.uint8)
    try:
        # The label tells a rank with a host array what this one has.
        table = member._gathered(row.reshape(1, -1), member.timeout, "a GPU array")
    except MismatchError as error:
        raise with_text(
            error,
            f"rank {member.rank} has given a GPU array, to {what}, and another rank a host array or "
            f"another call: the arrays of one call must all be on GPUs, or all on the host. {error}",
        ) from None
    raw = [part.tobytes() for part in table]
    return [part[4 : 4 + struct.unpack("=I", part[:4])[0]].decode(errors="replace") for part in raw]


def _check_same(member: Member, told: Sequence[str]) -> None:
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


class Nccl:
    """A rank's calls on GPU arrays, by NCCL.

    A call returns when NCCL has it: what this thread's stream is given afterwards finds its result, as
    with CuPy's own operations. The first call of each kind (collective, shape, dtype, reduction) is
    compared between the ranks, through the core.
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
        self._put_off: list[Message] = []
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
        """Return the words for traces of a call."""
        return About("NCCL", gpu=self._nccl.device)

    # Collectives --------------------------------------------------------------------------------

    def submit(self, call: Call) -> Work[None]:
        """Carry a call out; a collective once all ranks are found to call the same."""
        rank = call.peer if call.is_message else call.root
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not among the {self.size} ranks")
        if call.is_message:
            return self._message(call)
        give = self._calls_of(call)
        kept = [array for array in (call.source, call.target) if array is not None]
        for array in kept:
            if array_backend.device_of(array)[1] != self._nccl.device:
                raise ValueError(
                    f"the array lies on GPU {array_backend.device_of(array)[1]}, and rank {self.rank} "
                    f"makes its calls on GPU {self._nccl.device}: a rank has one GPU"
                )
        self.begin()
        what = str(call)
        what += self._registered(what, kept)
        if what not in self._agreed:
            self._agree(what)
        if not call.count or not any(array.size for array in kept):
            give = _nothing
            if not call.async_op:
                self._nccl.skip()
                return DONE
        made = self._nccl.enqueue(what, give, kept, call.timeout, call.async_op, call.timed)
        return Work([made])

    def _calls_of(self, call: Call) -> _Calls:
        """Return a function that gives NCCL a collective."""
        source, target, name = call.source, call.target, call.collective
        is_one_operation = name == "broadcast" or (name == "all_gather" and call.counts is None)
        if not call.op and not is_one_operation:
            sent = call.counts or [call.count] * self.size
            return self._messages(name, source, target, sent, call.out_counts or sent, call.root)
        source = present(source)
        send, recv = _span(source), _span(source if target is None else target)
        what = [send.nbytes, BYTES]
        if call.op:
            what = [*count_and_type(self._library, call.count, source.dtype)]
            what.append(reduction_of(call.op, source.dtype))
        if call.has_root:
            what.append(call.root)
        return lambda comm, stream: getattr(comm, name)(send.address, recv.address, *what, stream)

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

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any], seconds: float) -> Array | None:
        """Make an array in memory of NCCL's, registered by all ranks; None where NCCL has none."""
        member, problem, block = self._member(), "", None
        assert member is not None
        self.begin()
        what = f"empty({dtype}{list(shape)})"
        try:
            block = self._nccl.allocate(math.prod(shape) * dtype.itemsize, seconds)
        except NcclError as error:
            problem = str(error)
        told = [text.split("\n", 1) for text in exchange(member, f"{what}\n{problem}", what)]
        _check_same(member, [text for text, _ in told])
        for rank, (_, text) in enumerate(told):
            if text:
                raise MemoryError(f"rank {rank} has no memory for {what} on its GPU: {text}")
        if block is None:
            return None
        made: Array = device.array(block, shape, dtype, self._nccl.device)
        return made

    # Messages -----------------------------------------------------------------------------------

    def _message(self, call: Call) -> Work[None]:
        """Put a message off until `begin`, or make it at once with all that were put off."""
        array = present(call.array)
        self._check_message(array, call)
        span, peer = _span(array), call.peer

        def give(comm: _core.nccl.Comm, stream: int) -> None:
            move = comm.send if call.collective == "send" else comm.recv
            move(span.address, span.nbytes, BYTES, peer, stream)

        message = Message(self, str(call), give, array, call.timeout, call.timed)
        with self._beginning:
            self._put_off.append(message)
        if not call.async_op:
            self.begin(False)
        return Work([message])

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

    def _agree(self, what: str) -> None:
        member = self._member()
        assert member is not None
        self._nccl.check()
        _check_same(member, exchange(member, what, what))
        if len(self._agreed) >= _REMEMBERED:
            self._agreed.clear()
        self._agreed.add(what)

    def _registered(self, what: str, arrays: Sequence[Array]) -> str:
        """Return words for arrays in registered memory, which must be the same on all ranks."""
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
        # The whole arrays, of which in-place calls read or write parts, are at the same place of it.
        whole = max(array.size for array in found)
        at = [n for n, array in zip(offsets, found, strict=True) if array.size == whole]
        return f", in memory of empty() from byte {at} on"

    def _check_message(self, array: Array, call: Call) -> None:
        if call.peer == self.rank:
            raise ValueError(
                "on a GPU no rank can send to itself: its stream would wait for itself"
            )
        if call.tag:
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


class Message(nccl.DeviceTask):
    """A message that is put off, or under way; ``call`` gives it to NCCL."""

    def __init__(
        self, engine: Nccl, what: str, call: _Calls, array: Array, seconds: float, timed: bool
    ) -> None:
        here = array_backend.device_of(array)[1]
        super().__init__(here, seconds)
        self._engine = weakref.ref(engine)
        self.what, self.call, self.array, self.timed = what, call, array, timed
        self.after = device.event(device.stream_on(here))
        self.operation: nccl.Operation | None = None
        self.error: CollectiveError | None = None

    def start(self) -> None:
        """See that it is under way."""
        engine = self._engine()
        if self.operation is None and self.error is None and engine is not None:
            with contextlib.suppress(CollectiveError):  # which this has, too
                engine.begin()

    @property
    def ended(self) -> bool:
        """True if it is over, or will never be."""
        return self.error is not None or (self.operation is not None and self.operation.ended)

    def device_times(self) -> tuple[float, float] | None:
        """Return when it began and ended."""
        return None if self.operation is None else self.operation.times

    @property
    def done(self) -> bool:
        """True if its result can be used on this thread's stream."""
        self.start()
        return self.operation is None or self.operation.done

    def wait(self, timeout: float) -> bool:
        """Wait, as for other calls; from now on it is under way."""
        self.start()
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
