"""Measure the kernels that combine replicas on one GPU, as a share of the GPU's copy bandwidth.

Run by tests/gpu/run.sh. Bandwidths count every byte read and every byte written. A copy reads and
writes one array; an all-reduce in place among n replicas reads n arrays and writes n. Copies are
measured first and again at the end, with the same clock. Percentages refer to the best copy from 64
MiB on. Numbers are medians between CUDA events, after a call that warms up. Before each measurement
the GPU is kept busy until all its calls are enqueued, so that the host's time for a launch does not
count. Arrays come from a large pool in turns, so that small arrays do not stay in the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import cupy
import numpy as np

from pycollective._core import cuda
from pycollective._core.device import cuda_runtime

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = [KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB]
REPLICAS = [2, 4, 8]
BAR = 85  # per cent of the copy bandwidth, from 64 MiB on


SPIN = """
extern "C" __global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}
"""
# More than the host's time for a launch, and for a call of 160 arrays.
CYCLES_PER_CALL, CYCLES_BEFORE = 100_000, 1_500_000


def milliseconds(call, calls, batch=1):
    """Return the median milliseconds of `call(number)`, timing `batch` calls together."""
    call(0)
    spin = cupy.RawKernel(SPIN, "spin")
    events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(calls)]
    for i, (begin, end) in enumerate(events):
        spin((1,), (1,), (np.int64(CYCLES_BEFORE + CYCLES_PER_CALL * batch),))
        begin.record()
        for k in range(batch):
            call(i * batch + k)
        end.record()
        end.synchronize()
    return statistics.median(cupy.cuda.get_elapsed_time(*pair) / batch for pair in events)


def calls_for(moved):
    """Return the number of measurements for this many bytes, and the number of calls in each."""
    return max(15, min(100, 4 * GIB // moved)), max(1, min(50, 32 * MIB // moved))


class Memory:
    """A piece of the device's memory, from which calls get arrays in turns."""

    def __init__(self, size):
        self.size = size
        self.bytes = cupy.empty(size, cupy.uint8)
        self.bytes[...] = 0

    def addresses(self, size, number, turn):
        """Return the addresses of `number` arrays of `size` bytes, different ones in each turn."""
        turns = max(1, self.size // (size * number))
        first = self.bytes.data.ptr + turn % turns * size * number
        return [first + k * size for k in range(number)]


def copies(memory):
    """Return the bandwidth of copies within the device, in GB/s, for each size."""
    found = {}
    for size in SIZES:
        if 2 * size > memory.size:
            continue

        def copy(turn, size=size):
            target, source = memory.addresses(size, 2, turn)
            stream = cupy.cuda.get_current_stream().ptr
            cupy.cuda.runtime.memcpyAsync(
                target, source, size, cupy.cuda.runtime.memcpyDeviceToDevice, stream
            )

        found[size] = 2 * size / milliseconds(copy, *calls_for(2 * size)) / 1e6
    return found


def sums(memory, dtype, replicas):
    """Return the bandwidth and the time of sums in place, for each size."""
    found = {}
    device, stream = cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr
    for size in SIZES:
        if replicas * size > memory.size:
            continue

        def combine(turn, size=size):
            addresses = memory.addresses(size, replicas, turn)
            cuda.combine(
                "sum", dtype, addresses, addresses, size // dtype.itemsize, 0, device, stream
            )

        time = milliseconds(combine, *calls_for(2 * replicas * size))
        found[size] = (2 * replicas * size / time / 1e6, time * 1e3)
    return found


def packs(memory, dtype):
    """Return bandwidth and time of packing a network's arrays, without and with scaling."""
    counts = [9 * 64 * 64, 64, 9 * 128 * 128, 128, 9 * 256 * 256, 256, 9 * 512 * 512, 512] * 20
    pieces, address, offset = [], memory.bytes.data.ptr, 0
    for count in counts:
        pieces.append((address, count, offset))
        address += -(-count * 4 // 512) * 512
        offset += count
    packed = -(-address // 512) * 512
    device, stream = cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr
    runtime, found = cuda_runtime(), {}
    for name, packed_type, scale in (
        ("copied", dtype, 1.0), ("scaled", dtype, 0.125), ("to float16", np.dtype("f2"), 0.125),
    ):  # fmt: skip

        def pack(_turn, packed_type=packed_type, scale=scale):
            runtime.pack(packed, packed_type, pieces, dtype, scale, False, device, stream)

        time = milliseconds(pack, 50)
        moved = sum(counts) * (dtype.itemsize + packed_type.itemsize)
        found[name] = {"microseconds": time * 1e3, "GB/s": moved / time / 1e6}
    return {"arrays": len(counts), "items": sum(counts), **found}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not cuda.built():
        parser.error("the package was built without CUDA")
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    free, _ = cupy.cuda.Device().mem_info
    memory = Memory(min(8 * GIB, free * 9 // 10 // GIB * GIB or free // 2))
    before = copies(memory)
    all_sums = {
        dtype: {n: sums(memory, np.dtype(dtype), n) for n in REPLICAS}
        for dtype in ("float32", "float16")
    }
    packing = packs(memory, np.dtype("f4"))
    after = copies(memory)
    large = [size for size in before if size >= 64 * MIB] or [max(before)]
    best = max(found[size] for found in (before, after) for size in large)
    print(f"{name}: copies reach {best:.0f} GB/s, read and written")
    report = {
        "gpu": name,
        "copy GB/s": {str(size): [before[size], after[size]] for size in before},
        "best copy GB/s": best,
        "sums": {},
        "packing": packing,
    }
    for dtype, by_replicas in all_sums.items():
        for replicas, found in by_replicas.items():
            rows = {
                str(size): {
                    "microseconds": time,
                    "GB/s": rate,
                    "% of best copy": 100 * rate / best,
                    "% of copy of this size": 100 * rate / max(before[size], after[size]),
                }
                for size, (rate, time) in found.items()
            }
            report["sums"][f"{dtype}, {replicas} replicas"] = rows
            reached = [row["% of best copy"] for size, row in rows.items() if int(size) >= 64 * MIB]
            verdict = "no memory for it"
            if reached:
                verdict = "met" if min(reached) >= BAR else "not met"
            print(f"{dtype}, {replicas} replicas, ≥ {BAR} % from 64 MiB: {verdict}")
            for size, row in rows.items():
                print(
                    f"  {int(size):>11} B {row['microseconds']:10.1f} µs {row['GB/s']:8.0f} GB/s "
                    f"{row['% of best copy']:6.1f} %"
                )
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
