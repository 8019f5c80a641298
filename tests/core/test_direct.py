"""The direct path of all_reduce: ranks that share a board, as threads and through shared memory."""

from __future__ import annotations

import os
import threading

import ml_dtypes
import numpy as np
import pytest
from rank_groups import make_group

import pycollective as pc
from pycollective import _core, algorithms
from pycollective.comm import local_group

TIMEOUT = 300.0  # sanitizers are slow
KINDS = ["threads", "shm"]
# Sizes around the limits of slots, one-shot calls, chunks, blocks and the staging buffer.
SIZES = [1, 11, 12, 13, 4095, 4096, 4097, 16385, 65_536, 65_537, 131_087, 2_300_011]
if "PYCOLLECTIVE_SANITIZED" in os.environ:
    SIZES = SIZES[:-2]


def group(kind: str, size: int) -> list[pc.Communicator]:
    return make_group(kind, size, TIMEOUT)


def off_by(x: np.ndarray, items: int) -> np.ndarray:
    """Return a copy whose address differs from other ranks' modulo a cache line."""
    memory = np.empty(x.size + 32, x.dtype)
    copy = memory[items : items + x.size]
    copy[...] = x
    return copy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, pytest.param(7, marks=pytest.mark.slow)])
def test_direct_of_any_size_is_right_also_in_place(kind, ranks, on_ranks):
    comms = group(kind, ranks)
    for size in SIZES:
        x = np.random.default_rng(size).integers(-9, 9, (ranks, size)).astype("float32")
        want = x.sum(axis=0)

        def work(c, x=x):
            mine = off_by(x[c.rank], c.rank * 5 % 16)
            new = c.all_reduce(mine)
            np.testing.assert_array_equal(mine, x[c.rank])
            in_place = c.all_reduce(mine, out=mine)
            assert in_place is mine
            return new, in_place

        for new, in_place in on_ranks(comms, work):
            np.testing.assert_array_equal(new, want)
            np.testing.assert_array_equal(in_place, want)


def test_direct_many_ranks_fill_their_staging_rings(on_ranks):
    def work(c):
        x = np.full(c.size << 15, c.rank, "float32")
        each = np.arange(c.size, dtype="float32")
        total = np.float32(each.sum())
        for root in (0, c.size - 1):
            is_root = c.rank == root
            assert (c.all_reduce(x) == total).all()
            np.testing.assert_array_equal(
                c.reduce(x, root=root), np.full(x.size, total) if is_root else None
            )
            assert (c.reduce_scatter(x) == total).all()
            assert (c.broadcast(x, root=root) == root).all()
            assert (
                c.scatter(x if is_root else None, out=x[: 1 << 15].copy(), root=root) == root
            ).all()
            for got in (c.all_gather(x), c.gather(x, root=root), c.all_to_all(x)):
                if got is not None:
                    np.testing.assert_array_equal(got.reshape(c.size, -1).T[[0, -1]], [each, each])

    errors = [e for e in on_ranks(group("shm", 12), work) if e]
    assert not errors, errors


@pytest.mark.parametrize("kind", KINDS)
def test_direct_many_calls_reuse_the_staging_buffer(kind, on_ranks):
    sizes = np.random.default_rng(1).integers(1, 60_000, 400).tolist()

    def work(c):
        for i, size in enumerate(sizes):
            x = np.full(size, c.rank + i, "int64")
            assert (c.all_reduce(x, "max") == i + c.size - 1).all()

    assert on_ranks(group(kind, 3), work) == [None] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [5, 3_000, 30_000])
