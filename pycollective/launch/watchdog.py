"""A process that kills the ranks if their launcher ends before them.

The watchdog reads from a pipe, of which only the launcher has the other end. The launcher writes
``+12345`` when it has started process group 12345, and ``-12345`` when no process of the group is left.
The pipe ends with the launcher. The watchdog then kills the groups that are left. The watchdog runs
this file as a script, with the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref

_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL."""


class Watchdog:
    """The launcher's side of the watchdog. It must report each process group at its start."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        _watchdogs.add(self)

    def _send(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(
            BrokenPipeError
        ):  # the watchdog was killed: the ranks run without it
            self._process.stdin.write(text.encode())

    def started(self, group: int) -> None:
        """Report a new process group."""
        self._send(f"+{group}\n")

    def ended(self, group: int) -> None:
        """Report that no process of a group is left."""
        self._send(f"-{group}\n")

    def close(self) -> None:
        """End the watchdog itself."""
        self._process.communicate()

    def _close_in_child(self) -> None:
        """Close the pipe in a forked child, because only the launcher may keep it open."""
        assert self._process.stdin is not None
        self._process.stdin.close()


_watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for watchdog in list(_watchdogs):
        watchdog._close_in_child()
    _watchdogs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def _signal(groups: set[int], number: int) -> set[int]:
    """Send a signal to process groups; return those that exist.

    A process that has just started may not lead its group yet. The process itself then gets the
    signal.
    """
    found = set()
    for group in groups:
        for send in (os.killpg, os.kill):
            try:
                send(group, number)
                found.add(group)
                break
            except (ProcessLookupError, PermissionError):
                continue
    return found


def main() -> None:
    """Read reports until the pipe ends; then kill the groups that are left."""
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line[1:])
        if line.startswith("+"):
            groups.add(number)
        else:
            groups.discard(number)
    groups = _signal(groups, signal.SIGTERM)
    _signal(groups, signal.SIGCONT)  # stopped processes handle SIGTERM only when they continue
    deadline = time.monotonic() + _GRACE
    while groups and time.monotonic() < deadline:
        time.sleep(0.02)
        groups = _signal(groups, 0)
    _signal(groups, signal.SIGKILL)


if __name__ == "__main__":
    main()
