"""`pycollective doctor`: its findings and its measurements."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import namespaces
import numpy as np
import pytest
from ports import free_ports

import pycollective
from pycollective import array_backend
from pycollective.cli import doctor, main
from pycollective.cluster.membership import Membership
from pycollective.launch.links import Findings
from pycollective.nn import cudnn


@pytest.fixture
def environ(monkeypatch):
    for name in ("PYCOLLECTIVE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYCOLLECTIVE_CHECK_ADDRESSES", "1")

    def put(workers, index=0):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": workers}, "task": task}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    monkeypatch.delenv("TF_CONFIG", raising=False)
    return put


def test_process_without_a_cluster_is_alone(environ, capsys):
    assert main(["doctor"]) == 0
    assert "no variable describes one; this process is alone" in capsys.readouterr().out
    environ(["127.0.0.1:1"])
    assert main(["doctor"]) == 0
    assert "worker 0 trains alone" in capsys.readouterr().out


def test_json_has_versions_and_findings(environ, capsys, tmp_path):
    environ(["127.0.0.1:1", "127.0.0.1:1"], 0)
    assert main(["doctor", "--json", str(tmp_path / "report.json")]) == 1
    assert f"pycollective {pycollective.__version__}, python" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["versions"]["numpy"] == np.__version__
    assert report["cluster"] == "TF_CONFIG"
    (wrong,) = report["wrong"]
    assert "have the same address 127.0.0.1:1" in wrong


def test_wrong_description_lists_each_problem_and_ignored_sources(environ, capsys, monkeypatch):
    environ(["127.0.0.1:1", "127.0.0.1:1", 3], 4)
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "cluster: TF_CONFIG: worker 4\n" in out
    assert (
        "ignored, because the first source is used: torchrun (RANK, WORLD_SIZE, MASTER_ADDR, "
        in out
    )
    assert out.count("WRONG") == 3
    assert "cluster['worker'][2] must be a text" in out
    assert "have the same address 127.0.0.1:1" in out
    assert "The `task_id` 4 exceeds the maximum id of worker" in out


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TF_CONFIG": "{"}, "WRONG: not JSON: "),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_STEP_NODELIST not found in env",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"},
            "WRONG: MASTER_PORT='x' is not a number from 1",
        ),
        ({"PYCOLLECTIVE_DEBUG": "x"}, "PYCOLLECTIVE_DEBUG='x' is not INFO"),
        ({"PYCOLLECTIVE_TRANSPORT": "x"}, "PYCOLLECTIVE_TRANSPORT='x' is unknown"),
        ({"PYCOLLECTIVE_HEARTBEAT": "x"}, "PYCOLLECTIVE_HEARTBEAT='x' is not a positive"),
        ({"PYCOLLECTIVE_SECRET": "short"}, "the secret in PYCOLLECTIVE_SECRET has 5 bytes"),
        ({"PYCOLLECTIVE_TLS_CERT": "a"}, "PYCOLLECTIVE_TLS_CA are not: TLS needs all three"),
        ({"PYCOLLECTIVE_CHECK_ADDRESSES": "x"}, "PYCOLLECTIVE_CHECK_ADDRESSES='x': must be 0 or 1"),
    ],
)
def test_wrong_variables_are_named(environ, capsys, monkeypatch, variables, said):
    if not {"SLURM_PROCID", "RANK"} & set(variables):
        environ([f"127.0.0.1:{port}" for port in free_ports(2)])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--timeout", "0.1"]) == 1
    assert said in capsys.readouterr().out


def test_wrong_variables_of_a_process_alone_are_named(capsys, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_WARN_AFTER", "x")
    assert main(["doctor"]) == 1
    assert "WRONG: PYCOLLECTIVE_WARN_AFTER='x'" in capsys.readouterr().out


def test_port_in_use_is_named(environ, capsys):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        mine = f"127.0.0.1:{sock.getsockname()[1]}"
        environ(["127.0.0.1:1", mine], 1)
        assert main(["doctor", "--timeout", "5"]) == 1
    out = capsys.readouterr().out
    assert "cluster: TF_CONFIG: 2 workers, this is" not in out
    assert (
        f"WRONG: cluster['worker'][1] (worker 1), this process, is {mine}, where no socket" in out
    )


def test_name_that_may_resolve_later_is_a_doubt(environ, capsys, monkeypatch):
    monkeypatch.setenv("PYCOLLECTIVE_CHECK_ADDRESSES", "0")
    (port,) = free_ports(1)
    environ([f"127.0.0.1:{port}", "no.such.host.invalid:1"])
    assert main(["doctor", "--timeout", "0.3"]) == 1
    out = capsys.readouterr().out
    assert "  DOUBTFUL: cluster['worker'][1] (worker 1) is no.such.host.invalid:1, and the" in out
    assert "WRONG: worker 1 at no.such.host.invalid:1: no sign of it within 0.3 s" in out


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "secret: none, so only processes of this user on this machine are accepted; no TLS"),
        ({"PYCOLLECTIVE_SECRET": "0123456789abcdef"}, "secret: from PYCOLLECTIVE_SECRET; no TLS"),
        ({"PYCOLLECTIVE_INSECURE": "1"}, "everybody on the network is trusted"),
    ],
)
def test_protection_of_connections_is_shown(environ, capsys, monkeypatch, variables, said):
    for name in ("PYCOLLECTIVE_SECRET", "PYCOLLECTIVE_SECRET_FILE", "PYCOLLECTIVE_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    gone, mine = free_ports(2)
    environ([f"127.0.0.1:{gone}", f"127.0.0.1:{mine}"], 1)
    assert main(["doctor", "--timeout", "0.3"]) == 1
    out = capsys.readouterr().out
    assert said in out
    assert (
        f"WRONG: worker 0 at 127.0.0.1:{gone}: no sign of it within 0.3 s: is this command "
        "running there, with this description and this secret? Seen by worker 1: the host answers, but "
        "no process listens at the port"
    ) in out


# Several workers ----------------------------------------------------------------------------------


_ON_EACH = """
import ctypes, json, os, sys
from pycollective.cli import main
from pycollective.launch import links
links.CONNECT_SECONDS, links._SETTLED_SECONDS = 1.0, 2.0  # all workers are near
hosts, addresses = json.loads(sys.argv[1])
children = []
for i, host in enumerate(hosts):
    child = os.fork()
    if not child:
        code = 99
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(os.open(f"/run/netns/{host}", os.O_RDONLY), 0) == 0
            out = os.open(f"out{i}", os.O_CREAT | os.O_WRONLY)
            os.dup2(out, 1), os.dup2(out, 2)
            task = {"type": "worker", "index": i}
            config = {"cluster": {"worker": addresses}, "task": task}
            os.environ.update(TF_CONFIG=json.dumps(config), PYCOLLECTIVE_HOST_ID=host)
            code = main(["doctor", "--timeout", "20"])
            sys.stdout.flush()
        finally:
            os._exit(code)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def on_each(hosts, folder):
    """Run the command on each host as a worker; return each one's output and exit status."""
    addresses = [f"10.213.7.{i + 1}:9000" for i in range(len(hosts))]
    done = subprocess.run(
        [sys.executable, "-c", _ON_EACH, json.dumps([hosts, addresses])],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYCOLLECTIVE_SECRET": "0123456789abcdef0123456789abcdef",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    codes = json.loads(done.stdout)
    return [((folder / f"out{i}").read_text(), code) for i, code in enumerate(codes)]


@pytest.mark.slow
def test_links_between_hosts_are_measured(hosts, tmp_path):
    """Worker 0 prints a table of the links of three hosts, each other worker its own links."""
    found = on_each(hosts, tmp_path)
    for out, code in found:
        assert code == 0, out
        assert "WRONG" not in out
        assert "each of the 3 links can be connected" in out
    lines = [[line for line in out.splitlines() if "µs one way," in line] for out, _ in found]
    pairs = [[line.split(":")[0].strip() for line in own] for own in lines]
    assert pairs == [
        ["worker 0 - worker 1", "worker 0 - worker 2"],
        ["worker 0 - worker 1", "worker 1 - worker 2"],
        ["worker 0 - worker 2", "worker 1 - worker 2"],
    ]
    numbers = r"[\d.]+ µs one way, \d+ MB/s there, \d+ MB/s back"
    assert all(re.search(numbers, line) for own in lines for line in own)
    assert lines[0][0] == lines[1][0]  # both print the first one's measurement
    out = found[0][0]
    rows = re.findall(r"^ +(\d)((?: +(?:-|[\d.]+)){3})$", out, re.MULTILINE)
    assert [number for number, _ in rows] == ["0", "1", "2"] * 2
    for i, (_, cells) in enumerate(rows):
        assert [cell == "-" for cell in cells.split()] == [i % 3 == b for b in range(3)]
    assert re.search(r"slowest: \d -> \d, \d+ MB/s; longest latency: \d - \d, [\d.]+ µs", out)


@pytest.mark.parametrize("way, speed", [(0.0, 0.5), (0.5, 2 / 3), (1.5, 1.0), (9.0, 1.0)])
def test_a_large_message_takes_at_least_half_of_its_round(way, speed):
    """A machine that was busy for a while does not make a link infinitely fast."""
    assert doctor._speed(2.0, way) / doctor._BULK == pytest.approx(speed)


@pytest.mark.slow
def test_blocked_links_are_named_with_their_reasons(tmp_path):
    """The links have a refused port, packets dropped in one direction, and a missing route."""
    with namespaces.hosts(4) as names:
        # Worker 2 finds another host at worker 1's address, which answers, but no process listens
        # there. The others find the right host.
        quiet = "echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore"
        namespaces.ip("netns", "exec", names[2], "sh", "-c", quiet)
        namespaces.ip("-n", names[2], "addr", "add", "10.213.7.2/32", "dev", "lo")
        # Worker 0's own routing table drops its packets to worker 3.
        namespaces.ip("-n", names[0], "route", "add", "blackhole", "10.213.7.4")
        # The network loses worker 3's packets to worker 2.
        nowhere = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        namespaces.ip("-n", names[3], "neigh", "replace", "10.213.7.3", *nowhere)
        found = on_each(names, tmp_path)
    for out, code in found:  # every worker reports all broken links
        assert code == 1, out
        wrong = [line.strip() for line in out.splitlines() if "WRONG" in line]
        assert len(wrong) == 3, out
        assert re.match(
            "WRONG: worker 2 -> worker 1 at 10.213.7.2:9000: the host answers, but no process listens "
            "at the port, though worker 1 runs, and worker 3 reached it. Look for a firewall that "
            "rejects port 9000 on worker 1's host .*that worker 2 resolves 10.213.7.2 to that host",
            wrong[0],
        ), wrong
        assert re.match(
            "WRONG: worker 3 -> worker 0 at 10.213.7.1:9000: no answer, packets are dropped, though "
            "worker 0 runs, and worker 1, worker 2 reached it. worker 0's own host sends nothing "
            r"back \(Invalid argument\): ask its routing table with `ip route get 10.213.7.4`",
            wrong[1],
        ), wrong
        assert re.match(
            "WRONG: worker 3 -> worker 2 at 10.213.7.3:9000: no answer, packets are dropped, though "
            "worker 2 runs. Look for a firewall or a security group that drops port 9000 on",
            wrong[2],
        ), wrong


def test_diagnosis_names_link_and_remedy():
    """Each kind of failure gives a line with the link and places to look at."""
    names = tuple(f"worker {i}" for i in range(4))
    member = Membership("a test", 0, 4, tuple(f"h{i}:1" for i in range(4)), names)
    links = {
        (1, 0): ("works", ""),
        (2, 0): ("here", "Permission denied"),
        (2, 1): ("unreachable", "No route to host"),
        (3, 0): ("other", "the secrets differ"),
        (3, 1): ("refused", ""),
    }
    places = {i: (f"h{i}", 1) for i in range(3)} | {3: ("fd00::3", 1)}
    found = Findings({0, 1, 2}, links, {(1, 3): "Network is unreachable"}, places, {2: ["x:1"]})
    assert doctor.diagnosis(found, member, 5.0) == [
        "worker 2 has another description: its cluster is x:1",
        "worker 3 at [fd00::3]:1: no sign of it within 5 s: is this command running there, "
        "with this description and this secret? Seen by worker 1: its own host sends nothing there "
        "(Network is unreachable): ask its routing table with `ip route get fd00::3`",
        "worker 2 -> worker 0 at h0:1: its own host sends nothing there (Permission denied), though "
        "worker 0 runs, and worker 1 reached it. Look at the routes (`ip route get h0`) and the "
        "firewall of worker 2's own host",
        "worker 2 -> worker 1 at h1:1: there is no route to the host (No route to host), though "
        "worker 1 runs. Look at the routes of worker 2's host (`ip route get h1`), and at routers "
        "between",
    ]
    first = Membership("torchrun", 0, 3, ("h0:1",), names[:3])
    blocked = {(1, 0): ("silent", ""), (2, 1): ("silent", ""), (2, 0): ("works", "")}
    one, two = doctor.diagnosis(Findings({0, 1, 2}, blocked, {}, places, {}), first, 5.0)
    assert "drops port 1 on worker 0's host" in one and "the system chooses" not in one
    assert "The description names worker 0's port only: the others listen at ports that the" in two
    found = Findings(set(range(4)), {(1, 0): ("works", "")}, {}, places, {})
    assert doctor.diagnosis(found, member, 5.0) == [
        "not all links could be tried within 5 s: give a longer --timeout"
    ]


def test_links_are_measured_once_by_the_first_worker(on_ranks):
    """Threads act as workers; the first worker of each pair measures their link, once."""
    names = tuple(f"worker {i}" for i in range(3))
    tables = on_ranks(pycollective.local_group(3), doctor._measured_links)
    zero, one, two = (doctor._lines(t, rank, names) for rank, t in enumerate(tables))
    (row, *_) = rows = doctor._as_rows(tables[1], names)
    assert len(rows) == 3 and row["workers"] == ["worker 0", "worker 1"]
    assert row["one_way_us"] > 0 and row["there_mb_s"] > 0 and row["back_mb_s"] > 0
    assert [line.partition(":")[0].strip() for line in two] == [
        "worker 0 - worker 2",
        "worker 1 - worker 2",
    ]
    assert [zero[0], zero[1], one[1]] == [one[0], two[0], two[1]]
    table = np.full((3, 3, 3), np.nan)
    table[:, 0, 1], table[:, 0, 2], table[:, 1, 2] = (
        (1e-6, 1e6, 2e6),
        (2e-6, 3e6, 4e6),
        (9e-6, 5e6, 6e6),
    )
    assert doctor._table(table) == [
        "µs one way:",
        "  worker         0         1         2",
        "       0         -       1.0       2.0",
        "       1       1.0         -       9.0",
        "       2       2.0       9.0         -",
        "MB/s, from the row's worker to the column's:",
        "  worker         0         1         2",
        "       0         -         1         3",
        "       1         2         -         5",
        "       2         4         6         -",
        "slowest: 0 -> 1, 1 MB/s; longest latency: 1 - 2, 9.0 µs",
    ]


def test_worker_lost_while_links_are_measured_is_named(capsys, monkeypatch):
    """All links can be connected; then one of the two workers ends."""
    names = tuple(f"worker {i}" for i in range(2))
    ours, theirs = pycollective.local_group(2)
    theirs.abort("it is gone")
    monkeypatch.setattr(doctor, "join_workers", lambda member, seconds: ours)
    report = {}
    assert doctor._test_links(Membership("a test", 0, 2, (), names), 1.0, report) == 1
    assert "WRONG: while links were measured: it is gone" in capsys.readouterr().out
    assert report["wrong"] == ["while links were measured: it is gone"]


@pytest.mark.slow
def test_doctor_under_pycollective_run_finds_no_problem(tmp_path):
    words = ["run", "-n", "2", "--transport", "tcp", "--", sys.executable, "-m", "pycollective"]
    done = subprocess.run(
        [sys.executable, "-m", "pycollective", *words, "doctor", "--json", "found.json"],
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
    assert done.stdout.count("µs one way,") == 2
    for rank in range(2):
        report = json.loads((tmp_path / f"found.rank{rank}.json").read_text())
        assert report["wrong"] == [] and len(report["links"]) == 1


def test_json_has_the_links_that_do_not_work(environ, tmp_path):
    environ([f"127.0.0.1:{port}" for port in free_ports(2)])
    report = tmp_path / "report.json"
    assert main(["doctor", "--timeout", "0.2", "--json", str(report)]) == 1
    (wrong,) = json.loads(report.read_text())["wrong"]
    assert "worker 1 at " in wrong and "no sign of it within 0.2 s" in wrong


def test_tasks_of_a_cluster_with_parameter_servers_test_their_links(tmp_path):
    jobs = ("chief", "ps", "worker")
    cluster = {
        job: [f"127.0.0.1:{port}"] for job, port in zip(jobs, free_ports(len(jobs)), strict=True)
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "pycollective", "doctor"],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}}),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for job in jobs
    ]
    for job, process in zip(jobs, started, strict=True):
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, out
        assert f"cluster: TF_CONFIG: 3 tasks with parameter servers, this is {job} 0\n" in out
        assert "each of the 3 links can be connected" in out
        assert "µs one way" in out


