"""The cores of this host, divided among ranks.

The system may put two ranks on one core and leave another one idle: on a machine with two cores a call
then takes 3 to 30 times as long (`benchmarks/placement.py`). So launchers give each rank cores of its
own, as those of MPI do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["only_on", "shares"]

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def shares(ranks: int, cores: set[int] | None = None, topology: str = _TOPOLOGY) -> list[set[int]]:
    """Divide the cores of this process, or given ones, among ranks.

    A share is of neighbours: of one package, and of both hardware threads of a core, as far as the
    numbers in the files of ``topology`` allow. There is none where there are fewer cores than ranks, or
    where the system binds no process to cores.
    """
    if cores is None:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(cores) < ranks:
        return []

    def place(core: int) -> tuple[int, int, int]:
        return (
            _number(topology.format(core, "physical_package_id")),
            _number(topology.format(core, "core_id")),
            core,
        )

    ordered = sorted(cores, key=place)
    ends = [rank * len(ordered) // ranks for rank in range(ranks + 1)]
    return [set(ordered[begin:end]) for begin, end in itertools.pairwise(ends)]


@contextlib.contextmanager
def only_on(cores: set[int] | None) -> Iterator[None]:
    """Start processes on these cores: they inherit the affinity of the thread that starts them.

    Without cores, or where the system refuses, they have this thread's.
    """
    before: set[int] | None = None
    if cores is not None:
        before = os.sched_getaffinity(0)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, before)


def _number(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 0  # unknown, the same for all
