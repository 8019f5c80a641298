"""Communicators that are watched: their calls are logged, remembered, and put into timelines.

An `_Observed` stands in the core's place in a communicator: what it makes known of a call is what the
core is asked to do, after all arguments were checked and prepared.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from pycollective import _core
from pycollective.errors import CollectiveError, RendezvousError
from pycollective.observe.log import LOG, TIMELINE, TRACE, settings
from pycollective.observe.trace_events import Timeline

if TYPE_CHECKING:
    from pycollective.communicator.member import Member

__all__ = ["Call", "enqueue", "ignore", "join", "leave", "timeline", "together"]

Array = NDArray[Any]
How = str | _core.Algorithm

REMEMBERED = 32
"""Calls of a rank that are told of when one of them fails."""

_NO_ALGORITHM = ("", "")
_PAUSE = 1e-4
_GPU_ROWS = 1 << 22

_lock = threading.Lock()  # guards what follows
_members: weakref.WeakSet[Member] = weakref.WeakSet()
_timelines: list[Timeline] = []
_asked_for: dict[str, Timeline] = {}  # by the environment


class Call:
    """One call of a rank: what the core was asked for, when, and how it ended."""

    __slots__ = (
        "algorithm", "began", "dtype", "ended", "error", "is_message", "lane", "later",
        "name", "nbytes", "number", "others", "shape", "thread", "thread_name", "transport", "why",
    )  # fmt: skip

    def __init__(
        self, name: str, array: Array | None, how: tuple[str, str], others: dict[str, Any]
    ) -> None:
        self.name = name
        self.algorithm, self.why = how
        self.others = others
        self.dtype = "" if array is None else str(array.dtype)
        self.shape = [] if array is None else list(array.shape)
        self.nbytes = 0 if array is None else array.nbytes
        self.number = 0  # among the collective calls of the rank; 0: not known
        self.is_message = name in ("send", "recv")
        self.later = False
        self.error = ""
        self.lane, self.transport = 0, ""
        thread = threading.current_thread()
        self.thread, self.thread_name = threading.get_native_id(), thread.name
        self.began = self.ended = time.monotonic()

    def arguments(self) -> dict[str, Any]:
        """Return what a timeline shows of it."""
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


def _message(name: str, array: Array, on_gpu: Array | None, others: dict[str, Any]) -> Call:
    call = Call(name, array if on_gpu is None else on_gpu, _NO_ALGORITHM, others)
    if on_gpu is not None:
        call.transport = "device copies"
    return call


class _Task:
    """A call that is under way; the task of the core, and what is to be made known when it is over."""

    def __init__(self, task: _core.Task, observed: _Observed) -> None:
        self._task = task
        self._observed = weakref.ref(observed)  # a work does not keep its communicator

    @property
    def done(self) -> bool:
        return self._task.done

    def wait(self, timeout: float) -> bool:
        return self._task.wait(timeout)

    def check(self) -> None:
        observed = self._observed()
        if observed is not None:
            observed.collect()
        self._task.check()


class _OnDevice:
    """A call that a device has been given; it is over when the device is done with it."""

    def __init__(self, operation: Any) -> None:
        self._operation = operation
        self.check: Callable[[], None] = operation.check

    @property
    def done(self) -> bool:
        return bool(self._operation.ended)

    @property
    def times(self) -> tuple[float, float]:
        begin, end = self._operation.times
        return begin, end

    def finish(self) -> None:
        """Wait on the host; a device that does not come to an end is given up at the call's deadline."""
        begin = getattr(self._operation, "begin", None)
        if begin is not None:  # it was put off
            begin()
        while not self.done:
            time.sleep(_PAUSE)


