"""Log lines, traces of calls, and timelines; see ``docs/how-to/find_a_slow_rank.md``.

All of it is off by default, and then costs nothing. When it is on, `pycollective.comm.tracing` wraps the
engines of every communicator, and calls do not take the compiled fast path.
"""

from __future__ import annotations

from pycollective.observe.log import settings

__all__ = ["settings"]
