"""Ranks on emulated devices, in the test's own thread or behind a stand-in for CuPy."""

from __future__ import annotations

import itertools
import sys
import threading

import device_arrays
import numpy as np

from pycollective import _core, array_backend
from pycollective.comm import local_group, on_device, packing

DEADLINE = 20.0
JUNK = 0xAA


def layouts(size):
    """Return layouts: the device of each rank, and the clique of each device."""
    separate = list(range(size))
    pairs = [rank // 2 for rank in separate]
    return {
        "one device": ([0] * size, [0]),
        "all reach": (separate, [0] * size),
        "none reach": (separate, separate),
        "pairs in cliques": (pairs, [device // 2 for device in range(max(pairs) + 1)]),
    }


class World:
    """A group of ranks, with one stream for each rank or for each device."""

    def __init__(self, devices, cliques, seed=0, shared_streams=False):
        self.devices = devices
        self.streams = [100 if shared_streams else 100 + rank for rank in range(len(devices))]
        self.runtime = _core.device.EmulatedRuntime(cliques, seed)
        self.communicators = local_group(len(devices), timeout=DEADLINE)
        matcher = _core.device.CallMatcher(self.communicators[0]._group, self.runtime)
        self.callers = [_core.device.Caller(c._core, matcher) for c in self.communicators]
        self.kept = []

    def own(self, rank, array):
        """Place an array on a rank's device."""
        self.kept.append(array)
        self.runtime.own(self.devices[rank], array.ctypes.data, array.nbytes)
        return array

    def write(self, rank, target, source):
        """Copy, in the order of a rank's stream."""
        self.kept.append(source)
        device = self.devices[rank]
        self.runtime.copy(
            target.ctypes.data, device, source.ctypes.data, device, target.nbytes,
            self.streams[rank],
        )  # fmt: skip

    def call(self, rank, collective, given, result, how, *, count, op=None, root=0, shape=(),
             reproducible=False, sent=None, received=None, async_op=True,
             timeout=DEADLINE):  # fmt: skip
        """Make a rank's call; by default, do not wait for the other ranks."""
        array = given if given is not None else result
        operation = _core.device.Operation()
        self.callers[rank].call(
            operation, _core.Collective.__members__[collective],
            0 if given is None else given.ctypes.data,
            0 if result is None else result.ctypes.data,
            count, list(shape), array.dtype, op, root, how, reproducible, sent, received,
            self.devices[rank], self.streams[rank], None, async_op, False, timeout,
        )  # fmt: skip
        return operation

    def run(self, collective, inputs, outputs, how, *, in_place=False, **kind):
        """Make the call of each rank, and return the results.

        The streams write the inputs just before the call, and overwrite the inputs and outputs just
        after it.
        """
        size, found = len(self.devices), []
        for rank in range(size):
            given, result = inputs[rank], outputs[rank]
            place = None if given is None else self.own(rank, np.full_like(given, 0))
            target = None
            if result is not None:
                target = place if in_place else self.own(rank, np.full_like(result, 0))
            if place is not None:
                self.write(rank, place, given)
            counts = {k: v[rank] for k, v in kind.items() if k in ("sent", "received")}
            self.call(rank, collective, place, target, how, **{**kind, **counts})
            found.append((place, target))
        results = []
        for rank, (place, target) in enumerate(found):
            results.append(None if target is None else np.zeros_like(target))
            if target is not None:
                self.write(rank, results[-1], target)
            for array in (place, target):
                if array is not None and array.nbytes:
                    self.write(rank, array, np.full(array.nbytes, JUNK, np.uint8))
        self.runtime.run()
        return results


class Stream:
    """A stream of the stand-in for CuPy, with the number that the executor gets."""

    _numbers = itertools.count(1000)
    _local = threading.local()

    def __init__(self, non_blocking=True, ptr=None):
        self.ptr = next(self._numbers) if ptr is None else ptr

    def __enter__(self):
        self._before = getattr(self._local, "present", None)
        self._local.present = self

    def __exit__(self, *_):
        self._local.present = self._before

    def wait_event(self, event):
        """Do nothing: the stand-in for CuPy executes everything at once."""

    def synchronize(self):
        sys.modules["cupy"].emulated.run()

    @classmethod
    def present(cls):
        found = getattr(cls._local, "present", None)
        return found or cls(ptr=0)  # the default stream of every device


def make_devices(monkeypatch, cliques=(0, 0, 0, 0), seed=0):
    """Install emulated devices instead of CUDA's; return the stand-in for CuPy."""
    cupy = device_arrays.make_cupy()
    cupy.emulated = _core.device.EmulatedRuntime(list(cliques), seed)
    cupy.cuda.Stream, cupy.cuda.get_current_stream = Stream, Stream.present
    cupy.cuda.runtime.getDeviceCount = lambda: len(cliques)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(on_device, "runtime", lambda: cupy.emulated)
    cupy.kept, launch = [], packing._launch

    def keeping(flat, arrays, unpacks):
        """Keep the memory that CuPy's pool would keep for the stream."""
        cupy.kept.append((flat, arrays))
        launch(flat, arrays, unpacks)

    monkeypatch.setattr(packing, "_launch", keeping)
    monkeypatch.setattr(device_arrays, "before_access", lambda array: cupy.emulated.run())
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (len(cliques), ""))
    return cupy
