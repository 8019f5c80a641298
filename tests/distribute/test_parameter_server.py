"""`ParameterServerStrategy`: placement of variables, shards, checkpoints, and asynchronous training."""

from __future__ import annotations

import copy
import json
import logging
import threading
import time

import hangs
import numpy as np
import pytest
from ports import free_ports
from strategies import mirrored

import pycollective as tf
from pycollective.cluster import ClusterSpec, SimpleClusterResolver
from pycollective.distribute import task_links
from pycollective.distribute.coordinator import ClusterCoordinator
from pycollective.distribute.sharded import ShardedVariable
from pycollective.errors import UnavailableError

P = tf.distribute.experimental.partitioners


def servers(shards=None, **options):
    """Return a strategy; ``shards`` is the number of shards of each variable."""
    partitioner = None if shards is None else P.FixedShardsPartitioner(shards)
    return tf.distribute.ParameterServerStrategy(variable_partitioner=partitioner, **options)


def table(rows=7, shards=3, **options):
    with servers(shards).scope():
        return tf.Variable(np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2), **options)


def whole(rows=7):
    return np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)


# The constructor ----------------------------------------------------------------------------------


def resolver(**jobs):
    return SimpleClusterResolver(ClusterSpec(jobs))


@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        ({}, "Cluster spec must be non-empty in cluster_resolver"),
        ({"worker": ["a:1"]}, "There must be at least one ps."),
        ({"ps": ["a:1"]}, "There must be at least one worker."),
        ({"ps": ["a:1"], "worker": ["b:1"], "queen": ["c:1"]}, "Disallowed task type found"),
        ({"ps": ["a:1", "a:0"], "worker": ["b:1"]}, "has the address .a:0.: give it a port"),
    ],
)
def test_strategy_wrong_cluster_raises(jobs, text):
    with pytest.raises(ValueError, match=text):
        tf.distribute.ParameterServerStrategy(resolver(**jobs))


@pytest.mark.parametrize(
    ("task", "number", "text"),
    [
        ("queen", 0, "Unrecognized task_type: queen"),
        ("worker", 1, "`task_id` 1 exceeds the maximum id of worker"),
        ("ps", None, "`task_id` of task type .ps. must be given"),
    ],
)
def test_strategy_task_that_is_not_in_the_cluster_raises(monkeypatch, task, number, text):
    monkeypatch.setattr(task_links, "JOIN_SECONDS", 0.1)  # else an unknown task waits as the chief
    cluster = resolver(ps=["127.0.0.1:1"], worker=["127.0.0.1:2"])
    cluster.task_type, cluster.task_id = task, number
    with pytest.raises(ValueError, match=text):
        tf.distribute.ParameterServerStrategy(cluster)


def test_strategy_task_that_does_not_listen_raises(monkeypatch):
    monkeypatch.setattr(task_links, "JOIN_SECONDS", 0.1)
    address, other = (f"127.0.0.1:{port}" for port in free_ports(2))
    jobs = {"ps": [address], "worker": [other]}
    text = "chief did not reach /job:ps/task:0 at 127.0.0.1:.* Start the same program"
    with pytest.raises(UnavailableError, match=text):
        tf.distribute.ParameterServerStrategy(resolver(**jobs))


def test_evaluator_connects_to_no_task(monkeypatch, caplog):
    jobs = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": "evaluator", "index": 0}})
    )
    strategy = tf.distribute.ParameterServerStrategy(num_workers=3)
    assert "workers: 3 threads of this process" in strategy.describe()
    assert "this is the cluster's evaluator" in caplog.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_workers": 0}, "There must be at least one worker."),
        ({"num_ps": 0}, "There must be at least one ps."),
        ({"consistency": "some"}, "consistency must be 'locked' or 'hogwild', got 'some'"),
        ({"recover": True}, "recover=True needs snapshot_dir"),
        ({"snapshot_seconds": 0}, "snapshot_seconds must be a positive number of seconds, not 0"),
    ],
)
def test_strategy_wrong_option_raises(options, text):
    with pytest.raises(ValueError, match=text):
        servers(**options)


def test_strategy_partitioner_that_is_no_function_raises():
    with pytest.raises(TypeError, match="function of shape and dtype, or .balanced., got 3"):
        tf.distribute.ParameterServerStrategy(variable_partitioner=3)


def test_strategy_has_one_replica_and_its_servers():
    strategy = servers(num_ps=2)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.extended.parameter_devices == (
        "/job:ps/replica:0/task:0/device:CPU:0",
        "/job:ps/replica:0/task:1/device:CPU:0",
    )
    with strategy.scope():
        first, second = tf.Variable(np.zeros((3, 2), np.float32)), tf.Variable(np.float32(0))
    assert strategy.describe().splitlines() == [
        "workers: 2 threads of this process",
        "/job:ps/replica:0/task:0/device:CPU:0: 1 variables, 24 bytes",
        "/job:ps/replica:0/task:1/device:CPU:0: 1 variables, 4 bytes",
    ]
    del second
    loads = strategy.extended.load().values()
    assert list(loads) == [{"variables": 1, "bytes": 24}, {"variables": 0, "bytes": 0}]
    del first
    assert not any(strategy.extended.load()[strategy.extended.parameter_devices[0]].values())


