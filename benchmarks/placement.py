"""Slow phases of a run: ranks that the system puts on one core, and cores that are far apart.

    pycollective run -n 2 --bind none benchmarks/placement.py
    pycollective run -n 2 --bind cores benchmarks/placement.py

The numbers are µs of a broadcast of 1 MiB, many times one after the other. Ordinary arrays are copied
through shared memory; arrays of comm.empty() are read in place. A slow phase of both kinds means that a
rank did not run all the time. The ranks shared a core, or another process had the core. A slow
phase of ordinary arrays alone means that lines which one core has just written take long to reach
the other one.
"""

import argparse
import json
import os
import time
from statistics import median, quantiles

import numpy as np

import pycollective as pc

ITEMS, CALLS, PHASES = 1 << 18, 40, 400


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    comm = pc.init()
    arrays = {"ordinary": np.ones(ITEMS, np.float32), "comm.empty()": comm.empty(ITEMS, np.float32)}
    times: dict[str, list[float]] = {kind: [] for kind in arrays}
    for _ in range(PHASES):
        for kind, x in arrays.items():
            comm.barrier()
            began = time.perf_counter()
            for _ in range(CALLS):
                comm.broadcast(x, 0, out=x)
            comm.barrier()
            times[kind].append(1e6 * (time.perf_counter() - began) / CALLS)
    if comm.rank == 0:
        about = {
            kind: {
                "median_us": round(median(each), 1),
                "tenths_us": [round(t, 1) for t in quantiles(each, n=10)],
                "slow_phases": sum(t > 2 * min(each) for t in each) / PHASES,
            }
            for kind, each in times.items()
        }
        cores = len(os.sched_getaffinity(0))
        print(json.dumps({"cores_of_a_rank": cores, "bytes": 4 * ITEMS, **about}))
    comm.close()


if __name__ == "__main__":
    main()
