"""NumPy or CuPy: the one module that knows the difference.

Code elsewhere works on "arrays" and uses three things that both libraries give it: the operators
and methods of the arrays themselves, NumPy's functions (CuPy arrays take part in them through the
protocols of NEP 13 and NEP 18: ``np.exp(x)`` of a CuPy array runs on its device), and what is here,
for where the two differ: making arrays, moving them between host and devices, and scattering. CuPy is
imported only where a GPU is asked for, or an array of another library lies on one.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pycollective.dlpack import AsBits, is_bfloat16
from pycollective.dtypes import bfloat16

#: A NumPy array, or a CuPy array in the same role.
Array: TypeAlias = npt.NDArray[Any]


def _cupy_of(value: Any) -> ModuleType | None:
    """Return the CuPy module when ``value`` is one of its arrays."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(value, cupy.ndarray) else None


def array_module(*arrays: Any) -> Any:
    """Return the module (``numpy`` or ``cupy``) that the given arrays belong to.

    Values that are no arrays do not count; without any array the answer is ``numpy``.
    """
    for array in arrays:
        if array.__class__ is not np.ndarray:
            module = _cupy_of(array)
            if module is not None:
                return module
    return np


def is_array(value: Any) -> bool:
    """Whether ``value`` is a NumPy or CuPy array."""
    return isinstance(value, np.ndarray) or _cupy_of(value) is not None


def on_host(array: Any) -> bool:
    """Whether a value can be looked at at once; of arrays on a device that would mean to wait for it."""
    return _cupy_of(array) is None


def to_numpy(array: Any) -> Array:
    """Return the array on the host: itself if it is NumPy's, else a copy of its values."""
    if array.__class__ is np.ndarray:
        return array
    module = _cupy_of(array)
    return np.asarray(array) if module is None else module.asnumpy(array)


def asarray(value: Any, dtype: npt.DTypeLike | None = None, like: Any = None) -> Array:
    """Return ``value`` as an array, copied only if its type, device or dtype must change.

    ``value`` is an array, a NumPy scalar or anything ``numpy.asarray`` takes. The result is of the
    library, and on the device, of ``like``; by default of those of ``value``.
    """
    if "cupy" not in sys.modules:
        return np.asarray(value, dtype=dtype)
    module = array_module(value) if like is None else array_module(like)
    if module is np:
        value = to_numpy(value)
    elif like is not None:
        if array_module(value) is np:
            value = np.asarray(value)
            if not value.ndim and value.dtype.kind in "biufc":
                # As an argument of a kernel: nothing is copied, and nobody waits.
                with beside(like):
                    scalar: Array = module.full((), value[()], dtype or value.dtype)
                return scalar
        value = placed(value, *device_of(like))
    with _HOST if like is None else beside(like):
        array: Array = module.asarray(value, dtype=dtype)
    return array


