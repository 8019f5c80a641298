"""The command line: what it prints, and what it says when something is wrong."""

from __future__ import annotations

import re

import pytest

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
     ["train", "--cross-device-ops", "bus"], ["bench", "-b", "8Q"], ["bench", "-n", "0"],
     ["bench", "--seconds", "-1"], ["bench", "-c", "shout"], []],
)  # fmt: skip
def test_bad_options(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: pycollective" in capsys.readouterr().err


def test_options_that_do_not_fit_together(capsys, tmp_path):
    with pytest.raises(SystemExit, match="has one replica"):
        main(["train", "--strategy", "one_device", "--replicas", "2", "--data", "digits"])
