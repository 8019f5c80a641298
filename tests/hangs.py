"""A time limit for the processes of a test, and the stacks of a process that exceeds it."""

from __future__ import annotations

import signal
import subprocess

#: A limit for hangs. A busy machine takes ten times as long as an idle one, not least for fsync().
SECONDS = 180
#: Lets Python print the stacks of all threads on SIGABRT.
STACKS = {"PYTHONFAULTHANDLER": "1"}


def end(process):
    """End a process that was started with `STACKS`; return its output and errors, with the stacks."""
    process.send_signal(signal.SIGABRT)
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()
