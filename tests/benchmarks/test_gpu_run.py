"""tests/gpu/run.sh without a GPU, and with stand-ins for the programs that it calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "run.sh"

#: A stand-in for Python with CuPy, a working build, and tests and benchmarks with given results.
PYTHON = """#!/bin/sh
case "$*" in
*"import cupy"*) exit {cupy} ;;
*"import pytest"*|*"pip install"*|*"pycollective._core"*) exit 0 ;;
*"-m pytest"*) echo '<a><testsuite tests="5" failures="1" errors="0" skipped="2"/></a>' \
  >"$OUT/tests.xml"; exit {tests} ;;
*benchmarks/gpu_*) for last; do :; done; echo '{{"rate": 7}}' >"$last"; exit 0 ;;
*) exec {python} "$@" ;;
esac
"""

SMI = "#!/bin/sh\necho Some GPU, 1.2, 9 MiB\n"

#: The output of compute-sanitizer and of its tests if there is no error.
CLEAN = """#!/bin/sh
echo "7 passed in 1.2s"
echo "========= ERROR SUMMARY: 0 errors"
"""


def run(tmp_path, tools, *stages, **environment):
    """Run stages of the script with these programs first in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, text in tools.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    out = tmp_path / "out"
    done = subprocess.run(
        [shutil.which("bash") or "bash", str(SCRIPT), *stages],
        env={
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "OUT": str(out),
            "PYTHON": str(folder / "python"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done, out


@pytest.mark.parametrize(
    ("smi", "cupy", "said"),
    [
        ("exit 1", 0, "there is no GPU here"),
        ("exit 0", 0, "there is no GPU here"),
        ("echo Some GPU", 1, "CuPy cannot use the GPU (Some GPU)"),
    ],
)
def test_run_without_a_gpu_or_cupy_says_so_and_writes_no_report(tmp_path, smi, cupy, said):
    python = PYTHON.format(cupy=cupy, tests=0, python=sys.executable)
    done, out = run(tmp_path, {"nvidia-smi": f"#!/bin/sh\n{smi}\n", "python": python})
    assert done.returncode == 1
    assert said in done.stderr and said in (out / "gpu.log").read_text()
    assert not (out / "gpu.json").exists()


@pytest.mark.parametrize("status", [0, 1])
def test_run_writes_one_report_and_returns_the_tests_status(tmp_path, status):
    python = PYTHON.format(cupy=0, tests=status, python=sys.executable)
    tools = {"nvidia-smi": SMI, "python": python, "compute-sanitizer": CLEAN}
    done, out = run(tmp_path, tools)
    assert done.returncode == status, done.stderr
    assert ("tests failed (exit status 1)" in done.stderr) == bool(status)
    found = json.loads((out / "gpu.json").read_text())
    assert found["gpus"] == ["Some GPU, 1.2, 9 MiB"]
    assert found["tests"] == {
        "exit": status, "tests": 5, "failures": 1, "errors": 0, "skipped": 2
    }  # fmt: skip
    benchmarks = {path.stem for path in (SCRIPT.parents[2] / "benchmarks").glob("gpu_*.py")}
    assert found["benchmarks"] == {name: {"rate": 7} for name in benchmarks}
    assert found["benchmarks_that_failed"] == []
    assert found["sanitizer"] == {"compute-sanitizer-memcheck": "nothing found"}
    assert {path.name for path in out.iterdir()} == {"gpu.json", "gpu.log"}


def test_run_with_a_finding_of_compute_sanitizer_fails(tmp_path):
    python = PYTHON.format(cupy=0, tests=0, python=sys.executable)
    sanitizer = CLEAN + 'echo "$*"\nexit 1\n'
    tools = {"nvidia-smi": SMI, "python": python, "compute-sanitizer": sanitizer}
    done, out = run(tmp_path, tools)
    assert done.returncode == 1
    assert "failed: compute-sanitizer-memcheck" in done.stderr
    report = json.loads((out / "gpu.json").read_text())
    assert report["benchmarks_that_failed"] == ["compute-sanitizer-memcheck"]
    assert report["sanitizer"]["compute-sanitizer-memcheck"] == "exit status 1"
    said = (out / "gpu.log").read_text()
    assert "--tool memcheck" in said and "test_kernels.py" in said


@pytest.mark.parametrize("missing", ["ERROR SUMMARY", "7 passed"])
def test_run_with_a_sanitizer_that_checked_no_kernel_fails(tmp_path, missing):
    """The sanitizer did not attach to the process, or the tests were skipped."""
    python = PYTHON.format(cupy=0, tests=0, python=sys.executable)
    tools = {"nvidia-smi": SMI, "python": python}
    tools["compute-sanitizer"] = CLEAN.replace(missing, "else")
    done, out = run(tmp_path, tools, "sanitizer")
    assert done.returncode == 1
    found = json.loads((out / "gpu.json").read_text())["sanitizer"].values()
    assert set(found) == {
        "no kernel was checked: the output has no summary, or no test that passed"
    }


def test_a_sanitizer_that_refuses_the_device_is_no_error(tmp_path):
    python = PYTHON.format(cupy=0, tests=0, python=sys.executable)
    sanitizer = "#!/bin/sh\necho ========= Error: Device not supported\nexit 1\n"
    tools = {"nvidia-smi": SMI, "python": python, "compute-sanitizer": sanitizer}
    done, out = run(tmp_path, tools, "sanitizer")
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "gpu.json").read_text())
    text = "refused: ========= Error: Device not supported"
    assert set(report["sanitizer"].values()) == {text} and report["benchmarks_that_failed"] == []
    assert "tests" not in report and {p.name for p in out.iterdir()} == {"gpu.json", "gpu.log"}


def test_stages_add_to_one_report(tmp_path):
    python = PYTHON.format(cupy=0, tests=0, python=sys.executable)
    slow = python.replace("echo '{\"rate\": 7}'", "case $2 in --seconds) exit 3 ;; esac; echo 8")
    assert slow != python
    first = '*gpu_nccl.py*) cp "$OUT/gpu.json" "$OUT/then.json" ;;'
    slow = slow.replace('case "$*" in', f'case "$*" in {first} esac\ncase "$*" in')
    run(tmp_path, {"nvidia-smi": SMI, "python": python}, "tests")
    done, out = run(tmp_path, {"nvidia-smi": SMI, "python": slow}, "benchmarks")
    assert done.returncode == 1 and "failed: gpu_training" in done.stderr
    report = json.loads((out / "gpu.json").read_text())
    assert report["tests"]["tests"] == 5
    assert report["benchmarks"] == {"gpu_kernels": 8, "gpu_nccl": 8}
    # Nothing is lost if the script is killed: the first stage's report existed while the second one ran.
    then = json.loads((out / "then.json").read_text())
    assert then["benchmarks"] == {"gpu_kernels": 8} and then["tests"] == report["tests"]
    assert report["benchmarks_that_failed"] == ["gpu_training"]
    done, out = run(tmp_path, {"nvidia-smi": SMI, "python": python}, "benchmarks")
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "gpu.json").read_text())
    assert report["tests"]["tests"] == 5 and report["benchmarks_that_failed"] == []
    assert report["benchmarks"]["gpu_training"] == {"rate": 7}
    done, _ = run(tmp_path, {"nvidia-smi": "#!/bin/sh\necho Another\n", "python": python}, "tests")
    assert json.loads((out / "gpu.json").read_text())["benchmarks"] == {}


