"""Print the output of ranks line by line, so that lines of different ranks never mix.

A pipe or a file gets whole lines. On a terminal a line may also end with a carriage return, for progress
bars. An incomplete line, such as a question, appears there after a moment.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import selectors
import threading
import time
from dataclasses import dataclass, field
from typing import IO, Any

_LONGEST = 1 << 24
"""Most bytes of an incomplete line that are kept.

A longer line is printed in parts, and a line of another rank between two parts breaks it.
"""
_INCOMPLETE_SECONDS = 0.2
"""Seconds until an incomplete line is printed on a terminal."""


def discard_rest(stream: Any) -> None:
    """Discard the present and later data of a stream, because they cannot be written.

    Python writes the rest of the buffer at its end. If this fails, the exit status is 120.
    """
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class _LauncherStream:
    """Standard output or standard error of the launcher."""

    def __init__(self, stream: Any, prefix: str) -> None:
        self._stream = stream
        self.terminal = bool(stream.isatty())
        self.prefixed = prefix == "always" or (prefix == "auto" and self.terminal)
        self.closed = False
        self.error: OSError | None = None  # other than the end of the reader
        self._unfinished: _RankStream | None = (
            None  # the source of the incomplete line at the cursor
        )

    def write(self, source: _RankStream, text: bytes) -> None:
        """Write a line of a rank, or a part of one."""
        if self._unfinished is source:
            head = b""
        else:
            head = (b"\n" if self._unfinished else b"") + source.prefix
        ended = text.endswith((b"\n", b"\r") if self.terminal else b"\n")
        self._unfinished = None if ended else source
        self._write(head + text)

    def end_line(self, source: _RankStream) -> None:
        """End the last line of a rank, unless the cursor of a terminal may stay in it."""
        if self._unfinished is source and not self.terminal:
            self.write(source, b"\n")

    def _write(self, data: bytes) -> None:
        try:
            try:
                descriptor = self._stream.fileno()
            except (io.UnsupportedOperation, AttributeError):  # not a file of the system
                buffer = getattr(self._stream, "buffer", None)
                if buffer is None:
                    self._stream.write(data.decode(errors="replace"))
                else:
                    buffer.write(data)
                self._stream.flush()
                return
            self._stream.flush()
            rest = memoryview(data)
            while rest:
                try:
                    rest = rest[os.write(descriptor, rest) :]
                except BlockingIOError:  # the descriptor is non-blocking: wait for its reader
                    select.select((), (descriptor,), ())
        except (OSError, ValueError) as error:
            # Not an error of the program: the reader has ended (`pycollective run … | head`).
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                self.error = error
            self.closed = True
            discard_rest(self._stream)


@dataclass(eq=False)
class _RankStream:
    """Standard output or standard error of a rank."""

    pipe: IO[bytes]
    target: _LauncherStream
    prefix: bytes
    held: bytearray = field(default_factory=bytearray)
    since: float = 0.0

    def add(self, data: bytes) -> None:
        """Add data, and print the complete lines."""
        if not self.held:
            self.since = time.monotonic()
        self.held += data
        end = self.held.rfind(b"\n")
        if self.target.terminal:
            end = max(end, self.held.rfind(b"\r"))
        if end < 0 and len(self.held) > _LONGEST:
            self.print_incomplete()
        if end >= 0:
            lines = bytes(self.held[: end + 1])
            del self.held[: end + 1]
            self.since = time.monotonic()
            keep = self.target.terminal
            for line in lines.splitlines(keepends=True) if keep else _lines(lines):
                self.target.write(self, line)

    def print_incomplete(self) -> None:
        """Print the incomplete line."""
        if self.held:
            text = bytes(self.held)
            self.held.clear()
            self.target.write(self, text)


def _lines(text: bytes) -> list[bytes]:
    return [line + b"\n" for line in text[:-1].split(b"\n")]


class Output:
    """A thread that copies the output of all ranks to the launcher's two streams.

    With the prefix "always" each line begins with its rank in brackets, with "auto" only on a terminal.
    """

    def __init__(self, streams: tuple[Any, Any], prefix: str) -> None:
        self._targets = [_LauncherStream(stream, prefix) for stream in streams]
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._copy_output, daemon=True)
        self._ending = threading.Event()

    def add(self, rank: int, pipes: tuple[IO[bytes], IO[bytes]]) -> None:
        """Add a rank's standard output and standard error, before `start`."""
        for target, pipe in zip(self._targets, pipes, strict=True):
            prefix = f"[{rank}] ".encode() if target.prefixed else b""
            self._selector.register(pipe, selectors.EVENT_READ, _RankStream(pipe, target, prefix))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def finish(self, is_interrupted: threading.Event, seconds: float) -> None:
        """Print all that the ranks have written, and end the thread.

        This does not wait for children of ended ranks, which may keep a stream open. Nor does it wait
        longer than ``seconds`` for the reader of the output once the launcher was interrupted.
        """
        self._ending.set()
        until = math.inf
        while self._thread.is_alive():
            self._thread.join(0.02)
            if is_interrupted.is_set():
                until = min(until, time.monotonic() + seconds)
                if time.monotonic() > until:
                    return  # the thread still writes
        for key in list(self._selector.get_map().values()):
            self._close(key.data)
        self._selector.close()

    def error(self) -> OSError | None:
        """Return the error because of which output was lost, if there was one."""
        return next((target.error for target in self._targets if target.error), None)

    def _copy_output(self) -> None:
        while self._selector.get_map():
            ending = self._ending.is_set()
            events = self._selector.select(0 if ending else 0.05)
            for key, _ in events:
                source: _RankStream = key.data
                data = os.read(source.pipe.fileno(), 1 << 16)
                if data:
                    source.add(data)
                if not data or source.target.closed:  # the next write fails
                    self._close(source)
            for key in self._selector.get_map().values():
                source = key.data
                if source.target.terminal and time.monotonic() - source.since > _INCOMPLETE_SECONDS:
                    source.print_incomplete()
            if ending and not events:
                return

    def _close(self, source: _RankStream) -> None:
        source.print_incomplete()
        source.target.end_line(source)
        self._selector.unregister(source.pipe)
        source.pipe.close()
