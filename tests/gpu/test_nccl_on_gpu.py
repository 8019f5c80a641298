"""Communicators on real GPUs with the real NCCL: one rank, ranks that share a GPU, several GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from pycollective import _core, distribute, local_group, nccl, timeline
from pycollective.comm import on_device
from pycollective.errors import CollectiveError, PeerLostError
from pycollective.nccl.loading import cuda_major, require_cuda

pytestmark = pytest.mark.gpu


@pytest.fixture
def library(cupy):
    """Return NCCL; fail, and do not skip, if it is missing."""
    found = nccl.library()
    require_cuda(found, cupy.cuda.runtime.driverGetVersion())
    assert cuda_major(found) is not None
    return found


@pytest.fixture
def several(cupy):
    """Return the number of GPUs, at most four."""
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("one GPU")
    return min(4, count)


def on_gpus(cupy, on_ranks, ranks, work):
    def on_one(c):
        with cupy.cuda.Device(c.rank % cupy.cuda.runtime.getDeviceCount()):
            try:
                return work(c)
            finally:
                c.close()

    results = on_ranks(local_group(ranks, timeout=60), on_one)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def every_collective(cupy, c):
    """Check all collectives on one rank, with small whole numbers."""
    n, r, get = c.size, c.rank, cupy.asnumpy
    values = [np.arange(4 * n, dtype=np.float32).reshape(2 * n, 2) + q for q in range(n)]
    x, total, whole = cupy.asarray(values[r]), sum(values), np.concatenate(values)
    same = np.testing.assert_array_equal
    same(get(c.all_reduce(x)), total)
    same(get(c.all_reduce(x, "max", async_op=True).wait()), values[-1])
    np.testing.assert_allclose(get(c.all_reduce(x, "mean")), total / n, rtol=1e-6)
    same(get(c.reduce_scatter(x)), total[2 * r : 2 * r + 2])
    same(get(c.all_gather(x)), whole)
    same(get(c.all_to_all(x)), np.concatenate([v[2 * r : 2 * r + 2] for v in values]))
    for root in range(n):
        same(get(c.broadcast(x, root)), values[root])
        same(get(c.scatter(x, root)), values[root][2 * r : 2 * r + 2])
        for got, want in ((c.reduce(x, root=root), total), (c.gather(x, root), whole)):
            assert (got is None) == (r != root)
            if got is not None:
                same(get(got), want)
    rows = cupy.full((r + 1, 3), r, np.int16)
    same(get(c.all_gather(rows, ragged=True))[:, 0], np.repeat(np.arange(n), np.arange(1, n + 1)))
    many = c.all_reduce_many([x, cupy.ones(5, np.float64), x[0]])
    for got, want in zip(many, (total, np.full(5, n), total[0]), strict=True):
        same(get(got), want)
    for kind in ("int8", "int32", "int64", "float16", "float64", "complex64"):
        same(get(c.all_reduce(cupy.arange(7).astype(kind))), np.arange(7).astype(kind) * n)
    same(get(c.all_reduce(x[:, 1])), total[:, 1])
    assert c.all_reduce(x[:0]).shape == (0, 2)
    return type(c._gpu.nccl or c._gpu.own).__name__


def test_collectives_of_one_rank_use_nccl(cupy, library, on_ranks):
    assert on_gpus(cupy, on_ranks, 1, lambda c: every_collective(cupy, c)) == ["Nccl"]


def test_ranks_on_one_gpu_do_not_use_nccl(cupy, library, on_ranks, caplog):
    ranks = cupy.cuda.runtime.getDeviceCount() + 1
    found = on_gpus(cupy, on_ranks, ranks, lambda c: every_collective(cupy, c))
    if on_device.runtime() is None:
        assert found == ["Staged"] * ranks and "on one GPU" in caplog.text
    else:
        assert found == ["DeviceExecutor"] * ranks


def test_collectives_on_several_gpus_use_nccl(cupy, library, several, on_ranks):
    found = on_gpus(cupy, on_ranks, several, lambda c: every_collective(cupy, c))
    assert found == ["Nccl"] * several


@pytest.mark.parametrize("count", [1000, 1 << 25])
def test_messages_between_gpus_arrive(cupy, library, several, on_ranks, count):
    """Let both ranks send first, also arrays longer than NCCL's buffers."""

    def work(c):
        out = cupy.zeros(count)
        sent = c.send(cupy.full(count, float(c.rank)), (c.rank + 1) % c.size, async_op=True)
        c.recv(out, (c.rank - 1) % c.size)
        sent.wait()
        return bool((out == float((c.rank - 1) % c.size)).all())

    assert all(on_gpus(cupy, on_ranks, 2, work))


def test_calls_are_ordered_with_the_current_stream(cupy, library):
    """The call follows earlier work of the stream, and later work sees its result."""
    (alone,) = local_group(1)
    x = cupy.zeros(1 << 24, np.float32)
    for later in (False, True):
        with cupy.cuda.Stream(non_blocking=True):
            x.fill(1)
            for _ in range(50):
                x += 1
            y = alone.all_reduce(x, async_op=later)
            y = (y.wait() if later else y) * 2
            assert float(y.sum()) == 102.0 * (1 << 24)
    alone.close()


