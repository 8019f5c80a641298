"""The number of usable cores: the affinity, limited by the quotas of control groups."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from pycollective import _core

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads control groups")

V1 = "36 30 0:33 {root} {place} rw,relatime shared:1 - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "35 30 0:32 {root} {place} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = "34 30 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def system(tmp_path, groups, mounts, files):
    """Write the control groups of a process as files; return their folder."""
    files = {"proc/self/cgroup": groups, "proc/self/mountinfo": OTHER + mounts, **files}
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(tmp_path)


def v2_mount(place="/sys/fs/cgroup", root="/"):
    return V2.format(root=root, place=place)


def v1_mount(place="/sys/fs/cgroup/cpu,cpuacct", root="/"):
    return V1.format(root=root, place=place)


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "cores"),
    [
        ("0::/\n", v2_mount(), {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", v2_mount(), {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 0),
        ("0::/\n", v2_mount(), {}, 0),
        # A group around this one may be the narrower one.
        (
            "0::/pods/mine\n",
            v2_mount(),
            {
                "sys/fs/cgroup/pods/mine/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pods/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/cpu.max": "400000 100000\n",
            },
            2,
        ),
        # Version 1, in a container without its own namespace.
        (
            "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n",
            v1_mount(root="/docker/a"),
            {
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            "3:cpuacct,cpu:/job\n",
            v1_mount("/cg/cpu"),
            {"cg/cpu/job/cpu.cfs_quota_us": "-1\n", "cg/cpu/job/cpu.cfs_period_us": "100000\n"},
            0,
        ),
        # Both at once: version 1 has the controller of the processor, version 2 has others.
        (
            "3:cpu:/job\n0::/user\n",
            v1_mount("/cg/cpu") + v2_mount("/cg/unified"),
            {"cg/cpu/job/cpu.cfs_quota_us": "300000", "cg/cpu/job/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("", "", {}, 0),
        ("nonsense\n3:cpu\n", v1_mount(), {}, 0),
    ],
)
def test_quota_of_cores_is_the_narrowest_of_the_groups(tmp_path, groups, mounts, files, cores):
    assert _core.quota_of_cores(system(tmp_path, groups, mounts, files)) == cores


ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from pycollective import _core, _nn
group = _core.ThreadGroup(2)
print(_core.usable_cores(), _nn.threads(), group.is_oversubscribed)
"""


def test_usable_cores_with_affinity_to_one_core_is_one_everywhere(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", ON_ONE_CORE], env=env, cwd=tmp_path, capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "1", "True"], done


PINNED = """
import os, sys
from pycollective import _core
cores = sorted(os.sched_getaffinity(0))[:2]
group = _core.ShmGroup.create(2)
if os.fork():
    rank, core = 0, cores[0]
else:
    rank, core = 1, cores[int(sys.argv[1])]
os.sched_setaffinity(0, {core})
member = _core.ShmGroup.open(group.descriptor)
member.join(rank)
if rank == 1:
    os._exit(0)
os.wait()
print(member.is_oversubscribed)
"""


@pytest.mark.skipif(_core.usable_cores() < 2, reason="needs two cores")
@pytest.mark.parametrize(("core", "oversubscribed"), [(0, "True"), (1, "False")])
def test_is_oversubscribed_ranks_pinned_to_cores_counts_the_cores_of_all(
    tmp_path, core, oversubscribed
):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PINNED, str(core)], env=env, cwd=tmp_path, capture_output=True,
        text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == [oversubscribed], done


BUSY = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
end = time.monotonic() + 20
while time.monotonic() < end:
    os.sched_yield()  # as a rank that waits
"""


@pytest.mark.skipif(_core.usable_cores() < 2, reason="needs two cores")
def test_yield_or_change_core_on_busy_cores_moves_and_keeps_the_affinity():
    before = os.sched_getaffinity(0)
    cores = set(sorted(before)[:2])
    commands = [[sys.executable, "-c", BUSY, str(core)] for core in cores]
    os.sched_setaffinity(0, cores)
    busy = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    try:
        for process in busy:
            process.stdout.readline()
        until = time.monotonic() + 20
        while not _core.yield_or_change_core():
            assert time.monotonic() < until
        assert os.sched_getaffinity(0) == cores
    finally:
        for process in busy:
            process.kill()
            process.communicate()
        os.sched_setaffinity(0, before)
