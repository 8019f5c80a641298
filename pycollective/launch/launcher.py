"""Start the processes of a group on this host, and watch over them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from signal import Signals
from typing import Protocol

from pycollective import _core, tuning
from pycollective.environment import arena_bytes
from pycollective.launch import (
    ADDRESS,
    LISTENER,
    MEMORY,
    RANK,
    SECRET,
    SIZE,
    TRANSPORT,
    cores,
    ended,
    forced,
    launched_environment,
)
from pycollective.launch.ended import Ended
from pycollective.launch.guardian import Guardian
from pycollective.launch.output import Output

__all__ = [
    "LaunchedGroup",
    "Ranks",
    "how_it_ended",
    "new_group",
    "prepare_environment",
    "run",
    "transport_of_processes",
]

GRACE = 5.0
"""Seconds that the other ranks have to end by themselves when one has failed, before SIGTERM and again
before SIGKILL."""

_LEFT_BEHIND = 1.0
"""Seconds that processes which a rank has left behind have to end by themselves."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_OF_ANOTHER_GROUP = (MEMORY, ADDRESS, LISTENER, ended.VARIABLE, tuning.CHOICES, "TF_CONFIG")
"""The variables of a group that the launcher itself is in. The ranks are another group."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT)


class LaunchedGroup:
    """The launcher's side of a group of processes on this host."""

    def given_to(self, rank: int) -> tuple[dict[str, str], dict[str, int]]:
        """Return a rank's variables, and the descriptors that it inherits, by their variables."""
        raise NotImplementedError

    def started(self) -> None:
        """Let go of what only rank 0 needs, which has been started."""

    def ended(self, rank: int, how: str, *, failed: bool) -> None:
        """Tell the group that the process of a rank has ended."""

    def close(self) -> None:
        """Let go of everything."""


class _SharedMemory(LaunchedGroup):
    """A group through shared memory: the launcher tells the others of a rank that dies."""

    def __init__(self, size: int) -> None:
        self._group = _core.ShmGroup.create(size, arena_bytes(os.environ))
        self._size = size

    def given_to(self, rank: int) -> tuple[dict[str, str], dict[str, int]]:
        env = launched_environment(rank, self._size, self._group.descriptor)
        choices = json.dumps(tuning.as_json(tuning.rows(self._group.transport, self._size)))
        descriptors = {MEMORY: self._group.descriptor}
        return {TRANSPORT: "shm", tuning.CHOICES: choices, **env}, descriptors

    def ended(self, rank: int, how: str, *, failed: bool) -> None:
        if failed:
            self._group.abort(f"{how}; {self._group.describe(rank)}", peer_lost=True, ranks=[rank])
        else:
            self._group.leave(rank)  # it may have ended without leaving (os._exit), or joining


class _Tcp(LaunchedGroup):
    """A group over TCP, on the loopback address; once the ranks have met, connections say who dies."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._secret = secrets.token_hex(32)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=min(size + 64, 1024))
        self._address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ended = Ended.create(size, self._address)

    def given_to(self, rank: int) -> tuple[dict[str, str], dict[str, int]]:
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
        self._ended.close()


def new_group(transport: str, size: int) -> LaunchedGroup:
    """Make a group of processes that are to be started, through "shm" or "tcp"."""
    return _Tcp(size) if transport == "tcp" else _SharedMemory(size)


def transport_of_processes(given: str | None) -> str:
    """Return the transport of processes on this host: a given one, the environment's, or "shm".

    Raises
    ------
    ValueError
        If the environment, or the caller, names a transport that is not one of processes.
    """
    wanted = given or forced(os.environ) or "shm"
    if wanted not in ("shm", "tcp"):
        source = f"transport={given!r}" if given else f"{TRANSPORT}={wanted}"
        raise ValueError(
            f"{source}, and processes talk through 'shm' or 'tcp': choose one of these, or make "
            "threads (pycollective.local_group)"
        )
    return wanted


def prepare_environment(
    environ: MutableMapping[str, str], size: int, variables: Mapping[str, str]
) -> None:
    """Turn the launcher's environment into the one of a rank."""
    for name in _OF_ANOTHER_GROUP:
        environ.pop(name, None)
    for name in _THREAD_VARIABLES:  # the user's own setting wins
        environ.setdefault(name, str(threads_of_rank(size)))
    environ.update(variables)


