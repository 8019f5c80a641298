"""The logger, its handler for those who have configured none, and the line about a new group."""

from __future__ import annotations

import logging
import os
import sys
from typing import NamedTuple

from pycollective.errors import RendezvousError

DEBUG = "PYCOLLECTIVE_DEBUG"
TIMELINE = "PYCOLLECTIVE_TIMELINE"
WARN_AFTER = "PYCOLLECTIVE_WARN_AFTER"
SECONDS_TO_WARNING = 10.0
"""A call that has waited so long, or half of its timeout where that is less, says who is missing."""
LEVELS = ("INFO", "TRACE")
TRACE = 5
"""The logging level of single calls."""

LOG = logging.getLogger("pycollective")
logging.addLevelName(TRACE, "TRACE")


class Settings(NamedTuple):
    """What the environment asks for."""

    debug: str
    timeline: str
    warn_after: float


def settings() -> Settings:
    """Return what the environment asks for; see to it that there is a handler if it asks for lines.

    Raises
    ------
    RendezvousError
        It asks for what there is not.
    """
    debug = os.environ.get(DEBUG, "")
    if debug not in ("", *LEVELS):
        raise RendezvousError(f"{DEBUG}={debug!r}: there are {' and '.join(LEVELS)}")
    text = os.environ.get(WARN_AFTER, "")
    try:
        seconds = float(text) if text else SECONDS_TO_WARNING
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise RendezvousError(
            f"{WARN_AFTER}={text!r} is not a positive number of seconds; 'inf' means never"
        )
    if debug:
        _speak(TRACE if debug == "TRACE" else logging.INFO)
    return Settings(debug, os.environ.get(TIMELINE, ""), seconds)


class _Stderr(logging.Handler):
    """To what the standard error output is at that moment, with this process's rank."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(
            logging.Formatter(
                "%(asctime)s.%(msecs)03d [rank %(rank)s] %(levelname)s %(message)s", "%H:%M:%S"
            )
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line; what goes wrong is logging's to say."""
        if not hasattr(record, "rank"):
            record.rank = os.environ.get("PYCOLLECTIVE_RANK") or os.environ.get("RANK") or "-"
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _speak(level: int) -> None:
    """Write to the standard error output, whatever logging is configured to do."""
    if not any(isinstance(handler, _Stderr) for handler in LOG.handlers):
        LOG.addHandler(_Stderr())
        LOG.propagate = False  # or each line would come twice
    LOG.setLevel(level)