def test_direct_rounds_halves_once(kind, dtype, size, on_ranks):
    x = np.random.default_rng(2).standard_normal((3, size)).astype(dtype)
    want = x.astype("float32").sum(axis=0, dtype="float32").astype(dtype)
    for result in on_ranks(group(kind, 3), lambda c: c.all_reduce(x[c.rank])):
        assert result.tobytes() == want.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_direct_results_larger_than_the_caches_are_right(kind, on_ranks):
    """Non-temporal stores work from any address to any address."""
    part = 12_000_001
    whole = np.arange(2 * part, dtype="uint32").view("uint8")[: 2 * part]

    def work(c):
        mine = off_by(whole[c.rank * part : (c.rank + 1) * part], 1 + 2 * c.rank)
        memory = np.zeros(2 * part + 100, "uint8")
        out = memory[3 + c.rank : 3 + c.rank + 2 * part]
        np.testing.assert_array_equal(c.all_gather(mine, out=out), whole)
        out.fill(0)
        out[:] = whole if c.rank == 1 else 0
        np.testing.assert_array_equal(c.broadcast(out, root=1, out=out), whole)
        got = memory[5 : 5 + part]
        got.fill(0)
        np.testing.assert_array_equal(
            c.scatter(whole if c.rank == 0 else None, out=got), whole[c.rank * part :][:part]
        )
        assert not memory[:3].any()
        assert not memory[-90:].any()

    assert on_ranks(group(kind, 2), work) == [None] * 2


def test_reproducible_with_another_algorithm_raises_value_error():
    (alone,) = local_group(1)
    for call in (alone.all_reduce, alone.all_reduce_many):
        with pytest.raises(ValueError, match="only the algorithm 'direct' does, not 'ring'"):
            call(np.ones(3), algorithm="ring", reproducible=True)


@pytest.mark.parametrize("bytes_per_pack", [0, 1 << 20])
def test_reproducible_buckets_have_the_bits_of_their_arrays(bytes_per_pack, on_ranks):
    x = np.random.default_rng(5).standard_normal((3, 4, 50)).astype("float16")

    def work(c):
        arrays = list(x[c.rank])
        packed = c.all_reduce_many(arrays, reproducible=True, bytes_per_pack=bytes_per_pack)
        return [a.tobytes() for a in packed], [
            c.all_reduce(a, reproducible=True).tobytes() for a in arrays
        ]

    for packed, alone in on_ranks(local_group(3), work):
        assert packed == alone


def test_direct_as_an_own_schedule_gives_the_same_bits(on_ranks):
    # A user's table of the same schedule goes through the executor, not the direct path.
    for ranks in (2, 3, 5):
        x = np.random.default_rng(4).standard_normal((ranks, 9_001)).astype("float32")
        x[:, 0] = [-0.0 if r % 2 else 0.0 for r in range(ranks)]
        own = _core.Algorithm("own", algorithms.schedule("direct", ranks))
        for op in ("sum", "min", "prod"):

            def results_by(algorithm, op=op, ranks=ranks, x=x):
                def work(c):
                    out = np.empty_like(x[0])
                    c._core.all_reduce(x[c.rank], out, op, algorithm, False, 30.0)
                    return out

                return on_ranks(local_group(ranks, timeout=30), work)

            assert results_by(own)[0].tobytes() == results_by("direct")[0].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(3, 4), (3, 30_000), (30_000, 30_001), (300_000, 5)])
def test_direct_differing_lengths_raise_mismatch_error(kind, sizes, on_ranks):
    def work(c):
        with pytest.raises(pc.MismatchError) as error:
            c.all_reduce(np.zeros(sizes[c.rank]))
        return str(error.value)

    for text in on_ranks(group(kind, 2), work):
        assert f"float64[{sizes[0]}]" in text
        assert f"float64[{sizes[1]}]" in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 30_000])
def test_direct_missing_rank_raises_timeout_error(kind, size, on_ranks):
    comms = group(kind, 2)

    def work(c):
        if c.rank == 1:
            return
        with pytest.raises(pc.CollectiveTimeoutError, match="waited until its deadline"):
            c.all_reduce(np.zeros(size), timeout=0.2)

    assert on_ranks(comms, work) == [None] * 2
    with pytest.raises(pc.CollectiveTimeoutError):
        comms[1].all_reduce(np.zeros(size))


