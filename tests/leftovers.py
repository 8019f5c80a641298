"""Threads of this package that a test has left running."""

from __future__ import annotations

import gc
import threading
import time

#: Threads that ran when the test began; a fixture in conftest.py sets this.
before: set[threading.Thread] = set()


def threads() -> list[str]:
    """Return the names of this test's running threads, except those of strategies."""
    names = [t.name for t in threading.enumerate() if t not in before]
    return [n for n in names if n.startswith("pycollective-") and "-replica-" not in n]


def assert_no_threads() -> None:
    """Wait, with a time limit, until this package's threads have ended."""
    end = time.monotonic() + 10
    attempts = 0
    while threads() and time.monotonic() < end:
        attempts += 1
        if attempts % 10 == 0:  # a reference cycle may keep the thread's owner alive
            gc.collect()
        time.sleep(0.002)
    assert threads() == []
