"""``pycollective completion``: print a script that lets a shell complete commands and options."""

from __future__ import annotations

import argparse
from typing import Any

from pycollective import cli
from pycollective.cli import options

_DESCRIPTION = """\
Print a script for a shell. With the script, the Tab key completes commands, options, their values and
files. It needs shtab: pip install 'pycollective[completion]'.
"""

_EPILOG = """\
examples:
  eval "$(pycollective completion bash)"                     in ~/.bashrc, or once
  pycollective completion zsh > ~/.zfunc/_pycollective       in a folder of zsh's fpath
"""


def add_parser(commands: Any) -> None:
    """Add this command to the command line."""
    p = options.command(
        commands,
        "completion",
        run,
        help="print a script that lets a shell complete this command line",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    p.add_argument("shell", choices=["bash", "zsh", "tcsh"])


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError:
        raise ImportError(
            "shell completion needs shtab: pip install 'pycollective[completion]'"
        ) from None
    main_parser = cli.parser()
    for action in main_parser._actions:
        for command in action.choices.values() if isinstance(action.choices, dict) else ():
            for option in command._actions:
                if option.metavar == "FILE" or option.dest == "command":
                    option.complete = shtab.FILE
                elif option.metavar == "DIR":
                    option.complete = shtab.DIRECTORY
    print(shtab.complete(main_parser, args.shell))
    return 0
