"""Faults of a trial, and the errors that the ranks must then report.

To add a fault, write a function that makes it happen (`strike`) and add a `Fault` to the table.
`strike` runs on the victim, before the step `Trial.moment`. Its argument is the `worker.Rank`.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from calls import CALLS, INTEGERS, Step, ops

PROCESSES = ("run-shm", "run-tcp", "address-shm", "address-tcp", "mixed")
RENDEZVOUS = ("run-tcp", "address-shm", "address-tcp", "mixed")
EVERYWHERE = ("threads", *PROCESSES)


class LeftError(Exception):
    """Ends the victim in the way of the trial's variant."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault, and the verdict's expectations."""

    strike: Callable[[Any], None]
    others: tuple[str, ...] = ()
    """Classes of errors that the other ranks may get; without any, all their calls succeed."""
    certain: bool = True
    """Each of the other ranks must get an error of `others`."""
    own: tuple[str, ...] = ()
    """Classes of errors that the victim itself may get."""
    link: bool = False
    """The fault hits a connection: each of its ends takes the other for lost."""
    all_die: bool = False
    """All processes end without saying so."""
    dies: bool = False
    """The victim's process ends without saying so."""
    may_die: bool = False
    """The victim's process may end without saying so, but not by a crash."""
    waits: bool = False
    """The fault comes after a delay, which begins at the call of `Trial.moment`. The victim waits for
    the fault before the last barrier."""
    soft: bool = False
    """All ranks may refuse `split` and `empty`; the group then still works."""
    in_rendezvous: bool = False
    """The fault hits the victim before it joins the group."""
    within_group: bool = False
    """The fault concerns the group of its step alone."""
    setups: tuple[str, ...] = EVERYWHERE
    variants: tuple[str, ...] = ("",)
    variants_of: Callable[[Step], tuple[str, ...]] | None = None
    """The variants that are possible in a step."""
    timeout: float = 5.0
    stopped: tuple[float, float] = (0.02, 0.1)
    """The range of `Trial.seconds`, as a share of the timeout."""
    large: bool = False
    """Most calls are all-reduces, and most arrays large, so that the fault hits a running call."""
    shared: bool = False
    """Most calls have arrays of `Communicator.empty`."""
    repeats: bool = False
    """The call of `Trial.moment` is often repeated, so that the fault hits a running call."""
    needs_blocking: bool = False
    in_main_thread: bool = False
    """Among threads the victim is rank 0, which is the main thread."""


def _nothing(rank: Any) -> None:
    pass


