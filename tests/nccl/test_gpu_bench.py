"""``pycollective bench --device gpu``, and doctor's lines about GPUs."""

from __future__ import annotations

import json

import pytest

from pycollective import array_backend, cli
from pycollective.nccl import loading

TIMED = ("all_reduce_many", "reduce_scatter", "scatter", "gather_ragged", "send_recv")


def test_bench_on_gpus_checks_results(gpus, tmp_path, capsys):
    out = tmp_path / "out.json"
    status = cli.main(
        ["bench", "--device", "gpu", "-c", *TIMED, "-b", "1K", "-e", "1K", "-i", "5", "-w", "1",
         "--json", str(out)]
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert status == 0 and "GPU arrays" in printed and "# errors: 0 OK" in printed
    written = json.loads(out.read_text())
    assert written["device"] == "gpu" and len(written["results"]) == len(TIMED)
    assert {row["percent_of_limit"] for row in written["results"]} == {None}
    assert any("ReduceScatter" in line for line in gpus.log())


def test_bench_registered_memory_is_used(gpus, capsys):
    names = ("all_reduce", "all_gather", "scatter", "gather", "send_recv")
    more = ["-b", "1K", "-e", "1K", "-i", "5", "-w", "1", "--registered"]
    assert cli.main(["bench", "--device", "gpu", "-c", *names, *more]) == 0
    assert "memory of comm.empty, GPU arrays" in capsys.readouterr().out
    assert sum("CommRegister" in line for line in gpus.log()) > 0


def test_bench_unsupported_options_raise(gpus, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--device", "gpu", "--tune"])
    assert "--tune does not work with --device gpu" in capsys.readouterr().err
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (0, "no driver"))
    with pytest.raises(SystemExit):
        cli.main(["bench", "--device", "gpu"])
    assert "there is no GPU (no driver" in capsys.readouterr().err


def test_doctor_names_the_library(gpus, monkeypatch, capsys, fake_path, tmp_path):
    cli.main(["doctor"])
    assert f"between GPUs: NCCL 2.28.3, {fake_path}" in capsys.readouterr().out
    monkeypatch.setattr(loading, "_opened", None)
    monkeypatch.setenv(loading.VARIABLE, str(tmp_path / "none"))
    cli.main(["doctor"])
    assert "between GPUs: no NCCL, so over the host: NCCL cannot be" in capsys.readouterr().out
