"""Strategies and datasets in a process that was forked from the one that made them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
import numpy as np
import pycollective as tf

strategy = tf.distribute.{kind}(["cpu:0", "cpu:1"])
with strategy.scope():
    v = tf.Variable(np.ones((300, 300), np.float32))
    optimizer = tf.keras.optimizers.SGD(0.5)
strategy.extended.sums_during_backward = True  # starts a thread that sums

def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v)
    optimizer.minimize(loss, [v], tape)
    return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant([1.0]))

dataset = tf.data.Dataset.range(100).map(lambda x: x).batch(4).prefetch(2)
iterator = iter(dataset)
next(iterator)
batches = strategy.experimental_distribute_dataset(dataset)
strategy.run(step)
child = os.fork()
if child == 0:
    signal.alarm(30)
    assert float(strategy.run(step).values[1][0]) == 2.0
    assert v.numpy()[0, 0] == -1.0, v.numpy()
    assert len(list(dataset)) == len(list(batches)) == 25
    try:
        next(iterator)
    except RuntimeError as error:
        assert "make a new iterator" in str(error)
    else:
        raise AssertionError("an iterator without a thread gave an element")
    del strategy, iterator, batches
    print("CHILD IS DONE", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
strategy.run(step)
assert v.numpy()[0, 0] == -1.0
assert len(list(iterator)) == 24
print("PARENT IS DONE")
"""


@pytest.mark.parametrize("kind", ["MirroredStrategy", "experimental.CentralStorageStrategy"])
def test_forked_process_runs_a_strategy_with_threads_of_its_own(kind):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(kind=kind)],
        cwd="/",  # the sources in the clone have no compiled core
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "CHILD IS DONE" in ended.stdout
    assert "PARENT IS DONE" in ended.stdout
