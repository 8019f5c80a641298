"""One rank of an NCCL communicator: calls on streams, and a thread that watches for failures."""

from __future__ import annotations

import atexit
import contextlib
import copy
import itertools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pycollective import _core
from pycollective.errors import (
    AbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    NcclError,
    PeerLostError,
    with_text,
)
from pycollective.missed import Missed
from pycollective.nccl import device
from pycollective.nccl.device_task import DeviceTask
from pycollective.nccl.memory import SINCE, Block, Registered

_log = logging.getLogger("pycollective")

_SYSTEM_ERROR, _REMOTE_ERROR = 2, 6
_SPIN_LIMIT = 200
_PAUSE = 50e-6
_WATCH_SECONDS = 0.1
_FINALIZE_SECONDS = 5.0
_CAUSE_SECONDS = 2.0
"""Seconds in which heartbeats report a rank that has ended."""


class Peers(Protocol):
    """The failure detector of the ranks, independent of NCCL."""

    def failure(self, waiting: float) -> CollectiveError | None:
        """Return the error of a call that has waited for ``waiting`` seconds, if there is one."""

    def fail(self, error: CollectiveError) -> None:
        """Fail the group on all ranks."""

    def late(self, number: int) -> PeerLostError | None:
        """Return an error about the ranks that have made fewer than ``number`` calls, if any."""


class _Clock:
    """The difference between the current device's clock and `time.monotonic`."""

    def __init__(self) -> None:
        self._first = device.event(device.stream(), timed=True)
        self._first.synchronize()  # returns soon, since the stream is empty
        self._begin = time.monotonic()

    def time_of(self, event: Any) -> float:
        return self._begin + device.seconds_between(self._first, event)


class Operation(DeviceTask):
    """An enqueued call."""

    def __init__(
        self,
        owner: NcclCommunicator,
        what: str,
        number: int,
        seconds: float,
        kept: Any,
        event: Any,
        timed: tuple[_Clock, Any] | None,
    ) -> None:
        super().__init__(owner.device, seconds)
        self._owner = owner
        self._timed = timed  # a clock, and an event before the call
        self.what = what
        self.number = number
        self.kept = kept  # arrays that the device still uses
        self.event = event
        self.failed = False

    @property
    def has_finished(self) -> bool:
        """True if the device has finished the call.

        Raises
        ------
        NcclError
            The device has failed.
        """
        try:
            return device.has_happened(self.event)
        except RuntimeError as error:
            raise NcclError(f"GPU {self.device} has failed during {self.what}: {error}") from None

    @property
    def ended(self) -> bool:
        """True if the device has finished the call, or never will."""
        return self._owner.error is not None or self.has_finished

    def device_times(self) -> tuple[float, float] | None:
        """Return the times at which the stream began and ended the call."""
        if self._timed is None or not self.has_finished:
            return None
        clock, before = self._timed
        with device.on(self.device):
            begin = clock.time_of(before)
            return begin, begin + device.seconds_between(before, self.event)

    def order(self) -> bool:
        """Let this thread's stream wait for the call."""
        if self._owner.error is not None:
            return False
        with device.on(self.device):
            device.stream_wait(device.present_stream(), [self.event])
        return True

    def check(self) -> None:
        """Raise the communicator's error, unless the call ended before it.

        The event of an aborted call happens too, but its result is not valid.
        """
        if self.failed or not self.has_finished:
            self._owner.check()


