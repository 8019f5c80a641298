"""Workers as real Ray actors on this machine."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
from workers import run

import pycollective as tf

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cluster(tmp_path_factory):
    # Ray's workers look where the driver is, and beside the sources there is no core.
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("ray"))
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()
    os.chdir(before)


def train(steps=20):
    """Train a little model, and return what it has become."""
    rows = np.random.default_rng(3).normal(size=(steps * 8, 5))
    strategy = tf.distribute.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(tf.keras.optimizers.Adam(0.01), "mse")
    model.fit(rows[:, :4], rows[:, 4:], batch_size=8, shuffle=False, verbose=0)
    replicas = strategy.num_replicas_in_sync
    strategy.close()
    return replicas, [w.tolist() for w in model.get_weights()]


def test_the_same_as_without_ray(tmp_path):
    first, second = tf.ray.run(train, 2)
    assert first == second
    assert first[0] == 2
    source = f"sys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom test_ray import train\n"
    said = run(tmp_path, 2, source + "n, w = train()\nprint('SAID', json.dumps({'w': w}))\n").said
    assert said[0]["w"] == first[1]


def test_an_exception_is_raised_here():
    def fails():
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        if strategy.extended.input_pipeline[1] == 1:
            raise KeyError("mine")
        strategy.extended.workers.barrier()

    with pytest.raises(KeyError, match="mine"):
        tf.ray.run(fails, 2)


@pytest.mark.parametrize("elastic", [False, True])
def test_a_worker_that_is_lost_is_replaced(tmp_path, elastic):
    def train(strategy):
        total = 0.0
        for number in range(10):
            total += float(strategy.reduce("SUM", tf.constant(1.0), axis=None))
            died = tmp_path / "died"
            if number == 5 and strategy.extended.input_pipeline[1] == 1 and not died.exists():
                died.touch()
                os._exit(3)
        strategy.close()
        return total

    def worker():
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        return strategy.run_elastic(train) if elastic else train(strategy)

    assert tf.ray.run(worker, 2, max_failures=1) == [20.0, 20.0]
    if elastic:
        return
    (tmp_path / "died").unlink()
    with pytest.raises(ray.exceptions.RayActorError):
        tf.ray.run(worker, 2)


def test_no_room():
    with pytest.raises(RuntimeError, match="Ray has no room for 3 workers of {'CPU': 1}"):
        tf.ray.run(train, 3, placement_timeout=1)
