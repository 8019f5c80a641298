"""Run one trial: start its processes, watch them, end what hangs, and find what is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import worker
from faults import FAULTS
from plan import Trial
from ports import free_port

_POLL_SECONDS = 0.004
_LEFT_SECONDS = 4.0
"""Time limit for processes that outlive the trial; longer than the watchdog's grace period."""
_LATE_ERROR_SECONDS = 20.0
"""Extra time for which a victim stays stopped while ranks have no error yet."""
_PR_SET_CHILD_SUBREAPER = 36


class BecomeError(BaseException):
    """Raised in a forked child, which leaves the runner's stack and then runs its role.

    So the child ends as every Python process does, and the runner's imports are made once.
    """

    def __init__(self, role: Callable[[], int]) -> None:
        super().__init__()
        self.role = role


@dataclass
class Result:
    """Result of a trial."""

    seconds: float = 0.0
    hung: bool = False
    """Processes had to be killed."""
    codes: dict[str, int] = field(default_factory=dict)
    """Exit codes of the processes that the runner has started."""
    said: list[list[dict[str, Any]]] = field(default_factory=list)
    """Reports of each rank."""
    errors: str = ""
    """Text that the processes wrote to stderr and stdout."""
    left: list[str] = field(default_factory=list)
    """Processes and files that the trial has left behind."""


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(trial: Trial, folder: Path) -> Result:
    """Run a trial in an empty folder; raise `BecomeError` in the processes that it starts."""
    began = time.monotonic()
    for name in ("tmp", "home"):
        (folder / name).mkdir()
    (folder / "plan").write_bytes(pickle.dumps(trial))
    shared_before = _in_shared_memory()
    watch = _Watch(trial, folder, _start(trial, folder))
    watch.until_all_have_ended()
    result = Result(hung=watch.hung, codes=watch.codes, said=watch.said)
    result.left = watch.end_orphans()
    result.left += [f"/dev/shm/{name}" for name in sorted(_in_shared_memory() - shared_before)]
    for name in ("tmp", "home"):
        result.left += [f"{name}/{path.name}" for path in (folder / name).iterdir()]
    result.errors = "".join(
        f"--- {path.name}\n{path.read_text(errors='replace')}"
        for path in sorted(folder.glob("*.errors"))
        if path.stat().st_size
    )
    result.seconds = time.monotonic() - began
    shutil.rmtree(folder, ignore_errors=True)
    return result


def _in_shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "pycollective" in name}


def _start(trial: Trial, folder: Path) -> dict[int, str]:
    """Start the processes of a trial; return the name of each."""
    if trial.setup == "threads":
        return {_fork(folder, {}, lambda: worker.run_threads(trial, folder)): "all"}
    if trial.setup.startswith("run-"):
        return {_fork(folder, {}, lambda: _launch(trial, folder)): "launcher"}
    port = free_port()

    def rank_of(rank: int) -> Callable[[], int]:
        return lambda: worker.run_process(trial, rank, folder)

    return {
        _fork(folder, worker.environment(trial, rank, port), rank_of(rank)): str(rank)
        for rank in range(trial.ranks)
    }


