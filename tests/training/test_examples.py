"""Every example runs without a network; the training examples compare saved and loaded models."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: The options with which each example runs, so that it is short.
OPTIONS = {
    "custom_training.py": "--epochs 1",
    "guide.py": "",
    "heat.py": "--side 60 --steps 50",
    "heat_mpi4py.py": "--side 60 --steps 50",
    "keras_fit.py": "--epochs 1",
    "kmeans.py": "--points 4000",
    "kmeans_mpi4py.py": "--points 4000",
    "multi_worker.py": "--epochs 1",
    "parameter_server.py": "",
}
pytestmark = pytest.mark.slow


def run(name, *options):
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, options)],
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    ).stdout


def test_examples_are_all_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_example_without_network_and_mnist_runs_to_its_end(name, tmp_path, monkeypatch):
    pytest.importorskip("mpi4py" if "mpi4py" in name else "sklearn")
    monkeypatch.delenv("PYCOLLECTIVE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert run(name, *OPTIONS[name].split())


def test_keras_fit_runs_to_its_end(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("h5py")
    pytest.importorskip("tensorboard")
    printed = run("keras_fit.py", "--data", "digits", "--epochs", 4, "--logs", tmp_path)
    rates = re.findall(r"Learning rate for epoch \d is ([\d.e-]+)", printed)
    assert [round(float(rate), 6) for rate in rates] == [1e-3, 1e-3, 1e-3, 1e-4]
    accuracies = [float(x) for x in re.findall(r"Eval accuracy: ([\d.]+)", printed)]
    assert len(accuracies) == 3 and len(set(accuracies)) == 1 and accuracies[0] > 0.8
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_keras_fit_reaches_99_percent(mnist_dir):
    printed = run("keras_fit.py", "--data", mnist_dir, "--epochs", 4)
    assert float(re.findall(r"Eval accuracy: ([\d.]+)", printed)[-1]) >= 0.99


def test_custom_training_reaches_99_percent(mnist_dir):
    printed = run("custom_training.py", "--data", mnist_dir)
    accuracies = re.findall(r"(?:Test Accuracy|without strategy): ([\d.]+)", printed)
    assert len(accuracies) == 6 and accuracies[-1] == accuracies[-2]
    assert float(accuracies[-1]) >= 99.0


def test_parameter_server_runs_with_servers_and_workers_in_processes(tmp_path):
    script = EXAMPLES / "parameter_server.py"
    command = [
        sys.executable,
        "-m",
        "pycollective",
        "run",
        "--ps",
        "2",
        "--workers",
        "2",
        "--chief",
    ]
    done = subprocess.run(
        [*command, script],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=tmp_path,  # `python -m` imports from here first; the sources have no compiled core
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    shards = re.findall(r"part_\d: shape \(4, 16384\) on /job:ps/replica:0/task:(\d)", done.stdout)
    assert set(shards) == {"0", "1"}
    accuracies = re.findall(r"Evaluation accuracy .*: ([\d.]+)", done.stdout)
    assert len(accuracies) == 3 and min(map(float, accuracies)) > 0.9
