"""Measure the overhead of the bindings over NCCL, and NCCL's and the core's collectives on these GPUs.

tests/gpu/run.sh runs this program. The overhead is measured with calls that only start work: an
all-reduce of one element by a single rank. The calls go through a loop of C calls by ctypes with ready
arguments, through the compiled bindings, and through `Communicator`. Two ranks on one GPU are two
processes with NCCL (NCCL_MULTI_RANK_GPU_ENABLE), and two threads with the core.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pycollective as pc
from pycollective import _core, nccl

CALLS, TURNS = 200, 15
SHARES_GPUS = 23000  # the first version of NCCL that accepts two processes on one GPU, on request
C_LOOP = """
#include <stddef.h>
typedef int (*call)(const void*, void*, size_t, int, int, void*, void*);
int repeat(call f, const void* x, void* comm, void* stream, int times) {
  for (int i = 0; i < times; ++i) {
    int code = f(x, (void*)x, 1, 7, 0, comm, stream);
    if (code) return code;
  }
  return 0;
}
"""


def microseconds(call, synchronize):
    """Return the median microseconds of one of CALLS calls."""
    found = []
    for _ in range(TURNS):
        synchronize()
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    synchronize()
    return statistics.median(found[2:])


def bare_loop(library, comm_of_c):
    """Return a function that makes CALLS all-reduces in C."""
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(C_LOOP)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", built, source], check=True)
        repeat = ctypes.CDLL(str(built)).repeat
    function = ctypes.cast(ctypes.CDLL(library.path).ncclAllReduce, ctypes.c_void_p)
    return lambda x, stream: repeat(
        function, ctypes.c_void_p(x), comm_of_c, ctypes.c_void_p(stream), CALLS
    )


def communicator_in_c(library):
    """Make a communicator of one rank through ctypes; return its handle."""

    class Id(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 128)]

    c = ctypes.CDLL(library.path)
    unique, handle = Id(), ctypes.c_void_p()
    assert c.ncclGetUniqueId(ctypes.byref(unique)) == 0
    c.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
    assert c.ncclCommInitRank(ctypes.byref(handle), 1, unique, 0) == 0
    return handle


def overhead():
    import cupy

    library = nccl.library()
    x = cupy.ones(1, cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    loop = bare_loop(library, communicator_in_c(library))
    comm = _core.nccl.Comm(library, library.unique_id(), 1, 0)
    (whole,) = pc.local_group(1)

    def bindings():
        for _ in range(CALLS):
            comm.all_reduce(x.data.ptr, x.data.ptr, 1, 7, 0, stream.ptr)

    def communicator():
        for _ in range(CALLS):
            whole.all_reduce(x, out=x)

    with stream:
        found = {
            "C": microseconds(lambda: loop(x.data.ptr, stream.ptr), stream.synchronize),
            "bindings": microseconds(bindings, stream.synchronize),
            "Communicator": microseconds(communicator, stream.synchronize),
        }
    comm.destroy()
    whole.close()
    for name, value in found.items():
        print(f"{name:13} {value:7.2f} µs a call, {value - found['C']:+.2f}")
    return {name: round(value, 3) for name, value in found.items()}


def bench(folder, *options, **environment):
    """Run pycollective bench on GPUs; return its rows."""
    path = Path(folder, "bench.json")
    command = [sys.executable, "-m", "pycollective", "bench", "--device", "gpu", *options,
               "-b", "1K", "-e", "256M", "-f", "16", "--json", str(path)]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, **environment})
    return json.loads(path.read_text())["results"]


def collectives(ranks, folder):
    """Run collectives among threads, each with its own GPU; also with a single rank."""
    names = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
    return bench(folder, "-n", str(ranks), "-c", *names)


def schedules(ranks, folder):
    """Run every all-reduce of the core's device executor among threads on the GPUs."""
    return bench(folder, "-n", str(ranks), "-a", "all")


def sharing(library, folder):
    """Run all-reduce of two ranks on one GPU: threads with the core's kernels, processes with NCCL."""
    one = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    found = {"threads, by the core": bench(folder, "-n", "2", "--transport", "thread", **one)}
    nccl_too = {**one, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    found["processes, by NCCL"] = (
        bench(folder, "-n", "2", "--transport", "shm", **nccl_too)
        if library.version >= SHARES_GPUS
        else f"not in NCCL {library.version_text}: 2.30 brought it"
    )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    names = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
    library = nccl.library()
    found = {"gpus": names, "nccl": library.version_text, "microseconds": overhead()}
    with tempfile.TemporaryDirectory() as folder:
        # Two ranks on one GPU use the core's kernels, or go over the host: measure that too.
        for part, measured in (
            ("collectives", lambda: {n: collectives(n, folder) for n in sorted({1, 2, count})}),
            ("two ranks on one GPU", lambda: sharing(library, folder)),
            ("schedules", lambda: {n: schedules(n, folder) for n in (2, 4, 8)}),
        ):
            found[part] = measured()
            args.out.write_text(json.dumps(found, indent=1) + "\n")  # the next part may be killed


if __name__ == "__main__":
    main()
