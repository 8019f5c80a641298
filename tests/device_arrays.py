"""A small stand-in for CuPy: arrays of a device, and the module they belong to."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import sys
import threading
import types

import host_kernels
import numpy as np

__all__ = ["Device", "DeviceArray", "make_cupy"]


def _at_once(array):
    """Do nothing: devices of this module have finished an operation when it returns."""


before_access = _at_once
"""Called with every array whose elements the host is about to read; tests replace it by a wait."""


#: Functions whose result length depends on the values: CuPy copies the length to the host.
WAITING = {"argwhere", "bincount", "extract", "flatnonzero", "nonzero", "repeat", "unique"}


#: Functions that compute nothing.
VIEWS = {"broadcast_to", "empty", "empty_like", "expand_dims", "moveaxis", "reshape", "squeeze"}
VIEWS |= {"swapaxes", "transpose"}


class _Current(threading.local):
    device = 0
    #: The work of this thread that a graph repeats, or None.
    recorded = None


current = _Current()


def computed(function):
    """Return a function's result as arrays of the host; a graph computes it anew into these arrays."""
    with np.errstate(all=None if current.recorded is None else "ignore"):
        result = function()
    if isinstance(result, (list, tuple)):
        result = type(result)(np.asarray(part) for part in result)
    elif isinstance(result, np.generic):
        result = np.asarray(result)
    if current.recorded is not None:
        current.recorded.append((function, result))
    return result


def changed(function):
    """Call a function that changes arrays; while a graph is recorded, the graph will do so."""
    if current.recorded is None:
        function()
    else:
        current.recorded.append((function, None))


class Graphs:
    """The part of ``cupy.cuda.runtime`` for graphs: a graph is a list of functions and their results."""

    def __init__(self):
        self.alive = {}
        self.launched = 0

    def begin(self):
        assert current.recorded is None
        current.recorded = []

    def streamEndCapture(self, stream):
        number, work, current.recorded = len(self.alive) + 1, current.recorded, None
        self.alive[number] = work
        return number

    def graphInstantiate(self, graph):
        self.alive[-graph] = self.alive[graph]
        return -graph

    def graphDestroy(self, graph):
        self.alive[graph] = None

    graphExecDestroy = graphDestroy

    def graphLaunch(self, graph, stream):
        assert current.recorded is None
        self.launched += 1
        sys.modules["cupy"].calls += 1
        for function, result in self.alive[graph]:
            found = function()
            if result is not None:
                several = isinstance(result, (list, tuple))
                for old, new in zip(result, found, strict=True) if several else [(result, found)]:
                    np.copyto(old, new)


class Device:
    """A device, and the block in which it is the current one of this thread."""

    def __init__(self, number):
        self.id = number

    def __enter__(self):
        self._before, current.device = current.device, self.id

    def __exit__(self, *exc_info):
        current.device = self._before


class _Stream(contextlib.nullcontext):
    ptr = 7

    def wait_event(self, event):
        self.waits_for = event

    def begin_capture(self):
        sys.modules["cupy"].cuda.runtime.begin()


class PinnedMemory:
    """Host memory that the device writes to."""

    def __init__(self, size):
        self.memory = ctypes.create_string_buffer(size)
        self.ptr = ctypes.addressof(self.memory)


class _Event:
    """An event that completes when it is waited for, and counts the calls since it was recorded."""

    def __init__(self, disable_timing=False):
        assert disable_timing

    def record(self, stream):
        self._before = sys.modules["cupy"].calls

    def synchronize(self):
        cupy = sys.modules["cupy"]
        cupy.waits.append((threading.current_thread().name, cupy.calls - self._before))


class _Pointer:
    """``array.data``, which keeps the memory of an array alive, but not the array."""

    def __init__(self, array):
        self._memory, self._device = array._memory, array.device
        self.ptr = self.address = self._memory.ctypes.data

    def copy_to_host_async(self, target, size, stream):
        assert stream.ptr and size == self._memory.nbytes
        before_access(self)
        ctypes.memmove(target, self.ptr, size)

    def copy_from_device_async(self, source, size, stream):
        assert size == self._memory.nbytes
        sys.modules["cupy"].calls += 1
        ctypes.memmove(self.ptr, source.ptr, size)

    def copy_from_host_async(self, source, size, stream):
        assert stream.ptr and size == self._memory.nbytes
        sys.modules["cupy"].sent += 1
        ctypes.memmove(self.ptr, source, size)

    device = property(lambda self: self._device)