class TestFastPath:
    """The fast path to the core and the general method give the same results."""

    @pytest.fixture
    def alone(self):
        (comm,) = local_group(1, timeout=30)
        return comm

    def test_fast_path_is_a_documented_method(self, alone):
        assert "element-wise reduction" in pc.Communicator.all_reduce.__doc__
        assert pc.Communicator.all_reduce.__name__ == "all_reduce"
        assert callable(alone.all_reduce)
        np.testing.assert_array_equal(pc.Communicator.all_reduce(alone, np.ones(3)), np.ones(3))

    def test_fast_path_takes_all_forms_of_arguments(self, alone):
        x = np.arange(6.0).reshape(2, 3)
        ways = [
            lambda: alone.all_reduce(x),
            lambda: alone.all_reduce(x=x),
            lambda: alone.all_reduce(x, "max"),
            lambda: alone.all_reduce(x, op="max", out=None),
            lambda: alone.all_reduce(x, out=np.empty_like(x), algorithm="direct"),
            lambda: alone.all_reduce(x, algorithm="".join(["au", "to"])),
            lambda: alone.all_reduce(x.tolist()),
            lambda: alone.all_reduce(np.asfortranarray(x)),
            lambda: alone.all_reduce(x, out=np.empty_like(x, order="F")),
            lambda: alone.all_reduce(x, timeout=3),
        ]
        for way in ways:
            np.testing.assert_array_equal(way(), x)
        assert alone.all_reduce(x) is not x

    def test_fast_path_of_more_kinds_of_calls_than_are_cached_is_right(self, alone):
        for _ in range(3):
            for size in range(1, 30):
                x = np.arange(size, dtype="int16")
                np.testing.assert_array_equal(alone.all_reduce(x, "max"), x)

    def test_fast_path_wrong_arguments_raise(self, alone):
        x = np.ones(4)
        with pytest.raises(ValueError, match="read-only"):
            frozen = np.ones(4)
            frozen.flags.writeable = False
            alone.all_reduce(x, out=frozen)
        with pytest.raises(ValueError, match="out must be like the input"):
            alone.all_reduce(x, out=np.ones(5))
        with pytest.raises(ValueError, match="out must be like the input"):
            alone.all_reduce(x, out=np.ones(4, "float32"))
        with pytest.raises(ValueError, match="unknown op 'add'"):
            alone.all_reduce(x, "add")
        with pytest.raises(TypeError, match="bools"):
            alone.all_reduce(np.ones(3, bool))
        with pytest.raises(TypeError):
            alone.all_reduce()
        with pytest.raises(TypeError):
            alone.all_reduce(x, x=x)
        with pytest.raises(TypeError):
            alone.all_reduce(x, "sum", op="sum")
        with pytest.raises(ValueError, match="timeout must be"):
            alone.all_reduce(x, timeout=-1)

    def test_fast_path_overlapping_arrays_are_copied_first(self, alone):
        x = np.arange(10.0)
        want = x[:8].copy()
        np.testing.assert_array_equal(alone.all_reduce(x[:8], out=x[2:]), want)

    def test_fast_path_of_a_closed_communicator_raises(self, alone):
        alone.all_reduce(np.ones(2))
        alone.close()
        with pytest.raises(pc.CollectiveError, match="closed"):
            alone.all_reduce(np.ones(2))

    def test_fast_path_subclasses_are_reduced_and_other_byte_orders_raise(self, alone):
        class Mine(np.ndarray):
            pass

        np.testing.assert_array_equal(alone.all_reduce(np.ones(3).view(Mine)), np.ones(3))
        with pytest.raises(TypeError, match="dtype >f8"):
            alone.all_reduce(np.ones(3, ">f8"))

    def test_fast_path_of_ranks_in_threads_makes_progress(self):
        comms = local_group(4, timeout=30)
        results = []

        def work(c):
            for _ in range(200):
                x = np.ones(3)
                c.all_reduce(x, out=x)
            results.append(x[0])

        threads = [threading.Thread(target=work, args=(c,)) for c in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [4.0] * 4


def test_fast_path_beside_a_computing_thread_makes_progress(on_ranks):
    """The computing thread gets the GIL too, although the ranks pass it among themselves."""
    counted, ending = [0], threading.Event()

    def compute():
        while not ending.is_set():
            counted[0] += 1

    def work(c):
        before = c.broadcast(np.array(counted))[0]
        sums = [c.all_reduce(np.ones(2))[0] for _ in range(200)]
        while c.all_reduce(np.array(counted), "min")[0] < before + 2000:
            pass
        return set(sums)

    computing = threading.Thread(target=compute)
    computing.start()
    try:
        assert on_ranks(pc.local_group(3, timeout=60), work) == [{3.0}] * 3
    finally:
        ending.set()
        computing.join()
