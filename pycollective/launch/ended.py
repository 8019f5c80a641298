"""Report ranks that end before a rendezvous over TCP is complete.

Until the ranks are connected, only the launcher notices that a rank has ended. `pycollective run`
creates a file without a name, which all ranks inherit, and writes the rank that has ended there. A
rank that has connected to all others marks this in the file. From then on the other ranks notice its
end by its connections.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

VARIABLE = "PYCOLLECTIVE_ENDED_FD"
_TEXT_BYTES = 400
_CONNECTED, _ENDED = b"c", b"e"


class Ended:
    """The file: a line about the group, a mark for each rank, and a text about the rank that ended."""

    def __init__(self, descriptor: int, size: int, address: str) -> None:
        self.descriptor = descriptor
        self._line = f"pycollective ends, {size} ranks at {address}\n".encode()
        self._size = size

    @classmethod
    def create(cls, size: int, address: str) -> Ended:
        """Create the file of a group, whose rank 0 has this address; the caller closes it."""
        if hasattr(os, "memfd_create"):  # Linux: needs no folder that can be written
            made = cls(os.memfd_create("pycollective ends"), size, address)
        else:
            with tempfile.TemporaryFile() as file:
                made = cls(os.dup(file.fileno()), size, address)
        os.pwrite(made.descriptor, made._line + bytes(size), 0)
        return made

    @classmethod
    def of_environment(cls, environ: Mapping[str, str], size: int, address: str) -> Ended | None:
        """Return the launcher's file if it belongs to the group with this size and address.

        Return None if there is no such file, as in a child of a rank. Return None also if the file
        belongs to another group: the remaining ranks may make a group of another size or address.
        """
        try:
            found = cls(int(environ[VARIABLE]), size, address)
            return found if os.pread(found.descriptor, len(found._line), 0) == found._line else None
        except (KeyError, OSError, ValueError, OverflowError):
            return None

    def _mark(self, rank: int, mark: bytes) -> None:
        os.pwrite(self.descriptor, mark, len(self._line) + rank)

    def has_connected(self, rank: int) -> None:
        """Mark a rank as connected to all others."""
        self._mark(rank, _CONNECTED)

    def write(self, rank: int, how: str, *, failed: bool) -> None:
        """Write how a rank ended, if it is the first that failed, or that ended unconnected."""
        is_connected = os.pread(self.descriptor, 1, len(self._line) + rank) == _CONNECTED
        if not self.rank_and_text and (failed or not is_connected):
            text = f"{how} before all ranks were connected".encode()[:_TEXT_BYTES]
            os.pwrite(self.descriptor, text, len(self._line) + self._size)
            self._mark(rank, _ENDED)  # last, so that no rank reads an incomplete text

    @property
    def rank_and_text(self) -> tuple[int, str] | None:
        """The rank that has ended, and how it ended; None if none has."""
        found = os.pread(self.descriptor, self._size + _TEXT_BYTES, len(self._line))
        rank = found.find(_ENDED, 0, self._size)
        return None if rank < 0 else (rank, found[self._size :].decode(errors="replace"))
