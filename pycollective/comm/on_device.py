"""The device executor: schedules on the streams of GPUs, for ranks that are threads of one process.

Each rank gives its arrays and its stream to a matcher, and the last rank enqueues the call for all
ranks. Ranks may share a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from pycollective import _core, array_backend
from pycollective.comm.call import About, Call, GpuEngine, present
from pycollective.comm.device_messages import DeviceBuffers, DeviceMessages, Kept
from pycollective.comm.host import HostCore
from pycollective.comm.member import Member
from pycollective.comm.split import Threads
from pycollective.comm.work import Work
from pycollective.errors import CollectiveError
from pycollective.nccl import DeviceTask, device

_PAUSE = 50e-6
"""Seconds between polls of a device."""
_CLOSING_SECONDS = 60.0
"""Seconds for devices to finish calls that all ranks have made."""


@functools.cache
def runtime() -> _core.device.Runtime | None:
    """Return the CUDA runtime; None if the core was built without CUDA, or if there is no GPU."""
    found = _core.device.cuda_runtime()
    return None if found is None or _core.cuda.device_count()[0] == 0 else found


def is_possible(member: Member) -> bool:
    """Return True if the device executor can execute a rank's calls."""
    return isinstance(member._group, _core.ThreadGroup) and runtime() is not None


def why_not(member: Member) -> str:
    """Return the reason why `is_possible` is False."""
    if not isinstance(member._group, _core.ThreadGroup):
        return "the device executor needs ranks that are threads of one process"
    return f"the device executor is not available: {_core.cuda.device_count()[1]}"


class DeviceExecutor(GpuEngine):
    """The engine for one rank's calls on GPU arrays, on the streams of their devices.

    A call returns when all ranks have joined it. Later work of this thread's stream sees its result.
    """

    def __init__(self, member: Member) -> None:
        group, host, cuda = member._group, member._core, runtime()
        assert isinstance(member._factory, Threads) and isinstance(group, _core.ThreadGroup)
        assert isinstance(host, HostCore) and cuda is not None
        matcher, buffers = member._factory.shared(
            lambda: (_core.device.CallMatcher(group, cuda), DeviceBuffers())
        )
        self._runtime = cuda
        self._caller = _core.device.Caller(host, matcher)
        self._streams: dict[int, Any] = {}  # this rank's own, by device
        self._clocks: dict[int, _Clock] = {}
        # Arrays of calls and of messages that devices may still use.
        self._pending: deque[tuple[_core.device.Operation, Any]] = deque()
        self._kept: Kept = deque()
        self._messages = DeviceMessages(member, cuda, buffers, self._kept)
        self._dropped = weakref.finalize(self, _drop, self._caller, self._pending, self._kept)
        self._dropped.atexit = False

    def about(self, call: Call) -> About:
        if call.is_message:
            return About("device copies")
        gpu, how = array_backend.device_of(call.array)[1], call.algorithm
        if call.reproducible:
            return About("device executor", "direct", "for reproducible=True", gpu)
        if not isinstance(how, str):
            return About("device executor", how.name, "the program's own", gpu)
        if call.out_counts is not None:
            how = "direct"
        return About("device executor", "" if how == "auto" else how, "", gpu)

    def submit(self, call: Call) -> Work[None]:
        self._forget()
        if call.is_message:
            return self._messages.submit(call)
        array = present(call.array)
        here = array_backend.device_of(array)[1]
        with device.on(here):
            present_stream = device.present_stream()
        stream, after = present_stream, None
        # The last rank's thread enqueues for all ranks, and its per-thread stream is another one.
        if call.async_op or present_stream.ptr == device.PER_THREAD:
            stream, after = self._stream_of(here), present_stream.ptr
        operation = _core.device.Operation()
        self._pending.append((operation, (call.source, call.target)))
        clock = self._clock_of(here) if call.timed else None
        task = Operation(self._caller, operation, here, call.timeout, clock)
        self._caller.call(
            operation, _core.Collective.__members__[call.collective],
            0 if call.source is None else array_backend.address(call.source),
            0 if call.target is None else array_backend.address(call.target),
            call.count, list(array.shape if call.shape is None else call.shape), array.dtype,
            call.op or None, call.root, "direct" if call.out_counts else call.algorithm,
            call.reproducible, call.counts, call.out_counts or call.counts, here, stream.ptr,
            after, call.async_op, call.timed, call.timeout,
        )  # fmt: skip
        if after is not None and not call.async_op:
            self._caller.order(operation, after)
        return Work([task])

    def _clock_of(self, number: int) -> _Clock:
        if number not in self._clocks:
            self._clocks[number] = _Clock(self._runtime, number)
        return self._clocks[number]

    def _stream_of(self, number: int) -> Any:
        """Return this rank's own stream of a device."""
        if number not in self._streams:
            with device.on(number):
                self._streams[number] = device.stream()
        return self._streams[number]

    def _forget(self) -> None:
        """Release the arrays of finished calls."""
        while self._pending and _over(self._caller, self._pending[0][0]):
            self._pending.popleft()
        _forget_of(self._kept)
        _forget_of(_left)

    # The end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for unfinished calls, each until its deadline, and release the engine."""
        with contextlib.suppress(CollectiveError):
            for operation, _ in self._pending:
                self._caller.finish(operation)
            until = time.monotonic() + _CLOSING_SECONDS
            while (self._pending or self._kept) and time.monotonic() < until:
                self._forget()
                time.sleep(_PAUSE)
        self.finish()

    def finish(self) -> None:
        self._dropped()

    def abandon(self) -> None:
        """Release the engine in a forked child, which must not call CUDA."""
        self._dropped.detach()


