"""Compare process_vm_readv, which reads a peer's ordinary array in place, with the library's calls.

    pycollective run -n 4 benchmarks/process_vm_readv.py [--calls gather] [--sizes 1M 16M] > results.json

The numbers are µs of a call, timed as in compare.py. With process_vm_readv, each rank reads the parts
that it lacks after a barrier. After a second barrier the arrays may change. With process_vm_writev,
each rank writes the parts that the others lack. The library's calls work on ordinary arrays and on
arrays of comm.empty().
"""

import argparse
import ctypes
import json
import os
import time
from itertools import product
from pathlib import Path

import numpy as np
from compare import byte_count
from compare_ranks import Empty, Pycollective, Values, measure, slowest

CALLS = ("broadcast", "scatter", "gather", "all_gather", "all_to_all")
LIBC = ctypes.CDLL(None, use_errno=True)
iovec = ctypes.c_size_t * 2


def move(system_call, pid: int, there: int, here: int, count: int) -> None:
    if system_call(pid, iovec(here, count), 1, iovec(there, count), 1, 0) != count:
        raise OSError(ctypes.get_errno(), f"process_vm_readv or _writev of {count} bytes")


def part_of(
    call: str, source: int, target: int, ranks: int, size: int
) -> tuple[int, int, int] | None:
    """Return the part that `target` needs of `source`: the offset in each, and the length."""
    part = size // ranks
    found = {
        "broadcast": (0, 0, size), "scatter": (target * part, 0, part),
        "gather": (0, source * part, part), "all_gather": (0, source * part, part),
        "all_to_all": (target * part, source * part, part),
    }[call]  # fmt: skip
    if (call in ("broadcast", "scatter") and source) or (call == "gather" and target):
        return None
    return found


def measure_call(group: Pycollective, call: str, size: int, seconds: float) -> dict[str, float]:
    comm, rank, ranks = group.comm, group.rank, group.size
    values = Values(call, size, rank, ranks)
    given, got = values.of(rank), np.zeros(values.got, np.float32)
    given_at, got_at = given.ctypes.data, got.ctypes.data
    of_ranks = comm.all_gather(np.array([[os.getpid(), given_at, got_at]])).tolist()
    turns = [(rank + i) % ranks for i in range(1, ranks)]
    length = 4 * values.count

    def copy_own() -> None:
        found = part_of(call, rank, rank, ranks, length)
        if call != "broadcast" and found:
            there, here, count = (n // 4 for n in found)
            got[here : here + count] = given[there : there + count]

    def reading() -> None:
        comm.barrier()
        for peer in turns:
            if found := part_of(call, peer, rank, ranks, length):
                there, here, count = found
                pid, address, _ = of_ranks[peer]
                move(LIBC.process_vm_readv, pid, address + there, got_at + here, count)
        copy_own()
        comm.barrier()

    def writing() -> None:
        comm.barrier()
        for peer in turns:
            if found := part_of(call, rank, peer, ranks, length):
                there, here, count = found
                pid, _, address = of_ranks[peer]
                move(LIBC.process_vm_writev, pid, address + here, given_at + there, count)
        copy_own()
        comm.barrier()

    ways = {"process_vm_readv": reading, "process_vm_writev": writing}
    for name, kind in (("ordinary", group), ("comm.empty()", Empty(comm))):
        x = kind.array(given.size)
        x[:] = given
        ways[name] = kind.calls(x, kind.array(got.size))[call]
    expected = values.expected()
    for way in (reading, writing):
        got[:] = 0
        way()
        if (
            expected is not None
            and not (call == "broadcast" and rank == 0)
            and (got != expected).any()
        ):
            raise SystemExit(f"{way.__name__} gave wrong values for {call}")
    common = {"barrier": group.barrier, "slowest": lambda elapsed: slowest(group, elapsed)}
    return {n: round(measure(way, seconds, **common)["us"], 1) for n, way in ways.items()}


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--calls", nargs="+", choices=CALLS, default=CALLS)
    p.add_argument("--sizes", nargs="+", type=byte_count, metavar="BYTES",
                   default=[1 << 20, 4 << 20, 16 << 20, 64 << 20])  # fmt: skip
    p.add_argument("--seconds", type=float, default=0.05, help="of each of the 5 repeats (0.05)")
    args = p.parse_args()
    LIBC.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER: Yama lets peers read
    group = Pycollective()
    cpu = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].split("\n")[0]
    report = {"benchmark": "process_vm_readv", "processor": cpu, "cores": os.cpu_count(),
              "kernel": os.uname().release, "ranks": group.size,
              "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
              "unit": "µs", "rows": []}  # fmt: skip
    for call, size in product(args.calls, args.sizes):
        found = measure_call(group, call, size, args.seconds)
        report["rows"].append({"call": call, "bytes": size, **found})
    if group.rank == 0:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