class _Observed:
    """Stands for the core of a communicator."""

    def __init__(self, core: _core.Communicator, member: Member) -> None:
        self.plain = core
        self._member = weakref.ref(member)  # which has this
        self._group, self._rank, self._size = member._group, member.rank, member.size
        self._transport = member._group.transport
        self._under_way: dict[int, tuple[Call, _core.Task | _OnDevice]] = {}
        self._last: deque[tuple[Call, str]] = deque(maxlen=REMEMBERED)
        self._told = False  # of the last calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    # What the core can be asked for ---------------------------------------------------------------

    def all_reduce(
        self, input: Array, output: Array, op: str, algorithm: How, reproducible: bool,
        timeout: float, async_op: bool = False, shape: Sequence[int] | None = None,
    ) -> Any:  # fmt: skip
        how = self._chosen("all_reduce", input.nbytes, algorithm)
        if reproducible:
            how = "direct", "for reproducible=True"
        return self._make(
            Call("all_reduce", input, how, {"op": op}),
            lambda: self.plain.all_reduce(
                input, output, op, algorithm, reproducible, timeout, async_op, shape
            ),
        )

    def reduce(
        self, input: Array, output: Array | None, op: str, root: int, algorithm: How,
        timeout: float, async_op: bool = False,
    ) -> Any:  # fmt: skip
        how = self._chosen("reduce", input.nbytes, algorithm)
        return self._make(
            Call("reduce", input, how, {"op": op, "root": root}),
            lambda: self.plain.reduce(input, output, op, root, algorithm, timeout, async_op),
        )

    def reduce_scatter(
        self, input: Array, output: Array, op: str, algorithm: How, timeout: float,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        how = self._chosen("reduce_scatter", input.nbytes, algorithm)
        return self._make(
            Call("reduce_scatter", input, how, {"op": op}),
            lambda: self.plain.reduce_scatter(input, output, op, algorithm, timeout, async_op),
        )

    def scan(
        self, input: Array, output: Array | None, op: str, exclusive: bool, algorithm: How,
        timeout: float, async_op: bool = False,
    ) -> Any:  # fmt: skip
        name = "exscan" if exclusive else "scan"
        return self._make(
            Call(name, input, self._chosen(name, input.nbytes, algorithm), {"op": op}),
            lambda: self.plain.scan(input, output, op, exclusive, algorithm, timeout, async_op),
        )

    def broadcast(
        self, input: Array, output: Array, root: int, algorithm: How, timeout: float,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        how = self._chosen("broadcast", input.nbytes, algorithm)
        return self._make(
            Call("broadcast", input, how, {"root": root}),
            lambda: self.plain.broadcast(input, output, root, algorithm, timeout, async_op),
        )

    def move_parts(
        self, collective: _core.Collective, input: Array | None, output: Array | None, count: int,
        shape: Sequence[int], root: int, algorithm: How, timeout: float, async_op: bool = False,
    ) -> Any:  # fmt: skip
        return self._make(
            self._moved(collective, input, output, root, algorithm),
            lambda: self.plain.move_parts(
                collective, input, output, count, shape, root, algorithm, timeout, async_op
            ),
        )

    def move_ragged(
        self, collective: _core.Collective, input: Array | None, output: Array | None,
        counts: Sequence[int], shape: Sequence[int], root: int, algorithm: How, timeout: float,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        return self._make(
            self._moved(collective, input, output, root, algorithm),
            lambda: self.plain.move_ragged(
                collective, input, output, counts, shape, root, algorithm, timeout, async_op
            ),
        )

    def all_to_all_ragged(
        self, input: Array, output: Array, input_counts: Sequence[int],
        output_counts: Sequence[int], shape: Sequence[int], timeout: float, async_op: bool = False,
    ) -> Any:  # fmt: skip
        return self._make(
            Call("all_to_all", input, ("direct", ""), {}),
            lambda: self.plain.all_to_all_ragged(
                input, output, input_counts, output_counts, shape, timeout, async_op
            ),
        )

    def barrier(self, timeout: float, async_op: bool = False) -> Any:
        return self._make(
            Call("barrier", None, _NO_ALGORITHM, {}), lambda: self.plain.barrier(timeout, async_op)
        )

    def send(
        self, input: Array, dest: int, tag: int, timeout: float, async_op: bool = False, *,
        on_gpu: Array | None = None,
    ) -> Any:  # fmt: skip
        """Send; ``on_gpu`` is the array that a word about it stands for."""
        return self._make(
            _message("send", input, on_gpu, {"to rank": dest, "tag": tag}),
            lambda: self.plain.send(input, dest, tag, timeout, async_op),
        )

    def recv(
        self, output: Array, source: int, tag: int, timeout: float, async_op: bool = False, *,
        on_gpu: Array | None = None,
    ) -> Any:  # fmt: skip
        """Receive; as `send`."""
        return self._make(
            _message("recv", output, on_gpu, {"from rank": source, "tag": tag}),
            lambda: self.plain.recv(output, source, tag, timeout, async_op),
        )

    def _moved(
        self, collective: _core.Collective, input: Array | None, output: Array | None, root: int,
        algorithm: How,
    ) -> Call:  # fmt: skip
        array = output if input is None else input
        nbytes = 0 if array is None else array.nbytes
        if collective.name == "all_gather" and output is not None:
            nbytes = output.nbytes  # of all parts
        how = self._chosen(collective.name, nbytes, algorithm)
        has_root = collective.name in ("gather", "scatter")
        return Call(collective.name, array, how, {"root": root} if has_root else {})

    def _chosen(self, collective: str, nbytes: int, algorithm: How) -> tuple[str, str]:
        """Return the algorithm's name, and why it was chosen where the program did not say."""
        if not isinstance(algorithm, str):
            return algorithm.name, "one's own"
        member = self._member()
        if algorithm != "auto" or member is None:
            return algorithm, ""
        which = _core.Collective.__members__[collective]
        name = self.plain.select(which, nbytes)
        table = "built-in"
        if any(row[0] == which and nbytes <= row[1] for row in member._choices):
            table = "measured"
        elif name == "hierarchical":
            return name, f"chosen for {max(self._group.hosts) + 1} hosts"
        return name, f"chosen by the {table} table for {nbytes} bytes among {self._size} ranks"

    # How calls are made known ---------------------------------------------------------------------

    def _make(self, call: Call, make: Callable[[], Any]) -> Any:
        self.collect()
        try:
            made = make()
        except BaseException as error:
            self.over(call, error)
            raise
        if isinstance(made, _core.Task):
            call.later = True
            with _lock:
                self._under_way[id(call)] = call, made
            return _Task(made, self)
        self.over(call, None)
        return made

    def enqueue(self, call: Call, make: Callable[[bool], Any]) -> Any:
        """Let a device be given a call, which is made known when the device is done with it."""
        self.collect()
        try:
            operation = make(True)
        except BaseException as error:
            call.ended = time.monotonic()
            self._tell(call, error)
            raise
        call.number = operation.number
        with _lock:
            self._under_way[id(call)] = call, _OnDevice(operation)
        return operation

    def finish(self) -> None:
        """Make all calls known that devices have been given."""
        with _lock:
            tasks = [task for _, task in self._under_way.values()]
        for task in tasks:
            if isinstance(task, _OnDevice):
                task.finish()
        self.collect()

    def over(self, call: Call, error: BaseException | None) -> None:
        """Make a call known that this thread has made."""
        call.ended = time.monotonic()
        if not call.is_message:
            call.number = self._group.calls(self._rank)
        self._tell(call, error)

    def collect(self) -> None:
        """Make those calls known that were under way and are over."""
        with _lock:
            over = [(key, *both) for key, both in self._under_way.items() if both[1].done]
            for key, _, _ in over:
                del self._under_way[key]
        for _, call, task in over:
            call.began, call.ended = task.times
            error: BaseException | None = None
            try:
                task.check()
            except Exception as found:
                error = found
            self._tell(call, error)

    def _tell(self, call: Call, error: BaseException | None) -> None:
        member = self._member()
        call.lane = self._rank if member is None else member._lane
        call.transport = call.transport or self._transport
        if error is not None:
            call.error = f"{type(error).__name__}: {error}"
        with _lock:
            timelines = list(_timelines)
        for one in timelines:
            one.add(call)
        took = f"{1e6 * (call.ended - call.began):.1f} µs"
        self._last.append((call, f"after {took}: {call.error}" if error else took))
        about = {"rank": self._rank}
        LOG.log(
            TRACE, "rank %d of %d: %s: %s", self._rank, self._size, *self._last[-1], extra=about
        )
        if isinstance(error, CollectiveError) and not self._told:
            self._told = True
            if LOG.isEnabledFor(TRACE):
                lines = "\n".join(f"    {call}: {end}" for call, end in self._last)
                LOG.error("rank %d failed; its last calls:\n%s", self._rank, lines, extra=about)
            _write_all()


def together(
    cores: Sequence[Any], inputs: Sequence[Array], outputs: Sequence[Array], op: str,
    algorithm: How, timeout: float,
) -> None:  # fmt: skip
    """Make the all-reduce of all ranks of a group, of which some cores may be watched."""
    calls = [
        (core, Call("all_reduce", x, core._chosen("all_reduce", x.nbytes, algorithm), {"op": op}))
        for core, x in zip(cores, inputs, strict=True)
        if isinstance(core, _Observed)
    ]
    plain = [core if isinstance(core, _core.Communicator) else core.plain for core in cores]
    error: BaseException | None = None
    try:
        _core.all_reduce_together(plain, inputs, outputs, op, algorithm, timeout)
    except BaseException as found:
        error = found
        raise
    finally:
        for core, call in calls:
            core.over(call, error)


def enqueue(
    member: Member | None, name: str, arrays: Sequence[Array | None], others: dict[str, Any],
    by: str, gpu: int, make: Callable[[bool], Any], how: tuple[str, str] = _NO_ALGORITHM,
) -> Any:  # fmt: skip
    """Let a GPU be given a call of a communicator, which may be watched.

    Parameters
    ----------
    member : Member or None
        The communicator; None if it is gone.
    name : str
        The call.
    arrays : sequence of array or None
        What it reads and writes.
    others : dict
        What else is told of it.
    by : str
        What makes it.
    gpu : int
        The device.
    make : callable
        Gives the call to the device, which is to note the times if its argument is true. What it
        returns has a ``number``, and tells with ``ended``, ``times`` and ``check()`` how the call goes.
    how : tuple of str
        The algorithm, and why that one, as far as there is something to say.
    """
    core = None if member is None else member._core
    if not isinstance(core, _Observed):
        return make(False)
    array = next((array for array in arrays if array is not None), None)
    call = Call(name, array, how, {**others, "times": "of the GPU"})
    # In a row of its own, since this thread goes on; the numbers of threads are below.
    call.transport, call.thread, call.thread_name = by, _GPU_ROWS + gpu, f"GPU {gpu}"
    return core.enqueue(call, make)


# Who is watched -----------------------------------------------------------------------------------


def _warn(text: str) -> None:
    LOG.warning("%s", text)


def join(member: Member) -> None:
    """Take in a new communicator, whose core is there: it warns of long waits, and may be watched.

    Raises
    ------
    RendezvousError
        The environment asks for what there is not, or for a timeline that cannot be written.
    """
    wanted = settings()
    if wanted.warn_after < math.inf:
        member._core.warn_after(wanted.warn_after, _warn)
    alone = member._group.transport == "threads" or member.size == 1
    with _lock:
        file = wanted.timeline
        for one in _timelines:
            one.meet(member._lane, alone)
        if file and file not in _asked_for:
            made = Timeline(file)
            made.meet(member._lane, alone)
            try:
                made.write()  # better known now than after hours
            except OSError as error:
                raise RendezvousError(f"{TIMELINE}={file!r} cannot be written: {error}") from None
            _asked_for[file] = made
            _timelines.append(made)
        _members.add(member)
        _adjust(member)


def _adjust(member: Member) -> None:
    """Watch a communicator, or do not, as is wanted now."""
    core, watched = member._core, bool(_timelines) or settings().debug == "TRACE"
    if isinstance(core, _Observed) and not watched:
        core = member._core = core.plain
    elif isinstance(core, _core.Communicator) and watched:
        member._detach()
        member._core = _Observed(core, member)
    if isinstance(core, _core.Communicator) and not watched:
        member._attach(core)


def ignore(member: Member) -> None:
    """Do not watch a communicator of our own, whose calls no program has made."""
    with _lock:
        _members.discard(member)
        if isinstance(member._core, _Observed):
            member._core = member._core.plain


def leave(member: Member) -> None:
    """Let go of a communicator that is being closed."""
    with _lock:
        _members.discard(member)
        last = not _members
    if isinstance(member._core, _Observed):
        member._core.collect()
        if last:  # others write at their end, or at the program's
            _write_all()


@contextlib.contextmanager
def timeline(file: str | os.PathLike[str]) -> Iterator[None]:
    """Write a timeline of the collectives within the block, of all communicators of this process.

    The file is of trace events, which https://ui.perfetto.dev opens: a process for each rank, a row
    for each thread, a slice for each call with its bytes, dtype, shape, op, algorithm and transport.
    ``pycollective timeline merge`` joins the files of several processes. The variable
    ``PYCOLLECTIVE_TIMELINE`` does the same for a whole program.

    Parameters
    ----------
    file : path
        Where to. ``{rank}`` in it is replaced by the process's rank; a folder gets ``rank0.json``, …;
        where a group has several processes, ``timeline.json`` becomes ``timeline.rank0.json``, ….

    Raises
    ------
    OSError
        The file cannot be written; before the block is entered, where that is known.

    Examples
    --------
    >>> with pc.timeline("timeline.json"):
    ...     comm.all_reduce(x)
    """
    made = Timeline(os.fspath(file))
    with _lock:
        members = list(_members)
        for member in members:
            made.meet(member._lane, member._group.transport == "threads" or member.size == 1)
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
            if isinstance(member._core, _Observed):
                member._core.finish()
        with _lock:
            _timelines.remove(made)
            for member in members:
                _adjust(member)
        made.write()


def _forget_after_fork() -> None:
    """In a forked child: what was recorded is the parent's, and a lock may be held for ever."""
    global _lock
    _lock = threading.Lock()
    _members.clear()
    _timelines.clear()
    _asked_for.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


@atexit.register
def _write_all() -> None:
    """Write what there is, where nobody can be told that it fails."""
    with _lock:
        timelines = list(_timelines)
    for one in timelines:
        try:
            one.write()
        except OSError as error:
            LOG.warning("the timeline %s cannot be written: %s", one.path(), error)
