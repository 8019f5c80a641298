"""Cases for the kernels that combine and pack arrays, on any processor.

A runner has two functions and a number:

* `combine(memory, dtype, op, targets, sources, count, size)`;
* `pack(memory, packed_dtype, packed, pieces, piece_dtype, scale, unpacks)`;
* `tiled`, the size in bytes of two arrays whose sum has tiles (csrc/cuda/geometry.h).

The place of an array is its offset in bytes in `memory`. A piece is its place, its number of items,
and its offset in items in the packed array. The cases compare all of `memory`, because kernels must
write nothing but their results.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from pycollective._core import reduce_arrays

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32, F64, C64, C128 = (np.dtype(k) for k in ("f2", "f4", "f8", "c8", "c16"))
HALVES, COMPLEX = [F16, BF16], [C64, C128]
INTS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
BOOL = np.dtype(bool)
DTYPES = [BOOL, *INTS, *HALVES, F32, F64, *COMPLEX]
OPS = ("sum", "prod", "min", "max", "mean", "and", "or", "xor")
GRAIN = 64  # alignment in the memory of a case


def has(dtype: np.dtype, op: str) -> bool:
    """Return True if the core's reduction table has the operation for the dtype."""
    bitwise = op in ("and", "or", "xor")
    if dtype == BOOL:
        return bitwise or op in ("min", "max")
    if dtype in COMPLEX:
        return op in ("sum", "prod", "mean")
    return not bitwise or dtype in INTS


TABLE = [(dtype, op) for dtype in DTYPES for op in OPS if has(dtype, op)]


def fresh():
    """Return a random generator with a new seed; a test that fails shows the seed."""
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    return np.random.default_rng(seed)


def make_memory(random, size):
    """Return memory of random bytes."""
    whole = np.frombuffer(random.bytes(size + GRAIN), np.uint8).copy()
    return whole[-whole.ctypes.data % GRAIN :][:size]


def view(memory, dtype, place, count):
    return np.ndarray((count,), dtype, memory, place)


def fill(random, array):
    """Fill an array with random bits.

    Half of the floats are normally distributed, or 0, 1 or infinite. All complex numbers are normally
    distributed.
    """
    dtype, count = array.dtype, array.size
    values = np.frombuffer(random.bytes(count * dtype.itemsize), dtype).copy()
    if dtype == BOOL:
        values = values.view(np.uint8) > 127
    elif dtype not in (*COMPLEX, *INTS):
        kind = random.integers(0, 4, count)
        values[kind == 0] = random.standard_normal(count).astype(dtype)[kind == 0]
        values[kind == 1] = random.choice([0.0, -0.0, 1.0, np.inf, -np.inf], count).astype(dtype)[
            kind == 1
        ]
    elif dtype in COMPLEX:
        values = random.standard_normal((count, 2)).astype(values.real.dtype).view(dtype)[:, 0]
    array[...] = values


def assert_same_bits(got, want):
    """Compare the bits of two arrays; every NaN equals every other."""
    if got.dtype.kind == "c":
        got, want = got.view(got.real.dtype), want.view(got.real.dtype)
    bits = np.dtype(f"u{got.itemsize}")
    differ = got.view(bits) != want.view(bits)
    if got.dtype not in (BOOL, *INTS):
        with np.errstate(invalid="ignore"):
            differ &= ~((got != got) & (want != want))
    where = np.flatnonzero(differ)
    assert not where.size, (where[:5], got[where[:5]], want[where[:5]])


