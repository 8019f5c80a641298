"""``pycollective run``: start the processes of a group on this host."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from pycollective import observe
from pycollective.cli import options
from pycollective.launch import launcher

_DESCRIPTION = """\
Start N processes of a program as the ranks of one group. In the program, pycollective.init() returns
the process's communicator; the ranks communicate through shared memory, or over TCP on the loopback
address. No configuration is needed; a secret made for this run protects TCP. Each rank runs on its
own share of the cores.

Signals are passed on; Ctrl-Z stops the ranks too, and a third Ctrl-C kills them. Only rank 0 reads the
standard input. When a rank fails, the other ranks' calls raise PeerLostError, or RendezvousError if the
group is not yet complete. Ranks that still run 5 seconds later get SIGTERM, and after 5 more SIGKILL.
Processes that a rank leaves behind are ended, unless they have a session of their own. So are all
processes when this command is killed. The exit status is that of the rank that failed first, or 128 + n
for signal n.

With --chief, --ps and --workers the processes are the tasks of a cluster for ParameterServerStrategy,
which finds the cluster in TF_CONFIG. Rank 0 is the chief, the parameter servers follow, and then the
workers. The other processes continue while at least one worker runs.
"""

_EPILOG = """\
examples:
  pycollective run -n 4 script.py --its-own options
  pycollective run -n 4 -m package.module --its-own options
  pycollective run -n 2 -- ./any-program that starts Python at some point
  pycollective run -n 4 --transport tcp script.py
  pycollective run --ps 2 --workers 3 --chief script.py
"""


def add_parser(commands: Any) -> None:
    """Add this command to the command line."""
    p = options.command(
        commands,
        "run",
        run,
        help="start the processes of a group on this host",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add = p.add_argument
    add(
        "-n",
        "--ranks",
        type=options.ranks,
        metavar="N",
        help="number of ranks; needed without --chief",
    )
    add(
        "--chief",
        action="store_true",
        help="start a cluster with parameter servers instead of ranks: a chief, and --ps and --workers",
    )
    add("--ps", type=options.ranks, metavar="N", help="parameter servers of a cluster")
    add("--workers", type=options.ranks, metavar="N", help="workers of a cluster")
    add("--transport", choices=["shm", "tcp"],
        help="transport of the ranks (default: PYCOLLECTIVE_TRANSPORT, else shm)",
    )  # fmt: skip
    add("--bind", choices=["cores", "none"], default="cores",
        help="cores: each rank has an equal share of the cores for itself, if there are as many "
        "cores as ranks (default). none: the system places every rank on any core",
    )  # fmt: skip
    add("--prefix", choices=["auto", "always", "never"], default="auto",
        help="begin each line of output with the rank (auto: on a terminal)")  # fmt: skip
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE",
        help="run a Python module; the remaining words are its options")  # fmt: skip
    add("command", nargs=argparse.REMAINDER,
        help="a Python script (its name ends with .py) or any program, with its options",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Start the ranks and return the exit status."""
    observe.settings()  # one error, and not one for each rank
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.module:
        command = [sys.executable, "-m", *args.module]
    elif not command:
        raise options.WrongOptionError("give a script: pycollective run -n 2 script.py")
    elif command[0].endswith(".py"):
        if not os.path.isfile(command[0]):
            raise options.WrongOptionError(f"there is no script {command[0]!r}")
        command = [sys.executable, *command]
    group, size = None, args.ranks
    if args.chief or args.ps or args.workers:
        if args.ranks or args.transport or not (args.chief and args.ps and args.workers):
            raise options.WrongOptionError(
                "a cluster needs --chief, --ps and --workers, without -n and --transport: "
                "pycollective run --ps 2 --workers 3 --chief script.py"
            )
    elif not size:
        raise options.WrongOptionError(
            "give the number of ranks before the script: pycollective run -n 2 script.py"
        )
    try:
        if args.chief:
            group = launcher.Tasks(args.ps, args.workers)
            size = group.size
        return launcher.run(command, size, args.prefix, args.transport, args.bind, group)
    except ValueError as error:
        raise options.WrongOptionError(error) from None
    except OSError as error:
        raise options.WrongOptionError(f"cannot start {command[0]!r}: {error}") from None
