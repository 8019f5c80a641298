"""Measure the overhead of the executor: the ring's schedule, beside the same ring written as a loop.

All ways run in turns in the same process, on threads inside the core, without Python in the timed part.
Each way is checked before it is timed. Numbers are medians of the slowest rank. The ratio is the median
of the ratios of neighbouring turns, so that changes of the machine's speed do not affect it.

    python benchmarks/executor_overhead.py [--ranks 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from pycollective._core import measure_all_reduce

WAYS = ("executor", "plain_ring", "plain_loop")


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--ranks", type=int, default=2, help="threads (2)")
    p.add_argument("--turns", type=int, default=7, help="turns of each way (7)")
    p.add_argument("--json", type=Path, help="write the results there too")
    args = p.parse_args()
    print(f"# float32 sum in place, {args.ranks} threads, median µs of the slowest rank")
    print(f"# {'bytes':>10} {'executor':>10} {'plain ring':>11} {'plain loop':>11} {'/ ring':>7}")
    rows = []
    for size in (8, 64, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20):
        iterations = max(10, min(5000, (64 << 20) // (size + 4096)))
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.turns):
            for way in WAYS:
                times = measure_all_reduce(way, args.ranks, size, iterations)
                seconds[way].append(float(np.median(times)))
        median = {way: float(np.median(s)) * 1e6 for way, s in seconds.items()}
        ratio = float(np.median(np.divide(seconds["executor"], seconds["plain_ring"])))
        rows.append({"bytes": size, **{f"{w}_us": t for w, t in median.items()}, "ratio": ratio})
        print(
            f"  {size:>10} {median['executor']:>10.2f} {median['plain_ring']:>11.2f} "
            f"{median['plain_loop']:>11.2f} {ratio:>7.2f}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps({"ranks": args.ranks, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
