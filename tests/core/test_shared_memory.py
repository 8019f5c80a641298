"""The memory of a group of processes: seals, checks at opening, forks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import sys

import numpy as np
import pytest
from rank_groups import make_group

from pycollective import _core, algorithms
from pycollective.comm import Communicator
from pycollective.comm.split import SharedMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")


def test_memory_of_a_group_cannot_be_shortened():
    group = _core.ShmGroup.create(2)
    seals = fcntl.fcntl(group.descriptor, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_SEAL  # no process can add F_SEAL_GROW, which would end comm.empty()
    with pytest.raises(OSError, match="not permitted") as caught:
        os.ftruncate(group.descriptor, 0)
    assert caught.value.errno == errno.EPERM


@contextlib.contextmanager
def copy_of(group, seals=None):
    """Make another memory with the same contents, as a hostile process may."""
    descriptor = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    size = os.fstat(group.descriptor).st_size
    try:
        os.truncate(descriptor, size)
        os.pwrite(descriptor, os.pread(group.descriptor, 4096, 0), 0)
        wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL if seals is None else seals
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, wanted)
        yield descriptor
    finally:
        os.close(descriptor)


def test_open_accepts_sealed_memory_of_a_group():
    with copy_of(_core.ShmGroup.create(2)) as descriptor:
        assert _core.ShmGroup.open(descriptor).size == 2


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_open_refuses_memory_that_is_not_sealed(seals):
    with (
        copy_of(_core.ShmGroup.create(2), seals=seals) as descriptor,
        pytest.raises((OSError, RuntimeError), match="not sealed"),
    ):
        _core.ShmGroup.open(descriptor)


def test_open_refuses_memory_of_another_size():
    with copy_of(_core.ShmGroup.create(2)) as descriptor:
        os.truncate(descriptor, os.fstat(descriptor).st_size + 4096)
        with pytest.raises(ValueError, match="is not the shared memory of a group"):
            _core.ShmGroup.open(descriptor)


def test_open_of_a_file_raises(tmp_path):
    with (
        open(tmp_path / "file", "w+b") as file,
        pytest.raises((OSError, RuntimeError), match="not a descriptor of shared memory"),
    ):
        _core.ShmGroup.open(file.fileno())


def test_size_of_a_group_is_kept_when_a_process_writes_to_its_header():
    group = _core.ShmGroup.create(2)
    other = _core.ShmGroup.open(group.descriptor)
    head = os.pread(group.descriptor, 64, 0)
    offset = head.index((2).to_bytes(4, "little"))
    os.pwrite(group.descriptor, (1000).to_bytes(4, "little"), offset)
    assert (group.size, other.size) == (2, 2)


def in_a_child(work):
    """Run the work in a forked child; return True if the work raised no error."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def test_forked_child_that_drops_a_group_does_not_leave_it():
    group = [_core.ShmGroup.create(2)]  # no Communicator has it, as in the middle of init()
    group[0].join(0)

    def drop():
        group.clear()
        gc.collect()

    assert in_a_child(drop)
    assert group[0].is_in(0)


@pytest.mark.parametrize("kind", ["shm", "tcp", "mixed"])
def test_forked_child_cannot_act_for_a_rank(kind):
    comms = make_group(kind, 2, 30.0)
    group = comms[0]._group

    def speak():
        group.abort("by the child")
        group.leave(0)
        group.send_heartbeat()

    assert in_a_child(speak)
    for comm in comms:
        assert comm._group.failure is None
        assert comm._group.silent(0.0) == []
    assert "has left" not in comms[1].describe()


def test_forked_child_that_drops_shared_arrays_does_not_free_them(on_ranks):
    comms = make_group("shm", 2, 30.0)
    arrays = on_ranks(comms, lambda c: [c.empty(100_000), c.empty(100)])
    for rank, rank_arrays in enumerate(arrays):
        for x in rank_arrays:
            x.fill(rank + 1)

    def drop():
        arrays[0].clear()
        gc.collect()

    for _ in range(2):  # as many as there are ranks
        assert in_a_child(drop)
    for rank, rank_arrays in enumerate(arrays):
        for x in rank_arrays:
            assert (x == rank + 1).all()


def test_forked_child_that_writes_to_shared_arrays_writes_for_itself(on_ranks):
    comms = make_group("shm", 2, 30.0)
    arrays = on_ranks(comms, lambda c: [c.empty(100_000), c.empty(100)])
    for rank, rank_arrays in enumerate(arrays):
        for x in rank_arrays:
            x.fill(rank + 1)

    def scribble():
        for rank_arrays in arrays:
            for rank, x in enumerate(rank_arrays):
                x[:50] = 7 + rank

        def check():
            for rank_arrays in arrays:
                for rank, x in enumerate(rank_arrays):
                    assert (x[:50] == 7 + rank).all()
                    x.fill(9)

        assert in_a_child(check)  # the child's child writes for itself, too
        check()

    assert in_a_child(scribble)
    for rank, rank_arrays in enumerate(arrays):
        for x in rank_arrays:
            assert (x == rank + 1).all()
    results = on_ranks(comms, lambda c: c.all_reduce(arrays[c.rank][0]))
    assert all((result == 3).all() for result in results)


@pytest.mark.slow
def test_memory_of_64_ranks_that_exchange_messages_stays_below_a_gib(on_ranks):
    size = 64
    memory = _core.ShmGroup.create(size, 0)
    members = [_core.ShmGroup.open(memory.descriptor) for _ in range(size)]
    for rank, member in enumerate(members):
        member.join(rank)
    assert os.fstat(memory.descriptor).st_blocks * 512 < 1 << 20
    comms = [Communicator(m, r, 120.0, SharedMemory(m)) for r, m in enumerate(members)]
    x = np.ones(size * 32 * 1024, "f4")  # 128 KiB for each pair

    def run(comm, call, name):
        return call(comm, x, algorithm=name).ravel()[-1]

    def exchange(comm):
        others = [r for r in range(size) if r != comm.rank]
        works = [comm.recv(source=r, shape=1 << 15, dtype="f4", async_op=True) for r in others]
        for r in others:
            comm.send(x[: 1 << 15], r)
        return [work.wait()[-1] for work in works]

    calls = {
        "all_to_all": Communicator.all_to_all,
        "all_reduce": Communicator.all_reduce,
        "reduce_scatter": Communicator.reduce_scatter,
    }
    for collective, call in calls.items():
        for name in ["auto", *algorithms.names(collective)]:
            expected = 1 if collective == "all_to_all" else size
            # A channel's slots are used in turns.
            for _ in range(4 if name == "direct" else 1):
                got = on_ranks(comms, lambda c, call=call, name=name: run(c, call, name))
                assert got == [expected] * size, (collective, name)
    assert on_ranks(comms, exchange) == [[1] * (size - 1)] * size
    used = os.fstat(memory.descriptor).st_blocks * 512
    assert used < 1 << 30, f"{used >> 20} MiB"
    on_ranks(comms, lambda c: c.close())
