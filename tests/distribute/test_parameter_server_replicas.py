"""`ParameterServerStrategy` with a replica on each GPU of a worker, and a stand-in for CuPy."""

from __future__ import annotations

import json
import threading

import hangs
import numpy as np
import pytest
from device_arrays import DeviceArray
from ports import free_ports
from server_clusters import BEGIN, ending, start

import pycollective as tf
from pycollective import array_backend
from pycollective.distribute.sharded import ShardedVariable
from pycollective.distribute.values import PerReplica

P = tf.distribute.experimental.partitioners


@pytest.fixture(params=[2, 1])
def gpus(cupy, monkeypatch, request):
    monkeypatch.setattr(array_backend, "gpu_count", lambda: (request.param, ""))
    return request.param


def made(**options):
    strategy = tf.distribute.ParameterServerStrategy(**options)
    return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


def replica_id():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def test_each_worker_has_a_replica_on_each_gpu(gpus):
    strategy, coordinator = made()
    assert strategy.num_replicas_in_sync == gpus
    each = ", each with 2 replicas" if gpus > 1 else ""
    assert strategy.describe().splitlines()[0] == f"workers: 2 threads of this process{each}"
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        size = context.get_per_replica_batch_size(4)
        return tf.data.Dataset.range(4).batch(size).repeat()

    per_worker = coordinator.create_per_worker_dataset(
        lambda: strategy.distribute_datasets_from_function(dataset_fn)
    )
    iterator = iter(per_worker)

    def replica(x):
        assert isinstance(x.array, DeviceArray)
        context = tf.distribute.get_replica_context()
        assert x.array.device.id == context.local_replica_id
        assert tf.distribute.coordinator.experimental_get_current_worker_index() in (0, 1)
        return context.all_reduce("SUM", tf.reduce_sum(x))

    @tf.function
    def step(iterator):
        return strategy.run(replica, args=(next(iterator),))

    found = coordinator.schedule(step, (iterator,)).get()
    found = found.values if gpus > 1 else (found,)
    assert [int(value) for value in found] == [6] * gpus
    assert {(c.num_input_pipelines, c.num_replicas_in_sync) for c in contexts} == {(1, gpus)}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("SUM", 3.0), ("MEAN", 1.5), ("ONLY_FIRST_REPLICA", 1.0)],
)
def test_assignments_of_replicas_are_aggregated_within_the_worker(
    gpus, aggregation, expected, shards
):
    strategy, coordinator = made(variable_partitioner=P.FixedShardsPartitioner(shards))
    with strategy.scope():
        v = tf.Variable(np.zeros((2, 3)), aggregation=getattr(tf.VariableAggregation, aggregation))
    assert isinstance(v, ShardedVariable) == (shards > 1)

    def replica():
        v.assign_add(np.full((2, 3), 1.0 + int(replica_id())))

    @tf.function
    def step():
        strategy.run(replica)

    for _ in range(5):
        coordinator.schedule(step)
    coordinator.join()
    assert v.numpy().tolist() == [[5 * (expected if gpus > 1 else 1.0)] * 3] * 2


def test_sums_of_replicas_are_one_variable_on_a_server(gpus):
    strategy, coordinator = made()
    kind = {
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.SUM,
    }
    with strategy.scope():
        v = tf.Variable(5.0, **kind)

    def replica():
        v.assign(1.0 + int(replica_id()))
        v.assign_add(2.0)
        assert isinstance(tf.convert_to_tensor(v).array, DeviceArray)

    coordinator.schedule(tf.function(lambda: strategy.run(replica))).get()
    assert float(v.numpy()) == {1: 3, 2: 7}[gpus]
    assert v.device == "/job:ps/replica:0/task:0/device:CPU:0"


def test_assignment_without_aggregation_raises_in_replicas(gpus):
    strategy, coordinator = made()
    with strategy.scope():
        v = tf.Variable(1.0)
    coordinator.schedule(tf.function(lambda: strategy.run(lambda: v.assign(2.0))))
    with pytest.raises(ValueError, match="You must specify an aggregation method to update"):
        coordinator.join()