def test_run_outside_of_a_worker_warns_once(caplog):
    strategy = servers()
    with caplog.at_level(logging.WARNING, "pycollective"):
        assert int(strategy.run(lambda: tf.constant(3))) == 3
        assert float(strategy.reduce("SUM", tf.constant(2.0), axis=None)) == 2
        ClusterCoordinator(strategy).schedule(tf.function(lambda: strategy.run(lambda: 1))).get()
    assert caplog.text.count("is executed locally on the coordinator") == 1


# Placement ----------------------------------------------------------------------------------------


def servers_of(variables):
    return [int(v.device.split("task:")[1].split("/")[0]) for v in variables]


def test_variables_are_placed_on_the_servers_in_turn():
    strategy = servers(num_ps=3)
    with strategy.scope():
        variables = [tf.Variable(float(n)) for n in range(5)]
    assert servers_of(variables) == [0, 1, 2, 0, 1]
    assert all(v.distribute_strategy is strategy for v in variables)
    assert tf.Variable(1.0).device is None


def test_shards_are_placed_in_turn_with_the_first_ones_longer():
    strategy = servers(3, num_ps=2)
    with strategy.scope():
        first = tf.Variable(1.0)
        v = tf.Variable(whole(), name="table")
    assert servers_of([first, *v.variables]) == [0, 1, 0, 1]
    assert [tuple(part.shape) for part in v] == [(3, 2), (2, 2), (2, 2)]
    assert [part.name for part in v] == [f"table/part_{n}" for n in range(3)]
    assert np.array_equal(np.concatenate([part.numpy() for part in v]), whole())


def test_variable_has_at_most_a_shard_for_each_row():
    with servers(5).scope():
        v = tf.Variable(whole(3))
        one = tf.Variable(whole(1))
        scalar = tf.Variable(1.0)
    assert [len(part) for part in v.variables] == [1, 1, 1]
    assert type(one) is type(scalar) is tf.Variable


def test_colocated_variables_have_no_shards_and_the_same_server():
    strategy = servers(3, num_ps=4)
    with strategy.scope():
        base = tf.Variable(1.0)
        with strategy.extended.colocate_vars_with(base):
            v = tf.Variable(whole())
        other = tf.Variable(1.0)
    assert type(v) is tf.Variable
    assert servers_of([base, v, other]) == [0, 0, 1]
    with pytest.raises(ValueError, match="`colocate_vars_with` must only be passed a variable"):
        with strategy.extended.colocate_vars_with(tf.Variable(1.0)):
            pass


def test_sums_of_metrics_have_no_shards():
    with servers(2).scope():
        metric = tf.keras.metrics.AUC(num_thresholds=5)
    metric.update_state([0, 1], [0.2, 0.7])
    assert max(v.ndim for v in metric.variables) > 0
    assert all(type(v) is tf.Variable for v in metric.variables)


@pytest.mark.parametrize("counts", [[2, 2], [0, 1], [], "2", [1, 3], [2.5, 1], [None]])
def test_partitioner_with_a_wrong_result_raises(counts):
    strategy = tf.distribute.ParameterServerStrategy(
        variable_partitioner=lambda shape, dtype: counts
    )
    with (
        strategy.scope(),
        pytest.raises(ValueError, match="variable_partitioner must return a list/"),
    ):
        tf.Variable(whole())


def test_variable_without_initial_value_raises():
    with servers().scope(), pytest.raises(ValueError, match="Please specify the `initial_value`"):
        tf.Variable(shape=(2,))


def test_variable_with_another_shape_raises():
    with servers(2).scope(), pytest.raises(ValueError, match=r"has shape \(7, 2\), but shape is"):
        tf.Variable(whole(), shape=(7, 3))


def test_initializer_of_partitions_makes_each_shard_by_itself():
    asked = []

    def rows(partition_shape, partition_offset):
        asked.append((tuple(partition_shape), partition_offset))
        return np.full(partition_shape, len(asked), np.float32)

    with servers(2).scope():
        v = tf.Variable(rows, shape=(5, 2), dtype=tf.float32)
    assert asked == [((3, 2), (0, 0)), ((2, 2), (3, 0))]
    assert v.numpy()[:, 0].tolist() == [1, 1, 1, 2, 2]