@pytest.mark.parametrize(
    ("cluster", "status", "said"),
    [
        (
            {"worker": ["127.0.0.1:0"], "ps": ["127.0.0.1:1"]},
            0,
            "the links are not tested, because tasks choose their ports when they begin: worker 0",
        ),
        ({"ps": ["127.0.0.1:1"]}, 1, "WRONG: There must be at least one worker."),
        (
            {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:0"]},
            1,
            "WRONG: cluster['ps'][0] is '127.0.0.1:0', which is not host:port with a port from 1",
        ),
    ],
)
def test_ports_of_a_cluster_with_parameter_servers(
    environ, capsys, monkeypatch, cluster, status, said
):
    config = {"cluster": {"chief": [f"127.0.0.1:{free_ports(1)[0]}"], **cluster}}
    config["task"] = {"type": "chief", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert main(["doctor"]) == status
    assert said in capsys.readouterr().out


def test_libraries_for_gpus_are_shown(environ, capsys, monkeypatch, cupy):
    # A driver that is too old for any NCCL, and no front end of cuDNN.
    monkeypatch.setattr(cudnn, "_library", lambda: None)
    cupy.__version__ = "13.6.0"
    cupy.cuda.runtime.getDeviceProperties = lambda n: {
        "name": b"Some GPU", "totalGlobalMem": 80 << 30, "major": 9, "minor": n
    }  # fmt: skip
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "\nGPUs: 2, no NCCL\n" in out
    assert "  GPU 0: Some GPU, 80 GiB, sm_90\n  GPU 1: Some GPU, 80 GiB, sm_91\n" in out
    assert "on GPUs: CuPy 13.6.0, a driver for CUDA 0.0 and older" in out
    assert "convolution on GPUs: by patches and cuBLAS; faster with cuDNN: pip install" in out
    assert "between GPUs: no NCCL, so over the host: " in out
    cupy.cuda.runtime.driverGetVersion = lambda: 12040
    monkeypatch.setattr(cudnn, "_library", lambda: SimpleNamespace(backend_version=lambda: 91002))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "CUDA 12.4 and older" in out and "convolution on GPUs: cuDNN 91002" in out


def test_reason_for_no_gpu_is_shown(environ, capsys, monkeypatch):
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (0, "the driver is too old"))
    assert main(["doctor"]) == 0
    assert "\nGPUs: 0 (the driver is too old), " in capsys.readouterr().out
