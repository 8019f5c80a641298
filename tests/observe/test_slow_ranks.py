"""Warnings about slow ranks: each waiting rank names the missing rank once, before the deadline."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import pycollective as pc
from pycollective.launch import RendezvousError


@pytest.fixture
def early_warnings(monkeypatch, caplog):
    """Let ranks warn after 0.4 s; return the captured log."""
    monkeypatch.setenv("PYCOLLECTIVE_WARN_AFTER", "0.4")
    return caplog


def warnings_of(caplog):
    return sorted(r.getMessage() for r in caplog.records if r.levelname == "WARNING")


def late(comms, on_ranks, call, caplog, who=2, count=2):
    """Make a call that rank ``who`` joins after ``count`` warnings; return the others' warnings."""
    enough = threading.Event()
    others = threading.Barrier(len(comms) - 1, timeout=30)

    def work(comm):
        if comm.rank == who:
            assert enough.wait(30)
        else:
            others.wait()
        return call(comm)

    handler = caplog.handler
    emit = handler.emit

    def emit_and_count(record):
        emit(record)
        if len(warnings_of(caplog)) >= count:
            enough.set()

    handler.emit = emit_and_count
    try:
        results = on_ranks(comms, work)
    finally:
        handler.emit = emit
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [text for text in warnings_of(caplog) if not text.startswith(f"rank {who} ")]


@pytest.mark.parametrize("items", [1, 100_000])
def test_warning_in_direct_names_the_missing_rank(early_warnings, on_ranks, items):
    comms = pc.local_group(3)
    texts = late(comms, on_ranks, lambda c: c.all_reduce(np.ones(items, "float32")), early_warnings)
    assert len(texts) == 2
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank} is in all_reduce #1 (float32[{items}], sum, direct)")
        assert " s for rank 2 to enter this call: rank 2 has made no collective call yet" in text
        assert ". It gives up in " in text
        assert "Next" not in text


def test_warning_in_a_schedule_names_the_awaited_ranks(early_warnings, on_ranks):
    comms = pc.local_group(3)
    texts = late(
        comms, on_ranks, lambda c: c.all_reduce(np.ones(64), algorithm="ring"), early_warnings
    )
    assert len(texts) == 2
    # In a ring, rank 0 needs a message of rank 2, and rank 1 one of rank 0.
    assert "for rank 2 to enter" in texts[0]
    assert "In this call" not in texts[0]
    assert "for rank 2 to enter" in texts[1]
    assert "In this call it waits for data of rank 0" in texts[1]


def test_warning_has_the_last_call_of_the_missing_rank(early_warnings, on_ranks):
    comms = pc.local_group(2)
    on_ranks(comms, lambda c: c.broadcast(np.ones(3), 1))
    (text,) = late(comms, on_ranks, lambda c: c.barrier(), early_warnings, who=1, count=1)
    assert text.startswith("rank 0 is in barrier #2 and has waited 0.")
    assert "rank 1 has finished broadcast #1 (float64[3], direct, root 1)" in text


def test_warning_in_an_async_call_names_the_missing_rank(early_warnings, on_ranks):
    comms = pc.local_group(2)
    (text,) = late(
        comms, on_ranks, lambda c: c.barrier(async_op=True).wait(), early_warnings, who=1, count=1
    )
    assert "for rank 1 to enter this call" in text


def test_warning_in_recv_names_the_sender(early_warnings, on_ranks):
    comms = pc.local_group(2)

    def call(comm):
        if comm.rank == 1:
            comm.send(np.ones(3), 0, 7)
        else:
            comm.recv(np.empty(3), 1, 7)

    (text,) = late(comms, on_ranks, call, early_warnings, who=1, count=1)
    assert text.startswith("rank 0 has waited 0.")
    assert "in recv (float64[3], tag 7) from rank 1: rank 1 has made no collective call yet" in text


def test_warning_names_at_most_eight_ranks(early_warnings, on_ranks):
    comms = pc.local_group(13)

    def work(comm):
        until = time.monotonic() + 30
        while comm.rank and not warnings_of(early_warnings):
            assert time.monotonic() < until
            time.sleep(0.01)
        comm.barrier()

    on_ranks(comms, work)
    text = next(t for t in warnings_of(early_warnings) if t.startswith("rank 0 "))
    assert "for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4 more to enter this call" in text


def test_warning_comes_after_half_of_a_short_timeout(monkeypatch, caplog, on_ranks):
    monkeypatch.delenv("PYCOLLECTIVE_WARN_AFTER")
    comms = pc.local_group(2, timeout=0.6)
    error = on_ranks(comms, lambda c: None if c.rank else c.barrier())[0]
    assert isinstance(error, pc.CollectiveTimeoutError)
    (text,) = warnings_of(caplog)
    assert "for rank 1 to enter" in text


def test_warning_is_absent_without_a_late_rank(monkeypatch, caplog, on_ranks):
    monkeypatch.setenv("PYCOLLECTIVE_WARN_AFTER", "30")
    comms = pc.local_group(3)
    on_ranks(comms, lambda c: [c.all_reduce(np.ones(100_000)) for _ in range(50)])
    monkeypatch.setenv("PYCOLLECTIVE_WARN_AFTER", "inf")
    comms = pc.local_group(2, timeout=0.5)
    error = on_ranks(comms, lambda c: None if c.rank else c.barrier())[0]
    assert isinstance(error, pc.CollectiveTimeoutError)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
def test_warn_after_invalid_value_raises_rendezvous_error(monkeypatch, value):
    monkeypatch.setenv("PYCOLLECTIVE_WARN_AFTER", value)
    with pytest.raises(RendezvousError, match=r"PYCOLLECTIVE_WARN_AFTER=.*positive number"):
        pc.local_group(2)
