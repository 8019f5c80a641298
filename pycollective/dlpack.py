"""Import of bfloat16 arrays by DLPack, for a CuPy that does not support them.

CuPy arrays can have the dtype of ``ml_dtypes``, but CuPy's DLPack import does not know bfloat16. The
import therefore gets 16-bit integers, which are then viewed as bfloat16.
"""

from __future__ import annotations

import ctypes
from typing import Any

_UINT, _BFLOAT = 1, 4  # DLDataTypeCode


class _DataType(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    ]


class _Tensor(ctypes.Structure):
    """``DLTensor`` of DLPack's header, the first field of an unversioned capsule's memory."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def _tensor_in(capsule: Any) -> _Tensor:
    """Return the tensor in a capsule that is not consumed; it shares the capsule's memory."""
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.major > 1:
            raise BufferError(
                f"DLPack {versioned.major}.{versioned.minor} is not supported; version 1 is the latest"
            )
        tensor: _Tensor = versioned.tensor
        return tensor
    return _Tensor.from_address(_pointer(capsule, b"dltensor"))


def is_bfloat16(value: Any) -> bool:
    """Return True if the name of an array's dtype contains bfloat16, in any library."""
    return "bfloat16" in str(getattr(value, "dtype", ""))


class AsBits:
    """A bfloat16 array that exports its memory as unsigned 16-bit integers."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> Any:
        capsule = self._array.__dlpack__(**how)
        dtype = _tensor_in(capsule).dtype
        if (dtype.code, dtype.bits, dtype.lanes) != (_BFLOAT, 16, 1):
            raise BufferError("an array whose dtype is called bfloat16 exports another type")
        dtype.code = _UINT  # changes this capsule only: each export makes a new one
        return capsule
