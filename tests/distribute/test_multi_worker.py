"""`MultiWorkerMirroredStrategy`: several processes together compute the numbers of one device."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from ports import free_ports
from workers import ended, run, start

import pycollective as tf
from pycollective import array_backend, keras
from pycollective.cluster import ClusterSpec, SimpleClusterResolver
from pycollective.distribute import devices

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux")
D = tf.distribute
SIZES = [(2, 2), (3, 1), (4, 1)]
EVERY = [pytest.param(2, 1), *(pytest.param(*size, marks=pytest.mark.slow) for size in SIZES)]


# In one process -----------------------------------------------------------------------------------


@pytest.fixture
def no_launcher(monkeypatch):
    for name in ("TF_CONFIG", "PYCOLLECTIVE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_strategy_without_a_cluster_is_alone(no_launcher):
    strategy = D.MultiWorkerMirroredStrategy()
    assert isinstance(strategy, D.experimental.MultiWorkerMirroredStrategy)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.cluster_resolver.cluster_spec() == ClusterSpec({})
    two = D.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    assert two.num_replicas_in_sync == 2
    total = two.run(lambda: D.get_replica_context().all_reduce("SUM", tf.constant(1.5)))
    assert [float(t) for t in two.experimental_local_results(total)] == [3.0, 3.0]


def test_a_cluster_of_one_is_alone():
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["w:1"]}), "", "worker", 0)
    strategy = D.MultiWorkerMirroredStrategy(resolver)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.cluster_resolver is resolver
    assert strategy.extended.should_checkpoint


def test_strategy_arguments_of_another_type_raise():
    with pytest.raises(ValueError, match="cluster_resolver must be an instance of "):
        D.MultiWorkerMirroredStrategy("worker")
    with pytest.raises(ValueError, match="communication_options must be an instance of "):
        D.MultiWorkerMirroredStrategy(communication_options="RING")


def test_strategy_of_one_worker_logs_its_devices(no_launcher, caplog):
    caplog.set_level(logging.INFO, "pycollective")
    D.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    assert [r.getMessage() for r in caplog.records] == [
        "Single-worker MultiWorkerMirroredStrategy with local_devices = "
        "('/job:localhost/replica:0/task:0/device:CPU:0', "
        "'/job:localhost/replica:0/task:0/device:CPU:1'), communication = AUTO"
    ]


def test_log_line_names_the_description_of_the_cluster(no_launcher, monkeypatch, caplog):
    from pycollective.distribute import multi_worker

    class Joined(Exception):
        pass

    def joined(member, seconds):
        raise Joined

    monkeypatch.setattr(multi_worker, "join_workers", joined)
    caplog.set_level(logging.INFO, "pycollective")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    task = {"type": "worker", "index": 1}
    config = {"cluster": {"worker": addresses}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    torchrun = "torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)"
    spec = ClusterSpec({"worker": addresses})
    for given, end in (
        (None, f"communication = AUTO; described by TF_CONFIG, not by {torchrun}"),
        (
            SimpleClusterResolver(spec, "", "worker", 0),
            f"; described by Simple, an argument, not by TF_CONFIG, {torchrun}",
        ),
    ):
        caplog.clear()
        with pytest.raises(Joined):
            D.MultiWorkerMirroredStrategy(given, devices=["cpu:0"])
        (line,) = [text for text in caplog.messages if "described by" in text]
        assert line.endswith(end)
    config["task"] = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    D.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    assert caplog.messages[-1].startswith("Single-worker MultiWorkerMirroredStrategy with ")
    assert caplog.messages[-1].endswith(f"; described by TF_CONFIG, not by {torchrun}")


def test_a_strategy_that_has_joined_others_is_not_copied(no_launcher, monkeypatch):
    strategy = D.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    assert copy.deepcopy(strategy).num_replicas_in_sync == 1
    monkeypatch.setattr(strategy.extended.workers, "count", 2)
    with pytest.raises(
        ValueError, match="MultiWorkerMirroredStrategy cannot be deep copied in eager mode."
    ):
        copy.deepcopy(strategy)


def test_nccl_without_gpus_becomes_a_ring(no_launcher, caplog):
    options = D.experimental.CommunicationOptions(implementation="NCCL")
    strategy = D.MultiWorkerMirroredStrategy(communication_options=options, devices=["cpu:0"])
    assert "Enabled NCCL communication but no GPUs detected/specified." in caplog.text
    assert strategy.extended._options.implementation.value == "RING"


@pytest.mark.parametrize(
    ("cluster", "task", "message"),
    [
        (
            {"worker": ["a:1", "b:2"]},
            (None, None),
            "you must also specify `task_type` and `task_id`",
        ),
        ({"worker": ["a:1", "a:1"]}, ("worker", 0), r"cluster\['worker'\]\[1\] .* a:1"),
        ({"worker": ["a:1", "b"]}, ("worker", 0), r"cluster\['worker'\]\[1\] is 'b'"),
        ({"worker": ["a:1"]}, ("worker", 1), "The `task_id` 1 exceeds the maximum id of worker."),
        ({"worker": {0: "a:1", 2: "b:1"}}, ("worker", 0), "but not 1"),
    ],
)
def test_strategy_of_a_wrong_description_raises(cluster, task, message):
    resolver = SimpleClusterResolver(ClusterSpec(cluster), "", *task)
    with pytest.raises(ValueError, match=message):
        D.MultiWorkerMirroredStrategy(resolver)


@pytest.mark.parametrize(("visible", "gpus"), [("0,1,2,3", 2), ("3", 1), ("", 0)])
def test_gpus_are_counted_when_the_resolver_has_assigned_them(
    no_launcher, monkeypatch, visible, gpus
):
    """Each of two Slurm tasks on one machine has replicas on its own GPUs, not on all."""
    from pycollective.distribute import multi_worker

    for name, value in {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "t1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "CUDA_VISIBLE_DEVICES": visible,
        "PYCOLLECTIVE_CHECK_ADDRESSES": "0",  # there is no t1
    }.items():
        monkeypatch.setenv(name, value)

    def count():
        return len(list(filter(None, os.environ["CUDA_VISIBLE_DEVICES"].split(",")))), ""

    class Joined(Exception):
        pass

    def joined(member, seconds):
        raise Joined(member.size)

    counted = []

    def parse(names):
        counted.append([d.kind for d in devices.parse_devices(names)].count("GPU"))
        return devices.parse_devices("cpu:0")

    monkeypatch.setattr(array_backend, "gpu_count", count)
    monkeypatch.setattr(multi_worker, "parse_devices", parse)
    monkeypatch.setattr(multi_worker, "join_workers", joined)
    for _ in range(2):
        with pytest.raises(Joined, match="2"):
            D.MultiWorkerMirroredStrategy()
    assert counted == [gpus, gpus]


# Among processes ----------------------------------------------------------------------------------

_REDUCTIONS = """
strategy = strategy_of()
N = strategy.num_replicas_in_sync
_, me = strategy.extended.input_pipeline
say(n=N, me=me, chief=strategy.extended.should_checkpoint)
def ids():
    return tf.distribute.get_replica_context().replica_id_in_sync_group
