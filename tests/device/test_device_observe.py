"""Timelines and traces of the device executor's calls."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from emulated import make_devices

import pycollective as pc
from pycollective import local_group
from pycollective.comm import on_device
from pycollective.errors import CollectiveError


def slices(file):
    return [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] != "M"]


@pytest.fixture
def on_devices(devices, on_ranks):
    """Return a function that calls ``work(communicator)`` for each rank, two on each device."""

    def run(communicators, work):
        def on_one(communicator):
            with devices.cuda.Device(communicator.rank // 2):
                return work(communicator)

        for result in on_ranks(communicators, on_one):
            if isinstance(result, BaseException):
                raise result

    return run


def test_timeline_has_the_times_of_devices(devices, on_devices, tmp_path):
    """Calls have the times of the devices, also if other ranks joined later."""
    file = tmp_path / "timeline.json"
    comms = local_group(3, timeout=20)

    def first(c):
        c.all_reduce(devices.asarray(np.ones(4, np.float32)))

    def second(c):
        x = devices.asarray(np.ones(4, np.float32))
        c.reduce(x[:0])  # no items
        c.barrier()
        if c.rank == 0:
            devices.emulated.hold(True)
        c.barrier()
        c.all_reduce(x, "max")
        under_way = c.broadcast(x, 1, async_op=True)
        call_times[c.rank] = time.time()
        c.barrier()
        time.sleep(0.05)
        if c.rank == 0:
            devices.emulated.hold(False)
            devices.emulated.run()
        c.barrier()
        under_way.wait()
        devices.asnumpy(x)
        c.all_reduce(x, algorithm="ring")
        if c.rank < 2:
            (c.send if c.rank == 0 else c.recv)(x, 1 - c.rank)

    call_times = [0.0] * 3
    on_devices(comms, first)
    with pc.timeline(file):
        before = time.time()
        on_devices(comms, second)
    on_devices(comms, first)
    found = slices(file)
    by_devices = [e for e in found if e["args"]["transport"] == "device executor"]
    assert len(by_devices) == 3 * 4
    messages = {e["name"]: (e["pid"], e["args"]) for e in found if e["name"] in ("send", "recv")}
    assert {name: rank for name, (rank, _) in messages.items()} == {"send": 0, "recv": 1}
    for _, said in messages.values():
        assert said["transport"] == "device copies" and (said["bytes"], said["shape"]) == (16, [4])
    for rank in range(3):
        events = [e for e in by_devices if e["pid"] == rank]
        events.sort(key=lambda e: e["args"]["call"])
        assert [e["name"] for e in events] == ["reduce", "all_reduce", "broadcast", "all_reduce"]
        empty, largest, cast, ring = events
        assert largest["args"] | {"call": 0} == {
            "bytes": 16, "dtype": "float32", "shape": [4], "transport": "device executor",
            "op": "max", "times": "of the GPU", "call": 0,
        }  # fmt: skip
        assert cast["args"]["root"] == 1 and ring["args"]["algorithm"] == "ring"
        assert empty["args"]["bytes"] == 0
        for event in (largest, cast):
            # The two clocks were read one after the other, so these times may all be equally late.
            begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            assert before - 1e-3 <= begin <= end
            assert end > call_times[rank] + 0.04  # the devices were held
        assert len({e["tid"] for e in events}) == 1
    rows = [e for e in json.loads(file.read_text())["traceEvents"] if e["name"] == "thread_name"]
    named = {(e["pid"], e["args"]["name"]) for e in rows}
    assert {(0, "GPU 0"), (1, "GPU 0"), (2, "GPU 1")} < named
    assert {e["name"] for e in found if e["cat"] == "message"} == {"send", "recv"}


def test_times_of_a_timed_call_that_the_device_has_not_ended_are_those_of_the_host(
    devices, on_ranks, tmp_path
):
    x = devices.asarray(np.ones(4, np.float32))

    def work(c):
        c.all_reduce(x)
        c.barrier()
        if c.rank == 0:
            devices.emulated.hold(True)
        c.barrier()
        before = time.monotonic()
        under_way = c.all_reduce(x, async_op=True)
        (operation,) = under_way._tasks
        operation = getattr(operation, "_task", operation)
        c.barrier()
        try:
            begin, end = operation.times
            assert before <= begin <= end <= time.monotonic()
            begin_again, later_end = operation.times
            assert begin_again == begin and later_end >= end
        finally:  # else a rank that waits for the device never returns
            c.barrier()
            if c.rank == 0:
                devices.emulated.hold(False)
                devices.emulated.run()
            c.barrier()
            under_way.wait()
        begin, ended = operation.times
        assert operation.ended and operation.times == (begin, ended)
        c.close()

    with pc.timeline(tmp_path / "timeline.json"):
        assert on_ranks(local_group(2, timeout=20), work) == [None, None]


def test_timeline_has_a_failed_call_of_a_device(devices, on_ranks, tmp_path):
    """A failed device has no times; the file has the error."""
    file = tmp_path / "timeline.json"
    x = devices.asarray(np.ones(4, np.float32))

    def work(c):
        c.all_reduce(x)
        c.barrier()
        under_way = c.all_reduce(x, async_op=True)
        c.barrier()
        if c.rank == 0:
            devices.emulated.break_device(0)
        c.barrier()
        try:
            under_way.wait(20)
        finally:
            c.close()

    with pc.timeline(file):
        for error in on_ranks(local_group(2, timeout=20), work):
            assert isinstance(error, CollectiveError), error
    failed = [e for e in slices(file) if "error" in e["args"]]
    assert failed and all("device 0 failed" in e["args"]["error"] for e in failed)


def test_untraced_calls_are_not_timed(monkeypatch, on_ranks):
    devices = make_devices(monkeypatch)
    monkeypatch.setattr(on_device, "_Clock", None)
    comms = local_group(2, timeout=20)
    x = devices.asarray(np.ones(4, np.float32))
    assert on_ranks(comms, lambda c: devices.asnumpy(c.all_reduce(x)).tolist()) == [[2.0] * 4] * 2
