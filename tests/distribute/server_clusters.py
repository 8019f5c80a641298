"""Clusters with parameter servers, whose tasks are processes that run a script."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import hangs
from ports import free_ports

BEGIN = """
import os, signal, time
import numpy as np
import pycollective as tf
strategy = tf.distribute.ParameterServerStrategy()
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""
MODEL = """
with strategy.scope():
    table = tf.Variable(np.zeros((5000, 4), np.float32), name="table")
    rate = tf.Variable(2.0, name="rate")
    count = tf.Variable(0, name="count")
    optimizer = tf.keras.optimizers.Adam(0.1)

def dataset_fn(context):
    return tf.data.Dataset.range(100).shuffle(100).repeat().batch(10)

@tf.function
def step(iterator):
    rows = next(iterator)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, rows) - 1.0))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    count.assign_add(1)
    return loss

per_worker = coordinator.create_per_worker_dataset(
    lambda: strategy.distribute_datasets_from_function(dataset_fn)
)
"""


def run(tmp_path, script, servers=2, workers=2, timeout=hangs.SECONDS):
    """Run a script as a cluster; return its exit status, its output and its errors."""
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "pycollective", "run", "--ps", str(servers)]
    command += ["--workers", str(workers), "--chief", str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=tmp_path
    )
    return ended.returncode, ended.stdout, ended.stderr


def results(tmp_path, script, begin=BEGIN, **options):
    """Return the arguments of `report`, a function for the chief's script, and the errors' text."""
    path = tmp_path / "results.json"
    code = f"{begin}\ndef report(**found):\n    import json\n"
    code += f"    open({str(path)!r}, 'w').write(json.dumps(found))\n"
    status, out, errors = run(tmp_path, code + script, **options)
    assert path.exists() and status == 0, (status, out, errors)
    return json.loads(path.read_text()), errors


def start(path, job, cluster, index=0, on=(), **more):
    """Start a script as a task of a cluster; ``on`` is the command that runs another one on a host."""
    config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TF_CONFIG": config}
    pipe = subprocess.PIPE
    task = subprocess.Popen(
        [*on, sys.executable, str(path)],
        env={**environment, **more}, text=True, stdin=pipe, stdout=pipe, stderr=pipe, cwd=path.parent,
    )  # fmt: skip
    task.cluster = cluster
    return task


@contextlib.contextmanager
def ending():
    """Yield a list for tasks; at last end those in it."""
    tasks = []
    try:
        yield tasks
    finally:
        for task in tasks:
            task.kill()
            task.communicate()


@contextlib.contextmanager
def started(path, servers=1):
    """Start a script as a worker, parameter servers and a chief; yield and at last end them."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(1 + servers)]
    cluster = {"ps": addresses[:servers], "worker": addresses[servers:]}
    with ending() as tasks:
        tasks.append(start(path, "worker", cluster))
        tasks += [start(path, "ps", cluster, index) for index in range(servers)]
        tasks.append(start(path, "chief", cluster))
        yield tasks


def recovering(tmp_path):
    """Return the beginning of a script whose servers write snapshots and may be started again."""
    return BEGIN.replace(
        "ParameterServerStrategy()",
        f"ParameterServerStrategy(snapshot_dir={str(tmp_path / 'saved')!r}, snapshot_seconds=0.05, "
        "recover=True)",
    )


def let_continue(chief):
    """End the chief's call of input()."""
    chief.stdin.write("\n")
    chief.stdin.flush()
