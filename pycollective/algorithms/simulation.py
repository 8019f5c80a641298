"""Time a schedule on a described cluster, and plot the times."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pycollective import _core
from pycollective._core import Schedule
from pycollective.algorithms.clusters import Cluster
from pycollective.arguments import whole
from pycollective.plots import mark, mark_seconds, panels, show_legend, size_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The collectives that have a root.
ROOTED = ("reduce", "broadcast", "gather", "scatter")

#: A function that is called now and then with the finished share of a long computation, 0 to 1.
Progress = Callable[[float], None]


@runtime_checkable
class Written(Protocol):
    """An algorithm that `pycollective.algorithms.algorithm` made."""

    name: str

    def schedule(self, size: int) -> Schedule:
        """Return the steps of every rank."""


@dataclass(frozen=True)
class Simulation:
    """Times of a schedule on a cluster.

    Attributes
    ----------
    algorithm, collective : str
        The schedule that was timed.
    bytes : int
        Size of a rank's buffer; if it consists of ranks' parts, of all parts.
    cluster : Cluster
        The cluster.
    seconds : float
        Time until the last rank is done.
    finish : numpy.ndarray
        Seconds until each rank is done, shape (ranks,).
    link_bytes, link_messages : tuple
        Bytes and messages that each of the cluster's links carried.
    steps : int
        Number of steps of all ranks together.
    """

    algorithm: str
    collective: str
    bytes: int
    cluster: Cluster
    seconds: float
    finish: NDArray[np.float64]
    link_bytes: tuple[float, ...]
    link_messages: tuple[int, ...]
    steps: int

    @property
    def messages(self) -> int:
        """Number of messages over all links."""
        return sum(self.link_messages)

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the buffer per second, the algbw of nccl-tests."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Least rate of a rank's link in bytes per second, the busbw of nccl-tests."""
        n = self.cluster.ranks
        if self.collective == "all_reduce":
            return self.algorithm_bandwidth * 2 * (n - 1) / n
        if self.collective in ("broadcast", "reduce"):
            return self.algorithm_bandwidth
        return self.algorithm_bandwidth * (n - 1) / n

    def show(self) -> str:
        """Return the times and the traffic as text."""
        first, last = float(self.finish.min()), float(self.finish.max())
        lines = [
            f"{self.algorithm} {self.collective} of {self.bytes:,} bytes among "
            f"{self.cluster.ranks:,} ranks ({self.cluster.name})",
            f"time {_seconds(self.seconds)}, bus bandwidth {self.bus_bandwidth / 1e9:.3f} GB/s",
            f"ranks are done after {_seconds(first)} to {_seconds(last)}",
        ]
        counts = zip(self.link_bytes, self.link_messages, strict=True)
        lines += [
            f"link {i}: {messages:,} messages, {moved:,.0f} bytes"
            for i, (moved, messages) in enumerate(counts)
        ]
        return "\n".join(lines)


