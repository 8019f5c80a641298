"""Which threads of this package a test has left behind."""

from __future__ import annotations

import gc
import threading
import time

#: Those that were there when the test began; set by a fixture in conftest.py.
before: set[threading.Thread] = set()


def threads() -> list[str]:
    """Return the names of this test's own threads that have not ended, but those of strategies."""
    names = [t.name for t in threading.enumerate() if t not in before]
    return [n for n in names if n.startswith("pycollective-") and "-replica-" not in n]


def assert_no_threads() -> None:
    """Wait, with a limit, until those of this package have ended."""
    end = time.monotonic() + 10
    attempts = 0
    while threads() and time.monotonic() < end:
        attempts += 1
        if attempts % 10 == 0:  # what holds the thread may be held by a cycle
            gc.collect()
        time.sleep(0.002)
    assert threads() == []
