"""Time in which this process was stopped, as by Ctrl-Z or a debugger: no deadline includes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_LEAST = 0.2
"""Seconds by which a wait may take longer on a busy machine."""


class Missed:
    """The time that this process missed during waits, in ``seconds``.

    A process that uses a processor is not stopped: another of its threads may have had the GIL.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def during(self, wait: Callable[[float], Any], seconds: float) -> Any:
        """Return ``wait(seconds)``, and add the time that was missed meanwhile."""
        begun, used = time.monotonic(), time.process_time()
        result = wait(seconds)
        missed = time.monotonic() - begun - seconds - (time.process_time() - used)
        if missed > _LEAST:
            self.seconds += missed
        return result
