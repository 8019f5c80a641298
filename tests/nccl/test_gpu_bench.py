"""``pycollective bench --device gpu``."""

from __future__ import annotations

import json

import pytest

from pycollective import array_backend, cli

TIMED = ("all_reduce_many", "reduce_scatter", "scatter", "gather_ragged", "send_recv")


def test_what_is_timed_is_right(gpus, tmp_path, capsys):
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


def test_what_cannot_be_timed(gpus, monkeypatch):
    for more in (["--tune"], ["--registered"], ["-a", "ring"]):
        with pytest.raises(SystemExit, match="NCCL chooses"):
            cli.main(["bench", "--device", "gpu", *more])
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (0, "no driver"))
    with pytest.raises(SystemExit, match=r"there is no GPU .no driver"):
        cli.main(["bench", "--device", "gpu"])
