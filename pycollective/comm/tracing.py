"""Traces: records of calls for the log, for error reports and for timelines.

`Traced` wraps an engine and records its calls, whose arguments are already checked.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import platform
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pycollective.arguments import path_of
from pycollective.comm.call import About, Call, Engine
from pycollective.comm.work import Task, Work
from pycollective.errors import CollectiveError, RendezvousError
from pycollective.nccl.device_task import DeviceTask
from pycollective.observe.log import LOG, TIMELINE, TRACE, settings
from pycollective.observe.trace_events import Record, Timeline

if TYPE_CHECKING:
    from pycollective.comm.member import Member

REMEMBERED = 32
"""The number of a rank's last calls that are logged when one fails."""

_PAUSE = 1e-4
_GPU_ROWS = 1 << 22

_lock = threading.Lock()  # guards the following variables
_members: weakref.WeakSet[Member] = weakref.WeakSet()
_timelines: list[Timeline] = []
_from_environment: dict[str, Timeline] = {}


class Tracer:
    """Records the calls of a rank for timelines, for the log and for error reports."""

    def __init__(self, member: Member) -> None:
        self._rank, self._size, self._lane = member.rank, member.size, member._lane
        self._group = member._group
        self._pending: dict[int, tuple[Record, Task]] = {}
        self._last: deque[tuple[Record, str]] = deque(maxlen=REMEMBERED)
        self._reported = False  # True after an error has logged the last calls

    def record(self, call: Call, about: About) -> Record:
        """Begin the record of a call."""
        others: dict[str, Any] = {"op": call.op} if call.op else {}
        if call.has_root:
            others["root"] = call.root
        if call.is_message:
            others["to rank" if call.collective == "send" else "from rank"] = call.peer
            others["tag"] = call.tag
        if about.gpu is not None:
            others["times"] = "of the GPU"
        made = Record(call.collective, call.array, (about.algorithm, about.why), others)
        made.lane, made.transport = self._lane, about.by
        made.dtype = call.label or made.dtype
        if about.gpu is not None:
            # A row of its own: the call outlasts the method. Thread numbers are below _GPU_ROWS.
            made.thread, made.thread_name = _GPU_ROWS + about.gpu, f"GPU {about.gpu}"
        return made

    def keep(self, record: Record, task: Task) -> None:
        """Keep the record of a call until the call ends."""
        if isinstance(task, DeviceTask):
            record.number = task.number
        else:
            record.later = True
        with _lock:
            self._pending[id(record)] = record, task

    def complete(
        self, record: Record, error: BaseException | None, is_on_gpu: bool = False
    ) -> None:
        """Complete the record of a call that has ended in this thread."""
        record.ended = time.monotonic()
        if not record.is_message and not is_on_gpu:
            record.number = self._group.calls(self._rank)
        self._report(record, error)

    def finish(self) -> None:
        """Wait for calls on devices, each until its deadline, and complete their records."""
        with _lock:
            tasks = [task for _, task in self._pending.values()]
        for task in tasks:
            if isinstance(task, DeviceTask):
                task.start()
                while not task.ended:
                    time.sleep(_PAUSE)
        self.collect()

    def collect(self) -> None:
        """Complete the records of asynchronous calls that have ended."""
        with _lock:
            ended = [(key, *both) for key, both in self._pending.items() if _has_ended(both[1])]
            for key, _, _ in ended:
                del self._pending[key]
        for _, record, task in ended:
            record.began, record.ended = task.times
            error: BaseException | None = None
            try:
                task.check()
            except Exception as found:
                error = found
            self._report(record, error)

    def _report(self, record: Record, error: BaseException | None) -> None:
        if error is not None:
            record.error = f"{type(error).__name__}: {error}"
        with _lock:
            timelines = list(_timelines)
        for one in timelines:
            one.add(record)
        took = f"{1e6 * (record.ended - record.began):.1f} µs"
        self._last.append((record, f"after {took}: {record.error}" if error else took))
        about = {"rank": self._rank}
        LOG.log(
            TRACE, "rank %d of %d: %s: %s", self._rank, self._size, *self._last[-1], extra=about
        )
        if isinstance(error, CollectiveError) and not self._reported:
            self._reported = True
            if LOG.isEnabledFor(TRACE):
                lines = "\n".join(f"    {record}: {end}" for record, end in self._last)
                LOG.error("rank %d failed; its last calls:\n%s", self._rank, lines, extra=about)
            _write_all()