def test_workers_run_their_replicas_at_the_same_time(gpus):
    strategy, coordinator = made(num_workers=3)
    meeting = threading.Barrier(3 * gpus, timeout=hangs.SECONDS)
    step = tf.function(lambda: strategy.run(meeting.wait))
    for _ in range(2):
        for _ in range(3):
            coordinator.schedule(step)
        coordinator.join()


def test_replica_that_fails_ends_only_its_workers_step(gpus):
    strategy, coordinator = made()
    begun, failed = threading.Event(), threading.Event()

    def other():
        context = tf.distribute.get_replica_context()
        begun.set()
        assert failed.wait(hangs.SECONDS)
        return context.all_reduce("SUM", tf.constant(1.0))

    def fails():
        assert begun.wait(hangs.SECONDS)
        if replica_id() == gpus - 1:
            raise ZeroDivisionError("in a replica")
        tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))

    @tf.function
    def fail():
        try:
            strategy.run(fails)
        finally:
            failed.set()

    value = coordinator.schedule(tf.function(lambda: strategy.run(other)))
    coordinator.schedule(fail)
    with pytest.raises(ZeroDivisionError, match="in a replica"):
        coordinator.join()
    found = value.get()
    assert float(found.values[0] if gpus > 1 else found) == gpus


def test_results_have_a_component_for_each_replica(gpus):
    strategy, coordinator = made()
    value = coordinator.schedule(tf.function(lambda: strategy.run(lambda: replica_id() * 2)))
    found = value.fetch()
    if gpus == 1:
        assert found == 0
    else:
        assert isinstance(found, PerReplica) and found.values == (0, 2)
        assert isinstance(found.values[0], (np.ndarray, np.generic))
        assert isinstance(value.get().values[1], tf.Tensor)


def test_variable_of_each_worker_is_that_of_its_replicas(gpus):
    strategy, coordinator = made()
    with strategy.scope():
        v = tf.Variable(0.0, per_worker_variable=True)
    step = tf.function(lambda: strategy.run(lambda: v.assign_add(1.0)) and None)
    for _ in range(6):
        coordinator.schedule(step)
    coordinator.join()
    assert sum(float(value) for value in v.read_all()) == 6 * gpus


def trained(strategy, run, table_rows, how, rule, steps=3):
    """Return variables after steps on equal batches of 4 rows."""
    rng = np.random.default_rng(0)
    x, ids = rng.normal(size=(4, 3)).astype(np.float32), np.array([0, 4, 4, 1])
    with strategy.scope():
        w = tf.Variable(np.ones((3, 2), np.float32), name="w")
        table = tf.Variable(np.ones((table_rows, 2), np.float32), name="table")
        optimizer = getattr(tf.keras.optimizers, rule)(0.1)
    parts = [*getattr(w, "variables", [w]), *getattr(table, "variables", [table])]
    devices = strategy.extended.devices

    def replica():
        number = int(replica_id())
        rows = np.array_split(np.arange(4), len(devices))[number]
        place = devices[number].place
        with tf.GradientTape() as tape:
            y = tf.matmul(tf.Tensor(place(x[rows])), tf.convert_to_tensor(w))
            y = y * tf.nn.embedding_lookup(table, tf.Tensor(place(ids[rows])))
            loss = tf.reduce_sum(tf.square(y)) / 4.0
        if how == "minimize":
            optimizer.minimize(loss, parts, tape)
            return
        gradients = tape.gradient(loss, parts)
        if table_rows > 1000:
            assert isinstance(gradients[-1], tf.IndexedSlices)
        if how == "rows":
            half = len(parts) // 2  # w and the table have equally many shards
            optimizer.apply_gradients(zip(gradients[half:], parts[half:], strict=True))
        else:
            optimizer.apply_gradients(zip(gradients, parts, strict=True))

    for _ in range(steps):
        run(lambda: strategy.run(replica))
    assert int(optimizer.iterations.numpy()) == steps
    return w.numpy(), table.numpy()


