"""The kernels that combine and pack, on a GPU: the same bits as the table, at any alignment."""

from __future__ import annotations

import os

import numpy as np
import pytest
from kernel_cases import (
    CONVERSIONS,
    DTYPES,
    F32,
    TABLE,
    check_combination,
    check_combinations,
    check_packings,
    fresh,
    make_memory,
    view,
)

from pycollective._core import cuda
from pycollective._core.device import cuda_runtime

pytestmark = pytest.mark.gpu

# Set by tests/gpu/run.sh under compute-sanitizer, which is hundreds of times slower.
QUICK = "PYCOLLECTIVE_QUICK" in os.environ


@pytest.fixture
def gpu(cupy):
    """Return a runner of kernels on the current device."""
    assert cuda.built(), "nvcc was not found when the package was built"

    class Gpu:
        tiled = 4 * cupy.cuda.Device().attributes["MultiProcessorCount"] * 16 * 1024 + 64

        @staticmethod
        def there_and_back(memory, work):
            # Without a pool, so that compute-sanitizer sees the end of the memory.
            with cupy.cuda.using_allocator(None):
                there = cupy.asarray(memory)
            assert there.data.ptr % 64 == 0
            work(there.data.ptr, cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr)
            memory[...] = cupy.asnumpy(there)

        @classmethod
        def combine(cls, memory, dtype, op, targets, sources, count, size):
            def work(base, device, stream):
                to, of = [base + p for p in targets], [base + p for p in sources]
                cuda.combine(op, dtype, to, of, count, size, device, stream)

            cls.there_and_back(memory, work)

        @classmethod
        def pack(cls, memory, packed_dtype, packed, pieces, piece_dtype, scale, unpacks):
            def work(base, device, stream):
                places = [(base + place, *rest) for place, *rest in pieces]
                cuda_runtime().pack(
                    base + packed, packed_dtype, places, piece_dtype, scale, unpacks, device, stream
                )

            cls.there_and_back(memory, work)

    return Gpu


@pytest.mark.parametrize(("dtype", "op"), TABLE, ids=lambda v: str(v))
def test_combine_gives_the_bits_of_the_table(gpu, dtype, op):
    check_combinations(gpu, fresh(), dtype, op)


@pytest.mark.parametrize(("packed", "piece"), CONVERSIONS, ids=lambda v: str(v))
def test_packing_converts_and_scales(gpu, packed, piece):
    random = fresh()
    check_packings(gpu, random, packed, piece, float(random.uniform(0.1, 4)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_equal_dtypes_copies(gpu, dtype):
    check_packings(gpu, fresh(), dtype, dtype, 1.0)


def test_packing_a_piece_that_is_not_aligned_is_right(gpu):
    memory = make_memory(fresh(), 4096)
    view(memory, F32, 2049, 300)[...] = np.arange(300)
    gpu.pack(memory, F32, 3, [(2049, 300, 1)], F32, 0.5, False)
    np.testing.assert_array_equal(view(memory, F32, 3, 301)[1:], np.arange(300) / 2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_combine_more_than_four_gibibytes_is_right(cupy, gpu, ranks):
    """Sum 2^30 + 3 float32, whose offsets need more than 32 bits."""
    count = (1 << 30) + 3
    free, _ = cupy.cuda.Device().mem_info
    if QUICK or free < (ranks + 1) * count * 4:
        pytest.skip("a quick run, or too little memory")
    arrays = [cupy.full(count, k + 1, cupy.float32) for k in range(ranks)]
    for k in range(ranks):
        arrays[k][-1] = 0.5
    places = [x.data.ptr for x in arrays]
    device, stream = cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr
    cuda.combine("sum", np.dtype("f4"), places, places, count, 0, device, stream)
    for x in arrays:
        assert float(x[-1]) == 0.5 * ranks
        assert bool((x[:-1] == ranks * (ranks + 1) / 2).all())
    del arrays, x
    cupy.get_default_memory_pool().free_all_blocks()


def test_combine_more_sources_than_one_launch_takes_raises(gpu):
    with pytest.raises(ValueError, match="1 to 16 sources"):
        check_combination(gpu, fresh(), F32, "sum", 17, 5, [0], [0])
