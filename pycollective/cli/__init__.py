"""The command ``pycollective``: one module for each subcommand."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from pycollective import environment
from pycollective.arguments import suggestion
from pycollective.cli.options import WrongOptionError
from pycollective.cli.version import ShowVersion
from pycollective.errors import CheckpointError, CollectiveError, DataError
from pycollective.launch.output import discard_rest

__all__ = ["main"]

_COMMANDS = ("train", "bench", "simulate", "run", "doctor", "timeline", "completion")

_EPILOG = """\
examples:
  pycollective train                          train a CNN on handwritten digits, 2 replicas
  pycollective train --data digits            … on small digits that need no network connection
  pycollective bench --transport shm -n 4     time all-reduce among 4 processes
  pycollective simulate --ranks 256           time every all-reduce on a simulated cluster
  pycollective run -n 4 script.py             start the processes of a group on this host
  pycollective doctor                         show the cluster of this process, test its links
  eval "$(pycollective completion bash)"      let the Tab key complete all of these
'pycollective COMMAND --help' describes a command.
"""


def parser(commands: Sequence[str] = _COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of the command line, with some or all of its commands."""
    main_parser = argparse.ArgumentParser(
        prog="pycollective",
        description="Collective communication for NumPy arrays, and data-parallel training on it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main_parser.add_argument("--version", action=ShowVersion)
    parsers = main_parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in commands:
        importlib.import_module(f"pycollective.cli.{name}").add_parser(parsers)
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    An error that a user can correct is printed in one line and gives status 2. Examples are a file that
    cannot be read, a missing device, a wrong option, and a misspelt environment variable. Any other
    error shows a traceback.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    with contextlib.suppress(AttributeError, ValueError):  # a stream that a program has replaced
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    words = list(sys.argv[1:] if argv is None else argv)
    # Importing the modules of all commands takes twice as long as importing that of "run".
    named = [name for name in _COMMANDS if name in words[:1]]
    try:
        try:
            args, unknown = parser(named or _COMMANDS).parse_known_args(words)
            if unknown:  # parse_args() would print the usage without the command's options
                actions = args.parser._actions
                known = [word for action in actions for word in action.option_strings]
                args.parser.error(
                    f"unrecognized arguments: {' '.join(unknown)}{suggestion(unknown[0], known)}"
                )
            args.words = words
            try:
                environment.check(os.environ)
            except ValueError as error:
                print(f"pycollective: {error}", file=sys.stderr)
                return 2
            return int(args.function(args))
        finally:
            if sys.stdout is not None:  # None: the program was started with stdout closed
                sys.stdout.flush()  # an error in Python's own flush at exit gives status 120
    except WrongOptionError as error:
        args.parser.error(str(error))
        raise  # mypy does not know that the line above ends the program
    except BrokenPipeError:  # the reader of the output has ended: `pycollective bench | head`
        discard_rest(sys.stdout)
        return 0
    except (DataError, CheckpointError, CollectiveError, ImportError, OSError) as error:
        print(f"pycollective: {error}", file=sys.stderr)
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:  # the disk is full
            discard_rest(sys.stdout)
        return 2
    except KeyboardInterrupt:
        print("pycollective: interrupted", file=sys.stderr)
        return 130