def check_combination(runner, random, dtype, op, ranks, count, shifts, targets):
    """Combine `ranks` arrays that begin `shifts` bytes after a boundary.

    `targets` are the arrays that get the result, or "other" for one array elsewhere.
    """
    pitch = -(-(count * dtype.itemsize + max(shifts)) // GRAIN) * GRAIN + GRAIN
    memory = make_memory(random, pitch * (ranks + 1))
    places = [k * pitch + shifts[k % len(shifts)] for k in range(ranks + 1)]
    for place in places[:ranks]:
        fill(random, view(memory, dtype, place, count))
    to = places[ranks:] if targets == "other" else [places[k] for k in targets]
    size = ranks if op == "mean" else 0
    want = view(memory, dtype, places[0], count).copy()
    sources = [view(memory, dtype, place, count).copy() for place in places[:ranks]]
    reduce_arrays(op, sources, [want], size)
    expected = memory.copy()
    runner.combine(memory, dtype, op, to, places[:ranks], count, size)
    for place in to:
        got = view(memory, dtype, place, count).copy()
        assert_same_bits(got, want)
        view(expected, dtype, place, count)[...] = got
    np.testing.assert_array_equal(memory, expected)


def check_combinations(runner, random, dtype, op):
    """Check all layouts of arrays, with random numbers of arrays and of items."""
    item = dtype.itemsize
    layouts = ([0], [item], [0, item], [1], [3, 0, 16, 8])
    counts = [0, 1, 2, 3, 15, 16, 17, 31, 33, 97, 1009]
    for shifts in layouts:
        for ranks in random.permutation([1, 2, 3, 4, 8, 9, 16])[:4].tolist():
            count = int(random.choice(counts))
            targets = random.choice(["other", "first", "last", "all"])
            which = {"first": [0], "last": [ranks - 1], "all": list(range(ranks))}
            check_combination(
                runner, random, dtype, op, ranks, count, shifts, which.get(targets, "other")
            )
    # Larger arrays: in sums of floats, each thread then reads several vectors at once.
    tiled = op in ("sum", "mean") and dtype not in INTS
    for ranks in (2, 4) if tiled else (int(random.integers(2, 9)),):
        size = runner.tiled * 2 // ranks if tiled else 100_000
        count = size // item + int(random.integers(0, 99))
        shift = item * int(random.integers(0, 4))
        check_combination(runner, random, dtype, op, ranks, count, [shift], list(range(ranks)))


def check_packing(runner, random, packed_dtype, piece_dtype, scale, counts, *, dense, aligned):
    """Pack arrays of `counts` items and unpack them; if `dense`, without gaps."""
    item, packed_item = piece_dtype.itemsize, packed_dtype.itemsize
    shift = 0 if aligned else item
    places, offsets, end, offset = [], [], 0, 0 if aligned else 1
    for count in counts:
        places.append(end + shift)
        end += -(-(count * item + shift) // GRAIN) * GRAIN + GRAIN
        offsets.append(offset)
        offset += count if dense else -(-count // 64) * 64 + 64
    packed = end
    memory = make_memory(random, end + offset * packed_item + GRAIN)
    pieces = list(zip(places, counts, offsets, strict=True))
    for unpacks in (False, True):
        expected = memory.copy()
        for place, count, first in pieces:
            inside, outside = (
                (packed_dtype, packed + first * packed_item),
                (piece_dtype, place),
            )
            source, target = (inside, outside) if unpacks else (outside, inside)
            values = view(memory, *source, count)
            fill(random, values)
            view(expected, *source, count)[...] = values
            want = scaled(values.copy(), target[0], scale)
            view(expected, *target, count)[...] = want
        runner.pack(memory, packed_dtype, packed, pieces, piece_dtype, scale, unpacks)
        for place, count, first in pieces:
            for dtype, where in (
                (packed_dtype, packed + first * packed_item),
                (piece_dtype, place),
            ):
                got = view(memory, dtype, where, count)
                assert_same_bits(got.copy(), view(expected, dtype, where, count).copy())
                view(expected, dtype, where, count)[...] = got
        np.testing.assert_array_equal(memory, expected)


def scaled(values, dtype, scale):
    """Multiply in float32, or in float64 if a type is float64, and round once."""
    if values.dtype == dtype and scale == 1:
        return values
    pair = values.dtype.kind == "c"
    if pair:
        values, dtype = values.view(values.real.dtype), np.dtype(f"f{dtype.itemsize // 2}")
    wide = F64 if F64 in (values.dtype, dtype) else F32
    with np.errstate(all="ignore"):
        product = (values.astype(wide) * wide.type(scale)).astype(dtype)
    return product.view(f"c{2 * dtype.itemsize}") if pair else product


CONVERSIONS = [
    *((a, b) for a in (F16, BF16, F32) for b in (F16, BF16, F32)),
    (F32, F64), (F64, F32), (F64, F64), (C64, C64), (C64, C128), (C128, C64), (C128, C128),
]  # fmt: skip


def check_packings(runner, random, packed_dtype, piece_dtype, scale):
    """Pack with and without alignment and gaps, and more pieces than fit in a launch."""
    few = [0, 1, 2, 17, 4095, 4096, 4097, int(random.integers(4098, 9000))]
    for dense in (False, True):
        for aligned in (False, True):
            counts = random.permutation(few).tolist()
            check_packing(
                runner,
                random,
                packed_dtype,
                piece_dtype,
                scale,
                counts,
                dense=dense,
                aligned=aligned,
            )
    many = random.integers(0, 40, 300).tolist()
    check_packing(runner, random, packed_dtype, piece_dtype, scale, many, dense=True, aligned=True)
