"""`run_elastic`: training continues from the last checkpoint when a worker is lost."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import sys
import threading
import time

import numpy as np
import pytest
from ports import free_ports
from test_preemption_of_workers import _FIT
from workers import ended, start

import pycollective as tf
from pycollective import distribute, keras
from pycollective.cluster import ClusterSpec, SimpleClusterResolver
from pycollective.cluster.membership import Membership
from pycollective.distribute import multi_worker
from pycollective.errors import RendezvousError
from pycollective.launch import handshake, secret
from pycollective.launch.description import FirstRankLostError
from pycollective.launch.members import Admissions
from pycollective.launch.store import Client

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux")

_TRAINING = """
import time
STEPS, LEAST, ALL = 30, int(os.environ["LEAST"]), int(os.environ["ALL"])
rows = np.random.default_rng(3).normal(size=(STEPS, 12, 4))
def train(strategy):
    with strategy.scope():
        w, step = tf.Variable(np.zeros(4)), tf.Variable(np.int64(0))
        optimizer = tf.keras.optimizers.Adam(0.1)
        optimizer.build([w])
    checkpoint = tf.train.Checkpoint(w=w, step=step, optimizer=optimizer)
    checkpoint.restore(tf.train.latest_checkpoint("saved"))
    begun, losses = int(step), []
    while int(step) < STEPS:
        if int(step) == 13 and os.environ.get("DIES") and strategy.extended.workers.count == ALL:
            os.kill(os.getpid(), 9)
        data = tf.data.Dataset.from_tensors(rows[int(step)])
        def replica(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((x - w) ** 2) / 12.0
            optimizer.minimize(loss, [w], tape=tape)
            return loss
        for x in strategy.experimental_distribute_dataset(data):
            losses.append(float(strategy.reduce("SUM", strategy.run(replica, args=(x,)), axis=None)))
        step.assign_add(1)
        if int(step) % 5 == 0:
            checkpoint.save("saved/ckpt")
        if int(step) == 20 and os.environ.get("GROWS"):
            waits = time.monotonic() + 40
            while strategy.extended.workers.count == ALL - 1 and time.monotonic() < waits:
                print("FEWER " + json.dumps([begun, losses]), flush=True)
                time.sleep(0.1)
                checkpoint.save("saved/ckpt")
    return {"begun": begun, "losses": losses, "w": w.numpy(), "n": strategy.num_replicas_in_sync}
from pycollective.distribute import multi_worker
def joined(*args, **kwargs):
    rank = strategy.extended.input_pipeline[1]
    if os.environ.get("DIES_JOINING") == str(rank):
        os.kill(os.getpid(), 9)  # the others have its join request, and make their group
    return real(*args, **kwargs)
strategy = strategy_of()
multi_worker._workers_of, real = joined, multi_worker._workers_of
say(**strategy.run_elastic(train, min_workers=LEAST, patience=float(os.environ["PATIENCE"])))
strategy.close()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the results of a single worker's training."""
    folder = tmp_path_factory.mktemp("alone")
    (own,) = ended(start(folder, [("worker", 0)], _TRAINING, LEAST="1", ALL="1", PATIENCE="1")).said
    return own


def check(own, alone, workers, begun=10):
    assert (own["begun"], own["n"]) == (begun, workers)
    assert own["losses"] == pytest.approx(alone["losses"][begun:], rel=1e-9)
    assert own["w"] == pytest.approx(alone["w"], rel=1e-9)


def begin(tmp_path, workers, lost, **more):
    """Start workers, one of which dies; return them, and a function that restarts it."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(workers)]}
    more["ALL"] = str(workers)
    processes = []
    for index in range(workers):
        dies = {"DIES": "1"} if index == lost else {}
        processes += start(
            tmp_path, [("worker", index)], _TRAINING, cluster=cluster, **more, **dies
        )
    return processes, lambda **own: start(
        tmp_path, [("worker", lost)], _TRAINING, cluster=cluster, **more, **own
    )


@pytest.mark.slow
def test_fewer_workers_continue_until_a_lost_one_joins(tmp_path, alone):
    """A restarted worker joins at the next checkpoint, also worker 0, whose address all use."""
    workers, lost = 3, 0
    processes, again = begin(tmp_path, workers, lost, LEAST="2", PATIENCE="3", GROWS="1")
    assert processes[lost].wait(60) == -9
    processes[lost].communicate()
    word, _, found = processes[1].stdout.readline().partition(" ")
    begun, losses = json.loads(found)
    assert (word, begun) == ("FEWER", 10)
    assert losses == pytest.approx(alone["losses"][10:20], rel=1e-9)
    processes[lost : lost + 1] = again()
    said = ended(processes).said
    assert all(own == said[0] for own in said)
    check(said[0], alone, workers, begun=20)


@pytest.mark.slow
def test_second_worker_lost_during_the_rendezvous_leaves_one_that_trains(tmp_path, alone):
    processes, _ = begin(tmp_path, 3, 2, LEAST="1", PATIENCE="3", DIES_JOINING="1")
    assert [process.wait(60) for process in processes] == [0, -9, -9]
    own, *_ = ended(processes[:1]).said
    check(own, alone, 1)
    for process in processes[1:]:
        process.communicate()


@pytest.mark.slow
def test_a_replacement_is_waited_for(tmp_path, alone):
    processes, again = begin(tmp_path, 3, 1, LEAST="3", PATIENCE="30")
    assert processes[1].wait(60) == -9
    processes[1].communicate()
    processes[1:2] = again()
    said = ended(processes).said
    assert said[0] == said[1] == said[2]
    check(said[0], alone, 3)


@pytest.mark.slow
def test_worker_that_dies_at_each_restart_does_not_stop_the_others(tmp_path, alone):
    """The worker is let in a few times; then the other trains to the next checkpoint."""
    more = {"LEAST": "1", "PATIENCE": "30", "GROWS": "1"}
    processes, again = begin(tmp_path, 2, 1, **more)
    deaths = 0
    while processes[1].wait(60) == -9:
        processes[1].communicate()
        deaths += 1
        assert deaths < 8, "the other worker makes no progress"
        processes[1:] = again(DIES="1")
    assert deaths >= 2
    said = ended(processes).said
    assert said[0] == said[1]
    check(said[0], alone, 2, begun=said[0]["begun"])


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["die", "stop"])
def test_processes_that_join_and_go_no_further_leave_the_others_training(tmp_path, alone, fate):
    """They die again and again after they have got the table of members; or one of them is stopped."""
    ports = free_ports(3)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    more = {"LEAST": "2", "PATIENCE": "1" if fate == "die" else "5", "ALL": "3"}
    processes = []
    for index in range(3):
        dies = {"DIES": "1"} if index == 2 else {}
        processes += start(
            tmp_path, [("worker", index)], _TRAINING, cluster=cluster, **more, **dies
        )
    assert processes[2].wait(60) == -9
    processes.pop().communicate()
    over, tables = threading.Event(), []
    joins = threading.Thread(target=_join, args=(ports, fate == "stop", over, tables))
    joins.start()
    try:
        said = ended(processes, 100).said
    finally:
        over.set()
        joins.join(30)
    assert said[0] == said[1]
    check(said[0], alone, 2, begun=said[0]["begun"])
    assert sum(2 in table["ranks"] for table in tables) >= (1 if fate == "stop" else 2)


def _join(ports, stops, over, tables):
    """Join as worker 2 does; stop after rank 0 has sent the table of members."""
    key = handshake.key_of(secret.of_user())
    with socket.create_server(("127.0.0.1", ports[2])):  # accepts connections, and answers none
        while not over.wait(0.05):
            soon = time.monotonic() + 10
            with contextlib.suppress(OSError, handshake.HandshakeError):
                with socket.create_connection(("127.0.0.1", ports[0]), timeout=1) as sock:
                    hello = {"purpose": "join", "rank": 2, "size": 3}
                    store = Client(handshake.introduce(sock, key, hello, soon))
                    if store.get("all/table") is not None:
                        continue
                    process = f"process {len(tables)}"
                    place = {
                        "host": "127.0.0.1",
                        "port": ports[2],
                        "claim": "",
                        "milliseconds": 90_000,
                    }
                    store.set("join/2", {**place, "process": process})
                    while store.get("all/table") is None:
                        store.wait(1.0)
                    tables.append(store.get("all/table"))
                    if stops and 2 in tables[-1]["ranks"]:
                        over.wait(90)
                        return


_FITS = """
class Dies(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if os.environ.get("DIES") and int(self.model.optimizer.iterations) == 6:
            os.kill(os.getpid(), 9)
    def on_train_batch_begin(self, batch, logs=None):
        if strategy.extended.workers.count == 1:
            print("ALONE", flush=True)
            until = time.monotonic() + 40
            while batch and not strategy.extended.workers.worker_waits():
                assert time.monotonic() < until
                time.sleep(0.05)
def train(strategy):
    with strategy.scope():
        model = model_of()
    history = fit(model, tf.keras.callbacks.BackupAndRestore("backup", save_freq=1), Dies())
    return {"n": strategy.num_replicas_in_sync,
            "weights": np.concatenate([np.ravel(w) for w in model.get_weights()]), **history.history}
strategy = strategy_of()
say(**strategy.run_elastic(train, 1, patience=0.5))
strategy.close()
"""


@pytest.mark.slow
def test_fit_goes_on_from_its_backup_alone_and_with_the_lost_one(tmp_path):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    body = "import time\n" + _FIT + _FITS
    processes = []
    for index, more in enumerate(({}, {"DIES": "1"})):
        processes += start(tmp_path, [("worker", index)], body, cluster=cluster, **more)
    assert processes[1].wait(60) == -9
    processes[1].communicate()
    assert processes[0].stdout.readline() == "ALONE\n"
    processes[1:] = start(tmp_path, [("worker", 1)], body, cluster=cluster)
    said = ended(processes).said
    assert said[0] == said[1]
    assert said[0]["n"] == 2
    before = keras.backend.floatx()
    here = {"np": np, "tf": tf}
    exec(_FIT, here)
    try:
        model = here["model_of"]()
        expected = here["fit"](model).history
    finally:
        keras.backend.set_floatx(before)
    for name, values in expected.items():
        own = said[0][name]
        assert own == pytest.approx(values[len(values) - len(own) :], rel=1e-9), name
    weights = np.concatenate([np.ravel(w) for w in model.get_weights()])
    assert said[0]["weights"] == pytest.approx(weights, rel=1e-9, abs=1e-12)


def scripted_rendezvous(monkeypatch, results):
    """Let each rendezvous end with one of the results; return the list of their addresses."""
    places = []

    def rendezvous(rank, size, addresses, source, **options):
        places.append(addresses[0])
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(multi_worker.launch, "rendezvous", rendezvous)
    return places


def survivors():
    """Return the result of a rendezvous of worker 2 of 3."""
    names = ("worker 0", "worker 1", "worker 2")
    member = Membership("a test", 2, 3, ("a:1", "b:1", "c:1"), names)
    return multi_worker._rendezvous(member, 1, 0.1, Admissions(3))


def test_survivors_first_rank_lost_try_the_first_address_again(monkeypatch):
    nobody, lost = RendezvousError("nobody is there"), FirstRankLostError("it is gone")
    places = scripted_rendezvous(monkeypatch, iter([nobody, lost, nobody, nobody, "the group"]))
    assert survivors() == "the group"
    assert places == ["a:1", "b:1", "a:1", "b:1", "c:1"]


@pytest.mark.parametrize(("error", "tries"), [(RendezvousError, 3), (FirstRankLostError, 13)])
def test_survivors_without_a_rendezvous_raise(monkeypatch, error, tries):
    places = scripted_rendezvous(monkeypatch, itertools.repeat(error("in vain")))
    with pytest.raises(RendezvousError, match="in vain"):
        survivors()
    assert len(places) == tries


def test_run_elastic_wrong_numbers_of_workers_raise():
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["w:1"]}), "", "worker", 0)
    strategy = distribute.MultiWorkerMirroredStrategy(resolver)
    with pytest.raises(
        ValueError, match="min_workers=2 and max_workers=None do not match a cluster"
    ):
        strategy.run_elastic(lambda s: 1, 2)
    assert strategy.run_elastic(lambda s: s.num_replicas_in_sync) == 1
