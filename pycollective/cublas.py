"""Products of matrices on a GPU by cuBLAS, also in work that becomes a CUDA graph.

CuPy refuses its own products while a stream records. The library is the one that CuPy has loaded. Each
thread has a handle for each stream, with memory of its own. So products of two streams, or of a
graph and of the program, share no memory.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import weakref
from typing import Any

import numpy as np

from pycollective.array_backend import Array, array_module, beside, device_of, empty, on_host

_log = logging.getLogger("pycollective")

_SONAMES = ("libcublas.so.13", "libcublas.so.12")
_WORKSPACE_BYTES = 32 << 20
"""NVIDIA's advice for Hopper; older devices need 4 MiB."""
_HANDLES = 8
"""The largest number of handles of a thread; the oldest one is dropped first."""
_PLAIN, _TRANSPOSED = 0, 1
_DEFAULT_ALGORITHM = -1
#: For a dtype: CUDA's type, the type of the sums (``cublasComputeType_t``), and that of factors. Halves
#: are added in float32, and float32 without rounding to TF32.
_TYPES = {
    np.dtype(np.float16): (2, 68, ctypes.c_float),
    np.dtype(np.float32): (0, 68, ctypes.c_float),
    np.dtype(np.float64): (1, 70, ctypes.c_double),
}


class _Handle:
    """A handle of cuBLAS for one stream, and its memory."""

    def __init__(self, library: Any, like: Array, stream: int) -> None:
        self.number = ctypes.c_void_p()
        _check(library.cublasCreate_v2(ctypes.byref(self.number)))
        weakref.finalize(self, library.cublasDestroy_v2, self.number).atexit = False
        _check(library.cublasSetStream_v2(self.number, ctypes.c_void_p(stream)))
        self._memory = empty((_WORKSPACE_BYTES,), np.dtype(np.uint8), like)
        address = ctypes.c_void_p(_address(self._memory))
        _check(library.cublasSetWorkspace_v2(self.number, address, _WORKSPACE_BYTES))


class _Handles(threading.local):
    def __init__(self) -> None:
        self.by_stream: dict[tuple[int, int], _Handle] = {}


_handles = _Handles()

#: True if the first product equalled CuPy's but for rounding, by dtype and both operations.
_trusted: dict[tuple[Any, int, int], bool] = {}


@functools.cache
def _library() -> Any:
    """Return the cuBLAS that CuPy has loaded, or None."""
    for name in _SONAMES:
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOW | getattr(os, "RTLD_NOLOAD", 0))
        except OSError:
            continue
        library.cublasSetWorkspace_v2.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
        )
        return library
    _log.info("cuBLAS is not found (%s): CuPy computes products", ", ".join(_SONAMES))
    return None


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"cuBLAS gives error {code}")


def _layout(matrix: Array) -> tuple[int, int] | None:
    """Return cuBLAS's operation for a matrix, and its leading dimension; None for other strides."""
    if matrix.flags.c_contiguous:
        return _PLAIN, max(matrix.shape[1], 1)
    return (_TRANSPOSED, max(matrix.shape[0], 1)) if matrix.flags.f_contiguous else None


def matmul(a: Array, b: Array) -> Array | None:
    """Return ``a @ b`` for two matrices of one GPU and one dtype, or None if cuBLAS is not used.

    The matrices are float16, float32 or float64, in C order or transposed.
    """
    types = _TYPES.get(a.dtype)
    if (
        types is None
        or a.dtype != b.dtype
        or a.ndim != 2
        or b.ndim != 2
        or on_host(a)
        or on_host(b)
    ):
        return None
    left, right, (rows, inner), columns = _layout(a), _layout(b), a.shape, b.shape[1]
    if left is None or right is None or inner != b.shape[0] or not rows * inner * columns:
        return None
    place, kind = device_of(a), (a.dtype, left[0], right[0])
    library = _library()
    if library is None or device_of(b) != place or max(rows, inner, columns) >= 2**31:
        return None
    if kind not in _trusted:  # a call that is recorded comes after ordinary ones
        _trusted[kind] = True
        try:
            _trusted[kind] = _is_right(a, b)
        except BaseException:  # the comparison did not end: the next product is compared
            del _trusted[kind]
            raise
    if not _trusted[kind]:
        return None
    with beside(a):
        handle = _handle_for(library, a)
        y = empty((rows, columns), a.dtype, a)
        number, sums, factor = types
        # cuBLAS stores matrices by columns: in its memory, y is the product of b and a, transposed.
        code = library.cublasGemmEx(
            handle.number, right[0], left[0], columns, rows, inner,
            ctypes.byref(factor(1)), ctypes.c_void_p(_address(b)), number, right[1],
            ctypes.c_void_p(_address(a)), number, left[1],
            ctypes.byref(factor(0)), ctypes.c_void_p(_address(y)), number, columns,
            sums, _DEFAULT_ALGORITHM,
        )  # fmt: skip
        _check(code)
    return y


def prepare(like: Array) -> None:
    """Make the handle for this thread's stream on an array's device, before the stream records."""
    library = _library()
    if library is not None:
        with beside(like):
            _handle_for(library, like)


def _handle_for(library: Any, like: Array) -> _Handle:
    """Return the handle for this thread's stream on the device of ``like``, the current device."""
    stream = array_module(like).cuda.get_current_stream().ptr
    key = device_of(like)[1], stream
    handle = _handles.by_stream.get(key)
    if handle is None:
        if len(_handles.by_stream) >= _HANDLES:
            del _handles.by_stream[next(iter(_handles.by_stream))]
        handle = _handles.by_stream[key] = _Handle(library, like, stream)
    return handle


def _is_right(a: Array, b: Array) -> bool:
    """Return True if the product equals CuPy's but for rounding; wait for the device."""
    with beside(a):
        expected = np.matmul(a, b)
        found = matmul(a, b)
        scale = np.matmul(abs(a), abs(b))
        close = found is not None and not bool(
            (abs(found - expected) > 64 * np.finfo(a.dtype).eps * scale).any()
        )
    if not close:
        _log.warning("products of %s by cuBLAS differ from CuPy's, which are used", a.dtype)
    return close


def _address(array: Any) -> int:
    return int(array.data.ptr)
