"""``pycollective.spawn``: run a function on all ranks of a new group."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection, reduction
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, TypeVar

from pycollective.arguments import printable, seconds, switch, whole
from pycollective.comm import DEFAULT_TIMEOUT, Communicator, local_group
from pycollective.comm.member import abort_with_parts
from pycollective.environment import MAX_RANKS
from pycollective.errors import CollectiveError, RankError
from pycollective.launch import cores, init, launcher, leave_all, thread_ranks

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Args = TypeVarTuple("Args")

T = TypeVar("T")

_AFTER_CTRL_C = 2.0
"""Seconds that the ranks have to end by themselves after Ctrl-C, before SIGKILL."""
_LOST = 255
"""Takes the place of an exit code that this program cannot learn."""

_PORTABLE = "return arrays, numbers, text, and containers of these, or give threads=True"


def spawn(
    fn: Callable[[Communicator, Unpack[Args]], T],
    n: int,
    *args: Unpack[Args],
    threads: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    transport: str | None = None,
    context: str | BaseContext | None = None,
) -> list[T]:
    """Call ``fn(comm, *args)`` on each rank of a new group and return the results in rank order.

    The ranks are processes of this host. When a rank raises, the group is aborted at once. The
    calls of the other ranks raise `AbortedError`, and a rank that still runs after some seconds is
    killed. Then `spawn` raises the error of the rank that failed first. No process outlives this
    call, not even if Ctrl-C interrupts it or this process is killed.

    Processes that are not forked import the program's main module again. A script that uses them
    calls `spawn` under ``if __name__ == "__main__":``.

    Parameters
    ----------
    fn : callable
        The program of a rank. Its communicator is closed when it returns.
    n : int
        Number of ranks, 1 to 1024.
    *args
        Further arguments of ``fn`` on each rank.
    threads : bool
        Make the ranks threads of this process, which share all of its objects.
    timeout : float
        Seconds that a call of a communicator waits for the other ranks.
    transport : {"shm", "tcp"}, optional
        The transport between the processes, as in ``pycollective run``; by default
        ``PYCOLLECTIVE_TRANSPORT``, or shared memory.
    context : {"fork", "spawn", "forkserver"} or multiprocessing context, optional
        The start method of the processes; by default that of `multiprocessing`. A notebook or an
        interactive session forks, because its functions exist in its own process only.

    Returns
    -------
    list
        The results of ``fn`` by rank. Results of processes are copies, made with pickle.

    Raises
    ------
    RankError
        A rank was killed or ended early, or raised an error that cannot be pickled. The attributes
        ``rank`` and ``exitcode`` give details.
    Exception
        The error that ``fn`` raised on a rank. Its ``__cause__`` is a `RankError` with the rank and
        the rank's traceback.
    TypeError
        ``fn``, an argument or a result cannot be sent to or from a process; the message says what
        to do.
    RuntimeError
        This process is a daemon of `multiprocessing`, which cannot start processes.

    Examples
    --------
    >>> import numpy as np, pycollective as pc
    >>> def work(comm, factor):
    ...     return float(comm.all_reduce(np.array(comm.rank * factor)))
    >>> pc.spawn(work, 3, 10.0)
    [30.0, 30.0, 30.0]
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function of a communicator, not {fn!r}")
    size, limit = whole("n", n, 1, MAX_RANKS), seconds("timeout", timeout)
    if not switch("threads", threads):
        ended = _in_processes(fn, args, size, limit, transport, context)
    elif transport is None and context is None:
        ended = _in_threads(fn, args, size, limit)
    else:
        raise TypeError("transport= and context= are for processes: leave them or threads=True out")
    failed = [one for one in ended if one.is_failure]
    if failed:
        _raise(min(failed, key=_causes_first))
    return [one.result for one in sorted(ended, key=lambda one: one.rank)]