@pytest.mark.parametrize("table_rows", [5, 10_000])  # of the larger one, rows alone are read
@pytest.mark.parametrize("how", ["apply", "minimize", "rows"])
@pytest.mark.parametrize("rule", ["Adam", "Adagrad"])  # Adagrad changes rows with a gradient alone
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.usefixtures("gpus")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_training_gives_the_values_of_one_replica(shards, table_rows, how, rule):
    strategy, coordinator = made(variable_partitioner=P.FixedShardsPartitioner(shards))

    def run(step):
        coordinator.schedule(tf.function(step)).get()

    found = trained(strategy, run, table_rows, how, rule)
    one = tf.distribute.OneDeviceStrategy("cpu:0")
    expected = trained(one, lambda step: step(), table_rows, how, rule)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def classifier(strategy):
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((3,)),
                tf.keras.layers.Dense(4, activation="relu", kernel_initializer="ones"),
                tf.keras.layers.Dense(2, kernel_initializer="ones"),
            ]
        )
        model.compile(optimizer=tf.keras.optimizers.SGD(0.01), loss="mse", metrics=["mae", "mse"])
    return model


@pytest.mark.usefixtures("gpus")
def test_fit_evaluate_and_predict_give_the_values_of_one_replica():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(11, 3)).astype(np.float32), rng.normal(size=(11, 2)).astype(np.float32)
    weights = rng.uniform(size=11).astype(np.float32)
    found = []
    for strategy in (
        tf.distribute.ParameterServerStrategy(num_workers=1),
        tf.distribute.OneDeviceStrategy("cpu:0"),
    ):
        model = classifier(strategy)
        log = model.fit(
            x, y, sample_weight=weights, batch_size=4, epochs=2, shuffle=False, verbose=0
        )
        values = [log.history["loss"], log.history["mae"], model.evaluate(x, y, verbose=0)]
        values += [model.train_on_batch(x[:3], y[:3]), model.predict(x, verbose=0)]
        found.append([*values, *model.get_weights()])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_fit_reads_a_dataset_of_each_worker(gpus):
    sizes = []

    def dataset_fn(context):
        sizes.append(context.get_per_replica_batch_size(4))
        data = np.ones((8, 3), np.float32), np.zeros((8, 2), np.float32)
        return tf.data.Dataset.from_tensor_slices(data).batch(sizes[-1]).repeat()

    strategy = tf.distribute.ParameterServerStrategy()
    model = classifier(strategy)
    creator = tf.keras.utils.experimental.DatasetCreator(dataset_fn)
    log = model.fit(creator, steps_per_epoch=6, epochs=3, verbose=0)
    assert log.history["loss"][0] > log.history["loss"][2]
    assert set(sizes) == {4 // gpus}


def test_checkpoint_is_restored_with_another_number_of_replicas(gpus, tmp_path):
    strategy, _ = made(variable_partitioner=P.FixedShardsPartitioner(2))
    with strategy.scope():
        v = tf.Variable(np.arange(6.0).reshape(3, 2), aggregation=tf.VariableAggregation.SUM)
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    plain = tf.Variable(np.zeros((3, 2)))
    tf.train.Checkpoint(v=plain).restore(path)
    assert plain.numpy().tolist() == np.arange(6.0).reshape(3, 2).tolist()
    v.assign(np.zeros((3, 2)))
    tf.train.Checkpoint(v=v).restore(path)
    assert v.numpy().tolist() == plain.numpy().tolist()


@pytest.mark.usefixtures("gpus")
def test_estimator_trains_shards(tmp_path):
    strategy, _ = made(variable_partitioner=P.FixedShardsPartitioner(2))
    x = np.linspace(-1, 1, 40, dtype=np.float32).reshape(10, 4)

    def input_fn():
        data = {"x": x}, x.sum(1, keepdims=True)
        return tf.data.Dataset.from_tensor_slices(data).repeat().batch(10)

    regressor = tf.estimator.LinearRegressor(
        [tf.feature_column.numeric_column("x", shape=(4,))],
        optimizer=tf.keras.optimizers.SGD(0.1),
        model_dir=tmp_path,
        config=tf.estimator.RunConfig(train_distribute=strategy),
    )
    regressor.train(input_fn, steps=100)
    assert regressor.evaluate(input_fn, steps=2)["loss"] < 0.01


# Processes ----------------------------------------------------------------------------------------

STAND_IN = """
import json, os, sys
import device_arrays
from pycollective import array_backend
from pycollective.comm import on_device
sys.modules["cupy"] = device_arrays.make_cupy()
on_device.runtime = lambda: None
task = json.loads(os.environ["TF_CONFIG"])["task"]
array_backend.gpu_count = lambda: (GPUS[task["type"]][task["index"]], "")
"""


def output(tmp_path, counts, script):
    """Return the chief's output; ``counts`` has the number of GPUs of each task by its job."""
    path = tmp_path / "script.py"
    path.write_text(f"GPUS = {counts!r}\n{STAND_IN}{BEGIN}{script}")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(1 + len(counts["worker"]))]
    cluster = {"ps": addresses[:1], "worker": addresses[1:]}
    with ending() as tasks:
        tasks.append(start(path, "ps", cluster))
        tasks += [start(path, "worker", cluster, i) for i in range(len(counts["worker"]))]
        chief = start(path, "chief", cluster)
        tasks.append(chief)
        said, errors = chief.communicate(timeout=hangs.SECONDS)
    return chief.returncode, said, errors


