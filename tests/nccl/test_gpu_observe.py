"""Timelines and traces of calls on GPUs."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

import pycollective as pc
from pycollective import local_group
from pycollective.comm import watch
from pycollective.errors import NcclError
from pycollective.observe.log import LOG


def slices(file):
    return [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] != "M"]


def by_nccl(file):
    return [e for e in slices(file) if e["args"]["transport"] == "NCCL"]


def test_timeline_has_the_times_of_gpus(gpus, on_gpus, tmp_path, monkeypatch):
    """Calls have the times of the device, not those of the enqueueing thread."""
    monkeypatch.setattr(watch.Watch, "SECONDS", 0.01)
    monkeypatch.setattr("pycollective.nccl.communicator._WATCH_SECONDS", 0.01)
    file = tmp_path / "timeline.json"
    comms = local_group(2, timeout=20)
    put = gpus.asarray

    def first(c):
        c.all_reduce(put(np.ones(4, np.float32)))

    def second(c):
        x = put(np.ones(4, np.float32))
        c.barrier()
        gpus.cuda.library.fake_stall(1)
        c.barrier()
        c.all_reduce(x, "max")
        enqueued[c.rank] = time.time()
        later = c.broadcast(x, 1, async_op=True)
        c.barrier()
        time.sleep(0.05)
        c.barrier()
        gpus.cuda.library.fake_stall(0)
        gpus.asnumpy(later.wait())
        time.sleep(0.05)
        c.reduce(x[:0])  # an empty array, which gives the device no work
        if c.rank == 0:
            c.send(x, 1)
        else:
            c.recv(x, 0)

    enqueued = [0.0, 0.0]
    on_gpus(comms, first, close=False)
    with pc.timeline(file):
        before = time.time()
        on_gpus(comms, second, close=False)
    on_gpus(comms, first)
    found = by_nccl(file)
    assert len(found) == 6
    for rank in range(2):
        calls = {e["name"]: e for e in found if e["pid"] == rank}
        assert calls.keys() == {"all_reduce", "broadcast", ("send", "recv")[rank]}
        reduced, cast, message = (calls[name] for name in calls)
        assert reduced["args"] == {
            "bytes": 16, "dtype": "float32", "shape": [4], "transport": "NCCL", "op": "max",
            "times": "of the GPU", "call": 2,
        }  # fmt: skip
        assert (cast["args"]["root"], cast["args"]["call"]) == (1, 3)
        assert message["args"][("to rank", "from rank")[rank]] == 1 - rank
        begin, end = (reduced["ts"] + d for d in (0, reduced["dur"]))
        # The two clocks were read one after the other, so all times of the device may be late.
        assert before - 1e-3 <= begin / 1e6 <= end / 1e6 and enqueued[rank] < end / 1e6
        assert message["ts"] - end > 40e3  # the host noticed the end only after its sleep
        assert reduced["tid"] == cast["tid"] == message["tid"]
    rows = [e for e in json.loads(file.read_text())["traceEvents"] if e["name"] == "thread_name"]
    assert {(0, "GPU 0"), (1, "GPU 1")} < {(e["pid"], e["args"]["name"]) for e in rows}
    # The timeline leaves out the messages of waiting ranks.
    gathers = [e for e in slices(file) if e["name"] == "all_gather"]
    assert {e["args"]["shape"][0] for e in gathers} == {1}, gathers
    assert {e["args"]["dtype"] for e in gathers} == {"a GPU array"}


def test_timeline_that_ends_before_the_device_has_its_calls(gpus, on_gpus, tmp_path):
    comms = local_group(2, timeout=20)
    x = np.ones(4, np.float32)
    on_gpus(comms, lambda c: c.all_reduce(gpus.asarray(x)), close=False)

    def stalled(c):
        gpus.cuda.library.fake_stall(1)
        c.all_reduce(gpus.asarray(x), "max")

    with pc.timeline(tmp_path / "t.json"):
        on_gpus(comms, stalled, close=False)
        timer = threading.Timer(0.05, gpus.cuda.library.fake_stall, [0])
        timer.start()
    timer.join()
    assert [e["name"] for e in by_nccl(tmp_path / "t.json")] == ["all_reduce"] * 2
    on_gpus(comms, lambda c: c.barrier())


def test_trace_has_calls_and_errors(gpus, on_gpus, monkeypatch, capsys):
    before = LOG.handlers[:], LOG.level, LOG.propagate
    monkeypatch.setenv("PYCOLLECTIVE_DEBUG", "TRACE")

    def work(c):
        x = gpus.asarray(np.ones(4, np.float32))
        c.all_reduce(x)
        c.barrier()
        if c.rank == 0:
            gpus.cuda.library.fake_fail_next(3)
            with pytest.raises(NcclError):
                c.all_reduce(x)

    try:
        on_gpus(local_group(2, timeout=20), work)
    finally:
        LOG.handlers[:], level, LOG.propagate = before
        LOG.setLevel(level)
    lines = [line for line in capsys.readouterr().err.splitlines() if "float32[4]" in line]
    for rank in range(2):
        call = f"rank {rank} of 2: all_reduce #1 (float32[4], sum, times of the GPU): "
        assert any(call in line and line.endswith(" µs") for line in lines), lines
    failed = "rank 0 of 2: all_reduce (float32[4], sum, times of the GPU): after "
    assert any(failed in line and "NcclError: rank 0, all_reduce(" in line for line in lines)
