"""Tell ranks that meet over TCP which rank of theirs has ended before they met.

Until the ranks are connected, only the launcher knows that a rank has ended. `pycollective run` makes a
file without a name, hands its descriptor to all ranks, and writes there which rank has ended. A rank
that has met the others writes so: its end is then told by its connections.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping

__all__ = ["VARIABLE", "Ended"]

VARIABLE = "PYCOLLECTIVE_ENDED_FD"
_MARK = b"pycollective ends"
_TEXT = 400


class Ended:
    """The file, as the launcher and each rank have it in memory.

    Parameters
    ----------
    descriptor : int
        The descriptor of the file.

    Raises
    ------
    OSError, ValueError
        If the descriptor is not one of such a file.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._ranks = len(self._memory) - len(_MARK) - _TEXT
        if self._ranks < 1 or self._memory[: len(_MARK)] != _MARK:
            raise ValueError(f"descriptor {descriptor} is not the list of ended ranks")

    @classmethod
    def create(cls, size: int) -> Ended:
        """Make the file for a number of ranks."""
        with tempfile.TemporaryFile() as file:
            file.write(_MARK + bytes(_TEXT + size))
            file.flush()
            return cls(os.dup(file.fileno()))

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> Ended | None:
        """Return the launcher's file; None where there is none, as in a child of a rank."""
        try:
            return cls(int(environ[VARIABLE]))
        except (KeyError, OSError, ValueError):
            return None

    def has_met(self, rank: int) -> None:
        """Write that a rank is connected with the others."""
        self._memory[self._place(rank)] = 1

    def write(self, rank: int, how: str, *, failed: bool) -> None:
        """Write how the first rank has ended that has failed, or has not met the others."""
        if not self.text and (failed or not self._memory[self._place(rank)]):
            text = f"{how} before all ranks had met".encode()[: _TEXT - 1]
            start = len(_MARK)
            self._memory[start + 1 : start + len(text)] = text[1:]
            self._memory[start] = text[0]  # the last, so that nobody reads half of the text

    @property
    def text(self) -> str:
        """Which rank has ended, and how; empty if none has."""
        start = len(_MARK)
        text = self._memory[start : start + _TEXT]
        return text.rstrip(b"\0").decode(errors="replace") if text[0] else ""

    def close(self) -> None:
        """Give back the memory and the descriptor."""
        self._memory.close()
        os.close(self.descriptor)

    def _place(self, rank: int) -> int:
        return len(_MARK) + _TEXT + rank