def _seconds(value: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= unit:
            return f"{value / unit:.4g} {name}"
    return f"{value * 1e6:.4g} µs"


def simulate(
    what: str | Written | Schedule,
    size_or_cluster: int | Cluster,
    bytes: int,
    collective: str = "all_reduce",
    *,
    root: int = 0,
    segment_bytes: int | None = None,
    progress: Progress | bool = True,
) -> Simulation:
    """Time a schedule on a cluster, without running it.

    The model is LogGP's with several classes of links. ``docs/explanation/simulator.md`` describes
    the model and its limits, ``csrc/schedule/simulate.h`` the rules. Memory grows only with the ranks
    and with the messages under way, so that 10,000 ranks and more can be timed.

    Parameters
    ----------
    what : str, Algorithm or Schedule
        The name of an algorithm, an `Algorithm`, or a schedule. "hierarchical" uses the cluster's hosts.
    size_or_cluster : int or Cluster
        The cluster; a number n means n hosts of `Cluster.ethernet_10g`.
    bytes : int
        Size of a rank's buffer; if it consists of ranks' parts, of all parts (as in nccl-tests).
        Ignored by a barrier.
    collective : str
        The collective of a named algorithm.
    root : int
        The root of a reduce, broadcast, gather or scatter. Schedules are written for root 0; for another
        root the ranks are renumbered, as in calls.
    segment_bytes : int, optional
        Most bytes of a chunk that move at once; the executor's default if None.
    progress : bool or callable
        True: show a bar if the simulation takes long, tqdm is installed, and stderr is a terminal.
        A callable: call ``progress(share)`` now and then.

    Raises
    ------
    ValueError
        The schedule's sends and receives do not match or deadlock, or the cluster, the root or
        ``bytes`` is not valid. Or no algorithm or collective has this name. The text names ranks as
        for root 0.
    TypeError
        ``what`` is not an algorithm, or a number is not a whole number.

    Examples
    --------
    >>> from pycollective.algorithms import Cluster, Link, simulate
    >>> cluster = Cluster.flat(4, Link(latency=1e-6, bandwidth=1e9))
    >>> print(f"{simulate('ring', cluster, 4_096_000).seconds:.5f}")  # 6 rounds of 1.024 ms + 1 µs
    0.00615
    """
    cluster = size_or_cluster
    if not isinstance(cluster, Cluster):
        cluster = Cluster.ethernet_10g(whole("size_or_cluster", cluster))
    bytes, root = whole("bytes", bytes, 0, sys.maxsize), whole("root", root)
    made: str | Schedule
    if isinstance(what, Written):
        name, made = what.name, what.schedule(cluster.ranks)
        kind = made.collective
    elif isinstance(what, Schedule):
        name, made, kind = "schedule", what, what.collective
    else:
        name, made, kind = what, checked_name(what), collective_of(collective)
        if (name, kind) == ("hierarchical", _core.Collective.all_reduce):
            made = _core.make_hierarchical(cluster.hosts)
    if kind == _core.Collective.barrier:
        bytes = 0
    if root and kind.name not in ROOTED:
        raise ValueError(f"{kind.name} has no root, but root={root} was given")
    if root and not 0 <= root < cluster.ranks:
        raise ValueError(f"root {root} is not among the {cluster.ranks} ranks")
    links = [
        (k.latency, k.bandwidth, k.overhead, k.sender_copies, k.receiver_copies, k.shared)
        for k in cluster.links
    ]
    with watching(progress, f"simulate {name}") as watch:
        seconds, finish, moved, messages, steps = _core.simulate(
            kind,
            made,
            bytes,
            _core.SEGMENT_BYTES if segment_bytes is None else whole("segment_bytes", segment_bytes),
            cluster.ranks,
            # Rank i of the schedule is rank root + i of the cluster.
            [[*level[root:], *level[:root]] for level in cluster.places],
            links,
            cluster.reduce_rate,
            cluster.copy_rate,
            cluster.call_overhead,
            cluster.cores,
            watch,
        )
    return Simulation(
        name,
        kind.name,
        bytes,
        cluster,
        seconds,
        np.roll(finish, root),
        tuple(moved),
        tuple(messages),
        steps,
    )


@contextmanager
def watching(progress: Progress | bool, what: str) -> Iterator[Progress | None]:
    """Yield the function to call with progress: the caller's, or a bar that appears after a second."""
    if callable(progress):
        yield progress
        return
    try:
        from tqdm import tqdm
    except ImportError:
        progress = False
    if not progress or not sys.stderr.isatty():
        yield None
        return
    begin, bar = time.monotonic(), None

    def watch(share: float) -> None:
        nonlocal bar
        if bar is None and time.monotonic() - begin > 1:
            bar = tqdm(total=1.0, desc=what, leave=False, bar_format="{l_bar}{bar}| {remaining}")
        if bar is not None:
            bar.update(share - bar.n)

    try:
        yield watch
    finally:
        if bar is not None:
            bar.close()


def plot(
    algorithms: Sequence[str | Written],
    cluster: Callable[[int], Cluster],
    *,
    ranks: Sequence[int],
    sizes: Sequence[int],
    collective: str = "all_reduce",
    file: str | Path | None = None,
) -> Figure:
    """Plot simulated times against the size (for the most ranks) and against the number of ranks.

    The function needs matplotlib (``pip install 'pycollective[plot]'``), and no display.

    Parameters
    ----------
    algorithms : sequence of str or Algorithm
        The algorithms to compare.
    cluster : callable
        ``cluster(ranks)`` returns the cluster; `Cluster.ethernet_10g` is one such function.
    ranks, sizes : sequences of int
        Numbers of ranks, and sizes in bytes, both rising. The plot against ranks is for the largest
        size. A sequence of one value gives no plot, unless both sequences have one value.
    collective : str
        The collective of named algorithms.
    file : str or path, optional
        File for the picture: ``.png``, ``.svg`` or ``.pdf``.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        matplotlib is not installed.
    TypeError
        ``algorithms`` is no sequence, or ``cluster`` is no function.
    ValueError
        A sequence is empty, or `simulate` raises the error.
    """
    if isinstance(algorithms, str) or not isinstance(algorithms, Sequence):
        raise TypeError(f"plot needs a list of algorithms, not {algorithms!r}")
    if not callable(cluster):
        raise TypeError(
            f"plot needs a function of the number of ranks, not the cluster {cluster!r}"
        )
    if not algorithms or not ranks or not sizes:
        raise ValueError("plot needs at least one algorithm, one number of ranks and one size")
    points = [(n, sizes[-1]) for n in ranks[:-1]] + [(ranks[-1], size) for size in sizes]
    curves = [
        [simulate(what, cluster(n), size, collective, progress=False) for n, size in points]
        for what in algorithms
    ]
    return draw_times(curves, file)


def draw_times(curves: Sequence[Sequence[Simulation]], file: str | Path | None) -> Figure:
    """Plot simulated times, one line for each curve; see `plot`."""
    every = [each for curve in curves for each in curve]
    ranks = {each.cluster.ranks for each in every}
    sizes = {each.bytes for each in every} - {0}  # a barrier has none
    most = max(ranks)
    parts: list[tuple[str, str, list[list[tuple[int, float]]]]] = []
    if len(sizes) > 1 or (sizes and len(ranks) == 1):
        found = [
            [(s.bytes, s.seconds) for s in c if s.bytes and s.cluster.ranks == most] for c in curves
        ]
        parts.append(("bytes", f"{most:,} ranks", found))
    if len(ranks) > 1 or not sizes:
        largest = max(sizes, default=0)
        found = [
            [(s.cluster.ranks, s.seconds) for s in c if s.bytes in (0, largest)] for c in curves
        ]
        parts.append(("ranks", size_text(largest), found))
    figure, every_axes = panels(len(parts), 6.4, 4.8)
    collectives = {curve[0].collective for curve in curves}
    for axes, (label, fixed, lines) in zip(every_axes, parts, strict=True):
        for curve, line in zip(curves, lines, strict=True):
            name = curve[0].algorithm
            if len(collectives) > 1:
                name = f"{curve[0].collective}, {name}"
            axes.plot([x for x, _ in line], [y for _, y in line], marker=".", label=name)
        axes.set_title(f"{', '.join(sorted(collectives))}, {every[0].cluster.name}, {fixed}")
        mark(axes, label, [value for line in lines for value, _ in line])
        mark_seconds(axes)
    show_legend(figure, *every_axes[0].get_legend_handles_labels())
    if file is not None:
        figure.savefig(file)
    return figure


def collective_of(name: str) -> _core.Collective:
    """Return a collective by name."""
    if isinstance(name, str) and name in _core.Collective.__members__:
        return _core.Collective.__members__[name]  # type: ignore[no-any-return]
    known: Any = ", ".join(_core.Collective.__members__)
    raise ValueError(f"no collective is called {name!r}; the collectives are {known}")


def checked_name(what: Any) -> str:
    """Return an algorithm's name; raise TypeError if it is not a string."""
    if isinstance(what, str):
        return what
    raise TypeError(
        "an algorithm is a name from pycollective.algorithms.names(), or a function decorated with "
        f"pycollective.algorithms.algorithm, not {what!r}"
    )
