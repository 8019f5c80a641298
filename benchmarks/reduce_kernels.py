"""Measure the kernels of csrc/reduce, beside NumPy's equivalents in the same run.

GB/s count each byte read and written once: three arrays for a pair, n + 1 arrays for n sources. Each
number is the median of the turns. Kernels and NumPy take turns, and every result is checked before it is
timed. NumPy's column for n sources is n - 1 operations with ``out=``, which a user would write.

    python benchmarks/reduce_kernels.py [--bytes 262144] [--sources 4] [--dtypes float32] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pycollective._core import combine_arrays, reduce_arrays

Array = np.ndarray[Any, Any]
DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128"
).split()
UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "mean": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def dtype_of(name: str) -> np.dtype[Any] | None:
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def aligned(count: int, dtype: np.dtype[Any]) -> Array:
    memory = np.zeros(count * dtype.itemsize + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + count * dtype.itemsize].view(dtype)


def gigabytes_per_second(
    ways: dict[str, Callable[[], None]], moved: dict[str, int], turns: int
) -> dict[str, float]:
    """Return the median speed of each way; the ways take turns of some milliseconds."""
    repeats = {}
    for name, run in ways.items():
        begin = time.perf_counter()
        run()
        repeats[name] = max(1, int(5e-3 / (time.perf_counter() - begin)))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, run in ways.items():
            begin = time.perf_counter()
            for _ in range(repeats[name]):
                run()
            seconds[name].append((time.perf_counter() - begin) / repeats[name])
    return {name: moved[name] / float(np.median(s)) / 1e9 for name, s in seconds.items()}


def measure(dtype: np.dtype[Any], op: str, args: argparse.Namespace) -> dict[str, float] | None:
    """Return the speeds of one row of the table, or None if the type has no such operation."""
    count, n = args.bytes // dtype.itemsize, args.sources
    random = np.random.default_rng(0)
    sources = [aligned(count, dtype) for _ in range(n)]
    for source in sources:
        source[...] = random.integers(0, 2, count)
    a, b = sources[:2]
    result, expected, in_place = (aligned(count, dtype) for _ in range(3))
    size, many_size = (2, n) if op == "mean" else (0, 0)
    try:
        combine_arrays(op, a, b, result, size)
    except TypeError:
        return None
    ufunc, quotient = UFUNCS[op], np.floor_divide if dtype.kind in "iu" else np.divide

    def pair_numpy() -> None:
        ufunc(a, b, out=expected)
        if size:
            quotient(expected, dtype.type(size), out=expected)

    def many_numpy() -> None:
        ufunc(a, b, out=expected)
        for source in sources[2:]:
            ufunc(expected, source, out=expected)
        if size:
            quotient(expected, dtype.type(n), out=expected)

    pair_numpy()
    np.testing.assert_array_equal(result, expected, err_msg=f"{dtype} {op}")
    reduce_arrays(op, sources, [result], many_size)
    many_numpy()
    np.testing.assert_array_equal(result, expected, err_msg=f"{dtype} {op} of {n}")
    in_place[...] = a
    ways: dict[str, Callable[[], None]] = {
        "pair": lambda: combine_arrays(op, a, b, result, size),
        "in place": lambda: combine_arrays(op, in_place, b, in_place, size),
        "pair_numpy": pair_numpy,
        "many": lambda: reduce_arrays(op, sources, [result], many_size),
        "many_numpy": many_numpy,
    }
    moved = {way: (n + 1 if "many" in way else 3) * result.nbytes for way in ways}
    with np.errstate(all="ignore"):
        return gigabytes_per_second(ways, moved, args.turns)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--bytes", type=int, default=256 << 10, help="of one array (262144)")
    p.add_argument("--sources", type=int, default=4, help="arrays that are combined at once (4)")
    p.add_argument("--turns", type=int, default=9, help="turns of each way (9)")
    p.add_argument("--dtypes", nargs="*", default=DTYPES, help="element types (all)")
    p.add_argument("--json", type=Path, help="write the results there too")
    args = p.parse_args()
    n = args.sources
    print(f"# GB/s, arrays of {args.bytes} bytes; in place: the target is the first source")
    print(
        f"# {'dtype':>10} {'op':>5} {'pair':>8} {'in place':>8} {'NumPy':>8} {'ratio':>6}"
        f" {f'{n} at once':>10} {'NumPy':>8} {'ratio':>6}"
    )
    rows = []
    for name in args.dtypes:
        dtype = dtype_of(name)
        if dtype is None:
            print(f"  {name:>10} needs ml_dtypes")
            continue
        for op in UFUNCS:
            speed = measure(dtype, op, args)
            if speed is None:
                continue
            rows.append({"dtype": name, "op": op, **speed})
            print(
                f"  {name:>10} {op:>5} {speed['pair']:>8.1f} {speed['in place']:>8.1f} "
                f"{speed['pair_numpy']:>8.1f} {speed['pair'] / speed['pair_numpy']:>6.1f} "
                f"{speed['many']:>10.1f} {speed['many_numpy']:>8.1f} "
                f"{speed['many'] / speed['many_numpy']:>6.1f}",
                flush=True,
            )
    if args.json:
        described = {"bytes": args.bytes, "sources": n, "results": rows}
        args.json.write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()