def _kill(rank: Any) -> None:
    variant, delay = rank.trial.variant, rank.trial.delay
    if variant.startswith("SIG"):
        rank.signal_after(delay, signal.Signals[variant])
        return
    code = int(variant.split()[1])
    timer = threading.Timer(delay, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _stop(rank: Any) -> None:
    rank.say(stops=True)
    rank.signal_after(rank.trial.delay, signal.SIGSTOP)


def _interrupt(rank: Any) -> None:
    rank.signal_after(rank.trial.delay, signal.SIGINT)


def _leave(rank: Any) -> None:
    raise LeftError


def _abort(rank: Any) -> None:
    def abort() -> None:
        time.sleep(rank.trial.delay)
        rank.abort("ends the group on purpose")
        rank.struck = True

    threading.Thread(target=abort).start()


def _drop(rank: Any) -> None:
    if rank.trial.variant == "drop":
        rank.forget()
    else:
        rank.close()
    raise LeftError


def _kill_launcher(rank: Any) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def _signals(rank: Any) -> None:
    """Interrupt the victim's system calls all the time; the handler does nothing."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0005)
        rank.lift = lambda: signal.setitimer(signal.ITIMER_REAL, 0)


def _bad_argument(rank: Any) -> None:
    """Make a call that raises because of its arguments; the other ranks must not notice."""
    comm = rank.groups[rank.step.group]
    x, before = np.ones(5, "float32"), comm.timeout
    calls: dict[str, Callable[[], Any]] = {
        "op": lambda: comm.all_reduce(x, "no such op"),
        "op of dtype": lambda: comm.all_reduce(x, "xor"),
        "algorithm": lambda: comm.all_reduce(x, algorithm="no such algorithm"),
        "root": lambda: comm.broadcast(x, comm.size),
        "objects": lambda: comm.all_gather(np.array([None, 1])),
        "timeout": lambda: comm.all_reduce(x, timeout=-1.0),
        "timeout of the communicator": lambda: comm.all_reduce(x),
        "out": lambda: comm.all_reduce(x, out=np.ones(6, "float32")),
        "rank": lambda: comm.send(x, -1),
        "tag": lambda: comm.send(x, 0, 2**31),
    }
    try:
        if rank.trial.variant == "timeout of the communicator":
            comm.timeout = None
        calls[rank.trial.variant]()
        rank.say(wrong=f"the bad argument {rank.trial.variant!r} was accepted")
    except (TypeError, ValueError, LookupError):
        pass
    finally:
        comm.timeout = before


def _sleep(rank: Any) -> None:
    time.sleep(rank.trial.seconds)


def _descriptor(rank: Any) -> None:
    """Break one of the library's own descriptors at the planned time."""
    number, found = rank.trial.seed, rank.own_descriptors()

    def strike() -> None:
        time.sleep(rank.trial.delay)
        if found:
            descriptor = found[number % len(found)]
            rank.say(breaks=os.readlink(f"/proc/self/fd/{descriptor}"), number=descriptor)
            _break(descriptor, rank.trial.variant)
        rank.struck = True

    threading.Thread(target=strike).start()


def _break(descriptor: int, how: str) -> None:
    if how == "close":
        # No other file may get this number: the library would write to that file.
        with socket.socket(socket.AF_UNIX) as unconnected:
            os.dup2(unconnected.fileno(), descriptor, inheritable=False)
        return
    copy = os.dup(descriptor)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # a descriptor of shared memory
        os.close(copy)
        return
    with sock, contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _no_descriptors(rank: Any) -> None:
    spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 64, before[1]))
    held = [spare]
    try:
        while True:
            held.append(os.dup(spare))
    except OSError:
        pass
    for _ in range(int(rank.trial.variant)):
        os.close(held.pop())

    def lift() -> None:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    rank.lift = lift


def _no_memory(rank: Any) -> None:
    # The limit counts the stack, and a stack that cannot grow ends the process: let it grow first.
    compile("[" * 150 + "]" * 150, "deep", "eval")
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    more = int(rank.trial.variant.split()[0]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (size + more, before[1]))
    rank.lift = lambda: resource.setrlimit(resource.RLIMIT_AS, before)


def _fork(rank: Any) -> None:
    for _ in range(rank.trial.ranks):
        child = os.fork()
        if child == 0:
            rank.be_a_child()
        rank.children.append(child)


def _mismatch(rank: Any) -> None:
    rank.step = mismatched(rank.step, rank.trial.variant)


def mismatch_variants(step: Step) -> tuple[str, ...]:
    """Return the ways in which a call can differ."""
    call = CALLS[step.call]
    # Messages are independent of collectives, so no call of another rank mismatches.
    found = [] if call.pair else ["collective"]
    if step.call != "barrier":
        found.append("dtype")
        if not call.ragged:
            found.append("size")
    if call.reduces:
        found.append("op")
    if call.rooted:
        found.append("root")
    return tuple(found)


def mismatched(step: Step, variant: str) -> Step:
    """Return the call that the victim makes instead of the call of the others."""
    choose = random.Random(step.salt)
    if variant == "collective":
        names = [c for c in CALLS if CALLS[c].collective != CALLS[step.call].collective]
        names = [c for c in names if not CALLS[c].reduces and not CALLS[c].pair]
        return replace(step, call=choose.choice(names), algorithm="auto", op="sum", in_place=False)
    if variant == "dtype":
        # Both calls must support the op.
        kinds = [d for d in (*INTEGERS, "float32", "float64") if step.op in ops(d)]
        return replace(step, dtype=choose.choice([d for d in kinds if d != step.dtype]))
    if variant == "size":
        return replace(step, rows=step.rows + 1)
    if variant == "op":
        return replace(step, op=choose.choice([o for o in ops(step.dtype) if o != step.op]))
    return replace(step, root=step.root + 1)


