"""``pycollective bench --device gpu`` with the device executor: every algorithm, and its results."""

from __future__ import annotations

import json

import pytest
from foreign_bfloat16 import refuse_bfloat16

from pycollective import algorithms, cli


def test_every_algorithm_is_timed_and_right(devices, tmp_path, capsys):
    out = tmp_path / "out.json"
    status = cli.main(
        ["bench", "--device", "gpu", "-n", "3", "-a", "all", "-b", "1K", "-e", "1K", "-i", "3",
         "-w", "1", "--json", str(out)]
    )  # fmt: skip
    assert status == 0 and "# errors: 0 OK" in capsys.readouterr().out
    rows = json.loads(out.read_text())["results"]
    assert {row["algorithm"] for row in rows} == set(algorithms.names("all_reduce"))
    assert devices.emulated.counts["combinations"] > 0


@pytest.mark.parametrize("collective", ["all_reduce", "all_reduce_many", "all_gather"])
def test_bfloat16_is_timed_on_the_devices(devices, monkeypatch, capsys, collective):
    refuse_bfloat16(monkeypatch, devices)
    status = cli.main(
        ["bench", "--device", "gpu", "-n", "2", "-c", collective, "-d", "bfloat16", "-b", "1K",
         "-e", "1K", "-i", "3", "-w", "1"]
    )  # fmt: skip
    assert status == 0 and "# errors: 0 OK" in capsys.readouterr().out
    counts = devices.emulated.counts
    assert counts["copies" if collective == "all_gather" else "combinations"] > 0
