"""Time each call beside what no implementation can leave out: copies, or a handshake.

    pycollective run -n 2 benchmarks/bare_copies.py [--json FILE] [--calls gather] [--sizes 64K 1M]
    pycollective run -n 8 benchmarks/bare_copies.py

Processes cannot see each other's ordinary arrays. So bytes for another rank are copied twice: into
memory that both map, and out of it. Bytes that stay with a rank are copied once. Reductions read the
peer's bytes in place of the second copy. "bare" is the time of these copies alone, by np.copyto and
np.add in blocks of 128 KiB, in the same processes. No rank waits for another, and its owner wrote each
block of the shared memory last. A ratio near 1 says that a call is nothing but copying. Below
1, the call's copies overlap better than NumPy's. compare.py has the same calls beside MPI's.

Calls of a few bytes wait for all ranks. Their "bare" time is a handshake in the core, without Python:
each rank writes its own cache line and waits until it has seen the lines of the others. With more ranks
than cores, a rank that waits yields its core, so that every rank runs once in each handshake.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from compare import byte_count, size_text, time_text
from compare_ranks import TINY, Pycollective, Values, calls_until_renewed, measure, slowest

import pycollective
from pycollective import _core

BLOCK = 128 << 10
CALLS = ("broadcast", "reduce", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all",
         "all_reduce", "send_recv")  # fmt: skip


def shared_memory(comm: Any, size: int) -> Any:
    """Return memory that all processes map, as bytes."""
    made = os.memfd_create("bare") if comm.rank == 0 else -1
    if made >= 0:
        os.ftruncate(made, size)
    who, what = comm.broadcast(np.array([os.getpid(), made]), 0)
    with open(f"/proc/{who}/fd/{what}", "r+b") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    comm.barrier()
    if made >= 0:
        os.close(made)
    return mapped


class Staging:
    """Memory that all processes map; each process writes its own row."""

    def __init__(self, comm: Any, size: int) -> None:
        self.rows = shared_memory(comm, comm.size * size).view(np.float32).reshape(comm.size, -1)
        self.rows[comm.rank] = TINY


def bare(call: str, rank: int, x: Any, out: Any, staging: Staging) -> Any:
    """Return a function that makes this rank's copies of a call, in blocks."""
    rows, size, root = staging.rows, len(staging.rows), rank == 0
    mine, peers = rows[rank], [r for r in range(size) if r != rank]
    n = x.size
    part = n if call in ("gather", "all_gather") else n // size
    steps = []  # of (function, target, source)

    def add(function: Any, target: Any, source: Any) -> None:
        step = BLOCK // 4
        for at in range(0, len(source), step):
            steps.append((function, target[at : at + step], source[at : at + step]))

    def of(rank: int, array: Any) -> Any:
        return array[rank * part : (rank + 1) * part]

    copy, plus = np.copyto, lambda target, source: np.add(target, source, out=target)
    match call:
        case "broadcast":
            add(copy, mine[:n] if root else out, x if root else rows[0, :n])
        case "send_recv":
            add(copy, mine[:n], x)
            add(copy, out, rows[rank ^ 1, :n])
        case "reduce" if root:
            add(copy, out, x)
            for peer in peers:
                add(plus, out, rows[peer, :n])
        case "gather" if root:
            add(copy, of(0, out), x)
            for peer in peers:
                add(copy, of(peer, out), rows[peer, :part])
        case "reduce" | "gather":
            add(copy, mine[:n], x)
        case "scatter" if root:
            for peer in peers:
                add(copy, of(peer, mine), of(peer, x))
            add(copy, out, of(0, x))
        case "scatter":
            add(copy, out, of(rank, rows[0]))
        case "all_gather":
            add(copy, mine[:part], x)
            add(copy, of(rank, out), x)
            for peer in peers:
                add(copy, of(peer, out), rows[peer, :part])
        case "reduce_scatter" | "all_to_all":
            for peer in peers:
                add(copy, of(peer, mine), of(peer, x))
            adds = call == "reduce_scatter"
            add(copy, out if adds else of(rank, out), of(rank, x))
            for peer in peers:
                source = of(rank, rows[peer])
                add(*((plus, out, source) if adds else (copy, of(peer, out), source)))
        case "all_reduce":
            for peer in peers:
                add(copy, of(peer, mine), of(peer, x))
            for peer in peers:
                add(plus, of(rank, x), of(rank, rows[peer]))
            add(copy, of(rank, mine), of(rank, x))
            for peer in peers:
                add(copy, of(peer, x), of(peer, rows[peer]))

    def run() -> None:
        with np.errstate(over="ignore"):  # no rank waits, so one adds to sums of later calls
            for function, target, source in steps:
                function(target, source)

    return run