def test_large_initial_value_that_is_made_at_once_is_warned_about(monkeypatch, caplog):
    monkeypatch.setattr("pycollective.distribute.parameter_server._LARGE", 13)

    def rows(partition_shape, partition_offset):
        return np.zeros(partition_shape, np.float32)

    with servers(2).scope():
        tf.Variable(rows, shape=(7, 2), dtype=tf.float32)
        tf.Variable(np.zeros((6, 2)))
        assert "its initial value has" not in caplog.text
        tf.Variable(np.zeros((7, 2)), name="big")
    assert "variable 'big': its initial value has 14 elements" in caplog.text


# Sharded variables --------------------------------------------------------------------------------


def test_sharded_variable_has_the_shape_and_dtype_of_the_whole():
    v = table()
    assert isinstance(v, ShardedVariable)
    assert (tuple(v.shape), v.dtype, v.ndim, len(v)) == ((7, 2), np.float32, 2, 7)
    assert v.trainable and v.name == "Variable"
    assert "part_2" in repr(v)
    assert np.array_equal(v.numpy(), whole())
    assert np.array_equal(np.asarray(v), whole())
    assert np.array_equal((v + 1.0).numpy(), whole() + 1)
    assert np.array_equal(tf.matmul(v, tf.ones((2, 1))).numpy(), whole().sum(1, keepdims=True))


@pytest.mark.parametrize(
    ("variables", "error", "text"),
    [
        ([], TypeError, "Argument `variables` should be a non-empty list"),
        ([1], TypeError, "Argument `variables` should be a non-empty list"),
        (lambda: [tf.Variable([1.0]), tf.Variable([1])], ValueError, "must have the same dtype"),
        (lambda: [tf.Variable([1.0]), tf.Variable([[1.0]])], ValueError, "the same shapes except"),
        (lambda: [tf.Variable(1.0)], ValueError, "the same shapes except"),
    ],
)
def test_sharded_variable_of_unlike_variables_raises(variables, error, text):
    with pytest.raises(error, match=text):
        ShardedVariable(variables() if callable(variables) else variables)


@pytest.mark.parametrize(
    "index",
    [
        0, -1, 6, 3, np.int64(4), (2, 1), (-7, 0), slice(None), slice(1, 6), slice(None, None, 2),
        slice(None, None, -1), slice(5, 0, -2), slice(-3, None), slice(4, 4), slice(6, 2),
        (slice(1, 5), 1), (slice(None, None, -3), slice(1, None)), (Ellipsis, 0), slice(3, 5),
        slice(2, None, -1), [0, 5],
    ],
    ids=str,
)  # fmt: skip
def test_sharded_variable_index_returns_the_rows_of_the_whole(index):
    found = table()[index]
    assert isinstance(found, tf.Tensor)
    assert np.array_equal(found.numpy(), whole()[index])


@pytest.mark.parametrize(
    "index",
    [
        (slice(0, 4), [0, 1], slice(None), [0, 1]), (slice(0, 4), 0, slice(None), [0, 1]),
        (slice(1, 6), [2, 0]), (slice(None), slice(None), 1, [1, 0]),
    ],
    ids=str,
)  # fmt: skip
def test_sharded_variable_index_with_lists_after_a_slice_is_that_of_the_whole(index):
    values = np.arange(7 * 3 * 2 * 2, dtype=np.float32).reshape(7, 3, 2, 2)
    shards = ShardedVariable([tf.Variable(values[:3]), tf.Variable(values[3:])])
    assert np.array_equal(shards[index].numpy(), values[index])


@pytest.mark.parametrize("row", [7, -8])
def test_sharded_variable_row_out_of_range_raises(row):
    with pytest.raises(IndexError, match=f"row {row} is out of bounds: variable .* has 7 rows"):
        table()[row]


def test_sharded_variable_tensor_index_raises():
    with pytest.raises(TypeError, match="use tf.nn.embedding_lookup"):
        table()[tf.constant(1)]


def test_sharded_variable_assignments_slice_the_value():
    v = table()
    assert v.assign(whole() + 1) is v
    v.assign_add(tf.constant(whole()))
    v.assign_sub(np.ones((7, 2), np.float32).tolist())
    assert np.array_equal(v.numpy(), 2 * whole())
    for wrong in (np.zeros((6, 2), np.float32), 0.0):
        with pytest.raises(ValueError, match=r"assign: variable 'Variable' has shape \(7, 2\)"):
            v.assign(wrong)
    with pytest.raises(ValueError, match="dtype float32, the value has .* dtype float64"):
        v.assign(tf.constant(whole().astype(np.float64)))
    with pytest.raises(TypeError, match="only they have gradients and optimizer slots"):
        v.update_inplace(lambda array: None)


