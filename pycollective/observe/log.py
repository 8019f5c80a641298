"""The logger, its handler for those who have configured none, and the line about a new group."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Sized
from typing import NamedTuple, Protocol

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


class Group(Protocol):
    """A group, as far as lines and traces show it."""

    @property
    def transport(self) -> str:
        """The transport."""

    def address(self, rank: int) -> str:
        """Return the address of a rank that is not on this host."""

    def calls(self, rank: int) -> int:
        """Return the number of collective calls that a rank has begun."""


class Engine(Protocol):
    """The engine for arrays in the host's memory, as far as the line shows it."""

    @property
    def choices(self) -> Sized:
        """The rows that were measured."""


class Member(Protocol):
    """A rank of a group."""

    rank: int
    size: int

    @property
    def hosts(self) -> list[int]:
        """Each rank's host."""

    @property
    def _group(self) -> Group:
        """Its group."""

    @property
    def _core(self) -> Engine:
        """Its engine."""


def group_made(member: Member, who: str, source: str, table: str) -> None:
    """Log a line about a new group.

    It says who a rank of it is, the source of the group's description, and the table of its rows for
    algorithm="auto", if it has rows.
    """
    if not LOG.isEnabledFor(logging.INFO):
        return
    rows = len(member._core.choices)
    algorithms = f"{rows} rows of {table}, then the built-in table" if rows else "built-in table"
    LOG.info(
        "%s; described by %s; %s; algorithms: %s",
        who, source, _hosts(member), algorithms, extra={"rank": member.rank},
    )  # fmt: skip


def _hosts(member: Member) -> str:
    numbers, group = member.hosts, member._group
    away = [r for r in range(member.size) if group.address(r)]
    addresses = ", ".join(f"rank {r} at {group.address(r)}" for r in away[:8])
    more = f" and {len(away) - 8} more" if len(away) > 8 else ""
    if group.transport == "TCP" and member.size > 1:
        text = "hosts not shared as far as is known"
    else:
        hosts = [
            [r for r in range(member.size) if numbers[r] == h] for h in range(max(numbers) + 1)
        ]
        text = f"{len(hosts)} host" + "s" * (len(hosts) > 1)
        if len(hosts) > 1:
            text += " of ranks " + " | ".join(",".join(map(str, ranks)) for ranks in hosts)
    return f"{text}, this one is {platform.node()}" + (f" ({addresses}{more})" if away else "")
