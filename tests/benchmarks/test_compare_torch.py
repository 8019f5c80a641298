"""compare_torch.py and torch_models.py with small tensors and models: their runs and reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import hangs
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (extra torch)")

HERE = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.slow  # CI has PyTorch only there


def run(tmp_path, name, *options):
    """Run a benchmark; return its output."""
    done = subprocess.run(
        [sys.executable, HERE / name, *map(str, options)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * hangs.SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_compare_torch_writes_a_table_of_all_contestants(tmp_path):
    file, names = tmp_path / "results.json", ("pycollective", "shared", "gloo")
    few = ["--sizes", 8, 65536, "--parameters", 2000, "--seconds", 0.001, "--json", file]
    text = run(tmp_path, "compare_torch.py", "--ranks", 2, *few)
    assert "of gloo's" in text
    (found,) = json.loads(file.read_text())
    times = found["microseconds"]
    for call in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for size in (8, 65536):
            for name in names:
                assert times[f"2 ranks {call} {size} {name}"] > 0
    for what in ("step", "step in no_sync()", "all-reduces alone"):
        for name in names:
            assert times[f"2 ranks overlap: {what} 2000 {name}"] > 0
    lines = run(tmp_path, "compare_torch.py", "--table", file).splitlines()
    assert "| ranks | call | 8 B | 64 KiB |" in lines
    assert "| ranks | synchronization of | 2,000 parameters |" in lines
    for start in ("| 2 | all_to_all |", "| 2 | DDP, nothing sent |", "| 2 | gloo | 2,000 |"):
        assert sum(line.startswith(start) for line in lines) == 1, start


def test_torch_models_reports_equal_parameters(tmp_path):
    file = tmp_path / "results.json"
    few = ["--models", "transformer", "--steps", 4, "--batch", 1, "--json", file]
    run(tmp_path, "torch_models.py", *few)
    found = json.loads(file.read_text())["milliseconds of a step"]
    assert found.keys() == {"transformer ddp", "transformer ddp_shared", "transformer fsdp2"}
    for row in found.values():
        assert min(row["pycollective"], row["gloo"]) > 0
        assert row["largest difference"] < 1e-5
