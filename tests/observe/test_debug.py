"""PYCOLLECTIVE_DEBUG: the line about a group, the trace of calls, the report of a failure."""

from __future__ import annotations

import json
import logging
import platform
import re

import numpy as np
import pytest

import pycollective as pc
from pycollective import _core
from pycollective.algorithms import algorithm, recv, recv_reduce, send
from pycollective.algorithms import input as given
from pycollective.algorithms import output as result
from pycollective.comm import all_reduce_together
from pycollective.launch import RendezvousError
from pycollective.observe.log import LOG


@pytest.fixture
def logger():
    """Return the package's logger, and restore its settings afterwards."""
    before = LOG.handlers[:], LOG.level, LOG.propagate
    yield LOG
    LOG.handlers[:], level, LOG.propagate = before
    LOG.setLevel(level)


@pytest.fixture
def trace(monkeypatch, logger):
    monkeypatch.setenv("PYCOLLECTIVE_DEBUG", "TRACE")


def lines_of(capsys):
    return capsys.readouterr().err.splitlines()


def test_group_line_has_ranks_source_and_host(caplog):
    caplog.set_level("INFO", "pycollective")
    pc.local_group(3)
    assert [r.getMessage() for r in caplog.records] == [
        "ranks 0 to 2, threads of this process; described by local_group; 1 host, this one is "
        f"{platform.node()}; algorithms: built-in table"
    ]


def test_group_line_names_a_measured_table(caplog, monkeypatch, tmp_path):
    from pycollective import tuning

    caplog.set_level("INFO", "pycollective")
    file = tmp_path / "table.json"
    rows = [(_core.Collective.all_reduce, 1 << 10, "ring")]
    tuning.save(file, "threads", 2, rows, "0")
    monkeypatch.setenv("PYCOLLECTIVE_TUNING", str(file))
    pc.local_group(2)
    assert f"algorithms: 1 rows of {file}, then the built-in table" in caplog.text


def test_debug_info_logs_without_configuration(monkeypatch, logger, capsys, caplog):
    monkeypatch.setenv("PYCOLLECTIVE_DEBUG", "INFO")
    comms = pc.local_group(2)
    again = pc.local_group(1)
    assert comms[0]._tracer is None  # calls take the fast path
    lines = lines_of(capsys)
    assert len(lines) == 2
    assert caplog.records == []  # otherwise a configured root logger repeats each line
    assert re.match(r"\d\d:\d\d:\d\d\.\d\d\d \[rank 0\] INFO ranks 0 to 1, threads", lines[0])
    assert "rank 0 of 1, alone; described by local_group" in lines[1]
    del again


@pytest.mark.parametrize("value", ["info", "DEBUG", "1"])
def test_debug_invalid_value_raises_rendezvous_error(monkeypatch, value):
    monkeypatch.setenv("PYCOLLECTIVE_DEBUG", value)
    for make in (pc.init, lambda: pc.local_group(2)):
        with pytest.raises(RendezvousError, match="is not INFO or TRACE"):
            make()


def test_tracer_is_absent_by_default():
    (comm,) = pc.local_group(1)
    assert comm._tracer is None


def test_trace_logs_every_call(trace, on_ranks, capsys):
    comms = pc.local_group(2)
    x = np.ones(4, "float32")

    def work(comm):
        y = comm.all_reduce(x)
        assert (y == 2).all()
        comm.all_reduce(x, "max", algorithm="ring")
        comm.all_reduce(x, reproducible=True)
        comm.broadcast(np.ones(70_000), 1)
        comm.gather(x, 1)
        comm.all_gather(x[: comm.rank], ragged=True)
        comm.all_to_all(x, [2, 2])
        comm.reduce(x, "min", 1)
        comm.reduce_scatter(x)
        comm.scatter(x, 0)
        comm.empty(3)
        comm.barrier()
        comm.barrier(async_op=True).wait()
        comm.recv(shape=3, dtype="int8", source=1) if comm.rank == 0 else comm.send(
            np.zeros(3, "int8"), 0
        )
        with comm.split(comm.rank) and comm.all_reduce(x, async_op=True) as work:
            pass
        assert (work.result() == 2).all()
        return None

    assert on_ranks(comms, work) == [None, None]
    lines = [line for line in lines_of(capsys) if "TRACE rank 0 of 2: " in line]
    calls = [re.sub(r": [\d.]+ µs$", "", line.partition("rank 0 of 2: ")[2]) for line in lines]
    assert all(re.search(r": [\d.]+ µs$", line) for line in lines)
    chosen = "chosen by the built-in table for {} bytes among 2 ranks"
    table = chosen.format(16)
    assert calls[:11] == [
        f"all_reduce #1 (float32[4], sum, direct, {table})",
        "all_reduce #2 (float32[4], max, ring)",
        "all_reduce #3 (float32[4], sum, direct, for reproducible=True)",
        f"broadcast #4 (float64[70000], direct, {chosen.format(560000)}, root 1)",
        "gather #5 (float32[4], direct, root 1)",
        f"all_gather #6 (counts[1], direct, {table})",
        f"all_gather #7 (float32[0], direct, {chosen.format(4)})",
        "all_to_all #8 (counts[2], direct)",
        "all_to_all #9 (float32[4], direct)",
        f"reduce #10 (float32[4], min, direct, {chosen.format(16)}, root 1)",
        f"reduce_scatter #11 (float32[4], sum, direct, {table})",
    ]
    assert calls[11] == "scatter #12 (float32[4], direct, root 0)"
    assert calls[12].startswith("barrier #")
    assert calls[13] == "barrier, async_op"
    assert calls[14] == "recv (int8[3], from rank 1, tag 0)"
    assert calls[-1].startswith(f"all_reduce (float32[4], sum, direct, {table})")
    assert calls[-1].endswith(", async_op")


