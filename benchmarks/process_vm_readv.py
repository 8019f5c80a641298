"""Compare a trial with process_vm_readv, which reads a peer's ordinary array, with the library's way.

    pycollective run -n 2 benchmarks/process_vm_readv.py > results.json

The numbers are µs of a broadcast and of an all_gather, timed as in compare.py. With process_vm_readv, a
first barrier announces that the arrays are ready. Then each rank reads the parts that it lacks, and a
second barrier allows changes. The library's calls work on ordinary arrays and on arrays of comm.empty().
The number "copy" is a copy, by the same ranks, of the bytes that process_vm_readv reads: the minimum.
"""

import ctypes
import json
import os
import time
from itertools import product
from pathlib import Path

import numpy as np
from compare_ranks import Empty, Pycollective, measure, slowest

MI, SECONDS = 1 << 20, 0.15
LIBC = ctypes.CDLL(None, use_errno=True)
iovec = ctypes.c_size_t * 2


def read(pid: int, address: int, out: np.ndarray) -> None:
    here, there = iovec(out.ctypes.data, out.nbytes), iovec(address, out.nbytes)
    if LIBC.process_vm_readv(pid, here, 1, there, 1, 0) != out.nbytes:
        raise OSError(ctypes.get_errno(), f"process_vm_readv of {out.nbytes} bytes")


def measure_call(group: Pycollective, call: str, size: int) -> dict[str, float]:
    comm, rank, empty = group.comm, group.rank, Empty(group.comm)
    parts = comm.size if call == "all_gather" else 1  # part r is rank r's
    whole = np.zeros((parts, size // 4 // parts), np.float32)
    own = np.full(whole.shape[1], rank + 1, np.float32)
    where = comm.all_gather(np.array([[os.getpid(), own.ctypes.data]])).tolist()
    lacks = [r for r in range(parts) if r != rank]

    def reading() -> None:
        if call == "all_gather":
            whole[rank] = own
        comm.barrier()
        for r in lacks:
            read(*where[r], whole[r])
        comm.barrier()

    ways = {"copy": lambda: [np.copyto(whole[r], own) for r in lacks], "process_vm_readv": reading}
    for name, kind in (("ordinary", group), ("comm.empty()", empty)):
        x = kind.array(own.size)
        x[:] = own
        ways[name] = kind.calls(x, kind.array(whole.size))[call]
    reading()
    if any((whole[r] != r + 1).any() for r in lacks):
        raise SystemExit(f"process_vm_readv read wrong values for {call}")
    common = {"meet": group.meet, "slowest": lambda own: slowest(group, own)}
    return {n: round(measure(way, SECONDS, **common)["us"], 1) for n, way in ways.items()}


def main() -> None:
    LIBC.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER: Yama lets peers read
    group = Pycollective()
    cpu = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].split("\n")[0]
    report = {"benchmark": "process_vm_readv", "processor": cpu, "cores": os.cpu_count(),
              "kernel": os.uname().release, "ranks": group.size,
              "when": time.strftime("%Y-%m-%d", time.gmtime()), "unit": "µs", "rows": []}  # fmt: skip
    for size, call in product((MI // 16, MI, 16 * MI, 64 * MI), ("broadcast", "all_gather")):
        report["rows"].append({"call": call, "bytes": size, **measure_call(group, call, size)})
    if group.rank == 0:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
