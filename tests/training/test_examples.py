"""The training examples run to their ends, where they compare saved and loaded models."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.slow


def run(name, *options):
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, options)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout


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
    printed = run("keras_fit.py", "--data", mnist_dir, "--epochs", 5)
    assert float(re.findall(r"Eval accuracy: ([\d.]+)", printed)[-1]) >= 0.99


def test_custom_training_reaches_99_percent(mnist_dir):
    printed = run("custom_training.py", "--data", mnist_dir)
    accuracies = re.findall(r"(?:Test Accuracy|without strategy): ([\d.]+)", printed)
    assert len(accuracies) == 6 and accuracies[-1] == accuracies[-2]
    assert float(accuracies[-1]) >= 99.0
