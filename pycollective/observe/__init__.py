"""Logs of groups and of calls, and timelines; see ``docs/how-to/find_a_slow_rank.md``.

They are off by default, and cost nothing then. To log or time calls, `pycollective.comm.tracing` wraps
the engines of every communicator, and calls do not take the compiled fast path.
"""

from __future__ import annotations

from pycollective.observe.log import settings

__all__ = ["settings"]
