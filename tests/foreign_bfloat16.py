"""bfloat16 arrays of another library on a GPU, and a stand-in for CuPy without bfloat16."""

from __future__ import annotations

import ctypes

import device_arrays
import numpy as np

from pycollective import dtypes

_name = ctypes.pythonapi.PyCapsule_GetName
_name.argtypes, _name.restype = [ctypes.py_object], ctypes.c_char_p
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p

BFLOAT = 4
#: Offsets of the type code by capsule name: 20 bytes into DLTensor, which may follow 32 other bytes.
PLACES = {b"dltensor": 20, b"dltensor_versioned": 52}


def _code(capsule):
    name = _name(capsule)
    return ctypes.c_uint8.from_address(_pointer(capsule, name) + PLACES[name])


class Foreign:
    """A bfloat16 array on a GPU, exported as PyTorch and JAX do."""

    dtype = "torch.bfloat16"

    def __init__(self, values, versioned=True):
        self.memory = np.array(values, dtypes.bfloat16)
        self._versioned = versioned

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, stream, max_version):
        assert stream and max_version >= (1, 0)
        capsule = self.memory.view(np.uint16).__dlpack__(
            max_version=max_version if self._versioned else None
        )
        _code(capsule).value = BFLOAT
        return capsule


class _Taken:
    def __init__(self, capsule):
        self._capsule = capsule

    def __dlpack_device__(self):
        return 1, 0  # for NumPy

    def __dlpack__(self, **_):
        return self._capsule


def refuse_bfloat16(monkeypatch, cupy):
    """Make the stand-in refuse to import bfloat16 and to compute with it, as CuPy 13 does."""

    def from_dlpack(array):
        assert array.__dlpack_device__() == (2, 0)
        capsule = array.__dlpack__(stream=1, max_version=(1, 0))
        if _code(capsule).value == BFLOAT:
            raise NotImplementedError("CuPy does not support bfloat16 yet")
        host = np.from_dlpack(_Taken(capsule))
        memory = (ctypes.c_char * host.nbytes).from_address(host.ctypes.data)
        memory.owner = host  # NumPy may not write to these arrays; CuPy may
        return device_arrays.DeviceArray(
            np.ndarray(host.shape, host.dtype, memory, 0, host.strides)
        )

    def refusing(function):
        def call(*args, **kwargs):
            flat = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
            flat += [x for arg in flat if isinstance(arg, (list, tuple)) for x in arg]
            if any(getattr(x, "dtype", None) == dtypes.bfloat16 for x in flat):
                raise TypeError("Unsupported type bfloat16")
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(cupy, "from_dlpack", from_dlpack, raising=False)
    for name in ("array", "asarray"):
        monkeypatch.setattr(cupy, name, refusing(getattr(cupy, name)))
    for name in ("__setitem__", "__array_ufunc__"):
        function = getattr(device_arrays.DeviceArray, name)
        monkeypatch.setattr(device_arrays.DeviceArray, name, refusing(function))
    functions = device_arrays.DeviceArray.__array_function__

    def concatenates(array, function, kinds, args, kwargs):
        whole = refusing(functions) if function is np.concatenate else functions
        return whole(array, function, kinds, args, kwargs)

    monkeypatch.setattr(device_arrays.DeviceArray, "__array_function__", concatenates)


def check_reductions(cupy, c, done):
    """Reduce arrays of bfloat16 as one rank of several; return the name of the engine's class.

    `done` waits for the devices.
    """
    size, total = c.size, sum(range(1, c.size + 1))
    values = np.arange(6).reshape(2, 3)
    for versioned in (True, False):
        x, out = Foreign(values * (c.rank + 1), versioned), Foreign(np.zeros((2, 3)), versioned)
        assert c.all_reduce(x, out=out) is out
        done()
        np.testing.assert_array_equal(out.memory, (values * total).astype(out.memory.dtype))
    assert c.all_reduce(x, "max", out=x) is x  # in place
    done()
    np.testing.assert_array_equal(x.memory, (values * size).astype(x.memory.dtype))
    found = c.all_reduce(x, "mean")
    assert isinstance(found, cupy.ndarray) and found.dtype == dtypes.bfloat16
    np.testing.assert_array_equal(cupy.asnumpy(found), x.memory)
    # Arrays of any layout, and several arrays in buckets.
    columns = Foreign(values)
    columns.memory = np.asfortranarray(columns.memory)
    assert c.all_reduce(columns, out=columns) is columns
    done()
    np.testing.assert_array_equal(columns.memory, (values * size).astype(x.memory.dtype))
    many = [Foreign(values + k) for k in range(3)]
    many[1].memory = np.asfortranarray(many[1].memory)
    c.all_reduce_many(many, out=many)
    done()
    for k, one in enumerate(many):
        np.testing.assert_array_equal(one.memory, ((values + k) * size).astype(x.memory.dtype))
    whole = Foreign(np.zeros(2 * size))
    c.all_gather(Foreign([c.rank, 7.0]), out=whole)
    done()
    assert whole.memory.tolist() == [v for r in range(size) for v in (r, 7.0)]
    return type(c._gpu.nccl or c._gpu.own).__name__
