"""Workers on hosts of their own: network namespaces, a slow link, and one that is cut."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from namespaces import ip
from workers import PREAMBLE, Ended

pytestmark = pytest.mark.slow

SECRET = "0123456789abcdef0123456789abcdef"


def start(tmp_path, hosts, body, secret=SECRET, **more):
    """Start a worker on each host, all on the same port."""
    script = tmp_path / "worker.py"
    script.write_text(PREAMBLE + body)
    cluster = {"worker": [f"10.213.7.{i + 1}:9000" for i in range(len(hosts))]}
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, str(script)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": "worker", "index": i}}
                ),
                "REPLICAS": "1",
                "PYCOLLECTIVE_HOST_ID": host,
                **({} if secret is None else {"PYCOLLECTIVE_SECRET": secret}),
                **more,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, host in enumerate(hosts)
    ]


def ended(processes, seconds=60):
    """Wait for the workers; end those that hang."""
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=seconds))
    finally:
        for process in processes:
            process.kill()
    outputs, errors = zip(*said, strict=True)
    return Ended([p.returncode for p in processes], list(outputs), list(errors))


_TOTALS = """
strategy = strategy_of()
x = np.arange(200_000.0)
def step():
    return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(x))
total = strategy.run(step)
assert np.array_equal(total.numpy(), 3 * x)
say(hosts=strategy.extended.workers.communicator.hosts, n=strategy.num_replicas_in_sync)
"""


@pytest.mark.parametrize("link", [(), ("delay", "15ms"), ("delay", "3ms", "loss", "1%")])
def test_a_secret_is_all_that_hosts_need(tmp_path, hosts, link):
    for name in hosts if link else ():
        how = ("tc", "qdisc", "add", "dev", "eth0", "root", "netem", *link)
        if ip("netns", "exec", name, *how, check=False).returncode:
            pytest.skip("this kernel has no netem, which delays and loses packets")
    for own in ended(start(tmp_path, hosts, _TOTALS)).said:
        assert own == {"hosts": [0, 1, 2], "n": 3}


def test_without_a_secret_hosts_are_refused(tmp_path, hosts):
    body = "try:\n    strategy_of()\nexcept Exception as error:\n    print(error)\n"
    done = ended(start(tmp_path, hosts[:2], body, secret=None))
    for output in done.outputs:
        assert "is not a loopback address, and there is no secret" in output, done


def test_a_host_that_is_cut_off(tmp_path, hosts):
    body = """
import time
strategy = strategy_of()
def step():
    return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(np.ones(1000)))
try:
    for number in range(100_000):
        if number == 20:
            print("STARTED", flush=True)
        strategy.run(step)
        time.sleep(0.002)
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""
    processes = start(tmp_path, hosts, body, PYCOLLECTIVE_HEARTBEAT="3")
    for process in processes:
        assert process.stdout.readline() == "STARTED\n"
    # Packets are dropped, nobody is told.
    ip("-n", hosts[1], "link", "set", "eth0", "down")
    done = ended(processes, 40)
    for rank in (0, 2):
        assert done.outputs[rank].startswith("PeerLostError"), done
        lost = re.escape("rank 1 (worker 1 at 10.213.7.2:9000)")
        assert re.match("PeerLostError " + lost, done.outputs[rank]), done
        assert re.search(lost + r" (is in|was last heard of in) \w+ #\d+ \(", done.outputs[rank])
    assert done.outputs[1].startswith("PeerLostError"), done
