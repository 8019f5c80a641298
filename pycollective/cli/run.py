"""``pycollective run``: start the processes of a group on this host."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from pycollective.cli import options
from pycollective.rendezvous import launcher

__all__ = ["add_parser"]

_DESCRIPTION = """\
Start N processes of a program as the ranks of one group. In the program, pycollective.init() returns
the process's communicator; the ranks talk through shared memory, or over TCP on the loopback address.
Nothing has to be configured; for TCP a secret is made and handed out.

Signals are passed on. When a rank fails, the others' calls raise PeerLostError, and what has not ended
10 seconds later is ended. The exit status is that of the rank that failed first.
"""

_EPILOG = """\
examples:
  pycollective run -n 4 script.py --its-own options
  pycollective run -n 2 -- python -m package.module
"""


def add_parser(commands: Any) -> None:
    """Add this command to the command line."""
    p = commands.add_parser(
        "run",
        help="start the processes of a group on this host",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "-n", "--ranks", type=options.positive, required=True, metavar="N", help="processes"
    )
    p.add_argument(
        "--transport",
        choices=["shm", "tcp"],
        default="tcp" if os.environ.get("PYCOLLECTIVE_TRANSPORT") == "tcp" else "shm",
        help="what the ranks talk through (default: %(default)s)",
    )
    p.add_argument(
        "--prefix",
        choices=["auto", "always", "never"],
        default="auto",
        help="begin each line of output with its rank (auto: on a terminal)",
    )
    p.add_argument("command", nargs=argparse.REMAINDER, help="a Python script or a program")
    p.set_defaults(function=run)


def run(args: argparse.Namespace) -> int:
    """Start the ranks and return the exit status."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise SystemExit("pycollective run: give a script: pycollective run -n 2 script.py")
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    prefix = args.prefix == "always" or (args.prefix == "auto" and sys.stdout.isatty())
    try:
        return launcher.run(command, args.ranks, prefix, args.transport)
    except OSError as error:
        raise SystemExit(f"pycollective run: cannot start {command[0]!r}: {error}") from None
