"""Conversion of arguments of public functions; an invalid value raises a clear error."""

from __future__ import annotations

import difflib
import math
import operator
import os
import sys
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import numpy as np

OpName: TypeAlias = Literal["sum", "prod", "min", "max", "mean", "and", "or", "xor"]

OPS = ("sum", "prod", "min", "max", "mean", "and", "or", "xor")
_UFUNCS: dict[Any, str] = {
    np.add: "sum",
    np.multiply: "prod",
    np.minimum: "min",
    np.maximum: "max",
    np.bitwise_and: "and",
    np.bitwise_or: "or",
    np.bitwise_xor: "xor",
    np.logical_and: "and",
    np.logical_or: "or",
    np.logical_xor: "xor",
}
_LOGICAL = (np.logical_and, np.logical_or, np.logical_xor)
_FUNCTIONS = {
    "sum": "sum", "prod": "prod", "mean": "mean", "min": "min", "max": "max",
    "amin": "min", "amax": "max",
}  # fmt: skip


def own_ufunc(op: Any, dtype: np.dtype[Any]) -> np.ufunc | None:
    """Return ``op`` if it is a NumPy ufunc that no operation by name covers, else None."""
    if not isinstance(op, np.ufunc):
        return None
    if op in _UFUNCS and (op not in _LOGICAL or dtype.kind == "b"):
        return None
    if (op.nin, op.nout, op.signature) != (2, 1, None):
        raise TypeError(
            f"op must be a function of two numbers with one result, as numpy.hypot is, not {op!r}"
        )
    nothing = np.empty(0, dtype)
    made = op(nothing, nothing).dtype
    if made not in (dtype, object):  # object: results of numpy.frompyfunc's functions
        raise TypeError(f"{op!r} makes {made} of {dtype}: convert x first")
    return op


def op_name(op: Any, dtype: Any = None) -> OpName:
    """Return the name of a reduction such as "sum", `numpy.add`, `numpy.sum` or ``ReduceOp.SUM``."""
    name: Any = None
    if type(op) is str:
        name = op  # the core refuses an unknown name
    elif isinstance(op, np.ufunc):
        # A logical operation on numbers gives bools, but reductions keep the dtype.
        if op not in _LOGICAL or dtype is None or np.dtype(dtype).kind == "b":
            name = _UFUNCS.get(op)
    elif isinstance(op, str):
        name = str(op)  # the core does not take subclasses of str
    elif type(op).__name__ == "ReduceOp":  # pycollective.distribute imports this module
        name = str(op.value).lower()
    elif op is sum or op is min or op is max:
        name = op.__name__
    else:
        called = getattr(op, "__name__", "")
        if op is not None and getattr(np, called, None) is op:
            name = _FUNCTIONS.get(called)
    if name is None:
        raise TypeError(
            f"op must be one of {', '.join(map(repr, OPS))}, a pycollective.distribute.ReduceOp, or a "
            f"NumPy function of two arguments, not {op!r}. numpy.frompyfunc(f, 2, 1) makes such a "
            "function, except for all_reduce_many, which takes only add, multiply, minimum, maximum, "
            "bitwise_and, bitwise_or and bitwise_xor"
        )
    found: OpName = name
    return found


def check_name(argument: str, value: Any, known: Iterable[str]) -> None:
    """Raise ValueError for a text that is none of the known names."""
    known = tuple(known)
    if type(value) is str and value not in known:
        raise ValueError(f"{argument}={value!r} is unknown; choose one of: {', '.join(known)}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name that is most like ``name``, or ``""``."""
    like = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {like[0]!r}?" if like else ""


def whole(name: str, value: Any, low: int = -(2**31), high: int = 2**31 - 1) -> int:
    """Return a whole number; raise an error if it is not from ``low`` to ``high``."""
    if type(value) is int and low <= value <= high:
        return value
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if high == sys.maxsize and found < low:
        raise ValueError(f"{name} must be {low} or more, not {found}")
    if not low <= found <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}, not {found}")
    return found


def sizes(shape: Any, name: str = "shape") -> list[int]:
    """Return the sizes of a shape, which may be a single number."""
    try:
        given = [operator.index(shape)]
    except TypeError:
        if not np.iterable(shape) or isinstance(shape, (str, bytes)):
            raise TypeError(f"{name} must be a number or several, not {shape!r}") from None
        given = list(shape)
    return [whole(f"a number of {name}", n, 0, sys.maxsize) for n in given]


def rank_number(name: str, value: Any, size: int) -> int:
    """Return a rank's number in a group of ``size`` ranks; raise an error for anything else."""
    if type(value) is int and 0 <= value < size:
        return value
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be the number of a rank, 0 to {size - 1}, not {value!r}"
        ) from None
    if not 0 <= found < size:
        raise ValueError(f"{name} {found} is not among the {size} ranks")
    return found


def printable(text: Any) -> str:
    """Return a text that has an encoding: lone surrogates, as in names of files, are escaped."""
    return str(text).encode(errors="backslashreplace").decode()


def seconds(name: str, value: Any) -> float:
    """Return a positive number of seconds; raise an error for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a positive number of seconds, not {value!r}") from None
    except OverflowError:
        found = math.inf
    if not found > 0:
        raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")
    return found


def number_of(name: str, value: Any) -> float:
    """Return a number; raise an error for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {value!r}") from None


def path_of(name: str, value: Any) -> str:
    """Return a path as text; raise an error for anything else."""
    try:
        return os.fsdecode(value)
    except TypeError:
        raise TypeError(f"{name} must be a path, not {value!r}") from None


def switch(name: str, value: Any) -> bool:
    """Return a bool; 0 and 1 count as False and True."""
    if value is True or value is False:
        return value
    if isinstance(value, (np.bool_, int)) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {value!r}")
