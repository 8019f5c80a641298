"""`cupy.RawKernel` without a GPU: the same source, compiled for the host, run by a few threads in turn.

The result of a kernel must not depend on the number of blocks and threads. Here both are small, so that
a thread repeats the kernel's loops.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

_BEFORE = """
#define __global__
#define __device__
struct Place { unsigned x, y, z; };
static thread_local Place blockIdx, threadIdx, blockDim, gridDim;
// Without a header, which would take most of the compiler's time.
static float root(float x) { return __builtin_sqrtf(x); }
static double root(double x) { return __builtin_sqrt(x); }
static float power(float x) { return __builtin_expf(x); }
static double power(double x) { return __builtin_exp(x); }
static float logarithm(float x) { return __builtin_logf(x); }
static double logarithm(double x) { return __builtin_log(x); }
#define sqrt root
#define exp power
#define log logarithm
extern "C" void place(unsigned column, unsigned row, unsigned thread, unsigned columns,
                      unsigned threads) {
  blockIdx = {column, row, 0}, threadIdx = {thread, 0, 0};
  gridDim = {columns, 1, 1}, blockDim = {threads, 1, 1};
}
"""
_SCALARS = {
    np.dtype(np.float32): ctypes.c_float,
    np.dtype(np.float64): ctypes.c_double,
    np.dtype(np.int32): ctypes.c_int,
    np.dtype(np.int64): ctypes.c_longlong,
}


@functools.cache
def _library(code):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler for kernels on the host")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernels.cc"
        source.write_text(_BEFORE + code)
        path = source.with_suffix(".so")
        command = [compiler, "-std=c++17", "-O0", "-shared", "-fPIC", "-o", path, source, "-lm"]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(path))


class RawKernel:
    """A kernel with the arguments of CuPy's class."""

    before_launch = staticmethod(lambda: None)
    run = staticmethod(lambda launch: launch())

    def __init__(self, code, name):
        self._library, self._name = _library(code), name

    def __call__(self, grid, block, args):
        self.before_launch()
        size = sum(a.nbytes if isinstance(a, np.ndarray) else 8 for a in args)
        assert size <= 4096, "arguments of a kernel have room for 4096 bytes"
        given = [_argument(a) for a in args]
        self.run(lambda: self._launch(grid, block, given))

    def _launch(self, grid, block, given):
        columns, threads = min(grid[0], 2), min(block[0], 3)
        for row in range(grid[1] if len(grid) > 1 else 1):
            for column in range(columns):
                for thread in range(threads):
                    self._library.place(column, row, thread, columns, threads)
                    getattr(self._library, self._name)(*given)


def _argument(value):
    if isinstance(value, np.ndarray):
        assert value.size == 1, "NumPy's arrays go by value, and only with one element"

        class ByValue(ctypes.Structure):
            _fields_ = (("words", ctypes.c_ulonglong * (value.nbytes // 8)),)

        return ByValue.from_buffer_copy(value.tobytes())
    if value is None:
        return None
    if isinstance(value, np.generic):
        return _SCALARS[value.dtype](value.item())
    value.require_present()
    return ctypes.c_void_p(value.data.ptr)
