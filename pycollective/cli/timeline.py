"""``pycollective timeline merge``: join the timelines of several processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pycollective.cli import options
from pycollective.errors import DataError
from pycollective.observe.trace_events import merge

_DESCRIPTION = """\
PYCOLLECTIVE_TIMELINE=FILE, or `with pycollective.timeline(FILE):`, writes a timeline, one file for each
process. 'merge' joins these files into one for https://ui.perfetto.dev. Times are those of the hosts'
wall clocks: if the clocks of two hosts differ, their times differ, too.
"""

_EPILOG = """\
example:
  PYCOLLECTIVE_TIMELINE=calls.json pycollective run -n 2 script.py
  pycollective timeline merge calls.rank*.json -o calls.json
"""


def add_parser(commands: Any) -> None:
    """Add this command to the command line."""
    p = options.command(
        commands,
        "timeline",
        run,
        help="join the timelines of several processes",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add = p.add_argument
    add("action", choices=["merge"], help="join the files into one")
    add(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a timeline of one process, or a folder of timelines",
    )
    add("-o", "--output", type=options.file, required=True, metavar="FILE", help="the joined file")


def run(args: argparse.Namespace) -> int:
    """Join the files and return the exit status."""
    files = [
        each
        for path in args.files
        for each in (sorted(path.glob("*.json")) if path.is_dir() else [path])
    ]
    if not files:
        text = f"no timeline (*.json) is in {', '.join(map(str, args.files))}"
        raise options.WrongOptionError(ValueError(text))
    inputs = [file.resolve() for file in files]
    if len(set(inputs)) < len(inputs):
        raise options.WrongOptionError(ValueError("a timeline is given twice"))
    if Path(args.output).resolve() in inputs:
        text = f"the output {args.output} is one of the timelines: it would be replaced"
        raise options.WrongOptionError(ValueError(text))
    try:
        count, joined = merge(files, args.output)
    except (OSError, ValueError) as error:
        raise DataError(str(error)) from None
    print(f"{args.output}: {count} events of {len(files) - len(joined)} files")
    for file in joined:
        print(f"{file} is left out: it was joined from timelines")
    return 0