def threads_of_rank(size: int) -> int:
    """Return a rank's share of the cores, which is the number of its threads."""
    return max(1, _core.usable_cores() // size)


def run(
    command: Sequence[str],
    size: int,
    prefix: str = "auto",
    transport: str = "shm",
    bind: str = "cores",
) -> int:
    """Run ``size`` processes of a command as the ranks of one group; return the exit status.

    Each rank is the leader of a session of its own. Signals come to the launcher, which passes them on;
    stopped (Ctrl-Z) and continued are the ranks with it. When a rank fails, the group is told (the
    others' calls raise `PeerLostError`), and what does not end is ended, as is what ranks have left
    behind. A guardian does that when the launcher itself is killed.

    Parameters
    ----------
    command : sequence of str
        What each rank runs.
    size : int
        Number of ranks.
    prefix : {"auto", "always", "never"}
        Whether each line of output begins with its rank; auto: on a terminal.
    transport : {"shm", "tcp"}
        What the ranks talk through.
    bind : {"cores", "none"}
        Whether each rank has an equal share of the cores to itself, if there is one for each rank.

    Returns
    -------
    int
        The status of the rank that failed first, 128 + n if signal n killed it, else 0.

    Raises
    ------
    OSError
        If the command cannot be started.
    """
    group = new_group(transport, size)
    if "TF_CONFIG" in os.environ:
        _say("the ranks do not see TF_CONFIG, which describes another group than theirs")
    shares = cores.shares(size) if bind == "cores" else []
    received: list[int] = []
    output = Output((sys.stdout, sys.stderr), prefix)
    guardian = Guardian()
    ranks = Ranks(guardian)
    before = {
        s: signal.signal(s, lambda number, _frame: received.append(number)) for s in _FORWARDED
    }
    try:
        for rank in range(size):
            variables, descriptors = group.given_to(rank)
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
                    start_new_session=True,  # Ctrl-C reaches the ranks once: from us
                )
            ranks.add(process)
            assert process.stdout is not None and process.stderr is not None
            output.add(rank, (process.stdout, process.stderr))
        group.started()
        output.start()
        return _watch(group, ranks, received)
    finally:
        group.started()
        ranks.kill()
        output.finish()
        guardian.close()
        group.close()
        for number, handler in before.items():
            signal.signal(number, handler)


class Process(Protocol):
    """A process of this one's, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its number, which is also the number of the process group that it leads, or will lead."""

    def poll(self) -> int | None:
        """Return the exit code, -n after signal n; None while it runs."""

    def wait(self) -> int:
        """Wait for its end."""


class Ranks:
    """The processes of the ranks, and the process groups that they lead."""

    def __init__(self, guardian: Guardian) -> None:
        self._guardian = guardian
        self.processes: list[Process] = []
        self.running: set[int] = set()
        self._left: dict[int, float] = {}  # groups without their leader, and since when
        self._next_blow = 0.0  # when what still runs is next asked to end, 0: never
        self._blows = [signal.SIGTERM, signal.SIGKILL]

    def add(self, process: Process) -> None:
        """Add the process of the next rank."""
        self._guardian.started(process.pid)
        self.running.add(len(self.processes))
        self.processes.append(process)

    def signal(self, number: int) -> None:
        """Send a signal to what every rank and its children run."""
        for rank in self.running:
            pid = self.processes[rank].pid
            # Children may not expect the first two. A process that has just started leads no group.
            alone = number in (signal.SIGUSR1, signal.SIGUSR2)
            if alone or not _signal_group(pid, number):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def end_soon(self) -> None:
        """Let the running ranks end by themselves for a while, after which `end_if_due` ends them."""
        self._next_blow = self._next_blow or time.monotonic() + GRACE

    def end_if_due(self) -> Signals | None:
        """Return the signal that was sent to the ranks that should have ended by now, if any."""
        if not self._next_blow or time.monotonic() <= self._next_blow:
            return None
        if not (self.running and self._blows):
            return None
        blow = self._blows.pop(0)
        self.signal(blow)
        self._next_blow = time.monotonic() + GRACE
        return blow

    def ended(self) -> list[tuple[int, int]]:
        """Return the ranks that have ended since the last look, with their exit codes."""
        found = []
        for rank in sorted(self.running):
            code = self.processes[rank].poll()
            if code is not None:
                self.running.discard(rank)
                self._left[self.processes[rank].pid] = time.monotonic()
                found.append((rank, code))
        return found

    def left_behind(self) -> bool:
        """Return True if children of ended ranks still run; end them after a while."""
        for pid, since in list(self._left.items()):
            age = time.monotonic() - since
            number = 0 if age < _LEFT_BEHIND else signal.SIGTERM
            if age > 3 * _LEFT_BEHIND:
                number = signal.SIGKILL
            # Without an init process (in a container) nobody reaps zombies: their group never vanishes.
            if not _signal_group(pid, number) or number == signal.SIGKILL:
                del self._left[pid]
                self._guardian.ended(pid)
        return bool(self._left)

    def kill(self) -> None:
        """End all that runs."""
        self.signal(signal.SIGKILL)
        for rank in self.running:
            self.processes[rank].wait()
        for pid in self._left:
            _signal_group(pid, signal.SIGKILL)


def _signal_group(pid: int, number: int) -> bool:
    """Send a signal to a process group; return whether there is one."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # a program that runs as somebody else
        pass
    return True


def _watch(group: LaunchedGroup, ranks: Ranks, received: list[int]) -> int:
    """Wait for all processes; tell the group of the first that fails, and end the others."""
    status = 0
    after: list[str] = []
    interrupts = 0
    while ranks.running or ranks.left_behind():
        while received:
            number = received.pop(0)
            interrupts += number == signal.SIGINT
            if interrupts >= 3:
                _say("interrupted three times: killing what still runs")
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
                who = f"rank {rank} (process {ranks.processes[rank].pid})"
                group.ended(rank, f"{who} {how}", failed=code != 0)
            if not code:
                continue
            if not status:
                status = code if code > 0 else 128 - code
                ranks.end_soon()
                _say(f"rank {rank} {how}")
            else:
                after.append(f"rank {rank} {how}")
        if blow := ranks.end_if_due():
            _say(f"{blow.name} to what still runs: {_listed(ranks.running)}")
        time.sleep(0.01)
    if after:
        _say(f"then {', '.join(after)}")
    return status


def _listed(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"pycollective run: {text}", file=sys.stderr, flush=True)


def how_it_ended(code: int) -> str:
    """Return words for an exit code, such as "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
