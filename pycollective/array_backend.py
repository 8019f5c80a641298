"""NumPy or CuPy: the one module that distinguishes them.

Code elsewhere works on arrays through their operators and methods, and through NumPy's functions. NEP 13
and NEP 18 make these work on CuPy arrays: ``np.exp(x)`` of a CuPy array runs on its device. This module
has the operations in which the libraries differ: making arrays, moving them between host and devices,
and scattering. CuPy is imported only if a GPU is requested, or if an array of another library is on
a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pycollective.dlpack import AsBits, is_bfloat16
from pycollective.dtypes import bfloat16
from pycollective.nccl import device

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    _Arrays = TypeVarTuple("_Arrays")

#: A NumPy array, or a CuPy array in the same role.
Array: TypeAlias = npt.NDArray[Any]
#: A dtype object, because comparing a dtype with a class takes several times as long.
FLOAT32 = np.dtype(np.float32)
#: The dtypes of the compiled kernels, and of most kernels on a GPU.
REAL_DTYPES = frozenset((FLOAT32, np.dtype(np.float64)))
_NUMPY = np.ndarray


def _cupy_of(value: Any) -> ModuleType | None:
    """Return the CuPy module if ``value`` is a CuPy array, else None."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(value, cupy.ndarray) else None


def array_module(*arrays: Any) -> Any:
    """Return the module of the given arrays, ``cupy`` if one of them is a CuPy array, else ``numpy``.

    Values that are not arrays are ignored.
    """
    for array in arrays:
        if array.__class__ is not np.ndarray:
            module = _cupy_of(array)
            if module is not None:
                return module
    return np


def is_array(value: Any) -> bool:
    """Return True if ``value`` is a NumPy or CuPy array."""
    return isinstance(value, np.ndarray) or _cupy_of(value) is not None


def on_host(array: Any) -> bool:
    """Return True if reading a value does not have to wait for a device."""
    return array.__class__ is np.ndarray or _cupy_of(array) is None


def to_numpy(array: Any) -> Array:
    """Return the array on the host: the array itself if it is NumPy's, else a copy."""
    if array.__class__ is np.ndarray:
        return array
    module = _cupy_of(array)
    return np.asarray(array) if module is None else module.asnumpy(array)


def asarray(value: Any, dtype: npt.DTypeLike | None = None, like: Any = None) -> Array:
    """Return ``value`` as an array, copied only if its type, device or dtype must change.

    ``value`` is an array, a NumPy scalar or anything else that ``numpy.asarray`` accepts. The result has
    the library and the device of ``like``, by default those of ``value``.
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
                # CuPy passes a scalar as a kernel's argument, without a copy or a wait.
                with beside(like):
                    scalar: Array = module.full((), value[()], dtype or value.dtype)
                return scalar
        value = placed(value, *device_of(like))
    with _HOST if like is None else beside(like):
        array: Array = module.asarray(value, dtype=dtype)
    return array


def filled(shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> Array:
    """Return a NumPy array of one value, for small arrays several times as fast as numpy.full."""
    array = np.empty(shape, dtype)
    array.fill(value)
    return array


def copy(array: Array) -> Array:
    """Return a writable array in C order that owns its memory, with the values of ``array``."""
    if array.__class__ is np.ndarray:
        return array.copy()  # type: ignore[no-any-return]
    bits = as_bits(array)
    fresh: Array = array_module(array).array(bits, order="C", copy=True, subok=False)
    return fresh if bits is array else fresh.view(array.dtype)


def device_of(array: Any) -> tuple[str, int]:
    """Return the kind (``"CPU"`` or ``"GPU"``) and the number of the device that holds a value.

    All values other than CuPy arrays are on ``("CPU", 0)``.
    """
    return ("CPU", 0) if _cupy_of(array) is None else ("GPU", int(array.device.id))


def placed(array: Array, kind: str, index: int) -> Array:
    """Return an array on a device: the array itself if it is there already, else a copy.

    Text, objects and bfloat16 (which only some CuPy 14 functions support) stay on the host.
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
    """Copy an array to another GPU, in the order of this thread's streams on both GPUs.

    CuPy copies on the target GPU's stream, which does not wait for the source GPU's stream.
    """
    with beside(array):
        # Make the source contiguous here, where its memory is freed in the order of this stream.
        source = array if array.flags.c_contiguous else copy(array)
        here = device.present_stream()
        written = device.event(here)
    with device.on(index):
        there = device.present_stream()
        device.stream_wait(there, [written])
        moved: Array = source.copy()  # CuPy makes the copy on the current device
        read = device.event(there)
    with beside(array):
        device.stream_wait(here, [read])
    return moved


def scatter_add(target: Array, index: Any, values: Array) -> None:
    """Add ``values`` to ``target[index]`` in place; repeated indices add up."""
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
        # The same additions in the same order, but NumPy is several times as fast on one axis.
        width = math.prod(target.shape[1:])
        target, values = target.reshape(-1), values.reshape(-1)
        index = (rows.reshape(-1, 1).astype(np.intp) * width + np.arange(width)).reshape(-1)
    np.add.at(target, index, values)


