"""Kinds of values that options of several commands take."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

__all__ = ["positive", "seconds", "size", "this_program"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a positive number: {text!r}")
    return int(text)


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
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"not a size: {text!r} (write 8, 64K, 16M or 1G)")
    return int(match[1]) * _UNITS[match[2].upper()]


def this_program(*words: str) -> list[str]:
    """Return a command line for this very program, whatever lies in the working directory."""
    root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path.insert(0, {root!r}); from pycollective.cli import main"
    return [sys.executable, "-c", f"{start}; sys.exit(main())", *words]
