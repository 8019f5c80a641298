"""Workers as real Ray actors on this machine."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from workers import run

import pycollective as tf

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cluster(tmp_path_factory):
    # Ray's workers import from the driver's folder. The sources there have no compiled core.
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
    """Train a small model, and return the number of replicas and the weights."""
    rows = np.random.default_rng(3).normal(size=(steps * 8, 5))
    strategy = tf.distribute.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(tf.keras.optimizers.Adam(0.01), "mse")
    model.fit(rows[:, :4], rows[:, 4:], batch_size=8, shuffle=False, verbose=0)
    replicas = strategy.num_replicas_in_sync
    strategy.close()
    return replicas, [w.tolist() for w in model.get_weights()]


def test_run_gives_the_weights_of_a_run_without_ray(tmp_path):
    first, second = tf.ray.run(train, 2)
    assert first == second
    assert first[0] == 2
    source = f"sys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom test_ray import train\n"
    said = run(tmp_path, 2, source + "n, w = train()\nprint('SAID', json.dumps({'w': w}))\n").said
    assert said[0]["w"] == first[1]


def test_run_exception_in_a_worker_is_raised_in_the_caller():
    def fails():
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        if strategy.extended.input_pipeline[1] == 1:
            raise KeyError("mine")
        strategy.extended.workers.barrier()

    with pytest.raises(KeyError, match="mine"):
        tf.ray.run(fails, 2)


def test_run_lost_worker_is_replaced_max_failures_times(tmp_path):
    def worker():
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        total = 0.0
        for number in range(10):
            total += float(strategy.reduce("SUM", tf.constant(1.0), axis=None))
            died = tmp_path / "died"
            if number == 5 and strategy.extended.input_pipeline[1] == 1 and not died.exists():
                died.touch()
                os._exit(3)
        strategy.close()
        return total

    assert tf.ray.run(worker, 2, max_failures=1) == [20.0, 20.0]
    (tmp_path / "died").unlink()
    with pytest.raises(ray.exceptions.RayActorError):
        tf.ray.run(worker, 2)


def test_run_interrupted_ends_the_workers(tmp_path):
    def waits():
        rank = tf.distribute.MultiWorkerMirroredStrategy().extended.input_pipeline[1]
        (tmp_path / "writing").joinpath(str(rank)).write_text(str(os.getpid()))
        os.replace(tmp_path / "writing" / str(rank), tmp_path / f"pid-{rank}")
        time.sleep(600)

    (tmp_path / "writing").mkdir()

    def interrupt():
        while len(list(tmp_path.glob("pid-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        tf.ray.run(waits, 2)
    thread.join()
    pids = [path.read_text() for path in tmp_path.glob("pid-*")]
    until = time.monotonic() + 60
    while any(pathlib.Path("/proc", pid).exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert tf.ray.run(lambda: 5, 2) == [5, 5]


STEPS = 30


def elastic(folder, lost=None, least=None, patience=20.0):
    """Train in `run_elastic`, and save every five steps. The worker ``lost`` ends at step 13."""
    folder = pathlib.Path(folder)
    rows = np.random.default_rng(3).normal(size=(STEPS, 12, 4))

    def train(strategy):
        with strategy.scope():
            w, step = tf.Variable(np.zeros(4)), tf.Variable(np.int64(0))
            optimizer = tf.keras.optimizers.Adam(0.1)
            optimizer.build([w])
        checkpoint = tf.train.Checkpoint(w=w, step=step, optimizer=optimizer)
        checkpoint.restore(tf.train.latest_checkpoint(folder / "saved"))
        workers = strategy.extended.workers
        begun, losses = int(step), []

        def replica(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((x - w) ** 2) / 12.0
            optimizer.minimize(loss, [w], tape=tape)
            return loss

        while int(step) < STEPS:
            if int(step) == 13 and rank == lost and not (folder / "died").exists():
                (folder / "died").touch()
                os._exit(3)
            data = tf.data.Dataset.from_tensors(rows[int(step)])
            for x in strategy.experimental_distribute_dataset(data):
                loss = strategy.reduce("SUM", strategy.run(replica, args=(x,)), axis=None)
                losses.append(float(loss))
            step.assign_add(1)
            if int(step) % 5 == 0:
                checkpoint.save(folder / "saved" / "ckpt")
            if int(step) == 20 and least and lost is not None and workers.count == 1:
                (folder / "fewer.new").write_text(json.dumps([begun, losses]))
                (folder / "fewer.new").rename(folder / "fewer")
                until = time.monotonic() + 60
                # AbortedError ends the loop when the other worker is back.
                while time.monotonic() < until:
                    checkpoint.save(folder / "saved" / "ckpt")
                    time.sleep(0.1)
        return begun, strategy.num_replicas_in_sync, losses, w.numpy().tolist()

    if least and (folder / "died").exists():  # a replacement waits until the other trains alone
        until = time.monotonic() + 60
        while not (folder / "fewer").exists() and time.monotonic() < until:
            time.sleep(0.05)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    rank = strategy.extended.input_pipeline[1]
    found = strategy.run_elastic(train, least, patience=patience)
    strategy.close()
    return found


@pytest.mark.parametrize(("lost", "least"), [(1, None), (0, 1)])
def test_elastic_training_with_a_lost_worker_gives_the_undisturbed_losses(tmp_path, lost, least):
    """Training waits for a replacement, or with ``least`` continues until the replacement joins."""
    (tmp_path / "alone").mkdir()
    _, _, losses, w = elastic(tmp_path / "alone")
    args = (str(tmp_path), lost, least, 0.5 if least else 20.0)
    found = tf.ray.run(elastic, 2, args=args, max_failures=1, min_workers=least)
    assert found[0] == found[1]
    begun, replicas, own, weights = found[0]
    assert (begun, replicas) == (20 if least else 10, 2)
    assert own == pytest.approx(losses[begun:], rel=1e-9)
    assert weights == pytest.approx(w, rel=1e-9)
    if least:
        begun, own = json.loads((tmp_path / "fewer").read_text())
        assert begun == 10
        assert own == pytest.approx(losses[10:20], rel=1e-9)


def count_with_servers(folder):
    """Count the calls of a function on two workers. Worker 1 ends in its first call and is replaced."""
    died = pathlib.Path(folder) / "died"
    strategy = tf.distribute.experimental.ParameterServerStrategy()
    coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        total = tf.Variable(0.0)

    @tf.function
    def step():
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        if worker == 1 and not died.exists():
            died.touch()
            os._exit(3)
        total.assign_add(1.0)
        time.sleep(0.01)
        return worker

    names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    calls, found = 0, set()
    until = time.monotonic() + 120
    while found != {0, 1} and time.monotonic() < until:
        results = [coordinator.schedule(step) for _ in range(10)]
        coordinator.join()
        found.update(int(result.fetch()) for result in results)
        calls += 10
    return sorted(found), float(total.numpy()) - calls, names


def test_lost_worker_of_a_cluster_with_servers_comes_back(tmp_path):
    found = tf.ray.run(
        count_with_servers, 2, num_ps=1, args=(str(tmp_path),), max_failures=1, cpus_per_worker=0.5
    )
    assert (tmp_path / "died").exists()
    assert found[:2] == ([0, 1], 0.0)
    names = sorted(re.fullmatch("pycollective-[0-9a-f]{8}-(.*)", name)[1] for name in found[2])
    assert names == ["chief-0", "ps-0", "worker-0", "worker-1"]


def test_run_without_resources_raises():
    with pytest.raises(RuntimeError, match="Ray has no resources for 3 actors of {'CPU': 1}"):
        tf.ray.run(train, 3, placement_timeout=1)


def count_with_later_workers(folder):
    """Train with one worker, let Ray find resources for another, and return the workers seen."""
    strategy = tf.distribute.experimental.ParameterServerStrategy()
    coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        total = tf.Variable(0.0)
    dataset = coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(1, 2).repeat())
    iterator = iter(dataset)

    @tf.function
    def step(iterator):
        total.assign_add(float(next(iterator)))
        time.sleep(0.01)
        return tf.distribute.coordinator.experimental_get_current_worker_index()

    seen, calls = [], 0
    until = time.monotonic() + 120
    while len(set(seen)) < 2 and time.monotonic() < until:
        results = [coordinator.schedule(step, args=(iterator,)) for _ in range(5)]
        coordinator.join()
        calls += 5
        seen += [int(result.fetch()) for result in results]
        if len(seen) == 10:  # only now there are resources for worker 1
            (pathlib.Path(folder) / "begun").touch()
    return seen, float(total.numpy()) - calls


def test_workers_of_a_cluster_with_servers_begin_when_there_are_resources(tmp_path):
    """Another actor holds the half CPU for worker 1 until training has begun."""

    @ray.remote(num_cpus=0.5)
    class Other:
        def __init__(self):
            pass

    other = Other.remote()
    ray.get(other.__ray_ready__.remote())
    ends = threading.Thread(target=lambda: (wait_for(tmp_path / "begun"), ray.kill(other)))
    ends.start()
    seen, difference = tf.ray.run(
        count_with_later_workers,
        2,
        num_ps=1,
        min_workers=1,
        args=(str(tmp_path),),
        cpus_per_worker=0.5,
    )
    ends.join()
    assert set(seen[:10]) == {0}
    assert set(seen) == {0, 1}
    assert difference == 0.0


def wait_for(path):
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)