_left: Kept = deque()
"""Arrays of closed engines that devices may still use."""


def _forget_of(kept: Kept) -> None:
    """Release arrays that no device uses."""
    for _ in range(len(kept)):
        with contextlib.suppress(IndexError):  # another thread emptied the queue
            is_over, arrays = kept.popleft()
            if not _is_unused(is_over):
                kept.append((is_over, arrays))


def _is_unused(is_over: Callable[[], bool]) -> bool:
    """Return True if no device uses an array; a failed device uses no array."""
    try:
        return is_over()
    except RuntimeError:
        return True


def _over(caller: _core.device.Caller, operation: _core.device.Operation) -> bool:
    """Return True if no device uses the arrays of a call; a failed device uses no array.

    Calls of the group raise the error of a failed device. This function does not.
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


class _Clock:
    """The difference between a device's clock and `time.monotonic`."""

    def __init__(self, cuda: _core.device.Runtime, number: int) -> None:
        with device.on(number):
            stream = device.stream()
            self.first = cuda.mark(number, stream.ptr, timed=True)
        while not cuda.over(self.first):  # soon, since the stream is empty
            time.sleep(_PAUSE)
        self.begin = time.monotonic()


class Operation(DeviceTask):
    """A call that this rank has given to the matcher."""

    def __init__(
        self,
        caller: _core.device.Caller,
        operation: _core.device.Operation,
        on: int,
        seconds: float,
        clock: _Clock | None = None,
    ) -> None:
        super().__init__(on, seconds)
        self._caller = caller
        self._operation = operation
        self._clock = clock

    @property
    def number(self) -> int:  # type: ignore[override]  # known when all ranks have joined
        """The number of the call among the rank's calls."""
        return self._operation.number

    @property
    def ended(self) -> bool:
        """True if the device has finished the call, or never will."""
        return _over(self._caller, self._operation)

    def device_times(self) -> tuple[float, float] | None:
        """Return the times at which the stream began and ended the call."""
        if self._clock is None:
            return None
        with contextlib.suppress(CollectiveError):
            found = self._caller.times(self._operation, self._clock.first)
            if found is not None:
                return self._clock.begin + found[0], self._clock.begin + found[1]
        return None

    def order(self) -> bool:
        """Let this thread's stream wait for the call; the host waits until all ranks have joined."""
        self._caller.finish(self._operation)
        with device.on(self.device):
            self._caller.order(self._operation, device.present_stream().ptr)
        return True

    def check(self) -> None:
        """Raise the error of the device, or of the group if it failed before all ranks had joined."""
        self._caller.finish(self._operation)
        self._caller.over(self._operation)
