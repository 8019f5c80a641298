"""The command line: what it prints, and what it says when something is wrong."""

from __future__ import annotations

import json
import re

import pytest

from pycollective import algorithms
from pycollective.cli import main


def test_help_teaches(capsys):
    for words, expected in (
        (["--help"], "pycollective train"),
        (["train", "--help"], "data: auto"),
        (["bench", "--help"], "busbw"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert re.match(r"pycollective \d+\.\d+\.\d+ \(C", capsys.readouterr().out)


@pytest.mark.parametrize("options", [["--replicas", "2"], ["--strategy", "one_device"]])
def test_train_writes_a_checkpoint_and_reads_it_back(tmp_path, capsys, options):
    pytest.importorskip("sklearn")
    status = main(
        ["train", "--data", "digits", "--epochs", "2", "--checkpoint-dir", str(tmp_path), *options]
    )
    out = capsys.readouterr().out.splitlines()
    assert status == 0
    assert out[0] == "data: scikit-learn's digits, 1437 + 360 images"
    assert re.match(
        r"epoch 1/2: loss [\d.]+, accuracy [\d.]+%, test loss [\d.]+, test accuracy [\d.]+%, "
        r"[\d,]+ samples/s",
        out[2],
    )
    assert re.match(
        r"restored .*ckpt-2 without a strategy: test accuracy [\d.]+%, the same", out[-1]
    )
    accuracy = [float(re.search(r"test accuracy ([\d.]+)%", line)[1]) for line in out[2:]]
    assert accuracy[1] == accuracy[2] > 60


def test_data_that_are_not_there(tmp_path, capsys):
    assert main(["train", "--data", str(tmp_path / "nowhere")]) == 2
    assert "is neither a folder nor one of auto, mnist" in capsys.readouterr().err
    assert main(["train", "--data", str(tmp_path)]) == 2
    assert "train-images" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["train", "--replicas", "0"], ["train", "--epochs", "x"], ["train", "--strategy", "tpu"],
     ["train", "--cross-device-ops", "bus"], ["bench", "-b", "8Q"], ["bench", "-n", "0"], []],
)  # fmt: skip
def test_bad_options(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: pycollective" in capsys.readouterr().err


def test_options_that_do_not_fit_together(capsys, tmp_path):
    with pytest.raises(SystemExit, match="has one replica"):
        main(["train", "--strategy", "one_device", "--replicas", "2", "--data", "digits"])
    with pytest.raises(SystemExit, match="sizes must grow"):
        main(["bench", "-b", "1M", "-e", "1K"])
    with pytest.raises(SystemExit, match="-f must be at least 2"):
        main(["bench", "-f", "1"])


@pytest.mark.parametrize("op", ["sum", "min", "max", "prod", "mean"])
@pytest.mark.parametrize("datatype", ["float32", "float64", "int32", "int64"])
def test_bench(tmp_path, capsys, op, datatype):
    report = tmp_path / "bench.json"
    words = "bench -b 8 -e 128K -f 64 -n 3 -w 1 --ranks 3 --algorithm all".split()
    assert main([*words, "-o", op, "-d", datatype, "--json", str(report)]) == 0
    out = capsys.readouterr().out
    assert "# wrong values: 0 OK" in out
    rows = json.loads(report.read_text())["results"]
    names = algorithms.names("all_reduce")
    assert [r["size"] for r in rows] == [s for s in (8, 512, 32768) for _ in names]
    assert {r["algorithm"] for r in rows} == set(names)
    for row in rows:
        assert row["wrong"] == 0
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * 4 / 3)


def test_bench_sees_wrong_values(capsys, monkeypatch):
    from pycollective.communicator import Communicator

    right = Communicator.all_reduce

    def wrong(self, x, op="sum", *, out=None, **others):
        result = right(self, x, op, out=out, **others)
        if self.rank == 1:
            result[0] += 1
        return result

    monkeypatch.setattr(Communicator, "all_reduce", wrong)
    assert main("bench -b 64 -e 64 -n 1 -w 1".split()) == 1
    assert "# wrong values: 1 FAILED" in capsys.readouterr().out