found = strategy.run(ids)
say(ids=[int(i) for i in strategy.experimental_local_results(found)])
def step():
    c = tf.distribute.get_replica_context()
    i = float(c.replica_id_in_sync_group)
    x = tf.constant(np.full((3,), i + 1, np.float64))
    h = tf.constant(np.asarray(i + 1, np.float16))
    n = tf.constant(np.asarray(int(i) + 1, np.int32))
    total, halves, ints = c.all_reduce("SUM", [x, h, n])
    mean, int_mean = c.all_reduce("MEAN", [x, n])
    rows = c.all_gather(tf.constant(np.full((int(i) + 1, 2), i)), axis=0)
    columns = c.all_gather(tf.constant(np.full((2, 1), i)), axis=1)
    return total, halves, ints, mean, int_mean, rows, columns
names = ["total", "halves", "ints", "mean", "int_mean", "rows", "columns"]
for name, value in zip(names, strategy.run(step)):
    locally = strategy.experimental_local_results(value)
    say(**{name: locally[0].numpy()})
    assert all(np.array_equal(v.numpy(), locally[0].numpy()) for v in locally)
values = strategy.experimental_distribute_values_from_function(
    lambda c: tf.constant(np.full((2,), c.replica_id_in_sync_group, np.float64)))
say(sum=strategy.reduce("SUM", values, axis=None).numpy())
say(mean_of=strategy.reduce("MEAN", values, axis=None).numpy())
say(mean_all=strategy.reduce("MEAN", values, axis=0).numpy())
say(host=strategy.reduce("SUM", tf.constant(me + 1.0), axis=None).numpy())
say(gathered=strategy.gather(values, axis=0).numpy())
with strategy.scope():
    first = tf.Variable(np.random.default_rng().normal(size=4))
    counter = tf.Variable(np.int64(0), synchronization=tf.VariableSynchronization.ON_READ,
                          aggregation=tf.VariableAggregation.SUM)
    added = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    mean_of = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
    of_first = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
