"""``comm.empty(device="gpu")``: memory that NCCL allocates and registers, and its uses."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

from pycollective import array_backend, local_group
from pycollective.errors import MismatchError, NcclError
from pycollective.nccl.memory import Registered


@pytest.fixture(autouse=True)
def freed(gpus):
    """Free the arrays that errors hold while the stand-in for CuPy exists."""
    yield
    gc.collect()


def calls(gpus, rank):
    """Return a rank's calls of NCCL that concern memory."""
    words = ("Mem", "CommRegister", "CommDeregister", "CommDestroy")
    return [
        text.split()[0]
        for line in gpus.log()
        if line.startswith(f"rank {rank}: ")
        for text in [line.split(": ")[1]]
        if text.startswith(words)
    ]


def test_registered_memory_lives_as_long_as_its_array(gpus, on_gpus):
    kept = [None, None]

    def work(c):
        x = c.empty((2, 3), np.float32, device="gpu")
        assert isinstance(x, gpus.ndarray) and x.device.id == c.rank
        assert (x.shape, x.dtype) == ((2, 3), np.float32)
        x[...] = gpus.asarray(np.full((2, 3), c.rank + 1.0, np.float32))
        assert c.all_reduce(x, out=x) is x
        assert gpus.asnumpy(x).tolist() == [[3.0] * 3] * 2
        part = x[1]
        c.broadcast(part, 0, out=part)
        c.reduce(part, root=0, out=part if c.rank == 0 else None)
        c.barrier()  # the call is over
        del x
        gc.collect()
        assert calls(gpus, c.rank) == ["MemAlloc", "CommRegister"]  # a view of it still exists
        del part
        gc.collect()
        kept[c.rank] = c.empty(4, device="gpu")
        freed = ["CommDeregister", "MemFree", "MemAlloc", "CommRegister"]
        assert c.all_gather(c.empty(0, device="gpu")).shape == (0,)
        assert calls(gpus, c.rank)[2:] == freed

    for result in on_gpus(local_group(2, timeout=20), work):
        assert result is None, result
    for rank in range(2):
        end = calls(gpus, rank)[6:]
        assert end[-1] == "CommDestroy" and end.count("CommDeregister") == 1, end
        with gpus.cuda.Device(rank):
            kept[rank][...] = 5.0  # the array outlives its communicator
        before = len(gpus.log())
        kept[rank] = None
        gc.collect()
        assert [line.split(": ")[1] for line in gpus.log()[before:]] == ["MemFree 0"]


def ones(gpus, n=4):
    return gpus.asarray(np.ones(n))


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda c, x, y: c.all_reduce(x if c.rank else y),
        lambda c, x, y: c.all_reduce(x, out=y) if c.rank else c.all_reduce(x, out=x),
        lambda c, x, y: c.all_reduce(x[2 * c.rank : 2 * c.rank + 2], out=x[:2]),
        lambda c, x, y: c.broadcast(x if c.rank else y, 0),
        lambda c, x, y: c.gather(x, 0),  # the root's result is in other memory
        lambda c, x, y: c.all_to_all(x if c.rank else y, [1, 3]),
    ],
)
def test_registered_memory_on_some_ranks_only_raises(gpus, on_gpus, call):
    """NCCL does not define the result, so all ranks raise an error."""

    def work(c):
        return call(c, c.empty(4, device="gpu"), ones(gpus))

    for error in on_gpus(local_group(2, timeout=20), work):
        assert isinstance(error, MismatchError) and "in memory of empty()" in str(error), error


