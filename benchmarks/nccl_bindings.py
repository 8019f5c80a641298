"""Measure a call of NCCL through the compiled bindings, beside a loop in C; no GPU is needed.

Both ways call a libnccl made here that does nothing, so that only the overhead is timed. The script
`benchmarks/gpu_nccl.py` measures the same with the real library.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from pycollective import _core

CALLS, TURNS = 20_000, 21
SOURCE = """
#include <stddef.h>
int ncclGetVersion(int* version) { *version = 22803; return 0; }
int ncclGetUniqueId(void* id) { return 0; }
struct id { char bytes[128]; };
int ncclCommInitRankConfig(void** out, int n, struct id id, int r, void* c) { *out = out; return 0; }
int ncclAllReduce(const void* x, void* y, size_t n, int t, int op, void* comm, void* s) { return 0; }
typedef int (*call)(const void*, void*, size_t, int, int, void*, void*);
int repeat(call f, void* x, int times) {
  for (int i = 0; i < times; ++i)
    if (f(x, x, 1, 7, 0, x, x)) return 1;
  return 0;
}
"""


def microseconds(call):
    found = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    return statistics.median(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "none.c"), Path(folder, "libnone.so")
        source.write_text(SOURCE)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", built, source], check=True)
        library = _core.nccl.Library(str(built))
        c = ctypes.CDLL(str(built))
    comm = _core.nccl.Comm(library, bytes(128), 1, 0)
    function = ctypes.cast(c.ncclAllReduce, ctypes.c_void_p)

    def bindings():
        for _ in range(CALLS):
            comm.all_reduce(4096, 4096, 1, 7, 0, 4096)

    found = {
        "C": microseconds(lambda: c.repeat(function, ctypes.c_void_p(4096), CALLS)),
        "bindings": microseconds(bindings),
    }
    for name, value in found.items():
        print(f"{name:8} {value:6.3f} µs a call")
    if args.json:
        args.json.write_text(json.dumps({"microseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
