"""Calls on GPU arrays by the project's own executor, for ranks that are threads of one process.

Each rank brings its arrays and its stream to a meeting; the last one to come enqueues the call for all
of them. So schedules run between GPUs, and between ranks that share one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pycollective import _core, array_backend, observe
from pycollective.communicator.arrays import Array
from pycollective.communicator.device_messages import DeviceMessages, Kept, Parcels
from pycollective.communicator.split import Threads
from pycollective.errors import CollectiveError
from pycollective.nccl import device

if TYPE_CHECKING:
    from pycollective.communicator.member import Member

__all__ = ["CoreByAlgorithm", "DeviceCore", "is_possible", "runtime", "why_not"]

_log = logging.getLogger("pycollective")

_PAUSE = 50e-6
_CLOSING_SECONDS = 60.0
"""For devices to come to the end of calls that all ranks have made."""


@functools.cache
def runtime() -> _core.device.Runtime | None:
    """Return what runs calls on this process's GPUs; None where the core has no CUDA part, or no GPU."""
    used = _core.device.cuda_runtime()
    return None if used is None or _core.cuda.device_count()[0] == 0 else used


def is_possible(member: Member) -> bool:
    """Whether a rank's calls on GPU arrays can be made in this way."""
    return isinstance(member._group, _core.ThreadGroup) and runtime() is not None


def why_not(member: Member) -> str:
    """Return why not, in words."""
    if not isinstance(member._group, _core.ThreadGroup):
        return "the device executor is for ranks that are threads of one process"
    return f"the device executor is not there: {_core.cuda.device_count()[1]}"