def _has_ended(task: Task) -> bool:
    """Return True if a call has ended; a device's result can be used earlier."""
    return task.ended if isinstance(task, DeviceTask) else task.done


class Traced(Engine):
    """An engine that records the calls of another engine."""

    def __init__(self, engine: Engine, tracer: Tracer) -> None:
        self._engine = engine
        self._tracer = tracer

    def about(self, call: Call) -> About:
        return self._engine.about(call)

    def submit(self, call: Call) -> Work[None]:
        """Execute a call, and record it."""
        tracer, about = self._tracer, self._engine.about(call)
        is_on_gpu = about.gpu is not None
        tracer.collect()
        record = tracer.record(call, about)
        try:
            work = self._engine.submit(replace(call, timed=True))
        except BaseException as error:
            tracer.complete(record, error, is_on_gpu)
            raise
        for task in work._tasks:
            tracer.keep(record, task)
        if not work._tasks and not is_on_gpu:  # a GPU call without a task moved nothing
            tracer.complete(record, None)
        return Work(work._tasks, work._finish, tracer.collect)


@contextlib.contextmanager
def together(members: Sequence[Member], call_of: Callable[[int], Call]) -> Iterator[None]:
    """Record the calls that one thread makes in the block for all ranks."""
    records = []
    for rank, member in enumerate(members):
        if member._tracer is not None:
            call = call_of(rank)
            records.append((member._tracer, member._tracer.record(call, member._core.about(call))))
    error: BaseException | None = None
    try:
        yield
    except BaseException as found:
        error = found
        raise
    finally:
        for tracer, record in records:
            tracer.complete(record, error)


# The communicators that are traced -----------------------------------------------------------------


def _warn(text: str) -> None:
    LOG.warning("%s", text)


def join(member: Member) -> None:
    """Register a new communicator, which warns of long waits and may be traced."""
    wanted = settings()
    if wanted.warn_after < math.inf:
        member._core.warn_after(wanted.warn_after, _warn)
    alone = member._group.transport == "threads" or member.size == 1
    with _lock:
        for one in _timelines:
            one.add_rank(member._lane, alone)
        _begin_of_environment(member._lane, alone)
        _members.add(member)
        _adjust(member)


def _begin_of_environment(lane: int, alone: bool) -> None:
    """Begin the timeline of the environment, if it names one that has not begun."""
    file = settings().timeline
    if file and file not in _from_environment:
        made = Timeline(file)
        made.add_rank(lane, alone)
        try:
            made.write()  # report an error now, not after hours
        except OSError as error:
            raise RendezvousError(f"{TIMELINE}={file!r} cannot be written: {error}") from None
        _from_environment[file] = made
        _timelines.append(made)


def sample(read: Callable[[], dict[str, dict[str, int]]]) -> None:
    """Add counters, which ``read`` returns by group and name, to the timelines of this process.

    A program without a communicator has the timeline of the environment, too.
    """
    with _lock:
        _begin_of_environment(0, True)
        timelines = list(_timelines)
    if timelines:
        for name, values in read().items():
            for one in timelines:
                one.sample(name, values)


def group_made(member: Member, ranks: str, source: str, table: str) -> None:
    """Log a line about a new group.

    Parameters
    ----------
    member : Member
        A rank of the group.
    ranks : str
        The ranks of this process.
    source : str
        The origin of the group's description, such as a variable.
    table : str
        The file of the rows for ``algorithm="auto"``, if there are rows.
    """
    if not LOG.isEnabledFor(logging.INFO):
        return
    rows = len(member._core.choices)
    algorithms = f"{rows} rows of {table}, then the built-in table" if rows else "built-in table"
    LOG.info(
        "%s; described by %s; %s; algorithms: %s",
        ranks, source, _hosts(member), algorithms, extra={"rank": member.rank},
    )  # fmt: skip


