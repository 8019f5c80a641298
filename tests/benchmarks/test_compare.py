"""benchmarks/compare.py: its ratios, its bars, and going on where a comparison stopped."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / "benchmarks"
MI = 1 << 20


@pytest.fixture
def compare(monkeypatch):
    spec = importlib.util.spec_from_file_location("compare", HERE / "compare.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare", module)
    spec.loader.exec_module(module)
    return module


def results(ranks, launches, sizes=(8, MI, 16 * MI)):
    return {
        "title": "some", "ranks": ranks, "sizes": list(sizes), "launches": launches, "notes": {},
        "turns": 1, "when": "now",
    }  # fmt: skip


def times(*us, memory=None):
    found = {str(s): {"us": t} for s, t in zip((8, MI, 16 * MI), us, strict=True)}
    if memory:
        found[str(16 * MI)]["memory_gb_s"] = memory
    return found


def row(text, what, size):
    (line,) = [x for x in text.splitlines() if x.startswith(f"| {what} | {size} |")]
    return [cell.strip() for cell in line.split("|")[3:6]]


def test_ratios_are_of_medians_and_of_the_best_peer(compare):
    ours = [times(2, 10, 100), times(3, 10, 100), times(90, 10, 100)]  # one bad launch
    peers = {"A": [times(10, 20, 100)], "B": [times(6, 30, 500)]}
    text = compare.tables({"processes2": results(2, {"pycollective": ours, **peers})})
    assert "| **pycollective / best peer** | 0.50 | 0.50 | 1.00 |" in text
    assert "| pycollective | 3 (2–90) | 10 (10–10) | 100 (100–100) |" in text
    assert row(text, "2 processes", "8 B") == [
        "≤ 0.35 × best peer",
        "0.50 × best peer",
        "**not met**",
    ]
    assert row(text, "2 processes", "1 MiB") == ["≤ 0.70 × best peer", "0.50 × best peer", "met"]
    assert row(text, "2 processes", "256 MiB")[1:] == ["not measured", ""]


def test_the_bars_of_the_machine(compare):
    # 2 × 2 × 16 MiB at 100 GB/s: 671 µs.
    ours = [times(9, 50, 700, memory=100.0)]
    tensorflow = {"TensorFlow eager": [times(99, 99, 650)], "JAX psum": [times(1, 1, 1)]}
    text = compare.tables({"replicas2": results(2, {"pycollective": ours, **tensorflow})})
    assert row(text, "2 replicas, 85 % of memory", "16 MiB")[1:] == [
        "1.04 × the limit's time",
        "met",
    ]
    assert row(text, "2 replicas, ahead of TensorFlow", "16 MiB")[1:] == [
        "1.08 × TensorFlow", "**not met**",
    ]  # fmt: skip
    assert row(text, "2 replicas, small", "8 B")[1:] == ["9 µs", "met"]
    raw = {"one_way_us_blocking": 20.0, "one_way_us_spinning": 4.0}
    raw |= {"both_ways_gb_s_threads": 4.0, "both_ways_gb_s_polling": 5.0}
    launches = {"pycollective": [times(24, 629, 6710)], "raw loopback": [raw]}
    text = compare.tables({"tcp2": results(2, launches)})
    assert row(text, "TCP, 80 % of raw", "8 B")[1:] == ["1.20 × the limit's time", "met"]
    assert row(text, "TCP, 80 % of raw", "1 MiB")[1:] == ["1.50 × the limit's time", "**not met**"]
    assert row(text, "TCP, 2 processes", "8 B")[1:] == ["not measured", ""]


@pytest.mark.slow
def test_it_runs_and_goes_on(compare, tmp_path, monkeypatch, capsys):
    pytest.importorskip("pycollective")
    file = tmp_path / "results.json"
    words = ["compare.py", "--launches", "2", "--seconds", "0.001", "--sizes", "8", "--peers"]
    words += ["--mpi", "No MPI=/nowhere/python", "--json", str(file), "--parts", "processes2"]
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setattr(sys, "argv", words)
    compare.main()
    out = capsys.readouterr()
    assert out.err.count(": pycollective") == 2
    assert "Without No MPI: not installed." in out.out
    part = json.loads(file.read_text())["parts"]["processes2"]
    assert [launched["8"]["us"] > 0 for launched in part["launches"]["pycollective"]] == [True] * 2
    monkeypatch.setattr(sys, "argv", [*words, "replicas2"])
    compare.main()
    out = capsys.readouterr()
    assert "processes2: already in" in out.err
    assert set(json.loads(file.read_text())["parts"]) == {"processes2", "replicas2"}


@pytest.mark.parametrize(
    ("script", "why"),
    [("import time; time.sleep(60)", "did not end within 1 s"),
     ("raise SystemExit('wrong sum at 8 bytes')", "gave no result: wrong sum at 8 bytes"),
     ("raise SystemExit('LEFT OUT there is none')", "there is none")],
)  # fmt: skip
def test_a_contestant_that_fails_is_told(compare, tmp_path, monkeypatch, script, why):
    worker = tmp_path / "worker.py"
    worker.write_text(script)
    monkeypatch.setattr(compare, "RANKS", str(worker))
    part = compare.PARTS["replicas2"]
    assert compare.launch("threads", sys.executable, part, [8], 0.1, 1) == why
