"""Memory that the operations of a thread reuse, because fresh pages cost more than the kernels.

Scratch memory belongs to an operation until it returns. Memory of results is reused when the last array
on it is freed.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from . import cublas
from .array_backend import Array

_Bytes = npt.NDArray[np.uint8]
_ALIGNMENT = 64
# Smaller results come from memory that the allocator has ready anyway.
SMALLEST_RESULT = 64 << 10
# With fewer elements, a result is small in every dtype of at most 16 bytes.
_FEW = SMALLEST_RESULT // 16
_RESULTS_LIMIT = 256 << 20
# Blocks are cut from large pieces, for which NumPy asks for huge pages: with small pages every kernel
# would cause TLB misses.
_PIECE = 8 << 20


# Number of references to a block that is only in its list; it differs between Python versions.
_IDLE = next(map(sys.getrefcount, [object()]))


class Workspace(threading.local):
    """Memory that a thread keeps; each thread has its own.

    Blocks are cut from pieces, and one array that exists keeps its whole piece. A thread keeps pieces of
    at most ``limit`` bytes for results, in use or idle. Further results get ordinary memory.
    """

    def __init__(self, limit: int = _RESULTS_LIMIT) -> None:
        self._limit = limit
        self._scratch: dict[str, _Bytes] = {}
        self._results: dict[int, list[_Bytes]] = {}
        self._pieces: list[weakref.ref[_Bytes]] = []
        self._rest = memoryview(bytearray())

    def _block(self, size: int) -> _Bytes:
        """Return new, aligned memory of a multiple of the alignment."""
        if size > len(self._rest):
            fresh = np.empty(self._size_of_piece(size) + _ALIGNMENT, np.uint8)
            self._pieces.append(weakref.ref(fresh))
            self._rest = fresh.data[-fresh.ctypes.data % _ALIGNMENT :]
        # A view of a view would keep the lowest array alive, not the block.
        block: _Bytes = np.frombuffer(self._rest[:size], np.uint8)
        self._rest = self._rest[size:]
        return block

    def _size_of_piece(self, size: int) -> int:
        """Return the bytes of the piece from which a block is cut."""
        return max(size, min(_PIECE, self._limit))

    def _kept(self) -> int:
        """Return the bytes of the pieces that exist."""
        pieces = [(ref, piece.size) for ref in self._pieces if (piece := ref()) is not None]
        self._pieces = [ref for ref, _ in pieces]
        return sum(size - _ALIGNMENT for _, size in pieces)

    def _has_room(self, size: int) -> bool:
        """Return True if the limit allows a block, perhaps in a new piece."""
        return size <= len(self._rest) or self._kept() + self._size_of_piece(size) <= self._limit

    def scratch(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return uninitialized memory that is valid until the next call with the same name."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        block = self._scratch.get(name)
        if block is None or block.size < size:
            block = self._scratch[name] = self._block(_rounded(size, _ALIGNMENT))
        array: Array = np.ndarray(shape, dtype, block)
        return array

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialized array like ``numpy.empty``, if possible in memory used before.

        The array belongs to the caller: its memory is not reused while the array or a view of it
        exists.
        """
        count = math.prod(shape)
        if count < _FEW or np.dtype(dtype).hasobject:  # NumPy counts objects: new memory is NULL
            return np.empty(shape, dtype)
        size = count * np.dtype(dtype).itemsize
        if size < SMALLEST_RESULT:
            return np.empty(shape, dtype)
        # Lengths that differ little share blocks: a sixteenth at most is unused.
        size = _rounded(size, 1 << (size.bit_length() - 5))
        blocks = self._results.get(size)
        if blocks is None:
            blocks = self._results[size] = []
        # Each array's base is its block, so an array that exists is a reference to its block.
        array: Array
        for index, references in enumerate(map(sys.getrefcount, blocks)):
            if references == _IDLE:
                array = np.ndarray(shape, dtype, blocks[index])
                return array
        if not self._has_room(size):
            self.drop_idle()
            if not self._has_room(size):
                return np.empty(shape, dtype)
            blocks = self._results.setdefault(size, [])
        blocks.append(self._block(size))
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
        on_gpu = None if a.__class__ is np.ndarray else cublas.matmul(a, b)
        product = np.matmul(a, b) if on_gpu is None else on_gpu
        return product

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Give each result in the ``with`` block new memory from NumPy."""
        kept = self._limit, self._results, self._rest
        self._limit, self._results, self._rest = 0, {}, memoryview(bytearray())
        try:
            yield
        finally:
            self._limit, self._results, self._rest = kept

    def drop_idle(self) -> None:
        """Release every idle block, because other sizes are requested now."""
        for size, blocks in list(self._results.items()):
            references = list(map(sys.getrefcount, blocks))
            busy = [
                block for block, count in zip(blocks, references, strict=True) if count != _IDLE
            ]
            if busy:
                self._results[size] = busy
            else:
                del self._results[size]


def _rounded(size: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``size``, and not 0."""
    return max(-(-size // step), 1) * step


workspace = Workspace()
