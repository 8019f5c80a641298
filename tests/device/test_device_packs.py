"""Many arrays of a device as one bucket, and back: the number of calls, and the values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pycollective import local_group
from pycollective.comm import on_device
from pycollective.comm.packing import join, spread

MANY = 60
BF16 = np.dtype(ml_dtypes.bfloat16)


def make_arrays(devices, dtype, random):
    """Return arrays of several shapes on the current device, and the same on the host."""
    shapes = [((k % 5 + 1, 7), (k + 1,), ())[k % 3] for k in range(MANY)]
    hosts = [np.asarray(random.integers(0, 100, shape)).astype(dtype) for shape in shapes]
    return [devices.asarray(x) for x in hosts], hosts


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("dtype", "work", "converts"),
    [("f4", "f4", True), ("f2", "f4", True), (BF16, "f4", True), (BF16, BF16, True),
     ("f4", "f8", True), ("i8", "i8", True),
     ("?", "i4", False), ("u4", "i8", False), ("f2", "f8", False)],
)  # fmt: skip
def test_bucket_on_a_device_takes_few_launches(
    devices, monkeypatch, kernels, dtype, work, converts
):
    if not kernels:
        monkeypatch.setattr(on_device, "runtime", lambda: None)
    arrays, hosts = make_arrays(devices, dtype, np.random.default_rng())
    calls = devices.calls
    flat, copied = join(arrays, np.dtype(work))
    calls = devices.calls - calls
    launched = devices.emulated.counts["packs"]
    assert copied and (calls, launched) == ((0, 1) if kernels and converts else
                                            (1 if dtype == work else 2, 0))  # fmt: skip
    want = np.concatenate([x.reshape(-1) for x in hosts]).astype(work)
    assert flat.dtype == want.dtype
    np.testing.assert_array_equal(devices.asnumpy(flat), want)


def test_bucket_of_one_array_is_only_converted(devices, monkeypatch):
    x = devices.asarray(np.arange(6, dtype=np.float16).reshape(2, 3))
    assert not join([x])[1]
    assert devices.emulated.counts["packs"] == 0
    assert devices.asnumpy(join([x], np.float32)[0]).tolist() == list(range(6))
    assert devices.emulated.counts["packs"] == 1
    monkeypatch.setattr(on_device, "runtime", lambda: None)
    calls = devices.calls
    flat, _ = join([x], np.float32)
    assert devices.calls == calls + 1 and flat.dtype == np.float32


def test_spread_writes_arrays_of_any_layout(devices):
    for order, launched in (("C", 1), ("F", 1)):
        flat = devices.asarray(np.arange(16.0))
        targets = [devices.asarray(np.zeros((2, 3), order=order)), devices.asarray(np.zeros(10))]
        spread(flat, targets)
        assert devices.asnumpy(targets[0]).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert devices.asnumpy(targets[1]).tolist() == list(range(6, 16))
        assert devices.emulated.counts["packs"] == launched


@pytest.mark.parametrize("per_thread", [False, True])
@pytest.mark.parametrize("async_op", [False, True])
def test_all_reduce_many_on_devices_is_right(devices, on_ranks, monkeypatch, per_thread, async_op):
    """Two dtypes, so two buckets for each rank: one launch joins a bucket, and one spreads it."""
    if per_thread:
        per_thread_stream = type("Stream", (devices.cuda.Stream,), {})(ptr=2)
        monkeypatch.setattr(devices.cuda, "get_current_stream", lambda: per_thread_stream)
    size = 3
    inputs = []
    for rank in range(size):
        with devices.cuda.Device(rank // 2):
            pairs = [
                make_arrays(devices, dtype, np.random.default_rng(rank)) for dtype in ("f4", "i8")
            ]
        inputs.append([[x for part in column for x in part] for column in zip(*pairs, strict=True)])
    want = [sum(column) for column in zip(*(hosts for _, hosts in inputs), strict=True)]

    def work(c):
        with devices.cuda.Device(c.rank // 2):
            arrays = inputs[c.rank][0]
            found = c.all_reduce_many(arrays, out=arrays, async_op=async_op)
            found = found.wait() if async_op else found
            assert all(x is y for x, y in zip(found, arrays, strict=True))
            return [devices.asnumpy(x) for x in found]

    for result in on_ranks(local_group(size, timeout=20), work):
        if isinstance(result, BaseException):
            raise result
        for got, expected in zip(result, want, strict=True):
            np.testing.assert_array_equal(got, expected)
    assert devices.emulated.counts["packs"] == size * 2 * 2
