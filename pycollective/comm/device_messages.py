"""Messages of GPU arrays between two ranks that are threads of one process.

The core sends a number, with the tag, the deadline and the errors of a message of host arrays. The
number identifies a copy of the array on the sender's GPU, which the receiver's stream reads. The data
do not pass through host memory, and no rank waits for a device.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pycollective import _core, array_backend
from pycollective.comm.arrays import Array
from pycollective.comm.call import Call, present
from pycollective.comm.member import Member
from pycollective.comm.work import DONE, Work
from pycollective.errors import MismatchError
from pycollective.nccl import device

#: The element type in the errors of a rank that gives a host array.
_LABEL = "a GPU array"


class _Buffer(NamedTuple):
    """A copy of the sender's array, and the event after which it is complete."""

    array: Array
    ready: _core.device.Event


class DeviceBuffers:
    """The device buffers of the messages under way among all ranks of a group, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._buffers: dict[int, _Buffer] = {}

    def add(self, buffer: _Buffer) -> int:
        """Store a buffer, and return its number."""
        number = next(self._numbers)
        self._buffers[number] = buffer
        return number

    def pop(self, number: int) -> _Buffer:
        """Remove a buffer, and return it."""
        return self._buffers.pop(number)


#: Arrays that a device may still use, each with a function that returns True when no device does.
Kept = deque[tuple[Callable[[], bool], Any]]


class DeviceMessages:
    """The engine for one rank's messages; ``kept`` gets the arrays that devices may still copy."""

    def __init__(
        self, member: Member, runtime: _core.device.Runtime, buffers: DeviceBuffers, kept: Kept
    ) -> None:
        self._member = weakref.ref(member)
        self._rank = member.rank
        self._host = member._core
        self._runtime = runtime
        self._buffers = buffers
        self._kept = kept

    def submit(self, call: Call) -> Work[None]:
        """Execute a message."""
        return self._send(call) if call.collective == "send" else self._recv(call)

    def _send(self, call: Call) -> Work[None]:
        """Copy and announce an array; this thread's stream can change it after the copy."""
        source = present(call.source)
        with self._aborting("send"):
            here, stream = _place_of(source)
            held = array_backend.empty(source.shape, source.dtype, source)
            self._copy(held, here, source, here, stream)
            number = self._buffers.add(_Buffer(held, self._keep(here, stream, (source, held))))
        try:
            return self._host.submit(
                replace(call, source=np.array([number], np.uint64), label=_LABEL)
            )
        except BaseException:
            self._buffers.pop(number)
            raise

    def _recv(self, call: Call) -> Work[None]:
        """Receive an array, in the order of this thread's stream."""
        number = np.empty(1, np.uint64)

        def deliver() -> None:
            with self._aborting("recv"):
                self._deliver(present(call.target), int(number[0]), call.peer, call.tag)

        work = self._host.submit(replace(call, target=number, label=_LABEL))
        if call.async_op:
            return work.then(deliver)
        deliver()
        return DONE

    def _deliver(self, target: Array, number: int, source: int, tag: int) -> None:
        """Copy a buffer to the receiver's array."""
        array, ready = self._buffers.pop(number)
        if (array.shape, array.dtype) != (target.shape, target.dtype):
            error = MismatchError(
                f"rank {self._rank} receives {target.dtype}{list(target.shape)} from rank {source} "
                f"with tag {tag}, but rank {source} sent {array.dtype}{list(array.shape)}: sender and "
                "receiver must agree on shape and dtype",
                calls={
                    self._rank: f"recv ({target.dtype}{list(target.shape)}, tag {tag})",
                    source: f"send ({array.dtype}{list(array.shape)}, tag {tag})",
                },
            )
            if (member := self._member()) is not None:
                member._group.abort(str(error), ranks=error.ranks)
            raise error
        here, stream = _place_of(target)
        there = array_backend.device_of(array)[1]
        self._runtime.wait(ready, here, stream)
        self._copy(target, here, array, there, stream)
        self._keep(here, stream, (array, target))

    def _aborting(self, what: str) -> AbstractContextManager[None]:
        """Abort the group after an error of the device, since the other rank waits for this one."""
        member = self._member()
        return nullcontext() if member is None else member._between(f"{what} of a GPU array")

    def _copy(self, target: Array, here: int, source: Array, there: int, stream: int) -> None:
        self._runtime.reaches(here, there)  # enables a direct copy from GPU to GPU
        self._runtime.copy(
            array_backend.address(target), here, array_backend.address(source), there,
            source.nbytes, stream,
        )  # fmt: skip

    def _keep(self, here: int, stream: int, arrays: Any) -> _core.device.Event:
        """Keep arrays until a stream has executed its work so far; return the event after that work."""
        event = self._runtime.mark(here, stream)
        self._kept.append((partial(self._runtime.over, event), arrays))
        return event


def _place_of(array: Array) -> tuple[int, int]:
    """Return an array's GPU, and this thread's stream there."""
    here = array_backend.device_of(array)[1]
    return here, device.stream_on(here).ptr