@dataclass
class _End:
    """The end of a rank's function, or of its process."""

    rank: int
    result: Any = None
    error: BaseException | None = None  # None also if it cannot be pickled
    how: str = ""  # a description of the failure; empty: the function returned
    traceback: str = ""
    exitcode: int | None = None
    came_first: bool = True  # False: the group had failed before this rank did
    when: float = field(default_factory=time.monotonic)

    @property
    def is_failure(self) -> bool:
        return bool(self.how)


def _causes_first(ended: _End) -> tuple[bool, bool, float]:
    """Return a key that sorts failures by their likelihood of being the cause of the others."""
    return not ended.came_first, isinstance(ended.error, CollectiveError), ended.when


def _failure(rank: int, error: BaseException, *, came_first: bool = True) -> _End:
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    how = f"rank {rank} raised {_named(error)}"
    if isinstance(error, SystemExit):
        how = f"rank {rank} called sys.exit({error.code!r})"
    return _End(rank, None, error, how, "".join(lines), came_first=came_first)


def _named(error: BaseException) -> str:
    return printable("".join(traceback.format_exception_only(type(error), error)).strip())


def _raise(ended: _End) -> None:
    how, error = ended.how, ended.error
    if isinstance(error, SystemExit):  # it would end the caller without a message
        error = None
    cause = RankError(
        how if error is None else f"rank {ended.rank} raised this error:",
        rank=ended.rank,
        exitcode=ended.exitcode,
        traceback=ended.traceback,
    )
    if error is None:
        raise cause
    raise error from cause


def _run(
    comm: Communicator,
    fn: Callable[..., Any],
    args: Sequence[Any],
    pack: Callable[[Any], Any] = lambda result: result,
) -> _End:
    """Run a rank's function to its end."""
    try:
        result = pack(fn(comm, *args))
        comm.close()
    except BaseException as error:
        came_first = comm._group.failure is None
        abort_with_parts(comm, f"rank {comm.rank} raised {_named(error)}")
        with contextlib.suppress(CollectiveError):
            comm.close()
        return _failure(comm.rank, error, came_first=came_first)
    return _End(comm.rank, result)


def _in_threads(
    fn: Callable[..., Any], args: Sequence[Any], size: int, timeout: float
) -> list[_End]:
    communicators = local_group(size, timeout=timeout)
    ends: queue.SimpleQueue[_End] = queue.SimpleQueue()

    def rank(comm: Communicator) -> None:
        thread_ranks.count = size
        ends.put(_run(comm, fn, args))

    ranks = [
        threading.Thread(
            target=rank, args=(c,), name=f"pycollective-spawn-rank-{c.rank}", daemon=True
        )
        for c in communicators
    ]
    for one in ranks:
        one.start()
    ended: list[_End] = []
    try:
        while len(ended) < size and not any(one.is_failure for one in ended):
            ended.append(ends.get())
    except BaseException:
        for comm in communicators:
            abort_with_parts(comm, "the caller of spawn was interrupted")
        raise
    finally:  # A thread cannot be killed. After this time it keeps running.
        until = time.monotonic() + launcher.GRACE
        for one in ranks:
            one.join(max(0.0, until - time.monotonic()))
    while not ends.empty():
        ended.append(ends.get())
    return ended


class _Call:
    """The function and its arguments, which multiprocessing sends to a process."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], method: str | None) -> None:
        self._call = fn, args
        self._method = method
        self._data = b""

    def __getstate__(self) -> tuple[str | None, bytes]:
        try:
            return self._method, bytes(reduction.ForkingPickler.dumps(self._call))
        except Exception as error:
            raise TypeError(
                f"{_name(self._call[0])} or its arguments cannot be pickled for processes that are "
                f"started by {self._method!r} ({_named(error)}). Define the function at the top of a "
                "module, or give context='fork' or threads=True"
            ) from error

    def __setstate__(self, state: tuple[str | None, bytes]) -> None:
        self._method, self._data = state

    def get(self) -> tuple[Callable[..., Any], Sequence[Any]]:
        """Return the function and its arguments, in the process."""
        if not self._data:
            return self._call  # the process was forked
        try:
            call: tuple[Callable[..., Any], Sequence[Any]] = pickle.loads(self._data)
        except Exception as error:
            raise TypeError(
                f"a process that was started by {self._method!r} cannot find the function or its "
                f"arguments ({_named(error)}). Functions and classes of a notebook or an interactive "
                "session exist in its own process only. Put them into a module, or give "
                "context='fork' or threads=True"
            ) from error
        return call


def _name(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", fn))


class _Descriptor:
    """A descriptor that a process inherits."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, state: Any) -> None:
        self.number = state.detach()


