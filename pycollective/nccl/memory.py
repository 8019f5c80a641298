"""Device memory that NCCL has made, and that one of its communicators has registered."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from pycollective import _core
from pycollective.nccl import device

SINCE = 21900
"""The version of NCCL that brought it."""


class Block:
    """A piece of it, which lives as long as an array has this object."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes


class Registered:
    """What one rank's communicator has registered.

    Memory that no array has any more is freed when more is asked for, or at the communicator's end: the
    device has to be waited for, since nobody knows which streams still use it.
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
        """Return how far behind the beginning of a block an address is; None: it is in none."""
        for begin, (nbytes, _) in list(self._blocks.items()):
            if begin <= address < begin + nbytes:
                return address - begin
        return None

    def add(self, nbytes: int, register: Callable[[int, int], int]) -> Block:
        """Make a block on this thread's device; NcclError if that, or to register it, fails."""
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
        """Free what was dropped, first waiting for the device."""
        count = len(self._dropped)  # what is dropped during the wait is left to the next call
        if count:
            self._gpu.synchronize()
        for _ in range(count):
            try:
                address = self._dropped.popleft()
            except IndexError:  # a finalizer was here in the meantime
                return
            _, handle = self._blocks.pop(address)
            if deregister is not None and not self._ended:
                deregister(handle)
            self._library.mem_free(address)

    def end(self, deregister: Callable[[int], None] | None) -> None:
        """Let go of the registrations, at the end of the communicator; arrays keep their memory.

        What is dropped meanwhile is freed by the next `free`.
        """
        try:
            if deregister is not None:
                for _, handle in list(self._blocks.values()):
                    deregister(handle)
        finally:
            self._ended = True