STEPS = """
with strategy.scope():
    v = tf.Variable(np.zeros(3, np.float32), aggregation=tf.VariableAggregation.SUM)
    w = tf.Variable(np.zeros(3, np.float32), name="w")
    optimizer = tf.keras.optimizers.Adam(1.0)

def replica():
    context = tf.distribute.get_replica_context()
    assert type(tf.convert_to_tensor(v).array).__name__ == "DeviceArray"
    v.assign_add(tf.ones(3))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(w)
    optimizer.apply_gradients([(tape.gradient(loss, w), w)])
    return context.replica_id_in_sync_group

@tf.function
def step():
    ids = strategy.run(replica)
    return ids, [slot.local()._slot_of for slot in optimizer.variables if slot.ndim]

found = [coordinator.schedule(step).get() for _ in range(4)]
ids, slots = [[int(i) for i in ids.values] for ids, _ in found], found[-1][1]
print(strategy.num_replicas_in_sync, v.numpy().tolist(), w.numpy().round(3).tolist(), ids, slots)
"""


@pytest.mark.slow
@pytest.mark.parametrize("of_chief", [0, 2])
@pytest.mark.parametrize("transport", ["", "tcp"])
def test_replicas_of_workers_in_processes(tmp_path, monkeypatch, transport, of_chief):
    monkeypatch.setenv("PYCOLLECTIVE_TRANSPORT", transport) if transport else None
    counts = {"chief": [of_chief], "ps": [0], "worker": [2, 2]}
    status, said, errors = output(tmp_path, counts, STEPS)
    expected = f"2 {[8.0] * 3} {[-4.0] * 3} {[[0, 1]] * 4} {['w#0'] * 2}"
    assert (status, said.strip()) == (0, expected), errors


FIT = """
with strategy.scope():
    dense = tf.keras.layers.Dense(2, kernel_initializer="ones")
    model = tf.keras.Sequential([tf.keras.Input((3,)), dense])
    model.compile(optimizer=tf.keras.optimizers.SGD(0.01), loss="mse", metrics=["mae"])
x, y = np.arange(33, dtype=np.float32).reshape(11, 3) / 33, np.zeros((11, 2), np.float32)
model.fit(x, y, batch_size=11, epochs=3, verbose=0)
print([*model.evaluate(x, y, batch_size=4, verbose=0), float(model.predict(x, verbose=0).sum())])
"""


@pytest.mark.slow
def test_fit_with_replicas_of_workers_in_processes(tmp_path, capsys):
    counts = {"chief": [0], "ps": [0], "worker": [2, 2]}
    status, said, errors = output(tmp_path, counts, FIT)
    exec(FIT, {"strategy": tf.distribute.OneDeviceStrategy("cpu:0"), "tf": tf, "np": np})
    expected = capsys.readouterr().out
    assert status == 0, errors
    np.testing.assert_allclose(json.loads(said), json.loads(expected), rtol=1e-5)


@pytest.mark.slow
def test_workers_with_different_numbers_of_gpus_raise(tmp_path):
    counts = {"chief": [0], "ps": [0], "worker": [2, 1]}
    status, _, errors = output(tmp_path, counts, STEPS)
    assert status == 1
    text = (
        "ValueError: Mismatched number of GPUs per worker: worker 0 has 2, worker 1 has 1. Let all"
    )
    assert text in errors