def _fork(folder: Path, variables: dict[str, str], role: Callable[[], int]) -> int:
    """Fork a process that leads a process group of its own."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.environ.update(variables)
        os.environ["TMPDIR"] = os.environ["HOME"] = str(folder / "tmp")
        os.chdir(folder / "home")
        raise BecomeError(role)
    return child


def _launch(trial: Trial, folder: Path) -> int:
    """Run `pycollective run` in this process."""
    from pycollective.cli import main

    worker._begin(folder, "launcher")
    transport = trial.setup.partition("-")[2]
    command = [sys.executable, str(Path(worker.__file__).resolve()), str(folder)]
    arguments = ["run", "--transport", transport, "-n", str(trial.ranks), "--prefix", "never"]
    status = main([*arguments, *command])
    return int(status or 0)


class _Watch:
    """Monitor of the processes of one trial."""

    def __init__(self, trial: Trial, folder: Path, processes: dict[int, str]) -> None:
        self._trial, self._folder, self._processes = trial, folder, processes
        self._running = set(processes)
        self._read = [0] * trial.ranks
        self._resume_at: dict[int, float] = {}
        self.codes: dict[str, int] = {}
        self.said: list[list[dict[str, Any]]] = [[] for _ in range(trial.ranks)]
        self.hung = False

    def until_all_have_ended(self) -> None:
        deadline = time.monotonic() + self._trial.bound
        while self._running:
            self._reap()
            self._listen()
            self._resume()
            if all(self._is_done(rank) for rank in range(self._trial.ranks)):
                (self._folder / "go").touch()
            if time.monotonic() > deadline:
                self._end_all()
                break
            time.sleep(_POLL_SECONDS)
        self._listen()

    def _reap(self) -> None:
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if child == 0:
                return
            if child in self._running:
                self._running.discard(child)
                self.codes[self._processes[child]] = os.waitstatus_to_exitcode(status)

    def _listen(self) -> None:
        for rank in range(self._trial.ranks):
            with contextlib.suppress(FileNotFoundError):
                with open(self._folder / f"{rank}.said") as file:
                    file.seek(self._read[rank])
                    text = file.read()
                whole = text[: text.rfind("\n") + 1]
                self._read[rank] += len(whole)
                self.said[rank] += [json.loads(line) for line in whole.splitlines()]

    def _is_done(self, rank: int) -> bool:
        said = self.said[rank]
        if any("done" in line or "left" in line for line in said):
            return True
        if self._trial.setup == "threads":
            return not self._running
        return not _is_alive(self._pid(rank)) if said else str(rank) in self.codes

    def _pid(self, rank: int) -> int:
        return int(self.said[rank][0]["pid"]) if self.said[rank] else 0

    def _resume(self) -> None:
        """Resume a stopped victim when its time is over and the other ranks have their errors.

        The victim must still be stopped when a slow rank enters its call with the victim.
        """
        if not any("stops" in line for line in self.said[self._trial.victim]):
            return
        pid = self._pid(self._trial.victim)
        if _state(pid) != "T":
            return
        when = self._resume_at.setdefault(pid, time.monotonic() + self._trial.seconds)
        late = time.monotonic() - when
        if late >= 0 and (self._all_have_errors() or late >= _LATE_ERROR_SECONDS):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _all_have_errors(self) -> bool:
        """Return True if each other rank has an error, or the fault need not give it one."""
        fault = FAULTS[self._trial.fault]
        if not (fault.others and fault.certain):
            return True
        others = [rank for rank in range(self._trial.ranks) if rank != self._trial.victim]
        return all(any("error" in line for line in self.said[rank]) for rank in others)

    def _end_all(self) -> None:
        """Make all running processes print their stacks, and kill them."""
        self.hung = True
        pids = {self._pid(rank) for rank in range(self._trial.ranks)} - {0}
        alive = {pid for pid in pids | self._running if _is_alive(pid)}
        for pid in alive:
            for number in (signal.SIGCONT, signal.SIGUSR1):
                with contextlib.suppress(ProcessLookupError):
                    if pid in pids:
                        os.kill(pid, number)
        time.sleep(0.5)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        while self._running:
            self._reap()
            time.sleep(_POLL_SECONDS)

    def end_orphans(self) -> list[str]:
        """Return the processes that have not ended with the trial, and end them."""
        until = time.monotonic() + _LEFT_SECONDS
        while True:
            self._reap()
            found = _children()
            if not found or time.monotonic() > until:
                break
            time.sleep(_POLL_SECONDS)
        names = [f"process {pid}: {_command(pid)}" for pid in found]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while _children():
            self._reap()
            time.sleep(_POLL_SECONDS)
        return names if not self.hung else []


def _children() -> list[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(word) for word in text.split()]


def _state(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def _is_alive(pid: int) -> bool:
    return _state(pid) not in ("", "Z", "X")


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""
