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
"""An algorithm: its name, or a schedule that the program wrote."""

Rows: TypeAlias = Sequence[tuple[_core.Collective, int, str]]
"""Rows for ``algorithm="auto"``: collective, most bytes, algorithm. The first row that fits counts."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a rank, with valid arguments and arrays that an engine can use.

    Attributes
    ----------
    collective : str
        The name of the method; "send" or "recv" for a message.
    source, target : array or None
        The arrays to read and to write, if this rank has them.
    timeout : float
        Seconds to wait for the other ranks.
    async_op : bool
        Return before the call is done.
    op, function : str, ufunc or None
        The name of the operation, or a NumPy function without such a name.
    root : int
        The root, if the collective has one.
    algorithm : str or Algorithm
        The algorithm.
    reproducible : bool
        Combine the contributions in rank order.
    count : int
        The number of elements: of the array, or of a part, or of the longest part.
    shape : sequence of int, optional
        The shape on which the ranks must agree, if it is not the shape of the array.
    counts, out_counts : sequence of int, optional
        Elements of each rank's part if parts differ; in an all_to_all those to send and to receive.
    peer, tag : int
        The other rank of a message, and the message's tag.
    label : str
        The element type for error messages, if it is not the array's.
    timed : bool
        Let the device record when it begins and ends the call.
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
        """The array that has the dtype and the device of the call."""
        return self.target if self.source is None else self.source

    @property
    def is_message(self) -> bool:
        """True if only two ranks take part."""
        return self.peer >= 0

    @property
    def has_root(self) -> bool:
        """True if the collective has a root."""
        return self.collective in ("reduce", "broadcast", "gather", "scatter")

    def __str__(self) -> str:
        """Return the call as text, the same on all ranks that make the same call."""
        array = self.array
        if array is None:
            return f"{self.collective}()"
        dtype = self.label or array.dtype
        kind = f"{dtype}{list(array.shape)}"
        if self.is_message:
            end = "dest" if self.collective == "send" else "source"
            return f"{self.collective}({kind}, {end}={self.peer})"
        if self.out_counts is not None:
            return f"{self.collective}({array.dtype}{list(self.shape or ())}, ragged)"
        if self.op:
            kind += "" if self.shape is None else f" of shapes {list(self.shape)}"
            kind += f", {self.op}"
        elif self.shape is not None:
            kind = f"{dtype}{list(self.shape)}"
            kind += "" if self.counts is None else f", counts={list(self.counts)}"
        is_rooted = self.has_root or (self.shape is not None and not self.op)
        return f"{self.collective}({kind}{f', root={self.root}' * is_rooted})"


def present(array: Array | None) -> Array:
    """Return an array that is never None in this kind of call."""
    assert array is not None
    return array


class About(NamedTuple):
    """The entries of an engine in the trace of a call.

    Attributes
    ----------
    by, algorithm : str
        The transport, and the algorithm.
    why : str
        The reason for the algorithm, if the program has not named it.
    gpu : int or None
        The GPU whose clock gives the times; None for the host.
    """

    by: str
    algorithm: str = ""
    why: str = ""
    gpu: int | None = None


class Engine(Protocol):
    """An object that executes calls."""

    def submit(self, call: Call) -> Work[None]:
        """Execute a call.

        Without ``async_op``, the result can be used afterwards, on a GPU in this thread's stream.
        """

    def about(self, call: Call) -> About:
        """Return the entries for the trace of a call."""


class HostEngine(Engine, Protocol):
    """The engine for host arrays, which every communicator has."""

    @property
    def choices(self) -> Rows:
        """The measured rows for ``algorithm="auto"``."""

    @property
    def outstanding(self) -> int:
        """The number of unfinished calls."""

    def prefer(self, rows: Rows) -> None:
        """Use rows for ``algorithm="auto"``, the same on all ranks, before the first call."""

    def warn_after(self, seconds: float, warn: Callable[[str], object]) -> None:
        """Call ``warn`` with a text about the missing ranks when a call has waited for this time."""

    def select(self, collective: _core.Collective, bytes: int) -> str:
        """Return the algorithm that "auto" chooses."""

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any], result: bool = False) -> Array:
        """Make an array in shared memory; a ``result`` only if that saves a copy."""

    def run_later(self, call: Callable[[], object]) -> Task:
        """Run a Python function in the engine's thread, after all calls so far."""

    def wait_all(self) -> None:
        """Wait until all calls are done."""

    def collect(self) -> None:
        """Release the objects of finished calls."""

    def mark_reported(self) -> None:
        """Record that the program gets the error of a call, so that closing does not raise it again."""


class GpuEngine(Engine, Protocol):
    """An engine for GPU arrays."""

    def close(self) -> None:
        """Wait for unfinished calls, and release the engine."""

    def finish(self) -> None:
        """Release the engine at the end of the process, without waiting."""

    def abandon(self) -> None:
        """Release the engine in a forked child."""


class GpuEngines(Protocol):
    """The engines for GPU arrays of one rank."""

    @property
    def to_close(self) -> Sequence[GpuEngine]:
        """The engines to close, in this order."""

    @property
    def by_streams(self) -> bool:
        """True if calls run in streams, so that the host does not wait for them."""

    def choose(self, call: Call) -> Engine:
        """Return the engine for a call."""

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any], seconds: float) -> Array | None:
        """Make an array in memory registered with NCCL; return None without such memory."""
