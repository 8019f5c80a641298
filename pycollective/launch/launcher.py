"""Start the processes of a group on this host, and end them if one fails."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from signal import Signals
from typing import Any

from pycollective import _core, tuning
from pycollective.cluster.sources import other_launchers
from pycollective.environment import arena_bytes
from pycollective.launch import cores, ended
from pycollective.launch.description import (
    ADDRESS,
    LISTENER,
    MEMORY,
    RANK,
    SIZE,
    TRANSPORT,
    forced,
    launched_environment,
)
from pycollective.launch.ended import Ended
from pycollective.launch.output import Output
from pycollective.launch.secret import SECRET
from pycollective.launch.watchdog import Watchdog

GRACE = 5.0
"""Seconds after a rank's failure until the other ranks get SIGTERM, and again until they get SIGKILL."""

_ORPHAN_SECONDS = 1.0
"""Seconds after a rank's end until the children that it left behind get SIGTERM."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_OF_ANOTHER_GROUP = (MEMORY, ADDRESS, LISTENER, ended.VARIABLE, tuning.CHOICES, "TF_CONFIG")
"""Variables of a group that the launcher itself belongs to. Its ranks are another group."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT)


class LaunchedGroup:
    """The launcher's side of a group of processes on this host."""

    def environment_of(self, rank: int) -> tuple[dict[str, str], dict[str, int]]:
        """Return a rank's variables, and the inherited descriptors by the variables that name them."""
        raise NotImplementedError

    def started(self) -> None:
        """Close the descriptors that only rank 0 needs, after the start of a rank."""

    def ended(self, rank: int, how: str, *, failed: bool) -> None:
        """Report the end of a rank's process to the group."""

    def survives(self, rank: int, running: set[int]) -> bool:
        """Return True if the other processes may run without a rank that has failed."""
        return False

    def is_over(self, running: set[int]) -> bool:
        """Return True if the running processes have nothing left to do."""
        return False

    def close(self) -> None:
        """Release all resources."""


class _SharedMemory(LaunchedGroup):
    """A group through shared memory, in which the launcher reports failed ranks to the others."""

    def __init__(self, size: int) -> None:
        self._group = _core.ShmGroup.create(size, arena_bytes(os.environ))
        self._size = size

    def environment_of(self, rank: int) -> tuple[dict[str, str], dict[str, int]]:
        env = launched_environment(rank, self._size, self._group.descriptor)
        choices = json.dumps(tuning.as_json(tuning.rows(self._group.transport, self._size)))
        descriptors = {MEMORY: self._group.descriptor}
        return {TRANSPORT: "shm", tuning.CHOICES: choices, **env}, descriptors

    def ended(self, rank: int, how: str, *, failed: bool) -> None:
        if failed:
            self._group.abort(f"{how}; {self._group.describe(rank)}", peer_lost=True, ranks=[rank])
        else:
            self._group.leave(rank)  # it may have ended without joining or leaving (os._exit)


