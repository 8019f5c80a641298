"""The logger, its handler, and the settings of the environment."""

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
"""After this time a waiting call names the missing ranks; earlier if half of its timeout is shorter."""
LEVELS = ("INFO", "TRACE")
TRACE = 5
"""The logging level of single calls."""

LOG = logging.getLogger("pycollective")
logging.addLevelName(TRACE, "TRACE")


class Settings(NamedTuple):
    """The settings of the environment."""

    debug: str
    timeline: str
    warn_after: float


def settings() -> Settings:
    """Return the settings of the environment; add a handler if they turn the log on.

    Raises
    ------
    RendezvousError
        A variable has an invalid value.
    """
    debug = os.environ.get(DEBUG, "")
    if debug not in ("", *LEVELS):
        raise RendezvousError(f"{DEBUG}={debug!r} is not {' or '.join(LEVELS)}")
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
        _write_to_stderr(TRACE if debug == "TRACE" else logging.INFO)
    return Settings(debug, os.environ.get(TIMELINE, ""), seconds)


class _Stderr(logging.Handler):
    """A handler that writes lines with the rank to the current ``sys.stderr``."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(
            logging.Formatter(
                "%(asctime)s.%(msecs)03d [rank %(rank)s] %(levelname)s %(message)s", "%H:%M:%S"
            )
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line; `logging` handles errors."""
        if not hasattr(record, "rank"):
            record.rank = os.environ.get("PYCOLLECTIVE_RANK") or os.environ.get("RANK") or "-"
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _write_to_stderr(level: int) -> None:
    """Write the log to ``sys.stderr``, whatever the program has configured."""
    if not any(isinstance(handler, _Stderr) for handler in LOG.handlers):
        LOG.addHandler(_Stderr())
        LOG.propagate = False  # otherwise the root logger writes each line again
    LOG.setLevel(level)