class NcclCommunicator:
    """One rank of an NCCL communicator on one device.

    Rank 0 makes ``unique_id`` and gives it to all ranks. ``min_ctas`` and ``max_ctas`` bound the number
    of thread blocks of NCCL's kernels.

    Raises
    ------
    NcclError
        NCCL failed.
    CollectiveTimeoutError
        The other ranks did not join within ``seconds``.
    """

    def __init__(
        self,
        library: _core.nccl.Library,
        unique_id: bytes,
        size: int,
        rank: int,
        on_device: int,
        peers: Peers,
        seconds: float,
        *,
        min_ctas: int | None = None,
        max_ctas: int | None = None,
    ) -> None:
        self.library = library
        self.size, self.rank, self.device = size, rank, on_device
        self.error: CollectiveError | None = None
        self._peers = peers
        self._call_lock = threading.Lock()  # held by the thread that makes a call
        self._lock = threading.Lock()  # guards the following attributes; held for short times
        self._pending: deque[Operation] = deque()
        self._last: tuple[Any, Any] | None = None  # stream and event of the last call
        self._num_calls = 0
        self._clock: _Clock | None = None
        self.memory = Registered(library, on_device)
        self._over = threading.Event()
        with device.on(on_device):
            # Not blocking, so that a waiting rank can be interrupted and aborted.
            self._comm = _core.nccl.Comm(
                library, unique_id, size, rank, blocking=False, min_ctas=min_ctas, max_ctas=max_ctas
            )
            self._own_stream = device.stream()
        try:
            self._wait_until_enqueued(
                "making the communicator", time.monotonic() + seconds, seconds
            )
        except BaseException:
            _abort(self._comm)
            raise
        self._thread = threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self._over),
            name="pycollective-nccl",
            daemon=True,
        )
        # A communicator that is dropped without `close` does not wait for other ranks.
        self._dropped = weakref.finalize(self, _drop, self._comm, self.memory, self._over)
        self._dropped.atexit = False
        _running.add(self)
        self._thread.start()

    @property
    def calls(self) -> int:
        """The number of this rank's calls that all ranks must make."""
        return self._num_calls

    def enqueue(
        self,
        what: str,
        call: Callable[[_core.nccl.Comm, int], None],
        kept: Any,
        seconds: float,
        later: bool,
        timed: bool = False,
        awaited: Sequence[Any] = (),
        counts: bool = True,
    ) -> Operation:
        """Enqueue a call on this thread's stream of the device, or on the communicator's own.

        Parameters
        ----------
        what : str
            The text of the call.
        call : callable
            A function of the communicator and the address of the stream. Its calls of NCCL are a group.
        kept : object
            An object to keep alive until the call has ended.
        seconds : float
            Seconds after which the communicator is aborted.
        later : bool
            Use the communicator's own stream, after the work of this thread's stream so far.
        timed : bool
            Let the device record when it begins and ends the call.
        awaited : sequence of event
            Events for which the call waits.
        counts : bool
            False for a call that not all ranks make.
        """
        with self._call_lock, device.on(self.device):
            self.check()
            present = device.present_stream()
            # NCCL may launch from another thread, where the per-thread handle is another stream.
            aside = later or present.ptr == device.PER_THREAD
            stream = self._own_stream if aside else present
            if aside:
                device.stream_wait(stream, [device.event(present)])
            if self._last is not None and self._last[0] != stream:
                device.stream_wait(stream, [self._last[1]])
            device.stream_wait(stream, awaited)
            clocked = None
            if timed:
                self._clock = self._clock or _Clock()
                clocked = self._clock, device.event(stream, timed=True)
            begin = time.monotonic()
            try:
                with self._lock:
                    self._raise()
                    self.library.group_start()
                    try:
                        call(self._comm, stream.ptr)
                    finally:
                        self.library.group_end()
            except NcclError as error:
                self._fail(self._cause(self._in_call(error, what)))
                raise self.error or error from None
            self._num_calls += counts
            try:
                self._wait_until_enqueued(what, begin + seconds, seconds)
            except KeyboardInterrupt:  # devices may use the arrays, and nothing keeps them
                self._fail(AbortedError(f"rank {self.rank} was interrupted in {what}"))
                raise
            event = device.event(stream, timed)
            if aside and not later:
                device.stream_wait(present, [event])
            operation = Operation(self, what, self._num_calls, seconds, kept, event, clocked)
            with self._lock:
                self._last = stream, event
                self._forget()
                self._pending.append(operation)
            return operation

    def skip(self) -> None:
        """Count a call in which this rank moves no data, so that it is not reported as late."""
        with self._call_lock:
            self.check()
            self._num_calls += 1

    def allocate(self, nbytes: int, seconds: float) -> Block | None:
        """Allocate and register memory of NCCL; return None if NCCL is too old or no bytes are needed.

        The host may wait for the device.

        Raises
        ------
        NcclError
            The allocation failed.
        """
        if not nbytes or self.library.version < SINCE:
            return None
        with self._call_lock, device.on(self.device):
            with self._lock:
                self._raise()
                self._forget()
            self.memory.free(self._deregister)
            block = self.memory.add(nbytes, self._register)
            self._wait_until_enqueued("registering memory", time.monotonic() + seconds, seconds)
            return block

    def _register(self, address: int, nbytes: int) -> int:
        with self._lock:
            self._raise()
            return self._comm.register(address, nbytes)

    def _deregister(self, handle: int) -> None:
        with self._lock:
            self._raise()
            self._comm.deregister(handle)

    def _forget(self) -> None:
        """Release the arrays of finished calls."""
        while self._pending and self._pending[0].has_finished:
            self._pending.popleft()

    def check(self) -> None:
        """Raise the communicator's error, if there is one."""
        with self._lock:
            self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise copy.copy(self.error)

    def _in_call(self, error: NcclError, what: str) -> NcclError:
        """Return an error of NCCL with this rank and the call in its text."""
        found = NcclError(f"rank {self.rank}, {what}: {error}")
        found.code = error.code
        return found

    def _wait_until_enqueued(self, what: str, until: float, seconds: float) -> None:
        """Wait until NCCL's threads have enqueued a call."""
        missed = Missed()
        for polls in itertools.count():
            try:
                with self._lock:
                    self._raise()
                    code = self._comm.async_error()
            except NcclError as refused:
                if self.error is None:
                    self._fail(self._cause(self._in_call(refused, what)))
                raise self.error or refused from None
            if code == 0:
                return
            if code != _core.nccl.IN_PROGRESS:
                self._fail(self._cause(self._asynchronous(code, what)))
            elif time.monotonic() > until + missed.seconds:
                self._fail(self._timed_out(what, seconds, self._num_calls))
            elif polls > _SPIN_LIMIT:
                missed.during(time.sleep, _PAUSE)
                waited = time.monotonic() - until - missed.seconds + seconds
                error = self._peers.failure(waited)
                if error is not None:
                    self._fail(error)

    def _asynchronous(self, code: int, what: str) -> NcclError:
        error = NcclError(f"rank {self.rank}, {what}: NCCL reports {self.library.error_text(code)}")
        if code == _REMOTE_ERROR:
            error = NcclError(f"{error}; another rank has ended or is unreachable")
        error.code = code
        return error

    def _cause(self, error: NcclError) -> CollectiveError:
        """Return the cause of an error: NCCL may notice a lost rank first, but not which one it is."""
        until = time.monotonic() + _CAUSE_SECONDS
        while error.code in (_SYSTEM_ERROR, _REMOTE_ERROR) and time.monotonic() < until:
            found = self._peers.failure(math.inf)
            if found is not None:
                return found
            time.sleep(_PAUSE)
        return error

    def _timed_out(self, what: str, seconds: float, number: int) -> CollectiveError:
        late = self._peers.late(number)
        message = (
            f"rank {self.rank} waited {seconds:g} s for {what} on GPU {self.device}, and has aborted "
            "NCCL's communicator: "
        )
        if late is not None:
            found = with_text(late, f"{message}{late}")
            found.call = what
            return found
        return CollectiveTimeoutError(
            f"{message}all ranks have made the same number of calls. Either the calls differ, or a "
            "message has no counterpart, or a device hangs",
            call=what,
        )

    # The watching thread ------------------------------------------------------------------------

    def watch(self, missed: float) -> bool:
        """Check for failures after ``missed`` seconds without a check; return True if there are none."""
        error: CollectiveError | None
        try:
            error = self._failure(missed)
        except Exception as problem:  # of NCCL or of CUDA, which do not recover
            error = self._in_call(
                NcclError(f"GPU {self.device} can no longer be watched: {problem}"), "between calls"
            )
        if error is not None:
            self._fail(error)
        return error is None

    def _failure(self, missed: float) -> CollectiveError | None:
        with self._lock:
            if self.error is not None:
                return self.error
            for operation in self._pending:
                operation.began += missed
            self._forget()
            oldest = self._pending[0] if self._pending else None
            code = self._comm.async_error()
        if code not in (0, _core.nccl.IN_PROGRESS):
            return self._cause(self._asynchronous(code, oldest.what if oldest else "between calls"))
        waiting = 0.0 if oldest is None else time.monotonic() - oldest.began
        error = self._peers.failure(waiting)
        if error is None and oldest is not None and waiting > oldest.seconds:
            return self._timed_out(oldest.what, oldest.seconds, oldest.number)
        return error

    def _fail(self, error: CollectiveError) -> None:
        """Abort NCCL, so that devices stop waiting, and let current and next calls raise the error."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            for operation in self._pending:
                operation.failed = True
                with contextlib.suppress(Exception):  # CUDA has failed: the state is unknown
                    operation.failed = not operation.has_finished
            _abort(self._comm)
        self._peers.fail(error)

    # The end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for unfinished calls, each until its deadline, and finalize the communicator."""
        try:
            while self.error is None:
                with self._lock:
                    if all(operation.has_finished for operation in self._pending):
                        break
                time.sleep(_PAUSE)
        except NcclError as error:  # the device has failed, and finishes nothing
            self._fail(error)
        self._end()
        self.memory.free(None)

    def _end(self) -> None:
        self._over.set()
        if self.error is None:
            self.error = AbortedError("this communicator is closed")
        with self._lock:
            if not self._comm.alive:
                self.memory.end(None)
                return
            until = time.monotonic() + _FINALIZE_SECONDS
            try:
                self.memory.end(self._comm.deregister)
                self._comm.finalize()
                while self._comm.async_error() == _core.nccl.IN_PROGRESS:
                    if time.monotonic() > until:
                        raise NcclError("the other ranks do not finalize the communicator")
                    time.sleep(_PAUSE)
                self._comm.destroy()
            except NcclError:
                _abort(self._comm)

    def join(self) -> None:
        """Wait until the watching thread has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def finish(self) -> None:
        """End the communicator when the process ends, without waiting for unfinished calls."""
        self._over.set()
        self.join()
        with self._lock:
            busy = True
            with contextlib.suppress(Exception):  # CUDA has failed: abort
                busy = any(not operation.has_finished for operation in self._pending)
            if busy:
                _abort(self._comm)
        self._end()

    def abandon(self) -> None:
        """Release the communicator in a forked child, which must not call NCCL."""
        _running.discard(self)
        self._dropped.detach()
        self.error = AbortedError(
            "this communicator belongs to the parent process: a forked child has no rank of its own"
        )


def _watch(communicator: weakref.ref[NcclCommunicator], over: threading.Event) -> None:
    while not (missed := Missed()).during(over.wait, _WATCH_SECONDS):
        found = communicator()
        if found is None or not found.watch(missed.seconds):
            return
        del found


def _abort(comm: _core.nccl.Comm) -> None:
    """Abort a communicator unless it has ended; log a failure, which ends the communicator too."""
    try:
        if comm.alive:
            comm.abort()
    except NcclError as error:
        _log.warning("NCCL failed to abort a communicator: %s", error)


def _drop(comm: _core.nccl.Comm, memory: Registered, over: threading.Event) -> None:
    over.set()
    _abort(comm)
    memory.end(None)
    memory.free(None)


_running: weakref.WeakSet[NcclCommunicator] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all communicators, so that no device waits and no thread outlives the interpreter."""
    for communicator in list(_running):
        communicator.finish()
