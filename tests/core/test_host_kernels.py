"""The CUDA kernels' own code on the processor: the bits of the table, at any alignment."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import (
    BF16,
    C64,
    CONVERSIONS,
    DTYPES,
    F16,
    F32,
    F64,
    TABLE,
    check_combinations,
    check_packings,
    fresh,
    make_memory,
    view,
)

from pycollective._core import cuda


class Host:
    """A runner of kernels like a device of one multiprocessor, one thread after another."""

    tiled = 4 * 16 * 1024 + 64

    @staticmethod
    def combine(memory, dtype, op, targets, sources, count, size):
        arrays = [[view(memory, dtype, p, count) for p in places] for places in (sources, targets)]
        cuda.combine_on_host(op, *arrays, size)

    @staticmethod
    def pack(memory, packed_dtype, packed, pieces, piece_dtype, scale, unpacks):
        end = max(offset + count for _, count, offset in pieces)
        arrays = [view(memory, piece_dtype, place, count) for place, count, _ in pieces]
        whole = view(memory, packed_dtype, packed, end)
        cuda.pack_on_host(whole, arrays, [offset for *_, offset in pieces], scale, unpacks, 2)


@pytest.mark.parametrize(("dtype", "op"), TABLE, ids=lambda v: str(v))
def test_combine_on_host_gives_the_bits_of_the_table(dtype, op):
    check_combinations(Host, fresh(), dtype, op)


@pytest.mark.parametrize(("packed", "piece"), CONVERSIONS, ids=lambda v: str(v))
def test_packing_converts_and_scales(packed, piece):
    random = fresh()
    check_packings(Host, random, packed, piece, float(random.uniform(0.1, 4)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_equal_dtypes_copies(dtype):
    check_packings(Host, fresh(), dtype, dtype, 1.0)


def test_packing_a_piece_that_is_not_aligned_is_right():
    random = fresh()
    memory = make_memory(random, 4096)
    whole, piece = view(memory, F32, 3, 301), view(memory, F16, 2049, 300)
    piece[...] = np.arange(300)
    cuda.pack_on_host(whole, [piece], [1], 0.5)
    np.testing.assert_array_equal(whole[1:], np.arange(300) / 2)


@pytest.mark.parametrize(
    ("packed", "piece", "scale"),
    [(F64, F16, 1.0), (BF16, F64, 2.0), (np.dtype("i4"), np.dtype("i4"), 2.0), (F32, C64, 1.0)],
    ids=str,
)
def test_packing_unsupported_conversion_raises(packed, piece, scale):
    with pytest.raises(ValueError, match=f"cannot pack {piece} as {packed} times"):
        cuda.pack_on_host(np.zeros(5, packed), [np.zeros(5, piece)], [0], scale)


def test_cut_covers_every_item_with_aligned_vectors():
    """Every item is in the head, a vector or the tail, and vectors are aligned, at any size."""
    random = fresh()
    for _ in range(300):
        item = int(random.choice([1, 2, 4, 8, 16]))
        count = int(random.integers(0, 2 ** random.integers(1, 45)))
        base = int(random.integers(0, 2**40)) * 16 + int(random.integers(0, 16))
        ranks = int(random.integers(1, 17))
        tile = int(random.choice([0, 512, 1024]))
        arrays = [base + 16 * int(random.integers(0, 2**40)) for _ in range(ranks)]
        head, vectors, tiles, aligned, blocks = cuda.cut(arrays, count, item, tile, 100)
        left = count - head - vectors * (16 // item)
        assert head * item < 16 and left >= 0 and aligned == (base % item == 0)
        assert tiles == 0 or (tiles >= 400 and (vectors - tiles * tile) < tile)
        assert 1 <= blocks <= 3200
        if base % item == 0:
            assert left * item < 16
            assert vectors == 0 or (base + head * item) % 16 == 0
        else:
            assert (vectors == 0 and head == 0) or (base + head * item) % 16 == 0
        if ranks > 1:
            arrays[-1] += 1
            assert cuda.cut(arrays, count, item, tile, 100)[:3] == (0, 0, 0)


def test_combine_on_host_invalid_arguments_raise():
    x = np.zeros(3, "f4")
    with pytest.raises(ValueError, match="1 to 16 sources into 1 to 16 targets, not 17 into 1"):
        cuda.combine_on_host("sum", [x] * 17, [x])
    with pytest.raises(TypeError, match="bools are neither summed"):
        cuda.combine_on_host("sum", [np.zeros(3, bool)], [np.zeros(3, bool)])


@pytest.mark.skipif(cuda.built(), reason="this build has CUDA")
def test_cuda_without_the_build_raises():
    with pytest.raises(RuntimeError, match="no CUDA part"):
        cuda.combine("sum", F32, [0], [0], 0)


@pytest.mark.skipif(
    not cuda.built() or cuda.device_count()[0] > 0, reason="needs CUDA without a GPU"
)
def test_cuda_without_a_gpu_raises():
    with pytest.raises(RuntimeError, match="CUDA, reading the properties of device 0: .+ \\(cuda"):
        cuda.combine("sum", F32, [0], [0], 0)
