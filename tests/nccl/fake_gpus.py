"""Simulated GPUs: a stand-in for CuPy with devices, streams and events, and a stand-in for libnccl.

Reading elements waits for all streams of the array's device, because NumPy has no stream to wait
for.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import device_arrays
import pytest
from device_arrays import current

from pycollective.comm import on_device

SOURCE = Path(__file__).with_name("fake_nccl.c")
_numbers = itertools.count(0x1000)
_local = threading.local()


def build(folder, version=22803):
    """Compile a libnccl of some version; return its path. Skips without a C compiler."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler for the stand-in of NCCL")
    path = Path(folder) / f"libfake_nccl_{version}.so"
    command = ["cc", "-O0", "-shared", "-fPIC", f"-DFAKE_VERSION={version}", "-o", path, SOURCE]
    subprocess.run([*command, "-lpthread", "-lm"], check=True)
    return path


class Device:
    """Context manager that makes a device the current one of this thread."""

    def __init__(self, cuda, number):
        self._cuda, self.id = cuda, number

    def __enter__(self):
        self._before = current.device
        self.use()
        return self

    def __exit__(self, *_):
        Device(self._cuda, self._before).use()

    def synchronize(self):
        for stream in self._cuda.streams.get(self.id, []):
            stream.synchronize()

    def use(self):
        current.device = self.id
        self._cuda.library.fake_set_device(self.id)


class Stream:
    def __init__(self, cuda, ptr=None):
        self._cuda = cuda
        self.device = current.device
        self.ptr = next(_numbers) if ptr is None else ptr
        self.waits = 0
        self.awaited = []
        cuda.streams.setdefault(self.device, []).append(self)

    def wait_event(self, event):
        self.waits += 1
        self.awaited.append(event)
        for stream, count in event.preceding():
            self._cuda.library.fake_let_wait(self.ptr, stream, count)

    def synchronize(self):
        self._cuda.event_after(self).synchronize()

    def __enter__(self):
        self._before = getattr(_local, "streams", {})
        _local.streams = {**self._before, self.device: self}
        return self

    def __exit__(self, *_):
        _local.streams = self._before


class Event:
    """An event after a stream's work so far, and after the events for which the stream waits."""

    def __init__(self, cuda, timed):
        self._cuda, self.timed = cuda, timed
        self._over = False
        self.ptr = next(_numbers)
        cuda.events[self.ptr] = self

    def record(self, stream):
        self._stream, self._count = stream.ptr, self._cuda.library.fake_given(stream.ptr)
        self._recorded = time.monotonic()
        stream.awaited = [event for event in stream.awaited if not event._over]
        self._first = list(stream.awaited)

    def preceding(self):
        """Yield the streams, and numbers of their operations, that must be done first."""
        yield self._stream, self._count
        for event in self._first:
            yield from event.preceding()

    def _wait(self, seconds):
        first = self._first
        if self._over or not all(event._wait(seconds) for event in first):
            return self._over
        if self._cuda.library.fake_wait(self._stream, self._count, seconds):
            ended = self._cuda.library.fake_ended(self._stream, self._count)
            self.time = max(self._recorded, ended, *(event.time for event in first))
            self._over = True  # last: another thread may read `time` from now on
            self._first = []
        return self._over

    @property
    def done(self):
        return self._wait(0.0)

    def synchronize(self):
        assert self._wait(20.0), "a stream of the stand-in has not finished after 20 s"


class CUDARuntimeError(RuntimeError):
    """An error of ``cupy.cuda.runtime``."""

    def __init__(self, status):
        super().__init__(f"cudaErrorIllegalAddress: code {status}")
        self.status = status


class Cuda:
    """``cupy.cuda`` with ``devices`` GPUs.

    After ``failed`` is set, every query of an event gives an error, as after an illegal access.
    """

    def __init__(self, library, devices):
        self.library, self.streams = library, {}
        self.events = weakref.WeakValueDictionary()
        self.failed = False
        self._defaults = {}
        for number in range(devices):
            with Device(self, number):
                self._defaults[number] = Stream(self, 0x100 + number)
        properties = {i: {"uuid": bytes([i] * 16)} for i in range(devices)}
        self.runtime = SimpleNamespace(
            getDeviceCount=lambda: devices,
            driverGetVersion=lambda: 13000,
            getDeviceProperties=properties.__getitem__,
            deviceGetPCIBusId=lambda number: f"0000:{number:02x}:00.0",
            eventQuery=self._query,
            CUDARuntimeError=CUDARuntimeError,
        )

    def _query(self, pointer):
        """Return CUDA's code for the state of an event: happened, not ready, or an illegal access."""
        if self.failed:
            return 700
        return 0 if self.events[pointer].done else 600

    def Device(self, number):
        return Device(self, number)

    def Stream(self, non_blocking=False):
        assert non_blocking
        return Stream(self)

    def Event(self, disable_timing=False):
        return Event(self, not disable_timing)

    def get_elapsed_time(self, first, second):
        for event in (first, second):
            assert event.timed and event.done  # as CUDA requires
        return 1e3 * (second.time - first.time)

    def alloc_pinned_memory(self, size):
        return device_arrays.PinnedMemory(size)

    def event_after(self, stream):
        event = Event(self, False)
        event.record(stream)
        return event

    def get_current_stream(self):
        number = current.device
        return getattr(_local, "streams", {}).get(number) or self._defaults[number]

    def UnownedMemory(self, address, size, owner, device):
        return SimpleNamespace(address=address, size=size, owner=owner, device=device)

    def MemoryPointer(self, memory, offset):
        assert memory.device == current.device
        return SimpleNamespace(address=memory.address + offset, memory=memory)

    def finish(self, array):
        """Wait for all streams of an array's device."""
        Device(self, array.device.id).synchronize()


def load(path):
    library = ctypes.CDLL(str(path))
    library.fake_given.argtypes = [ctypes.c_void_p]
    library.fake_let_wait.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    library.fake_ended.argtypes = [ctypes.c_void_p, ctypes.c_long]
    library.fake_ended.restype = ctypes.c_double
    library.fake_wait.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_double]
    library.fake_given.restype = ctypes.c_long
    library.fake_log.restype = ctypes.c_char_p
    return library


def make_gpus(monkeypatch, path, devices=4):
    """Install the simulated GPUs and NCCL for a test; return the stand-in for CuPy."""
    library = load(path)
    library.fake_clear()
    cupy = device_arrays.make_cupy()
    cupy.cuda = Cuda(library, devices)
    cupy.log = lambda: library.fake_log().decode().splitlines()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(
        on_device, "runtime", lambda: None
    )  # CUDA's runtime does not have these GPUs
    monkeypatch.setattr(device_arrays, "before_access", cupy.cuda.finish)
    monkeypatch.setenv("PYCOLLECTIVE_NCCL_LIBRARY", str(path))
    return cupy
