"""Parts that commands share: parsers, common options, and types of option values."""

from __future__ import annotations

import argparse
import math
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pycollective.algorithms import Algorithm
from pycollective.environment import MAX_RANKS, is_number
from pycollective.errors import DataError
from pycollective.plots import new_figure, size_text

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PICTURES = (".png", ".svg", ".pdf")

T = TypeVar("T")


class WrongOptionError(Exception):
    """Options that do not fit together; the command line prints the text with the command's usage."""


def refuse_collectives(missing: Iterable[str], asked: Iterable[Any]) -> NoReturn:
    """Raise ValueError for collectives that have none of the algorithms of the option -a."""
    names = ", ".join(str(getattr(one, "name", one)) for one in asked)
    raise ValueError(
        f"{', '.join(sorted(missing))}: no algorithm is called {names}; leave it out of -c"
    )


def command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    """Add a command to the command line."""
    p: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.set_defaults(function=run, parser=p)
    return p


# Options of several commands ----------------------------------------------------------------------


def add_sizes(p: argparse.ArgumentParser, begin: int, end: int, factor: int) -> None:
    """Add the options for sizes of arrays."""
    add = p.add_argument
    add("-b", "--begin", type=size, default=begin, metavar="SIZE",
        help=f"first size ({size_text(begin)})")  # fmt: skip
    add("-e", "--end", type=size, default=end, metavar="SIZE", help=f"last size ({size_text(end)})")
    add("-f", "--factor", type=whole(2, 1 << 30), default=factor, metavar="N",
        help=f"factor from size to size ({factor})")  # fmt: skip


def sizes(args: argparse.Namespace, least: int = 1) -> list[int]:
    """Return the sizes that the options of `add_sizes` describe."""
    if args.begin < least or args.end < args.begin:
        raise WrongOptionError(
            f"sizes must grow from at least {least} bytes, not from {args.begin} to {args.end}"
        )
    found = [args.begin]
    while found[-1] * args.factor <= args.end:
        found.append(found[-1] * args.factor)
    return found


def add_json(p: argparse.ArgumentParser, what: str = "the results") -> None:
    """Add the option for a report in JSON."""
    p.add_argument("--json", type=file, metavar="FILE", help=f"also write {what} as JSON to FILE")


def add_plot(p: argparse.ArgumentParser) -> None:
    """Add the option for a picture."""
    p.add_argument("--plot", type=_picture, metavar="FILE",
        help="draw the results to FILE: .svg, .png or .pdf; needs the extra 'plot'")  # fmt: skip


# Types of values ----------------------------------------------------------------------------------


def several(one: Callable[[str], T]) -> dict[str, Any]:
    """Return the settings of an option whose values are separated by spaces or commas."""

    class Joined(argparse.Action):
        def __call__(
            self, _parser: Any, namespace: argparse.Namespace, values: Any, _option: Any = None
        ) -> None:
            found = [each for value in values for each in value]
            setattr(namespace, self.dest, list(dict.fromkeys(found)))

    def convert(text: str) -> list[T]:
        return [one(part) for part in text.split(",")]

    return {"nargs": "+", "action": Joined, "type": convert}


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Return the type of an option whose value is one of these names."""

    def convert(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return convert


def algorithm(text: str) -> str | Algorithm:
    """Return an algorithm's name, or for ``FILE.py:NAME`` the algorithm that the file defines."""
    path, _, name = text.rpartition(":")
    if not path.endswith(".py"):
        return text
    try:
        found = runpy.run_path(path)
    except (Exception, SystemExit) as error:  # the file is the user's
        raise argparse.ArgumentTypeError(
            f"{path} cannot be run: {type(error).__name__}: {error}"
        ) from None
    made = found.get(name)
    if not isinstance(made, Algorithm):
        known = [each for each, value in found.items() if isinstance(value, Algorithm)]
        raise argparse.ArgumentTypeError(
            f"{path} defines no algorithm {name!r}; it defines {', '.join(known) or 'none'}"
        )
    return made


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return the type of an option whose value is a whole number from ``low`` to ``high``."""

    def convert(text: str) -> int:
        if not is_number(text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"not a whole number from {low} to {high}: {text!r}")
        return int(text)

    return convert


ranks = whole(1, MAX_RANKS)
positive = whole(1, 1 << 53)


def real(least: float = 0.0, most: float = math.inf) -> Callable[[str], float]:
    """Return the type of an option whose value is a number from ``least`` to ``most``."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            limits = f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"not a number {limits}: {text!r}")
        return number

    return convert


def file(text: str) -> Path:
    """Return the path of a file that can be written."""
    path = Path(text)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such folder")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def _picture(text: str) -> Path:
    """Return the path of a picture; raise ArgumentTypeError if it cannot be drawn or written."""
    if Path(text).suffix.lower() not in _PICTURES:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the name of a picture ends with {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}"
        )
    try:
        new_figure(1, 1)
    except ImportError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return file(text)


def size(text: str) -> int:
    """Return the number of bytes that a text such as 8, 64K, 16M or 1GiB means."""
    match = re.fullmatch(r"([0-9]{1,15})\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"not a size: {text!r} (write 8, 64K, 16M or 1G)")
    found = int(match[1]) * _UNITS[match[2].upper()]
    if found > 1 << 50:
        raise argparse.ArgumentTypeError(f"{text!r} is more than 1 PiB")
    return found


def need_folder(path: Path) -> None:
    """Make a folder if it is missing; raise DataError if no file can be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise DataError(f"no file can be written to the folder {path}: {error.strerror}") from None


def this_program(*words: str) -> list[str]:
    """Return a command line for this same installation, whatever the working directory contains."""
    root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path.insert(0, {root!r}); from pycollective.cli import main"
    return [sys.executable, "-c", f"{start}; sys.exit(main())", *words]
