"""Start the processes of a group on this host, and watch over them."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from pycollective import _core
from pycollective.distribute.blas_threads import available_cores
from pycollective.rendezvous import (
    ADDRESS,
    LISTENER,
    MEMORY,
    RANK,
    SECRET,
    SIZE,
    TRANSPORT,
    launched_environment,
)

__all__ = ["run"]

GRACE = 5.0
"""Seconds that the other ranks have to end by themselves when one has failed, before SIGTERM and again
before SIGKILL."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _SharedMemory:
    """A group through shared memory: the launcher tells the others of a rank that dies."""

    def __init__(self, size: int) -> None:
        self._group = _core.ShmGroup.create(size)
        self._size = size

    def given_to(self, rank: int) -> tuple[dict[str, str], list[int]]:
        """Return the variables and the descriptors of a rank."""
        descriptor = self._group.descriptor
        env = launched_environment(rank, self._size, descriptor)
        return {TRANSPORT: "shm", **env}, [descriptor]

    def started(self) -> None:
        pass

    def ended(self, rank: int, lost: str) -> None:
        if lost:
            self._group.abort(lost, peer_lost=True)
        elif self._group.is_in(rank):
            self._group.leave(rank)  # it ended without leaving: os._exit


class _Tcp:
    """A group over TCP, on the loopback address; the connections say when a rank dies."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._secret = secrets.token_hex(32)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=min(size + 64, 1024))

    def given_to(self, rank: int) -> tuple[dict[str, str], list[int]]:
        env = {
            TRANSPORT: "tcp",
            RANK: str(rank),
            SIZE: str(self._size),
            ADDRESS: f"127.0.0.1:{self._listener.getsockname()[1]}",
            SECRET: self._secret,
        }
        if rank:
            return env, []
        return {**env, LISTENER: str(self._listener.fileno())}, [self._listener.fileno()]

    def started(self) -> None:
        self._listener.close()  # rank 0 has it now

    def ended(self, rank: int, lost: str) -> None:
        pass


def run(command: Sequence[str], size: int, prefix: bool, transport: str = "shm") -> int:
    """Run ``size`` processes of a command as the ranks of one group; return the exit status.

    Output comes through line by line, so that lines of different ranks do not mix; with ``prefix`` each
    begins with its rank. SIGINT, SIGTERM and SIGHUP are passed on. When a rank fails, the group is told
    (the others' calls raise `PeerLostError`), and what does not end is ended. The status is that of the
    rank that failed first, 128 + n for signal n, else 0.
    """
    group = _Tcp(size) if transport == "tcp" else _SharedMemory(size)
    threads = str(max(1, available_cores() // size))
    processes: list[subprocess.Popen[bytes]] = []
    copiers: list[threading.Thread] = []
    received: list[int] = []
    before = {
        s: signal.signal(s, lambda number, _frame: received.append(number)) for s in _FORWARDED
    }
    try:
        for rank in range(size):
            env = {name: threads for name in _THREAD_VARIABLES}  # the user's own setting wins
            env |= {"PYTHONUNBUFFERED": "1", **os.environ}
            for name in (MEMORY, ADDRESS, LISTENER):  # of a group that this launcher is in itself
                env.pop(name, None)
            variables, descriptors = group.given_to(rank)
            env |= variables
            process = subprocess.Popen(
                command,
                env=env,
                pass_fds=descriptors,
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the ranks once: from us
            )
            processes.append(process)
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                copiers.append(_copy_lines(source, target, f"[{rank}] " if prefix else ""))
        group.started()
        return _watch(group, processes, received)
    finally:
        group.started()
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for copier in copiers:
            copier.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    group: _SharedMemory | _Tcp,
    processes: Sequence[subprocess.Popen[bytes]],
    received: list[int],
) -> int:
    """Wait for all processes; tell the group of the first that fails, and end the others."""
    running = set(range(len(processes)))
    status = 0
    ending = 0.0  # when we last asked the others to end, 0: not yet
    asked = 0
    while running:
        while received:
            for rank in running:
                processes[rank].send_signal(received[0])
            received.pop(0)
        for rank in sorted(running):
            code = processes[rank].poll()
            if code is None:
                continue
            running.discard(rank)
            if not code:
                group.ended(rank, "")
            if code and not status:
                how = _how_it_ended(code)
                group.ended(rank, f"rank {rank} (process {processes[rank].pid}) {how}")
                print(f"pycollective run: rank {rank} {how}", file=sys.stderr, flush=True)
                status = code if code > 0 else 128 - code
                ending = time.monotonic()
        if ending and running and time.monotonic() - ending > GRACE:
            asked += 1
            ending = time.monotonic()
            for rank in running:
                processes[rank].send_signal(signal.SIGTERM if asked == 1 else signal.SIGKILL)
        time.sleep(0.01)
    return status


def _how_it_ended(code: int) -> str:
    if code > 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


_output = threading.Lock()


def _copy_lines(source: IO[bytes] | None, target: Any, prefix: str) -> threading.Thread:
    def copy() -> None:
        assert source is not None
        raw = getattr(target, "buffer", None)
        for line in source:
            whole = prefix.encode() + line
            with _output:
                if raw is not None:
                    raw.write(whole if whole.endswith(b"\n") else whole + b"\n")
                    raw.flush()
                else:
                    target.write(whole.decode(errors="replace"))
        source.close()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread
