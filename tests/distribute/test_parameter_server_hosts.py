"""Parameter servers, workers and chief on hosts of their own: network namespaces."""

from __future__ import annotations

import time

import hangs
import pytest
from namespaces import ip
from server_clusters import BEGIN, MODEL, ending, recovering, start

pytestmark = pytest.mark.slow

SECRET = {"PYCOLLECTIVE_SECRET": "0123456789abcdef0123456789abcdef"}
CLUSTER = {"ps": ["10.213.7.1:9000"], "worker": ["10.213.7.2:9000", "10.213.7.3:9000"]}
TASKS = [("ps", 0, 0), ("worker", 0, 1), ("worker", 1, 2), ("chief", 0, 0)]
"""The job, the number and the host of each task; the chief is on the server's host."""


def start_on(path, hosts, tasks=TASKS, cluster=CLUSTER, **more):
    """Start tasks on their hosts. The hosts share a disk, and no memory."""
    return [
        start(
            path, job, cluster, index, ["ip", "netns", "exec", hosts[host]],
            PYCOLLECTIVE_TRANSPORT="tcp", **more,
        )
        for job, index, host in tasks
    ]  # fmt: skip


def test_tasks_on_three_hosts_train_together(tmp_path, hosts):
    path = tmp_path / "script.py"
    path.write_text(
        BEGIN
        + MODEL
        + """
@tf.function
def index():
    time.sleep(0.01)
    return tf.distribute.coordinator.experimental_get_current_worker_index()

iterator = iter(per_worker)
losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(60)]
indices = [coordinator.schedule(index) for _ in range(20)]
coordinator.join()
losses = [float(loss.fetch()) for loss in losses]
print(losses[-1] < 0.5 * losses[0], int(count), int(optimizer.iterations))
print(sorted({int(i.fetch()) for i in indices}))
"""
    )
    with ending() as tasks:
        tasks += start_on(path, hosts, **SECRET)
        ended = [task.communicate(timeout=hangs.SECONDS) for task in tasks]
        assert [task.returncode for task in tasks] == [0] * 4, ended
    assert ended[3][0] == "True 60 60\n[0, 1]\n"


def test_tasks_on_hosts_without_a_secret_are_refused(tmp_path, hosts):
    path = tmp_path / "script.py"
    path.write_text(BEGIN)
    with ending() as tasks:
        tasks += start_on(path, hosts, [("ps", 0, 0), ("worker", 0, 1)])
        for task in tasks:
            errors = task.communicate(timeout=hangs.SECONDS)[1]
            assert "is not a loopback address, and there is no secret" in errors


@pytest.mark.parametrize("long", [False, True])
def test_worker_whose_network_was_cut_goes_on_when_it_is_back(tmp_path, hosts, long):
    """A worker loses its connection to the server first. The chief notices only a long cut."""
    path = tmp_path / "script.py"
    path.write_text(
        BEGIN
        + """
from pycollective.distribute import task_links
task_links.HANDSHAKE_SECONDS = 2.0
with strategy.scope():
    total = tf.Variable(0)

@tf.function
def add():
    total.assign_add(1)
    time.sleep(0.01)
    return tf.distribute.coordinator.experimental_get_current_worker_index()

while True:
    indices = [coordinator.schedule(add) for _ in range(10)]
    coordinator.join()
    print(sorted({int(i.fetch()) for i in indices}), flush=True)
"""
    )
    with ending() as tasks:
        tasks += start_on(path, hosts, PYCOLLECTIVE_HEARTBEAT="0.5", **SECRET)
        chief = tasks[-1]

        def reach(wanted):
            for line in iter(chief.stdout.readline, ""):
                if line == wanted:
                    return
            raise AssertionError([task.communicate() for task in (chief, tasks[2])])

        reach("[0, 1]\n")
        ip("-n", hosts[2], "link", "set", "eth0", "down")
        if long:
            reach("[0]\n")
        else:
            time.sleep(1.5)
        ip("-n", hosts[2], "link", "set", "eth0", "up")
        reach("[0, 1]\n")


def test_server_whose_network_was_cut_keeps_its_variables(tmp_path, hosts):
    path = tmp_path / "script.py"
    path.write_text(
        recovering(tmp_path).replace("snapshot_seconds=0.05", "snapshot_seconds=1000")
        + """
from pycollective.distribute import task_links
task_links.HANDSHAKE_SECONDS = 2.0
with strategy.scope():
    total = tf.Variable(0)

@tf.function
def add():
    total.assign_add(1)
    time.sleep(0.01)

while True:
    coordinator.schedule(add)
    coordinator.join()
    print(int(total), flush=True)
"""
    )
    placement = [("ps", 0, 2), ("worker", 0, 1), ("worker", 1, 0), ("chief", 0, 0)]
    cluster = {"ps": ["10.213.7.3:9000"], "worker": ["10.213.7.2:9000", "10.213.7.1:9000"]}
    with ending() as tasks:
        tasks += start_on(path, hosts, placement, cluster, PYCOLLECTIVE_HEARTBEAT="0.5", **SECRET)
        chief = tasks[-1]
        before = [int(chief.stdout.readline()) for _ in range(20)][-1]
        ip("-n", hosts[2], "link", "set", "eth0", "down")
        while "/job:ps/task:0 is lost" not in (line := chief.stderr.readline()):
            assert line, [task.communicate() for task in tasks]
        ip("-n", hosts[2], "link", "set", "eth0", "up")
        while "/job:ps/task:0 is back" not in (line := chief.stderr.readline()):
            assert line, [task.communicate() for task in tasks]
        counts = [int(chief.stdout.readline()) for _ in range(50)]
        assert counts[-1] >= before + 50