class DeviceArray:
    """A NumPy array that behaves as CuPy's do. It takes part in NumPy's functions through their
    protocols, and refuses to become a NumPy array or to mix with one silently."""

    def __init__(self, host, dtype=None, memptr=None):
        if memptr is not None:  # a shape, in memory that another object owns
            size = int(np.prod(host)) * np.dtype(dtype).itemsize
            memory = (ctypes.c_char * size).from_address(memptr.address)
            memory.owner = memptr
            host = np.frombuffer(memory, dtype).reshape(host)
        assert isinstance(host, (np.ndarray, np.generic))
        self._memory = np.asarray(host)
        self.device = Device(current.device)

    @property
    def _host(self):
        before_access(self)
        return self._memory

    shape = property(lambda self: self._memory.shape)
    dtype = property(lambda self: self._memory.dtype)
    ndim = property(lambda self: self._memory.ndim)
    size = property(lambda self: self._memory.size)
    nbytes = property(lambda self: self._memory.nbytes)
    flags = property(lambda self: self._memory.flags)
    base = property(lambda self: None)
    strides = property(lambda self: self._memory.strides)
    itemsize = property(lambda self: self._memory.itemsize)
    data = property(_Pointer)
    T = property(lambda self: DeviceArray(self._host.T))

    def require_present(self):
        if self.device.id != current.device:
            raise ValueError("Array device must be same as the current device")

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        assert method in ("__call__", "at")
        sys.modules["cupy"].calls += 1
        hosts = [host_of(i) for i in inputs]
        if out is not None:
            kwargs["out"] = tuple(host_of(o) for o in out)
            changed(lambda: getattr(ufunc, method)(*hosts, **kwargs))
            return out[0]
        return device_of(computed(lambda: getattr(ufunc, method)(*hosts, **kwargs)))

    def __array_function__(self, function, kinds, args, kwargs):
        if function is np.may_share_memory:  # compares addresses alone
            return function(*(array._memory for array in args))
        sys.modules["cupy"].calls += function.__name__ not in VIEWS
        sys.modules["cupy"].fetched += function.__name__ in WAITING
        args, kwargs = deep(args), deep(kwargs)
        if function is np.copyto:
            changed(lambda: function(*args, **kwargs))
            return None
        return device_of(computed(lambda: function(*args, **kwargs)))

    def __getattr__(self, name):
        method = getattr(self._host, name)
        assert callable(method), name

        def call(*args, **kwargs):
            hosts, named = deep(args), deep(kwargs)
            result = computed(lambda: method(*hosts, **named))
            owners = (
                self._memory,
                self._memory if self._memory.base is None else self._memory.base,
            )
            same = result is self._memory or any(getattr(result, "base", 0) is o for o in owners)
            sys.modules["cupy"].calls += not same
            return device_of(result)

        return call

    def __getitem__(self, index):
        indices = index if isinstance(index, tuple) else (index,)
        sys.modules["cupy"].fetched += any(
            getattr(i, "dtype", None) == np.dtype(bool) for i in indices
        )
        host, places = self._host, deep(index)
        return device_of(computed(lambda: np.asarray(host[places])))

    def __setitem__(self, index, value):
        self.require_present()
        sys.modules["cupy"].calls += 1
        host, places, new = self._host, deep(index), host_of(value)
        changed(lambda: host.__setitem__(places, new))

    def __len__(self):
        return len(self._host)


def counted(function):
    """Return a function whose calls are counted, since each would be a launch, or several."""

    def call(*args, **kwargs):
        sys.modules["cupy"].calls += 1
        return function(*args, **kwargs)

    return call


def _fetching(name):
    def fetch(self):
        sys.modules["cupy"].fetched += 1
        return getattr(self._host, name)()

    return fetch


# These methods copy the values to the host.
for _name in ["item", "tolist", "__bool__", "__int__", "__float__", "__index__"]:
    setattr(DeviceArray, _name, _fetching(_name))