class DeviceCore:
    """A rank's calls on GPU arrays, on the streams of their devices.

    A call returns when all ranks have come to it: what this thread's stream is given afterwards finds
    its result.

    Parameters
    ----------
    member : Member
        The rank.
    """

    def __init__(self, member: Member) -> None:
        group, used = member._group, runtime()
        assert isinstance(member._family, Threads) and isinstance(group, _core.ThreadGroup)
        assert used is not None
        meeting, parcels = member._family.shared(
            lambda: (_core.device.CallMatcher(group, used), Parcels())
        )
        core = getattr(member._core, "plain", member._core)  # where calls are traced, it is behind
        self._caller = _core.device.Caller(core, meeting)
        self._member = weakref.ref(member)
        self._own: dict[int, Any] = {}  # a stream of each device
        self._clocks: dict[int, _Clock] = {}
        # Arrays of calls, and of messages, that devices may still work on.
        self._pending: deque[tuple[_core.device.Operation, Any]] = deque()
        self._kept: Kept = deque()
        self._messages = DeviceMessages(member, used, parcels, self._kept)
        self._dropped = weakref.finalize(self, _drop, self._caller, self._pending, self._kept)
        self._dropped.atexit = False

    # Reductions ---------------------------------------------------------------------------------

    def all_reduce(
        self, source: Array, target: Array, op: str, how: Any, reproducible: bool,
        seconds: float, async_op: bool = False, shape: Sequence[int] | None = None,
    ) -> Operation | None:  # fmt: skip
        """Reduce to all ranks, who agree on ``shape`` where the source has been made of others."""
        return self._call(
            "all_reduce", source, target, source.size, source.shape if shape is None else shape,
            how, seconds, async_op, op=op, reproducible=reproducible,
        )  # fmt: skip

    def reduce(
        self, source: Array, target: Array | None, op: str, root: int, how: Any,
        seconds: float, async_op: bool = False,
    ) -> Operation | None:  # fmt: skip
        """Reduce to the root."""
        return self._call(
            "reduce", source, target, source.size, source.shape, how, seconds, async_op,
            op=op, root=root,
        )  # fmt: skip

    def reduce_scatter(
        self, source: Array, target: Array, op: str, how: Any, seconds: float,
        async_op: bool = False,
    ) -> Operation | None:  # fmt: skip
        """Reduce, and give each rank its part."""
        return self._call(
            "reduce_scatter", source, target, target.size, source.shape, how, seconds, async_op,
            op=op,
        )  # fmt: skip

    # Moves --------------------------------------------------------------------------------------

    def broadcast(
        self, source: Array, target: Array, root: int, how: Any, seconds: float,
        async_op: bool = False,
    ) -> Operation | None:  # fmt: skip
        """Give everyone the root's array."""
        return self._call(
            "broadcast", source, target, source.size, source.shape, how, seconds, async_op,
            root=root,
        )  # fmt: skip

    def move_parts(
        self, which: Any, source: Array | None, target: Array | None, count: int,
        shape: Sequence[int], root: int, how: Any, seconds: float, async_op: bool = False,
    ) -> Operation | None:  # fmt: skip
        """Move equal parts of ``count`` elements."""
        return self._call(
            which.name, source, target, count, shape, how, seconds, async_op, root=root
        )

    def move_ragged(
        self, which: Any, source: Array | None, target: Array | None, counts: Sequence[int],
        shape: Sequence[int], root: int, how: Any, seconds: float, async_op: bool = False,
    ) -> Operation | None:  # fmt: skip
        """Move parts of several lengths."""
        return self._call(
            which.name, source, target, max(counts), shape, how, seconds, async_op,
            root=root, sent=counts, received=counts,
        )  # fmt: skip

    def all_to_all_ragged(
        self, source: Array, target: Array, sent: Sequence[int], received: Sequence[int],
        shape: Sequence[int], seconds: float, async_op: bool = False,
    ) -> Operation | None:  # fmt: skip
        """Move parts of several lengths from all to all."""
        # One that is neither sent nor received here may be another rank's: the call is not empty.
        return self._call(
            "all_to_all", source, target, max(*sent, *received, 1), shape, "direct", seconds,
            async_op, sent=sent, received=received,
        )  # fmt: skip

    # Messages -----------------------------------------------------------------------------------

    def send(self, *args: Any) -> Any:
        """Send an array to another rank."""
        self._forget()
        return self._messages.send(*args)

    def recv(self, *args: Any) -> Any:
        """Receive an array from another rank."""
        self._forget()
        return self._messages.recv(*args)

    # The way of every call ----------------------------------------------------------------------

    def _call(
        self, name: str, source: Array | None, target: Array | None, count: int,
        shape: Sequence[int], how: Any, seconds: float, async_op: bool, *,
        op: str | None = None, root: int = 0, reproducible: bool = False,
        sent: Sequence[int] | None = None, received: Sequence[int] | None = None,
    ) -> Operation | None:  # fmt: skip
        array = source if source is not None else target
        assert array is not None
        here = array_backend.device_of(array)[1]
        with device.on(here):
            present = device.present_stream()
        stream, after = present, None
        # The last rank enqueues for all, in its thread.
        if async_op or present.ptr == device.PER_THREAD:
            stream, after = self._stream_of(here), present.ptr
        self._forget()
        operation = _core.device.Operation()
        self._pending.append((operation, (source, target)))

        def make(timed: bool) -> Operation:
            clock = self._clock_of(here) if timed else None
            made = Operation(self._caller, operation, here, seconds, clock)
            self._caller.call(
                operation, _core.Collective.__members__[name],
                0 if source is None else array_backend.address(source),
                0 if target is None else array_backend.address(target),
                count, list(shape), array.dtype, op, root, how, reproducible,
                sent, received, here, stream.ptr, after, async_op, timed, seconds,
            )  # fmt: skip
            if after is not None and not async_op:
                self._caller.order(operation, after)
            return made

        made = observe.enqueue(
            self._member(), name, (source, target), _about(name, op, root), "device executor", here,
            make, _algorithm(how, reproducible),
        )  # fmt: skip
        return made if async_op else None

    def _clock_of(self, number: int) -> _Clock:
        if number not in self._clocks:
            runtime_here = runtime()
            assert runtime_here is not None
            self._clocks[number] = _Clock(runtime_here, number)
        return self._clocks[number]

    def _stream_of(self, number: int) -> Any:
        """Return this rank's own stream of a device."""
        if number not in self._own:
            with device.on(number):
                self._own[number] = device.stream()
        return self._own[number]

    def _forget(self) -> None:
        """Let go of the arrays of calls that are over."""
        while self._pending and _over(self._caller, self._pending[0][0]):
            self._pending.popleft()
        _forget_of(self._kept)
        _forget_of(_left)

    # The end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what is under way, each call until its deadline, and leave."""
        with contextlib.suppress(CollectiveError):
            for operation, _ in self._pending:
                self._caller.finish(operation)
            until = time.monotonic() + _CLOSING_SECONDS
            while (self._pending or self._kept) and time.monotonic() < until:
                self._forget()
                time.sleep(_PAUSE)
        self.finish()

    def finish(self) -> None:
        """Leave when the process ends, without waiting for anybody."""
        self._dropped()

    def abandon(self) -> None:
        """Let go of it in a forked child, where CUDA must not be called."""
        self._dropped.detach()


_left: Kept = deque()
"""What ranks that are gone have left, on which devices may still work."""


def _forget_of(kept: Kept) -> None:
    """Let go of arrays that no device works on any more."""
    for _ in range(len(kept)):
        with contextlib.suppress(IndexError):  # another thread was faster
            is_over, arrays = kept.popleft()
            if not _is_true_or_broken(is_over):
                kept.append((is_over, arrays))


def _is_true_or_broken(is_over: Callable[[], bool]) -> bool:
    """Return whether something is over; a device that has failed does nothing any more."""
    try:
        return is_over()
    except RuntimeError:
        return True


def _over(caller: _core.device.Caller, operation: _core.device.Operation) -> bool:
    """Return whether nobody reads or writes a call's arrays any more.

    A device that has failed does nothing any more. Its group has failed by that, which those hear who
    call something in it, and not whoever happens to ask here.
    """
    try:
        return caller.over(operation)
    except CollectiveError:
        return True


def _drop(caller: _core.device.Caller, pending: deque[Any], kept: Kept) -> None:
    caller.leave()
    for operation, arrays in pending:
        if not _over(caller, operation):
            _left.append((partial(_over, caller, operation), arrays))
    pending.clear()
    _forget_of(kept)
    _left.extend(kept)
    kept.clear()


