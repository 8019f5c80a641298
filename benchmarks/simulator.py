"""The simulator beside the machine: all-reduce among threads, predicted and measured.

For each number of ranks and each size, in several turns: `Cluster.this_machine` measures what a message,
a copy and a reduction cost; every all-reduce algorithm is simulated with that, and timed for real
(float32 sums in place, on threads inside the core, the median of the slowest rank). Of both the best
turn counts. Ring and reduce_to_one at 64 bytes a rank are what the latency is taken from, everything
else is a prediction.

    python benchmarks/simulator.py [--ranks 2,3,4,8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from pycollective import algorithms
from pycollective._core import measure_all_reduce
from pycollective.algorithms import Cluster, simulate

SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 32 << 20)


def measured(name: str, ranks: int, size: int) -> float:
    iterations = max(5, min(500, (128 << 20) // (size * ranks + (256 << 10))))
    return float(np.median(measure_all_reduce(name, ranks, size, iterations)))


def described(cluster: Cluster, size: int) -> dict[str, float]:
    link = cluster.links[0]
    return {
        "ranks": cluster.ranks,
        "bytes": size,
        "latency_us": link.latency * 1e6,
        "overhead_us": link.overhead * 1e6,
        "reduce_gb_s": cluster.reduce_rate / 1e9,
        "copy_gb_s": cluster.copy_rate / 1e9,
    }


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--ranks", default="2,3,4,8", help="numbers of threads (2,3,4,8)")
    p.add_argument("--turns", type=int, default=5, help="turns of each measurement (5)")
    p.add_argument("--json", type=Path, help="write the results there too")
    args = p.parse_args()
    print("# float32 sum in place among threads, µs: predicted / measured (ratio)")
    rows, clusters = [], []
    for ranks in map(int, args.ranks.split(",")):
        names = algorithms.names("all_reduce")
        print(f"# {ranks} ranks {'':>6} " + " ".join(f"{name:>25}" for name in names))
        for size in SIZES:
            predictions: dict[str, list[float]] = {name: [] for name in names}
            real: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(args.turns):
                cluster = Cluster.this_machine(ranks, size)
                clusters.append(described(cluster, size))
                for name in names:
                    predictions[name].append(simulate(name, cluster, size).seconds * 1e6)
                    real[name].append(measured(name, ranks, size) * 1e6)
            cells = []
            for name in names:
                row = {
                    "ranks": ranks,
                    "bytes": size,
                    "algorithm": name,
                    "predicted_us": min(predictions[name]),
                    "measured_us": min(real[name]),
                    "ratio": min(predictions[name]) / min(real[name]),
                }
                rows.append(row)
                cells.append(
                    f"{row['predicted_us']:9.1f} /{row['measured_us']:9.1f} ({row['ratio']:4.2f})"
                )
            print(f"  {size:>15} " + " ".join(f"{cell:>25}" for cell in cells), flush=True)
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
        f"90th percentile, {off.max():.2f} at most; the algorithm that it would choose is within 10 % "
        f"of the fastest in {right} of {len(keys)} cases"
    )
    if args.json:
        report = {"clusters": clusters, "results": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
