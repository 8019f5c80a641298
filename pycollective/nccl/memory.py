"""Device memory that NCCL has allocated and registered with a communicator."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from pycollective import _core
from pycollective.nccl import device

SINCE = 21900
"""The first version of NCCL with such memory."""


class Block:
    """A block of registered memory, which is freed after the last array on it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes


class Registered:
    """The registered memory of one rank's communicator.

    Blocks without arrays are freed at the next allocation, or at the communicator's end. Freeing waits
    for the device, because any stream may still use the memory.
    """

    def __init__(self, library: _core.nccl.Library, on_device: int) -> None:
        self._library = library
        self._gpu: Any = device.on(on_device)
        self._blocks: dict[int, tuple[int, int]] = {}  # by address: bytes, and NCCL's handle
        self._dropped: deque[int] = deque()
        self._ended = False

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def offset(self, address: int) -> int | None:
        """Return the offset of an address in its block, or None if it is in no block."""
        for begin, (nbytes, _) in list(self._blocks.items()):
            if begin <= address < begin + nbytes:
                return address - begin
        return None

    def add(self, nbytes: int, register: Callable[[int, int], int]) -> Block:
        """Allocate and register a block on the current device; raise NcclError if NCCL fails."""
        address = self._library.mem_alloc(nbytes)
        try:
            handle = register(address, nbytes)
        except BaseException:
            self._library.mem_free(address)
            raise
        self._blocks[address] = nbytes, handle
        block = Block(address, nbytes)
        weakref.finalize(block, self._drop, address).atexit = False
        return block

    def _drop(self, address: int) -> None:
        self._dropped.append(address)
        if self._ended:
            self.free(None)

    def free(self, deregister: Callable[[int], None] | None) -> None:
        """Wait for the device, and free the dropped blocks."""
        count = len(self._dropped)  # blocks dropped during the wait are left to the next call
        if count:
            self._gpu.synchronize()
        for _ in range(count):
            try:
                address = self._dropped.popleft()
            except IndexError:  # a finalizer has freed the block
                return
            _, handle = self._blocks.pop(address)
            if deregister is not None and not self._ended:
                deregister(handle)
            self._library.mem_free(address)

    def end(self, deregister: Callable[[int], None] | None) -> None:
        """Deregister all memory at the communicator's end; arrays keep their memory.

        The next `free` frees blocks that are dropped meanwhile.
        """
        try:
            if deregister is not None:
                for _, handle in list(self._blocks.values()):
                    deregister(handle)
        finally:
            self._ended = True
