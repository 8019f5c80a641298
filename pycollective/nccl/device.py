"""CUDA devices, streams and events, through CuPy."""

from __future__ import annotations

import contextlib
import ctypes
import math
import platform
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
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


_NOT_READY = 600
"""The result of ``cudaEventQuery`` for an event that has not happened (``cudaErrorNotReady``)."""


def has_happened(event: Any) -> bool:
    """Return True if an event has happened; raise CuPy's error if its device has failed.

    CuPy's ``Event.done`` is False for ever after a failure.
    """
    runtime = _cuda().runtime
    code = int(runtime.eventQuery(event.ptr))
    if code not in (0, _NOT_READY):
        raise runtime.CUDARuntimeError(code)
    return code == 0


class NotCapturedError(Exception):
    """Work of a stream cannot be repeated as a CUDA graph."""


class Graph:
    """Work that a device repeats in one launch, as a CUDA graph."""

    def __init__(self, executable: int, destroy: Callable[[int], None]) -> None:
        self._executable = executable
        self._launch = _cuda().runtime.graphLaunch
        weakref.finalize(self, destroy, executable).atexit = False

    def launch(self, stream: Any) -> None:
        """Let a stream do the work, after its work so far."""
        self._launch(self._executable, stream.ptr)


class Recorder:
    """A stream of the current device whose work becomes graphs, and the memory of these graphs.

    The memory of arrays that recorded work makes or frees has no other user, because the graph
    writes to this memory at every launch. The recorder must live as long as its graphs.
    """

    def __init__(self) -> None:
        self._stream = stream()
        self._memory = _cuda().MemoryPool()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let this thread use the stream and the memory in a ``with`` block."""
        with _cuda().using_allocator(self._memory.malloc), self._stream:
            yield

    def record(self, function: Callable[[], Any]) -> tuple[Any, Graph]:
        """Call a function, and return its result and its device work, which is not done yet.

        Raises
        ------
        NotCapturedError
            The work waits for the device, or needs the host, so that it cannot be repeated.
        """
        runtime, begun, graph = _cuda().runtime, False, 0
        try:
            with self.used():
                self._stream.begin_capture()
                begun = True
                result = function()
                begun, graph = False, runtime.streamEndCapture(self._stream.ptr)
            needed = _host_work(graph)
            if needed:
                raise NotCapturedError(needed)
            return result, Graph(runtime.graphInstantiate(graph), runtime.graphExecDestroy)
        except NotCapturedError:
            raise
        except Exception as error:  # of CuPy, of CUDA and of its libraries
            raise NotCapturedError(f"{type(error).__name__}: {error}") from error
        finally:
            if begun:
                with contextlib.suppress(RuntimeError):  # CUDA refuses what it could not record
                    graph = runtime.streamEndCapture(self._stream.ptr)
            if graph:
                runtime.graphDestroy(graph)


_KERNEL, _COPY, _SET, _EMPTY = 0, 1, 2, 5
_ALLOCATE, _FREE = 10, 11
"""Kinds of a graph's nodes (``CUgraphNodeType``)."""
_MEMORY_TYPE, _ON_DEVICE = 2, 2
"""The attribute of an address (``CU_POINTER_ATTRIBUTE_MEMORY_TYPE``), and its value for a device."""


class _Copy(ctypes.Structure):
    """The first fields of ``CUDA_MEMCPY3D``: one side of a copy, twice."""

    class Side(ctypes.Structure):
        """One side of a copy."""

        _fields_ = (
            ("places", ctypes.c_size_t * 4),
            ("memory_type", ctypes.c_uint),
            ("host", ctypes.c_void_p),
            ("device", ctypes.c_void_p),
            ("array", ctypes.c_void_p),
            ("reserved", ctypes.c_void_p),
            ("lengths", ctypes.c_size_t * 2),
        )

    _fields_ = (("sides", Side * 2), ("rest", ctypes.c_size_t * 16))


def _host_work(graph: int) -> str:
    """Return a text about a node of a graph that the device cannot repeat alone, or ""."""
    driver = ctypes.CDLL("libcuda.so.1")

    def ask(name: str, *arguments: Any) -> None:
        code = getattr(driver, name)(*arguments)
        if code:
            raise NotCapturedError(f"{name} gives error {code}")

    whole, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    ask("cuGraphGetNodes", whole, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    ask("cuGraphGetNodes", whole, nodes, ctypes.byref(count))
    for node in nodes:
        kind, copy, where = ctypes.c_int(), _Copy(), ctypes.c_uint()
        ask("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value == _COPY:
            ask("cuGraphMemcpyNodeGetParams", ctypes.c_void_p(node), ctypes.byref(copy))
            for side in copy.sides:
                address = ctypes.c_void_p(side.device or side.host)
                code = driver.cuPointerGetAttribute(ctypes.byref(where), _MEMORY_TYPE, address)
                if code or where.value != _ON_DEVICE:
                    return "a copy from or to the host"
        elif kind.value not in (_KERNEL, _SET, _EMPTY, _ALLOCATE, _FREE):
            return f"a node of kind {kind.value}"
    return ""


def release_unused() -> None:
    """Give the memory that CuPy keeps for later arrays back to the devices."""
    sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


def copy_into(target: Any, source: Any, stream: Any) -> None:
    """Copy an array to another one of its size on one device, both in C order."""
    target.data.copy_from_device_async(source.data, source.nbytes, stream)


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
