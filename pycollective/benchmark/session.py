"""A run of ``pycollective bench``: many cases on one group, the same ones on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pycollective import array_backend
from pycollective.benchmark.cases import Case, place
from pycollective.benchmark.load import OtherLoad
from pycollective.benchmark.measure import SMALLEST_LIMIT, Row, measure, memory_rate
from pycollective.communicator import Communicator, local_group

__all__ = ["Session", "on_threads"]


@dataclass(frozen=True)
class Session:
    """Cases, and how to time them.

    Attributes
    ----------
    cases : sequence of Case
        In the order of the table.
    iterations, seconds, warmup
        As of `measure`.
    """

    cases: Sequence[Case]
    iterations: int | None = None
    seconds: float = 0.3
    warmup: int = 5

    def run(
        self, comm: Communicator, on_row: Callable[[Row], None], on_wait: Callable[[str], None]
    ) -> tuple[list[Row], float | None]:
        """Time all cases as one rank.

        On rank 0 only, ``on_row`` is called with each row, and ``on_wait`` before a long one.

        Returns
        -------
        list of Row, float or None
            What was measured, and how many cores other programs used meanwhile, as `OtherLoad` says.
        """
        others = OtherLoad(comm)
        rows: list[Row] = []
        limits: dict[int, float] = {}
        seen: set[Case] = set()
        for case in self.cases:
            real = Case(**{**vars(case), "size": case.bytes})
            if real in seen:  # sizes that the ranks' parts round to the same one
                continue
            seen.add(real)
            size = case.bytes
            if size >= SMALLEST_LIMIT and size not in limits and case.device == "cpu":
                limits[size] = memory_rate(comm, size)
            with array_backend.on_device(*place(comm, case.device)):
                row = measure(
                    comm,
                    case,
                    iterations=self.iterations,
                    seconds=self.seconds,
                    warmup=self.warmup,
                    limit=limits.get(size),
                    on_wait=on_wait,
                )
            rows.append(row)
            if comm.rank == 0:
                on_row(row)
        return rows, others.cores()


def on_threads(
    session: Session, ranks: int, on_row: Callable[[Row], None], on_wait: Callable[[str], None]
) -> tuple[list[Row], float | None]:
    """Run a session on ranks that are threads of this process; return what rank 0 returns."""
    results: list[tuple[list[Row], float | None]] = []
    errors: list[BaseException] = []

    def work(comm: Communicator) -> None:
        try:
            found = session.run(comm, on_row, on_wait)
            if comm.rank == 0:
                results.append(found)
        except BaseException as error:
            errors.append(error)
            comm.abort(f"the benchmark failed on rank {comm.rank}: {error}")

    comms = local_group(ranks)
    threads = [threading.Thread(target=work, args=(comm,)) for comm in comms[1:]]
    for thread in threads:
        thread.start()
    work(comms[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results[0]
