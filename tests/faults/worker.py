"""One rank of a trial: it makes the calls of the plan and reports each result.

Run as a script, it is a rank of `pycollective run`: ``worker.py FOLDER``, where FOLDER has the plan.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from calls import CALLS, Place, Step
from faults import FAULTS, LeftError
from plan import Trial

import pycollective as pc

_SENTINEL = 0xA5
_JOIN_SECONDS = 30.0
_JOIN_IN_VAIN_SECONDS = 4.0
"""Seconds of a rendezvous that the victim never joins."""
_SETTLE_SECONDS = 5.0


class Report:
    """File of a rank's reports, one line of JSON each. It is opened before any fault."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(
            folder / f"{rank}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )

    def say(self, **what: Any) -> None:
        os.write(self._file, (json.dumps(what) + "\n").encode())


class _Sigevent(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int),
                ("padding", ctypes.c_char * 48)]  # fmt: skip


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2)]


_libc = ctypes.CDLL(None, use_errno=True)


def signal_after(seconds: float, number: int) -> None:
    """Let the kernel send this process a signal, even during a call that keeps the GIL."""
    timer = ctypes.c_void_p()
    event = _Sigevent(signo=number, notify=0)
    if _libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "timer_create")
    nanoseconds = max(1, int(seconds * 1e9))
    when = _Itimerspec(value=(nanoseconds // 10**9, nanoseconds % 10**9))
    if _libc.timer_settime(timer, 0, ctypes.byref(when), None):
        raise OSError(ctypes.get_errno(), "timer_settime")


def held() -> dict[str, int]:
    """Return the numbers of this process's descriptors by kind, threads by name, and mapped groups."""
    gc.collect()
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kind = os.readlink(f"/proc/self/fd/{name}").partition(":[")[0]
            if "/proc/" not in kind and not kind.endswith(".said"):
                found[kind] = found.get(kind, 0) + 1
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            kind = "thread " + Path(f"/proc/self/task/{task}/comm").read_text().strip()
            found[kind] = found.get(kind, 0) + 1
    maps = Path("/proc/self/maps").read_text().count("memfd:pycollective")
    return found | {"mapped groups": maps}


def grown(before: Mapping[str, int]) -> dict[str, int]:
    """Return the resources that have grown since ``before``; wait a few seconds for them to shrink."""
    until = time.monotonic() + _SETTLE_SECONDS
    while True:
        more = {k: n - before.get(k, 0) for k, n in held().items() if n > before.get(k, 0)}
        if not more or time.monotonic() > until:
            return more
        time.sleep(0.01)


class Rank:
    """A rank of the trial in its loop of calls."""

    def __init__(self, trial: Trial, rank: int, folder: Path) -> None:
        self.trial, self.rank = trial, rank
        self.fault = FAULTS[trial.fault]
        self.is_victim = rank == trial.victim
        self.report = Report(folder, rank)
        self.say = self.report.say
        self.signal_after = signal_after
        self.groups: dict[str, Any] = {}
        self.step: Step = trial.steps[0]
        self.struck = False
        self._due = False
        self.lift: Callable[[], None] = lambda: None
        """A function that ends the effect of the fault on the process; the fault sets it."""
        self.children: list[int] = []
        self._folder = folder
        self._pid = os.getpid()
        self._arrays: dict[Any, np.ndarray] = {}
        self._contents: dict[Any, np.ndarray] = {}
        self._results: list[np.ndarray] = []
        self._watched: list[np.ndarray] = []
        self._pending: list[tuple[int, int, Step, Any, Any]] = []
        self._in_doubt: tuple[int, ...] = ()
        """The arrays of an asynchronous call whose work this rank does not have yet."""
        # Among threads, a rank that has begun may have taken all descriptors already.
        self._before = held()
        self._descriptors_before = {int(name) for name in os.listdir("/proc/self/fd")}

    # Methods for faults ------------------------------------------------------------------------

    def number(self, group: str) -> int:
        """Return this rank's number in a group."""
        return self.trial.members(self.rank, group).index(self.rank)

    def abort(self, reason: str) -> None:
        """Abort all groups with the reason, which names this rank."""
        for name, comm in list(self.groups.items()):
            comm.abort(f"rank {self.number(name)} {reason}")

    def close(self) -> None:
        for name in sorted(self.groups):  # the part, then the world
            comm = self.groups.pop(name)
            try:
                comm.close()
            except BaseException as error:
                self._say_error(error, name, "close")

    def own_descriptors(self) -> list[int]:
        """Return the descriptors that the library has made."""
        names = {int(name) for name in os.listdir("/proc/self/fd")}
        found = []
        for number in sorted(names - self._descriptors_before):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").startswith(("socket:", "/memfd:")):
                    found.append(number)
        return found

    def be_a_child(self) -> None:
        """Run the variant of a forked child, and end the process."""
        try:
            variant = self.trial.variant
            if variant == "use":
                for comm in self.groups.values():
                    try:
                        comm.barrier()
                        self.say(wrong="a forked child was let into a barrier")
                    except pc.CollectiveError:
                        pass
            elif variant == "keep":
                time.sleep(self.trial.seconds)
            self.forget()
            gc.collect()
            if variant == "exit":
                import atexit

                atexit._run_exitfuncs()
        finally:
            os._exit(0)

    # The loop ----------------------------------------------------------------------------------

    def run(self, join: Callable[[], Any]) -> bool:
        """Make all calls; return True if the rank has not left early."""
        self.say(pid=self._pid)
        try:
            self._calls(join)
        except LeftError:
            self.say(left=True)
            return False
        self._lift()
        self.say(done=True)
        return True

    def _calls(self, join: Callable[[], Any]) -> None:
        name = "rendezvous"
        try:
            if self.is_victim and self.fault.in_rendezvous:
                self.fault.strike(self)
            self.groups["world"] = join()
            name = "world"
            for i, step in enumerate(self.trial.steps):
                if i == self.trial.split_at:
                    name = "world"
                    self._flush(name)
                    self._split()
                self.step, name = step, step.group
                time.sleep(step.pauses[self.rank] if step.pauses else 0.0)
                self._due = (
                    self.is_victim and i == self.trial.moment and not self.fault.in_rendezvous
                )
                if not self.fault.waits:
                    self._strike()
                self._check_contents()
                if step.group in self.groups:
                    self._make(i)
                self._strike()
            self._flush(name)
            name = "world"
            self._wait_for_the_fault()
            self._last_barrier()
            self._check_contents()
        except LeftError:
            raise
        except BaseException as error:
            self._failed(error, name)

    def _strike(self) -> None:
        """Cause the fault, or start its timer, if its step has come."""
        if self._due:
            self._due = False
            self.fault.strike(self)

    def _lift(self) -> None:
        """End the fault's effect on the process."""
        lift, self.lift = self.lift, lambda: None
        lift()

    def _failed(self, error: BaseException, name: str) -> None:
        self._lift()
        self._say_error(error, name, self.step.call)
        # Running calls still use the arrays.
        for *_, work, _x in self._pending:
            with contextlib.suppress(BaseException):
                work.wait()
        self._pending.clear()
        self._overwrite()
        if self.is_victim:
            self._victim_failed(error)
        in_world = name != "part"
        if in_world or "world" not in self.groups:
            return
        try:
            self._wait_for_the_fault()
            self._last_barrier()
        except LeftError:
            raise
        except BaseException as second:
            self._say_error(second, "world", "barrier")
            if self.is_victim:
                self._victim_failed(second)

    def _victim_failed(self, error: BaseException) -> None:
        self.struck = True
        if not isinstance(error, pc.CollectiveError):
            if self.trial.variant == "leave":
                raise LeftError
            if self.trial.variant == "close":
                self.close()
                raise LeftError
            self.abort(f"has had an error: {type(error).__name__}")

    def _last_barrier(self) -> None:
        self.step = Step("barrier")
        self.groups["world"].barrier()

    def _wait_for_the_fault(self) -> None:
        """Wait until a fault with a timer has happened."""
        if not (self.is_victim and self.fault.waits):
            return
        self._lift()
        until = time.monotonic() + self.trial.delay + 1.0
        while not self.struck and time.monotonic() < until:
            time.sleep(0.002)
            if self.fault.strike.__name__ == "_stop":  # a process cannot see that it was stopped
                time.sleep(self.trial.delay + 0.005)
                return

    def _split(self) -> None:
        color = self.trial.colors[self.rank]
        self.step = Step("split")
        try:
            self.groups["part"] = self.groups["world"].split(color)
        except pc.CollectiveError as error:
            if not (self.fault.soft and type(error) is pc.CollectiveError):
                raise
            self.say(refused=str(error))

    def _make(self, number: int) -> None:
        """Make the call of the current step; check its result, now or later."""
        step, comm = self.step, self.groups[self.step.group]
        call, place = CALLS[step.call], Place(comm.rank, comm.size)
        try:
            x, out = self._prepare(step, place, comm, number)
        except MemoryError as error:
            if not self.fault.soft or "no shared array" not in str(error):
                raise
            self.say(refused=str(error))
            return
        how: dict[str, Any] = {"algorithm": step.algorithm}
        if step.later:
            how["async_op"] = True
        self._strike()
        if step.later:
            self._in_doubt = (id(x), id(out))
        found = call.run(comm, x, out, step, how)
        if step.later:
            self._pending.append((number + step.later, number, step, found, (x, place)))
            self._in_doubt = ()
        else:
            self._check(number, step, place, found, x)
        self._flush(step.group, number)
        self._keep_contents()

    def _flush(self, group: str, until: int = 1 << 30) -> None:
        """Wait for the works that must end by this step."""
        while self._pending and self._pending[0][0] <= until:
            _, number, step, work, (x, place) = self._pending[0]
            found = work.wait()
            self._pending.pop(0)
            self._check(number, step, place, found, x)

    def _prepare(
        self, step: Step, place: Place, comm: Any, number: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        call = CALLS[step.call]
        values = call.inputs(step, place)
        x = self._array("x", step, values, comm, number)
        x[...] = values
        out = None
        if step.in_place:
            out = x
        elif step.call == "all_reduce" and step.memory == "shared":
            out = self._array("out", step, values, comm, number)
            out.view(np.uint8)[...] = _SENTINEL
        return x, out

    def _keep_contents(self) -> None:
        """Record the arrays' contents after a call; they must not change until the next call."""
        self._contents = (
            {} if self._pending else {key: array.copy() for key, array in self._arrays.items()}
        )

    def _check_contents(self) -> None:
        for key, content in self._contents.items():
            if not np.array_equal(_bytes(self._arrays[key]), _bytes(content)):
                self.say(wrong=f"the array {key} was changed after the calls")

    def _array(self, role: str, step: Step, like: np.ndarray, comm: Any, number: int) -> np.ndarray:
        """Return an array of the step's kind; blocking calls of one kind reuse one array."""
        key = (role, step.group, step.memory, like.dtype, like.shape, number if step.later else -1)
        if key not in self._arrays:
            if step.memory == "shared" and CALLS[step.call].shared:
                made = comm.empty(like.shape, like.dtype)
            elif step.memory == "strided":
                made = np.empty((*like.shape, 2), like.dtype)[..., 0]
            else:
                made = np.empty(like.shape, like.dtype)
            self._arrays[key] = made
        return self._arrays[key]

    def _check(self, number: int, step: Step, place: Place, found: Any, x: np.ndarray) -> None:
        if self.trial.planted == "wrong number" and self.rank == 0 and number == 1:
            found = None
        if self.trial.fault == "mismatch" and number >= self.trial.moment:
            return  # until the ranks see the mismatch, the calls' results are undefined
        call = CALLS[step.call]
        wanted = call.result(step, place)
        problem = ""
        if not same(found, wanted):
            problem = f"gave {shown(found)}, not {shown(wanted)}"
        elif not step.in_place and not same(x, call.inputs(step, place)):
            problem = "changed its input"
        if problem:
            self.say(wrong=f"step {number}, {step}: {problem}")
        else:
            self.say(ok=number)
        results = found if isinstance(found, list) else [found]
        self._results = [*self._results, *(r for r in results if isinstance(r, np.ndarray))][-8:]

    # After an error ----------------------------------------------------------------------------

    def _say_error(self, error: BaseException, group: str, where: Any) -> None:
        if self.trial.planted == "wrong blame" and self.rank != self.trial.victim:
            error = pc.PeerLostError("somebody is lost")
        self.say(
            error=type(error).__name__,
            classes=[c.__name__ for c in type(error).__mro__],
            text=str(error),
            ranks=getattr(error, "ranks", None),
            group=group,
            where=str(where),
        )

    def _overwrite(self) -> None:
        """Overwrite the arrays: the failed calls must no longer write to them.

        Ctrl-C may come when an asynchronous call has begun and its work is not yet returned. The
        rank then cannot wait for that call, and the library keeps its arrays.
        """
        self._watched = [a for a in self._arrays.values() if a.size and id(a) not in self._in_doubt]
        for array in self._watched:
            _bytes(array)[...] = _SENTINEL

    def finish(self) -> None:
        """Wait until all ranks are done, then check for late writes and close the groups."""
        if self.rank == 0:
            _plant(self.trial.planted)
        if self.trial.closes_at_once:
            self.close()
        until = time.monotonic() + self.trial.bound
        while not (self._folder / "go").exists() and time.monotonic() < until:
            time.sleep(0.005)
        if self.trial.planted == "late write" and self._watched:
            _bytes(self._watched[0]).flat[0] = 0
        for array in self._watched:
            if (_bytes(array) != _SENTINEL).any():
                self.say(wrong=f"an array of {array.nbytes} bytes was written after the error")
        if self.trial.closes:
            self.close()
        for child in self.children:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(child, 0)[1]:
                    self.say(wrong="a forked child ended with an error")
        self.children.clear()

    def report_leaks(self, before: Mapping[str, int] | None = None) -> None:
        """Report the resources of the process that have grown."""
        closed = self.trial.closes or self.trial.closes_at_once
        more = grown(before or self._before) if closed else {}
        self.say(final=True, grown=more)

    def forget(self) -> None:
        """Drop all objects of the library that the rank still holds."""
        self._arrays.clear()
        self._contents.clear()
        self._results.clear()
        self._watched = []
        self._pending.clear()
        self.groups.clear()


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return (
            isinstance(found, list) and len(found) == len(wanted) and all(map(same, found, wanted))
        )
    if wanted is None or found is None:
        return found is wanted
    return (
        found.dtype == wanted.dtype
        and found.shape == wanted.shape
        and bool(np.array_equal(found, wanted))
    )


def shown(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)[:200]
    return f"{value.dtype}{list(value.shape)} {value.reshape(-1)[:8]}…"


def _plant(what: str) -> None:
    """Cause the planted fault, which the verdict must find."""
    if what == "hang":
        time.sleep(1000)
    elif what == "crash":
        os.abort()
    elif what == "file":
        Path("left behind").touch()
    elif what == "process":
        if os.fork() == 0:
            time.sleep(1000)
    elif what == "descriptor":
        os.dup(0)


def _bytes(array: np.ndarray) -> np.ndarray:
    """Return a view of an array's elements as bytes."""
    flat = array if array.ndim else array.reshape(1)
    return flat[..., None].view(np.uint8)


def environment(trial: Trial, rank: int, port: int) -> dict[str, str]:
    """Return the variables of a rank that finds the others by an address."""
    found = {
        "PYCOLLECTIVE_RANK": str(rank),
        "PYCOLLECTIVE_SIZE": str(trial.ranks),
        "PYCOLLECTIVE_ADDRESS": f"127.0.0.1:{port}",
        "PYCOLLECTIVE_SECRET": f"the secret of trial {trial.seed:020}",
    }
    if trial.setup == "address-tcp":
        found["PYCOLLECTIVE_TRANSPORT"] = "tcp"
    if trial.setup == "mixed":
        found["PYCOLLECTIVE_HOST_ID"] = "a" if 2 * rank < trial.ranks else "b"
    return found


def run_process(trial: Trial, rank: int, folder: Path) -> int:
    """Run one rank in this process; return its exit status."""
    _begin(folder, str(rank))
    worker = Rank(trial, rank, folder)

    in_vain = "RendezvousError" in worker.fault.others
    join_timeout = _JOIN_IN_VAIN_SECONDS if in_vain else _JOIN_SECONDS

    def join() -> Any:
        return pc.init(timeout=trial.timeout, join_timeout=join_timeout)

    if worker.run(join):
        worker.finish()
        if trial.closes or trial.closes_at_once:
            worker.forget()
        worker.report_leaks()
        return 0
    return _end_early(worker)


def _end_early(worker: Rank) -> int:
    if worker.trial.variant == "raise":
        raise ValueError("the victim raises")
    return 0


def run_threads(trial: Trial, folder: Path) -> int:
    """Run all ranks as threads of this process; rank 0 is the main thread."""
    _begin(folder, "all")
    before = held()
    comms: list[Any] = list(pc.local_group(trial.ranks, timeout=trial.timeout))
    workers = [Rank(trial, rank, folder) for rank in range(trial.ranks)]

    def one(rank: int) -> None:
        worker = workers[rank]

        def join() -> Any:
            comm, comms[rank] = comms[rank], None
            return comm

        if worker.run(join):
            worker.finish()
            return
        worker.forget()

    threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(1, trial.ranks)]
    for thread in threads:
        thread.start()
    one(0)
    for thread in threads:
        thread.join()
    for worker in workers:
        worker.forget()
    workers[0].report_leaks(before)
    return 0


def _begin(folder: Path, name: str) -> None:
    errors = os.open(folder / f"{name}.errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    os.close(errors)
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    faulthandler.register(signal.SIGUSR1)
    # A background job of a shell ignores Ctrl-C; the ranks must not.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def load(folder: Path) -> Trial:
    trial = pickle.loads((folder / "plan").read_bytes())
    assert isinstance(trial, Trial)
    return trial


if __name__ == "__main__":
    _folder = Path(sys.argv[1])
    sys.exit(run_process(load(_folder), int(os.environ["PYCOLLECTIVE_RANK"]), _folder))


__all__ = ["Rank", "environment", "load", "run_process", "run_threads"]