@pytest.mark.parametrize(
    "method",
    "scatter_add scatter_sub scatter_mul scatter_div scatter_min scatter_max scatter_update".split(),
)
def test_sharded_variable_scatter_changes_the_rows_of_the_whole(method):
    rows = np.array([[1, 2], [3, 4], [5, 60], [7, 8]], np.float32)
    slices = tf.IndexedSlices(rows, np.array([6, 0, 3, 4]))
    v, plain = table(), tf.Variable(whole())
    assert getattr(v, method)(slices) is v
    getattr(plain, method)(slices)
    assert np.array_equal(v.numpy(), plain.numpy())


def test_sharded_variable_wrong_scatter_changes_nothing():
    v = table()
    rows = np.ones((2, 2), np.float32)
    with pytest.raises(IndexError, match="indices from 0 to 7 are not all in 0 to 6"):
        v.scatter_add(tf.IndexedSlices(rows, np.array([0, 7])))
    with pytest.raises(ValueError, match="the rows have shape"):
        v.scatter_add(tf.IndexedSlices(rows[:, :1], np.array([0, 6])))
    with pytest.raises(TypeError, match="sparse_delta is not IndexedSlices"):
        v.scatter_add(rows)
    assert np.array_equal(v.numpy(), whole())


def test_sharded_variable_deepcopy_is_another_variable():
    v = table()
    other = copy.deepcopy(v)
    v.assign(whole() * 0)
    assert isinstance(other, ShardedVariable) and np.array_equal(other.numpy(), whole())


def test_deepcopy_of_a_variable_has_its_server_and_slots():
    with servers(2, consistency="hogwild").scope():
        v = tf.Variable(whole())
        optimizer = tf.keras.optimizers.Adam()
    other = copy.deepcopy(v)
    assert servers_of(other) == servers_of(v) == [0, 1]
    optimizer.build(other.variables)
    assert [servers_of(slot) for slot in optimizer.slot_variables] == [[0, 1]] * 2
    assert other.variables[0]._lock_free


def test_sharded_variable_constraint_raises():
    with servers(2).scope():
        layer = tf.keras.layers.Dense(2, kernel_constraint="non_neg")
        with pytest.raises(ValueError, match="a constraint needs all of its rows at once"):
            layer.build((None, 4))


def test_gradient_of_a_sharded_variable_raises_and_its_shards_have_one():
    v = table()
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(v * v)
    with pytest.raises(TypeError, match="has 3 shards, and only they have gradients"):
        tape.gradient(loss, v)
    parts = tape.gradient(loss, v.variables)
    assert np.array_equal(np.concatenate([g.numpy() for g in parts]), 2 * whole())


# Lookups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[0], [6, 0, 3, 3], [[1, 2], [5, 4]], [], 4])
def test_embedding_lookup_of_shards_returns_the_rows_of_the_whole(ids):
    v = table()
    with tf.GradientTape() as tape:
        rows = tf.nn.embedding_lookup(v, np.array(ids, np.int64))
        loss = tf.reduce_sum(rows * rows)
    assert np.array_equal(rows.numpy(), whole()[np.array(ids, np.int64)])
    expected = np.zeros((7, 2))
    np.add.at(expected, np.array(ids, np.int64), 2 * whole()[np.array(ids, np.int64)])
    gradients = tape.gradient(loss, v.variables)
    assert np.array_equal(
        np.concatenate([tf.convert_to_tensor(g).numpy() for g in gradients]), expected
    )
    assert np.array_equal(v.sparse_read(ids if ids else np.array(ids, int)).numpy(), rows.numpy())


def test_embedding_lookup_reads_no_whole_table(monkeypatch):
    v = table()
    monkeypatch.setattr(ShardedVariable, "_read", None)
    monkeypatch.setattr(ShardedVariable, "current", None)
    assert tf.nn.embedding_lookup(v, [1, 6]).numpy().tolist() == [[2, 3], [12, 13]]


def test_embedding_lookup_of_arrays_and_lists_returns_rows():
    rows = tf.nn.embedding_lookup(whole(), [2, 1]).numpy()
    parts = tf.nn.embedding_lookup([whole()[:2], tf.Variable(whole()[2:])], [2, 1]).numpy()
    assert rows.tolist() == parts.tolist() == [[4, 5], [2, 3]]
    scaled = tf.nn.embedding_lookup(whole(), [0, 2], max_norm=2.0).numpy()
    assert np.allclose(scaled, [[0, 1], np.array([4, 5]) * 2 / np.sqrt(41)])


def test_embedding_lookup_wrong_arguments_raise():
    with pytest.raises(IndexError, match="indices from 0 to 7 are not all in 0 to 6"):
        tf.nn.embedding_lookup(table(), [0, 7])
    with pytest.raises(TypeError, match="needs integer ids, got float32"):
        tf.nn.embedding_lookup(table(), [0.5])
    with pytest.raises(ValueError, match="params is an empty list"):
        tf.nn.embedding_lookup([], [0])


# Layers, optimizers, checkpoints ------------------------------------------------------------------