@dataclass
class _RankSettings:
    """The settings of a rank's process: the rank, its environment, and its cores."""

    rank: int
    size: int
    variables: dict[str, str]
    descriptors: Mapping[str, _Descriptor]
    cores: set[int] | None
    timeout: float

    def join(self) -> Communicator:
        """Make this process the rank."""
        numbers = {name: str(one.number) for name, one in self.descriptors.items()}
        launcher.prepare_environment(os.environ, self.size, self.variables | numbers)
        if self.cores is not None:  # a fork server does not inherit the caller's cores
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.cores)
        with contextlib.suppress(ImportError):  # NumPy has already read the variables
            import threadpoolctl

            threadpoolctl.threadpool_limits(launcher.threads_of_rank(self.size), "blas")
        return init(timeout=self.timeout)


def _rank(settings: _RankSettings, call: _Call, writer: Any) -> None:
    """Run a rank; the main function of its process."""
    os.setsid()  # so that only the parent gets Ctrl-C, and can kill the rank with its children
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork inherits the parent's handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        fn, args = call.get()
        comm = settings.join()
    except BaseException as error:
        ended = _failure(settings.rank, error)
    else:
        own = os.getpid()
        ended = _run(comm, fn, args, _pickled)
        if os.getpid() != own:  # a child that the function has forked: it has no result to send
            if ended.error is not None:
                raise ended.error
            return
        leave_all()  # `multiprocessing` does not run atexit functions
    if isinstance(ended.error, SystemExit):
        stop, ended.error = ended.error, None
        ended.exitcode = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        writer.send_bytes(_portable(ended))
        raise stop
    result, ended.result = ended.result, None
    writer.send_bytes(_portable(ended))
    if not ended.is_failure:
        writer.send_bytes(result)


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"the result, a {type(result).__name__}, cannot be pickled ({_named(error)}): {_PORTABLE}"
        ) from error


def _portable(ended: _End) -> bytes:
    """Return the pickled end of a rank and its error, which is empty if it cannot be unpickled."""
    error, ended.error, data = ended.error, None, b""
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        if error is not None and type(pickle.loads(pickled)) is type(error):
            data = pickled
    return pickle.dumps((ended, data))


def _in_processes(
    fn: Callable[..., Any],
    args: Sequence[Any],
    size: int,
    timeout: float,
    transport: str | None,
    context: str | BaseContext | None,
) -> list[_End]:
    how = _context(context)
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "a daemon of multiprocessing, such as a worker of multiprocessing.Pool, cannot start "
            "processes. Give threads=True, or call spawn in a process with daemon=False, such as a "
            "worker of concurrent.futures.ProcessPoolExecutor"
        )
    group = launcher.new_group(transport, size)
    call = _Call(fn, args, how.get_start_method())
    shares: Sequence[set[int] | None] = cores.shares(size) or [None] * size
    processes: list[BaseProcess] = []
    readers: list[Any] = []
    with contextlib.ExitStack() as at_end, launcher.Ranks(group) as ranks:
        try:
            for rank in range(size):
                variables, numbers = group.environment_of(rank)
                descriptors = {name: _Descriptor(number) for name, number in numbers.items()}
                settings = _RankSettings(rank, size, variables, descriptors, shares[rank], timeout)
                reader, writer = how.Pipe(duplex=False)
                readers.append(at_end.enter_context(reader))
                process = how.Process(  # type: ignore[attr-defined]  # every context has it
                    target=_rank, args=(settings, call, writer), name=f"pycollective rank {rank}"
                )
                with writer, cores.only_on(shares[rank]):
                    process.start()
                processes.append(process)
                is_child = how.get_start_method() != "forkserver"
                ranks.add(process.pid, partial(_exit_code, process, is_child))
                at_end.callback(_close, process)
            return _watch(ranks, processes, readers)
        except KeyboardInterrupt:
            ranks.signal(signal.SIGINT)
            until = time.monotonic() + _AFTER_CTRL_C
            while (ranks.ended() or ranks.running) and time.monotonic() < until:
                time.sleep(0.01)
            raise


