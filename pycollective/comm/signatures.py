"""Types in the signatures of a `Communicator`'s calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal, TypeAlias, TypedDict, TypeVar

import numpy as np

from pycollective.algorithms import Algorithm
from pycollective.arguments import OpName

S = TypeVar("S", bound=np.generic)
"""The element type of an array; results have the element type of the input."""
O = TypeVar("O")  # noqa: E741
"""The type of ``out=``, which is the type of the result."""

DTypeOf: TypeAlias = "np.dtype[S] | type[S]"

Now: TypeAlias = Literal[False]
Later: TypeAlias = Literal[True]
"""The types of ``async_op``: a call returns its result (Now) or a `Work` (Later)."""

Op: TypeAlias = OpName | Callable[..., object] | Enum
"""A reduction: its name, a function such as `numpy.add`, or a ``ReduceOp``."""


class Options(TypedDict, total=False):
    """Keywords of every call."""

    timeout: float | None


class MoveOptions(Options, total=False):
    """Keywords of a call with an algorithm."""

    algorithm: str | Algorithm


class AllReduceOptions(MoveOptions, total=False):
    """Keywords of ``all_reduce``."""

    reproducible: bool


class ManyOptions(AllReduceOptions, total=False):
    """Keywords of ``all_reduce_many``."""

    bytes_per_pack: int


class GatherOptions(MoveOptions, total=False):
    """Keywords of ``all_gather`` and ``gather``."""

    ragged: bool


class ScatterOptions(GatherOptions, total=False):
    """Keywords of ``scatter``."""

    counts: Sequence[int] | None


class AllToAllOptions(MoveOptions, total=False):
    """Keywords of ``all_to_all``."""

    out_counts: Sequence[int] | None
