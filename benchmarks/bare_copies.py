"""Time each call beside what no implementation can leave out: copies, or a handshake.

    pycollective run -n 2 benchmarks/bare_copies.py [--json FILE] [--calls gather] [--sizes 64K 1M]
    pycollective run -n 8 benchmarks/bare_copies.py

Two processes cannot see each other's ordinary arrays. So bytes for another rank are copied twice: into
memory that both map, and out of it. Bytes that stay with a rank are copied once. Reductions read the
peer's bytes in place of the second copy. "bare" is the time of these copies alone, by np.copyto and
np.add in blocks of 128 KiB, in the same processes. No rank waits for the other, and the other process
wrote each block of the shared memory last. A ratio near 1 says that a call is nothing but copying. Below
1, the call's copies overlap better than NumPy's. compare.py has the same calls beside MPI's.

Calls of a few bytes wait for all ranks. Their "bare" time is a handshake in the core, without Python:
each rank writes its own cache line and waits until it has seen the lines of the others. With more ranks
than cores, a rank that waits yields its core, so that every rank runs once in each handshake.
More than 2 ranks have the handshake alone.
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


class Both:
    """Memory that both processes map; each process writes one half."""

    def __init__(self, comm: Any, size: int) -> None:
        halves = shared_memory(comm, 2 * size).view(np.float32).reshape(2, -1)
        self.mine, self.theirs = halves[comm.rank], halves[1 - comm.rank]
        self.mine[:] = TINY


def bare(call: str, rank: int, x: Any, out: Any, both: Both) -> Any:
    """Return a function that makes this rank's copies of a call, in blocks."""
    n = x.size if call not in ("gather", "all_gather") else x.size * 2
    half, parts = n // 2, []  # of (kind, target, source)

    def add(kind: Any, target: Any, source: Any) -> None:
        step = BLOCK // 4
        for at in range(0, len(source), step):
            parts.append((kind, target[at : at + step], source[at : at + step]))

    copy, plus = np.copyto, lambda target, source: np.add(target, source, out=target)
    mine, theirs, root = both.mine, both.theirs, rank == 0
    own, other = slice(rank * half, rank * half + half), slice((1 - rank) * half, (2 - rank) * half)
    match call:
        case "broadcast":
            add(copy, mine[:n] if root else out, x if root else theirs[:n])
        case "send_recv":
            add(copy, mine[:n], x)
            add(copy, out, theirs[:n])
        case "reduce":
            if root:
                add(copy, out, x)
                add(plus, out, theirs[:n])
            else:
                add(copy, mine[:n], x)
        case "gather":
            if root:
                add(copy, out[:half], x)
                add(copy, out[half:], theirs[:half])
            else:
                add(copy, mine[:half], x)
        case "scatter":
            if root:
                add(copy, mine[:half], x[half:])
                add(copy, out, x[:half])
            else:
                add(copy, out, theirs[:half])
        case "all_gather":
            add(copy, mine[:half], x)
            add(copy, out[own], x)
            add(copy, out[other], theirs[:half])
        case "reduce_scatter":
            add(copy, mine[:half], x[other])
            add(copy, out, x[own])
            add(plus, out, theirs[:half])
        case "all_to_all":
            add(copy, mine[:half], x[other])
            add(copy, out[own], x[own])
            add(copy, out[other], theirs[:half])
        case "all_reduce":
            add(copy, mine[other], x[other])
            add(plus, x[own], theirs[own])
            add(copy, mine[own], x[own])
            add(copy, x[other], theirs[other])

    def run() -> None:
        for kind, target, source in parts:
            kind(target, source)

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
    sizes = args.sizes if comm.size == 2 else []
    both = Both(comm, max(sizes)) if sizes else None
    for call in args.calls:
        for size in sizes:
            values = Values(call, size, comm.rank, 2)
            x, out = (np.full(count, TINY, np.float32) for count in (values.given, values.got))
            times = {}
            for name, run in (
                ("us", group.calls(x, out)[call]),
                ("bare", bare(call, comm.rank, x, out, both)),
            ):
                found = measure(run, args.seconds, meet=comm.barrier,
                                slowest=lambda own: slowest(group, own),
                                renew=(lambda x=x: x.fill(TINY)) if call in group.sums else None,
                                most=calls_until_renewed(2))  # fmt: skip
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
    if not sizes:
        return
    print("| call / bare copies (µs of both) | " + " | ".join(map(size_text, sizes)) + " |")
    print("| --- |" + " --- |" * len(sizes))
    for call in args.calls:
        cells = [r["text"] for r in rows if r["call"] == call and r["size"] in sizes]
        print(f"| {call} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