def test_registered_memory_allowed_uses_are_right(gpus, on_gpus):
    def work(c):
        x, y = c.empty(4, device="gpu"), ones(gpus)
        x[...] = 1.0
        assert (
            gpus.asnumpy(c.all_reduce(x, out=y)).tolist() == [2.0] * 4
        )  # allowed: all ranks do it
        half = x[2 * c.rank : 2 * c.rank + 2]
        c.all_gather(half, out=x)
        c.reduce_scatter(x, out=half)
        assert gpus.asnumpy(half).tolist() == [2.0, 2.0]
        for message in (lambda: c.send(x, 1 - c.rank), lambda: c.recv(x, 1 - c.rank)):
            with pytest.raises(ValueError, match="on both ranks: give a copy"):
                message()
        with pytest.raises(ValueError, match="'cpu' or 'gpu', not 'tpu'"):
            c.empty(4, device="tpu")

    assert on_gpus(local_group(2, timeout=20), work) == [None, None]


def test_empty_of_differing_shapes_raises_mismatch_error(gpus, on_gpus):
    found = on_gpus(local_group(2, timeout=20), lambda c: c.empty(3 + c.rank, device="gpu"))
    for error in found:
        assert isinstance(error, MismatchError) and "rank 1 is in empty(float64[4])" in str(error)


def test_empty_on_a_full_gpu_raises_memory_error(gpus, on_gpus, monkeypatch):
    """All ranks raise, and no rank keeps an array."""

    def work(c):
        c.all_reduce(ones(gpus))
        if c.rank == 1:
            monkeypatch.setattr(c._gpu.nccl._nccl, "allocate", full)
        with pytest.raises(
            MemoryError, match=r"rank 1 has no memory for empty.float64\[4\].* is full"
        ):
            c.empty(4, device="gpu")
        with pytest.raises(MemoryError, match="ncclMemAlloc failed|is full"):
            c.empty(1 << 30, device="gpu")
        return gpus.asnumpy(c.all_reduce(ones(gpus))).tolist()

    def full(*_):
        raise NcclError("it is full")

    assert on_gpus(local_group(2, timeout=20), work) == [[2.0] * 4] * 2


@pytest.mark.parametrize("version", ["21800", None])
def test_empty_without_nccl_is_an_array_of_cupy(gpus, on_gpus, monkeypatch, tmp_path, version):
    """NCCL is too old, or there is none."""
    if version is None:
        monkeypatch.setenv("PYCOLLECTIVE_NCCL_LIBRARY", str(tmp_path / "none"))
    else:
        monkeypatch.setenv("FAKE_NCCL_VERSION", version)

    def work(c):
        x = c.empty(2, np.int32, device="gpu")
        x[...] = c.rank
        return x.device.id, gpus.asnumpy(c.all_reduce(x)).tolist()

    assert on_gpus(local_group(2, timeout=20), work) == [(0, [1, 1]), (1, [1, 1])]
    assert not any("MemAlloc" in line for line in gpus.log())


def test_empty_without_cupy_raises_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError):
        local_group(1)[0].empty(2, device="gpu")
    assert array_backend.array_module(local_group(1)[0].empty(2)) is np


class Memory:
    """A stand-in for NCCL's memory that records allocations and frees."""

    def __init__(self):
        self.allocated, self.freed = 0, []

    def mem_alloc(self, nbytes):
        self.allocated += 1
        return 4096 * self.allocated

    def mem_free(self, address):
        self.freed.append(address)


def test_array_dropped_while_the_communicator_ends_is_freed(gpus):
    library, ended = Memory(), []
    registered = Registered(library, 0)
    blocks = [registered.add(64, lambda address, nbytes: address + 1) for _ in range(3)]

    def deregister(handle):
        ended.append(handle)
        blocks.pop()  # as the garbage collector may at any time, in any thread

    registered.end(deregister)
    assert ended == [4097, 8193, 12289] and not blocks
    registered.free(None)
    assert sorted(library.freed) == [4096, 8192, 12288] and not registered


def test_memory_is_freed_after_a_deregister_error(gpus):
    library = Memory()
    registered = Registered(library, 0)
    block = registered.add(64, lambda address, nbytes: 1)

    def refuse(handle):
        raise NcclError("it is refused")

    with pytest.raises(NcclError):
        registered.end(refuse)
    del block
    gc.collect()
    assert library.freed == [4096]
