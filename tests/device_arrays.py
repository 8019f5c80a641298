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
    """Devices of this module are done with an operation when it returns."""


before_access = _at_once
"""Is given every array whose elements the host is about to read; tests may put a wait in its place."""


#: Functions whose result length depends on the values: CuPy copies the length to the host.
WAITING = {"argwhere", "bincount", "extract", "flatnonzero", "nonzero", "repeat", "unique"}


#: Functions that compute nothing.
VIEWS = {"broadcast_to", "empty", "empty_like", "expand_dims", "moveaxis", "reshape", "squeeze"}
VIEWS |= {"swapaxes", "transpose"}


class _Current(threading.local):
    device = 0


current = _Current()


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


class PinnedMemory:
    """Host memory that the device writes to."""

    def __init__(self, size):
        self.memory = ctypes.create_string_buffer(size)
        self.ptr = ctypes.addressof(self.memory)


class _Event:
    """Event that completes when it is waited for; records the number of calls between."""

    def __init__(self, disable_timing=False):
        assert disable_timing

    def record(self, stream):
        self._before = sys.modules["cupy"].calls

    def synchronize(self):
        cupy = sys.modules["cupy"]
        cupy.waits.append((threading.current_thread().name, cupy.calls - self._before))


class _Pointer:
    """``array.data``."""

    def __init__(self, array):
        self._array = array
        self.ptr = array._memory.ctypes.data

    def copy_to_host_async(self, target, size, stream):
        assert stream.ptr and size == self._array.nbytes
        ctypes.memmove(target, self._array._host.ctypes.data, size)

    def copy_from_host_async(self, source, size, stream):
        assert stream.ptr and size == self._array.nbytes
        sys.modules["cupy"].sent += 1
        ctypes.memmove(self.ptr, source, size)


class DeviceArray:
    """A NumPy array that behaves as CuPy's do: it takes part in NumPy's functions through their
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
        if out is not None:
            kwargs["out"] = tuple(host_of(o) for o in out)
        result = getattr(ufunc, method)(*(host_of(i) for i in inputs), **kwargs)
        return out[0] if out is not None else device_of(result)

    def __array_function__(self, function, kinds, args, kwargs):
        if function is np.may_share_memory:  # which is asked of addresses alone
            return function(*(array._memory for array in args))
        sys.modules["cupy"].calls += function.__name__ not in VIEWS
        sys.modules["cupy"].fetched += function.__name__ in WAITING
        return device_of(function(*deep(args), **deep(kwargs)))

    def __getattr__(self, name):
        method = getattr(self._host, name)
        assert callable(method), name

        def call(*args, **kwargs):
            result = method(*deep(args), **deep(kwargs))
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
        return device_of(np.asarray(self._host[deep(index)]))

    def __setitem__(self, index, value):
        self.require_present()
        sys.modules["cupy"].calls += 1
        self._host[deep(index)] = host_of(value)

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
        return device_of(getattr(self._host, name)(*(host_of(other) for other in others)))

    return counted(operator)


for _name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]:
    for _full in (f"__{_name}__", f"__r{_name}__", f"__i{_name}__"):
        setattr(DeviceArray, _full, _operator(_full))
for _full in [
    "__matmul__",
    "__neg__",
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
        return DeviceArray(function(*deep(args), **deep(kwargs)))

    return counted(call) if counts else call


class _Kernel(host_kernels.RawKernel):
    @staticmethod
    def before_launch():
        sys.modules["cupy"].calls += 1
        before_access(types.SimpleNamespace(device=Device(current.device)))


def make_cupy():
    """Return a module that looks like CuPy."""
    module = types.ModuleType("cupy")
    module.ndarray = DeviceArray
    module.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    module.cuda = types.SimpleNamespace(
        Device=Device,
        # A driver that is too old for every NCCL: what these devices have to sum goes over the host.
        runtime=types.SimpleNamespace(getDeviceCount=lambda: 2, driverGetVersion=lambda: 0),
        get_current_stream=_Stream,
        Event=_Event,
        Stream=lambda non_blocking: _Stream(),
        alloc_pinned_memory=PinnedMemory,
    )
    module.RawKernel = _Kernel

    def asarray(value, dtype=None):
        module.sent += isinstance(value, np.ndarray)
        return DeviceArray(
            np.asarray(value._host, dtype)
            if isinstance(value, DeviceArray)
            else np.array(value, dtype)
        )

    def array(value, dtype=None, copy=True, order="K", subok=False):
        host = value._host if isinstance(value, DeviceArray) else value
        return DeviceArray(np.array(host, dtype=dtype, copy=copy, order=order))

    module.asarray, module.array = asarray, array

    #: Copies to the host and from it, calls that would launch kernels, and of each wait for an event in
    #: which thread it was, and how many calls were made since.
    module.fetched = module.sent = module.calls = 0
    module.waits = []

    def asnumpy(value):
        module.fetched += 1
        return value._host.copy()

    module.asnumpy = asnumpy
    made = "zeros ones empty full arange pad take_along_axis ascontiguousarray"
    for name in made.split():
        setattr(module, name, on_device(getattr(np, name), name not in VIEWS))
    module.add = types.SimpleNamespace(at=lambda a, i, b: np.add.at(a._host, deep(i), host_of(b)))
    tricks = types.SimpleNamespace(as_strided=on_device(np.lib.stride_tricks.as_strided, False))
    module.lib = types.SimpleNamespace(stride_tricks=tricks)
    return module
