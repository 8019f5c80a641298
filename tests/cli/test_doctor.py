"""`pycollective doctor`: what it finds, and what it measures."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pycollective import array_backend
from pycollective.cli import doctor, main
from pycollective.cluster.membership import Membership
from pycollective.nn import cudnn


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


def test_a_firewall_is_told_from_a_closed_port(monkeypatch):
    """One that swallows packets does as a host does whose queue of connections is full."""
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 0.2)
    with contextlib.ExitStack() as open_ones:
        sock = open_ones.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = sock.getsockname()[1]
        addresses = ["127.0.0.1:9", f"127.0.0.1:{port}", "no.such.host.invalid:1", "127.0.0.1:1"]
        names = tuple(f"worker {i}" for i in range(4))
        member = Membership("a test", 0, 4, tuple(addresses), names)
        assert doctor._tried_out(member)[0].endswith(": somebody listens there")
        with contextlib.suppress(TimeoutError):
            while True:
                open_ones.enter_context(socket.create_connection(("127.0.0.1", port), 0.2))
        swallowed, unknown, closed = doctor._tried_out(member)
    assert swallowed.endswith(f"{port}: no answer: a firewall, or another host's address")
    assert unknown.startswith("worker 2 at no.such.host.invalid:1: ")
    assert closed.endswith("the host answers, and nobody listens: not started yet, or gone")


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


def test_what_trains_on_gpus(environ, capsys, monkeypatch, cupy):
    # A driver that is too old for any NCCL, and no front end of cuDNN.
    monkeypatch.setattr(cudnn, "_library", lambda: None)
    cupy.__version__ = "13.6.0"
    cupy.cuda.runtime.getDeviceProperties = lambda n: {
        "name": b"Some GPU", "totalGlobalMem": 80 << 30, "major": 9, "minor": n
    }  # fmt: skip
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "cores, 2 GPUs; core " in out
    assert "  GPU 0: Some GPU, 80 GiB, sm_90\n  GPU 1: Some GPU, 80 GiB, sm_91\n" in out
    assert "on GPUs: CuPy 13.6.0, a driver for CUDA 0.0 and older" in out
    assert "convolution on GPUs: by patches and cuBLAS; faster with cuDNN: pip install" in out
    assert "between GPUs: no NCCL, so over the host: " in out
    cupy.cuda.runtime.driverGetVersion = lambda: 12040
    monkeypatch.setattr(cudnn, "_library", lambda: SimpleNamespace(backend_version=lambda: 91002))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "CUDA 12.4 and older" in out and "convolution on GPUs: cuDNN 91002" in out


def test_why_there_is_no_gpu(environ, capsys, monkeypatch):
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (0, "the driver is too old"))
    assert main(["doctor"]) == 0
    assert "0 GPUs; core " in (out := capsys.readouterr().out)
    assert "no GPU: the driver is too old\n" in out