_LOST = ("PeerLostError",)
_ANY = ("CollectiveError", "KeyboardInterrupt", "MemoryError", "OSError")

FAULTS: dict[str, Fault] = {
    "none": Fault(_nothing),
    "delay": Fault(_sleep),
    "come late": Fault(_sleep, in_rendezvous=True, setups=PROCESSES),
    "kill": Fault(
        _kill, _LOST, dies=True, waits=True, repeats=True, setups=PROCESSES,
        variants=("SIGKILL", "SIGKILL", "SIGTERM", "exit 0", "exit 3"),
    ),
    # The end of a process aborts the calls that are under way.
    "leave": Fault(_leave, (*_LOST, "AbortedError"), variants=("return", "sys.exit", "raise")),
    "close": Fault(_drop, (*_LOST, "AbortedError"), variants=("close", "close", "drop")),
    "kill the launcher": Fault(
        _kill_launcher, all_die=True, setups=("run-shm", "run-tcp"), variants=("SIGKILL",)
    ),
    "signals": Fault(_signals, in_main_thread=True),
    "bad argument": Fault(
        _bad_argument,
        variants=("op", "op of dtype", "algorithm", "root", "objects", "timeout", "out", "rank",
                  "tag", "timeout of the communicator"),
    ),
    "abort": Fault(_abort, ("AbortedError",), own=("AbortedError",), waits=True, repeats=True),
    "stop briefly": Fault(_stop, large=True, repeats=True, waits=True),
    "stop": Fault(
        _stop, ("CollectiveTimeoutError",), own=_ANY, waits=True, large=True, shared=True,
        repeats=True, setups=PROCESSES, timeout=1.0, stopped=(2.0, 2.6),
    ),
    "interrupt": Fault(
        _interrupt, ("AbortedError", "PeerLostError"), own=_ANY, waits=True, repeats=True,
        in_main_thread=True, variants=("abort", "leave", "close"),
    ),
    "descriptor": Fault(
        _descriptor, _LOST, certain=False, own=_ANY, waits=True, soft=True, link=True,
        setups=PROCESSES, variants=("close", "shutdown"),
    ),
    "no descriptors": Fault(
        _no_descriptors, soft=True, timeout=3.0, variants=("0", "0", "1", "2", "4"),
    ),
    "no memory": Fault(
        # A thread that cannot start raises a RuntimeError.
        _no_memory, ("AbortedError", "PeerLostError"), certain=False, soft=True,
        own=(*_ANY, "RuntimeError"),
        may_die=True, large=True, variants=("0 MiB", "1 MiB", "4 MiB", "16 MiB"), setups=PROCESSES,
    ),
    "fork": Fault(_fork, variants=("drop", "exit", "keep", "use"), repeats=True, shared=True),
    "mismatch": Fault(
        _mismatch, ("MismatchError",), own=("MismatchError",), within_group=True,
        needs_blocking=True, variants_of=mismatch_variants,
    ),
    "absent": Fault(
        _leave, ("RendezvousError", "PeerLostError"), in_rendezvous=True, setups=RENDEZVOUS,
        variants=("return", "raise"),
    ),
    # The stop may come just after the group is made: then the first call names the rank.
    "stop in the rendezvous": Fault(
        _stop, ("RendezvousError", "CollectiveTimeoutError"), own=_ANY, in_rendezvous=True,
        setups=RENDEZVOUS, certain=False, waits=True, stopped=(0.01, 2.0),
    ),
    "kill in the rendezvous": Fault(
        _kill, ("RendezvousError", "PeerLostError"), in_rendezvous=True, dies=True, waits=True,
        setups=RENDEZVOUS, variants=("SIGKILL",),
    ),
}  # fmt: skip