def scattered(shape: tuple[int, ...], index: Any, values: Array) -> Array:
    """Return zeros to which ``values`` are added at ``index``, in the dtype of the values."""
    dtype = values.dtype
    # Sum halves in float32: in half precision many small summands would be lost.
    wide = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else dtype
    whole: Array = array_module(values).zeros(shape, wide)
    scatter_add(whole, index, values.astype(wide, copy=False))
    return whole.astype(dtype, copy=False)


# Devices of DLPack that belong to CUDA: device memory, and managed memory.
_CUDA_DEVICES = (2, 13)


def is_on_gpu(value: Any) -> bool:
    """Return True if ``value`` is on a GPU: a CuPy array, or one that CuPy can import."""
    if isinstance(value, np.ndarray):
        return False
    if _cupy_of(value) is not None or hasattr(value, "__cuda_array_interface__"):
        return True
    device = getattr(value, "__dlpack_device__", None)
    return device is not None and device()[0] in _CUDA_DEVICES


def any_on_gpu(values: Sequence[Any]) -> bool:
    """Return True if one of several values is on a GPU; fast if all are NumPy arrays."""
    others = [value for value in values if value.__class__ is not np.ndarray]
    return any(map(is_on_gpu, others))


def gpu_array(value: Any) -> Array:
    """Return a CuPy array that shares the memory of an array on a GPU.

    The interface of the array's library makes the current stream wait for the array's computation.
    """
    if _cupy_of(value) is not None:
        array: Array = value
        return array
    name = type(value).__name__
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError:
        raise TypeError(
            f"{name} is on a GPU, and CuPy, which handles GPU arrays, is not installed: "
            "pip install 'pycollective[cuda12]' or '[cuda13]'. Or copy the array to the host first"
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
    """Return a GPU array of an ``ml_dtypes`` dtype viewed as integers; any other array unchanged.

    CuPy arrays can have these dtypes, but CuPy's kernels cannot handle them. Operations that only move
    elements therefore use the integers.
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
    """Return the address of an array's memory."""
    return int(array.ctypes.data if _cupy_of(array) is None else array.data.ptr)


def empty(shape: Any, dtype: npt.DTypeLike, like: Any) -> Array:
    """Return a new array of the library and on the device of ``like``."""
    with beside(like):
        array: Array = array_module(like).empty(shape, dtype)
    return array


def empty_on_gpu(shape: Any, dtype: npt.DTypeLike) -> Array:
    """Return a new array on this thread's current CuPy device."""
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError:
        raise ImportError(
            "GPU arrays need CuPy, which is not installed: pip install 'pycollective[cuda12]' or "
            "'[cuda13]'"
        ) from None
    array: Array = cupy.empty(shape, dtype)
    return array


def gpu_count() -> tuple[int, str]:
    """Return the number of GPUs that CuPy can use, and if it is 0 the reason."""
    if importlib.util.find_spec("cupy") is None:
        return 0, "CuPy is not installed: pip install 'pycollective[cuda12]' or '[cuda13]'"
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()), ""
    except Exception as error:  # CuPy without a driver, or of the wrong CUDA version
        return 0, str(error)


def on_device(kind: str, index: int) -> AbstractContextManager[Any]:
    """Return a context in which new CuPy arrays are on a GPU; it does nothing for a CPU."""
    if kind != "GPU":
        return _HOST
    import cupy

    device: AbstractContextManager[Any] = cupy.cuda.Device(index)
    return device


def limit_memory(index: int, size: int) -> None:
    """Limit CuPy's memory pool on a GPU to ``size`` bytes."""
    import cupy

    with cupy.cuda.Device(index):
        cupy.get_default_memory_pool().set_limit(size=size)


def beside(array: Any) -> AbstractContextManager[Any]:
    """Return a context for operations on an array: new arrays are on its device."""
    return _HOST if array.__class__ is np.ndarray else on_device(*device_of(array))


_HOST = nullcontext()


def native(*arrays: Unpack[_Arrays]) -> tuple[Unpack[_Arrays]] | None:
    """Return the arrays in C order and aligned, or None if the compiled kernels do not support them.

    The kernels need NumPy arrays that are all float32 or all float64. None stands for an array that
    an operation leaves out, and stays None.
    """
    given: tuple[Any, ...] = arrays
    dtype, fits = None, True
    for array in given:
        if array is None:
            continue
        if array.__class__ is not _NUMPY:
            return None
        kind = array.dtype
        if kind is not dtype:  # a dtype object is nearly always shared
            if kind not in REAL_DTYPES or (dtype is not None and kind != dtype):
                return None
            dtype = kind
        flags = array.flags
        if not (flags.carray or (flags.c_contiguous and flags.aligned)):
            fits = False
    if fits:
        return arrays
    copies: Any = tuple([None if array is None else in_c_order(array) for array in given])
    return copies  # type: ignore[no-any-return]


def in_c_order(array: Array) -> Array:
    """Return an array in C order, and on the host aligned."""
    flags = array.flags
    on_gpu = array.__class__ is not np.ndarray and not on_host(array)
    if flags.c_contiguous and (on_gpu or flags.aligned):
        return array
    copy: Array = array_module(array).array(array, order="C", copy=True)
    return copy
