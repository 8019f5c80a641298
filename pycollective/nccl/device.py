"""CUDA devices, streams and events, through CuPy."""

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
"""The handle of each thread's own stream (``cudaStreamPerThread``)."""


def _cuda() -> Any:
    # The program has imported CuPy, since it has GPU arrays.
    return sys.modules["cupy"].cuda


def on(device: int) -> AbstractContextManager[Any]:
    """Return a context in which this thread's current device is ``device``."""
    context: AbstractContextManager[Any] = _cuda().Device(device)
    return context


def array(owner: Any, shape: Sequence[int], dtype: Any, device: int) -> Any:
    """Return an array on the memory of ``owner`` (``address``, ``nbytes``), which it keeps alive."""
    memory = _cuda().UnownedMemory(owner.address, owner.nbytes, owner, device)
    with on(device):
        return sys.modules["cupy"].ndarray(tuple(shape), dtype, _cuda().MemoryPointer(memory, 0))


def identity(device: int) -> str:
    """Return a unique text for a device; parts of one GPU (MIG) have different texts."""
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
    """Return the latest version of CUDA that the driver supports: 12040 for 12.4."""
    return int(_cuda().runtime.driverGetVersion())


def present_stream() -> Any:
    """Return this thread's current stream on its current device."""
    return _cuda().get_current_stream()


def stream_on(device: int) -> Any:
    """Return this thread's current stream on a device."""
    with on(device):
        return present_stream()


def stream() -> Any:
    """Make a stream of the current device that does not wait for the default stream."""
    return _cuda().Stream(non_blocking=True)


def event(after: Any, timed: bool = False) -> Any:
    """Return an event that happens when a stream has executed all its work so far."""
    made = _cuda().Event(disable_timing=not timed)
    made.record(after)
    return made


class Fetch:
    """A copy of a device array in C order to the host, begun at once; `value` waits for it."""

    def __init__(self, array: Any) -> None:
        self._like = array.dtype, array.shape
        stream = present_stream()
        self._memory = _cuda().alloc_pinned_memory(array.nbytes)
        array.data.copy_to_host_async(self._memory.ptr, array.nbytes, stream)
        self._arrived = event(stream)

    def value(self) -> Any:
        """Wait for the copy, and return it as a NumPy array."""
        self._arrived.synchronize()
        return _at(self._memory.ptr, *self._like).copy()


class Upload:
    """A stream that copies host arrays to the current device."""

    def __init__(self) -> None:
        self._stream = stream()

    def __call__(self, array: Any) -> Any:
        """Copy a NumPy array to the device, wait for the copy, and return it.

        Every stream can then read the copy. When its last array is dropped, CuPy reuses the memory on
        this thread's current stream. Other streams must have finished with the copy by then.
        """
        cuda = _cuda()
        copied = sys.modules["cupy"].empty(array.shape, array.dtype)
        try:
            pinned = cuda.alloc_pinned_memory(array.nbytes)
            source = _at(pinned.ptr, array.dtype, array.shape)
            source[...] = array
        except RuntimeError:  # no more pinned memory: pageable memory is slower but works
            source = np.ascontiguousarray(array)
        # The current stream may still use the previous contents of the memory.
        stream_wait(self._stream, [event(present_stream())])
        copied.data.copy_from_host_async(source.ctypes.data, array.nbytes, self._stream)
        event(self._stream).synchronize()
        return copied


def _at(address: int, dtype: Any, shape: Sequence[int]) -> Any:
    """Return an array on host memory at an address."""
    size = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


def seconds_between(first: Any, second: Any) -> float:
    """Return the seconds between two timed events of one device that have happened."""
    return float(_cuda().get_elapsed_time(first, second)) / 1e3


def stream_wait(waiting: Any, events: Sequence[Any]) -> None:
    """Let the later work of a stream wait for events."""
    for one in events:
        waiting.wait_event(one)
