"""Output about ranks that are processes: slow peers, groups, traces, timelines."""

from __future__ import annotations

import json
import re
import sys

import pytest
from fast_cases import some_fast
from processes import fast_on, run_on_hosts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")

LATE = """
import logging
from pathlib import Path
class Warned(logging.StreamHandler):
    def emit(self, record):
        if " is in all_reduce #1 (" not in record.getMessage():  # a process may start late
            super().emit(record)
            Path(f"warned{{comm.rank}}").touch()
logging.getLogger("pycollective").addHandler(Warned())
comm.all_reduce(np.ones(3), "max")
if comm.rank == 1:
    while not all(Path(f"warned{{r}}").exists() for r in range(comm.size) if r != 1):
        time.sleep(0.01)
{call}
"""


def warnings_of(text):
    """Return the warning of each rank, by rank; a rank may have only one."""
    found = re.findall(r"^rank (\d+) is in .*$", text, re.MULTILINE)
    assert sorted(found) == sorted(set(found)), text
    return {int(m[1]): m[0] for m in re.finditer(r"^rank (\d+) is in .*$", text, re.MULTILINE)}


_PLAIN, _RING = "all_reduce(np.ones(9))", "all_reduce(np.ones(9), algorithm='ring')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run_on", "call"),
    some_fast(
        [(t, call) for t in ("shm", "tcp") for call in (_PLAIN, _RING)],
        [("shm", _PLAIN)],
    ),
    indirect=["run_on"],
)
def test_a_slow_rank_is_named_once(run_on, monkeypatch, call):
    monkeypatch.setenv("PYCOLLECTIVE_WARN_AFTER", "0.3")
    status, out, err = run_on(3, LATE.format(call=f"comm.{call}"))
    assert (status, out) == (0, ""), err
    warnings = warnings_of(err)
    assert sorted(warnings) == [0, 2], err
    for text in warnings.values():
        assert " in all_reduce #2 (float64[9], sum, " in text
        assert " for rank 1 to enter this call: rank 1 " in text
        assert re.search(
            r"has finished all_reduce #1|sent its last message in all_reduce #1|has sent nothing yet",
            text,
        ), text
        assert re.search(r"It gives up in 1?\d s\.$|20 s\.$", text)


@pytest.mark.slow
def test_slow_rank_in_a_mixed_group_is_named(tmp_path):
    call = LATE.format(call="comm.barrier()")
    group = run_on_hosts(tmp_path, "aabb", call, PYCOLLECTIVE_WARN_AFTER="0.3")
    assert group.codes == [0] * 4, group
    warnings = warnings_of(group.errors)
    assert sorted(warnings) == [0, 2, 3], group.errors
    for warning in warnings.values():
        # A rank knows ranks of other hosts by their messages; waiting ranks have sent theirs.
        assert " for rank 1 to enter this call: rank 1 " in warning, warning


@pytest.mark.slow
@fast_on("shm")
def test_rank_stopped_within_the_call_is_named(run_on, monkeypatch):
    """All ranks have entered the call; one is stopped."""
    monkeypatch.setenv("PYCOLLECTIVE_WARN_AFTER", "0.3")
    body = """
import threading
pids = comm.all_gather(np.array([os.getpid()]))
x = np.ones(2_000_000, "float32")
def stop_for_a_while():
    time.sleep(0.1)
    os.kill(int(pids[1]), signal.SIGSTOP)
    time.sleep(1.1)
    os.kill(int(pids[1]), signal.SIGCONT)
thread = threading.Thread(target=stop_for_a_while)
if comm.rank == 0:
    thread.start()
while comm.broadcast(np.array([thread.is_alive()]))[0]:
    comm.all_reduce(x, out=x, op="max")
"""
    status, _, err = run_on(2, body)
    assert status == 0, err
    assert " for rank 1" in err, err


@fast_on("tcp")
def test_debug_trace_describes_groups_and_calls(run_on, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_DEBUG", "TRACE")
    status, _, err = run_on(2, "comm.all_reduce(np.ones(3)); comm.split(0)")
    assert status == 0, err
    for rank in range(2):
        lines = [line for line in err.splitlines() if f"[rank {rank}]" in line]
        description, *_ = [line for line in lines if " INFO " in line]
        assert f"rank {rank} of 2, " in description
        assert re.search(r"described by pycollective run; ", description)
        assert "algorithms: built-in table" in description
        assert "1 host" in description or "no two ranks are known to share a host" in description
        (call,) = [line for line in lines if "all_reduce #1 " in line]
        assert f"TRACE rank {rank} of 2: all_reduce #1 (float64[3], sum, " in call
        assert f"rank {rank} of 2 (rank {rank} before), " in err


@fast_on("shm")
def test_wrong_debug_level_raises_before_the_rendezvous(run_on, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_DEBUG", "LOUD")
    status, _, err = run_on(2, "")
    assert status in (1, 2)  # 2: from `pycollective run`, which starts no rank
    assert "PYCOLLECTIVE_DEBUG='LOUD' is not INFO or TRACE" in err


@fast_on("shm")
def test_timelines_of_all_ranks_have_one_clock(run_on, tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_TIMELINE", str(tmp_path / "calls.json"))
    status, _, err = run_on(2, "comm.all_reduce(np.ones(3)); comm.split(0, -comm.rank).barrier()")
    assert (status, err) == (0, "")
    spans = []
    for rank in range(2):
        events = json.loads((tmp_path / f"calls.rank{rank}.json").read_text())["traceEvents"]
        assert {e["pid"] for e in events} == {rank}
        assert sum(e["name"] == "barrier" for e in events) == 1
        (call,) = [e for e in events if e["name"] == "all_reduce"]
        spans.append((call["ts"], call["ts"] + call["dur"]))
    # No rank ends the call before the other enters it, so the spans overlap if the clocks agree.
    assert max(spans[0][0], spans[1][0]) < min(spans[0][1], spans[1][1])


@fast_on("tcp")
def test_timeline_contains_the_error_of_a_lost_rank(run_on, tmp_path, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_TIMELINE", str(tmp_path / "of {rank}.json"))
    body = """
comm.barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.all_reduce(np.ones(3))
except pc.PeerLostError:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run_on(2, body)
    events = json.loads((tmp_path / "of 0.json").read_text())["traceEvents"]
    (call,) = [e for e in events if e["name"] == "all_reduce"]
    assert call["args"]["error"].startswith("PeerLostError: rank 1 ")
