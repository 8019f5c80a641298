"""examples/multi_worker.py gives two workers the same numbers with every launcher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_ports

pytestmark = pytest.mark.slow

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples/multi_worker.py")


def worker_lines(commands):
    """Run commands at the same time; return the lines that begin with "worker", sorted."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            words,
            env={**env, **variables},
            cwd=Path(EXAMPLE).parent,  # not beside the sources, which may have no compiled core
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words, variables in commands
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith("worker ")]
    assert len(lines) == 2, outputs
    return sorted(lines)


@pytest.fixture(scope="module")
def words(mnist_dir):
    return [EXAMPLE, "--epochs", "1", "--examples", "1024", "--data", str(mnist_dir)]


@pytest.fixture(scope="module")
def by_hand(words):
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    commands = []
    for index in range(2):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": workers}, "task": task})
        commands.append(([sys.executable, *words], {"TF_CONFIG": config}))
    return worker_lines(commands)


def test_workers_by_hand_agree(by_hand):
    first, second = by_hand
    assert first.removeprefix("worker 0") == second.removeprefix("worker 1")


def test_pycollective_run_gives_the_same_numbers(words, by_hand):
    run = [sys.executable, "-m", "pycollective", "run", "-n", "2"]
    assert worker_lines([([*run, *words], {})]) == by_hand


@pytest.mark.parametrize("program", ["mpirun", "mpiexec.hydra"])
def test_mpi_gives_the_same_numbers(words, by_hand, program):
    if shutil.which(program) is None:
        pytest.skip(f"no {program}")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    allowed["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    assert worker_lines([([program, "-n", "2", sys.executable, *words], allowed)]) == by_hand


def test_ray_gives_the_same_numbers(words, by_hand):
    pytest.importorskip("ray")
    env = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    assert worker_lines([([sys.executable, *words, "--ray", "2"], env)]) == by_hand