def model_and_optimizer():
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((3,), dtype="int32"),
            tf.keras.layers.Embedding(7, 4),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(5, activation="tanh", kernel_regularizer="l2"),
            tf.keras.layers.Dense(1),
        ]
    )
    return model, tf.keras.optimizers.Adam(0.01)


def steps(model, optimizer, count=3):
    x = np.random.default_rng(2).integers(0, 7, (count, 8, 3)).astype(np.int32)
    for batch in x:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(batch) - 1.0)) + tf.add_n(model.losses)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def values(model, optimizer):
    """Return the whole values of the variables of a model and of its optimizer."""
    found = [v.numpy() for layer in model.layers for v in layer.stored_variables()]
    return [*found, *(v.numpy() for v in optimizer.variables)]


def assert_same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_layers_list_their_shards_as_weights():
    with servers(2, num_ps=2).scope():
        layer = tf.keras.layers.Embedding(8, 16)
        layer.build()
    assert [tuple(w.shape) for w in layer.weights] == [(4, 16), (4, 16)]
    assert servers_of(layer.weights) == [0, 1]
    assert layer.trainable_variables == layer.embeddings.variables
    assert layer.count_params() == 128
    layer.set_weights([np.zeros((4, 16)), np.ones((4, 16))])
    assert layer(np.array([3, 4])).numpy()[:, 0].tolist() == [0, 1]


@pytest.mark.parametrize("shards", [2, 3])
def test_training_shards_gives_the_numbers_of_training_the_whole(shards):
    plain = model_and_optimizer()
    steps(*plain)
    strategy = servers(shards)
    with strategy.scope():
        sharded = model_and_optimizer()
        steps(*sharded)
    assert len(sharded[0].weights) > len(plain[0].weights)
    # The compiled updates treat the end of an array differently, so the last bits differ.
    for a, b in zip(values(*plain), values(*sharded), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("saved", "restored"), [(2, 4), (4, 2), (4, 1), (1, 4), (3, None), (None, 3), (3, "mirrored")]
)
@pytest.mark.parametrize("delayed", [False, True])
def test_checkpoint_with_slots_restores_with_another_number_of_shards(
    tmp_path, saved, restored, delayed
):
    def make(shards):
        if shards is None:
            return model_and_optimizer()
        strategy = mirrored(2) if shards == "mirrored" else servers(shards)
        with strategy.scope():
            return model_and_optimizer()

    model, optimizer = make(saved)
    steps(model, optimizer)
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "ckpt"))
    other_model, other = make(restored)
    if not delayed:
        with other_model.distribute_strategy.scope():
            other.build(other_model.trainable_variables)
    status = tf.train.Checkpoint(model=other_model, optimizer=other).restore(path)
    if delayed:
        with other_model.distribute_strategy.scope():
            other.build(other_model.trainable_variables)
    status.assert_consumed()
    assert_same(values(model, optimizer), values(other_model, other))


def test_checkpoint_of_a_sharded_variable_is_one_value(tmp_path):
    path = tf.train.Checkpoint(v=table()).save(str(tmp_path / "ckpt"))
    plain = tf.Variable(whole() * 0)
    tf.train.Checkpoint(v=plain).restore(path).assert_consumed()
    assert np.array_equal(plain.numpy(), whole())


def test_model_files_do_not_depend_on_shards(tmp_path):
    with servers(3).scope():
        model, _ = model_and_optimizer()
    model.save(tmp_path / "model.keras")
    plain = tf.keras.models.load_model(tmp_path / "model.keras")
    x = np.array([[0, 3, 6]], np.int32)
    assert np.array_equal(plain(x).numpy(), model(x).numpy())


# Training on workers ------------------------------------------------------------------------------


def worker_step(model, optimizer, metric, batch):
    x, y = batch
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    metric.update_state(loss)
    return loss


@pytest.mark.parametrize("consistency", ["locked", "hogwild"])
@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_workers_train_together_and_count_every_step(consistency, shards, name):
    strategy = servers(shards, num_workers=3, consistency=consistency)
    coordinator = ClusterCoordinator(strategy)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(64, 4)).astype(np.float32)
    y = x @ np.array([[1], [-2], [3], [0.5]], np.float32) + 0.25
    with strategy.scope():
        tf.keras.utils.set_random_seed(3)
        model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
        optimizer = tf.keras.optimizers.get({"class_name": name, "config": {"learning_rate": 0.05}})
        metric = tf.keras.metrics.Mean()

    def dataset_fn(context):
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).repeat().batch(16)

    @tf.function
    def step(iterator):
        return strategy.run(worker_step, args=(model, optimizer, metric, next(iterator)))

    iterator = iter(
        coordinator.create_per_worker_dataset(
            lambda: strategy.distribute_datasets_from_function(dataset_fn)
        )
    )
    # A stopped thread may run the first function last, so no loss of a step is the first one.
    initial = float(tf.reduce_mean(tf.square(model(x) - y)))
    losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(300)]
    coordinator.join()
    assert int(optimizer.iterations) == 300
    assert float(metric.count) == 300
    mean = float(np.mean([value.fetch() for value in losses]))
    assert float(metric.result()) == pytest.approx(mean, rel=1e-4)
    final = float(tf.reduce_mean(tf.square(model(x) - y)))
    assert final < 0.1 * initial


