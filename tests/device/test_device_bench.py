"""``pycollective bench --device gpu`` by the device executor: every algorithm, and what it computes."""

from __future__ import annotations

import json

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
