"""The command line: output and errors."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pycollective import _core, algorithms
from pycollective.benchmark import report as reports
from pycollective.cli import main


def refused(capsys, words):
    """Run the command line with words that it refuses, and return the error."""
    with pytest.raises(SystemExit) as ended:
        main(words.split() if isinstance(words, str) else words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: pycollective")
    return said


def test_help_of_each_command_has_an_example(capsys):
    for command, expected in (
        ("", "pycollective train"),
        ("train", "data: auto"),
        ("bench", "busbw"),
        ("simulate", "infiniband-nvlink"),
        ("run", "script.py"),
        ("doctor", "TF_CONFIG"),
        ("timeline", "PYCOLLECTIVE_TIMELINE"),
        ("completion", "~/.bashrc"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), "--help"])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert expected in said
        examples = re.split("examples?:\n", said)[1]
        assert f"pycollective {command}" in examples


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--version"], ["simulate", "-n", "4", "-a", "ring"]])
def test_output_that_cannot_be_written_is_one_line_and_status_2(words, tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pycollective", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    assert done.returncode == 2
    assert re.fullmatch(r"pycollective: .*No space left on device\n", done.stderr), done.stderr


def test_output_in_an_encoding_without_a_character_has_a_mark_in_its_place(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pycollective", "--help"],
        capture_output=True, text=True, check=True, cwd=tmp_path, encoding="ascii",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert "? on small digits" in done.stdout


def test_size_that_no_memory_has_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "-n", "4", "-e", "9999999999G"])
    assert "'9999999999G' is more than 1 PiB" in capsys.readouterr().err


def test_version_prints_what_a_bug_report_needs(capsys, monkeypatch):
    monkeypatch.setattr(_core, "quota_of_cores", lambda root: 1.5)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    versions, core, cores, gpus = capsys.readouterr().out.splitlines()
    assert re.match(r"pycollective \d+\.\d+\.\d+.*, python 3\..*, system \S+, numpy \d", versions)
    assert re.fullmatch(r"core: (without CUDA|CUDA \d+\.\d), compiled by \w+ [\d.]+", core)
    assert re.fullmatch(r"cores: \d+ usable of \d+, cgroup quota 1.5", cores)
    assert re.match(r"GPUs: \d.*, no NCCL", gpus)


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


def test_train_missing_data_are_named_in_the_error(tmp_path, capsys):
    assert main(["train", "--data", str(tmp_path / "nowhere")]) == 2
    assert "is neither a folder nor one of auto, mnist" in capsys.readouterr().err
    assert main(["train", "--data", str(tmp_path)]) == 2
    assert "train-images" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["train", "--replicas", "0"], ["train", "--epochs", "x"], ["train", "--strategy", "tpu"],
     ["train", "--cross-device-ops", "bus"], ["bench", "-b", "8Q"], ["bench", "-n", "0"],
     ["bench", "--seconds", "-1"], ["bench", "-c", "shout"],
     ["simulate", "--ranks", "4,x"], ["simulate", "--latency", "-1"],
     ["simulate", "--bandwidth", "nan"], ["simulate", "--ranks", "1000001"],
     ["simulate", "--root", "-1"], ["simulate", "--plot", "x.bmp"], ["simulate", "--json", "/"],
     ["bench", "-n", "1025"], ["bench", "-n", "²"], ["bench", "--plot", "x.bmp"],
     ["bench", "--json", "nowhere/x.json"], ["bench", "-b", "9" * 16],
     ["simulate", "--cluster", "this-machine", "-n", "2", "--ranks-per-host", "2"],
     ["simulate", "-n", "4,5,0"], ["simulate", "-c", "shout"], ["simulate", "-f", "1"],
     ["run", "-n", "1025", "x.py"], ["run", "-n", "9" * 5000, "x.py"],
     ["train", "--learning-rate", "-1"], ["train", "--learning-rate", "inf"],
     ["train", "--replicas", "20000"], ["train", "--seed", "-1"], ["train", "--seed", str(2**32)],
     ["doctor", "--timeout", "nan"], []],
)  # fmt: skip
def test_bad_options_are_refused_with_the_usage(words, capsys):
    refused(capsys, words)


@pytest.mark.parametrize("command", ["bench", "run"])
def test_unknown_option_is_refused_with_the_usage_of_the_command(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--nope", "x.py"])
    said = capsys.readouterr().err
    assert said.startswith(f"usage: pycollective {command} [-h]")
    assert f"pycollective {command}: error: unrecognized arguments: --nope" in said


def test_misspelt_option_suggests_the_right_one(capsys):
    said = refused(capsys, "bench --algoritm ring")
    assert "unrecognized arguments: --algoritm ring; did you mean '--algorithm'?" in said


def test_options_that_contradict_each_other_are_refused(capsys, tmp_path):
    for words, text in (
        ("train --strategy one_device --replicas 2 --data digits", "has one replica"),
        ("train -n 4 --batch-size 3 --data digits", "--batch-size 3 leaves some of the 4 replicas"),
        ("train --batch-size 1 --data digits", "--batch-size 1 leaves some of the 2 replicas"),
        ("run -n 2 nowhere.py", "there is no script 'nowhere.py'"),
        ("run -n 2", "give a script"),
        (f"run {__file__} -n 2", "give the number of ranks before the script"),
        (f"timeline merge x -o {tmp_path}/nowhere/x", "there is no such folder"),
        (f"timeline merge {tmp_path}/x {tmp_path}/y -o {tmp_path}/x", "it would be replaced"),
        (f"timeline merge x ./x -o {tmp_path}/y", "a timeline is given twice"),
        (
            "simulate -n 4 -e 1K -c all_reduce broadcast -a ring",
            "broadcast: no algorithm is called",
        ),
    ):
        assert text in refused(capsys, words)


@pytest.mark.parametrize("place", ["", "below"])
def test_checkpoint_dir_unwritable_is_refused_before_training(tmp_path, capsys, place):
    """The user may be root, who can write to every folder: a file in the folder's place prevents it."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / place
    assert main(["train", "--checkpoint-dir", str(folder), "--data", "nowhere"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"pycollective: no file can be written to the folder {folder}: ")
    assert said.count("\n") == 1


def test_output_that_cannot_be_written_gives_one_line_of_error(capsys):
    assert main(["simulate", "--algorithm", "ring", "--json", "/dev/full"]) == 2
    said = capsys.readouterr().err
    assert said == "pycollective: [Errno 28] No space left on device: '/dev/full'\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        *("bench -n 2 -e 8 -i 1", "bench -n 3 -e 8 -i 1 --transport shm"),
        *("--version", "bench --help", "doctor"),
    ],
)
def test_output_closed_by_its_reader_gives_status_0(words, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONUNBUFFERED", None)  # programs seldom have it
    command = [sys.executable, "-m", "pycollective", *words.split()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        cwd=tmp_path,
    )  # fmt: skip
    with process.stderr:
        process.stdout.close()
        errors = process.stderr.read()
        status = process.wait(60)
    assert (status, errors) == (0, "")


def test_misspelt_variable_is_refused_by_every_command(capsys, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_TRANSPROT", "tcp")
    assert main(["simulate"]) == 2
    assert capsys.readouterr().err == (
        "pycollective: PYCOLLECTIVE_TRANSPROT is set, but pycollective reads no such variable: did "
        "you mean PYCOLLECTIVE_TRANSPORT?\n"
    )


def test_simulate_says_which_numbers_of_the_cluster_were_changed(tmp_path, capsys):
    report = tmp_path / "simulated.json"
    words = "simulate -n 4 -a ring -e 1K --latency 0 --ranks-per-host 2 --root 0 --json"
    assert main([*words.split(), str(report)]) == 0
    out = capsys.readouterr().out
    assert "simulated on ethernet-10g with ranks per host 2, latency 0\n" in out
    found = json.loads(report.read_text())
    assert (found["cluster"], found["root"]) == ("ethernet-10g", 0)
    assert found["changes"] == {"ranks_per_host": 2, "latency": 0}


def test_file_of_an_algorithm_that_ends_the_program_is_an_error(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("import sys; sys.exit(0)")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "-a", f"{file}:x"])
    assert ended.value.code == 2 and "cannot be run: SystemExit: 0" in capsys.readouterr().err


def test_reports_have_null_for_numbers_that_are_not_finite(tmp_path):
    file = tmp_path / "report.json"
    reports.write(file, "train", {}, [{"loss": math.nan, "rates": (math.inf, 1.0)}])
    assert json.loads(file.read_text())["results"] == [{"loss": None, "rates": [None, 1.0]}]


def test_simulate_verifies_and_writes_every_algorithm(tmp_path, capsys):
    report = tmp_path / "simulated.json"
    words = "simulate --ranks 4,70 -b 4K -e 64K --verify --json".split()
    assert main([*words, str(report)]) == 0
    out = capsys.readouterr().out
    assert "# verified exactly: ring, 4 ranks" in out
    assert "# verified by fingerprints: double_tree, 70 ranks" in out
    rows = json.loads(report.read_text())["results"]
    names = algorithms.names("all_reduce")
    assert [(r["ranks"], r["size"], r["algorithm"]) for r in rows] == [
        (n, size, name) for n in (4, 70) for size in (4 << 10, 64 << 10) for name in names
    ]
    for row in rows:
        cluster = algorithms.Cluster.ethernet_10g(row["ranks"])
        want = algorithms.simulate(row["algorithm"], cluster, row["size"])
        assert row["time_us"] == want.seconds * 1e6
        assert row["busbw_gb_s"] == want.bus_bandwidth / 1e9
        assert f"{row['algorithm']:>17} {row['time_us']:>14.2f}" in out


def test_simulate_options_of_the_cluster_are_used(capsys):
    words = "simulate --ranks 8 --algorithm ring -b 512 -e 512 --cluster infiniband-nvlink"
    numbers = "--ranks-per-host 1 --latency 1e-3 --overhead 0 --bandwidth inf --reduce-rate inf"
    assert main([*words.split(), *numbers.split(), "--copy-rate", "inf"]) == 0
    assert float(capsys.readouterr().out.splitlines()[-1].split()[3]) == 14_000
    assert main("simulate --cluster this-machine --ranks 2 -b 1K -e 1K".split()) == 0
    capsys.readouterr()
    assert main("simulate --collective barrier --ranks 5".split()) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert row.split()[:3] == ["5", "0", "dissemination"]
    assert main("simulate --collective broadcast --root 4 --ranks 5 -b 1K -e 1K".split()) == 0


def test_simulate_plot_writes_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "s.svg"
    for words in ("--ranks 2,4", "-c barrier", "-c barrier broadcast -n 2 3"):
        assert main(f"simulate {words} --plot {file}".split()) == 0
        assert f"# drawn to {file}" in capsys.readouterr().out
        assert "<svg" in file.read_text()
        file.unlink()


def test_simulate_wrong_options_are_named(capsys):
    for words, message in (
        ("--algorithm bus", "no algorithm is called 'bus' here (all_reduce: ring"),
        ("-a hierarchical -c broadcast", "no algorithm is called 'hierarchical' here (broadcast"),
        ("--collective bus", "'bus' is not one of all_reduce"),
        ("-b 1M -e 1K", "sizes must grow"),
        ("-f 1", "not a whole number from 2"),
        ("--root 3 --ranks 8,2 -c reduce", "root 3 is not among the 2 ranks"),
        ("--root 5 --ranks 5 -c broadcast", "root 5 is not among the 5 ranks"),
        ("--root 1", "all_reduce has no root"),
        ("--cluster this-machine --ranks 65", "at most 64 threads"),
    ):
        assert message in refused(capsys, f"simulate {words}")


def lines(capsys):
    return [line.split() for line in capsys.readouterr().out.splitlines() if line[0] != "#"]


def test_simulate_lists_each_collective_and_hierarchical_if_hosts_have_several_ranks(capsys):
    words = "simulate -n 4 -c all_reduce broadcast -b 64 -e 64 --ranks-per-host 2 --verify"
    assert main(words.split()) == 0
    names = [("all_reduce", name) for name in [*algorithms.names("all_reduce"), "hierarchical"]]
    names += [("broadcast", name) for name in algorithms.names("broadcast")]
    assert [(row[0], row[3]) for row in lines(capsys)] == names
    assert main("simulate -n 4 -b 64 -e 64".split()) == 0
    assert "hierarchical" not in [row[2] for row in lines(capsys)]


OWN = """
from pycollective.algorithms import algorithm, copy, input, output, recv, recv_reduce, send

@algorithm(num_chunks=1)
def star(rank, size):
    if rank == 0:
        yield copy(input[0], output[0])
        for peer in range(1, size):
            yield recv_reduce(peer, output[0], output[0])
        for peer in range(1, size):
            yield send(peer, output[0])
    else:
        yield send(0, input[0])
        yield recv(0, output[0])

@algorithm(num_chunks=1)
def wrong(rank, size):
    yield copy(input[0], output[0])
"""


def test_algorithms_of_a_users_file_are_timed_and_simulated(tmp_path, capsys):
    file, broken = tmp_path / "own.py", tmp_path / "broken.py"
    file.write_text(OWN)
    broken.write_text("import nothing_of_that_name")
    for command, place in ("bench -n 3 --seconds 0.01 -w 1", 4), ("simulate -n 3", 2):
        few = f"{command} -b 64 -e 64"
        assert main(f"{few} -a ring,{file}:star".split()) == 0
        assert [row[place] for row in lines(capsys)] == ["ring", "star"]
        assert "star is an algorithm of all_reduce" in refused(
            capsys, f"{few} -c broadcast -a {file}:star"
        )
        assert "it defines star, wrong" in refused(capsys, f"{few} -a {file}:sun")
        assert "No module named 'nothing_of" in refused(capsys, f"{few} -a {broken}:star")
        assert "FileNotFoundError" in refused(capsys, f"{few} -a {tmp_path}/none.py:star")
    assert "rank 0" in refused(capsys, f"bench -n 2 -a {file}:wrong")
    for more in "", " --verify":
        assert "rank 0" in refused(capsys, f"simulate -n 2 -a {file}:wrong{more}")
    assert "rank 0" in refused(capsys, f"train --data digits --cross-device-ops {file}:wrong")
    assert "leave out --algorithm" in refused(capsys, "bench --tune -n 2 -a ring")


def test_train_with_an_algorithm_of_a_file_reduces_gradients_by_it(tmp_path, capsys):
    text = (Path(__file__).parents[1] / "core" / "own_algorithms.py").read_text()
    head = "def ring(rank, size):\n"
    mine, used = tmp_path / "mine.py", tmp_path / "used"
    mine.write_text(text.replace(head, f"{head}    open({str(used)!r}, 'w').close()\n"))
    words = (
        f"train --data digits --epochs 1 --checkpoint-dir {tmp_path} --cross-device-ops {mine}:ring"
    )
    assert main(words.split()) == 0
    assert f"all-reduce: {mine}:ring" in capsys.readouterr().out
    assert used.exists()


def test_train_writes_its_epochs_as_json(tmp_path, capsys):
    pytest.importorskip("sklearn")
    report = tmp_path / "epochs.json"
    words = f"train --data digits --epochs 1 --checkpoint-dir {tmp_path} --json {report}"
    assert main(words.split()) == 0
    found = json.loads(report.read_text())
    (epoch,) = found["results"]
    assert (found["command"], found["replicas"], epoch["number"]) == ("pycollective train", 2, 1)
    assert f"loss {epoch['loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_the_commands_and_their_options(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("simulate", "--ranks-per-host", "ethernet-10g", "--checkpoint-dir"):
        assert word in script
    if shell == "bash":
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_completion_without_shtab_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'pycollective[completion]'" in capsys.readouterr().err