def test_trace_names_an_own_algorithm_in_all_reduce_together(trace, capsys):
    @algorithm(num_chunks=2)
    def line(rank, size):
        other = 1 - rank
        yield send(other, given[other])
        yield recv_reduce(other, given[rank], result[rank])
        yield send(other, result[rank])
        yield recv(other, result[other])

    comms = pc.local_group(2)
    found = all_reduce_together(comms, [np.ones(3), np.ones(3)], "sum", line)
    assert [list(x) for x in found] == [[2.0] * 3] * 2
    lines = [x for x in lines_of(capsys) if "TRACE" in x]
    assert len(lines) == 2
    assert "all_reduce #1 (float64[3], sum, line, the program's own)" in lines[1]


def test_trace_logs_the_last_calls_after_a_failure(trace, on_ranks, capsys):
    comms = pc.local_group(2)

    def work(comm):
        for i in range(40):
            comm.all_reduce(np.full(1, i))
        comm.all_reduce(np.ones(2 + comm.rank))

    errors = on_ranks(comms, work)
    assert all(isinstance(e, pc.MismatchError) for e in errors)
    text = capsys.readouterr().err
    told = text[text.index("ERROR rank 0 failed; its last calls:") :].splitlines()[1:33]
    assert told[0].startswith("    all_reduce #10 (int64[1], sum")
    assert told[30].startswith("    all_reduce #40 (int64[1], sum")
    assert told[31].startswith("    all_reduce #41 (float64[2], sum")
    assert "MismatchError: ranks made calls that do not belong together" in told[31]
    assert text.count("ERROR rank 0 failed") == text.count("ERROR rank 1 failed") == 1
    on_ranks(comms, lambda c: c.barrier())  # the group has failed: no second report
    assert "its last calls" not in capsys.readouterr().err


def test_trace_does_not_change_errors(trace):
    comms = pc.local_group(2)
    with pytest.raises(ValueError, match="no all_reduce algorithm is called 'nonsense'"):
        comms[0].all_reduce([1.0], algorithm="nonsense", async_op=True)
    with pytest.raises(TypeError):
        comms[0].all_reduce([1j], "max")
    comms[0].close()
    with pytest.raises(pc.CollectiveError, match="closed"):
        comms[0].barrier()
    with pytest.raises(pc.CollectiveError, match="closed"):
        all_reduce_together(comms, [np.ones(3)] * 2, "sum")


def test_tracer_is_absent_at_the_debug_level(caplog):
    """A program that logs at DEBUG does not get the trace."""
    caplog.set_level(logging.DEBUG)
    (comm,) = pc.local_group(1)
    assert comm._tracer is None


def test_split_logs_the_new_group(caplog, on_ranks):
    caplog.set_level("INFO", "pycollective")
    on_ranks(pc.local_group(2), lambda c: c.split(0, -c.rank))
    assert "rank 1 of 2 (rank 0 before), threads; described by split of 2 ranks" in caplog.text


def test_record_arguments_are_json():
    """Timelines contain the arguments of calls as JSON."""
    from pycollective.observe.trace_events import Record

    call = Record("send", np.ones(3), ("", ""), {"to rank": 1, "tag": 0})
    assert json.loads(json.dumps(call.arguments()))["bytes"] == 24
