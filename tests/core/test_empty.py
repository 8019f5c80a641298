"""Communicator.empty: arrays that processes of one host reduce without a copy."""

from __future__ import annotations

import functools
import gc
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import rank_groups
from rank_groups import make_group

from pycollective.algorithms import names
from pycollective.comm import local_group
from pycollective.launch.spawn import spawn


def shm_group(size):
    return make_group("shm", size, 30.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "int16", "complex128"])
def test_empty_all_reduce_works_on_mapped_memory(ranks, dtype, on_ranks):
    def work(c):
        x = c.empty((7, 4_321), dtype)
        y = c.empty((7, 4_321), dtype)
        assert x.shape == (7, 4_321)
        assert x.dtype == dtype
        assert x.ctypes.data % 64 == 0
        for turn in range(3):
            x[...] = np.arange(x.size).reshape(x.shape) % 11 + c.rank + turn
            mine = x.copy()
            whole = c.all_reduce(mine)  # ordinary memory, for comparison
            assert c.all_reduce(x, out=y) is y  # from one shared array to another
            np.testing.assert_array_equal(y, whole)
            np.testing.assert_array_equal(x, mine)
            c.all_reduce(x, out=x)
            np.testing.assert_array_equal(x, whole)
            part = x[2:5]  # a part of a shared array
            part[...] = c.rank
            c.all_reduce(part, out=part)
            assert (part == c.size * (c.size - 1) // 2).all()

    assert on_ranks(shm_group(ranks), work) == [None] * ranks


def test_empty_on_some_ranks_only_is_right(on_ranks):
    def work(c):
        x = c.empty(50_000)
        if c.rank == 1:
            x = np.empty(50_000)
        x.fill(c.rank)
        c.all_reduce(x, out=x)
        assert (x == 3).all()

    assert on_ranks(shm_group(3), work) == [None] * 3


def test_empty_among_threads_or_of_one_rank_is_ordinary(on_ranks):
    def work(c):
        x = c.empty([3, 2], "int8")
        x.fill(1)
        np.testing.assert_array_equal(c.all_reduce(x, out=x), np.full((3, 2), c.size))

    assert on_ranks(local_group(2, timeout=30), work) == [None] * 2
    assert on_ranks(local_group(1), work) == [None]


def with_memories(monkeypatch, kind, size):
    """Return the communicators of a group, and the descriptors of its memories."""
    memories = []
    joined = rank_groups._joined

    def watched(ranks):
        memories.append(joined(ranks))
        return memories[-1]

    monkeypatch.setattr(rank_groups, "_joined", watched)
    comms = make_group(kind, size, 30.0)
    return comms, [each[0].descriptor for each in memories]


COLLECTIVES = [
    *((c, how) for c in ("all_reduce", "reduce_scatter", "all_gather") for how in names(c)),
    ("all_reduce", "auto"),
    ("reduce", "tree"),
    ("broadcast", "tree"),
    ("broadcast", "chain"),
    ("scatter", None),
    ("gather", None),
    ("all_to_all", None),
]


@pytest.mark.parametrize(("kind", "ranks"), [("shm", 2), ("shm", 3), ("mixed", 3), ("mixed", 5)])
def test_empty_in_collectives_is_right(kind, ranks, on_ranks):
    items = 40_000  # of a rank's part: a message of 320 kB is not copied
    whole = np.arange(ranks * items).reshape(ranks, items) % 1009

    def work(c):
        given, got, part, mine = (c.empty(s, "i8") for s in [whole.shape] * 2 + [(1, items)] * 2)
        for collective, how in COLLECTIVES:
            options = {"algorithm": how} if how else {}
            call = functools.partial(getattr(c, collective), **options)
            given[...] = whole + c.rank
            mine[...] = whole[c.rank]
            got.fill(-1)
            part.fill(-1)
            if collective == "all_reduce":
                call(given, out=got)
                want = ranks * whole + ranks * (ranks - 1) // 2
                assert np.array_equal(got, want), how
                assert np.array_equal(call(given, out=given), want), how
            elif collective == "reduce":
                call(given, root=1, out=got if c.rank == 1 else None)
                assert c.rank != 1 or np.array_equal(got, ranks * whole + ranks * (ranks - 1) // 2)
            elif collective == "reduce_scatter":
                call(given, out=part)
                assert np.array_equal(part[0], ranks * whole[c.rank] + ranks * (ranks - 1) // 2), (
                    how
                )
            elif collective == "broadcast":
                assert np.array_equal(call(given, root=1, out=got), whole + 1), how
            elif collective == "all_gather":
                assert np.array_equal(call(mine, out=got), whole), how
            elif collective == "gather":
                call(mine, root=1, out=got if c.rank == 1 else None)
                assert c.rank != 1 or np.array_equal(got, whole)
            elif collective == "scatter":
                call(given if c.rank == 1 else None, root=1, out=part)
                assert np.array_equal(part[0], whole[c.rank] + 1)
            else:
                call(given, out=got)
                assert np.array_equal(got, whole[c.rank] + np.arange(ranks)[:, None])

    assert on_ranks(make_group(kind, ranks, 30.0), work) == [None] * ranks


@pytest.mark.parametrize(("kind", "how"), [("shm", "ring"), ("mixed", "hierarchical")])
def test_empty_all_reduce_leaves_message_slots_unused(kind, how, monkeypatch, on_ranks):
    used = {}
    for make in ("comm.empty", "numpy.empty"):
        comms, descriptors = with_memories(monkeypatch, kind, 4)
        assert [c.hosts for c in comms] == [[0] * 4 if kind == "shm" else [0, 1, 0, 1]] * 4

        def work(c, make=make):
            x = c.empty(1 << 18) if make == "comm.empty" else np.empty(1 << 18)
            x.fill(c.rank)
            c.barrier()
            before = blocks()
            c.barrier()
            for _ in range(3):
                c.all_reduce(x, "max", out=x, algorithm=how)
                assert (x == 3).all()
            c.barrier()
            return blocks() - before

        def blocks(descriptors=descriptors):
            return sum(os.fstat(d).st_blocks for d in descriptors) * 512

        used[make] = max(on_ranks(comms, work))
    assert used["numpy.empty"] > 1 << 20
    assert used["comm.empty"] < 64 << 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shm", "mixed"])
def test_empty_dropped_arrays_free_their_memory(kind, monkeypatch, on_ranks):
    comms, (descriptor, *_) = with_memories(monkeypatch, kind, 3 if kind == "mixed" else 2)

    def work(c):
        for _ in range(20):
            x = c.empty(1 << 20, "u1")
            x.fill(1)
            del x
            gc.collect()
            c.barrier()

    before = os.fstat(descriptor).st_blocks
    assert on_ranks(comms, work) == [None] * len(comms)
    assert os.fstat(descriptor).st_blocks - before < 2 * 8 * 20 * 2 + (4 << 20) // 512


def test_empty_arrays_outlive_the_communicator(on_ranks):
    arrays = on_ranks(shm_group(2), lambda c: c.empty(1000))
    gc.collect()
    for x in arrays:
        x.fill(3)
        assert x.sum() == 3000


def test_empty_without_items_keeps_its_shape(on_ranks):
    for x in on_ranks(shm_group(2), lambda c: c.empty((0, 3))):
        assert x.shape == (0, 3)


@pytest.mark.parametrize("kind", ["shm", "mixed"])
def test_empty_many_short_arrays_cost_no_descriptors_and_few_mappings(kind, on_ranks):
    comms = make_group(kind, 3, 30.0)
    on_ranks(comms, lambda c: c.empty(4))

    def held():
        maps = Path("/proc/self/maps").read_text().count("memfd:pycollective")
        return len(os.listdir("/proc/self/fd")), maps

    before = held()

    def work(c):
        arrays = [c.empty(n % 33, "f4") for n in range(400)]  # up to 128 bytes
        for n, x in enumerate(arrays):
            x.fill(1000 * c.rank + n)
        c.barrier()
        for n, x in enumerate(arrays):
            assert x.ctypes.data % 64 == 0
            assert (x == 1000 * c.rank + n).all()
            assert (c.all_reduce(x) == sum(1000 * r + n for r in range(3))).all()
        return arrays

    kept = on_ranks(comms, work)
    descriptors, mappings = held()
    assert descriptors == before[0]
    assert mappings - before[1] <= 3 * 3  # 3 for each of the ranks, which are in this process
    del kept


def test_empty_long_arrays_cost_no_descriptors(on_ranks):
    comms = shm_group(2)
    before = len(os.listdir("/proc/self/fd"))
    kept = on_ranks(comms, lambda c: [c.empty(100_000, "u1") for _ in range(20)])
    assert len(os.listdir("/proc/self/fd")) == before
    del kept


@pytest.mark.slow  # uses 1 GiB
def test_empty_dropped_arrays_keep_few_pages():
    """Also after blocks without pages were used again."""

    def work(c):
        def shared():
            (line,) = (
                text
                for text in Path("/proc/self/status").read_text().splitlines()
                if text.startswith("RssShmem")
            )
            return int(line.split()[1]) >> 10  # MiB

        found = []
        for count in (64, 45, 45) if c.rank == 0 else ():
            arrays = [c.empty(16 << 20, "u1") for _ in range(count)]
            for x in arrays:
                x[::4096] = 1
            del x, arrays
            found.append(shared())
        c.barrier()
        return found

    assert max(spawn(work, 2)[0]) < 600


def test_empty_dropped_short_arrays_free_their_memory(monkeypatch, on_ranks):
    comms, (descriptor,) = with_memories(monkeypatch, "shm", 2)

    def work(c):
        for _ in range(150):
            c.empty(4_000, "f8").fill(1)  # 32,000 bytes: two to a region
        gc.collect()
        c.barrier()
        c.empty(4_000, "f8")  # collects dropped arrays
        c.barrier()

    before = os.fstat(descriptor).st_blocks
    assert on_ranks(comms, work) == [None] * 2
    grown = (os.fstat(descriptor).st_blocks - before) * 512
    assert grown < 3 << 20  # of 9.6 MB; the group's own pages count, too


def test_empty_wrong_arguments_raise(on_ranks):
    (alone,) = local_group(1)
    with pytest.raises(ValueError, match="must be 0 or more"):
        alone.empty((2, -1))
    with pytest.raises(TypeError, match="Python objects"):
        alone.empty(2, object)

    def too_much(c):
        with pytest.raises(MemoryError):
            c.empty(1 << 58, "u1")
        with pytest.raises(MemoryError, match="Unable to allocate"):
            c.empty(1 << 50, "u1")
        x = c.empty(1000 + c.rank, "u1")[:1000]  # the group still works, and lengths may differ
        x.fill(1)
        return c.all_reduce(x).tolist()

    assert on_ranks(shm_group(2), too_much) == [[2] * 1000] * 2


def test_empty_on_gpu_without_cupy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    (comm,) = local_group(1)
    with pytest.raises(ImportError, match=r"pip install 'pycollective\[cuda12\]'"):
        comm.empty(3, device="gpu")


def shared_copies(comm):
    """Broadcast and gather arrays, of which each may be mapped; return the wrong calls."""
    wrong, size = [], comm.size

    def array(count, is_mapped):
        made = comm.empty(count, np.float32) if is_mapped else np.empty(count, np.float32)
        made[...] = -1
        return made

    for count in (120_000, 131_072, 400_003):  # one below the size from which all ranks copy
        for number in range(4 * size):
            root, flags = number % size, [(number * 37 + r * 11 + count) % 8 for r in range(size)]
            own, to_root = flags[comm.rank] != 0, flags[root] != 1
            x = array(count, own)
            if comm.rank == root:
                x[...] = np.arange(count)
            into = x if number % 3 else array(count, to_root)
            comm.broadcast(x, root=root, out=into)
            if (into != np.arange(count)).any():
                wrong.append(("broadcast", count, number))
            part = array(count // size, own)
            part[...] = comm.rank
            out = array(count // size * size, to_root) if comm.rank == root else None
            comm.gather(part, root=root, out=out)
            part[...] = -2  # the root must have the part already, or still wait for it
            if out is not None and (out != np.repeat(np.arange(size), count // size)).any():
                wrong.append(("gather", count, number))
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("threads", [False, True])
def test_ranks_share_the_copies_of_a_broadcast_and_a_gather(size, threads):
    """Any of the arrays may be ordinary, and then the call moves it in another way."""
    assert spawn(shared_copies, size, threads=threads) == [[]] * size
