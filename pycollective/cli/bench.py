"""``pycollective bench``: time all-reduce, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import json
import platform
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from pycollective import __version__, algorithms, local_group
from pycollective.cli import options
from pycollective.communicator import Communicator

__all__ = ["add_parser"]

_DESCRIPTION = """\
Time all-reduce of growing arrays among ranks that are threads of this process.

The columns are those of nccl-tests. time: the median over the iterations of the slowest rank's time
in the Python call; algbw: size / time; busbw: algbw × 2(n-1)/n, which does not depend on the number
of ranks and can be compared with the speed of the memory; #wrong: elements of the result that differ
from the exact one (always checked, before the timing).
"""

_EPILOG = """\
examples:
  pycollective bench                               8 B to 16 MiB, 2 ranks, ring
  pycollective bench --ranks 4 --algorithm all     every algorithm, 4 ranks
  pycollective bench -b 64K -e 64M -f 4 -d float64
  pycollective bench --json results.json           also as JSON, with all percentiles
"""


def add_parser(commands: Any) -> None:
    """Add this command to the command line."""
    p = commands.add_parser(
        "bench",
        help="time all-reduce",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "-b", "--min-bytes", type=options.size, default=8, metavar="SIZE", help="first size (8)"
    )
    p.add_argument(
        "-e",
        "--max-bytes",
        type=options.size,
        default=16 << 20,
        metavar="SIZE",
        help="last size (16M)",
    )
    p.add_argument(
        "-f",
        "--factor",
        type=options.positive,
        default=4,
        metavar="N",
        help="from size to size (4)",
    )
    p.add_argument(
        "-n",
        "--iterations",
        type=options.positive,
        default=100,
        metavar="N",
        help="timed calls (100)",
    )
    p.add_argument(
        "-w",
        "--warmup",
        type=options.positive,
        default=5,
        metavar="N",
        help="calls before those (5)",
    )
    p.add_argument("--ranks", type=options.positive, default=2, metavar="N", help="threads (2)")
    p.add_argument(
        "--algorithm",
        default="ring",
        choices=[*algorithms.names("all_reduce"), "auto", "all"],
        help="which schedule (ring)",
    )
    p.add_argument(
        "-d",
        "--datatype",
        default="float32",
        choices=["float32", "float64", "int32", "int64"],
        help="element type (float32)",
    )
    p.add_argument(
        "-o",
        "--op",
        default="sum",
        choices=["sum", "min", "max", "prod", "mean"],
        help="reduction (sum)",
    )
    p.add_argument("--out-of-place", action="store_true", help="into another array (in place)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    p.set_defaults(function=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; status 1 when a result was wrong."""
    if args.factor < 2:
        raise SystemExit("pycollective bench: -f must be at least 2")
    item = np.dtype(args.datatype).itemsize
    if args.min_bytes < item or args.max_bytes < args.min_bytes:
        raise SystemExit(
            f"pycollective bench: sizes must grow from at least {item} bytes, not from "
            f"{args.min_bytes} to {args.max_bytes}"
        )
    chosen = algorithms.names("all_reduce") if args.algorithm == "all" else [args.algorithm]
    print(f"# pycollective {__version__} all_reduce: {args.ranks} ranks (threads), ", end="")
    print(f"{'out of place' if args.out_of_place else 'in place'}, {args.iterations} iterations")
    print(
        f"# {'size':>12} {'count':>12} {'type':>8} {'op':>5} {'algorithm':>17} {'time':>10} "
        f"{'algbw':>8} {'busbw':>8} {'#wrong':>7}"
    )
    print(
        f"# {'(B)':>12} {'(elements)':>12} {'':>8} {'':>5} {'':>17} {'(us)':>10} "
        f"{'(GB/s)':>8} {'(GB/s)':>8} {'':>7}"
    )
    rows = []
    size = args.min_bytes
    while size <= args.max_bytes:
        for algorithm in chosen:
            row = measure(
                ranks=args.ranks,
                count=size // item,
                dtype=args.datatype,
                op=args.op,
                algorithm=algorithm,
                iterations=args.iterations,
                warmup=args.warmup,
                in_place=not args.out_of_place,
            )
            rows.append(row)
            print(
                f"  {row['size']:>12} {row['count']:>12} {row['type']:>8} {row['op']:>5} "
                f"{algorithm:>17} {row['time_us']:>10.2f} {row['algbw_gb_s']:>8.3f} "
                f"{row['busbw_gb_s']:>8.3f} {row['wrong']:>7}",
                flush=True,
            )
        size *= args.factor
    wrong = sum(row["wrong"] for row in rows)
    print(f"# wrong values: {wrong} {'OK' if wrong == 0 else 'FAILED'}")
    if args.json:
        report = {
            "command": "pycollective bench",
            "version": __version__,
            "machine": platform.machine(),
            "python": platform.python_version(),
            "ranks": args.ranks,
            "in_place": not args.out_of_place,
            "results": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"# written to {args.json}")
    return 1 if wrong else 0