def assign():
    i = float(tf.distribute.get_replica_context().replica_id_in_sync_group)
    counter.assign_add(int(i) + 1)
    added.assign_add(tf.constant(i + 1, dtype="float32"))
    mean_of.assign(tf.constant(i, dtype="float32"))
    of_first.assign(tf.constant(i + 7, dtype="float32"))
strategy.run(assign)
say(first=first.numpy(), counter=int(counter), added=float(added))
say(averaged=float(mean_of), of_first=float(of_first))
counter.assign(np.int64(7))
say(restored=int(counter), share=[int(v.numpy()) for v in counter.values])
"""


@pytest.mark.parametrize(("workers", "replicas"), EVERY)
def test_reductions_over_workers_give_the_same_results(tmp_path, workers, replicas):
    done = run(tmp_path, workers, _REDUCTIONS, replicas, PYCOLLECTIVE_DEBUG="INFO")
    said = done.said
    for error in done.errors:
        assert "MultiWorkerMirroredStrategy with cluster_spec = {'worker': ['127.0.0.1:" in error
        assert f"num_workers = {workers}" in error
        assert error.count("; described by TF_CONFIG\n") == 1
        waited = error.index("Waiting for the cluster, timeout = 30\n")
        assert "Cluster is ready.\n" in error[waited:]
    n = workers * replicas
    i = np.arange(n, dtype=float)
    shares = []
    for me, own in enumerate(said):
        assert (own["n"], own["me"], own["chief"]) == (n, me, me == 0)
        assert own["ids"] == list(range(me * replicas, (me + 1) * replicas))
        assert own["total"] == [float((i + 1).sum())] * 3
        assert own["halves"] == own["ints"] == (i + 1).sum()
        np.testing.assert_allclose(own["mean"], (i + 1).mean())
        np.testing.assert_allclose(own["int_mean"], (i + 1).mean())
        rows = np.concatenate([np.full((int(k) + 1, 2), k) for k in i])
        np.testing.assert_array_equal(own["rows"], rows)
        np.testing.assert_array_equal(own["columns"], [i, i])
        assert own["sum"] == [i.sum()] * 2
        np.testing.assert_allclose(own["mean_of"], [i.mean()] * 2)
        np.testing.assert_allclose(own["mean_all"], i.mean())
        assert own["host"] == sum(range(1, workers + 1))
        assert own["gathered"] == np.repeat(i, 2).tolist()
        assert own["first"] == said[0]["first"]
        assert own["counter"] == own["added"] == (i + 1).sum()
        assert (own["averaged"], own["of_first"]) == (pytest.approx(i.mean()), 7.0)
        assert own["restored"] == 7
        shares += own["share"]
    assert sum(shares) == 7


_MODEL = """
def data(rows):
    rng = np.random.default_rng(5)
    return rng.normal(size=(rows, 6)), rng.integers(0, 3, rows)
