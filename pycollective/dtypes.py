"""The element types, under TensorFlow's names, as ``numpy.dtype`` objects.

``bfloat16`` is ``None`` unless the package ``ml_dtypes`` is installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "DType",
    "as_dtype",
    "bfloat16",
    "bool_",
    "float16",
    "float32",
    "float64",
    "int16",
    "int32",
    "int64",
    "int8",
    "is_differentiable",
    "is_supported",
    "string",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
]

DType = np.dtype

float16: np.dtype[Any] = np.dtype(np.float16)
float32: np.dtype[Any] = np.dtype(np.float32)
float64: np.dtype[Any] = np.dtype(np.float64)
int8: np.dtype[Any] = np.dtype(np.int8)
int16: np.dtype[Any] = np.dtype(np.int16)
int32: np.dtype[Any] = np.dtype(np.int32)
int64: np.dtype[Any] = np.dtype(np.int64)
uint8: np.dtype[Any] = np.dtype(np.uint8)
uint16: np.dtype[Any] = np.dtype(np.uint16)
uint32: np.dtype[Any] = np.dtype(np.uint32)
uint64: np.dtype[Any] = np.dtype(np.uint64)
bool_: np.dtype[Any] = np.dtype(np.bool_)
#: File names and lines of text in input pipelines, as Python's bytes; operations refuse this dtype.
string: np.dtype[Any] = np.dtype(object)

bfloat16: np.dtype[Any] | None
try:
    import ml_dtypes
except ImportError:
    bfloat16 = None
else:
    bfloat16 = np.dtype(ml_dtypes.bfloat16)


# Every step looks up these names; the table makes that fast.
_NAMED = {str(dtype): dtype for dtype in (float16, float32, float64, int32, int64)}
_NAMED["float"] = float32  # NumPy's is float64


def as_dtype(value: Any) -> np.dtype[Any]:
    """Return ``value`` (a dtype, a NumPy scalar type, ``float``, or a name) as a ``numpy.dtype``.

    ``float`` means float32 and ``int`` means int32, as in operations.

    Raises
    ------
    TypeError
        ``value`` is not a dtype, or tensors do not support the dtype.
    """
    if value is float:
        return float32
    if value is int:
        return int32
    known = _NAMED.get(value) if value.__class__ is str else None
    if known is not None:
        return known
    if isinstance(value, str) and value == "bfloat16":
        if bfloat16 is None:
            raise TypeError("dtype 'bfloat16' needs the package ml_dtypes: pip install ml_dtypes")
        return bfloat16
    try:
        dtype: np.dtype[Any] | None = None if value is None else np.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not is_supported(dtype):
        raise TypeError(
            f"{value!r} is not a dtype of tensors; use a bool, integer or floating-point type such as "
            "pycollective.float32 or 'int64'"
        )
    return dtype


def as_dtype_or_string(value: Any) -> np.dtype[Any]:
    """Return a dtype as `as_dtype`; the names ``"string"`` and ``"object"`` mean `string`."""
    return string if value in (string, "string") else as_dtype(value)


def is_supported(dtype: np.dtype[Any]) -> bool:
    """Return True if tensors can have this dtype: bool, integers, floating point, bfloat16."""
    return dtype.kind in "biuf" or (bfloat16 is not None and dtype == bfloat16)


def is_differentiable(dtype: np.dtype[Any]) -> bool:
    """Return True if gradients flow through tensors of this dtype: floating point, bfloat16."""
    return dtype.kind in "fV"