def measure(
    *,
    ranks: int,
    count: int,
    dtype: str,
    op: str,
    algorithm: str,
    iterations: int,
    warmup: int,
    in_place: bool,
) -> dict[str, Any]:
    """Check one size and time it; return a row of the table."""
    # Small whole numbers that no two elements in a row share: every reduction of them is exact, and
    # a chunk in the wrong place shows. With prod, one rank has the numbers and the others ones.
    inputs = [
        (np.arange(count) % 11 + 1 if r == 0 or op != "prod" else np.ones(count)).astype(dtype)
        * np.asarray(r + 1 if op != "prod" else 1, dtype)
        for r in range(ranks)
    ]
    reductions = {
        "sum": lambda a: a.sum(0, dtype=a.dtype),
        "mean": lambda a: _mean(a),
        "min": lambda a: a.min(0),
        "max": lambda a: a.max(0),
        "prod": lambda a: a.prod(0, dtype=a.dtype),
    }
    want = reductions[op](np.stack(inputs)) if count else inputs[0]
    wrong = [0] * ranks
    times = np.zeros((ranks, iterations))
    errors: list[BaseException] = []

    def work(comm: Communicator) -> None:
        data = inputs[comm.rank].copy()
        out = data if in_place else np.empty_like(data)
        comm.all_reduce(data, op, out=out, algorithm=algorithm)
        different = ~np.isclose(out, want, rtol=1e-6) if op == "mean" else out != want
        wrong[comm.rank] = int(different.sum())
        # In place, sums grow from call to call: begin with numbers that stay finite.
        tiny = np.asarray(1e-30 if np.dtype(dtype).kind == "f" else 1, dtype)
        data[:] = inputs[comm.rank] * tiny if op != "prod" else 1
        for _ in range(warmup):
            comm.all_reduce(data, op, out=out, algorithm=algorithm)
        comm.barrier()
        clock = time.perf_counter
        mine = times[comm.rank]
        for i in range(iterations):
            begin = clock()
            comm.all_reduce(data, op, out=out, algorithm=algorithm)
            mine[i] = clock() - begin

    def guarded(comm: Communicator) -> None:
        try:
            work(comm)
        except BaseException as error:
            errors.append(error)
            comm.abort(f"the benchmark failed on rank {comm.rank}")

    comms = local_group(ranks)
    threads = [threading.Thread(target=guarded, args=(c,)) for c in comms[1:]]
    for thread in threads:
        thread.start()
    guarded(comms[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    slowest = times.max(axis=0)
    seconds = float(np.median(slowest))
    size = count * np.dtype(dtype).itemsize
    return {
        "size": size,
        "count": count,
        "type": dtype,
        "op": op,
        "algorithm": algorithm,
        "time_us": seconds * 1e6,
        "p99_us": float(np.percentile(slowest, 99)) * 1e6,
        "min_us": float(slowest.min()) * 1e6,
        "algbw_gb_s": size / seconds / 1e9,
        "busbw_gb_s": size / seconds / 1e9 * 2 * (ranks - 1) / ranks,
        "wrong": sum(wrong),
    }


def _mean(stack: Any) -> Any:
    if stack.dtype.kind == "f":
        return stack.mean(0, dtype="float64").astype(stack.dtype)
    return np.trunc(stack.sum(0, dtype="int64") / len(stack)).astype(stack.dtype)
