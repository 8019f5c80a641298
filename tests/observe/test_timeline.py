"""Timelines: the files for Perfetto."""

from __future__ import annotations

import itertools
import json
import os
import time

import numpy as np
import pytest

import pycollective as pc
from pycollective.cli import main
from pycollective.comm import tracing
from pycollective.launch import RendezvousError
from pycollective.observe.trace_events import Timeline


@pytest.fixture(autouse=True)
def as_before():
    """Remove timelines after each test: those of the environment last until the process ends."""
    yield
    tracing._timelines.clear()
    tracing._from_environment.clear()


def slices(file, name=""):
    content = json.loads(file.read_text())
    events = [e for e in content["traceEvents"] if e["ph"] != "M"]
    return [e for e in events if not name or e["name"] == name]


def test_timeline_has_the_calls_within_the_block(tmp_path, on_ranks):
    comms = pc.local_group(2)
    file = tmp_path / "new" / "timeline.json"
    on_ranks(comms, lambda c: c.all_reduce(np.ones(3)))
    before = time.time()
    with pc.timeline(file):
        assert slices(file) == []  # written at once, to detect errors early
        on_ranks(comms, lambda c: c.all_reduce(np.ones(4, "float32"), "max"))
        (later,) = pc.local_group(1)
        later.barrier()
    after = time.time()
    on_ranks(comms, lambda c: c.all_reduce(np.ones(3)))
    assert all(c._tracer is None for c in [*comms, later])
    calls = slices(file, "all_reduce")
    assert sorted(e["pid"] for e in calls) == [0, 1]
    for event in calls:
        assert event["ph"] == "X"
        assert before <= event["ts"] / 1e6 <= (event["ts"] + event["dur"]) / 1e6 <= after
        arguments = event["args"]
        assert arguments.pop("why").startswith("chosen by the built-in table for 16 bytes")
        assert arguments == {
            "bytes": 16, "dtype": "float32", "shape": [4], "transport": "threads", "op": "max",
            "call": 2, "algorithm": "direct",
        }  # fmt: skip
    assert len(slices(file)) == 3
    content = json.loads(file.read_text())
    names = {
        e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"
    }
    assert names[1].startswith("rank 1 (")
    assert f"process {os.getpid()})" in names[1]


def test_timeline_of_a_block_that_raises_is_written(tmp_path, on_ranks):
    comms = pc.local_group(2)
    file = tmp_path / "t.json"
    with pytest.raises(KeyError):
        with pc.timeline(str(file)):
            on_ranks(comms, lambda c: c.barrier())
            raise KeyError
    assert len(slices(file, "barrier")) == 2


def test_timeline_of_async_calls_has_rows_and_pairs(tmp_path, on_ranks):
    comms = pc.local_group(2)
    file = tmp_path / "t.json"

    def work(comm):
        calls = [comm.all_reduce(np.ones(1000), async_op=True) for _ in range(3)]
        other = 1 - comm.rank
        calls += [comm.recv(np.empty(3), other, tag, async_op=True) for tag in range(2)]
        calls += [comm.send(np.ones(3), other, tag, async_op=True) for tag in range(2)]
        for call in calls:
            call.wait()

    with pc.timeline(file):
        on_ranks(comms, work)
    for rank in range(2):
        events = [e for e in slices(file) if e["pid"] == rank]
        whole = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X")
        assert len(whole) == 3
        # Calls of one row do not overlap, to the microsecond (the resolution of the numbers).
        assert all(a + dur <= b + 1 for (a, dur), (b, _) in itertools.pairwise(whole))
        begins = [e["id"] for e in events if e["ph"] == "b"]
        ends = [e["id"] for e in events if e["ph"] == "e"]
        assert len(set(begins)) == 4
        assert sorted(begins) == sorted(ends)


def test_timeline_has_split_groups_under_the_first_ranks(tmp_path, on_ranks):
    comms = pc.local_group(4)
    with pc.timeline(tmp_path / "t.json"):
        on_ranks(comms, lambda c: c.split(c.rank % 2).all_reduce(np.ones(3, "int8")))
    events = slices(tmp_path / "t.json", "all_reduce")
    assert sorted(e["pid"] for e in events) == [0, 1, 2, 3]


def test_timeline_is_written_when_a_call_fails(tmp_path, monkeypatch, on_ranks):
    file = tmp_path / "t.json"
    monkeypatch.setenv("PYCOLLECTIVE_TIMELINE", str(file))
    comms = pc.local_group(2)
    assert slices(file) == []
    on_ranks(comms, lambda c: c.barrier())
    on_ranks(comms, lambda c: c.all_reduce(np.ones(1 + c.rank)))
    failed = slices(file, "all_reduce")
    assert failed
    assert "MismatchError: ranks made calls" in failed[0]["args"]["error"]
    for comm in comms:
        comm.close()
    assert len(slices(file, "all_reduce")) == len(slices(file, "barrier")) == 2


