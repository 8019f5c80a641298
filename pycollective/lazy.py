"""Modules whose names are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(module: str, origin: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module.

    Parameters
    ----------
    module : str
        Its ``__name__``.
    origin : mapping
        From names to the modules that have them.
    """

    def find(name: str) -> Any:
        if name not in origin:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(origin[name]), name)

    return find