def test_arrays_of_torch_and_jax_are_reduced(cupy, library):
    (alone,) = local_group(1)
    torch = pytest.importorskip("torch")
    x = torch.arange(5.0, device="cuda")
    assert cupy.asnumpy(alone.all_reduce(x)).tolist() == [0, 1, 2, 3, 4]
    out = torch.zeros(5, device="cuda")
    assert alone.all_reduce(x, out=out) is out and out.tolist() == x.tolist()
    halves = torch.arange(5.0, device="cuda").bfloat16()
    assert alone.all_reduce(halves, out=halves) is halves and halves.tolist() == x.tolist()
    assert alone.all_reduce(halves).dtype.name == "bfloat16"
    jax = pytest.importorskip("jax")
    assert cupy.asnumpy(alone.all_reduce(jax.numpy.arange(3.0))).tolist() == [0, 1, 2]
    alone.close()


def test_registered_memory_of_nccl_works(cupy, library):
    comm = _core.nccl.Comm(library, library.unique_id(), 1, 0, blocking=True, max_ctas=4)
    address = library.mem_alloc(1 << 20)
    registration = comm.register(address, 1 << 20)
    memory = cupy.cuda.UnownedMemory(address, 1 << 20, None)
    x = cupy.ndarray((1 << 18,), np.float32, cupy.cuda.MemoryPointer(memory, 0))
    x.fill(3)
    stream = cupy.cuda.get_current_stream()
    half = comm.make_pre_mul_sum(np.float32(0.5).tobytes(), 7)
    comm.all_reduce(address, address, 1 << 18, 7, half, stream.ptr)
    assert float(x.sum()) == 1.5 * (1 << 18)
    comm.destroy_op(half)
    comm.deregister(registration)
    comm.finalize()
    comm.destroy()
    library.mem_free(address)


def test_empty_on_gpus_is_reduced_and_outlives_the_communicator(cupy, library, on_ranks):
    def work(c):
        for count in (1000, 1 << 20):  # the second allocation frees the first
            x = c.empty(count, np.float32, device="gpu")
            x.fill(c.rank + 1)
            c.all_reduce(x, out=x)
            assert float(x[-1]) == c.size * (c.size + 1) / 2
        return x

    ranks = min(4, cupy.cuda.runtime.getDeviceCount())
    for array in on_gpus(cupy, on_ranks, ranks, work):  # the arrays outlive the communicators
        with array.device:
            array += 1
            assert float(array[0]) == ranks * (ranks + 1) / 2 + 1


def test_timeline_has_the_times_of_the_gpu(cupy, library, tmp_path):
    (alone,) = local_group(1)
    x = cupy.ones(1 << 26, np.float32)
    alone.all_reduce(x)
    before = time.time()
    with timeline(tmp_path / "t.json"):
        for _ in range(5):
            x *= 1.5  # the stream is busy when the call is enqueued
            alone.broadcast(x, 0)
    after = time.time()
    alone.close()
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    calls = [e for e in events if e.get("args", {}).get("transport") == "NCCL"]
    assert len(calls) == 5
    ends = [(e["ts"] + e["dur"]) / 1e6 for e in calls]
    assert (
        ends == sorted(ends) and before - 1e-3 <= calls[0]["ts"] / 1e6 and ends[-1] <= after + 1e-3
    )


SHARES = """
import cupy, pycollective as pc
comm = pc.init(timeout=100)
with cupy.cuda.Device(0):
    total = cupy.asnumpy(comm.all_reduce(cupy.full(1000, comm.rank + 1.0)))
    print(type(comm._gpu.nccl or comm._gpu.own).__name__, set(total.tolist()))
    comm.close()
"""


def test_processes_on_one_gpu_use_nccl(cupy, library):
    if library.version < 23000:
        pytest.skip("needs NCCL 2.30")
    run = subprocess.run(
        [sys.executable, "-m", "pycollective", "run", "-n", "2", sys.executable, "-c", SHARES],
        env={**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
        capture_output=True, text=True, timeout=200, cwd="/",
    )  # fmt: skip
    assert run.stdout.count("Nccl {3.0}") == 2, run.stdout + run.stderr


def test_missing_rank_raises_peer_lost_error(cupy, library, several, on_ranks):
    def work(c):
        x = cupy.ones(4, np.float32)
        c.all_reduce(x)
        c.barrier()
        time.sleep(2.5)  # until heartbeats have exchanged the numbers of calls
        if c.rank == 0:
            until = time.monotonic() + 60
            while time.monotonic() < until and c._group.failure is None:
                time.sleep(0.1)
            return True
        begin = time.monotonic()
        try:
            c.all_reduce(x, timeout=3)
            while True:
                time.sleep(0.1)
                c.all_reduce(x, timeout=3)
        except CollectiveError as error:
            assert isinstance(error, PeerLostError) and "rank 0 has made 1 of" in str(error)
        cupy.cuda.get_current_stream().synchronize()  # aborted kernels have ended
        return time.monotonic() - begin < 30

    assert all(on_gpus(cupy, on_ranks, 2, work))


def test_mirrored_strategy_chooses_gpus_and_nccl(cupy, library):
    strategy = distribute.MirroredStrategy()
    assert strategy.num_replicas_in_sync == cupy.cuda.runtime.getDeviceCount()
    assert isinstance(strategy.extended.cross_device_ops, distribute.NcclAllReduce)
    total = strategy.run(
        lambda: distribute.get_replica_context().all_reduce("SUM", cupy.ones(3, np.float32))
    )
    values = getattr(total, "values", (total,))
    for value in values:
        assert value.numpy().tolist() == [len(values)] * 3
