"""Measure the parts of an all-reduce between ranks of this host.

    pycollective run -n 2 benchmarks/profile_all_reduce.py [--registered] [--sizes 8 64K] [--json FILE]
    python benchmarks/profile_all_reduce.py --threads 4

Needs Linux. The call is a float32 sum in place. For each size, one run gives medians of the slowest rank
in µs:

call : the call from Python.
busy : the processor time of a rank in the mean call. In the rest the rank sleeps, or has no core.
sleeps : number of times in a call that a rank goes to sleep to wait for others.
pushed : number of times in a call that a rank loses its core to another thread.

For two processes with plain arrays, the parts of a call are measured too:

enter : a call of 8 bytes in a group of one, which does not involve another rank.
meet : a call of 8 bytes, without `enter`: both ranks arrive, and each reads the other's data.
stage : copy the peer's half of the array to memory that the peer can read.
reduce : add the peer's staged half to this rank's half, and put the sum where the peer can read it.
take : copy the peer's half of the sum from there.
private : the last three again, in memory that the other process does not touch.
rest : the call without enter, meet, stage, reduce and take: waiting, unless both ranks run concurrently.

NumPy makes the steps `stage` to `take`, in blocks of the library's size, on this script's own memory,
which both processes map. A barrier, which is not timed, separates the steps. The difference to `private`
is therefore the cost of lines that the other core wrote last. Arrays up to 16 KiB are exchanged in
another way, in which every rank reads everything: they have no `stage`, `reduce`, `take` and `private`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import pycollective as pc
from pycollective.cli.options import size as size_of
from pycollective.comm import Communicator
from pycollective.plots import size_text

CHUNK = 128 << 10
"""Bytes that the library moves at once for each rank (`csrc/support/tuning.h`)."""
ONE_SHOT = 16 << 10
"""Most bytes of an array that every rank reads whole (`csrc/support/tuning.h`)."""
RING = 2 << 20
"""Bytes of a rank's staging buffer, which is used as a ring."""
WAITING = ("call", "busy", "sleeps", "pushed")
PARTS = ("enter", "meet", "stage", "reduce", "take", "private", "rest")


def shared_memory(comm: Communicator) -> mmap.mmap:
    """Return memory that both processes map: a staging buffer for each one's inputs and outputs."""
    if comm.rank == 0:
        number = os.memfd_create("profile")
        os.ftruncate(number, 4 * RING)
        comm.broadcast(np.array([os.getpid(), number]))
    else:
        process, there = comm.broadcast(np.zeros(2, np.int64))
        number = os.open(f"/proc/{process}/fd/{there}", os.O_RDWR)
    memory = mmap.mmap(number, 4 * RING)
    comm.barrier()
    os.close(number)
    return memory


