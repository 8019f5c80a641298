"""Messages of GPU arrays between two ranks that are threads of one process.

What goes through the core is a number, with the tag, deadline and errors of every message. Behind it is
a copy of the array on the sender's GPU, which the receiver's stream reads when the sender's has made it:
no byte goes over the host, and neither rank waits for a device.
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

#: Tells a rank with a host array what this one has.
_LABEL = "a GPU array"


class _Parcel(NamedTuple):
    """What is on its way: a copy of the sender's array, and when it is there."""

    array: Array
    ready: _core.device.Event


class Parcels:
    """Arrays that are on their way among all ranks of a group."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._parcels: dict[int, _Parcel] = {}

    def post(self, parcel: _Parcel) -> int:
        """Keep a parcel; return its number."""
        number = next(self._numbers)
        self._parcels[number] = parcel
        return number

    def take(self, number: int) -> _Parcel:
        """Return a parcel, which is then the caller's."""
        return self._parcels.pop(number)


#: Arrays that a device may still work on, and what says whether that is over.
Kept = deque[tuple[Callable[[], bool], Any]]


class DeviceMessages:
    """A rank's messages of GPU arrays; ``kept`` gets the arrays that devices may still copy."""

    def __init__(
        self, member: Member, runtime: _core.device.Runtime, parcels: Parcels, kept: Kept
    ) -> None:
        self._member = weakref.ref(member)
        self._rank = member.rank
        self._host = member._core
        self._runtime = runtime
        self._parcels = parcels
        self._kept = kept

    def submit(self, call: Call) -> Work[None]:
        """Carry a message out."""
        return self._send(call) if call.collective == "send" else self._recv(call)

    def _send(self, call: Call) -> Work[None]:
        """Send an array, which can be used again, in the order of this thread's stream, at once."""
        source = present(call.source)
        with self._telling("send"):
            here, stream = _place_of(source)
            held = array_backend.empty(source.shape, source.dtype, source)
            self._copy(held, here, source, here, stream)
            number = self._parcels.post(_Parcel(held, self._keep(here, stream, (source, held))))
        try:
            return self._host.submit(
                replace(call, source=np.array([number], np.uint64), label=_LABEL)
            )
        except BaseException:
            self._parcels.take(number)
            raise

    def _recv(self, call: Call) -> Work[None]:
        """Receive an array, whose elements this thread's stream then finds."""
        number = np.empty(1, np.uint64)

        def deliver() -> None:
            with self._telling("recv"):
                self._deliver(present(call.target), int(number[0]), call.peer, call.tag)

        work = self._host.submit(replace(call, target=number, label=_LABEL))
        if call.async_op:
            return work.then(deliver)
        deliver()
        return DONE

    def _deliver(self, target: Array, number: int, source: int, tag: int) -> None:
        """Copy what has come to where it belongs."""
        array, ready = self._parcels.take(number)
        if (array.shape, array.dtype) != (target.shape, target.dtype):
            error = MismatchError(
                f"rank {self._rank} receives {target.dtype}{list(target.shape)} from rank {source} "
                f"with tag {tag}, and rank {source} sent {array.dtype}{list(array.shape)}: sender and "
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

    def _telling(self, what: str) -> AbstractContextManager[None]:
        """Tell the other ranks of an error of the device, for which one of them would wait."""
        member = self._member()
        return nullcontext() if member is None else member._between(f"{what} of a GPU array")

    def _copy(self, target: Array, here: int, source: Array, there: int, stream: int) -> None:
        self._runtime.reaches(here, there)  # asked before, a copy goes straight from GPU to GPU
        self._runtime.copy(
            array_backend.address(target), here, array_backend.address(source), there,
            source.nbytes, stream,
        )  # fmt: skip

    def _keep(self, here: int, stream: int, arrays: Any) -> _core.device.Event:
        """Keep arrays until a stream has done what it has been given; return when that is."""
        event = self._runtime.mark(here, stream)
        self._kept.append((partial(self._runtime.over, event), arrays))
        return event


def _place_of(array: Array) -> tuple[int, int]:
    """Return an array's GPU, and this thread's stream there."""
    here = array_backend.device_of(array)[1]
    return here, device.stream_on(here).ptr
