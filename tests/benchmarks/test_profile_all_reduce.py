"""benchmarks/profile_all_reduce.py: a row for each size, on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "profile_all_reduce.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")
def test_profile_has_a_row_for_each_size(tmp_path):
    def run(*options, ranks=2):
        how = ["run", "-n", str(ranks), str(SCRIPT), "--seconds", "0.02", *options]
        code = "import sys; from pycollective.cli import main; sys.exit(main(sys.argv[1:]))"
        return subprocess.run(
            [sys.executable, "-c", code, *how],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=120,
        )

    done = run("--sizes", "8", "64K", "1M", "--json", "found.json")
    assert done.returncode == 0, done
    rows = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [row["bytes"] for row in rows] == [8, 64 << 10, 1 << 20]
    assert "stage" not in rows[0]
    for row in rows:
        parts = [row.get(k, 0) for k in ("enter", "meet", "stage", "reduce", "take", "rest")]
        assert sum(parts) == pytest.approx(row["call"])
        assert row["enter"] > 0 and row["busy"] > 0
    assert len([line for line in done.stdout.splitlines() if line.startswith("|")]) == 2 + len(rows)
    assert "powers of two" in run("--sizes", "300K").stderr
    for ranks, options in ((1, ["--threads", "2"]), (2, ["--registered"]), (3, [])):
        done = run("--sizes", "64K", *options, "--json", "found.json", ranks=ranks)
        assert done.returncode == 0, done
        (row,) = json.loads((tmp_path / "found.json").read_text())["results"]
        assert row["call"] > 0 and row["busy"] > 0 and row["sleeps"] >= 0 and "stage" not in row