def _operator(name):
    def operator(self, *others):
        method, hosts = getattr(self._host, name), [host_of(other) for other in others]
        if name.startswith("__i") and name != "__invert__":
            changed(lambda: method(*hosts))
            return self
        return device_of(computed(lambda: method(*hosts)))

    return counted(operator)


for _name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]:
    for _full in (f"__{_name}__", f"__r{_name}__", f"__i{_name}__"):
        setattr(DeviceArray, _full, _operator(_full))
for _full in [
    "__matmul__",
    "__neg__",
    "__abs__",
    "__invert__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__eq__",
    "__ne__",
]:
    setattr(DeviceArray, _full, _operator(_full))


def host_of(value):
    if isinstance(value, DeviceArray):
        value.require_present()
        return value._host
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return value


def deep(value):
    if isinstance(value, (list, tuple)):
        return type(value)(deep(v) for v in value)
    if isinstance(value, dict):
        return {k: deep(v) for k, v in value.items()}
    if isinstance(value, slice):
        return value
    return host_of(value)


def device_of(value):
    if isinstance(value, (np.ndarray, np.generic)):
        return DeviceArray(value)
    if isinstance(value, (list, tuple)):
        return type(value)(device_of(v) for v in value)
    return value


def on_device(function, counts=True):
    def call(*args, **kwargs):
        args, kwargs = deep(args), deep(kwargs)
        return DeviceArray(computed(lambda: function(*args, **kwargs)))

    return counted(call) if counts else call


class _Kernel(host_kernels.RawKernel):
    run = staticmethod(changed)

    @staticmethod
    def before_launch():
        sys.modules["cupy"].calls += 1
        before_access(types.SimpleNamespace(device=Device(current.device)))


def make_cupy():
    """Return a module that looks like CuPy."""
    module = types.ModuleType("cupy")
    graphs = Graphs()
    graphs.getDeviceCount, graphs.driverGetVersion = lambda: 2, lambda: 0
    module.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)
    module.ndarray = DeviceArray
    module.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    module.cuda = types.SimpleNamespace(
        Device=Device,
        # The driver is too old for every NCCL, so that arrays are reduced in host memory.
        runtime=graphs,
        MemoryPool=lambda: types.SimpleNamespace(malloc=None),
        using_allocator=lambda allocator: contextlib.nullcontext(),
        get_current_stream=_Stream,
        Event=_Event,
        Stream=lambda non_blocking: _Stream(),
        alloc_pinned_memory=PinnedMemory,
    )
    module.RawKernel = _Kernel

    def asarray(value, dtype=None):
        module.sent += isinstance(value, np.ndarray)
        if isinstance(value, DeviceArray):
            if dtype is None or value.dtype == dtype:
                return value
            host = value._host
            return DeviceArray(computed(lambda: np.asarray(host, dtype)))
        assert current.recorded is None, "a copy from the host, which a graph cannot repeat"
        return DeviceArray(np.array(value, dtype))

    def array(value, dtype=None, copy=True, order="K", subok=False):
        host = value._host if isinstance(value, DeviceArray) else value
        return DeviceArray(computed(lambda: np.array(host, dtype=dtype, copy=copy, order=order)))

    module.asarray, module.array = asarray, array

    #: Copies to the host and from it, and calls that would launch kernels. Each wait for an event
    #: is recorded with its thread and the number of calls before it.
    module.fetched = module.sent = module.calls = 0
    module.waits = []

    def asnumpy(value):
        module.fetched += 1
        return value._host.copy()

    module.asnumpy = asnumpy

    def ascontiguousarray(value, dtype=None):
        if value.flags.c_contiguous and value.ndim and dtype in (None, value.dtype):
            return value
        host = value._host
        module.calls += 1
        return DeviceArray(computed(lambda: np.ascontiguousarray(host, dtype)))

    module.ascontiguousarray = ascontiguousarray
    creators = "zeros ones empty full arange pad take_along_axis"
    for name in creators.split():
        setattr(module, name, on_device(getattr(np, name), name not in VIEWS))

    def add_at(a, i, b):
        host, places, values = a._host, deep(i), host_of(b)
        changed(lambda: np.add.at(host, places, values))

    module.add = types.SimpleNamespace(at=add_at)
    tricks = types.SimpleNamespace(as_strided=on_device(np.lib.stride_tricks.as_strided, False))
    module.lib = types.SimpleNamespace(stride_tricks=tricks)
    return module
