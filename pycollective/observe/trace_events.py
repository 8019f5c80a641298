"""Timelines: files of trace events that Perfetto and Chrome open.

Source: the Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pycollective.atomic_files import write_atomically

MOST_CALLS = 100_000
"""The number of last calls that a timeline keeps."""
_ASYNC = 0  # the row of calls with async_op
_JOINED = "joined timelines"


class Record:
    """One call of a rank for traces and timelines: arguments, times and error."""

    __slots__ = (
        "algorithm", "began", "dtype", "ended", "error", "is_message", "lane", "later",
        "name", "nbytes", "number", "others", "shape", "thread", "thread_name", "transport", "why",
    )  # fmt: skip

    def __init__(
        self, name: str, array: NDArray[Any] | None, how: tuple[str, str], others: dict[str, Any]
    ) -> None:
        self.name = name
        self.algorithm, self.why = how
        self.others = others
        self.dtype = "" if array is None else str(array.dtype)
        self.shape = [] if array is None else list(array.shape)
        self.nbytes = 0 if array is None else array.nbytes
        self.number = 0  # among the rank's collective calls; 0: unknown
        self.is_message = name in ("send", "recv")
        self.later = False
        self.error = ""
        self.lane, self.transport = 0, ""
        thread = threading.current_thread()
        self.thread, self.thread_name = threading.get_native_id(), thread.name
        self.began = self.ended = time.monotonic()

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for the timeline."""
        found: dict[str, Any] = {"bytes": self.nbytes, "dtype": self.dtype, "shape": self.shape}
        found |= {"transport": self.transport, **self.others}
        said = {"algorithm": self.algorithm, "why": self.why, "error": self.error}
        found |= {name: text for name, text in said.items() if text}
        return found | ({"call": self.number} if self.number else {})

    def __str__(self) -> str:
        words = [f"{self.dtype}{self.shape}"] if self.dtype else []
        words += [self.others["op"]] if "op" in self.others else []
        words += [word for word in (self.algorithm, self.why) if word]
        words += [f"{name} {value}" for name, value in self.others.items() if name != "op"]
        number = f" #{self.number}" * bool(self.number)
        text = f"{self.name}{number} ({', '.join(words)})" if words else self.name + number
        return text + ", async_op" * self.later


class Timeline:
    """The calls of this process's ranks, to be written to a file.

    The picture has a process for each rank, and a row for each thread. Times are those of the wall
    clock, so that the files of several processes can be joined.
    """

    def __init__(self, file: str) -> None:
        if not file:
            raise ValueError("a timeline needs the name of its file")
        self._file = file
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._calls: deque[Record] = deque(maxlen=MOST_CALLS)
        self._count = 0
        self._samples: deque[tuple[float, str, dict[str, int]]] = deque(maxlen=MOST_CALLS)
        self._rank, self._alone = 0, True
        # Add this to time.monotonic() to get seconds since 1970.
        self._offset = time.time() - time.monotonic()

    def add_rank(self, rank: int, alone: bool) -> None:
        """Add a rank of this process; ``alone`` is True if all ranks of its group are here."""
        if self._alone and not alone:
            self._rank, self._alone = rank, False

    def path(self) -> Path:
        """Return the path of the file."""
        if "{rank}" in self._file:
            return Path(self._file.replace("{rank}", str(self._rank)))
        path = Path(self._file)
        if path.is_dir() or self._file.endswith("/"):
            return path / f"rank{self._rank}.json"
        if self._alone or (path.exists() and not path.is_file()):  # a device has one name
            return path
        return path.with_name(f"{path.stem}.rank{self._rank}{path.suffix}")

    def add(self, call: Record) -> None:
        """Add an ended call."""
        with self._lock:
            self._calls.append(call)
            self._count += 1

    def sample(self, name: str, values: dict[str, int]) -> None:
        """Add the present values of a group of counters."""
        with self._lock:
            self._samples.append((time.monotonic(), name, values))

    def write(self) -> None:
        """Write the file, atomically."""
        if os.getpid() != self._owner:  # in a forked child
            return
        with self._writing:
            self._write()

    def _write(self) -> None:
        with self._lock:
            calls, count, samples = list(self._calls), self._count, list(self._samples)
        events: list[dict[str, Any]] = []
        rows: dict[tuple[int, int], str] = {}
        for number, call in enumerate(calls):
            events += self._events(call, number)
            rows[call.lane, _ASYNC if call.later else call.thread] = (
                "async_op" if call.later else call.thread_name
            )
        for sampled, name, values in samples:
            at = round((sampled + self._offset) * 1e6, 3)
            events.append({"name": name, "ph": "C", "pid": self._rank, "ts": at, "args": values})
        where = f"{platform.node()}, process {os.getpid()}"
        lanes = sorted({lane for lane, _ in rows} | ({self._rank} if samples else set()))
        about = [_named("process_name", lane, 0, f"rank {lane} ({where})") for lane in lanes]
        about += [
            {"name": "process_sort_index", "ph": "M", "pid": lane, "tid": 0,
             "args": {"sort_index": lane}}
            for lane in lanes
        ]  # fmt: skip
        about += [_named("thread_name", *row, name) for row, name in rows.items()]
        dropped = {"earlier calls that are missing": count - len(calls)}
        _write(self.path(), about + events, dropped)

    def _events(self, call: Record, number: int) -> list[dict[str, Any]]:
        begin = round((call.began + self._offset) * 1e6, 3)
        event = {
            "name": call.name,
            "cat": "message" if call.is_message else "collective",
            "pid": call.lane,
            "tid": _ASYNC if call.later else call.thread,
            "ts": begin,
        }
        last = round((call.ended - call.began) * 1e6, 3)
        if call.later and call.is_message:  # several may be under way at once
            mark = {"id": f"{call.lane}.{number}"}
            return [
                {**event, **mark, "ph": "b", "args": call.arguments()},
                {**event, **mark, "ph": "e", "ts": round(begin + last, 3)},
            ]
        return [{**event, "ph": "X", "dur": last, "args": call.arguments()}]


def _named(what: str, lane: int, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": lane, "tid": row, "args": {"name": name}}


def _write(path: Path, events: list[dict[str, Any]], other: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}
    write_atomically(str(path), (json.dumps(content) + "\n").encode())


def merge(files: list[Path], target: Path) -> tuple[int, list[Path]]:
    """Join the timelines of several processes.

    Returns
    -------
    tuple
        The number of events, and those of the files that are joined timelines, which are left out.
    """
    events: list[dict[str, Any]] = []
    joined = []
    for file in files:
        try:
            content = json.loads(file.read_bytes())
            found, about = content["traceEvents"], content.get("otherData") or {}
            if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
                raise TypeError
            if about.get(_JOINED):
                joined.append(file)
                continue
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{file} is not a timeline: it has no events") from None
        events += found
    if joined == files:
        raise ValueError(f"{joined[0]} was joined from timelines: give the files of the processes")
    _write(target, events, {_JOINED: True})
    return len(events), joined
