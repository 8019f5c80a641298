"""Workers on hosts that are network namespaces; the network is slow and loses packets."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading

import pytest
from network import SECRET, network
from workers import PREAMBLE, ended

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts():
    """Return three hosts with a network between them."""
    with network(3) as made:
        yield made
        assert made.passed > 0


def start(tmp_path, hosts, body, count=3, secret=SECRET, **more):
    """Start a worker on each host, all on the same port."""
    script = tmp_path / "worker.py"
    script.write_text(PREAMBLE + body)
    cluster = {"worker": [f"{address}:9000" for address in hosts.addresses[:count]]}
    return [
        subprocess.Popen(
            [*hosts.on(i), sys.executable, str(script)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": "worker", "index": i}}
                ),
                "REPLICAS": "1",
                "PYCOLLECTIVE_HOST_ID": str(i),
                **({} if secret is None else {"PYCOLLECTIVE_SECRET": secret}),
                **more,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]


def test_slow_network_that_loses_packets_gives_the_same_bits(tmp_path, hosts):
    """The workers have a secret and no TLS, and get the bits of a network without losses."""
    body = """
import hashlib
strategy = strategy_of()
me = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
def trained():
    rng = np.random.default_rng(7)
    with strategy.scope():
        w = tf.Variable(rng.normal(size=(64, 32)).astype(np.float32))
        optimizer = tf.keras.optimizers.Adam(0.01)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(x, w) - y) ** 2)
        optimizer.minimize(loss, [w], tape=tape)
        return tf.distribute.get_replica_context().all_reduce("SUM", x)
    digest = hashlib.sha256()
    for number in range(2):
        rng = np.random.default_rng([number, me])
        x, y = (tf.constant(rng.normal(size=(200, n)).astype(np.float32)) for n in (64, 32))
        digest.update(strategy.run(step, args=(x, y)).numpy().tobytes())
    digest.update(w.numpy().tobytes())
    return digest.hexdigest()
say(hosts=strategy.extended.workers.communicator.hosts, n=strategy.num_replicas_in_sync)
say(lossy=trained())
sys.stdin.readline()
say(clean=trained())
"""
    lost, passed = hosts.lost, hosts.passed
    hosts.behave(delay=0.02, loss=0.05)
    processes = start(tmp_path, hosts, body)
    limit = threading.Timer(60, lambda: [process.kill() for process in processes])
    limit.start()
    lines = [[p.stdout.readline() for _ in range(2)] for p in processes]
    limit.cancel()
    hosts.behave()
    lost, passed = hosts.lost - lost, hosts.passed - passed
    for process in processes:
        with contextlib.suppress(BrokenPipeError):  # ended() reports the dead worker
            process.stdin.write("\n")
            process.stdin.flush()
    for later in ended(processes).said:
        assert {"SAID " + json.dumps({"lossy": later["clean"]}) + "\n"} == {
            pair[1] for pair in lines
        }
    assert [pair[0] for pair in lines] == ['SAID {"hosts": [0, 1, 2], "n": 3}\n'] * 3
    assert lost > 0.02 * passed > 1, (lost, passed)


def test_without_a_secret_hosts_are_refused(tmp_path, hosts):
    body = "try:\n    strategy_of()\nexcept Exception as error:\n    print(error)\n"
    done = ended(start(tmp_path, hosts, body, count=2, secret=None))
    for output in done.outputs:
        assert "is not a loopback address, and there is no secret" in output, done