def _exit_code(process: BaseProcess, is_child: bool) -> int | None:
    """Return a process's exit code, None while it runs, or `_LOST` if this program lost the code."""
    code = process.exitcode
    if code is None and is_child and process.pid is not None:
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # a handler of SIGCHLD waits for any child, or SIGCHLD is ignored
            return _LOST
    return code


def _close(process: BaseProcess) -> None:
    """Free the descriptors of a process that has ended."""
    with contextlib.suppress(ValueError):  # this program lost its exit code
        process.close()


def _context(given: str | BaseContext | None) -> BaseContext:
    if isinstance(given, BaseContext):
        return given
    if given is None:
        found: BaseContext = multiprocessing.get_context()
        in_file = hasattr(sys.modules["__main__"], "__file__")
        if in_file or "fork" not in multiprocessing.get_all_start_methods():
            return found
        return multiprocessing.get_context("fork")
    if given not in multiprocessing.get_all_start_methods():
        names = ", ".join(map(repr, multiprocessing.get_all_start_methods()))
        raise ValueError(f"context must be {names} or a context of multiprocessing, not {given!r}")
    return multiprocessing.get_context(given)


def _watch(
    ranks: launcher.Ranks, processes: Sequence[BaseProcess], readers: Sequence[Any]
) -> list[_End]:
    """Wait for all processes; report failures to the group, and end the other ranks."""
    unread = dict(enumerate(readers))
    ended: dict[int, _End] = {}

    def read(rank: int) -> None:
        found = _received(unread.pop(rank))
        if found is not None:
            ended[rank] = found

    while ranks.running or ranks.has_orphans():
        sentinels = [processes[rank].sentinel for rank in ranks.running]
        # The limit is needed because a child of a rank may keep the rank's sentinel open.
        ready = connection.wait([*unread.values(), *sentinels], 0.05)
        for rank, reader in list(unread.items()):
            if reader in ready:
                read(rank)
        for rank, code in ranks.ended():
            if rank in unread and unread[rank].poll():
                read(rank)
            if rank not in ended:
                ended[rank] = _End(rank, how=_end_text(rank, code), exitcode=code)
            one = ended[rank]
            ranks.group.ended(rank, one.how or f"rank {rank} has ended", failed=one.is_failure)
        if any(one.is_failure for one in ended.values()):
            ranks.end_soon()
            ranks.end_if_due()
    return list(ended.values())


def _end_text(rank: int, code: int) -> str:
    how = f"rank {rank} {launcher.how_it_ended(code)}"
    return how if code < 0 else f"{how} before its function returned"


def _received(reader: Any) -> _End | None:
    """Return the end that a rank sent; None if its process ended before."""
    try:
        ended, error = pickle.loads(reader.recv_bytes())
        assert isinstance(ended, _End)
        data = b"" if ended.is_failure else reader.recv_bytes()
    except (EOFError, OSError):  # OSError: the rank was killed within a message
        return None
    with contextlib.suppress(Exception):  # this process may not have the error's class
        ended.error = pickle.loads(error) if error else None
    if not ended.is_failure:
        try:
            ended.result = pickle.loads(data)
        except Exception as error:
            ended.how = f"the result of rank {ended.rank} cannot be unpickled ({_named(error)})"
            ended.error = TypeError(f"{ended.how}: {_PORTABLE}")
    return ended