def model_of():
    tf.keras.backend.set_floatx("float64")
    rng = np.random.default_rng(7)
    layers = [tf.keras.layers.Dense(8, activation="tanh"), tf.keras.layers.Dense(3)]
    model = tf.keras.Sequential(layers)
    model.compile(tf.keras.optimizers.Adam(0.01),
                  tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.build((None, 6))
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    return model
def trained(model):
    x, y = data(37)
    history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    loss, accuracy = model.evaluate(x, y, batch_size=8, verbose=0)
    return {"losses": history.history["loss"], "loss": loss, "accuracy": accuracy,
            "predicted": model.predict(x, batch_size=8, verbose=0),
            "weights": np.concatenate([np.ravel(w) for w in model.get_weights()])}
"""


@pytest.mark.parametrize(("workers", "replicas"), EVERY)
def test_fit_evaluate_and_predict_equal_those_of_one_device(tmp_path, workers, replicas):
    """Losses, weights, and numbers of a ragged last batch are those of one device."""
    body = _MODEL + (
        "\nstrategy = strategy_of()\nwith strategy.scope():\n    model = model_of()\n"
        "say(**trained(model))\n"
    )
    said = run(tmp_path, workers, body, replicas).said
    before = keras.backend.floatx()
    here = {"np": np, "tf": tf}
    exec(_MODEL, here)
    try:
        alone = here["trained"](here["model_of"]())
    finally:
        keras.backend.set_floatx(before)
    for own in said:
        assert own == said[0]  # to the last bit
        for name, value in alone.items():
            np.testing.assert_allclose(own[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.slow
def test_custom_loop_of_workers_with_uneven_shards_ends_on_all(tmp_path):
    """The last worker is started first, shards are uneven, and all agree on the end."""
    body = """
strategy = strategy_of()
with strategy.scope():
    w = tf.Variable(np.zeros(2))
    optimizer = tf.keras.optimizers.SGD(0.1)
    seen = tf.keras.metrics.Sum(dtype="float64")
def dataset_fn(context):
    rows = 3 + 4 * context.input_pipeline_id
    return tf.data.Dataset.from_tensor_slices(np.arange(rows * 2.0).reshape(rows, 2)).batch(2)
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((x - w) ** 2) / 10.0
    optimizer.apply_gradients([(tape.gradient(loss, w), w)])
    seen.update_state(tf.reduce_sum(x))
    return loss
losses = []
for x in strategy.distribute_datasets_from_function(dataset_fn):
    losses.append(float(strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)))
