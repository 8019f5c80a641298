"""The differences between strategies."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import mirrored

import pycollective as pc
from pycollective import distribute as d
from pycollective import keras
from pycollective.distribute.central_storage import AggregatingVariable
from pycollective.tensor import GradientTape, IndexedSlices, Tensor, Variable, constant
from pycollective.train import Checkpoint


def central(replicas):
    return d.experimental.CentralStorageStrategy([f"cpu:{i}" for i in range(replicas)])


def replica_id():
    return d.get_replica_context().local_replica_id


# Default and one device -----------------------------------------------------------------------


def test_default_strategy_returns_values_and_datasets_unchanged():
    strategy = d.get_strategy()
    with pytest.raises(RuntimeError, match="Should only create a single instance of _Default"):
        type(strategy)()
    assert strategy.run(lambda x: (x, d.get_replica_context().replica_id_in_sync_group), (7,)) == (
        7,
        0,
    )
    value = constant([1.0])
    assert strategy.reduce("SUM", value, axis=None) is value
    assert strategy.experimental_local_results(value) == (value,)
    dataset = pc.data.Dataset.range(4).batch(2)
    assert strategy.experimental_distribute_dataset(dataset) is dataset
    seen = []
    made = strategy.distribute_datasets_from_function(lambda c: seen.append(c) or dataset)
    assert made is dataset
    assert (seen[0].num_replicas_in_sync, seen[0].num_input_pipelines) == (1, 1)
    for name in ("worker_devices", "parameter_devices"):
        with pytest.raises(RuntimeError, match=f"no {name}"):
            getattr(strategy.extended, name)


def test_one_device_wraps_nothing():
    strategy = d.OneDeviceStrategy("/cpu:1")
    assert strategy.extended.worker_devices == ("/job:localhost/replica:0/task:0/device:CPU:1",)
    assert strategy.extended.worker_devices == strategy.extended.parameter_devices
    x = constant([1.0, 2.0])
    assert strategy.run(lambda: x) is x
    assert strategy.reduce("MEAN", x, axis=None) is x
    assert strategy.experimental_local_results(x) == (x,)
    made = strategy.experimental_distribute_values_from_function(lambda c: c.num_replicas_in_sync)
    assert made == 1
    with strategy.scope():
        assert type(Variable(1.0)) is Variable


def test_mirrored_with_one_replica_wraps_nothing():
    strategy = mirrored(1)
    assert isinstance(strategy.run(lambda: constant(1.0)), Tensor)
    assert isinstance(strategy.reduce("SUM", constant(1.0), axis=None), Tensor)


def test_mirrored_values_are_not_reduced_again(two):
    value = d.values.Mirrored([constant(2.0), constant(2.0)])
    assert two.extended.reduce_to("MEAN", value, "cpu:0") is value
    with pytest.raises(AssertionError):
        two.extended.reduce_to("SUM", value, "cpu:0")


# TPUs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name"),
    [(d.TPUStrategy, "TPUStrategy"), (d.experimental.TPUStrategy, "TPUStrategy"),
     (lambda: d.TPUStrategy(None, None, True), "TPUStrategy"),
     (d.cluster_resolver.TPUClusterResolver, "TPUClusterResolver"),
     (lambda: d.cluster_resolver.TPUClusterResolver(tpu="local"), "TPUClusterResolver"),
     (d.cluster_resolver.TPUClusterResolver.connect, "TPUClusterResolver")],
)  # fmt: skip
def test_tpu_classes_name_mirrored_strategy(make, name):
    text = f"{name} is not available.*needs TPU hardware.*Use MirroredStrategy"
    with pytest.raises(RuntimeError, match=text):
        make()
    assert issubclass(d.TPUStrategy, d.Strategy)


# Central storage ------------------------------------------------------------------------------


def test_central_storage_has_one_variable_for_all():
    strategy = central(2)
    assert strategy.num_replicas_in_sync == 2
    assert strategy.extended.parameter_devices == ("/job:localhost/replica:0/task:0/device:CPU:0",)
    assert len(strategy.extended.worker_devices) == 2
    with strategy.scope():
        v = Variable([1.0, 2.0], name="v", aggregation=pc.VariableAggregation.SUM)
    assert type(v) is AggregatingVariable
    assert strategy.extended.value_container(v.get()) is v
    assert isinstance(v, Variable)
    assert (v.name, v.shape, v.trainable) == ("v", (2,), True)
    assert v.aggregation is pc.VariableAggregation.SUM
    assert strategy.extended.variable_created_in_scope(v)
    assert strategy.run(lambda: v) is v
    got = strategy.run(lambda: v * (1.0 + replica_id()))
    assert [x.numpy().tolist() for x in got.values] == [[1.0, 2.0], [2.0, 4.0]]
    v.assign([3.0, 4.0])
    v.assign_add([1.0, 1.0])
    v.assign_sub(np.array([0.5, 0.5]))
    assert v.numpy().tolist() == (v + 0.0).numpy().tolist() == [3.5, 4.5]
    with strategy.scope():
        v.assign([1.0, 1.0])
        calls = []
        strategy.extended.update(v, lambda x, k: calls.append(x) or x.assign_add([k, k]), (2.0,))
    assert calls == [v.get()]
    assert v.numpy().tolist() == [3.0, 3.0]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    ("aggregation", "want"),
    [("SUM", lambda values: sum(values)), ("MEAN", lambda values: sum(values) / len(values)),
     ("ONLY_FIRST_REPLICA", lambda values: values[0])],
)  # fmt: skip
def test_central_storage_aggregates_assignments(replicas, aggregation, want):
    strategy = central(replicas)
    values = [2.0 * r + 1 for r in range(replicas)]
    with strategy.scope():
        v = Variable(np.float64(10.0), aggregation=pc.VariableAggregation[aggregation])
    for method, result in (
        ("assign", lambda w: w),
        ("assign_add", lambda w: 2 * w),
        ("assign_sub", lambda w: w),
    ):
        read = strategy.run(lambda m=method: getattr(v, m)(values[replica_id()]).read_value())
        assert {float(x) for x in read.values} == {float(v.numpy())} == {result(want(values))}


def test_central_storage_aggregates_rows():
    strategy = central(2)
    with strategy.scope():
        summed = Variable(np.full((3, 1), 6.0), aggregation=pc.VariableAggregation.SUM)
        first = Variable(
            np.full((3, 1), 6.0), aggregation=pc.VariableAggregation.ONLY_FIRST_REPLICA
        )
        none = Variable(np.full((3, 1), 6.0))

    def rows():
        return IndexedSlices(constant(np.full((1, 1), 1.0 + replica_id())), [replica_id()], (3, 1))

    strategy.run(lambda: summed.scatter_sub(rows()))
    strategy.run(lambda: first.scatter_update(rows()))
    assert summed.numpy().tolist() == [[5.0], [4.0], [6.0]]
    assert first.numpy().tolist() == [[1.0], [6.0], [6.0]]
    summed.scatter_add(IndexedSlices(constant([[1.0]], "float64"), [2], (3, 1)))
    assert summed.numpy().tolist() == [[5.0], [4.0], [7.0]]
    with pytest.raises(ValueError, match="You must specify an aggregation method to update a"):
        strategy.run(lambda: none.scatter_add(rows()))


def test_central_storage_assignment_without_aggregation_raises():
    strategy = central(2)
    with strategy.scope():
        plain = Variable(1.0, name="plain")
        summed = Variable(1.0, aggregation=pc.VariableAggregation.SUM)
        mean = Variable(1.0, aggregation=pc.VariableAggregation.MEAN)
        whole = Variable(1, aggregation=pc.VariableAggregation.MEAN)
    for method in ("assign", "assign_add", "assign_sub"):
        with pytest.raises(
            ValueError,
            match="You must specify an aggregation method to update a AggregatingVariable in "
            "Replica Context.*plain",
        ):
            strategy.run(lambda m=method: getattr(plain, m)(1.0))
    assert float(plain) == 1.0
    with pytest.raises(ValueError, match="A non-DistributedValues value 5.0 cannot be reduced"):
        strategy.run(lambda: summed.assign(5.0))
    strategy.run(lambda: mean.assign(5.0))
    assert float(mean) == 5.0
    with pytest.raises(ValueError, match="Cannot update non-float variables with tf.VariableAggre"):
        strategy.run(lambda: whole.assign(replica_id()))
    with pytest.raises(RuntimeError, match="different number of replica_context"):
        strategy.run(lambda: summed.assign(constant(1.0)) if replica_id() else None)


def test_central_storage_with_one_device_has_plain_variables():
    strategy = central(1)
    with strategy.scope():
        v = Variable(1.0)
    assert type(v) is Variable
    assert strategy.extended.variable_created_in_scope(v)
    named = d.experimental.CentralStorageStrategy(["cpu:1"])
    assert named.extended.parameter_devices[0].endswith("CPU:1")
    chosen = d.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="/cpu:2")
    assert chosen.extended.parameter_devices[0].endswith("CPU:2")
    assert d.experimental.CentralStorageStrategy().num_replicas_in_sync >= 1
    with pytest.raises(AssertionError, match="No duplicates"):
        d.experimental.CentralStorageStrategy(["cpu:0", "/CPU:0"])


def test_central_storage_has_one_variable_if_replicas_create_it():
    strategy = central(3)
    made = strategy.run(lambda: Variable(10.0 + replica_id()))
    assert type(made) is AggregatingVariable
    assert float(made) == 10.0


@pytest.mark.parametrize("apply", ["apply_gradients", "minimize"])
def test_central_storage_trains_like_one_device(apply):
    def train(strategy):
        rng = np.random.default_rng(0)
        x, y = rng.random((24, 5)).astype("float32"), rng.integers(0, 3, 24)
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)])
            optimizer = keras.optimizers.Adam(0.01, clipnorm=1.0)
            accuracy = keras.metrics.SparseCategoricalAccuracy()
            cross_entropy = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction=keras.losses.Reduction.NONE
            )

        def step(images, labels):
            with GradientTape() as tape:
                logits = model(images)
                loss = pc.nn.compute_average_loss(
                    cross_entropy(labels, logits), global_batch_size=12
                )
            weights = model.trainable_variables
            if apply == "minimize":
                optimizer.minimize(loss, weights, tape=tape)
            else:
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            accuracy.update_state(labels, logits)
            return loss

        data = pc.data.Dataset.from_tensor_slices((x, y)).batch(12)
        losses = []
        for _ in range(3):
            for batch in strategy.experimental_distribute_dataset(data):
                per_replica = strategy.run(step, args=batch)
                losses.append(float(strategy.reduce("SUM", per_replica, axis=None)))
        assert int(optimizer.iterations) == 6
        weights = [v.numpy() for v in model.trainable_variables]
        return losses, weights, float(accuracy.result()), model, optimizer

    losses, weights, accuracy, *_ = train(d.get_strategy())
    for replicas in (1, 2, 3):
        got, got_weights, got_accuracy, model, optimizer = train(central(replicas))
        np.testing.assert_allclose(got, losses, rtol=1e-5)
        for a, b in zip(got_weights, weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        assert got_accuracy == pytest.approx(accuracy)
        if replicas > 1:
            kinds = {type(v) for v in [*model.trainable_variables, *optimizer.variables]}
            assert kinds == {AggregatingVariable}


def test_checkpoints_of_central_storage_are_those_of_plain_variables(tmp_path):
    strategy = central(2)
    with strategy.scope():
        v = Variable([1.0, 2.0])
    path = Checkpoint(v=v).save(str(tmp_path / "ckpt"))
    plain = Variable([0.0, 0.0])
    Checkpoint(v=plain).restore(path)
    assert plain.numpy().tolist() == [1.0, 2.0]
    plain.assign([5.0, 6.0])
    path = Checkpoint(v=plain).save(str(tmp_path / "other"))
    Checkpoint(v=v).restore(path)
    assert v.numpy().tolist() == [5.0, 6.0]


def test_central_storage_metric_is_the_sum_of_all_replicas():
    strategy = central(2)
    with strategy.scope():
        total = keras.metrics.Sum()
    strategy.run(lambda: total.update_state(constant([1.0, 2.0 * replica_id()])))
    assert float(total.result()) == 4.0


def test_central_storage_heeds_input_options():
    strategy = central(2)
    dataset = pc.data.Dataset.range(4).batch(2)
    per_replica = d.InputOptions(
        experimental_replication_mode=d.InputReplicationMode.PER_REPLICA,
        experimental_place_dataset_on_device=True,
        experimental_fetch_to_device=False,
    )
    for distribute in (
        lambda o: strategy.experimental_distribute_dataset(dataset, o),
        lambda o: strategy.distribute_datasets_from_function(lambda _: dataset, o),
    ):
        with pytest.raises(
            NotImplementedError, match="InputReplicationMode.PER_REPLICA is only sup"
        ):
            distribute(per_replica)
        rows = [v for step in distribute(d.InputOptions()) for v in step.values]
        assert np.concatenate([v.numpy() for v in rows]).tolist() == [0, 1, 2, 3]


# Descriptions ---------------------------------------------------------------------------------


def test_describe_names_devices_and_operations(monkeypatch):
    from pycollective.distribute import blas_threads, describe

    monkeypatch.setattr("pycollective._core.usable_cores", lambda: 4)
    monkeypatch.setattr(describe, "controls_threads", lambda: True)
    cpu = "/job:localhost/replica:0/task:0/device:CPU:"
    ops = "CollectiveAllReduce (algorithm 'auto'), the default if all devices are CPUs"
    assert mirrored(2).describe().splitlines() == [
        f"replica 0: {cpu}0, the caller's thread, 2 BLAS threads of 4, {ops}",
        f"replica 1: {cpu}1, thread pycollective-replica-1, 2 BLAS threads of 4, {ops}",
    ]
    assert "1 BLAS thread of 4, RingAllReduce (algorithm 'ring'), an argument of the strategy" in (
        mirrored(4, d.RingAllReduce()).describe()
    )
    one = (
        f"replica 0: {cpu}0, the caller's thread, 4 BLAS threads of 4, nothing to reduce: it is th"
    )
    for strategy in (mirrored(1), d.OneDeviceStrategy("cpu:0"), d.get_strategy()):
        assert strategy.describe().startswith(one)
    assert len(central(3).describe().splitlines()) == 3
    assert "ReductionToOneDevice cpu:0, an argument" in (
        mirrored(2, d.ReductionToOneDevice("cpu:0")).describe()
    )
    assert "NCCL is not installed" in mirrored(2, d.NcclAllReduce()).describe()
    monkeypatch.setattr(describe, "controls_threads", lambda: False)
    assert "BLAS threads not divided (no threadpoolctl)" in mirrored(2).describe()
    assert isinstance(blas_threads.controls_threads(), bool)
