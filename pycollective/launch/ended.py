"""Report ranks that end before a rendezvous over TCP is complete.

Until the ranks are connected, only the launcher notices that a rank has ended. `pycollective run`
creates a file without a name, which all ranks inherit, and writes there which rank has ended. A rank
that has connected to all others marks this in the file. From then on the connections show its end.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

__all__ = ["VARIABLE", "Ended"]

VARIABLE = "PYCOLLECTIVE_ENDED_FD"
_MARK = b"pycollective ends"
_ADDRESS = 64
_START = len(_MARK) + _ADDRESS
_TEXT = 400
_MET, _ENDED = 1, 2


class Ended:
    """The file, mapped into the memory of the launcher and of each rank.

    Raises OSError or ValueError if the descriptor is not that of such a file.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._is_ours = False
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.size = len(self._memory) - _START - _TEXT
        """The number of ranks in the launched group."""
        if self.size < 1 or self._memory[: len(_MARK)] != _MARK:
            raise ValueError(f"descriptor {descriptor} is not the list of ended ranks")
        self.address = self._memory[len(_MARK) : _START].rstrip(b"\0").decode(errors="replace")
        """The address of the launched group's rank 0."""

    @classmethod
    def create(cls, size: int, address: str) -> Ended:
        """Create the file for a group with this size and this address of rank 0."""
        import tempfile

        with tempfile.TemporaryFile() as file:
            file.write(_MARK + address.encode().ljust(_ADDRESS, b"\0") + bytes(_TEXT + size))
            file.flush()
            made = cls(os.dup(file.fileno()))
            made._is_ours = True
            return made

    @classmethod
    def of_environment(cls, environ: Mapping[str, str], size: int, address: str) -> Ended | None:
        """Return the launcher's file if it belongs to the group with this size and address.

        Return None if there is no such file, as in a child of a rank, or if the file belongs to another
        group: the remaining ranks may make a group of another size or address.
        """
        try:
            found = cls(int(environ[VARIABLE]))
        except (KeyError, OSError, ValueError):
            return None
        if (found.size, found.address) == (size, address):
            return found
        found.close()
        return None

    def has_connected(self, rank: int) -> None:
        """Mark a rank as connected to all others."""
        self._memory[self._place(rank)] = _MET

    def write(self, rank: int, how: str, *, failed: bool) -> None:
        """Write how a rank ended, if it is the first that failed or ended without being connected."""
        if not self.text and (failed or not self._memory[self._place(rank)]):
            self._memory[self._place(rank)] = _ENDED
            text = f"{how} before all ranks had met".encode()[: _TEXT - 1]
            self._memory[_START + 1 : _START + len(text)] = text[1:]
            self._memory[_START] = text[0]  # last, so that no rank reads an incomplete text

    @property
    def text(self) -> str:
        """The name of the rank that has ended, and how it ended; empty if none has."""
        text = self._memory[_START : _START + _TEXT]
        return text.rstrip(b"\0").decode(errors="replace") if text[0] else ""

    @property
    def ranks(self) -> list[int]:
        """The rank that `text` describes, in a list; empty if there is none."""
        return [r for r in range(self.size) if self._memory[self._place(r)] == _ENDED]

    def close(self) -> None:
        """Unmap the file, and close the descriptor if `create` opened it."""
        self._memory.close()
        if self._is_ours:
            os.close(self.descriptor)

    def _place(self, rank: int) -> int:
        return _START + _TEXT + rank
