"""What is asked of CUDA, through CuPy: devices, streams, events. Nothing else here knows of them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

__all__ = [
    "array",
    "driver_version",
    "event",
    "identity",
    "on",
    "present_stream",
    "seconds_between",
    "stream",
    "stream_on",
    "stream_wait",
    "synchronize",
]


def _cuda() -> Any:
    # There are GPU arrays only where the program has imported CuPy.
    return sys.modules["cupy"].cuda


def on(device: int) -> AbstractContextManager[Any]:
    """Return the context in which a device is this thread's."""
    context: AbstractContextManager[Any] = _cuda().Device(device)
    return context


def synchronize(device: int) -> None:
    """Wait until a device has done what all of its streams were given."""
    _cuda().Device(device).synchronize()


def array(owner: Any, shape: Sequence[int], dtype: Any, device: int) -> Any:
    """Return an array in a device's memory, at the ``address`` of its owner, whom it keeps."""
    memory = _cuda().UnownedMemory(owner.address, owner.nbytes, owner, device)
    with on(device):
        return sys.modules["cupy"].ndarray(tuple(shape), dtype, _cuda().MemoryPointer(memory, 0))


def identity(device: int) -> str:
    """Return what tells a device from all others, also from other parts of the same GPU."""
    runtime = _cuda().runtime
    number = runtime.getDeviceProperties(device).get("uuid")
    where = number.hex() if isinstance(number, bytes) else platform.node()
    return f"{runtime.deviceGetPCIBusId(device)} {where}"


def driver_version() -> int:
    """Return the newest version of CUDA that the driver knows: 12040 for 12.4."""
    return int(_cuda().runtime.driverGetVersion())


def present_stream() -> Any:
    """Return this thread's stream on its device."""
    return _cuda().get_current_stream()


def stream_on(device: int) -> Any:
    """Return this thread's stream on another device."""
    with on(device):
        return present_stream()


def stream() -> Any:
    """Make a stream of this thread's device that waits for no other."""
    return _cuda().Stream(non_blocking=True)


def event(after: Any, timed: bool = False) -> Any:
    """Return an event that happens when all is done that a stream has been given so far."""
    made = _cuda().Event(disable_timing=not timed)
    made.record(after)
    return made


def seconds_between(first: Any, second: Any) -> float:
    """Return the time between two events of one device that were timed and have happened."""
    return float(_cuda().get_elapsed_time(first, second)) / 1e3


def stream_wait(waiting: Any, events: Sequence[Any]) -> None:
    """Let what a stream is given from now on wait for events."""
    for one in events:
        waiting.wait_event(one)