def test_workers_lose_no_addition_and_no_row():
    strategy = servers(2, num_workers=4)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        counter = tf.Variable(0)
        rows = tf.Variable(np.zeros((7, 3), np.float32))
        total = tf.keras.metrics.Sum()

    @tf.function
    def add(n):
        counter.assign_add(1)
        rows.scatter_add(tf.IndexedSlices(np.ones((2, 3), np.float32), np.array([n % 7, 0])))
        rows.assign_add(np.ones((7, 3), np.float32))
        total.update_state(2.0)

    for n in range(210):
        coordinator.schedule(add, args=(n,))
    coordinator.join()
    assert int(counter) == 210
    assert float(total.result()) == 420
    assert rows.numpy()[:, 0].tolist() == [450, *[240] * 6]


def test_sparse_gradients_on_workers_update_the_rows_of_the_whole():
    strategy = servers(2, num_workers=3)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = tf.Variable(np.zeros((6, 2), np.float32))
        optimizer = tf.keras.optimizers.SGD(1.0)
        optimizer.build(v.variables)

    @tf.function
    def step(n):
        shard = v.variables[n % 2]
        rows = tf.IndexedSlices(np.ones((1, 2), np.float32), np.array([n % 3]), (3, 2))
        optimizer.apply_gradients([(rows, shard)])

    for n in range(60):
        coordinator.schedule(step, args=(n,))
    coordinator.join()
    assert v.numpy().tolist() == [[-10, -10]] * 6


def test_values_that_were_read_stay_with_locks_and_change_with_hogwild():
    for consistency, expected in (("locked", 0), ("hogwild", 1)):
        with servers(consistency=consistency).scope():
            v = tf.Variable(np.zeros(3, np.float32))
            count = tf.Variable(0)
        before, counted = v.value(), count.value()
        v.assign_add(np.ones(3, np.float32))
        count.assign_add(1)
        assert before.numpy().tolist() == [expected] * 3
        assert int(counted) == 0 and int(count) == 1
        v.assign(np.full(3, 5, np.float32))
        assert v.numpy().tolist() == [5, 5, 5]
        assert before.numpy().tolist() == [5 * expected] * 3


def test_hogwild_updates_wait_for_no_lock():
    with servers(consistency="hogwild").scope():
        v = tf.Variable(np.zeros(3, np.float32))
    held, release = threading.Event(), threading.Event()

    def hold():
        with v._lock:
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    v.assign_add(np.ones(3, np.float32))
    assert v.numpy().tolist() == [1, 1, 1]
    release.set()
    thread.join()


def test_gradients_with_hogwild_are_of_the_values_that_the_tape_saw():
    with servers(consistency="hogwild").scope():
        v = tf.Variable(np.array([3.0], np.float32))
    with tf.GradientTape() as tape:
        first = v * 1.0
        v.assign_add(np.array([2.0], np.float32))
        loss = tf.reduce_sum(first + 2.0 * v)
    assert tape.gradient(loss, v).numpy().tolist() == [3]


# Rows ---------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.5),
    "momentum": lambda: tf.keras.optimizers.SGD(0.5, momentum=0.9),
    "adagrad": lambda: tf.keras.optimizers.Adagrad(0.5, clipvalue=0.01),
    "decay": lambda: tf.keras.optimizers.Adagrad(0.5, weight_decay=0.1),
    "adam": lambda: tf.keras.optimizers.Adam(0.5),
    "norm": lambda: tf.keras.optimizers.SGD(0.5, clipnorm=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("twice", [False, True])
def test_gradient_of_a_lookup_has_rows_and_updates_as_a_dense_one(name, twice):
    value = np.random.default_rng(1).normal(size=(2048, 4)).astype(np.float32)
    rows = np.array([[3, 70], [70, 2047]])

    def train(table, dense):
        optimizer = OPTIMIZERS[name]()
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, rows)))
                if twice:
                    loss += tf.reduce_sum(tf.gather(table, [5, 3]))
            gradient = tape.gradient(loss, table)
            assert type(gradient) is tf.IndexedSlices
            if dense:
                gradient = tf.convert_to_tensor(gradient)
            optimizer.apply_gradients([(gradient, table)])
        assert int(optimizer.iterations) == 3
        return table.numpy()

    strategy = servers()
    with strategy.scope():
        sparse = tf.Variable(value)
        found = train(sparse, False)
    np.testing.assert_allclose(found, train(tf.Variable(value), True), rtol=1e-5, atol=1e-7)


