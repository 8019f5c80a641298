"""GPU kernels that CuPy compiles at their first use and keeps in its cache; nvcc is not needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .array_backend import Array, array_module, beside

_THREADS = 256
_BLOCKS = 1 << 16

#: A loop over each thread's elements, for sources with an ``INDEX`` type.
ELEMENTS = """
#define EACH_ELEMENT(i, count)                                                       \\
  for (INDEX i = blockIdx.x * static_cast<INDEX>(blockDim.x) + threadIdx.x; i < count; \\
       i += static_cast<INDEX>(gridDim.x) * blockDim.x)
"""

_DEFINES = {
    np.dtype(np.float16): "#define HALF",
    np.dtype(np.float32): "#define REAL float",
    np.dtype(np.float64): "#define REAL double",
}


def defines(dtype: np.dtype[Any], index: str) -> str:
    """Return the first lines of a source: its type of numbers, and its type of indices."""
    return f"{_DEFINES[dtype]}\n#define INDEX {index}\n{ELEMENTS}"


def index_type(arrays: Sequence[Array | None]) -> str:
    """Return the index type for the elements of arrays; 32-bit divisions are faster."""
    largest = max(array.size for array in arrays if array is not None)
    return "unsigned" if largest < 2**31 else "long long"


@functools.cache
def _kernel(module: Any, source: str, name: str) -> Any:
    return module.RawKernel(source, name)


def launch(source: str, name: str, size: int, like: Array, arguments: Sequence[Any]) -> None:
    """Launch a kernel over ``size`` elements, on the device of ``like``; None is a null pointer."""
    if size:
        blocks = min(-(-size // _THREADS), _BLOCKS)
        with beside(like):
            _kernel(array_module(like), source, name)((blocks,), (_THREADS,), tuple(arguments))
