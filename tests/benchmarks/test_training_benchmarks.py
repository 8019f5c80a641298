"""compare_training.py and training_profile.py on a few small images: their runs and reports."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parents[2] / "benchmarks"


def loaded(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compare(monkeypatch):
    module = loaded("compare_training", monkeypatch)
    for name, value in {
        "BATCH": 4, "WARMUP_STEPS": 1, "WINDOWS": 2, "WINDOW_SECONDS": 0.001, "FIT_STEPS": 2,
        "SIZES": {name: (shape, 16) for name, (shape, _) in module.SIZES.items()},
    }.items():  # fmt: skip
        monkeypatch.setattr(module, name, value)
    return module


@pytest.fixture
def training_profile(compare, monkeypatch):
    module = loaded("training_profile", monkeypatch)
    monkeypatch.setattr(module, "COUNTED_STEPS", 1)
    yield module
    module.tf.config.run_functions_eagerly(False)


OWN = ["pycollective x1", "pycollective x2", "pycollective fit x2"]


@pytest.mark.parametrize("name", OWN)
def test_own_contestants_have_rates_and_losses(compare, name):
    run, replicas, needs = compare.CONTESTANTS[name]
    assert needs == "own"
    found = run(replicas, "tutorial", None)
    assert len(found["samples_per_s"]) == 2 and min(found["samples_per_s"]) > 0
    assert np.isfinite(found["loss"])


def test_table_has_medians_and_the_best_peer(compare, tmp_path, monkeypatch, capsys):
    """The table has medians over all rounds, and the ratio to the best peer."""
    rates = {name: [100.0, 300.0] for name in OWN} | {"PyTorch, batch 64": [40.0, 60.0]}
    asked = []

    def run(command, **_):
        if "-c" in command:
            return subprocess.CompletedProcess(command, "torch" not in command[-1])
        asked.append(name := command[command.index("--contestant") + 1])
        result = {"samples_per_s": rates[name], "loss": 0.1, "peak_mib": 99.0}
        return subprocess.CompletedProcess(command, 0, json.dumps(result), "")

    monkeypatch.setattr(compare.subprocess, "run", run)
    file = tmp_path / "results.json"
    kept = {name: compare.CONTESTANTS[name] for name in rates}
    monkeypatch.setattr(compare, "CONTESTANTS", kept)
    monkeypatch.setattr(sys, "argv", ["compare", "--rounds", "2", "--json", str(file)])
    compare.main()
    assert asked == [*rates] * 2
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("pycollective fit x2")]
    assert line.split()[3:] == ["200", "100", "to", "300", "4.00x", "0.100", "99"]
    medians = json.loads(file.read_text())["samples_per_s"]
    assert medians["PyTorch, batch 64"] == {"median": 50.0, "min": 40.0, "max": 60.0}


@pytest.mark.parametrize(("model", "replicas"), [("tutorial", 2), ("resnet20", 1)])
def test_profile_counts_kernels_and_restores_them(
    training_profile, tmp_path, monkeypatch, capsys, model, replicas
):
    file = tmp_path / "profile.json"
    words = ["profile", "--eagerly", "--model", model, "--replicas", str(replicas), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", [*words, "--json", str(file)])
    kernels = vars(training_profile._nn).copy()
    training_profile.main()
    assert vars(training_profile._nn) == kernels  # as before
    (found,) = json.loads(file.read_text())["profiles"]
    functions = found["functions"]
    assert functions["rule_update"]["calls"] == 1
    assert all(entry["ms"] > 0 for entry in functions.values() if entry["calls"] >= 1)
    total = sum(entry["ms"] for entry in functions.values())
    assert found["sum_ms"] == pytest.approx(total) == pytest.approx(sum(found["kinds_ms"].values()))
    assert found["rest_ms"] == pytest.approx(found["step_ms"] - total)
    assert found["python_calls"] > 500
    expected = {"updates", "passes over memory", "other convolutions and products"}
    expected |= {"other replicas"} if replicas > 1 else {"Winograd's kernels"}
    assert set(found["kinds_ms"]) >= expected
    kept = training_profile.conv._pooled_kernel.cache_info().currsize
    assert kept == 0  # no timed function
    if model == "tutorial":
        forward = [name for name in functions if name.endswith("_forward") and "dense" not in name]
        assert sum(functions[name]["calls"] for name in forward) == 2
    if model == "resnet20":
        # One call for each of 19 convolutions of 3 x 3 except the first one and the strided ones.
        assert functions["winograd_forward"]["calls"] == 16
    out = capsys.readouterr().out
    assert out.startswith(f"{model}, {replicas} replica(s) of 4: a step takes ")
    assert "rest: the interpreter" in out


def test_profile_of_replays_counts_two_in_a_step(training_profile, tmp_path, monkeypatch):
    monkeypatch.setattr(training_profile, "WARMUP_STEPS", 6)
    file = tmp_path / "profile.json"
    words = ["profile", "--replicas", "1", "--steps", "2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", words)
    training_profile.main()
    (found,) = json.loads(file.read_text())["profiles"]
    assert found["functions"]["replay"]["calls"] == 2
    assert found["kinds_ms"]["replayed kernels"] > 0