def filled(shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> Array:
    """Return a NumPy array of one value; numpy.full takes several times as long for few numbers."""
    array = np.empty(shape, dtype)
    array.fill(value)
    return array


def copy(array: Array) -> Array:
    """Return a writable array in C order that owns its memory, with the values of ``array``."""
    bits = as_bits(array)
    fresh: Array = array_module(array).array(bits, order="C", copy=True, subok=False)
    return fresh if bits is array else fresh.view(array.dtype)


def device_of(array: Any) -> tuple[str, int]:
    """Return where a value lies: the kind of device, ``"CPU"`` or ``"GPU"``, and its number.

    All that is no array of a GPU lies in the host's memory, which is ``("CPU", 0)``.
    """
    return ("CPU", 0) if _cupy_of(array) is None else ("GPU", int(array.device.id))


def placed(array: Array, kind: str, index: int) -> Array:
    """Return an array on a device: itself if it lies there, else a copy of its values.

    Text, objects and bfloat16 (which CuPy has from 14 on, and not everywhere) stay on the host.
    """
    if kind != "GPU":
        return array if array.__class__ is np.ndarray else to_numpy(array)
    if device_of(array) == (kind, index) or array.dtype.kind not in "biufc":
        return array
    if not on_host(array):
        return _on_another_gpu(array, index)
    import cupy

    with cupy.cuda.Device(index):
        moved: Array = cupy.asarray(array)
    return moved


def _on_another_gpu(array: Array, index: int) -> Array:
    """Return a copy of an array of one GPU on another, in the order of this thread's streams on both.

    CuPy copies on the stream of the GPU that the copy is for, which knows nothing of the other's.
    """
    from pycollective.nccl import device

    with beside(array):
        # Lines up what has gaps here, where the memory of that copy waits to be used again, too.
        source = array if array.flags.c_contiguous else copy(array)
        here = device.present_stream()
        written = device.event(here)
    with device.on(index):
        there = device.present_stream()
        device.stream_wait(there, [written])
        moved: Array = source.copy()  # of an array of another device it makes one on this
        read = device.event(there)
    with beside(array):
        device.stream_wait(here, [read])
    return moved


def scatter_add(target: Array, index: Any, values: Array) -> None:
    """Add ``values`` to ``target[index]`` in place; places that occur several times add up."""
    module = _cupy_of(target)
    if module is not None:
        module.add.at(target, index, values)
        return
    rows = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if (
        isinstance(rows, np.ndarray)
        and rows.dtype.kind in "iu"
        and target.ndim > 1
        and target.flags.c_contiguous
        and values.shape == rows.shape + target.shape[1:]
    ):
        # The same additions in the same order; NumPy is several times as fast with one axis.
        width = math.prod(target.shape[1:])
        target, values = target.reshape(-1), values.reshape(-1)
        index = (rows.reshape(-1, 1).astype(np.intp) * width + np.arange(width)).reshape(-1)
    np.add.at(target, index, values)


# Devices of DLPack that are CUDA's: its own memory, and what it moves to and fro by itself.
_CUDA_DEVICES = (2, 13)


def is_on_gpu(value: Any) -> bool:
    """Whether ``value`` is an array on a GPU: CuPy's, or one with an interface that CuPy takes."""
    if isinstance(value, np.ndarray):
        return False
    if _cupy_of(value) is not None or hasattr(value, "__cuda_array_interface__"):
        return True
    device = getattr(value, "__dlpack_device__", None)
    return device is not None and device()[0] in _CUDA_DEVICES


def any_on_gpu(values: Sequence[Any]) -> bool:
    """Whether one of several values is an array on a GPU; no call for each where all are NumPy's."""
    others = [value for value in values if value.__class__ is not np.ndarray]
    return any(map(is_on_gpu, others))


def gpu_array(value: Any) -> Array:
    """Return the CuPy array of the memory of an array on a GPU.

    What is being computed of it on another stream is waited for, as the interface of its library
    provides.

    Raises
    ------
    TypeError
        CuPy is not installed, or cannot take the array.
    """
    if _cupy_of(value) is not None:
        array: Array = value
        return array
    name = type(value).__name__
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError:
        raise TypeError(
            f"{name} lies on a GPU, and CuPy, through which GPU arrays are handled, is not installed: "
            "pip install 'pycollective[cuda12]' or '[cuda13]', or copy it to the host first"
        ) from None
    try:
        if not hasattr(value, "__dlpack__"):
            array = cupy.asarray(value)
        elif not is_bfloat16(value):
            array = cupy.from_dlpack(value)
        elif bfloat16 is None:
            raise TypeError(
                f"{name} of bfloat16 needs the package ml_dtypes: pip install 'pycollective[bf16]'"
            )
        else:
            array = cupy.from_dlpack(AsBits(value)).view(bfloat16)
    except (BufferError, RuntimeError, ValueError) as error:
        raise TypeError(f"CuPy cannot take this {name}: {error}") from None
    return array


def as_bits(array: Array) -> Array:
    """Return a GPU's array of halves that CuPy does not know as integers; any other as it is.

    CuPy's arrays can have the dtypes of ``ml_dtypes``, and its kernels cannot: what only moves elements
    goes by their bits.
    """
    if array.dtype.kind != "V" or on_host(array):
        return array
    bits: Array = array.view(np.dtype(f"u{array.dtype.itemsize}"))
    return bits


def assign(target: Array, values: Array) -> None:
    """Copy elements into an array of the same dtype, from the same device or from the host."""
    if target.__class__ is np.ndarray:
        target[...] = values
        return
    bits = as_bits(target)
    with beside(target):
        bits[...] = asarray(values.view(bits.dtype), like=bits)


def address(array: Any) -> int:
    """Return where the memory of an array begins."""
    return int(array.ctypes.data if _cupy_of(array) is None else array.data.ptr)


def empty(shape: Any, dtype: npt.DTypeLike, like: Any) -> Array:
    """Return a new array of the library, and on the device, of another one."""
    with beside(like):
        array: Array = array_module(like).empty(shape, dtype)
    return array


def empty_on_gpu(shape: Any, dtype: npt.DTypeLike) -> Array:
    """Return a new array on this thread's present CuPy device."""
    cupy: Any = importlib.import_module("cupy")
    array: Array = cupy.empty(shape, dtype)
    return array


def gpu_count() -> tuple[int, str]:
    """Return how many GPUs CuPy can use and, when that is none, why."""
    if importlib.util.find_spec("cupy") is None:
        return 0, "CuPy is not installed: pip install 'pycollective[cuda12]' or '[cuda13]'"
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()), ""
    except Exception as error:  # CuPy without a driver, or of the wrong CUDA version
        return 0, str(error)


def on_device(kind: str, index: int) -> AbstractContextManager[Any]:
    """Return the context in which new CuPy arrays lie on a GPU; for a CPU one that does nothing."""
    if kind != "GPU":
        return _HOST
    import cupy

    device: AbstractContextManager[Any] = cupy.cuda.Device(index)
    return device


def limit_memory(index: int, size: int) -> None:
    """Let CuPy take at most so many bytes of a GPU."""
    import cupy

    with cupy.cuda.Device(index):
        cupy.get_default_memory_pool().set_limit(size=size)


def beside(array: Any) -> AbstractContextManager[Any]:
    """Return the context in which new arrays lie on an array's device, as operations on it need."""
    return _HOST if array.__class__ is np.ndarray else on_device(*device_of(array))


_HOST = nullcontext()