from pycollective import _core, _nn
say(losses=losses, w=w.numpy(), seen=float(seen.result()))
say(share=_nn.threads() <= max(1, _core.usable_cores() // 2))
"""
    ports = free_ports(2)
    cluster = {"chief": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]}
    last = start(tmp_path, [("worker", 0)], body, cluster=cluster)
    time.sleep(1.5)
    first = start(tmp_path, [("chief", 0)], body, cluster=cluster)
    said = ended(first + last).said
    assert said[0] == said[1]
    assert said[0]["share"]  # the two workers divide the host's cores
    assert len(said[0]["losses"]) == 4
    assert said[0]["seen"] == sum(range(6)) + sum(range(14))


@pytest.mark.slow
def test_an_evaluator_is_on_its_own(tmp_path):
    body = """
strategy = strategy_of()
say(n=strategy.num_replicas_in_sync, total=float(strategy.reduce("SUM", tf.constant(1.0), axis=None)))
"""
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    done = ended(start(tmp_path, [("evaluator", 0)], body, cluster=cluster))
    assert done.said == [{"n": 1, "total": 1.0}]


_MORE = """
import os
strategy = strategy_of()
me = strategy.extended.input_pipeline[1]
def slices():
    i = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
    rows = tf.IndexedSlices(tf.constant(np.full((i + 1, 2), i + 1.0)), tf.constant(np.arange(i + 1)))
    total = tf.distribute.get_replica_context().all_reduce("SUM", rows)
    return tf.convert_to_tensor(total.values), total.indices
values, indices = strategy.run(slices)
say(values=strategy.experimental_local_results(values)[-1].numpy(),
    indices=strategy.experimental_local_results(indices)[-1].numpy())
def gradients():
    c = tf.distribute.get_replica_context()
    i = float(c.replica_id_in_sync_group)
    x = tf.constant([i + 1.0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        summed = c.all_reduce("SUM", x) * (i + 2.0)
        gathered = c.all_gather(x, axis=0)
        weighted = tf.reduce_sum(gathered * gathered)
    return tape.gradient(summed, x), tape.gradient(weighted, x)
for name, value in zip(["of_sum", "of_gather"], strategy.run(gradients)):
    say(**{name: [float(v[0]) for v in strategy.experimental_local_results(value)]})
with strategy.scope():
    table = tf.Variable(np.zeros((4, 2)), aggregation=tf.VariableAggregation.SUM)
    first = tf.Variable(np.zeros((4, 2)), aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    seen = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ,
                       aggregation=tf.VariableAggregation.SUM)
def scatter():
    i = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
    rows = tf.IndexedSlices(tf.constant(np.ones((i + 1, 2))), tf.constant(np.arange(i + 1) % 4))
    table.scatter_add(rows)
    first.scatter_update(tf.IndexedSlices(tf.constant(np.asarray([[i + 5.0, 1.0]] * (i + 1))),
                                          tf.constant(np.arange(i + 1) % 4)))
    seen.assign_add(float(i + 1))
strategy.run(scatter)
say(table=table.numpy(), of_first=first.numpy())
checkpoint = tf.train.Checkpoint(table=table, seen=seen)
path = checkpoint.save("saved/ckpt")
say(path=path, written=sorted(os.listdir("saved")))
tf.train.Checkpoint(table=table).write(f"own_{me}/ckpt")
say(own=os.path.isdir(f"own_{me}"))
table.assign(np.zeros((4, 2)))
seen.assign(0.0)
checkpoint.restore(tf.train.latest_checkpoint("saved")).assert_consumed()
say(restored=table.numpy(), seen=float(seen))
try:
    checkpoint.write("/proc/no/such/place")
except Exception as error:
    say(failed=type(error).__name__)
say(described=strategy.describe())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (2, 2)])
def test_collectives_gradients_and_checkpoints_of_workers_are_right(tmp_path, workers, replicas):
    said = run(tmp_path, workers, _MORE, replicas).said
    n = workers * replicas
    rows = np.concatenate([np.full((i + 1, 2), i + 1.0) for i in range(n)])
    table = np.zeros((4, 2))
    for i in range(n):
        np.add.at(table, np.arange(i + 1) % 4, 1.0)
    for me, own in enumerate(said):
        assert own["values"] == rows.tolist()
        assert own["indices"] == [k for i in range(n) for k in range(i + 1)]
        assert own["of_sum"] == [sum(i + 2.0 for i in range(n))] * replicas
        local_ids = range(me * replicas, (me + 1) * replicas)
        assert own["of_gather"] == [n * 2 * (i + 1.0) for i in local_ids]
        assert own["table"] == own["restored"] == table.tolist()
        assert own["of_first"] == [[5.0, 1.0]] + [[0.0, 0.0]] * 3
        assert own["written"] == said[0]["written"]
        assert own["own"]
        assert own["seen"] == sum(range(1, n + 1))
        assert "failed" in own
        assert f"replica {me * replicas}: " in own["described"]
        assert f"among {workers} workers" in own["described"]


@pytest.mark.slow
def test_fit_shuffles_alike_and_stops_alike(tmp_path):
    """Arrays get one order on all workers; callbacks see the same numbers, and the chief writes."""
    body = (
        _MODEL
        + """
strategy = strategy_of()
with strategy.scope():
    model = model_of()
x, y = data(30)
stop = tf.keras.callbacks.EarlyStopping(monitor="loss", min_delta=10.0, patience=1)
save = tf.keras.callbacks.ModelCheckpoint("best", save_weights_only=True)
history = model.fit(x, y, batch_size=8, epochs=9, verbose=0, callbacks=[stop, save])
restored = tf.train.Checkpoint(model=model).read("best")
say(losses=history.history["loss"], weights=np.concatenate([np.ravel(w) for w in model.get_weights()]))
"""
    )
    first, second = run(tmp_path, 2, body).said
    assert first == second
    assert len(first["losses"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_strategies_one_after_another_under_pycollective_run_work(tmp_path, transport):
    (tmp_path / "script.py").write_text(
        """
import pycollective as tf
first = tf.distribute.MultiWorkerMirroredStrategy()
if TRANSPORT == "shm":
    first.close()
second = tf.distribute.MultiWorkerMirroredStrategy()
print("total", float(second.reduce("SUM", tf.constant(1.5), axis=None)))
""".replace("TRANSPORT", repr(transport))
    )
    words = ["run", "-n", "2", "--transport", transport, "script.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pycollective", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "total 3.0\n" * 2, done


_EVERYTHING = """
tf.keras.backend.set_floatx("float64")
def everything():
    rng = np.random.default_rng(11)
    model = tf.keras.Sequential([
        tf.keras.layers.Dense(6, activation="relu", kernel_regularizer=tf.keras.regularizers.L2(0.01)),
        tf.keras.layers.BatchNormalization(synchronized=True),
        tf.keras.layers.Dense(1),
    ])
    optimizer = tf.keras.optimizers.LossScaleOptimizer(
        tf.keras.optimizers.AdamW(0.01, clipnorm=1.0), initial_scale=8.0, dynamic_growth_steps=3)
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=2, accumulate_steps=2)
    model.build((None, 4))
    model.set_weights([rng.normal(size=w.shape) ** 2 for w in model.get_weights()])
    return model
def trained(model, **options):
    rng = np.random.default_rng(12)
    x, y = rng.normal(size=(44, 4)), rng.normal(size=(44, 1))
    options |= {"shuffle": False, "verbose": 0, "validation_data": (x[:9], y[:9])}
    history = model.fit(x, y, batch_size=8, **options)
    return {name: values for name, values in history.history.items()} | {
        "weights": np.concatenate([np.ravel(w) for w in model.get_weights()])}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (2, 2)])
def test_fit_with_all_settings_equals_that_of_one_device(tmp_path, workers, replicas):
    """Synchronized batch normalization, accumulation, loss scale, clipping, an interruption."""
    body = (
        _EVERYTHING
        + """
strategy = strategy_of()
with strategy.scope():
    model = everything()
say(**trained(model, epochs=4))
class Stop(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt
with strategy.scope():
    model = everything()
backup = tf.keras.callbacks.BackupAndRestore("backup")
try:
    trained(model, epochs=4, callbacks=[backup, Stop()])
except KeyboardInterrupt:
    pass
with strategy.scope():
    model = everything()
again = trained(model, epochs=4, callbacks=[tf.keras.callbacks.BackupAndRestore("backup")])
say(again=again["weights"], epochs=len(again["loss"]))
"""
    )
    said = run(tmp_path, workers, body, replicas).said
    before = keras.backend.floatx()
    here = {"np": np, "tf": tf}
    try:
        exec(_EVERYTHING, here)
        alone = here["trained"](here["everything"](), epochs=4)
    finally:
        keras.backend.set_floatx(before)
    for own in said:
        assert own == said[0]
        for name, value in alone.items():
            np.testing.assert_allclose(own[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
        assert own["again"] == own["weights"]
        assert own["epochs"] == 2


@pytest.mark.slow
def test_all_restore_the_same_checkpoint_or_none_does(tmp_path):
    body = """
strategy = strategy_of()
own = strategy.extended.first_replica
with strategy.scope():
    v = tf.Variable(np.zeros(3))
checkpoint = tf.train.Checkpoint(v=v)
paths = [checkpoint.write(f"saved{own}")]
v.assign(np.ones(3))
paths.append(checkpoint.write(f"later{own}"))
for choice in ((None, paths[0]), (paths[0], paths[1]), ("nowhere", paths[0])):
    try:
        checkpoint.read(choice[own])
    except tf.CheckpointError as error:
        print(error)
say(kept=v.numpy())
checkpoint.read(paths[0])  # equal copies at different places
say(restored=v.numpy())
"""
    done = run(tmp_path, 2, body)
    for own in done.said:
        assert own == {"kept": [1.0] * 3, "restored": [0.0] * 3}
    missing, *differ = done.outputs[0].splitlines()[2::-1]
    assert "'nowhere'" in missing
    other = done.outputs[1].splitlines()
    assert differ == other[1::-1]
    assert re.match(
        "the workers restore different checkpoints: worker 0: nothing; worker 1: 'saved1', SHA-256 "
        "[0-9a-f]{64}. All need the same one",
        other[0],
    )
    assert re.search("worker 0: 'saved0', SHA-256 .*; worker 1: 'later1', SHA-256", other[1])
    assert "worker 0: 'nowhere', which it cannot read; worker 1: 'saved1', SHA" in other[2]