def test_gradient_of_a_lookup_and_of_the_whole_value_is_dense():
    with servers().scope():
        table = tf.Variable(np.ones((2048, 4), np.float32))
    for order in (1, -1):
        with tf.GradientTape() as tape:
            terms = [
                lambda: tf.reduce_sum(table * 2.0),
                lambda: tf.reduce_sum(tf.gather(table, [7])),
            ]
            loss = sum(term() for term in terms[::order])
        gradient = tape.gradient(loss, table)
        assert type(gradient) is tf.Tensor
        assert gradient.numpy()[7].tolist() == [3] * 4 and gradient.numpy()[8].tolist() == [2] * 4


@pytest.mark.parametrize("method", ["add", "sub", "mul", "div", "min", "max", "update"])
def test_scatter_of_a_large_variable_equals_that_of_a_plain_one(method):
    value = np.random.default_rng(1).normal(size=(2048, 4)).astype(np.float32)
    rows = tf.IndexedSlices(value[:3] + 1, np.array([9, 9, 2047]))
    with servers().scope():
        table = tf.Variable(value)
    plain = tf.Variable(value)
    for variable in (table, plain):
        getattr(variable, f"scatter_{method}")(rows)
    assert np.array_equal(table.numpy(), plain.numpy())


def test_update_of_rows_after_a_lookup_copies_no_table():
    with servers().scope():
        table = tf.Variable(np.ones((2048, 4), np.float32))
    address = table.current().array.ctypes.data
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [7]))
    gradient = tape.gradient(loss, table)
    table.scatter_sub(gradient)
    tf.keras.optimizers.SGD(0.1).apply_gradients([(gradient, table)])
    assert table.current().array.ctypes.data == address


def test_lookup_of_a_row_that_does_not_exist_raises():
    with servers().scope():
        table = tf.Variable(np.ones((2048, 4), np.float32))
    with pytest.raises(IndexError, match="from -1 to 2048 are not all in 0 to 2047"):
        tf.gather(table, [-1, 2048])
    with pytest.raises(TypeError, match="integer indices"):
        tf.gather(table, [1.0])


# Placement by size, and values of workers ----------------------------------------------------------


def test_balanced_places_variables_on_the_server_with_the_fewest_bytes():
    strategy = tf.distribute.ParameterServerStrategy(variable_partitioner="balanced", num_ps=2)
    with strategy.scope():
        large = tf.Variable(np.zeros((100, 8), np.float32))
        small = [tf.Variable(np.zeros((10, 8), np.float32)) for _ in range(3)]
        table = tf.Variable(np.zeros((4096, 64), np.float32))
    assert servers_of([large, *small]) == [0, 1, 1, 1]
    assert servers_of(table.variables) == [1, 0]


def test_balanced_counts_per_worker_metric_and_colocated_variables():
    strategy = tf.distribute.ParameterServerStrategy(variable_partitioner="balanced", num_ps=2)
    value = np.zeros((100, 8), np.float32)
    with strategy.scope():
        per_worker = tf.Variable(value, per_worker_variable=True)
        sums = [
            tf.Variable(value, synchronization=tf.VariableSynchronization.ON_READ) for _ in "ab"
        ]
        first = tf.Variable(value)
        with strategy.extended.colocate_vars_with(first):
            slots = [tf.Variable(value) for _ in range(2)]
        others = [tf.Variable(value) for _ in range(3)]
    assert {v["bytes"] for v in strategy.extended.load().values()} == {5 * value.nbytes}
    assert (servers_of(sums), servers_of(slots), servers_of(others)) == ([0, 1], [0, 0], [1, 1, 1])
    assert [tuple(v.shape) for v in per_worker.read_all()] == [(100, 8)] * 2


def test_timeline_has_the_load_of_each_server(tmp_path):
    strategy = servers(num_workers=1, num_ps=2)
    with strategy.scope():
        variable = tf.Variable(np.zeros(10, np.float32))
    coordinator = ClusterCoordinator(strategy)
    with tf.timeline(tmp_path / "timeline.json"):
        coordinator.schedule(tf.function(lambda: None))
        coordinator.join()
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    last = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert variable.shape == (10,)
    assert last == {
        "/job:ps/replica:0/task:0/device:CPU:0": {"variables": 1, "bytes": 40},
        "/job:ps/replica:0/task:1/device:CPU:0": {"variables": 0, "bytes": 0},
    }


