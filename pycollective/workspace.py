"""Memory that the operations of a thread reuse, because fresh pages cost more than the kernels.

Scratch memory belongs to an operation until it returns. Memory of results is reused when the last array
on it is gone.
"""

from __future__ import annotations

import math
import sys
import threading

import numpy as np
import numpy.typing as npt

from .array_backend import Array

_Bytes = npt.NDArray[np.uint8]
_ALIGNMENT = 64
# Smaller results come from memory that the allocator has ready anyway.
SMALLEST_RESULT = 64 << 10
_RESULTS_LIMIT = 256 << 20
# Blocks are cut from large pieces, for which NumPy asks for huge pages: with small pages every kernel
# would cause TLB misses.
_PIECE = 8 << 20


# Number of references to a block that is only in its list; it differs between Python versions.
_IDLE = next(map(sys.getrefcount, [object()]))


class Workspace(threading.local):
    """Memory that a thread keeps; each thread has its own.

    A thread keeps at most ``limit`` bytes of results, in use or idle. Further results get ordinary
    memory.
    """

    def __init__(self, limit: int = _RESULTS_LIMIT) -> None:
        self._limit = limit
        self._scratch: dict[str, _Bytes] = {}
        self._results: dict[int, list[_Bytes]] = {}
        self._kept = 0
        self._piece = memoryview(bytearray())

    def _block(self, size: int) -> _Bytes:
        """Return new, aligned memory."""
        room = max(-(-size // _ALIGNMENT), 1) * _ALIGNMENT
        if room > len(self._piece):
            fresh = np.empty(max(room, _PIECE) + _ALIGNMENT, np.uint8)
            self._piece = fresh.data[-fresh.ctypes.data % _ALIGNMENT :]
        # A view of a view would keep the lowest array alive, not the block.
        block: _Bytes = np.frombuffer(self._piece[:size], np.uint8)
        self._piece = self._piece[room:]
        return block

    def scratch(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return uninitialized memory that is valid until the next call with the same name."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        block = self._scratch.get(name)
        if block is None or block.size < size:
            block = self._scratch[name] = self._block(size)
        array: Array = np.ndarray(shape, dtype, block)
        return array

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialized array like ``numpy.empty``, if possible in memory used before.

        The array belongs to the caller: its memory is not reused while the array or a view of it
        exists.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size < SMALLEST_RESULT:
            return np.empty(shape, dtype)
        blocks = self._results.get(size)
        if blocks is None:
            blocks = self._results[size] = []
        # Each array's base is its block, so an array that exists is a reference to its block.
        array: Array
        for index, references in enumerate(map(sys.getrefcount, blocks)):
            if references == _IDLE:
                array = np.ndarray(shape, dtype, blocks[index])
                return array
        if self._kept + size > self._limit:
            self._drop_idle()
            if self._kept + size > self._limit:
                return np.empty(shape, dtype)
            blocks = self._results.setdefault(size, [])
        blocks.append(self._block(size))
        self._kept += size
        array = np.ndarray(shape, dtype, blocks[-1])
        return array

    def matmul(self, a: Array, b: Array) -> Array:
        """Return ``a @ b``; a large product of two matrices is in memory used before."""
        if (
            a.__class__ is np.ndarray is b.__class__
            and a.ndim == b.ndim == 2
            and a.dtype == b.dtype
            and a.shape[0] * b.shape[1] * a.dtype.itemsize >= SMALLEST_RESULT
        ):
            product: Array = np.matmul(a, b, out=self.empty((a.shape[0], b.shape[1]), a.dtype))
            return product
        product = np.matmul(a, b)
        return product

    def _drop_idle(self) -> None:
        """Release every idle block, because other sizes are requested now."""
        self._kept = 0
        for size, blocks in list(self._results.items()):
            references = list(map(sys.getrefcount, blocks))
            busy = [
                block for block, count in zip(blocks, references, strict=True) if count != _IDLE
            ]
            if busy:
                self._results[size] = busy
                self._kept += size * len(busy)
            else:
                del self._results[size]


workspace = Workspace()
