"""Groups of real processes through shared memory, and what happens when one of them fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fast_cases import some_fast

import pycollective as pc
from pycollective import _core
from pycollective.launch import RendezvousError, init
from pycollective.launch.description import launched_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")

PREAMBLE = """
import os, signal, sys, time
import numpy as np
import pycollective as pc
comm = pc.init(timeout=20)
"""


def start(tmp_path, ranks, body, *options):
    """Start ``pycollective run`` on a script, with the package that the tests use."""
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + body)
    return subprocess.Popen(
        [sys.executable, "-m", "pycollective", "run", "-n", str(ranks), *options, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(tmp_path, ranks, body, *options):
    process = start(tmp_path, ranks, body, *options)
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


@pytest.mark.parametrize("ranks", some_fast([1, 2, 3, 5], [1, 3]))
def test_collectives_of_processes_are_exact_for_all_sizes(tmp_path, ranks):
    body = """
from pycollective import algorithms
r, n = comm.rank, comm.size
for name in algorithms.names():
    for size in (0, 1, 17, 56, 57, 4096, 65_537, 1_500_007):  # inline, one part, many parts
        x = (np.arange(size) % 11 + r).astype("float32")
        want = (np.arange(size) % 11 * n + n * (n - 1) // 2).astype("float32")
        assert np.array_equal(comm.all_reduce(x, algorithm=name), want), (name, size)
        comm.all_reduce(x, out=x, algorithm=name)
        assert np.array_equal(x, want)
for root in range(n):
    got = comm.broadcast(np.full(300_000, float(r)), root)
    assert (got == root).all()
comm.barrier()
print(f"rank {r} of {n} is done")
"""
    status, out, err = run(tmp_path, ranks, body)
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"rank {r} of {ranks} is done" for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_way_of_ordinary_arrays_to_the_peers_is_exact(ranks):
    """The first calls of each kind and size try all ways in turn."""

    def work(comm):
        r, n = comm.rank, comm.size
        for items in (3_001, 75_001, 700_001):
            part = items // n
            for call in range(20):
                x = np.arange(part * n, dtype=np.float32) % 251 + call
                every = [x + 1000 * k for k in range(n)]
                mine, total, root = every[r], sum(every), call % n
                mine_of = [one[r * part : (r + 1) * part] for one in every]
                whole = np.concatenate([one[:part] for one in every])
                is_root = r == root
                found = [
                    (comm.all_reduce(mine), total),
                    (comm.reduce(mine, root=root), total if is_root else None),
                    (comm.broadcast(mine.copy(), root), every[root]),
                    (comm.gather(mine[:part].copy(), root), whole if is_root else None),
                    (comm.all_gather(mine[:part].copy()), whole),
                    (comm.scatter(mine, root), mine_of[root]),
                    (comm.reduce_scatter(mine), sum(mine_of)),
                    (comm.all_to_all(mine), np.concatenate(mine_of)),
                ]
                for number, (got, expected) in enumerate(found):
                    assert (got is None) == (expected is None), number
                    assert got is None or np.array_equal(got, expected), (items, call, number)
        return "right"

    assert pc.spawn(work, ranks) == ["right"] * ranks


def test_bits_are_those_of_threads(tmp_path, on_ranks):
    body = """
x = np.random.default_rng(comm.rank).standard_normal(70_001).astype("float32")
import hashlib
print(hashlib.sha256(comm.all_reduce(x).tobytes()).hexdigest())
"""
    _, out, _ = run(tmp_path, 3, body)
    import hashlib

    def work(c):
        x = np.random.default_rng(c.rank).standard_normal(70_001).astype("float32")
        return hashlib.sha256(c.all_reduce(x).tobytes()).hexdigest()

    want = on_ranks(pc.local_group(3), work)
    assert out.split() == want


@pytest.mark.slow
def test_output_stays_in_lines_and_gets_a_prefix(tmp_path):
    body = """
for i in range(200):
    print(f"{comm.rank}:{i}:" + "x" * 50)
print("to stderr", file=sys.stderr)
"""
    _, out, err = run(tmp_path, 3, body, "--prefix", "always")
    lines = out.splitlines()
    assert len(lines) == 600
    assert all(line == f"[{line[1]}] {line[4]}:{line.split(':')[1]}:{'x' * 50}" for line in lines)
    assert sorted(err.splitlines()) == [f"[{r}] to stderr" for r in range(3)]
    _, out, _ = run(tmp_path, 2, "print('plain')")
    assert out == "plain\nplain\n"


@pytest.mark.parametrize(
    ("death", "how", "status"),
    [("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL", 137),
     pytest.param("os._exit(3)", "exited with status 3", 3, marks=pytest.mark.slow),
     pytest.param("raise ValueError('broken')", "exited with status 1", 1, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_rank_that_dies_is_named_by_all_others(tmp_path, death, how, status):
    body = f"""
comm.barrier()
if comm.rank == 1:
    {death}
began = time.monotonic()
try:
    while True:
        comm.all_reduce(np.ones(100_000))
except pc.PeerLostError as error:
    print(comm.rank, time.monotonic() - began < 15, error)
    sys.exit(0)
"""
    returned, out, err = run(tmp_path, 3, body)
    assert returned == status
    assert f"pycollective run: rank 1 {how}" in err
    lines = sorted(out.splitlines())
    assert [line[:6] for line in lines] == ["0 True", "2 True"]
    assert all("rank 1" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(tmp_path, number):
    body = """
def handle(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, handle)
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("ready", flush=True)
    if comm.rank == 0:
        comm.barrier()   # waits in the core
    else:
        time.sleep(30)
except KeyboardInterrupt:
    print("got SIGINT", flush=True)
    sys.exit(0)
except pc.CollectiveError:
    sys.exit(0)
"""
    process = start(tmp_path, 2, body)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    time.sleep(0.2)
    began = time.monotonic()
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert time.monotonic() - began < 20
    assert out.count(f"got {number.name}") >= 1
    assert process.returncode == 0


def test_a_script_runs_alone_too(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(PREAMBLE + "print(comm.rank, comm.size, comm.all_reduce([2.0])[0])")
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0 1 2.0\n"


# In this process ------------------------------------------------------------------------------


def members(size):
    memory = _core.ShmGroup.create(size)
    return memory, [
        init(environment=launched_environment(r, size, memory.descriptor)) for r in range(size)
    ]


def test_silent_returns_the_ranks_without_heartbeat():
    """A rank judges its peers by their last heartbeat, after its own first heartbeat."""
    memory = _core.ShmGroup.create(3)
    a, b, c = (_core.ShmGroup.open(memory.descriptor) for _ in range(3))
    for rank, group in enumerate((a, b, c)):
        group.join(rank)
    assert a.silent(0) == []
    for group in (a, b, c):
        group.send_heartbeat()
    assert (a.silent(5), b.silent(5)) == ([], [])
    time.sleep(0.03)
    assert (a.silent(0.02), b.silent(0.02)) == ([1, 2], [0, 2])

    def silent_beside_b():
        """Return the silent ranks; this process may itself pause after the heartbeat."""
        for _ in range(1000):
            b.send_heartbeat()
            if 1 not in (found := a.silent(0.02)):
                return found
        raise AssertionError("rank 1 is silent")

    assert silent_beside_b() == [2]
    c.leave(2)
    assert silent_beside_b() == []


@pytest.mark.slow
def test_groups_leave_nothing_behind(on_ranks):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # objects that other tests have left behind
    shared = set(os.listdir("/dev/shm"))
    before = descriptors()
    for _ in range(100):
        _, comms = members(2)
        assert on_ranks(comms, lambda c: float(c.all_reduce([1.0])[0])) == [2.0, 2.0]
        for c in comms:
            c.close()
        del comms, _, c
    assert descriptors() == before
    assert set(os.listdir("/dev/shm")) <= shared


def test_init_bad_environment_raises_rendezvous_error(tmp_path):
    memory, comms = members(2)
    for broken, text in (
        (
            launched_environment(0, 2, memory.descriptor),
            "this process has already joined the group",
        ),
        (
            launched_environment(5, 2, memory.descriptor),
            "PYCOLLECTIVE_RANK=5 is not among the 2 tasks",
        ),
        (launched_environment(0, 3, memory.descriptor), "the group has 2 ranks"),
        (launched_environment(0, 2, 9999), "not a descriptor of shared memory"),
        ({"PYCOLLECTIVE_RANK": "0"}, "PYCOLLECTIVE_RANK is set and PYCOLLECTIVE_SIZE"),
        ({"PYCOLLECTIVE_TRANSPORT": "pigeon"}, "PYCOLLECTIVE_TRANSPORT='pigeon'"),
        ({"PYCOLLECTIVE_TRANSPORT": "shm"}, "needs a launcher"),
        (
            {**launched_environment(0, 2, 1), "PYCOLLECTIVE_TRANSPORT": "thread"},
            "PYCOLLECTIVE_TRANSPORT=thread, but this process is one of several ranks",
        ),
        ({**launched_environment(0, 2, 1), "PYCOLLECTIVE_RANK": "one"}, "PYCOLLECTIVE_RANK='one'"),
    ):
        with pytest.raises(RendezvousError, match=text):
            init(environment=broken)
    stranger = tmp_path / "file"
    for content in (b"", b"hello", bytes(100_000)):
        stranger.write_bytes(content)
        with open(stranger, "r+b") as f, pytest.raises(RendezvousError):
            init(environment=launched_environment(0, 2, f.fileno()))
    for c in comms:
        c.close()
    with pytest.raises(pc.CollectiveError, match="closed"):
        comms[0].barrier()


def test_run_bad_command_exits_with_a_message(tmp_path, capsys, monkeypatch):
    from pycollective.cli import main

    for forced, text in (("thread", "processes use 'shm'"), ("pigeon", "is unknown: use 'shm'")):
        monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", forced)
        with pytest.raises(SystemExit):
            main(["run", "-n", "2", "program"])
        assert text in capsys.readouterr().err
    monkeypatch.delenv("PYCOLLECTIVE_TRANSPORT")
    with pytest.raises(SystemExit):
        main(["run", "-n", "2", str(Path(tmp_path) / "nothing")])
    assert "cannot start" in capsys.readouterr().err
