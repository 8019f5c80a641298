"""Compare the simulator with the machine: all-reduce predicted and measured, by threads and processes.

For each transport, number of ranks and size, several turns are made. In a turn, the costs of a message,
a copy and a reduction are measured first. Then every all-reduce algorithm is simulated with these costs,
and timed (float32 sums in place, the median of the slowest rank). The best turn of each counts. Threads
run inside the core. Processes are started by `pycollective run`, and call from Python.

The latency comes from ring and reduce_to_one at 64 bytes a rank. Over TCP, the bandwidth comes from a
message from rank 0 to rank 1 and back. For processes, the overhead comes from a call of a rank alone.
Everything else is a prediction.

    python benchmarks/simulator.py [--transports threads,shm,tcp] [--ranks 2,3,4,8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pycollective
from pycollective import algorithms
from pycollective._core import measure_all_reduce
from pycollective.algorithms import Cluster, Link, simulate
from pycollective.benchmark import Case, measure
from pycollective.cli.options import this_program
from pycollective.comm import Communicator

SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 32 << 20)
NAMES = algorithms.names("all_reduce")


def names_over(transport: str) -> list[str]:
    """Return the algorithms whose schedule runs; with shared memory, `direct` uses another path."""
    return [name for name in NAMES if transport == "tcp" or name != "direct"]


# Threads ----------------------------------------------------------------------------------------


def time_threads(name: str, ranks: int, size: int) -> float:
    iterations = max(5, min(500, (128 << 20) // (size * ranks + (256 << 10))))
    return float(np.median(measure_all_reduce(name, ranks, size, iterations)))


# Processes: every rank makes the same calls of these functions -----------------------------------


def time_processes(comm: Communicator, name: str, size: int) -> float:
    case = Case("all_reduce", size, comm.size, algorithm=name)
    return measure(comm, case, seconds=0.1).p50_us * 1e-6


def alone() -> float:
    """Return the seconds of a call that moves nothing, by a single rank."""
    (comm,) = pycollective.local_group(1)
    x, times = np.ones(16, np.float32), np.empty(500)
    for i in range(len(times)):
        begin = time.perf_counter()
        comm.all_reduce(x, out=x, algorithm="ring")
        times[i] = time.perf_counter() - begin
    return float(np.median(times))


def there_and_back(comm: Communicator, size: int) -> float:
    """Return the seconds of a message from rank 0 to rank 1 and back, on all ranks."""
    x, times = np.ones(max(1, size // 4), np.float32), np.empty(20)
    for i in range(len(times)):
        comm.barrier()
        begin = time.perf_counter()
        if comm.rank == 0:
            comm.send(x, 1)
            comm.recv(x, 1)
        elif comm.rank == 1:
            comm.recv(x, 0)
            comm.send(x, 0)
        times[i] = time.perf_counter() - begin
    return float(comm.broadcast(np.median(times)))


def group_as_cluster(comm: Communicator, size: int, tcp: bool) -> Cluster:
    """Describe this group as rank 0 measures it; other ranks' results are not used."""
    link = Link(0.0, sender_copies=True, receiver_copies=True)
    if tcp:  # both ends copy while a message is on its way
        part = max(size // comm.size, 64 << 10)
        seconds = (there_and_back(comm, part) - there_and_back(comm, 4)) / 2
        link = Link(0.0, bandwidth=part / max(seconds, 1e-9))
    times = {
        (name, bytes): time_processes(comm, name, bytes)
        for name, bytes in (("ring", 64 * comm.size), ("reduce_to_one", 64))
    }
    overhead = alone() if comm.rank == 0 else 0.0
    comm.barrier()
    if comm.rank == 0:  # while the others sleep
        cluster = Cluster.fitted(
            comm.size, size, lambda name, bytes: times[name, bytes], link, overhead
        )
    else:
        cluster = Cluster.flat(comm.size, link)
    comm.barrier()
    return cluster


def rank_of_processes(transport: str, turns: int, sizes: list[int]) -> None:
    """Measure as one rank; rank 0 prints the results of all sizes as a line of JSON."""
    comm = pycollective.init()
    found = [
        in_turns(
            transport,
            comm.size,
            size,
            turns,
            lambda size=size: group_as_cluster(comm, size, transport == "tcp"),
            lambda name, size=size: time_processes(comm, name, size),
        )
        for size in sizes
    ]
    if comm.rank == 0:
        print("RESULT " + json.dumps(found), flush=True)


# Predictions beside measurements ----------------------------------------------------------------


def described(cluster: Cluster, size: int) -> dict[str, float | None]:
    link = cluster.links[0]
    return {
        "ranks": cluster.ranks,
        "bytes": size,
        "latency_us": link.latency * 1e6,
        "overhead_us": link.overhead * 1e6,
        "call_us": cluster.call_overhead * 1e6,
        "link_gb_s": link.bandwidth / 1e9 if math.isfinite(link.bandwidth) else None,
        "reduce_gb_s": cluster.reduce_rate / 1e9,
        "copy_gb_s": cluster.copy_rate / 1e9,
    }


def in_turns(
    transport: str,
    ranks: int,
    size: int,
    turns: int,
    cluster_of: Callable[[], Cluster],
    time_of: Callable[[str], float],
) -> dict[str, Any]:
    """Predict and measure all algorithms."""
    names = names_over(transport)
    predictions: dict[str, list[float]] = {name: [] for name in names}
    real: dict[str, list[float]] = {name: [] for name in names}
    clusters = []
    for _ in range(turns):
        cluster = cluster_of()
        clusters.append(described(cluster, size))
        for name in names:
            predictions[name].append(simulate(name, cluster, size).seconds * 1e6)
            real[name].append(time_of(name) * 1e6)
    rows = [
        {
            "ranks": ranks,
            "bytes": size,
            "algorithm": name,
            "predicted_us": min(predictions[name]),
            "measured_us": min(real[name]),
            "ratio": min(predictions[name]) / min(real[name]),
        }
        for name in names
    ]
    return {"rows": rows, "clusters": clusters}


def of_threads(ranks: int, turns: int, sizes: list[int]) -> list[dict[str, Any]]:
    return [
        in_turns(
            "threads",
            ranks,
            size,
            turns,
            lambda size=size: Cluster.this_machine(ranks, size),
            lambda name, size=size: time_threads(name, ranks, size),
        )
        for size in sizes
    ]


def of_processes(transport: str, ranks: int, turns: int, sizes: list[int]) -> list[dict[str, Any]]:
    words = ["--as-rank", transport, "--turns", str(turns), "--sizes", ",".join(map(str, sizes))]
    run = this_program("run", "-n", str(ranks), "--transport", transport)
    command = [*run, "--", sys.executable, __file__, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "RESULT " in line]
    found: list[dict[str, Any]] = json.loads(line.split("RESULT ", 1)[1])
    return found


def print_accuracy(rows: list[dict[str, Any]]) -> None:
    off = np.exp([abs(math.log(row["ratio"])) for row in rows])
    keys = sorted({(row["ranks"], row["bytes"]) for row in rows})
    right = 0
    for key in keys:
        here = [row for row in rows if (row["ranks"], row["bytes"]) == key]
        chosen = min(here, key=lambda row: row["predicted_us"])
        best = min(row["measured_us"] for row in here)
        right += chosen["measured_us"] <= 1.1 * best
    print(
        f"# off by a factor of {np.median(off):.2f} in the median, {np.percentile(off, 90):.2f} at the "
        f"90th percentile, {off.max():.2f} at most; the algorithm predicted to be the fastest is within "
        f"10 % of the fastest in {right} of {len(keys)} cases"
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--transports", default="threads", help="of threads, shm, tcp (threads)")
    p.add_argument("--ranks", type=numbers, default=[2, 3, 4, 8], help="numbers of ranks (2,3,4,8)")
    p.add_argument("--sizes", type=numbers, default=list(SIZES), help="bytes (1 KiB to 32 MiB)")
    p.add_argument("--turns", type=int, default=5, help="turns of each measurement (5)")
    p.add_argument("--json", type=Path, help="write the results there too")
    p.add_argument("--as-rank", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.as_rank:
        rank_of_processes(args.as_rank, args.turns, args.sizes)
        return
    rows, clusters = [], []
    for transport in args.transports.split(","):
        print(f"# float32 sum in place, {transport}, µs: predicted / measured (ratio)")
        of_transport: list[dict[str, Any]] = []
        for ranks in args.ranks:
            print(f"# {ranks} ranks {'':>6} " + " ".join(f"{n:>25}" for n in names_over(transport)))
            if transport == "threads":
                found = of_threads(ranks, args.turns, args.sizes)
            else:
                found = of_processes(transport, ranks, args.turns, args.sizes)
            for size, one in zip(args.sizes, found, strict=True):
                cells = [
                    f"{row['predicted_us']:9.1f} /{row['measured_us']:9.1f} ({row['ratio']:4.2f})"
                    for row in one["rows"]
                ]
                print(f"  {size:>15} " + " ".join(f"{cell:>25}" for cell in cells), flush=True)
                of_transport += one["rows"]
                clusters += [{"transport": transport, **cluster} for cluster in one["clusters"]]
        print_accuracy(of_transport)
        rows += [{"transport": transport, **row} for row in of_transport]
    if args.json:
        report = {"clusters": clusters, "results": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
