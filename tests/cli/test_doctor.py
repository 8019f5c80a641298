"""`pycollective doctor`: what it finds, and what it measures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from pycollective.cli import main


@pytest.fixture
def environ(monkeypatch):
    for name in ("PYCOLLECTIVE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)

    def put(workers, index=0):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": workers}, "task": task}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    monkeypatch.delenv("TF_CONFIG", raising=False)
    return put


def test_alone(environ, capsys):
    assert main(["doctor"]) == 0
    assert "no variable names one; this process trains alone" in capsys.readouterr().out
    environ(["127.0.0.1:1"])
    assert main(["doctor"]) == 0
    assert "worker 0 trains alone" in capsys.readouterr().out


def test_a_description_that_is_wrong(environ, capsys):
    environ(["127.0.0.1:1", "127.0.0.1:1"])
    assert main(["doctor"]) == 1
    assert "have the same address 127.0.0.1:1" in capsys.readouterr().out


def test_where_the_others_are_not(environ, capsys):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        mine = f"127.0.0.1:{sock.getsockname()[1]}"
        gone = "127.0.0.1:1"
        environ([gone, mine, mine.replace("127.0.0.1", "127.0.0.2")], 1)
        assert main(["doctor", "--timeout", "0.3"]) == 1
    out = capsys.readouterr().out
    assert "TF_CONFIG: 3 workers, this is worker 1" in out
    assert f"WRONG: worker 1, this process: {mine} cannot be listened at" in out
    assert "Timeout waiting for the cluster" in out
    assert f"worker 0 at {gone}: the host answers, and nobody listens" in out


@pytest.mark.slow
def test_links(tmp_path):
    words = ["run", "-n", "2", "--transport", "tcp", "--", sys.executable, "-m", "pycollective"]
    done = subprocess.run(
        [sys.executable, "-m", "pycollective", *words, "doctor"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done
    assert "WRONG" not in done.stdout
    assert done.stdout.count("worker 0 - worker 1: ") == 2
    assert done.stdout.count("µs one way") == 2