def test_run_with_a_benchmark_beyond_its_time_limit_fails_and_continues(tmp_path):
    """Every stage has a time limit; a stage beyond it has failed, and the next one runs."""
    python = PYTHON.format(cupy=0, tests=0, python=sys.executable)
    limits = "#!/bin/sh\nfor last; do :; done\ncase $* in *gpu_nccl*) exit 124 ;; esac\n"
    limits += 'echo "$@" >>"$OUT/limits"\necho 9 >"$last"\n'
    tools = {"nvidia-smi": SMI, "python": python, "timeout": limits}
    done, out = run(tmp_path, tools, "benchmarks")
    assert done.returncode == 1 and "failed: gpu_nccl" in done.stderr
    report = json.loads((out / "gpu.json").read_text())
    assert report["benchmarks"] == {"gpu_kernels": 9, "gpu_training": 9}
    given = [line.split()[:3] for line in (out / "limits").read_text().splitlines()]
    assert given == [["-k", "10", "120"], ["-k", "10", "280"]]


def test_stages_take_their_settings_from_the_environment(tmp_path):
    """A ready wheel, the commit's name, chosen benchmarks, and a first look at some tests."""
    python = PYTHON.format(cupy=0, tests=0, python=sys.executable)
    python = python.replace("#!/bin/sh\n", '#!/bin/sh\necho "$*" >>"$OUT/calls"\n')
    tools = {"nvidia-smi": SMI, "python": python}
    settings = {"WHEEL": "ready.whl", "COMMIT": "abc", "BENCHMARKS": "gpu_nccl", "JOBS": "3"}
    done, out = run(tmp_path, tools, "build", "smoke", "benchmarks", **settings)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "gpu.json").read_text())
    assert report["commit"] == "abc" and list(report["benchmarks"]) == ["gpu_nccl"]
    calls = (out / "calls").read_text()
    assert "--no-deps ready.whl" in calls and "test_collectives_of_one_rank_use_nccl" in calls


def test_run_with_an_unknown_stage_fails(tmp_path):
    done, _ = run(tmp_path, {"nvidia-smi": SMI}, "tests", "docs")
    assert done.returncode == 1 and "there is no stage docs" in done.stderr
