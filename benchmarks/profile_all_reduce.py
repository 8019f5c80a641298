"""Where one all-reduce between two processes of this host spends its time.

Run with ``pycollective run -n 2 benchmarks/profile_all_reduce.py [--sizes 8 64K 1M 16M] [--json FILE]``;
Linux. A float32 sum in place; for each size, medians of the slower rank in µs, from one run:

call      the call from Python
enter     a call of 8 bytes in a group of one: all that has nothing to do with another rank
meet      a call of 8 bytes, without that: both ranks have come, and each has read what the other brings
stage     the other's half of the array is copied to where the other can read it
reduce    the own half is added to what the other has put there, and put where the other can read it
take      the other's half of the sum is copied from there
private   the last three once more, in memory that the other process does not touch
rest      call without enter, meet, stage, reduce and take: waiting, unless both go on at once

`stage` to `take` are done by NumPy, in blocks as the library moves them, on memory of this script's own
that both processes map; they meet between the steps, outside of what is timed. So the difference
between them and `private` is what it costs that a line was last written by the other core. Arrays to
16 KiB go by another way, in which everyone reads everything: for them only the first three are told.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import pycollective as pc
from pycollective.benchmark.report import size_text
from pycollective.cli.options import size as size_of
from pycollective.communicator import Communicator

CHUNK = 128 << 10
"""Bytes that the library moves at once for each rank (`csrc/support/tuning.h`)."""
ONE_SHOT = 16 << 10
RING = 2 << 20
"""Bytes of a rank's staging, which is used round and round."""
COLUMNS = ("call", "enter", "meet", "stage", "reduce", "take", "private", "rest")


def shared_memory(comm: Communicator) -> mmap.mmap:
    """Return memory that both processes have mapped: staging for inputs and outputs of each."""
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


def time_call(comm: Communicator, size: int, seconds: float) -> float:
    """Return the median seconds of an all-reduce."""
    x = np.ones(size // 4, np.float32)
    times: list[float] = []
    begun = time.perf_counter()
    goes_on = True
    while goes_on:
        x.fill(1)  # a sum that is summed grows
        for _ in range(50):
            begin = time.perf_counter()
            comm.all_reduce(x, out=x)
            times.append(time.perf_counter() - begin)
        going = time.perf_counter() - begun < seconds
        goes_on = bool(comm.broadcast(np.array([going]))[0])
    return float(np.median(times[10:]))


def time_moves(
    comm: Communicator, memory: np.ndarray, size: int, seconds: float, apart: bool
) -> list[float]:
    """Return the median seconds of stage, reduce and take, ``apart``: each in memory of its own."""
    me, other = comm.rank, 0 if apart else 1 - comm.rank
    staging = np.zeros_like(memory) if apart else memory
    mine = 0 if apart else me
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
                np.maximum(own, inputs[other], out=own)  # as fast as a sum, which would grow
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


def profile(comm: Communicator, sizes: list[int], seconds: float) -> list[dict[str, float]]:
    """Return a row for each size, in µs."""
    memory = np.frombuffer(shared_memory(comm), np.float32).reshape(4, -1)
    alone = comm.split(comm.rank)
    assert alone is not None

    def slower(times: list[float]) -> list[float]:
        return [float(t) * 1e6 for t in comm.all_reduce(np.array(times), "max")]

    (enter,) = slower([time_call(alone, 8, seconds)])
    (short,) = slower([time_call(comm, 8, seconds)])
    rows = []
    for size in sizes:
        (call,) = slower([time_call(comm, size, seconds)])
        row = {"bytes": size, "call": call, "enter": enter, "meet": short - enter}
        if size > ONE_SHOT:
            moves = slower(time_moves(comm, memory, size, seconds, apart=False))
            row |= dict(zip(("stage", "reduce", "take"), moves, strict=True))
            row["private"] = sum(slower(time_moves(comm, memory, size, seconds, apart=True)))
        row["rest"] = row["call"] - sum(row.get(k, 0.0) for k in COLUMNS[1:6])
        rows.append(row)
    return rows


def main() -> None:
    """Measure, and print a line for each size."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--sizes", nargs="+", type=size_of, default=[8, 64 << 10, 1 << 20, 16 << 20])
    p.add_argument("--seconds", type=float, default=1.0, help="for each number (1)")
    p.add_argument("--json", type=Path, help="write the results there too")
    args = p.parse_args()
    comm = pc.init(timeout=60)
    if comm.size != 2 or len(set(comm.hosts)) != 1:
        sys.exit("two processes of one host are measured: pycollective run -n 2 ...")
    if any(size > ONE_SHOT and size % (2 * min(CHUNK, size // 2)) for size in args.sizes):
        sys.exit("sizes beyond 16 KiB are powers of two, or multiples of 256 KiB")
    rows = profile(comm, args.sizes, args.seconds)
    if comm.rank:
        return
    print(f"# float32 sum in place, 2 processes, median µs of the slower rank, {comm!r}")
    print("| | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for row in rows:
        cells = [f"{row[k]:,.{2 if row[k] < 10 else 0}f}" if k in row else "–" for k in COLUMNS]
        print(f"| {size_text(int(row['bytes']))} | " + " | ".join(cells) + " |")
    if args.json:
        args.json.write_text(json.dumps({"ranks": 2, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
