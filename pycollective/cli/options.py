"""Kinds of values that options of several commands take."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pycollective.environment import MAX_RANKS, is_number
from pycollective.errors import DataError

__all__ = [
    "file",
    "need_folder",
    "picture",
    "positive",
    "positive_real",
    "ranks",
    "seconds",
    "size",
    "this_program",
    "whole",
]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PICTURES = (".png", ".svg", ".pdf")


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number from ``low`` to ``high``."""

    def convert(text: str) -> int:
        if not is_number(text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"not a whole number from {low} to {high}: {text!r}")
        return int(text)

    return convert


ranks = whole(1, MAX_RANKS)


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not is_number(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a positive number: {text!r}")
    return int(text)


def positive_real(text: str) -> float:
    """Return a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"not a positive number: {text!r}")
    return number


def file(text: str) -> Path:
    """Return the path of a file that can be written."""
    path = Path(text)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such folder")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def picture(text: str) -> Path:
    """Return the path of a picture that can be written."""
    if Path(text).suffix.lower() not in _PICTURES:
        raise argparse.ArgumentTypeError(
            f"{text!r}: the name of a picture ends with {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}"
        )
    return file(text)


def need_folder(path: Path) -> None:
    """Make a folder if it is not there; raises DataError if no file can be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise DataError(f"no file can be written to the folder {path}: {error.strerror}") from None


def seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"not a number of seconds: {text!r}")
    return number


def size(text: str) -> int:
    """Return a number of bytes: 8, 64K, 16M, 1GiB."""
    match = re.fullmatch(r"([0-9]{1,15})\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"not a size: {text!r} (write 8, 64K, 16M or 1G)")
    return int(match[1]) * _UNITS[match[2].upper()]


def this_program(*words: str) -> list[str]:
    """Return a command line for this very program, whatever lies in the working directory."""
    root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path.insert(0, {root!r}); from pycollective.cli import main"
    return [sys.executable, "-c", f"{start}; sys.exit(main())", *words]
