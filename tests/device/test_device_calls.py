"""Communicators' calls on arrays of devices, from a thread for each rank."""

from __future__ import annotations

import gc
import logging
import re
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from emulated import make_devices
from foreign_bfloat16 import check_reductions, refuse_bfloat16

import pycollective as pc
from pycollective import local_group
from pycollective.comm import on_device
from pycollective.errors import (
    AbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    MismatchError,
)


def check(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.fixture
def on_devices(devices, on_ranks):
    """Return a function that calls ``work(communicator)`` for each rank, two on each device."""

    def run(communicators, work):
        def on_one(communicator):
            with devices.cuda.Device(communicator.rank // 2):
                return work(communicator)

        return on_ranks(communicators, on_one)

    return run


def first_call(c, cupy):
    """Let the ranks choose the engine for their calls."""
    c.all_reduce(cupy.asarray(np.zeros(1, np.float32)))


def test_every_collective_on_devices_is_right(devices, on_devices, caplog):
    caplog.set_level(logging.INFO, "pycollective")
    size = 3

    def work(c):
        r, put, get = c.rank, devices.asarray, devices.asnumpy
        x = np.arange(6, dtype=np.float32).reshape(3, 2) + 10 * r
        everyone = [x - 10 * r + 10 * q for q in range(size)]
        total, whole = sum(everyone), np.concatenate(everyone)
        same = np.testing.assert_array_equal
        y = put(x)
        for how in ("auto", "ring", "hierarchical_copy", "direct"):
            result = c.all_reduce(y, algorithm=how)
            assert result.device.id == r // 2
            same(get(result), total)
        same(get(y), x)
        same(get(c.all_reduce(y, "mean")), total / size)
        in_place = put(x)
        assert c.all_reduce(in_place, "min", out=in_place) is in_place
        same(get(in_place), everyone[0])
        same(get(c.all_reduce(y, reproducible=True)), total)
        for root in range(size):
            reduced = c.reduce(y, root=root)
            assert (reduced is None) == (r != root)
            if r == root:
                same(get(reduced), total)
            same(get(c.broadcast(y, root)), everyone[root])
            gathered = c.gather(y, root)
            if r == root:
                same(get(gathered), whole)
            same(get(c.scatter(y, root)), everyone[root][r : r + 1])
        same(get(c.reduce_scatter(y)), total[r : r + 1])
        same(get(c.all_gather(y)), whole)
        same(get(c.all_to_all(y)), np.stack([e[r] for e in everyone]))
        mine = put(np.full((r + 1, 2), r, np.int16))
        rows = np.concatenate([np.full((q + 1, 2), q) for q in range(size)])
        same(get(c.all_gather(mine, ragged=True)), rows)
        given = put(rows.astype(np.int16)) if r == 0 else mine
        part = c.scatter(given, ragged=True, counts=[1, 2, 3] if r == 0 else None)
        same(get(part), np.full((r + 1, 2), r))
        got = c.all_to_all(put(np.full((3, 1), r, np.int64)), [0, 1, 2])
        same(get(got)[:, 0], np.repeat(np.arange(size), r))
        out = put(np.zeros((3, 2), np.float32))
        sent = c.send(y, (r + 1) % size, tag=4, async_op=True)
        c.recv(out, (r - 1) % size, tag=4)
        sent.wait()
        same(get(out), everyone[(r - 1) % size])
        packed = c.all_reduce_many([y, put(np.ones(5, np.float64)), put(x[0])])
        for found, want in zip(packed, (total, np.full(5, 3.0), total[0]), strict=True):
            same(get(found), want)
        empty = c.all_reduce(put(x[:0]))
        assert empty.shape == (0, 2)
        part = c.split(r % 2)
        same(get(part.all_reduce(y)), everyone[r] + (everyone[2 - r] if r != 1 else 0))
        part.close()
        c.barrier()
        c.close()
        return True

    assert check(on_devices(local_group(size, timeout=20), work)) == [True] * size
    said = [r.getMessage() for r in caplog.records if "device executor" in r.getMessage()]
    assert len(said) == 3 and "pycollective's device executor handles GPU arrays" in said[0]


def test_async_calls_on_devices_are_right(devices, on_devices):
    """One thread makes the calls of all ranks, so no call may wait for the other ranks."""
    group = local_group(2, timeout=20)
    check(on_devices(group, lambda c: first_call(c, devices)))
    devices.emulated.hold(True)
    x = [devices.asarray(np.arange(4.0) + r) for r in range(2)]
    first = [c.all_reduce(y, async_op=True) for c, y in zip(group, x, strict=True)]
    second = [group[0].all_reduce(x[0], "max", async_op=True)]
    assert not any(work.done() for work in first + second)
    second.append(group[1].all_reduce(x[1], "max", async_op=True))
    with pytest.raises(TimeoutError, match=r"not done after 0.01 s"):
        first[0].wait(0.01)
    with pytest.raises(RuntimeError, match="still runs"):
        second[0].result()
    totals = [work.wait() for work in first]  # the streams wait, and not the host
    assert all(work.done() for work in first)
    devices.emulated.hold(False)
    assert [devices.asnumpy(t).tolist() for t in totals] == [[1.0, 3.0, 5.0, 7.0]] * 2
    assert all(work.wait(10) is not None for work in second)
    assert devices.asnumpy(second[1].result()).tolist() == [1.0, 2.0, 3.0, 4.0]
    for c in group:
        c.close()


def test_calls_run_on_the_streams_of_the_program(devices, on_devices):
    def work(c):
        with devices.cuda.Stream():
            got = c.all_reduce(devices.asarray(np.arange(3.0)), algorithm="ring")
        return devices.asnumpy(got).tolist()

    assert check(on_devices(local_group(4, timeout=20), work)) == [[0.0, 4.0, 8.0]] * 4


def test_calls_on_the_per_thread_stream_are_ordered(devices, on_devices, monkeypatch):
    """The last rank enqueues only on streams whose numbers are valid in all threads."""
    named = []

    def per_thread():
        return type("Stream", (), {"ptr": 2})

    monkeypatch.setattr(devices.cuda, "get_current_stream", per_thread)

    def work(c):
        got = c.all_reduce(devices.asarray(np.arange(3.0)))
        named.append({number: stream.ptr for number, stream in c._gpu.own._streams.items()})
        return devices.asnumpy(got).tolist()

    assert check(on_devices(local_group(2, timeout=20), work)) == [[0.0, 2.0, 4.0]] * 2
    assert all(ptr >= 1000 for found in named for ptr in found.values())


def test_calls_of_many_ranks_on_few_cores_are_right(devices, on_devices):
    def work(c):
        with devices.cuda.Device(c.rank % 4):
            x = devices.asarray(np.full(100, c.rank, np.int64))
            for how in ("auto", "ring", "halving_doubling"):
                x = c.all_reduce(x, algorithm=how) // c.size
            return int(devices.asnumpy(x)[0])

    size = 24
    want = sum(range(size)) // size
    assert check(on_devices(local_group(size, timeout=60), work)) == [want] * size


def test_differing_calls_on_devices_raise_mismatch_error(devices, on_devices):
    kinds = [
        (lambda c, x: c.all_reduce(x, "sum" if c.rank else "max"), "max, auto", "sum, auto"),
        (lambda c, x: c.all_reduce(x[: 2 + c.rank]), r"float32\[2\]", r"float32\[3\]"),
        (lambda c, x: c.all_reduce(x, algorithm="ring" if c.rank else "direct"), "direct", "ring"),
        (
            lambda c, x: c.broadcast(x) if c.rank else c.all_reduce(x),
            "all_reduce on",
            "broadcast on",
        ),
        (lambda c, x: c.broadcast(x, c.rank), "root 0", "root 1"),
    ]
    for call, zero, one in kinds:

        def work(c, call=call):
            first_call(c, devices)
            return call(c, devices.asarray(np.zeros(4, np.float32)))

        for error in on_devices(local_group(2, timeout=20), work):
            assert isinstance(error, MismatchError)
            text = str(error)
            assert text.index("rank 0 called") < text.index("rank 1 called")
            assert re.search(f"rank 0 called .*{zero}.*{one}", text)


@pytest.mark.parametrize("first", [True, False])
def test_host_and_device_arrays_in_one_call_raise_mismatch_error(devices, on_devices, first):
    def work(c):
        if not first:
            first_call(c, devices)
        x = np.ones(4, np.float32)
        return c.all_reduce(devices.asarray(x) if c.rank else x)

    for error in on_devices(local_group(2, timeout=20), work):
        assert isinstance(error, MismatchError)
        assert "GPU" in str(error)


def test_missing_rank_raises_timeout_error(devices, on_devices):
    def work(c):
        first_call(c, devices)
        if c.rank == 1:
            return None
        both.wait(20)
        c.all_reduce(devices.asarray(np.zeros(4)), timeout=0.5)

    both = threading.Barrier(2)
    found = on_devices(local_group(3, timeout=20), work)
    for error in (found[0], found[2]):
        assert isinstance(error, CollectiveTimeoutError)
        assert "waited until its deadline for all_reduce on GPUs #" in str(error)
        assert "to which not all ranks have come: rank 1 has finished" in str(error)


def test_missing_rank_in_an_async_call_raises_timeout_error(devices, on_devices):
    group = local_group(2, timeout=20)
    check(on_devices(group, lambda c: first_call(c, devices)))
    work = group[0].all_reduce(devices.asarray(np.zeros(4)), async_op=True, timeout=1.0)
    assert not work.done()
    with pytest.raises(CollectiveTimeoutError, match="rank 1 has finished"):
        work.wait()
    with pytest.raises(CollectiveTimeoutError):
        group[1].all_reduce(devices.asarray(np.zeros(4)))
    assert work.done() and isinstance(work.exception(), CollectiveTimeoutError)


def test_abort_fails_a_waiting_rank(devices, on_devices):
    def work(c):
        first_call(c, devices)
        if c.rank == 1:
            time.sleep(0.05)
            return c.abort("enough")
        return c.all_reduce(devices.asarray(np.zeros(4)))

    error, nothing = on_devices(local_group(2, timeout=20), work)
    assert isinstance(error, AbortedError) and "enough" in str(error) and nothing is None


def test_dropped_communicator_fails_calls_of_other_ranks(devices, on_devices):
    group = local_group(2, timeout=20)
    check(on_devices(group, lambda c: first_call(c, devices)))
    kept = group[0].all_reduce(devices.asarray(np.zeros(4)), async_op=True)
    del group[0], kept
    gc.collect()
    with pytest.raises(AbortedError, match="rank 0 deleted its communicator before its calls"):
        group[0].all_reduce(devices.asarray(np.zeros(4)))


def test_arrays_of_calls_are_kept_until_the_devices_have_finished(devices, on_devices):
    """The arrays are kept even after the communicators are dropped."""
    group = local_group(2, timeout=20)
    check(on_devices(group, lambda c: first_call(c, devices)))
    devices.emulated.run()
    devices.emulated.hold(True)
    x = devices.asarray(np.zeros(4))
    works = [c.all_reduce(x, async_op=True) for c in group]
    kept = weakref.ref(x)
    del group, works, x
    gc.collect()
    assert kept() is not None and on_device._left
    devices.emulated.hold(False)
    devices.emulated.run()
    check(on_devices(local_group(2), lambda c: first_call(c, devices)))
    gc.collect()
    assert kept() is None


def test_close_waits_for_ranks_that_join_later(devices, on_devices):
    def work(c):
        first_call(c, devices)
        x = devices.asarray(np.arange(3.0))
        if c.rank == 0:
            result = c.all_reduce(x, async_op=True)
            c.close()
            return devices.asnumpy(result.wait()).tolist()
        time.sleep(0.1)
        return devices.asnumpy(c.all_reduce(x)).tolist()

    assert check(on_devices(local_group(2, timeout=20), work)) == [[0.0, 2.0, 4.0]] * 2


@pytest.mark.parametrize("how", ["auto", "ring"])
def test_failed_device_raises_on_all_ranks(devices, on_devices, how):
    def work(c):
        first_call(c, devices)
        if c.rank == 0:
            devices.emulated.fail_after(6)
        c.barrier()
        return c.all_reduce(devices.asarray(np.zeros(400)), algorithm=how)

    for error in on_devices(local_group(4, timeout=20), work):
        assert isinstance(error, AbortedError)
        assert "could not be enqueued on devices for all ranks: the device has failed" in str(error)
    devices.emulated.run()  # no stream waits for an event that never happens


WORDS = "rank 0: device 0 failed in all_reduce on GPUs .* or before it: device 0 is broken"


def test_device_that_fails_after_a_call_raises_later(devices, on_ranks):
    """The rank that detects the failure fails the group: all ranks raise, and can still leave."""
    group = local_group(3, timeout=20)

    def work(c):
        with devices.cuda.Device(c.rank // 2):
            x = devices.asarray(np.zeros(4))
            c.all_reduce(x)
            c.barrier()
            if c.rank == 0:
                devices.emulated.run()
                devices.emulated.hold(True)
            c.barrier()
            c.all_reduce(x)
            c.barrier()
            if c.rank == 1:
                return None
            if c.rank == 0:
                devices.emulated.break_device(0)
            return c.all_reduce(x)

    found = on_ranks(group, work)
    for error in (found[0], found[2]):
        assert isinstance(error, AbortedError) and re.search(WORDS, str(error)), error
    for c in group:
        with pytest.raises(AbortedError, match=WORDS):
            c.all_reduce(devices.asarray(np.zeros(4)))
        c.close()
        with pytest.raises(CollectiveError, match="closed"):
            c.barrier()


def test_async_call_of_a_failed_device_raises(devices, on_devices):
    group = local_group(2, timeout=20)
    check(on_devices(group, lambda c: first_call(c, devices)))
    devices.emulated.hold(True)
    x = devices.asarray(np.zeros(4))
    works = [c.all_reduce(x, async_op=True) for c in group]
    assert not any(work.done() for work in works)
    devices.emulated.break_device(0)
    assert all(work.done() for work in works)
    with pytest.raises(AbortedError, match="device 0 is broken"):
        works[0].wait(1)
    assert isinstance(works[1].exception(), AbortedError)
    for c in group:
        c.close()


@pytest.mark.parametrize("waits", [True, False])
def test_failed_device_raises_in_wait_and_in_the_next_call(devices, on_devices, waits):
    group = local_group(2, timeout=20)
    check(on_devices(group, lambda c: first_call(c, devices)))
    x = devices.asarray(np.zeros(4))
    work, _ = [c.all_reduce(x, async_op=True) for c in group]
    devices.emulated.hold(True)
    devices.emulated.break_device(0)
    with pytest.raises(AbortedError, match="rank 0: device 0 failed in all_reduce"):
        work.wait() if waits else group[0].all_reduce(x, async_op=True)
    with pytest.raises(AbortedError, match="rank 0: device 0 failed in all_reduce"):
        group[1].barrier()


def test_failed_device_does_not_fail_other_groups(devices, on_devices):
    group = local_group(2, timeout=20)
    check(on_devices(group, lambda c: first_call(c, devices)))
    devices.emulated.run()
    devices.emulated.hold(True)
    works = [c.all_reduce(devices.asarray(np.zeros(4)), async_op=True) for c in group]
    del group, works
    gc.collect()
    assert on_device._left
    devices.emulated.break_device(0)
    (other,) = local_group(1)
    with devices.cuda.Device(1):
        first_call(other, devices)
        assert devices.asnumpy(other.all_reduce(devices.asarray(np.ones(2)))).tolist() == [1.0] * 2
    other.close()
    assert not on_device._left


def test_interrupt_aborts_the_group(devices, on_devices, ctrl_c):
    (c, other) = local_group(2, timeout=20)
    check(on_devices([c, other], lambda c: first_call(c, devices)))
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        c.all_reduce(devices.asarray(np.zeros(4)))
    timer.join()
    with pytest.raises(AbortedError, match="rank 0 left all_reduce on GPUs"):
        other.all_reduce(devices.asarray(np.zeros(4)))


def test_warning_on_devices_names_a_slow_rank(devices, on_devices):
    said = []

    def is_named():
        return any("for rank 1 to enter this call" in text for text in said)

    def work(c):
        c._core.warn_after(0.02, said.append)
        first_call(c, devices)
        c.barrier()
        said.clear()
        c.barrier()
        until = time.monotonic() + 10
        while c.rank == 1 and not is_named() and time.monotonic() < until:
            time.sleep(0.01)
        return c.all_reduce(devices.asarray(np.zeros(4))) is not None

    assert check(on_devices(local_group(2, timeout=20), work)) == [True, True]
    assert is_named()


def test_traced_calls_on_devices_are_right(devices, on_devices, tmp_path):
    def work(c):
        return devices.asnumpy(c.all_reduce(devices.asarray(np.ones(4)))).tolist()

    with pc.timeline(tmp_path / "calls.json"):
        assert check(on_devices(local_group(2, timeout=20), work)) == [[2.0] * 4] * 2


def test_unsupported_device_arrays_raise_clear_errors(devices):
    (c,) = local_group(1)
    x = devices.asarray(np.ones(4, np.float32))
    with pytest.raises(ValueError, match="no all_reduce algorithm is called 'best'"):
        c.all_reduce(x, algorithm="best")
    with pytest.raises(TypeError, match="and, or, xor are for ints"):
        c.all_reduce(x, "xor")
    with pytest.raises(ValueError, match="root 3 is not among the 1 ranks"):
        c.broadcast(x, 3)
    assert devices.asnumpy(c.all_reduce(x)).tolist() == [1.0] * 4
    c.close()
    with pytest.raises(CollectiveError, match="closed"):
        c.all_reduce(x)


def test_devices_without_peer_access_are_right(monkeypatch, on_ranks):
    cupy = make_devices(monkeypatch, cliques=(0, 1, 2))

    def work(c):
        with cupy.cuda.Device(c.rank):
            x = cupy.asarray(np.arange(500.0) + c.rank)
            hows = ("auto", "direct", "ring", "double_tree")
            return [cupy.asnumpy(c.all_reduce(x, algorithm=how)).tolist() for how in hows]

    want = (3 * np.arange(500.0) + 3).tolist()
    assert check(on_ranks(local_group(3, timeout=20), work)) == [[want] * 4] * 3


def test_bfloat16_of_other_libraries_is_reduced(devices, on_devices, monkeypatch):
    refuse_bfloat16(monkeypatch, devices)
    done = devices.emulated.run

    def work(c):
        first_call(c, devices)
        return check_reductions(devices, c, lambda: (c.barrier(), done(), c.barrier()))

    assert check(on_devices(local_group(3, timeout=20), work)) == ["DeviceExecutor"] * 3
