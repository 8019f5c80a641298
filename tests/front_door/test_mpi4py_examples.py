"""The examples for users of mpi4py give the same results with any number of ranks, and with mpi4py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORDS = {
    "heat": ["--side", "60", "--steps", "50"],
    "kmeans": ["--points", "4000"],
}


def output_of(command: list[str]) -> str:
    environment = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        command, cwd=EXAMPLES, capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def run(name: str, ranks: int) -> str:
    command = [sys.executable, "-m", "pycollective", "run", "-n", str(ranks)]
    return output_of([*command, str(EXAMPLES / f"{name}.py"), *WORDS[name]])


@pytest.mark.parametrize("name", WORDS)
def test_example_among_three_ranks_prints_what_one_rank_prints(name):
    alone = run(name, 1)
    assert alone.count("\n") == 1
    assert run(name, 3) == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_example_for_mpi4py_prints_the_same_and_is_not_shorter(name):
    pytest.importorskip("mpi4py")
    original = EXAMPLES / f"{name}_mpi4py.py"
    assert output_of([sys.executable, str(original), *WORDS[name]]) == run(name, 2)
    own = (EXAMPLES / f"{name}.py").read_text().count("\n")
    assert own <= original.read_text().count("\n")
