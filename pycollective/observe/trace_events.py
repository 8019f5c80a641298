"""Timelines: files of trace events that Perfetto and Chrome open.

Source: the Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycollective.atomic_files import write_atomically

if TYPE_CHECKING:
    from pycollective.observe.calls import Call

__all__ = ["Timeline", "merge"]

MOST_CALLS = 100_000
"""Calls that a timeline keeps: the last ones."""
_ASYNC = 0  # the row of calls that were made with async_op


class Timeline:
    """The calls of the ranks that this process has, to be written to a file.

    Ranks are the processes of the picture, threads its rows. Times are those of the wall clock, so
    that the files of several processes can be joined.

    Parameters
    ----------
    file : str
        Where to. In it, ``{rank}`` is replaced by the process's rank; in a folder, the file is
        ``rank0.json``. Where several processes would write one file, ``timeline.json`` becomes
        ``timeline.rank0.json``.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._calls: deque[Call] = deque(maxlen=MOST_CALLS)
        self._count = 0
        self._rank, self._alone = 0, True
        # What time.monotonic() says, as seconds since 1970.
        self._offset = time.time() - time.monotonic()

    def meet(self, rank: int, alone: bool) -> None:
        """Learn of a rank of this process, and whether all others are in it as well."""
        if self._alone and not alone:
            self._rank, self._alone = rank, False

    def path(self) -> Path:
        """Return where it is written to."""
        if "{rank}" in self._file:
            return Path(self._file.replace("{rank}", str(self._rank)))
        path = Path(self._file)
        if path.is_dir() or self._file.endswith("/"):
            return path / f"rank{self._rank}.json"
        if self._alone:
            return path
        return path.with_name(f"{path.stem}.rank{self._rank}{path.suffix}")

    def add(self, call: Call) -> None:
        """Add a call that is over."""
        with self._lock:
            self._calls.append(call)
            self._count += 1

    def write(self) -> None:
        """Write what there is; a file that is there is replaced at once, or stays as it is.

        Raises
        ------
        OSError
            It cannot be written.
        """
        if os.getpid() != self._owner:  # a forked child's copy
            return
        with self._writing:
            self._write()

    def _write(self) -> None:
        with self._lock:
            calls, count = list(self._calls), self._count
        events: list[dict[str, Any]] = []
        rows: dict[tuple[int, int], str] = {}
        for call, number in zip(calls, itertools.count()):
            events += self._events(call, number)
            rows[call.lane, _ASYNC if call.later else call.thread] = (
                "async_op" if call.later else call.thread_name
            )
        where = f"{platform.node()}, process {os.getpid()}"
        about = [
            _named("process_name", lane, 0, f"rank {lane} ({where})") for lane in _firsts(rows)
        ]
        about += [
            {"name": "process_sort_index", "ph": "M", "pid": lane, "tid": 0,
             "args": {"sort_index": lane}}
            for lane in _firsts(rows)
        ]  # fmt: skip
        about += [_named("thread_name", *row, name) for row, name in rows.items()]
        dropped = {"calls that are not in it, before these": count - len(calls)}
        _write(self.path(), about + events, dropped)

    def _events(self, call: Call, number: int) -> list[dict[str, Any]]:
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


def _firsts(rows: Iterable[tuple[int, int]]) -> list[int]:
    return sorted({lane for lane, _ in rows})


def _named(what: str, lane: int, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": lane, "tid": row, "args": {"name": name}}


def _write(path: Path, events: list[dict[str, Any]], other: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}
    write_atomically(str(path), (json.dumps(content) + "\n").encode())


def merge(files: Iterable[Path], target: Path) -> int:
    """Join the timelines of several processes; return the number of events.

    Raises
    ------
    ValueError
        One of the files is not a timeline.
    OSError
        One cannot be read or written.
    """
    events: list[dict[str, Any]] = []
    for file in files:
        try:
            found = json.loads(file.read_bytes())["traceEvents"]
            if not isinstance(found, list):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{file} is not a timeline: it has no list traceEvents") from None
        events += found
    _write(target, events, {})
    return len(events)
