"""Global settings of `pycollective.keras`: the float dtype, epsilon and automatic names."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pycollective.dtypes import as_dtype

__all__ = [
    "clear_session",
    "epsilon",
    "floatx",
    "fresh_names",
    "set_epsilon",
    "set_floatx",
    "unique_name",
]

_floatx = "float32"
_epsilon = 1e-7
_names: Counter[str] = Counter()
_names_lock = threading.Lock()


class _Thread(threading.local):
    #: The numbers of names in a block of `fresh_names`.
    names: Counter[str] | None = None


_thread = _Thread()


def floatx() -> str:
    """Return the name of the default dtype of layers, losses, metrics and optimizers."""
    return _floatx


def set_floatx(value: Any) -> None:
    """Set the default dtype: ``"float16"``, ``"float32"`` (the initial value) or ``"float64"``.

    Raises
    ------
    ValueError
        The value is another dtype.
    """
    global _floatx
    name = str(np.dtype(as_dtype(value)))
    if name not in ("float16", "float32", "float64"):
        raise ValueError(f"floatx must be 'float16', 'float32' or 'float64', got {value!r}")
    _floatx = name


def epsilon() -> float:
    """Return the small number that keeps probabilities away from 0 and 1."""
    return _epsilon


def set_epsilon(value: float) -> None:
    """Set the number that `epsilon` returns."""
    global _epsilon
    _epsilon = float(value)


def unique_name(prefix: str) -> str:
    """Return ``prefix`` at the first call, then ``prefix_1``, ``prefix_2``, … ."""
    names = _names if _thread.names is None else _thread.names
    with _names_lock:
        number = names[prefix]
        names[prefix] += 1
    return prefix if number == 0 else f"{prefix}_{number}"


@contextmanager
def fresh_names() -> Iterator[None]:
    """Let `unique_name` count from the beginning in this thread, inside a block."""
    before, _thread.names = _thread.names, Counter()
    try:
        yield
    finally:
        _thread.names = before


def name_of_class(cls: type) -> str:
    """Return the name of a class in snake case."""
    text = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", cls.__name__.lstrip("_"))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", text).lower()


def clear_session() -> None:
    """Restart the numbers of automatic names."""
    with _names_lock:
        _names.clear()
