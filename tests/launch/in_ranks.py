"""Helpers of the scripts that these tests run on ranks; the scripts import all names."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np

import pycollective as pc

__all__ = [
    "CALLS", "Path", "at_most", "connections", "contextlib", "gc", "grown", "held", "in_words",
    "is_stopped", "np", "os", "pc", "refuse", "rendezvous", "resource", "resume_after", "signal",
    "socket", "sys", "threading", "time", "until_error", "wait_for", "wait_for_processes",
    "without_descriptors", "without_memory",
]  # fmt: skip

# The process may be a background job of a shell, which ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def rendezvous(number, rank=None, size=None, **how):
    """Make a further group, at the address with the given number."""
    excluded = ("PYCOLLECTIVE_MEMORY_FD", "PYCOLLECTIVE_LISTEN_FD", "PYCOLLECTIVE_TRANSPORT")
    env = {name: value for name, value in os.environ.items() if name not in excluded}
    if os.environ.get("PYCOLLECTIVE_TRANSPORT") == "tcp":
        env["PYCOLLECTIVE_TRANSPORT"] = "tcp"
    env["PYCOLLECTIVE_ADDRESS"] = os.environ["ADDRESSES"].split()[number]
    if rank is not None:
        env |= {"PYCOLLECTIVE_RANK": str(rank), "PYCOLLECTIVE_SIZE": str(size)}
    return pc.init(**{"timeout": 20, "environment": env, **how})


def wait_for_processes(number):
    """Wait until this many processes have started: their imports may take seconds."""
    Path(f"started {os.getpid()}").touch()
    assert wait_for(lambda: len(list(Path.cwd().glob("started *"))) >= number)


def in_words(error):
    return " ".join(f"{type(error).__name__} {error}".split())


def until_error(call):
    """Call again and again; return the error's name and text."""
    try:
        while True:
            call()
    except (pc.CollectiveError, KeyboardInterrupt, MemoryError) as error:
        return in_words(error)


def wait_for(condition, seconds=20.0):
    """Return True if the condition becomes true within the time limit."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def held():
    """Return counts of this process's descriptors, threads and memories, and of files in /dev/shm.

    A memory with several mappings counts once: a rank that takes an array away from a stopped peer
    splits its mapping.
    """
    gc.collect()
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len({inode for _, _, _, _, inode, *name in mapped if "/memfd:pycollective" in name}),
        sum("pycollective" in name for name in os.listdir("/dev/shm")),
    )


def grown(before):
    """Return (now, before) of each count of `held` that stays higher for 5 s; "" if none does."""

    def more():
        return [(now, then) for now, then in zip(held(), before, strict=True) if now > then]

    wait_for(lambda: not more(), 5.0)  # threads end a moment later
    return more() or ""


def connections():
    """Return the connected sockets of this process, by descriptor."""
    found = {}
    # Sockets are selected before the first `dup`, whose number may be that of the closed folder.
    names = [n for n in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{n}").is_socket()]
    for name in names:
        sock = socket.socket(fileno=os.dup(int(name)))
        try:
            sock.getpeername()
            found[int(name)] = sock
        except OSError:
            sock.close()
    return found


def is_stopped(pid):
    """Return True if SIGSTOP has stopped a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def resume_after(pid, call):
    """Resume, after `call`, a process that stops itself; return the call's result."""
    result = call()
    wait_for(lambda: is_stopped(pid))
    os.kill(pid, signal.SIGCONT)
    return result


class at_most:
    """Context manager that lowers a limit of this process: RLIMIT_NOFILE or RLIMIT_AS."""

    def __init__(self, which, most):
        self._which, self._most = which, most

    def __enter__(self):
        self._before = resource.getrlimit(self._which)
        resource.setrlimit(self._which, (self._most, self._before[1]))

    def __exit__(self, *_):
        resource.setrlimit(self._which, self._before)


class without_memory(at_most):
    """Context manager that leaves 1 MB: the script's own objects need some of it."""

    def __init__(self):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        super().__init__(resource.RLIMIT_AS, pages * resource.getpagesize())

    def __enter__(self):
        super().__enter__()
        self._hoard = []
        try:
            while True:
                self._hoard.append(bytearray(100_000))
        except MemoryError:
            del self._hoard[-10:]

    def __exit__(self, *_):
        self._hoard = None
        super().__exit__()


class without_descriptors(at_most):
    """Context manager that leaves `left` free descriptors."""

    def __init__(self, left=0):
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        super().__init__(resource.RLIMIT_NOFILE, 64 + self._spare)
        self._left = left

    def __enter__(self):
        super().__enter__()
        self._hoard = [self._spare]
        try:
            while True:
                self._hoard.append(os.dup(self._spare))
        except OSError:
            pass
        for _ in range(self._left):
            os.close(self._hoard.pop())

    def __exit__(self, *_):
        for descriptor in self._hoard:
            os.close(descriptor)
        super().__exit__()


class _Filter(ctypes.Structure):
    """An instruction of a program that the kernel runs on each system call."""

    _fields_ = (
        ("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("filters", ctypes.POINTER(_Filter)))


SYSTEM_CALLS = {
    "x86_64": {"membarrier": 324, "process_vm_readv": 310},
    "aarch64": {"membarrier": 283, "process_vm_readv": 270},
}


def refuse(name, heard=None):
    """Refuse this thread a system call forever, as containers may.

    With a list, the call is neither refused nor made: the list records it.
    """
    number = SYSTEM_CALLS[platform.machine()][name]
    if heard is not None:
        signal.signal(signal.SIGSYS, lambda *_: heard.append(time.monotonic()))
    refused = 0x00050001 if heard is None else 0x00030000  # EPERM, or SIGSYS
    filters = (_Filter * 4)(
        _Filter(0x20, 0, 0, 0),  # load the call's number
        _Filter(0x15, 0, 1, number),
        _Filter(0x06, 0, 0, refused),
        _Filter(0x06, 0, 0, 0x7FFF0000),  # allow
    )
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    program = _Program(4, filters)
    done = libc.prctl(22, 2, ctypes.byref(program), 0, 0)  # PR_SET_SECCOMP
    assert done == 0, os.strerror(ctypes.get_errno())


def _of_empty(group):
    shared = group.empty(50_000)
    shared[:] = 1
    return lambda: group.all_reduce(shared, "max", out=shared)


def _large(group, **how):
    x = np.ones(400_000)
    return lambda: group.all_reduce(x, "max", out=x, **how)


def _exchange(group):
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x = np.ones(20_000)

    def call():
        group.send(x, to)
        group.recv(x, source)

    return call


def _exchange_works(group):
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x = np.ones(20_000)

    def call():
        came = group.recv(source=source, shape=20_000, dtype=float, async_op=True)
        group.send(x, to, async_op=True).wait()
        came.wait()

    return call


# Calls of a rank when a fault hits it; each entry takes a group and returns a function that calls.
CALLS = {
    "small": lambda group: lambda: group.all_reduce(np.ones(4)),
    "large": _large,
    "ring": lambda group: _large(group, algorithm="ring"),
    "empty": _of_empty,
    "barrier": lambda group: group.barrier,
    "broadcast": lambda group: lambda: group.broadcast(np.ones(30_000), 1),
    "ragged": lambda group: lambda: group.all_gather(np.ones(group.rank), ragged=True),
    "async": lambda group: lambda: group.all_reduce(np.ones(30_000), async_op=True).wait(),
    "send": _exchange,
    "async send": _exchange_works,
    "split": lambda group: lambda: group.split(0).close(),
}
