"""NCCL's numbers for element types and reductions."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycollective import _core

BYTES = 1
"""The type of bytes, ``ncclUint8``, for calls that only move data."""

#: ``ncclDataType_t`` and the first version of NCCL that has it, by the dtype's name.
_TYPES = {
    "int8": (0, 0), "uint8": (1, 0), "int32": (2, 0), "uint32": (3, 0), "int64": (4, 0),
    "uint64": (5, 0), "float16": (6, 0), "float32": (7, 0), "float64": (8, 0),
    "bfloat16": (9, 21000), "float8_e4m3fn": (10, 22400), "float8_e5m2": (11, 22400),
}  # fmt: skip
#: ``ncclRedOp_t``.
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "mean": 4}
#: The same for bools, which are bytes of 0 or 1.
_LOGICAL = {"and": 3, "min": 3, "or": 2, "max": 2}


def count_and_type(
    library: _core.nccl.Library, count: int, dtype: np.dtype[Any]
) -> tuple[int, int]:
    """Return the number of elements and NCCL's type for a reduction of ``count`` elements."""
    if dtype == np.bool_:
        return count, BYTES
    if dtype.kind == "c":  # sums and means treat it as a pair of floats
        return 2 * count, _TYPES[f"float{4 * dtype.itemsize}"][0]
    number, since = _TYPES.get(dtype.name, (None, 0))
    if number is None or not dtype.isnative:
        raise TypeError(
            f"NCCL has no reduction for dtype {dtype}. It reduces bool, ints of 8, 32 and 64 bits, "
            "float16, bfloat16, float32, float64 and complex. Convert the array, or give a host array"
        )
    if library.version < since:
        raise TypeError(
            f"NCCL {library.version_text} ({library.path}) does not support {dtype}: install NCCL "
            f"{since // 10000}.{since // 100 % 100} or later"
        )
    return count, number


def reduction_of(op: str, dtype: np.dtype[Any]) -> int:
    """Return NCCL's number of a reduction of a dtype."""
    ops = _LOGICAL if dtype == np.bool_ else _OPS
    if op not in ops or (dtype.kind == "c" and op not in ("sum", "mean")):
        raise TypeError(f"NCCL has no reduction '{op}' for dtype {dtype}: give a host array")
    return ops[op]
