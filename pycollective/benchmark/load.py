"""The load of other programs on the hosts of a group while the group is timed."""

from __future__ import annotations

import os
import time

import numpy as np

from pycollective.benchmark.cases import machines
from pycollective.comm import Communicator

_SHORTEST = 0.5
"""Shortest measurement in seconds: the system counts processor time in ticks of 10 ms."""
_BUSY = 0.1
"""Share of a host's cores from which on other programs disturb a measurement."""


class OtherLoad:
    """Processor time that other programs use from now on; a collective object of all ranks."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        comm.barrier()
        self._begin = _now()

    def cores(self) -> float | None:
        """Return the mean number of cores that other programs used on the busiest host.

        Return None if the time was too short, or if the system does not report it.
        """
        comm = self._comm
        comm.barrier()
        sample = np.array([os.getpid(), *(_now() - self._begin)])
        found = comm.all_gather(sample).reshape(comm.size, -1)
        used = []
        places = machines(comm)
        for host in set(places):
            ranks = [rank for rank, other in enumerate(places) if other == host]
            by_process = {row[0]: row[3] for row in found[ranks]}  # ranks may share a process
            _, seconds, busy, _ = found[ranks[0]]
            used.append((busy - sum(by_process.values())) / seconds)
        too_short = found[:, 1].min() < _SHORTEST
        return None if too_short or np.isnan(used).any() else max(0.0, *used)


def _now() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return three times in seconds: the clock, the whole host's processor time, this process's."""
    return np.array([time.monotonic(), _host_seconds(), time.process_time()])


def _host_seconds() -> float:
    """Return the processor time in seconds that all programs of this host have used, or NaN.

    Interrupts do not count, because in groups over TCP they serve the group itself.
    """
    try:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _iowait, _irq, _softirq, stolen = map(
                int, file.readline().split()[1:9]
            )
    except (OSError, ValueError):
        return float("nan")
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")


def warning(others: float | None) -> str:
    """Return a warning if this many cores disturb the measurement, else an empty string."""
    cores = os.cpu_count() or 1
    if others is None or others < _BUSY * cores:
        return ""
    return (
        f"other programs used {others:.1f} of {cores} cores during the measurement: the times are too "
        "long"
    )