def _about(name: str, op: str | None, root: int) -> dict[str, Any]:
    """Return what else is told of a call."""
    about: dict[str, Any] = {} if op is None else {"op": op}
    if name in ("reduce", "broadcast", "gather", "scatter"):
        about["root"] = root
    return about


def _algorithm(how: Any, reproducible: bool) -> tuple[str, str]:
    """Return what is told of how a call is made."""
    if reproducible:
        return "direct", "for reproducible=True"
    if not isinstance(how, str):
        return how.name, "one's own"
    return ("", "") if how == "auto" else (how, "")


class _Clock:
    """Says when marks of a device happened, as `time.monotonic` would have."""

    def __init__(self, used: _core.device.Runtime, number: int) -> None:
        with device.on(number):
            self.first = used.mark(number, device.stream().ptr, timed=True)
        while not used.over(self.first):  # its stream has been given nothing
            time.sleep(_PAUSE)
        self.begin = time.monotonic()


class Operation:
    """A call that is made; what `Work` waits for."""

    def __init__(
        self,
        caller: _core.device.Caller,
        made: _core.device.Operation,
        on: int,
        seconds: float,
        clock: _Clock | None = None,
    ) -> None:
        self._caller = caller
        self._made = made
        self._device = on
        self._seconds = seconds
        self._clock = clock
        self._begin = time.monotonic()
        self._ordered = False

    @property
    def number(self) -> int:
        """Which of the rank's calls it is."""
        return self._made.number

    @property
    def ended(self) -> bool:
        """Whether the device is done with it, or will never be."""
        return _over(self._caller, self._made)

    @property
    def times(self) -> tuple[float, float]:
        """When its stream came to it and was done with it, as `time.monotonic` would have said it.

        Of one that was not timed, or that the device has not ended: when it was made, and now.
        """
        with contextlib.suppress(CollectiveError):
            found = (
                None if self._clock is None else self._caller.times(self._made, self._clock.first)
            )
            if found is not None and self._clock is not None:
                return self._clock.begin + found[0], self._clock.begin + found[1]
        return self._begin, time.monotonic()

    @property
    def done(self) -> bool:
        """Whether its result can be used on this thread's stream, or will never be there."""
        return self._ordered or _over(self._caller, self._made)

    def wait(self, timeout: float) -> bool:
        """Wait on the host for so many seconds; for ever: let this thread's stream wait.

        In either case the host waits until all ranks have come.
        """
        if timeout >= self._seconds:
            self._caller.finish(self._made)
            with device.on(self._device):
                self._caller.order(self._made, device.present_stream().ptr)
            self._ordered = True
            return True
        until = time.monotonic() + timeout
        while not self.done:
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE)
        return True

    def check(self) -> None:
        """Raise why the group has failed, if it has before all ranks had come, or the device."""
        self._caller.finish(self._made)
        self._caller.over(self._made)


class CoreByAlgorithm:
    """A rank's calls on GPU arrays: by NCCL, which has algorithms of its own, unless one is named.

    Parameters
    ----------
    by_nccl : NcclCore
        Makes the calls of which no algorithm is named, or the one that is the method's default.
    scheduled : DeviceCore or StagedCore
        Makes the others.
    member : Member
        The rank.
    """

    #: Where the algorithm stands among the arguments, and what it is if none is named.
    _METHODS: ClassVar = {
        "all_reduce": (3, ()), "reduce": (4, ("tree",)), "reduce_scatter": (3, ()),
        "broadcast": (3, ()), "move_parts": (6, ("direct",)), "move_ragged": (6, ("direct",)),
    }  # fmt: skip

    def __init__(self, by_nccl: Any, scheduled: Any, member: Member) -> None:
        self._nccl_core = by_nccl
        self._scheduled = scheduled
        says = [] if isinstance(scheduled, DeviceCore) or member.rank else [why_not(member)]
        for name, (place, defaults) in self._METHODS.items():
            methods = getattr(by_nccl, name), getattr(scheduled, name)
            setattr(self, name, _choosing(*methods, place, ("auto", *defaults), says))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nccl_core, name)

    def close(self) -> None:
        """Wait for what is under way, and leave."""
        self._scheduled.close()
        self._nccl_core.close()

    def finish(self) -> None:
        """Leave when the process ends, without waiting for anybody."""
        self._scheduled.finish()
        self._nccl_core.finish()

    def abandon(self) -> None:
        """Let go of it in a forked child."""
        self._scheduled.abandon()
        self._nccl_core.abandon()


def _choosing(
    by_nccl: Callable[..., Any],
    scheduled: Callable[..., Any],
    place: int,
    defaults: Sequence[str],
    says: list[str],
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        how = args[place]
        if isinstance(how, str) and how in defaults:
            return by_nccl(*args)
        if says:
            _log.warning(
                "algorithm %r of GPU arrays goes over the host's memory, which is slow: %s",
                how if isinstance(how, str) else how.name,
                says.pop(),
            )
        return scheduled(*args)

    return call