def test_per_worker_variable_has_a_value_for_each_worker():
    strategy = servers(num_workers=2)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        per_worker = tf.Variable([0, 1], per_worker_variable=True, name="per_worker")
    barrier = threading.Barrier(2)

    @tf.function
    def add():
        barrier.wait(hangs.SECONDS)
        per_worker.assign_add([1, 1])
        per_worker.assign(
            per_worker + tf.distribute.coordinator.experimental_get_current_worker_index()
        )

    for _ in range(2):
        coordinator.schedule(add)
    coordinator.join()
    assert [v.numpy().tolist() for v in per_worker.read_all()] == [[1, 2], [2, 3]]
    assert tuple(per_worker.shape) == (2,) and per_worker.dtype == np.int32
    with pytest.raises(RuntimeError, match=r"has a value for each worker: .* or call read_all\(\)"):
        per_worker + 1
    per_worker.assign([7, 7])
    assert [v.numpy().tolist() for v in per_worker.read_all()] == [[7, 7], [7, 7]]
    copied = copy.deepcopy(per_worker)
    per_worker.assign([8, 8])
    assert [v.numpy().tolist() for v in copied.read_all()] == [[7, 7], [7, 7]]
    assert tf.Variable(1, per_worker_variable=True) == 1


def test_steps_per_call_calls_a_function_several_times():
    coordinator = ClusterCoordinator(servers())
    with coordinator.strategy.scope():
        count = tf.Variable(0)

    @tf.function
    def add():
        return count.assign_add(1) * 1

    assert int(coordinator.schedule(add, steps_per_call=5).fetch()) == 5
    with pytest.raises(ValueError, match="steps_per_call must be at least 1, got 0"):
        coordinator.schedule(add, steps_per_call=0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_fit_of_a_large_table_equals_fit_without_a_strategy(optimizer):
    x = np.random.default_rng(1).integers(0, 3000, (40, 3))
    y = (x.sum(axis=1, keepdims=True) % 2).astype(np.float32)

    def losses(strategy):
        tf.keras.utils.set_random_seed(1)
        with strategy.scope():
            model = tf.keras.Sequential(
                [tf.keras.layers.Embedding(3000, 4), tf.keras.layers.Flatten(),
                 tf.keras.layers.Dense(1)]
            )  # fmt: skip
            model.compile(optimizer, "mse")
        return model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]

    found = losses(servers(num_workers=1))
    np.testing.assert_allclose(found, losses(tf.distribute.get_strategy()), rtol=1e-5)


@pytest.mark.parametrize("has_ports", [True, False])
def test_program_that_makes_all_servers_runs_the_tasks_as_threads(has_ports):
    """All tasks of the cluster are in this process, as in TensorFlow's tutorial."""
    addresses = [f"localhost:{port}" for port in free_ports(3)]
    workers = addresses[:2] if has_ports else ["localhost:0"] * 2
    spec = tf.train.ClusterSpec({"worker": workers, "ps": addresses[2:]})
    config = tf.compat.v1.ConfigProto()
    config.inter_op_parallelism_threads = 3
    servers = [
        tf.distribute.Server(spec, job_name="worker", task_index=i, config=config, protocol="grpc")
        for i in range(2)
    ]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    servers.append(tf.distribute.Server(spec, job_name="ps", task_index=0))
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    assert strategy.extended.num_parameter_workers == 2 and strategy.extended.num_servers == 1
    assert "threads of this process" in strategy.describe()
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        total = tf.Variable(0.0)
    add = tf.function(lambda: total.assign_add(1.0))
    for _ in range(10):
        coordinator.schedule(add)
    coordinator.join()
    assert float(total) == 10


def test_initial_value_of_a_function_in_c():
    with servers().scope():
        assert tf.Variable(time.time).shape == ()


def test_functions_scheduled_after_an_error_are_not_cancelled_by_another_thread():
    """Two threads wait for one error; the first one to get it schedules functions."""
    strategy = tf.distribute.ParameterServerStrategy(num_workers=2)
    coordinator = ClusterCoordinator(strategy)
    begun, fail, end = threading.Semaphore(0), threading.Event(), threading.Event()

    @tf.function
    def failing():
        begun.release()
        assert fail.wait(hangs.SECONDS)
        raise ValueError("wrong")

    @tf.function
    def slow():
        begun.release()
        assert end.wait(hangs.SECONDS)

    one = tf.function(lambda: 1)
    for _ in range(10):
        fail.clear()
        end.clear()
        coordinator.schedule(failing)
        coordinator.schedule(slow)
        for _ in range(2):
            assert begun.acquire(timeout=hangs.SECONDS)
        later = []

        def join(later=later):
            try:
                coordinator.join()
            except ValueError:
                later += [coordinator.schedule(one) for _ in range(20)]

        threads = [threading.Thread(target=join) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.002)
        fail.set()
        time.sleep(0.002)
        end.set()
        for thread in threads:
            thread.join(hangs.SECONDS)
        assert len(later) == 20 and all(value.fetch() == 1 for value in later)
