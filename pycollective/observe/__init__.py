"""Log lines, traces of calls, and timelines; see ``docs/how-to/find_a_slow_rank.md``.

All of it is off unless somebody asks. Then `communicator.tracing` wraps the engines of a communicator,
and the short way of `all_reduce` is left. What is off costs nothing.
"""

from __future__ import annotations

from pycollective.observe.log import group_made, settings

__all__ = ["group_made", "settings"]