def time_call(
    comm: Communicator, size: int, seconds: float, registered: bool = False
) -> dict[str, float]:
    """Return the median µs of an all-reduce, and this rank's counters for the mean call."""
    x = comm.empty((size // 4,), np.float32) if registered else np.empty(size // 4, np.float32)
    times: list[float] = []
    totals = np.zeros(3)
    calls, known, begun = 3, False, time.perf_counter()
    goes_on = True
    while goes_on:
        x.fill(1)  # repeated sums would grow without limit
        comm.barrier()
        before, busy = resource.getrusage(resource.RUSAGE_THREAD), time.thread_time()
        for _ in range(calls):
            begin = time.perf_counter()
            comm.all_reduce(x, out=x)
            times.append(time.perf_counter() - begin)
        used, after = time.thread_time() - busy, resource.getrusage(resource.RUSAGE_THREAD)
        if not known:
            assert (x == comm.size**calls).all(), "the sum is wrong"
            known, times = True, [float(np.median(times))]
            calls = int(comm.broadcast(np.array([np.clip(0.1 / times.pop(), 3, 50)]))[0])
        else:
            totals += used, after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw
        going = time.perf_counter() - begun < seconds or not times
        goes_on = bool(comm.broadcast(np.array([going]))[0])
    busy, sleeps, pushed = totals / len(times)
    return {"call": np.median(times) * 1e6, "busy": busy * 1e6, "sleeps": sleeps, "pushed": pushed}


def time_moves(
    comm: Communicator, memory: np.ndarray, size: int, seconds: float, private: bool
) -> list[float]:
    """Return the median seconds of stage, reduce and take; with ``private``, each in its own memory."""
    me, other = comm.rank, 0 if private else 1 - comm.rank
    staging = np.zeros_like(memory) if private else memory
    mine = 0 if private else me
    x = np.ones(size // 4, np.float32)
    half = min(CHUNK, size // 2) // 4
    steps: list[list[float]] = []
    begun = time.perf_counter()
    goes_on = True
    turn = 0
    while goes_on:
        sums = [0.0] * 3
        for first in range(0, len(x) - 2 * half + 1, 2 * half):
            place = turn * half % (RING // 4 - half)
            turn += 1
            inputs, outputs = staging[:2, place : place + half], staging[2:, place : place + half]
            own = x[first + me * half :][:half]
            others = x[first + (1 - me) * half :][:half]

            def reduce(own=own, inputs=inputs, outputs=outputs) -> None:
                np.maximum(own, inputs[other], out=own)  # as fast as a sum, but does not grow
                np.copyto(outputs[mine], own)

            todo: tuple[Callable[[], None], ...] = (
                lambda inputs=inputs, others=others: np.copyto(inputs[mine], others),
                reduce,
                lambda outputs=outputs, others=others: np.copyto(others, outputs[other]),
            )
            for i, step in enumerate(todo):
                comm.barrier()
                begin = time.perf_counter()
                step()
                sums[i] += time.perf_counter() - begin
        steps.append(sums)
        going = time.perf_counter() - begun < seconds or len(steps) < 5
        goes_on = bool(comm.broadcast(np.array([going]))[0])
    return [float(m) for m in np.median(steps[1:], axis=0)]


def profile(
    comm: Communicator, sizes: list[int], seconds: float, registered: bool = False
) -> list[dict[str, float]]:
    """Return a row for each size."""

    def slowest(row: dict[str, float]) -> dict[str, float]:
        return dict(
            zip(row, comm.all_reduce(np.array([*row.values()]), "max").tolist(), strict=True)
        )

    rows = [
        {"bytes": size, **slowest(time_call(comm, size, seconds, registered))} for size in sizes
    ]
    processes = comm.broadcast(np.array([os.getpid()]))[0] != os.getpid() or not comm.rank
    if comm.size == 2 and not registered and all(comm.all_gather(np.array([processes]))):
        memory = np.frombuffer(shared_memory(comm), np.float32).reshape(4, -1)
        alone = comm.split(comm.rank)
        assert alone is not None
        enter = slowest(time_call(alone, 8, seconds))["call"]
        meet = slowest(time_call(comm, 8, seconds))["call"] - enter
        for row in rows:
            add_parts(comm, memory, row, seconds, enter, meet)
    return rows


def add_parts(
    comm: Communicator,
    memory: np.ndarray,
    row: dict[str, float],
    seconds: float,
    enter: float,
    meet: float,
) -> None:
    """Add the parts of a call between two processes to a row."""

    def slower(private: bool) -> list[float]:
        times = time_moves(comm, memory, int(row["bytes"]), seconds, private)
        return [t * 1e6 for t in comm.all_reduce(np.array(times), "max").tolist()]

    row |= {"enter": enter, "meet": meet}
    if row["bytes"] > ONE_SHOT:
        row |= dict(zip(("stage", "reduce", "take"), slower(private=False), strict=True))
        row["private"] = sum(slower(private=True))
    row["rest"] = row["call"] - sum(row.get(k, 0.0) for k in PARTS[:5])


def among_threads(ranks: int, sizes: list[int], seconds: float) -> list[dict[str, float]]:
    """Return the rows of ranks that are threads of this process."""
    rows: list[list[dict[str, float]]] = [[] for _ in range(ranks)]

    def work(comm: Communicator) -> None:
        rows[comm.rank] = profile(comm, sizes, seconds)

    threads = [threading.Thread(target=work, args=(c,)) for c in pc.local_group(ranks, timeout=60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows[0]


def main() -> None:
    """Measure all sizes, and print a line for each."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--sizes", nargs="+", type=size_of, default=[8, 64 << 10, 1 << 20, 16 << 20])
    p.add_argument("--seconds", type=float, default=1.0, help="for each number (1)")
    p.add_argument("--registered", action="store_true", help="arrays of comm.empty()")
    p.add_argument("--threads", type=int, help="number of ranks, as threads of this process")
    p.add_argument("--json", type=Path, help="write the results there too")
    args = p.parse_args()
    if any(size > ONE_SHOT and size % (2 * min(CHUNK, size // 2)) for size in args.sizes):
        sys.exit("sizes beyond 16 KiB must be powers of two, or multiples of 256 KiB")
    if args.threads:
        ranks, kind = args.threads, "threads"
        rows = among_threads(ranks, args.sizes, args.seconds)
    else:
        comm = pc.init(timeout=60)
        if comm.size < 2 or len(set(comm.hosts)) != 1:
            sys.exit(
                "several ranks of one host are measured: pycollective run -n 2 ..., or --threads 2"
            )
        ranks, kind = comm.size, "processes"
        rows = profile(comm, args.sizes, args.seconds, args.registered)
        if comm.rank:
            return
    columns = [k for k in WAITING + PARTS if k in rows[-1]]
    memory = ", arrays of comm.empty()" if args.registered else ""
    print(f"# float32 sum in place, {ranks} {kind}{memory}, µs of the slowest rank")
    print("| | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for row in rows:
        cells = [f"{row[k]:,.{2 if row[k] < 10 else 0}f}" if k in row else "–" for k in columns]
        print(f"| {size_text(int(row['bytes']))} | " + " | ".join(cells) + " |")
    if args.json:
        what = {"ranks": ranks, "kind": kind, "registered": args.registered, "results": rows}
        args.json.write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
