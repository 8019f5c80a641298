"""Devices for ranks that are threads, in the host's memory, under the project's own executor."""

from __future__ import annotations

import itertools
import sys
import threading
from types import SimpleNamespace

import device_arrays
import pytest

from pycollective import _core, array_backend
from pycollective.communicator import on_device


class Stream:
    """A stream of CuPy's, of which the executor is told the number."""

    _numbers = itertools.count(1000)
    _local = threading.local()

    def __init__(self, non_blocking=True):
        self.ptr = next(self._numbers)

    def __enter__(self):
        self._before = getattr(self._local, "present", None)
        self._local.present = self

    def __exit__(self, *_):
        self._local.present = self._before

    @classmethod
    def present(cls):
        found = getattr(cls._local, "present", None)
        return found or SimpleNamespace(ptr=device_arrays.current.device)


def make_devices(monkeypatch, cliques=(0, 0, 0, 0), seed=0):
    """Put emulated devices into the place of CUDA's; return the stand-in for CuPy."""
    cupy = device_arrays.make_cupy()
    cupy.emulated = _core.device.EmulatedRuntime(list(cliques), seed)
    cupy.cuda.Stream, cupy.cuda.get_current_stream = Stream, Stream.present
    cupy.cuda.runtime.getDeviceCount = lambda: len(cliques)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(on_device, "runtime", lambda: cupy.emulated)
    monkeypatch.setattr(device_arrays, "before_access", lambda array: cupy.emulated.run())
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (len(cliques), ""))
    return cupy


@pytest.fixture
def devices(monkeypatch):
    """Four devices that reach each other; the driver is too old for NCCL."""
    cupy = make_devices(monkeypatch)
    yield cupy
    cupy.emulated.hold(False)
    cupy.emulated.run()  # to the memory of arrays that are still kept for it
