"""Report ranks that end before a rendezvous over TCP is complete.

Until the ranks are connected, only the launcher knows that a rank has ended. `pycollective run` makes a
file without a name, hands its descriptor to all ranks, and writes there which rank has ended. A rank
that has met the others writes so: its end is then told by its connections.
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
    """The file, as the launcher and each rank have it in memory.

    Raises OSError or ValueError if the descriptor is not one of such a file.
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
        """The address at which the ranks of the launched group meet."""

    @classmethod
    def create(cls, size: int, address: str) -> Ended:
        """Make the file for a number of ranks that meet at an address."""
        import tempfile

        with tempfile.TemporaryFile() as file:
            file.write(_MARK + address.encode().ljust(_ADDRESS, b"\0") + bytes(_TEXT + size))
            file.flush()
            made = cls(os.dup(file.fileno()))
            made._is_ours = True
            return made

    @classmethod
    def of_environment(cls, environ: Mapping[str, str], size: int, address: str) -> Ended | None:
        """Return the launcher's file for a group of some size that meets at an address.

        Return None where there is none, as in a child of a rank, or if the group is another one: those
        who are left may meet elsewhere.
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
        """Write that a rank is connected with the others."""
        self._memory[self._place(rank)] = _MET

    def write(self, rank: int, how: str, *, failed: bool) -> None:
        """Write how the first rank has ended that has failed, or has not met the others."""
        if not self.text and (failed or not self._memory[self._place(rank)]):
            self._memory[self._place(rank)] = _ENDED
            text = f"{how} before all ranks had met".encode()[: _TEXT - 1]
            self._memory[_START + 1 : _START + len(text)] = text[1:]
            self._memory[_START] = text[0]  # the last, so that nobody reads half of the text

    @property
    def text(self) -> str:
        """The rank that has ended, and how it ended; empty if none has."""
        text = self._memory[_START : _START + _TEXT]
        return text.rstrip(b"\0").decode(errors="replace") if text[0] else ""

    @property
    def ranks(self) -> list[int]:
        """The rank that `text` is about, alone; empty if there is none."""
        return [r for r in range(self.size) if self._memory[self._place(r)] == _ENDED]

    def close(self) -> None:
        """Give back the memory, and the descriptor where `create` has made it."""
        self._memory.close()
        if self._is_ours:
            os.close(self.descriptor)

    def _place(self, rank: int) -> int:
        return _START + _TEXT + rank
