"""The device executor on real GPUs: ranks on one GPU, and ranks with one GPU each."""

from __future__ import annotations

import json
import time

import ml_dtypes
import numpy as np
import pytest

from pycollective import algorithms, local_group, timeline
from pycollective.comm import on_device

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["one GPU", "all GPUs"])
def on_gpus(request, cupy, on_ranks):
    """Return a function that calls ``work(communicator)`` for each rank, each on its own stream."""
    if on_device.runtime() is None:
        pytest.skip("this core has no CUDA part")
    count = cupy.cuda.runtime.getDeviceCount() if request.param == "all GPUs" else 1
    if request.param == "all GPUs" and count == 1:
        pytest.skip("one GPU")

    def run(ranks, work):
        def on_one(c):
            with cupy.cuda.Device(c.rank % count), cupy.cuda.Stream(non_blocking=True) as stream:
                try:
                    return work(c)
                finally:
                    stream.synchronize()
                    c.close()

        results = on_ranks(local_group(ranks, timeout=60), on_one)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    return run


def test_timeline_has_the_times_of_the_device(cupy, on_gpus, tmp_path):
    """A call begins when its stream reaches it, after the earlier computations."""
    file = tmp_path / "timeline.json"

    def work(c):
        x = cupy.zeros(1 << 24, np.float32)
        c.all_reduce(x[:1], algorithm="ring")
        c.barrier()
        for _ in range(200):
            x += 1
        begun = time.time()
        c.all_reduce(x, out=x, algorithm="ring")
        cupy.cuda.get_current_stream().synchronize()
        return begun, time.time()

    with timeline(file):
        (begun, ended), *_ = on_gpus(2, work)
    events = json.loads(file.read_text())["traceEvents"]
    found = [
        e for e in events if e["ph"] == "X" and e["args"]["bytes"] == 1 << 26 and e["pid"] == 0
    ]
    (event,) = found
    assert event["args"]["transport"] == "device executor"
    first, last = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
    assert begun - 1e-3 < first < last < ended + 1e-3


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 1000, 3_000_001])
def test_all_reduce_by_every_algorithm_is_right(cupy, on_gpus, ranks, count):
    """Run every algorithm, also in place, in many consecutive calls."""

    def work(c):
        x = cupy.random.RandomState(c.rank).randint(0, 1000, count).astype(np.float32)
        total = sum(
            cupy.random.RandomState(r).randint(0, 1000, count).astype(np.float32)
            for r in range(ranks)
        )
        for how in ["auto", *algorithms.names("all_reduce")]:
            for _ in range(5):
                assert (c.all_reduce(x, algorithm=how) == total).all(), how
            y = x.copy()
            c.all_reduce(y, out=y, algorithm=how)
            assert (y == total).all(), how
        works = [c.all_reduce(x * k, async_op=True) for k in range(4)]
        for k, under_way in enumerate(works):
            assert (under_way.wait() == total * k).all()
        return True

    assert on_gpus(ranks, work) == [True] * ranks


def test_all_reduce_of_bfloat16_is_right(cupy, on_gpus):
    """CuPy does not compute with bfloat16, so the core's kernels must."""
    x = (np.arange(3001) % 5).astype(ml_dtypes.bfloat16)

    def work(c):
        there = cupy.asarray(x.view(np.uint16)).view(x.dtype)
        for how in ("auto", "ring", "reduce_to_one"):
            total = c.all_reduce(there, algorithm=how)
            assert total.dtype == x.dtype
            np.testing.assert_array_equal(
                cupy.asnumpy(total.view(np.uint16)).view(x.dtype), x * x.dtype.type(3)
            )
        return True

    assert on_gpus(3, work) == [True] * 3


@pytest.mark.parametrize("ranks", [2, 5])
def test_other_collectives_on_gpus_are_right(cupy, on_gpus, ranks):
    def work(c):
        x = cupy.arange(ranks * 1000, dtype=np.int64).reshape(ranks, 1000) + c.rank
        everyone = [x - c.rank + r for r in range(ranks)]
        total = sum(everyone)
        for how in algorithms.names("reduce_scatter"):
            assert (c.reduce_scatter(x, algorithm=how) == total[c.rank : c.rank + 1]).all(), how
        for how in algorithms.names("all_gather"):
            assert (c.all_gather(x, algorithm=how) == cupy.concatenate(everyone)).all(), how
        for how in algorithms.names("broadcast"):
            assert (c.broadcast(x, ranks - 1, algorithm=how) == everyone[-1]).all(), how
        assert (c.all_to_all(x) == cupy.stack([e[c.rank] for e in everyone])).all()
        reduced = c.reduce(x, root=1)
        assert (reduced is None) == (c.rank != 1) and (c.rank != 1 or (reduced == total).all())
        rows = c.all_gather(x[: c.rank + 1], ragged=True)
        assert (rows == cupy.concatenate([e[: r + 1] for r, e in enumerate(everyone)])).all()
        return True

    assert on_gpus(ranks, work) == [True] * ranks


def test_messages_round_a_ring_arrive(cupy, on_gpus):
    """Send round a ring; with the executor, a sent array may be overwritten at once."""

    def work(c):
        x, out = cupy.empty(3_000_001, np.float32), cupy.empty(3_000_001, np.float32)
        for turn in range(10):
            x.fill(10 * turn + c.rank)
            sent = c.send(x, (c.rank + 1) % c.size, async_op=True)
            if isinstance(c._gpu.own, on_device.DeviceExecutor):
                x.fill(-1)
            c.recv(out, (c.rank - 1) % c.size)
            sent.wait()
            assert bool((out == 10 * turn + (c.rank - 1) % c.size).all())
        return True

    assert on_gpus(3, work) == [True] * 3


def test_bits_on_gpus_are_those_of_the_host(cupy, on_gpus, on_ranks):
    for dtype in (np.float32, np.float16):
        x = [np.random.default_rng(r).normal(size=5000).astype(dtype) for r in range(4)]
        for how in ("direct", "ring", "halving_doubling"):
            for op in ("sum", "mean"):

                def work(c, x=x, how=how, op=op):
                    return cupy.asnumpy(c.all_reduce(cupy.asarray(x[c.rank]), op, algorithm=how))

                def on_host(c, x=x, how=how, op=op):
                    return c.all_reduce(x[c.rank], op, algorithm=how)

                wanted = on_ranks(local_group(4), on_host)
                for got, want in zip(on_gpus(4, work), wanted, strict=True):
                    np.testing.assert_array_equal(got, want)
