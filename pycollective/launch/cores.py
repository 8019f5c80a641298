"""The cores of this host, divided among ranks.

The system may put two ranks on one core and leave another core idle, which makes calls several times
slower (`benchmarks/placement.py`). Launchers therefore give each rank its own cores, as those of MPI do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def shares(ranks: int, cores: set[int] | None = None, topology: str = _TOPOLOGY) -> list[set[int]]:
    """Divide the cores of this process, or given ones, among ranks.

    The cores of a share are neighbours: if possible, they are of one package, and a share has both
    hardware threads of a core. The files of ``topology`` have the numbers of packages and cores. The
    result is empty if there are fewer cores than ranks, or if the system cannot bind processes to cores.
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
    """Run processes that the context starts on these cores.

    A process inherits the affinity of the thread that starts it. That affinity stays as it is if
    ``cores`` is None or the system refuses.
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
        return 0  # unknown: equal for all cores
