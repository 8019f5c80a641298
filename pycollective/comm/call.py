"""A call as a value, and the engines that carry calls out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from pycollective import _core
from pycollective.comm.arrays import Array
from pycollective.comm.work import Task, Work

How: TypeAlias = "str | _core.Algorithm"
"""An algorithm: its name, or a schedule of the program's own."""

Rows: TypeAlias = Sequence[tuple[_core.Collective, int, str]]
"""The meaning of ``algorithm="auto"``: collective, most bytes, algorithm; the first that fits."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a rank. Its arguments are checked, and its arrays are such as an engine can take.

    Attributes
    ----------
    collective : str
        The name of the method; "send" or "recv" for a message.
    source, target : array or None
        The arrays to read and to write, as far as this rank has them.
    timeout : float
        Seconds to wait for the other ranks.
    async_op : bool
        Return a work that is under way.
    op : str
        The operation, for those that reduce.
    function : ufunc, optional
        A function of NumPy's instead of an operation.
    root : int
        The root, for those that have one.
    algorithm : str or Algorithm
        The algorithm.
    reproducible : bool
        Combine the contributions in the order of the ranks.
    count : int
        Elements of the array; in a call that moves parts, of a part, or of the longest one.
    shape : sequence of int, optional
        What the ranks must agree on, if that is not the shape of the array.
    counts, out_counts : sequence of int, optional
        Elements of each rank's part, where parts differ; in an all_to_all, those that this rank sends
        and receives.
    peer, tag : int
        The other rank of a message, and the message's tag.
    label : str
        The element type that errors name, if that is not the array's.
    timed : bool
        Let the device note when it begins and ends the call.
    """

    collective: str
    source: Array | None
    target: Array | None
    timeout: float
    async_op: bool = False
    op: str = ""
    function: np.ufunc | None = None
    root: int = 0
    algorithm: How = "auto"
    reproducible: bool = False
    count: int = 0
    shape: Sequence[int] | None = None
    counts: Sequence[int] | None = None
    out_counts: Sequence[int] | None = None
    peer: int = -1
    tag: int = 0
    label: str = ""
    timed: bool = False

    @property
    def array(self) -> Array | None:
        """The array that has the dtype, and the device, of the call."""
        return self.target if self.source is None else self.source

    @property
    def is_message(self) -> bool:
        """True if two ranks alone take part."""
        return self.peer >= 0

    @property
    def has_root(self) -> bool:
        """True if one rank has another part in it than the others."""
        return self.collective in ("reduce", "broadcast", "gather", "scatter")

    def __str__(self) -> str:
        """Return the call in words: the same on all ranks if their calls belong together."""
        array = self.array
        if array is None:
            return f"{self.collective}()"
        kind = f"{array.dtype}{list(array.shape)}"
        if self.is_message:
            end = "dest" if self.collective == "send" else "source"
            return f"{self.collective}({kind}, {end}={self.peer})"
        if self.out_counts is not None:
            return f"{self.collective}({array.dtype}{list(self.shape or ())}, ragged)"
        if self.op:
            kind += "" if self.shape is None else f" of shapes {list(self.shape)}"
            kind += f", {self.op}"
        elif self.shape is not None:
            kind = f"{array.dtype}{list(self.shape)}"
            kind += "" if self.counts is None else f", counts={list(self.counts)}"
        is_rooted = self.has_root or (self.shape is not None and not self.op)
        return f"{self.collective}({kind}{f', root={self.root}' * is_rooted})"


def present(array: Array | None) -> Array:
    """Return an array that a call of this kind always has."""
    assert array is not None
    return array


class About(NamedTuple):
    """The words for traces of how an engine carries a call out."""

    by: str
    """The transport."""
    algorithm: str = ""
    why: str = ""
    """The reason for the algorithm, where the program has not named it."""
    gpu: int | None = None
    """The device whose clock the times are of; None: the host's."""


class Engine(Protocol):
    """Something that carries calls out."""

    def submit(self, call: Call) -> Work[None]:
        """Carry a call out.

        Without ``async_op`` it is done when this returns: its result can be used, for a device in the
        order of this thread's stream.
        """

    def about(self, call: Call) -> About:
        """Return the words for traces of a call."""


class HostEngine(Engine, Protocol):
    """An engine for arrays in the host's memory, which every communicator has."""

    @property
    def choices(self) -> Rows:
        """The rows that were measured."""

    @property
    def outstanding(self) -> int:
        """The number of calls under way."""

    def prefer(self, rows: Rows) -> None:
        """Take rows for ``algorithm="auto"``."""

    def warn_after(self, seconds: float, warn: Callable[[str], object]) -> None:
        """Let calls that have waited so long say who is missing."""

    def select(self, collective: _core.Collective, bytes: int) -> str:
        """Return the algorithm that "auto" means."""

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any], result: bool = False) -> Array:
        """Make an array that the ranks of the host reach; a ``result`` only if that saves a copy."""

    def run_later(self, call: Callable[[], object]) -> Task:
        """Call a function of Python's in a thread of the engine's, after the calls under way."""

    def settle(self) -> None:
        """Wait until all calls that are under way are done."""

    def collect(self) -> None:
        """Let go of what calls that are done have kept."""

    def note_told(self) -> None:
        """Take note that the program gets the error of a call of its own."""


class GpuEngine(Engine, Protocol):
    """An engine for arrays of GPUs."""

    def close(self) -> None:
        """Wait for what is under way, and leave."""

    def finish(self) -> None:
        """Leave when the process ends, without waiting for anybody."""

    def abandon(self) -> None:
        """Let go of it in a forked child."""
