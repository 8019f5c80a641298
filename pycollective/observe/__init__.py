"""What the library says of itself: log lines, traces of calls, timelines; see ``docs/debugging.md``.

All of it is off unless somebody asks; then a communicator's core is watched from outside
(`calls`), and the short way of `all_reduce` is left. What is off costs nothing.
"""

from __future__ import annotations

from pycollective.observe.calls import enqueue, ignore, join, leave, timeline, together
from pycollective.observe.log import group_made, settings

__all__ = ["enqueue", "group_made", "ignore", "join", "leave", "settings", "timeline", "together"]
