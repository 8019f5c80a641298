"""Loss of one of Ray's machines, which are groups of processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "PYCOLLECTIVE_TEST_RAY_MACHINES" not in os.environ,
        reason="starts five Ray processes for 40 s; set PYCOLLECTIVE_TEST_RAY_MACHINES=1 to run it",
    ),
]

_DRIVER = """
import os, threading, time
import ray
from ray.cluster_utils import Cluster
import pycollective as tf

def train():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.extended.input_pipeline[1]
    total = 0.0
    for number in range(5):
        total += float(strategy.reduce("SUM", tf.constant(1.0), axis=None))
        if number == 3 and rank == LOST and not os.path.exists(f"{FOLDER}/node"):
            with open(f"{FOLDER}/node.new", "w") as file:
                file.write(ray.get_runtime_context().get_node_id())
            os.rename(f"{FOLDER}/node.new", f"{FOLDER}/node")
            time.sleep(60)
    strategy.close()
    return total

checks = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 6,
}
head = {"num_cpus": 0, "include_dashboard": False, "_system_config": checks}
cluster = Cluster(initialize_head=True, head_node_args=head)
nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
environment = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)

def remove_lost_node():
    while not os.path.exists(f"{FOLDER}/node"):
        time.sleep(0.05)
    lost = open(f"{FOLDER}/node").read()
    cluster.remove_node(next(n for n in nodes if n.node_id == lost), allow_graceful=False)

thread = threading.Thread(target=remove_lost_node, daemon=True)
thread.start()
print(tf.ray.run(train, 2, max_failures=1, placement_timeout=60), flush=True)
ray.shutdown()
cluster.shutdown()
"""


def test_lost_machine_is_replaced_at_another_address(tmp_path):
    """The machine of worker 0 is lost, so that the rendezvous has another address."""
    script = tmp_path / "driver.py"
    script.write_text(f"LOST, FOLDER = 0, {str(tmp_path)!r}\n" + _DRIVER)
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["[10.0, 10.0]"], done
