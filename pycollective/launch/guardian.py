"""A process that ends the ranks when their launcher is gone, however that ended.

It reads from a pipe whose other end the launcher alone holds: ``+12345`` when the process group 12345
has been started, ``-12345`` when nothing is left of it. At the end of the pipe it ends those that are
left. It runs as a script of its own, with the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref

__all__ = ["Guardian"]

_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL."""


class Guardian:
    """The launcher's end. Every process group must be named as soon as it is there."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        _guardians.add(self)

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(
            BrokenPipeError
        ):  # somebody has killed it: the ranks run unguarded
            self._process.stdin.write(text.encode())

    def started(self, group: int) -> None:
        """Take a process group under guard."""
        self._say(f"+{group}\n")

    def ended(self, group: int) -> None:
        """Forget one that is gone."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """End the guardian itself."""
        self._process.communicate()

    def _disown(self) -> None:
        """After a fork, in the child: the end of the pipe is the launcher's alone."""
        assert self._process.stdin is not None
        self._process.stdin.close()


_guardians: weakref.WeakSet[Guardian] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for guardian in list(_guardians):
        guardian._disown()
    _guardians.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def _alive(groups: set[int], number: int) -> set[int]:
    """Send a signal to process groups; return those that are there.

    A process that has just been started may lead no group yet: the signal is for the process then.
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
    """Guard until the pipe ends."""
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line[1:])
        if line.startswith("+"):
            groups.add(number)
        else:
            groups.discard(number)
    groups = _alive(groups, signal.SIGTERM)
    _alive(groups, signal.SIGCONT)  # also those that are stopped
    deadline = time.monotonic() + _GRACE
    while groups and time.monotonic() < deadline:
        time.sleep(0.02)
        groups = _alive(groups, 0)
    _alive(groups, signal.SIGKILL)


if __name__ == "__main__":
    main()
