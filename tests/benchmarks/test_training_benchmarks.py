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
    models = loaded("models_keras", monkeypatch)
    for name, model in models.MODELS.items():
        small = model._replace(images=16, batch=4, warmup=1)
        monkeypatch.setitem(models.MODELS, name, small)
    module = loaded("compare_training", monkeypatch)
    for name, value in {
        "WINDOWS": 2,
        "WINDOW_SECONDS": 0.001,
        "FIT_STEPS": 2,
        "CHECKED": 2,
    }.items():
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


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "vgg16", "unet", "mobilenet_v2", "resnet50"])
def test_check_of_a_whole_model_finds_decreasing_losses(compare, model):
    parameters, losses = compare.checked("own", model)
    assert losses[1] < losses[0] < 10
    numbers = {"mlp": 669_706, "vgg16": 14_982_474, "unet": 7_760_130, "mobilenet_v2": 3_538_984}
    assert parameters == numbers.get(model, 25_610_152)


def test_check_of_other_losses_fails(compare, monkeypatch):
    answers = iter([[1.0, 0.9], [1.0, 0.9], [1.1, 0.9]])
    monkeypatch.setattr(
        compare, "answer", lambda command: {"parameters": 3, "losses": next(answers)}
    )
    with pytest.raises(SystemExit, match="mlp: torch has"):
        compare.check("mlp", {"own": "", "jax": "", "torch": ""})


def test_table_has_medians_and_the_best_peer(compare, tmp_path, monkeypatch, capsys):
    """The table has medians over all rounds, and the ratio to the best peer."""
    rates = {name: [100.0, 300.0] for name in OWN} | {"PyTorch x1": [40.0, 60.0]}
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
    assert line.split()[3:] == ["200.0", "100.0", "to", "300.0", "20.0", "4.00x", "0.100", "99"]
    compare.main()  # every round is in the file
    assert asked == [*rates] * 2
    medians = json.loads(file.read_text())["samples_per_s"]
    assert medians["PyTorch x1"] == {"median": 50.0, "min": 40.0, "max": 60.0}


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
    assert "rest: Python" in out


def test_profile_of_replays_counts_two_in_a_step(training_profile, tmp_path, monkeypatch):
    models = training_profile.MODELS
    monkeypatch.setitem(models, "tutorial", models["tutorial"]._replace(warmup=6))
    file = tmp_path / "profile.json"
    words = ["profile", "--replicas", "1", "--steps", "2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", words)
    training_profile.main()
    (found,) = json.loads(file.read_text())["profiles"]
    assert found["functions"]["replay"]["calls"] == 2
    assert found["kinds_ms"]["replayed kernels"] > 0
