"""benchmarks/gpu_training.py on the host: the turns of the contestants, and their results."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_training.py"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("gpu_training", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class StandIn:
    """A contestant with given answers."""

    def __init__(self, name, answers):
        self.name, self.answers, self.heard = name, list(answers), []

    def ask(self, **message):
        self.heard.append(message)

    def hear(self, seconds):
        return self.answers.pop(0)

    def tell(self, seconds, **message):
        self.ask(**message)
        return self.hear(seconds)


def test_measured_has_medians_of_windows_or_reasons_of_failures(bench):
    good = StandIn(
        "good", [{"rate": 1, "loss": 1.0}, *({"rate": r, "loss": 1.0} for r in (5, 7, 6))]
    )
    nan = StandIn("nan", [{"rate": 1, "loss": 1.0}, {"rate": 9, "loss": float("nan")}])
    no = StandIn("no", [{"failed": "out of memory"}])
    case = {"model": "tutorial", "batch": 8, "half": True}
    found = bench.measured([good, nan, no], case, 0.5, 10)
    assert found == {
        "good": {"median": 6, "min": 5, "max": 7}, "nan": "its loss is nan", "no": "out of memory"
    }  # fmt: skip
    assert good.heard == [case, *[{"window": 0.5}] * 3]
    text = bench.table([{**case, "samples_per_s": found}], ["good", "nan"])
    assert text.splitlines()[1].split() == ["tutorial", "float16", "batch", "8", "6", "-"]


def test_contestant_that_ends_or_sends_nothing_has_failed(bench, monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    monkeypatch.setattr(bench, "__file__", str(worker))
    worker.write_text(
        "import sys, time\nprint('{\"ready\": true}', flush=True)\nsys.stdin.readline()"
    )
    one = bench.Contestant("pycollective", "cpu:0", sys.executable)
    assert one.hear(30) == {"ready": True}
    assert one.tell(30, window=1) == {"failed": "it ended"}
    assert one.tell(30, window=1) == {"failed": "it has ended"}
    worker.write_text("import time\ntime.sleep(60)")
    silent = bench.Contestant("pycollective", "cpu:0", sys.executable)
    assert silent.hear(0) == {"failed": "no answer in 0 s"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("pycollective", "pycollective"),
        ("pycollective", "pycollective, 2 replicas"),
        ("torch", "PyTorch eager"),
        ("jax", "JAX jit"),
    ],
)
def test_each_contestant_trains_on_the_host(tmp_path, module, name):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"no {module}")
    cases = [{"model": "tutorial", "batch": 4, "half": half} for half in (False, True)]
    cases = cases[: 2 if module == "pycollective" else 1]
    lines = [json.dumps(line) for case in cases for line in (case, {"window": 0.02})]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--contestant", name],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
        check=False,
    )
    ready, *answers = (json.loads(line) for line in done.stdout.splitlines())
    assert ready == {"ready": True}, done.stderr
    assert len(answers) == 2 * len(cases)
    # The first losses are those of a model that cannot distinguish ten classes.
    assert all(a["rate"] > 0 and 0 < a["loss"] < 4 for a in answers), answers


@pytest.mark.slow
def test_main_writes_one_report(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--models", "tutorial"]
    command += ["--batches", "2", "--window", "0.01", "--only", "pycollective", "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [r["half"] for r in found["results"]] == [False, True]
    assert all(r["samples_per_s"]["pycollective"]["median"] > 0 for r in found["results"])
    assert "tutorial float16 batch 2" in done.stdout
    done = subprocess.run(
        [*command, "--seconds", "0"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
        check=False,
    )
    assert done.returncode and "no time for" in done.stderr