def _hosts(member: Member) -> str:
    numbers, group = member.hosts, member._group
    away = [r for r in range(member.size) if group.address(r)]
    addresses = ", ".join(f"rank {r} at {group.address(r)}" for r in away[:8])
    more = f" and {len(away) - 8} more" if len(away) > 8 else ""
    if group.transport == "TCP" and member.size > 1:
        text = "no two ranks are known to share a host"
    else:
        hosts = [
            [r for r in range(member.size) if numbers[r] == h] for h in range(max(numbers) + 1)
        ]
        text = f"{len(hosts)} host" + "s" * (len(hosts) > 1)
        if len(hosts) > 1:
            text += " of ranks " + " | ".join(",".join(map(str, ranks)) for ranks in hosts)
    return f"{text}, this one is {platform.node()}" + (f" ({addresses}{more})" if away else "")


def _adjust(member: Member) -> None:
    """Begin or end the trace of a communicator, by the current settings and timelines."""
    wanted = bool(_timelines) or settings().debug == "TRACE"
    if wanted != (member._tracer is not None):
        member._trace(Tracer(member) if wanted else None)


def ignore(member: Member) -> None:
    """Do not trace an internal communicator, whose calls the program does not make."""
    with _lock:
        _members.discard(member)
        member._trace(None)


def leave(member: Member) -> None:
    """Unregister a communicator that is being closed."""
    with _lock:
        _members.discard(member)
        last = not _members
    if member._tracer is not None:
        member._tracer.collect()
        if last:  # otherwise another communicator writes when it closes, or the program at its end
            _write_all()


@contextlib.contextmanager
def timeline(file: str | os.PathLike[str]) -> Iterator[None]:
    """Write a timeline of all calls of this process within the block.

    https://ui.perfetto.dev opens the file. It shows a process for each rank, a row for each thread,
    and a slice for each call. A slice has bytes, dtype, shape, op, algorithm and transport. The
    command ``pycollective timeline merge`` joins the files of several processes. The variable
    ``PYCOLLECTIVE_TIMELINE`` has the same effect for a whole program.

    Parameters
    ----------
    file : path
        The file to write. ``{rank}`` in it stands for the process's rank. In a folder, the file is
        ``rank0.json`` and so on. With several processes, ``timeline.json`` becomes
        ``timeline.rank0.json`` and so on.

    Raises
    ------
    OSError
        The file cannot be written; raised before the block if possible.

    Examples
    --------
    >>> with pc.timeline("timeline.json"):
    ...     comm.all_reduce(x)
    """
    made = Timeline(path_of("file", file))
    with _lock:
        members = list(_members)
        for member in members:
            made.add_rank(member._lane, member._group.transport == "threads" or member.size == 1)
        made.write()
        _timelines.append(made)
        for member in members:
            _adjust(member)
    try:
        yield
    finally:
        with _lock:
            members = list(_members)
        for member in members:
            if member._tracer is not None:
                member._tracer.finish()
        with _lock:
            _timelines.remove(made)
            for member in members:
                _adjust(member)
        made.write()


def _forget_after_fork() -> None:
    """Clear all records in a forked child; the lock may be held by a thread that does not exist."""
    global _lock
    _lock = threading.Lock()
    _members.clear()
    _timelines.clear()
    _from_environment.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


@atexit.register
def _write_all() -> None:
    """Write all timelines, and log errors, since no caller could handle them."""
    with _lock:
        timelines = list(_timelines)
    for one in timelines:
        try:
            one.write()
        except OSError as error:
            LOG.warning("the timeline %s cannot be written: %s", one.path(), error)