@pytest.mark.parametrize("make", ["block", "environment"])
def test_timeline_that_cannot_be_written_raises_early(tmp_path, monkeypatch, make):
    (tmp_path / "file").write_text("")
    name = str(tmp_path / "file" / "t.json")
    if make == "block":
        with pytest.raises(OSError), pc.timeline(name):
            pytest.fail("the block was entered")
    else:
        monkeypatch.setenv("PYCOLLECTIVE_TIMELINE", name)
        with pytest.raises(RendezvousError, match="cannot be written"):
            pc.local_group(1)
    monkeypatch.delenv("PYCOLLECTIVE_TIMELINE", raising=False)
    (comm,) = pc.local_group(1)
    assert comm._tracer is None


@pytest.mark.parametrize(
    ("given", "alone", "shared"),
    [
        ("a.json", "a.json", "a.rank3.json"),
        ("a.{rank}.json", "a.0.json", "a.3.json"),
        ("folder/", "folder/rank0.json", "folder/rank3.json"),
        (".", "rank0.json", "rank3.json"),
    ],
)
def test_timeline_path_depends_on_rank_and_folder(tmp_path, monkeypatch, given, alone, shared):
    monkeypatch.chdir(tmp_path)
    timeline = Timeline(given)
    timeline.add_rank(2, True)
    assert str(timeline.path()) == alone
    timeline.add_rank(3, False)
    timeline.add_rank(0, False)  # of a split group
    assert str(timeline.path()) == shared
    timeline.write()
    assert json.loads((tmp_path / shared).read_text())["traceEvents"] == []
    assert not [p for p in tmp_path.rglob(".*")]


def test_timeline_keeps_only_the_last_calls(tmp_path, monkeypatch):
    monkeypatch.setattr("pycollective.observe.trace_events.MOST_CALLS", 5)
    (comm,) = pc.local_group(1)
    with pc.timeline(tmp_path / "t.json"):
        for _ in range(8):
            comm.barrier()
    content = json.loads((tmp_path / "t.json").read_text())
    assert content["otherData"] == {"earlier calls that are missing": 3}
    assert [e["args"]["call"] for e in slices(tmp_path / "t.json")] == [4, 5, 6, 7, 8]


def test_timeline_without_a_name_raises():
    with pytest.raises(ValueError, match="the name of its file"), pc.timeline(""):
        pass


def test_timeline_of_several_processes_to_a_device_makes_no_file():
    made = Timeline(os.devnull)
    made.add_rank(1, alone=False)
    assert str(made.path()) == os.devnull


def test_timeline_merge_joins_files_and_refuses_others(tmp_path, capsys, monkeypatch):
    (comm,) = pc.local_group(1)
    files = []
    for i in range(2):
        files.append(str(tmp_path / f"{i}.json"))
        with pc.timeline(files[-1]):
            comm.barrier()
    target = tmp_path / "all.json"
    assert main(["timeline", "merge", *files, "-o", str(target)]) == 0
    assert len(slices(target, "barrier")) == 2
    assert "of 2 files" in capsys.readouterr().out
    deep = "[" * 100_000
    bad = {"a.json": "{}", "b.json": "no json", "c.json": "[]", "d.json": deep}
    bad["e.json"] = '{"traceEvents": [1]}'
    for wrong, content in bad.items():
        (tmp_path / wrong).write_text(content)
        assert main(["timeline", "merge", str(tmp_path / wrong), "-o", str(target)]) == 2
        assert "is not a timeline" in capsys.readouterr().err
    assert main(["timeline", "merge", str(tmp_path / "none.json"), "-o", str(target)]) == 2
    assert len(slices(target, "barrier")) == 2


def test_timeline_merge_takes_a_folder(tmp_path, capsys):
    folder, target = tmp_path / "calls", tmp_path / "all.json"
    folder.mkdir()
    with pytest.raises(SystemExit):
        main(["timeline", "merge", str(folder), "-o", str(target)])
    assert f"no timeline (*.json) is in {folder}" in capsys.readouterr().err
    for rank in range(2):
        (folder / f"rank{rank}.json").write_text('{"traceEvents": []}')
    assert main(["timeline", "merge", str(folder), "-o", str(target)]) == 0
    assert "0 events of 2 files" in capsys.readouterr().out
    joined = folder / "all.json"
    assert main(["timeline", "merge", str(folder), "-o", str(joined)]) == 0
    capsys.readouterr()
    assert main(["timeline", "merge", str(folder), "-o", str(target)]) == 0
    out = capsys.readouterr().out
    assert f"0 events of 2 files\n{joined} is left out: it was joined from timelines\n" in out
    assert main(["timeline", "merge", str(joined), "-o", str(target)]) == 2
    assert "was joined from timelines: give the files" in capsys.readouterr().err
