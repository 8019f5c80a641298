"""What is asked of CUDA, through CuPy: devices, streams, events. Nothing else here knows of them."""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

PER_THREAD = 2
"""The stream that is another one in each thread (``cudaStreamPerThread``)."""


def _cuda() -> Any:
    # There are GPU arrays only where the program has imported CuPy.
    return sys.modules["cupy"].cuda


def on(device: int) -> AbstractContextManager[Any]:
    """Return the context in which a device is this thread's."""
    context: AbstractContextManager[Any] = _cuda().Device(device)
    return context


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


def description(device: int) -> str:
    """Return a GPU's name, memory and compute capability."""
    about = _cuda().runtime.getDeviceProperties(device)
    name = about.get("name", b"a GPU")
    name = name.decode() if isinstance(name, bytes) else str(name)
    memory = about.get("totalGlobalMem", 0) / 2**30
    return f"{name}, {memory:.0f} GiB, sm_{about.get('major', '?')}{about.get('minor', '?')}"


def library_version() -> str:
    """Return CuPy's version."""
    return str(getattr(sys.modules["cupy"], "__version__", "?"))


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


class Fetch:
    """An array of the thread's device, in C order, on its way to the host; reading it waits."""

    def __init__(self, array: Any) -> None:
        self._like = array.dtype, array.shape
        stream = present_stream()
        self._memory = _cuda().alloc_pinned_memory(array.nbytes)
        array.data.copy_to_host_async(self._memory.ptr, array.nbytes, stream)
        self._arrived = event(stream)

    def value(self) -> Any:
        """Return the value as a NumPy array, when it has arrived."""
        self._arrived.synchronize()
        return _at(self._memory.ptr, *self._like).copy()


class Upload:
    """Copies arrays of the host to the thread's device on a stream of its own."""

    def __init__(self) -> None:
        self._stream = stream()

    def __call__(self, array: Any) -> Any:
        """Return a copy of a NumPy array on the device, when it is there.

        The calling thread waits, and nobody else: whichever stream reads the copy finds it. Its memory
        goes back to this thread's present stream: a stream that this one does not wait for must be done
        with the copy, or be waited for by it, when the last array of it is dropped.
        """
        cuda = _cuda()
        copied = sys.modules["cupy"].empty(array.shape, array.dtype)
        try:
            pinned = cuda.alloc_pinned_memory(array.nbytes)
            source = _at(pinned.ptr, array.dtype, array.shape)
            source[...] = array
        except RuntimeError:  # the system lets no more memory be locked: slower, and no worse
            source = np.ascontiguousarray(array)
        # The memory is the present stream's, which may not yet be done with what lay there.
        stream_wait(self._stream, [event(present_stream())])
        copied.data.copy_from_host_async(source.ctypes.data, array.nbytes, self._stream)
        event(self._stream).synchronize()
        return copied


def _at(address: int, dtype: Any, shape: Sequence[int]) -> Any:
    """Return the host's memory at an address as an array."""
    size = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


def seconds_between(first: Any, second: Any) -> float:
    """Return the time between two events of one device that were timed and have happened."""
    return float(_cuda().get_elapsed_time(first, second)) / 1e3


def stream_wait(waiting: Any, events: Sequence[Any]) -> None:
    """Let what a stream is given from now on wait for events."""
    for one in events:
        waiting.wait_event(one)
