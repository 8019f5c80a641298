"""The cores that ``pycollective run`` gives to each rank."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from pycollective import _core
from pycollective.launch.cores import shares

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
ASKED = """
import os
from pycollective import _core
print((os.sched_getaffinity(0), _core.usable_cores(), int(os.environ["OMP_NUM_THREADS"])))
"""
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="ranks are bound to cores on Linux only"
)


def machine(tmp_path, packages, physical, threads):
    """Write a topology in which the first threads of all cores are numbered before the second ones."""
    cores = packages * physical
    for cpu in range(threads * cores):
        core = cpu % cores
        folder = tmp_path / f"cpu{cpu}"
        folder.mkdir()
        (folder / "physical_package_id").write_text(f"{core // physical}\n")
        (folder / "core_id").write_text(f"{core % physical}\n")
    return str(tmp_path / "cpu{}" / "{}")


def test_a_share_has_both_threads_of_a_core(tmp_path):
    topology = machine(tmp_path, packages=1, physical=4, threads=2)
    assert shares(2, set(range(8)), topology) == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert shares(4, set(range(8)), topology) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]


def test_a_share_is_of_one_package(tmp_path):
    topology = machine(tmp_path, packages=2, physical=2, threads=2)
    assert shares(2, set(range(8)), topology) == [{0, 1, 4, 5}, {2, 3, 6, 7}]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
def test_shares_are_of_all_cores_and_nearly_equal(tmp_path, ranks):
    cores = {1, 3, 4, 8, 9, 11, 30}  # with unknown topology
    found = shares(ranks, cores, str(tmp_path / "{}" / "{}"))
    assert sorted(core for share in found for core in share) == sorted(cores)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_more_ranks_than_cores_have_no_shares():
    assert shares(3, {0, 5}) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "ranks", "options", "bound"),
    [
        ("shm", 2, (), True),
        ("tcp", 2, (), True),
        ("shm", 2, ("--bind", "none"), False),
        ("tcp", len(CORES) + 1, (), False),
    ],
)
def test_ranks_have_cores_of_their_own(tmp_path, transport, ranks, options, bound):
    if bound and len(CORES) < ranks:
        pytest.skip("needs two cores")
    (tmp_path / "script.py").write_text(ASKED)
    done = subprocess.run(
        [sys.executable, "-m", "pycollective", "run", "-n", str(ranks), "--transport", transport,
         *options, "script.py"],
        env={n: v for n, v in ENVIRONMENT.items() if n != "OMP_NUM_THREADS"}, cwd=tmp_path,
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    found = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    all_affinities = [core for affinity, _, _ in found for core in affinity]
    assert sorted(all_affinities) == sorted([*CORES] * (1 if bound else ranks)), done
    threads = max(1, _core.usable_cores() // ranks)
    assert [number for _, _, number in found] == [threads] * ranks
    if bound:
        assert [usable for _, usable, _ in found] == [len(each) for each, _, _ in found]