def handshakes(group: Pycollective, seconds: float) -> list[dict[str, Any]]:
    """Time calls of a few bytes, and handshakes."""
    comm = group.comm
    lines = shared_memory(comm, 4096)
    x = np.full(2, TINY, np.float32)
    handshake = functools.partial(
        _core.measure_handshake, lines, comm.rank, comm.size, 100, comm.size > (os.cpu_count() or 1)
    )
    rows = []
    for call in ("barrier", "all_reduce"):
        times = {}
        for name, run, count in (("us", group.calls(x, x)[call], 1), ("bare", handshake, 100)):
            found = measure(run, seconds, meet=comm.barrier,
                            slowest=lambda own: slowest(group, own), renew=lambda: x.fill(TINY),
                            most=calls_until_renewed(comm.size))  # fmt: skip
            times[name] = found["us"] / count
        rows.append({"call": call, "size": 0 if call == "barrier" else 8, **times})
    return rows


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--calls", nargs="+", choices=CALLS, default=CALLS)
    p.add_argument("--sizes", nargs="+", type=byte_count, default=[64 << 10, 1 << 20, 16 << 20],
                   metavar="BYTES", help="such as 64K 1M 16M, which are the default")  # fmt: skip
    p.add_argument("--seconds", type=float, default=0.05, help="of each of the 5 repeats (0.05)")
    p.add_argument("--json", type=Path, metavar="FILE", help="where rank 0 writes the numbers")
    args = p.parse_args()
    comm = pycollective.init()
    group = Pycollective(comm)
    rows = handshakes(group, args.seconds)
    staging = Staging(comm, max(args.sizes))
    for call in args.calls if comm.size > 1 else ():
        for size in args.sizes:
            values = Values(call, size, comm.rank, comm.size)
            x, out = (np.full(count, TINY, np.float32) for count in (values.given, values.got))
            times = {}
            for name, run in (
                ("us", group.calls(x, out)[call]),
                ("bare", bare(call, comm.rank, x, out, staging)),
            ):
                found = measure(run, args.seconds, meet=comm.barrier,
                                slowest=lambda own: slowest(group, own),
                                renew=(lambda x=x: x.fill(TINY)) if call in group.sums else None,
                                most=calls_until_renewed(comm.size))  # fmt: skip
                times[name] = found["us"]
            if (
                call == "send_recv"
            ):  # half a round trip: one rank copies in while the other copies out
                times = {name: us / 2 for name, us in times.items()}
            rows.append({"call": call, "size": size, **times})
    if comm.rank:
        return
    if args.json:
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        report = {"benchmark": "bare_copies", "when": when, "ranks": comm.size, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        row["text"] = f"**{row['us'] / row['bare']:.2f}** " + (
            f"({time_text(row['us'])} / {time_text(row['bare'])})"
        )
    print("call / bare handshake (µs of both): " + ", ".join(
        f"{r['call']} {r['text']}" for r in rows if r["size"] <= 8
    ))  # fmt: skip
    print("| call / bare copies (µs of both) | " + " | ".join(map(size_text, args.sizes)) + " |")
    print("| --- |" + " --- |" * len(args.sizes))
    for call in args.calls:
        cells = [r["text"] for r in rows if r["call"] == call and r["size"] in args.sizes]
        print(f"| {call} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