class _Tcp(LaunchedGroup):
    """A group over TCP, on the loopback address; connected ranks detect failures by themselves."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._secret = secrets.token_hex(32)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=min(size + 64, 1024))
        self._address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ended = Ended.create(size, self._address)

    def environment_of(self, rank: int) -> tuple[dict[str, str], dict[str, int]]:
        env = {
            TRANSPORT: "tcp",
            RANK: str(rank),
            SIZE: str(self._size),
            ADDRESS: self._address,
            SECRET: self._secret,
        }
        descriptors = {ended.VARIABLE: self._ended.descriptor}
        if rank == 0:
            descriptors[LISTENER] = self._listener.fileno()
        return env, descriptors

    def started(self) -> None:
        self._listener.close()  # rank 0 has it now

    def ended(self, rank: int, how: str, *, failed: bool) -> None:
        self._ended.write(rank, how, failed=failed)

    def close(self) -> None:
        self._listener.close()
        os.close(self._ended.descriptor)


class Tasks(LaunchedGroup):
    """A cluster with parameter servers on the loopback address, described by ``TF_CONFIG``.

    Rank 0 is the chief. The parameter servers follow, and then the workers.
    """

    def __init__(self, servers: int, workers: int) -> None:
        self._tasks = [("ps", n) for n in range(servers)] + [("worker", n) for n in range(workers)]
        self.size = 1 + len(self._tasks)
        self._secret = secrets.token_hex(32)
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in self._tasks]
        self._cluster: dict[str, list[str]] = {"ps": [], "worker": []}
        for (job, _), listener in zip(self._tasks, self._listeners, strict=True):
            self._cluster[job].append(f"127.0.0.1:{listener.getsockname()[1]}")

    def environment_of(self, rank: int) -> tuple[dict[str, str], dict[str, int]]:
        job, number = self._tasks[rank - 1] if rank else ("chief", 0)
        config = {"cluster": self._cluster, "task": {"type": job, "index": number}}
        descriptors = {LISTENER: self._listeners[rank - 1].fileno()} if rank else {}
        return {"TF_CONFIG": json.dumps(config), SECRET: self._secret}, descriptors

    def survives(self, rank: int, running: set[int]) -> bool:
        """Return True for a worker if another worker runs.

        The functions of the failed worker then run on another one.
        """
        first = self._tasks.index(("worker", 0)) + 1
        return rank >= first and any(other >= first for other in running)

    def is_over(self, running: set[int]) -> bool:
        """Return True without the chief, who may have ended before the other tasks knew it."""
        return 0 not in running

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


def new_group(transport: str | None, size: int) -> LaunchedGroup:
    """Return a new group through ``transport``, else through that of the environment, else "shm"."""
    wanted = transport or forced(os.environ) or "shm"
    if wanted not in ("shm", "tcp"):
        source = f"transport={transport!r}" if transport else f"{TRANSPORT}={wanted}"
        raise ValueError(
            f"{source}, but processes use 'shm' or 'tcp': choose one of these, or make ranks that are "
            "threads (pycollective.local_group)"
        )
    return _Tcp(size) if wanted == "tcp" else _SharedMemory(size)


def prepare_environment(
    environ: MutableMapping[str, str], size: int, variables: Mapping[str, str]
) -> None:
    """Change a copy of the launcher's environment into a rank's."""
    for name in _OF_ANOTHER_GROUP:
        environ.pop(name, None)
    for name in _THREAD_VARIABLES:  # the user's own setting wins
        environ.setdefault(name, str(threads_of_rank(size)))
    environ.update(variables)


def threads_of_rank(size: int) -> int:
    """Return the number of a rank's threads: its share of the cores, at least 1."""
    return max(1, _core.usable_cores() // size)


def run(
    command: Sequence[str],
    size: int,
    prefix: str = "auto",
    transport: str | None = None,
    bind: str = "cores",
    group: LaunchedGroup | None = None,
) -> int:
    """Run ``size`` processes of a command as the ranks of one group; return the exit status.

    Each rank leads a session of its own. The launcher passes signals on to the ranks, and stops
    (Ctrl-Z) and continues them with itself. When a rank fails, calls of the other ranks raise
    `PeerLostError`. The launcher kills ranks that do not end then, and children that ranks have left
    behind. If the launcher itself is killed, a watchdog process does this.

    Parameters
    ----------
    command : sequence of str
        The program of each rank, with its arguments.
    size : int
        Number of ranks.
    prefix : {"auto", "always", "never"}
        Begin each line of output with its rank; auto: on a terminal only.
    transport : {"shm", "tcp"}, optional
        The transport between the ranks; by default ``PYCOLLECTIVE_TRANSPORT``, or shared memory.
    bind : {"cores", "none"}
        cores: Give each rank an equal share of the cores, if there is at least one for each rank.
    group : LaunchedGroup, optional
        The group, instead of a new one through the transport.

    Returns
    -------
    int
        The status of the rank that failed first, 128 + n if signal n killed it, else 0. A worker of a
        `Tasks` group counts only if it is the last one. 1 if all ranks succeeded, and their output
        could not be written, for example to a full disk.

    Raises
    ------
    OSError
        If the command cannot be started.
    ValueError
        If processes cannot use the transport.
    """
    _open_standard_streams()
    group = group or new_group(transport, size)
    if "TF_CONFIG" in os.environ:
        _report("TF_CONFIG is removed from the ranks' environment: it describes another group")
    for text in other_launchers(os.environ):
        _report(
            f"{text}, and the ranks started here are a group of their own. To make one group of all "
            "processes, start the program without pycollective run"
        )
    shares = cores.shares(size) if bind == "cores" else []
    received: list[int] = []
    is_ending = threading.Event()

    def receive(number: int, _frame: object) -> None:
        received.append(number)
        if number in _ENDING:
            is_ending.set()

    output = Output((sys.stdout, sys.stderr), prefix)
    before = {
        s: signal.signal(s, receive)
        for s in _FORWARDED
        if s is not signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN  # nohup
    }
    with contextlib.ExitStack() as at_end:
        for number, handler in before.items():
            at_end.callback(signal.signal, number, handler)
        at_end.callback(output.finish, is_ending, GRACE)
        ranks = at_end.enter_context(Ranks(group))
        for rank in range(size):
            variables, descriptors = group.environment_of(rank)
            numbers = {name: str(number) for name, number in descriptors.items()}
            env = {"PYTHONUNBUFFERED": "1", **os.environ}
            prepare_environment(env, size, variables | numbers)
            with cores.only_on(shares[rank] if shares else None):
                process = subprocess.Popen(
                    command,
                    env=env,
                    pass_fds=list(descriptors.values()),
                    stdin=None if rank == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,  # else Ctrl-C would reach the ranks twice
                )
            ranks.add(process.pid, process.poll)
            assert process.stdout is not None and process.stderr is not None
            output.add(rank, (process.stdout, process.stderr))
        output.start()
        status = _watch(ranks, received)
    lost = output.error()
    if lost is not None:
        _report(f"the output of the ranks was lost: {lost}")
    return status or int(lost is not None)


def _open_standard_streams() -> None:
    """Open the null device in place of closed standard streams.

    The group's memory would otherwise get one of their descriptors, which each rank replaces.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    # Python has None in place of a stream that was closed when it started.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


class Ranks:
    """The processes of a group's ranks, and the process groups that they lead.

    When this context ends, no process is left and the group is closed.
    """

    def __init__(self, group: LaunchedGroup) -> None:
        self.group = group
        self._watchdog = Watchdog()
        self.pids: list[int] = []
        self._polls: list[Callable[[], int | None]] = []
        self.running: set[int] = set()
        self._orphans: dict[int, float] = {}  # when a rank ended, by the process group that it led
        self._next_signal = 0.0  # time of the next signal to running ranks; 0: none
        self._ending_signals = [signal.SIGTERM, signal.SIGKILL]
        self._before: Any = None  # the program's handler of SIGCHLD

    def add(self, pid: int, poll: Callable[[], int | None]) -> None:
        """Add the process of the next rank.

        Its id is also that of the process group that it leads, or will lead. ``poll`` returns its exit
        code, -n after signal n; None while it runs.
        """
        self._watchdog.started(pid)
        self.running.add(len(self.pids))
        self.pids.append(pid)
        self._polls.append(poll)
        self.group.started()

    def signal(self, number: int) -> None:
        """Send a signal to every running rank, and to its children except for SIGUSR1 and SIGUSR2."""
        for rank in self.running:
            pid = self.pids[rank]
            # Children may not handle these two signals, which would kill them. A process that has
            # just started may not lead its group yet.
            alone = number in (signal.SIGUSR1, signal.SIGUSR2)
            if alone or not _signal_group(pid, number):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def end_soon(self) -> None:
        """Start the time after which `end_if_due` ends the running ranks."""
        self._next_signal = self._next_signal or time.monotonic() + GRACE

    def end_if_due(self) -> Signals | None:
        """Signal the running ranks if their time is over; return the signal that was sent, if any."""
        if not self._next_signal or time.monotonic() <= self._next_signal:
            return None
        if not (self.running and self._ending_signals):
            return None
        ending = self._ending_signals.pop(0)
        self.signal(ending)
        self._next_signal = time.monotonic() + GRACE
        return ending

    def ended(self) -> list[tuple[int, int]]:
        """Return the ranks that have ended since the last call, with their exit codes."""
        found = []
        for rank in sorted(self.running):
            code = self._polls[rank]()
            if code is not None:
                self.running.discard(rank)
                self._orphans[self.pids[rank]] = time.monotonic()
                found.append((rank, code))
        return found

    def has_orphans(self) -> bool:
        """Return True if children of ended ranks still run; signal those whose time is over."""
        for pid, since in list(self._orphans.items()):
            age = time.monotonic() - since
            number = 0 if age < _ORPHAN_SECONDS else signal.SIGTERM
            if age > 3 * _ORPHAN_SECONDS:
                number = signal.SIGKILL
            # A container without an init process does not reap zombies, whose group never vanishes.
            if not _signal_group(pid, number) or number == signal.SIGKILL:
                del self._orphans[pid]
                self._watchdog.ended(pid)
        return bool(self._orphans)

    def __enter__(self) -> Ranks:
        # If SIGCHLD is ignored, or a handler waits for any child, the ranks' exit codes are lost.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all running ranks, and the children of ended ranks."""
        self.signal(signal.SIGKILL)
        while self.ended() or self.running:
            time.sleep(0.001)
        for pid in self._orphans:
            _signal_group(pid, signal.SIGKILL)
        self._watchdog.close()
        self.group.close()
        if self._before is not None:
            signal.signal(signal.SIGCHLD, self._before)


def _signal_group(pid: int, number: int) -> bool:
    """Send a signal to a process group; return True if the group exists."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # a program that runs as another user
        pass
    return True


def _watch(ranks: Ranks, received: list[int]) -> int:
    """Wait for all processes; report the first failure to the group, and end the other ranks."""
    status = 0
    after: list[str] = []
    interrupts = 0
    ended_by_this: set[int] = set()
    while ranks.running or ranks.has_orphans():
        while received:
            number = received.pop(0)
            interrupts += number == signal.SIGINT
            if interrupts >= 3:
                _report("interrupted three times: killing the running ranks")
                ranks.signal(signal.SIGKILL)
            elif number == signal.SIGTSTP:
                ranks.signal(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
                ranks.signal(signal.SIGCONT)
            else:
                ranks.signal(number)
        for rank, code in ranks.ended():
            how = how_it_ended(code)
            if not code or not status:
                who = f"rank {rank} (process {ranks.pids[rank]})"
                ranks.group.ended(rank, f"{who} {how}", failed=code != 0)
            if not code or rank in ended_by_this:
                continue
            if not status and ranks.group.survives(rank, ranks.running):
                _report(f"rank {rank}, a worker, {how}; the other workers continue")
                continue
            if not status:
                status = code if code > 0 else 128 - code
                ranks.end_soon()
                _report(f"rank {rank} {how}")
            else:
                after.append(f"rank {rank} {how}")
        is_over = ranks.group.is_over(ranks.running)
        if is_over:
            ranks.end_soon()
        if ending := ranks.end_if_due():
            if is_over and not status:
                ended_by_this |= ranks.running
            _report(f"sending {ending.name} to running ranks: {_listed(ranks.running)}")
        time.sleep(0.01)
    if after:
        _report(f"then {', '.join(after)}")
    return status


def _listed(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _report(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"pycollective run: {text}", file=sys.stderr, flush=True)


def how_it_ended(code: int) -> str:
    """Return a description of an exit code, such as "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
