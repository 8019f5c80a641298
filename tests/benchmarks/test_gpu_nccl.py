"""benchmarks/gpu_nccl.py: the measurement of two ranks on one GPU, with a stand-in for the programs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_nccl.py"


@pytest.mark.parametrize("version", [22900, 23004])
def test_sharing_uses_nccl_for_processes_if_it_accepts_one_gpu(monkeypatch, tmp_path, version):
    """Processes use NCCL if it accepts them, beside threads with the core, on the first GPU."""
    spec = importlib.util.spec_from_file_location("gpu_nccl", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    runs = []

    def run(command, check, env):
        assert check
        runs.append((command[command.index("--transport") + 1], env))
        Path(command[-1]).write_text(json.dumps({"results": len(runs)}))

    monkeypatch.setattr(module.subprocess, "run", run)
    found = module.sharing(SimpleNamespace(version=version, version_text="2.x"), tmp_path)
    assert found["threads, by the core"] == 1
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in runs[0][1]
    assert {env["CUDA_VISIBLE_DEVICES"] for _, env in runs} == {"3"}
    if version < 23000:
        assert len(runs) == 1 and "2.30 brought it" in found["processes, by NCCL"]
    else:
        assert [transport for transport, _ in runs] == ["thread", "shm"]
        assert runs[1][1]["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert found["processes, by NCCL"] == 2
