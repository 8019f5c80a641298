"""Messages of GPU arrays between ranks that are threads: copies between devices, none over the host."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from emulated import make_devices

from pycollective import dtypes, local_group
from pycollective.errors import AbortedError, CollectiveError, MismatchError


def check(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def pair(cupy, on_ranks):
    """Return two ranks, on devices 0 and 1, that have chosen the engine for their calls."""
    group = local_group(2, timeout=20)

    def first_call(c):
        with cupy.cuda.Device(c.rank):
            c.all_reduce(cupy.asarray(np.zeros(1, np.float32)))

    check(on_ranks(group, first_call))
    return group


def put(cupy, number, values):
    with cupy.cuda.Device(number):
        return cupy.asarray(np.asarray(values))


@pytest.mark.parametrize("reach", [True, False])
def test_messages_are_ordered_with_the_streams(monkeypatch, on_ranks, reach):
    """The message has the data that the sender's stream had written before the send."""
    kinds = [np.float32, np.int16, np.complex128, np.bool_]
    kinds += [] if dtypes.bfloat16 is None else [dtypes.bfloat16]
    for seed in range(8):
        cupy = make_devices(monkeypatch, cliques=(0, 0) if reach else (0, 1), seed=seed)
        group, runtime = pair(cupy, on_ranks), cupy.emulated
        junk = np.full(300, 77, np.uint8)
        for kind in kinds:
            values = (np.arange(12) % 5).astype(kind).reshape(3, 4)
            x, out = put(cupy, 0, np.zeros_like(values)), put(cupy, 1, np.ones_like(values))
            kept = put(cupy, 1, np.zeros_like(values))
            fetched, copies = cupy.fetched, runtime.counts["copies"]

            def write(there, device, source, runtime=runtime):
                runtime.copy(there.data.ptr, device, source.ctypes.data, device, there.nbytes, 7)

            with cupy.cuda.Stream(ptr=7):
                write(x, 0, values)
                assert group[0].send(x, 1, tag=3) is None
                write(x, 0, junk)
                assert group[1].recv(out, 0, tag=3) is out
            runtime.copy(kept.data.ptr, 1, out.data.ptr, 1, out.nbytes, 7)
            write(out, 1, junk)
            assert cupy.fetched == fetched and runtime.counts["copies"] == copies + 6
            np.testing.assert_array_equal(cupy.asnumpy(kept), values)
        for c in group:
            c.close()


def test_messages_without_a_stream_wait_are_wrong(monkeypatch, on_ranks):
    """This shows that the previous test can fail."""

    def received(seed, loses):
        cupy = make_devices(monkeypatch, cliques=(0, 0), seed=seed)
        group, runtime = pair(cupy, on_ranks), cupy.emulated
        x, out = put(cupy, 0, np.arange(9.0)), put(cupy, 1, np.zeros(9))
        runtime.run()
        runtime.hold(True)
        group[0].send(x, 1)
        runtime.lose_wait_after(0 if loses else 10**6)
        group[1].recv(out, 0)
        runtime.hold(False)
        return cupy.asnumpy(out).tolist()

    want = np.arange(9.0).tolist()
    assert all(received(seed, False) == want for seed in range(8))
    assert any(received(seed, True) != want for seed in range(8))


def test_async_messages_on_devices_arrive(devices, on_ranks):
    group = pair(devices, on_ranks)
    x, out = put(devices, 0, np.arange(4.0)), put(devices, 1, np.zeros(4))
    coming = [
        group[1].recv(out, 0, async_op=True),
        group[1].recv(put(devices, 1, 0.0), 0, 1, async_op=True),
    ]
    assert not any(work.done() for work in coming)
    with pytest.raises(TimeoutError, match=r"not done after 0.01 s"):
        coming[0].wait(0.01)
    second = group[0].send(put(devices, 0, 5.0), 1, tag=1, async_op=True)
    assert float(devices.asnumpy(coming[1].wait())) == 5.0 and not coming[0].done()
    first = group[0].send(x, 1, async_op=True)
    assert coming[0].wait() is out and devices.asnumpy(out).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert first.wait() is None and second.wait() is None
    devices.emulated.run()
    group[0].send(x[1:3], 0, tag=2)  # to this rank
    assert devices.asnumpy(group[0].recv(x[:2], 0, tag=2)).tolist() == [1.0, 2.0]
    for c in group:
        c.close()


def test_arrays_of_messages_are_kept_until_the_devices_have_finished(devices, on_ranks):
    group = pair(devices, on_ranks)
    devices.emulated.run()
    devices.emulated.hold(True)
    x, out = put(devices, 0, np.arange(4.0)), put(devices, 1, np.zeros(4))
    group[0].send(x, 1)
    group[1].recv(out, 0)
    kept = weakref.ref(x), weakref.ref(out)
    del group, x, out
    gc.collect()
    assert all(array() is not None for array in kept)
    devices.emulated.hold(False)
    devices.emulated.run()
    pair(devices, on_ranks)  # its calls release the arrays of closed engines
    gc.collect()
    assert all(array() is None for array in kept)


def test_recv_of_another_shape_or_dtype_raises(devices, on_ranks):
    x, host = put(devices, 0, np.zeros(3, np.float32)), np.zeros(3, np.float32)
    came = r"from rank 0 with tag 6, but rank 0 sent"
    for out, words in (
        (put(devices, 1, np.zeros(4, np.float32)), rf"float32\[4\] {came} float32\[3\]"),
        (put(devices, 1, np.zeros(3, np.int32)), rf"int32\[3\] {came} float32\[3\]"),
        (host, rf"float32\[3\] {came} a GPU array\["),
    ):
        group = pair(devices, on_ranks)
        group[0].send(x, 1, tag=6)
        with pytest.raises(MismatchError, match=words):
            group[1].recv(out, 0, tag=6)
        with pytest.raises(CollectiveError):
            group[0].all_reduce(x)
    group = pair(devices, on_ranks)
    group[0].send(host, 1)
    with pytest.raises(MismatchError, match="sender and receiver must agree"):
        group[1].recv(put(devices, 1, host), 0)


@pytest.mark.parametrize("sends", [True, False])
def test_failed_device_in_a_message_aborts_the_group(devices, on_ranks, sends):
    group = pair(devices, on_ranks)
    if not sends:
        group[0].send(put(devices, 0, np.zeros(3)), 1)
    devices.emulated.fail_after(0)
    with pytest.raises(RuntimeError, match="the device has failed"):
        group[0].send(put(devices, 0, 1.0), 1) if sends else group[1].recv(
            put(devices, 1, np.zeros(3)), 0
        )
    with pytest.raises(
        AbortedError, match=f"rank {1 - sends} left {'send' if sends else 'recv'} of a GPU"
    ):
        group[sends].barrier()
