"""The lower-level methods of strategies with several replicas, and collectives in replicas."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import mirrored, replica_id

import pycollective as tf
from pycollective import distribute as d
from pycollective.distribute.values import Mirrored, PerReplica


def values(*numbers):
    return PerReplica([tf.constant(float(n)) for n in numbers])


def row(r, *indices, dense=(5, 1)):
    rows = tf.constant(np.full((len(indices), 1), 1.0 + r))
    return tf.IndexedSlices(rows, tf.constant(np.array(indices, "int32")), dense)


# Reducing -------------------------------------------------------------------------------------


def test_reduce_to_returns_results_on_destinations(two):
    extended, x = two.extended, values(1.0, 3.0)
    total = extended.reduce_to("sum", x, "cpu:0")
    assert type(total) is tf.Tensor
    assert float(total) == 4.0
    everywhere = extended.reduce_to(d.ReduceOp.MEAN, x, x)
    assert type(everywhere) is Mirrored
    assert [float(v) for v in everywhere.values] == [2.0, 2.0]
    with two.scope():
        v = tf.Variable(7.0)
        on_read = tf.Variable(
            1.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        assert [float(c) for c in extended.reduce_to("SUM", x, v).values] == [4.0, 4.0]
    assert extended.reduce_to("MEAN", everywhere, "cpu:0") is everywhere
    for wrong in (everywhere, v):
        with pytest.raises(AssertionError, match="SUM of a Mirrored value"):
            extended.reduce_to("SUM", wrong, "cpu:0")
        with pytest.raises(AssertionError, match="SUM of a Mirrored value"):
            two.reduce("SUM", wrong, axis=None)
        assert float(two.reduce("SUM", wrong, axis=())) == 2 * float(wrong.values[0])
    assert float(two.reduce("MEAN", v, axis=None)) == 7.0
    assert float(two.reduce("SUM", on_read, axis=None)) == 2.0
    for destinations in (["cpu:0"], ("cpu:0", "cpu:1")):
        with pytest.raises(AssertionError, match="not a list or tuple"):
            extended.reduce_to("SUM", x, destinations)
        with pytest.raises(AssertionError, match="not a list or tuple"):
            extended.broadcast_to(tf.constant(1.0), destinations)
    with pytest.raises(TypeError, match="Expected `reduce_op` to be a `tf.distribute.ReduceOp`"):
        extended.reduce_to("PROD", x, "cpu:0")


def test_reduce_to_of_a_plain_value_returns_it_or_raises(two):
    extended = two.extended
    assert float(extended.reduce_to("SUM", 0, "cpu:0")) == 0.0
    assert float(extended.reduce_to("MEAN", 5.0, "cpu:0")) == 5.0
    with pytest.raises(
        ValueError,
        match="A non-DistributedValues value 5.0 cannot be reduced with the given reduce op "
        "ReduceOp.SUM.",
    ):
        extended.reduce_to("SUM", 5.0, "cpu:0")


def test_batch_reduce_to_reduces_each_pair(two):
    one, other = values(1.0, 3.0), values(10.0, 30.0)
    same = Mirrored([tf.constant(5.0)] * 2)
    sparse = PerReplica([row(0, 1), row(1, 1, 2)])
    pairs = [(one, one), (same, "cpu:0"), (other, "cpu:0"), (sparse, "cpu:0"), (6.0, "cpu:0")]
    got = two.extended.batch_reduce_to("MEAN", iter(pairs))
    assert [float(v) for v in got[0].values] == [2.0, 2.0]
    assert got[1] is same
    assert float(got[2]) == 20.0
    assert got[3].indices.numpy().tolist() == [1, 1, 2]
    assert got[3].values.numpy().tolist() == [[0.5], [1.0], [1.0]]
    assert float(got[4]) == 6.0
    assert two.extended.batch_reduce_to("SUM", []) == []


def test_reduce_mean_over_ragged_rows_weighs_rows_equally():
    three = mirrored(3)
    ragged = PerReplica([tf.constant(np.ones((n, 2)) * n) for n in (1, 0, 3)])
    total = three.reduce("MEAN", ragged, axis=0)
    np.testing.assert_allclose(total.numpy(), [10 / 4, 10 / 4])
    np.testing.assert_allclose(float(three.reduce("MEAN", ragged, axis=[0, 1])), 10 / 4)
    ints = PerReplica([tf.constant([1, 2]), tf.constant([4]), tf.constant([], "int32")])
    mean = three.reduce("MEAN", ints, axis=0)
    assert mean.dtype.kind == "f"
    assert float(mean) == pytest.approx(7 / 3)
    small = PerReplica([tf.constant(np.array([200, 100], "uint8"))] * 3)
    assert float(three.reduce("MEAN", small, axis=0)) == 150.0
    halves = PerReplica([tf.constant([1.0], "float16")] * 3)
    assert three.reduce("MEAN", halves, axis=0).dtype == tf.float16


def test_broadcast_to_copies_tensors(two):
    assert two.extended.broadcast_to(3, "cpu:0") == 3
    assert type(two.extended.broadcast_to(3.0, "cpu:0")) is float
    sent = two.extended.broadcast_to(tf.constant(3.0), values(0.0, 0.0))
    assert type(sent) is Mirrored
    assert [float(v) for v in sent.values] == [3.0, 3.0]


# Gathering ------------------------------------------------------------------------------------


def test_reduce_along_an_axis_counts_a_plain_value_once_for_each_replica(two):
    """As in TensorFlow, which reduces within each replica first."""
    plain = tf.constant([1.0, 2.0])
    with two.scope():
        mirrored_one = tf.Variable([1.0, 2.0])
    for value in (plain, mirrored_one):
        assert float(two.reduce("SUM", value, axis=0)) == 6.0
        assert float(two.reduce("MEAN", value, axis=0)) == 1.5


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_results_of_merge_functions_on_all_replicas_stay_distributed(two, dtype):
    """Integers are reduced on one device, and the replicas share its memory."""

    def merge(strategy, x):
        total = strategy.extended.reduce_to("SUM", x, x)
        return total, strategy.extended.broadcast_to(tf.constant(5), x)

    def replica():
        context = d.get_replica_context()
        x = tf.cast(context.replica_id_in_sync_group + 1, dtype)
        return context.merge_call(merge, args=(x,))

    total, sent = two.run(replica)
    assert [float(v) for v in two.experimental_local_results(total)] == [3.0, 3.0]
    assert [int(v) for v in two.experimental_local_results(sent)] == [5, 5]
    assert float(two.reduce("MEAN", total, axis=None)) == 3.0


def test_gather_along_any_axis_joins_and_checks_shapes(two):
    x = PerReplica([tf.constant(np.arange(6.0).reshape(2, 3)), tf.constant(np.ones((2, 1)))])
    want = [[0.0, 1.0, 2.0, 1.0], [3.0, 4.0, 5.0, 1.0]]
    assert two.gather(x, axis=1).numpy().tolist() == want
    assert two.gather({"x": x}, axis=-1)["x"].numpy().tolist() == want
    with pytest.raises(
        ValueError,
        match=r"equal: replica 0 has float64\[2, 3\], replica 1 has float64\[2, 1\]; .* axis 0 only",
    ):
        two.gather(x, axis=0)
    mixed = PerReplica([tf.constant([1.0]), tf.constant([1])])
    with pytest.raises(ValueError, match=r"replica 0 has float32\[1\], replica 1 has int32\[1\]"):
        two.gather(mixed, axis=0)
    with pytest.raises(ValueError, match="`axis` = 0 out of range for `value` with rank 0"):
        two.gather(values(1.0, 2.0), axis=0)
    assert two.gather(tf.constant([1.0]), axis=0).numpy().tolist() == [1.0]


def test_all_gather_wrong_values_raise(two):
    def all_gather(value, axis):
        return d.get_replica_context().all_gather(value, axis)

    def gather(value, axis):
        return two.run(lambda: all_gather(value(replica_id()), axis))

    with pytest.raises(tf.MismatchError, match=r"all_gather: .*float32\[1, 1\].*float32\[1, 2\]"):
        gather(lambda r: tf.constant(np.ones((1, 1 + r), "float32")), 0)
    with pytest.raises(tf.MismatchError, match=r"float32\[1\].*float64\[1\]"):
        gather(lambda r: tf.constant(np.ones(1, ["f4", "f8"][r])), 0)
    with pytest.raises(tf.MismatchError, match=r"the replicas gather \[1, 2\] tensors"):
        gather(lambda r: [tf.constant([1.0])] * (1 + r), 0)
    with pytest.raises(ValueError, match="`axis` = 1 out of range for `value` with rank 1"):
        gather(lambda r: tf.constant([1.0]), 1)
    with pytest.raises(TypeError, match="axis must be an int"):
        gather(lambda r: tf.constant([1.0]), None)
    with pytest.raises(
        RuntimeError, match="Replica 1 waits in all_gather, while replica 0 has fin"
    ):
        two.run(lambda: replica_id() and all_gather(tf.constant([1.0]), 0))
    assert gather(lambda r: [], 0) == []


def test_all_gather_is_differentiable_along_a_ragged_axis():
    three = mirrored(3)

    def replica():
        r = replica_id()
        x = tf.constant(np.full((2, r), 1.0 + r))  # replica 0 has none
        with tf.GradientTape() as tape:
            tape.watch(x)
            whole = d.get_replica_context().all_gather(x, axis=1)
            weights = tf.constant(np.arange(6.0).reshape(2, 3) * (1.0 + r))
            loss = tf.reduce_sum(whole * weights)
        return whole, tape.gradient(loss, x)

    whole, gradients = three.run(replica)
    assert whole.values[2].numpy().tolist() == [[2.0, 3.0, 3.0]] * 2
    # The weights of the three replicas add up to 6 times the first one's.
    assert [g.shape for g in gradients.values] == [(2, 0), (2, 1), (2, 2)]
    np.testing.assert_allclose(gradients.values[1].numpy(), [[0.0], [18.0]])
    np.testing.assert_allclose(gradients.values[2].numpy(), [[6.0, 12.0], [24.0, 30.0]])


def test_gradient_if_replicas_use_different_results_is_right(two):
    """The backward all-reduce is one for all values: replicas need not use the same ones."""

    def replica():
        x, y = tf.constant(2.0), tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            a, b = d.get_replica_context().all_reduce("SUM", [x * x, y * y])
            loss = [a, b][replica_id()] * 1.0
        return tape.gradient(loss, [x, y])

    gx, gy = two.run(replica)
    assert [float(v) for v in gx.values] == [4.0, 4.0]
    assert [float(v) for v in gy.values] == [6.0, 6.0]


def test_gradient_in_a_later_run_needs_all_replicas(two):
    def forward():
        tape = tf.GradientTape()
        with tape:
            x = tf.constant(2.0)
            tape.watch(x)
            y = d.get_replica_context().all_reduce("SUM", x * x)
        return tape, x, y

    tape, x, y = two.run(forward)
    with pytest.raises(RuntimeError, match="gradient of a collective needs all replicas"):
        tape.values[0].gradient(y.values[0], x.values[0])
    tape, x, y = two.run(forward)
    got = two.run(lambda tape, y, x: tape.gradient(y, x), args=(tape, y, x))
    assert [float(v) for v in got.values] == [8.0, 8.0]


# IndexedSlices --------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "scale"), [("SUM", 1.0), ("MEAN", 3.0)])
def test_all_reduce_of_indexed_slices_concatenates_them(op, scale):
    three = mirrored(3)
    indices = [(4, 0), (), (0, 0, 2)]

    def replica():
        r = replica_id()
        nest = {"s": row(r, *indices[r]), "d": tf.constant([1.0 * r])}
        return d.get_replica_context().all_reduce(op, nest)

    got = three.run(replica)
    assert [float(v[0]) for v in got["d"].values] == [3.0 / scale] * 3
    for slices in got["s"].values:
        assert isinstance(slices, tf.IndexedSlices)
        assert slices.indices.numpy().tolist() == [4, 0, 0, 0, 2]
        assert slices.indices.dtype == tf.int32
        np.testing.assert_allclose(slices.values.numpy()[:, 0], np.array([1, 1, 3, 3, 3]) / scale)
        assert slices.dense_shape == (5, 1)
    # The slices of all replicas share the memory of the result.
    assert np.shares_memory(*[s.values.array for s in got["s"].values[:2]])


def test_all_reduce_of_unlike_indexed_slices_raises(two):
    def reduce(make):
        return two.run(lambda: d.get_replica_context().all_reduce("SUM", make(replica_id())))

    with pytest.raises(tf.MismatchError, match="all_reduce of IndexedSlices: .* must be alike"):
        reduce(lambda r: row(r, 0, dense=(5 + r, 1)))
    with pytest.raises(tf.MismatchError, match=r"the replicas reduce \[1, 2\] IndexedSlices"):
        reduce(lambda r: [row(r, 0)] * (1 + r))
    with pytest.raises(RuntimeError, match="collective number 1"):
        reduce(lambda r: row(r, 0) if r else tf.constant(1.0))
    with pytest.raises(ValueError, match="some are IndexedSlices and some are dense tensors"):
        two.reduce("SUM", PerReplica([row(0, 1), tf.constant(1.0)]), axis=None)
    got = reduce(lambda r: row(r, 0, dense=[None, (5, 1)][r]))
    assert [s.dense_shape for s in got.values] == [None, (5, 1)]


# Defaults -------------------------------------------------------------------------------------


def test_the_default_strategy_has_no_devices():
    extended = d.get_strategy().extended
    for name in ("worker_devices", "parameter_devices"):
        with pytest.raises(RuntimeError, match=f"the default strategy has no {name}"):
            getattr(extended, name)
    assert extended.variable_created_in_scope(tf.Variable(1.0))
    two = mirrored(2)
    assert len(two.extended.worker_devices) == len(two.extended.parameter_devices) == 2
    with two.scope():
        v = tf.Variable(1.0)
    assert not extended.variable_created_in_scope(v)
    assert not two.extended.variable_created_in_scope(tf.Variable(1.0))
    assert two.extended.value_container(3) == 3
    assert mirrored(2).extended.variable_created_in_scope(v) is False


def test_a_cluster_resolver_can_be_given(two):
    resolver = object()
    two.extended._cluster_resolver = resolver
    assert two.cluster_resolver is resolver


def test_update_non_slot_groups_the_results(two):
    extended = two.extended
    places = extended.non_slot_devices([])
    assert places == extended.worker_devices
    got = extended.update_non_slot(places, lambda x: x * 2.0, args=(values(1.0, 2.0),))
    assert type(got) is Mirrored
    assert [float(v) for v in got.values] == [2.0, 4.0]
    listed = extended.update_non_slot(places, lambda: object(), group=False)
    assert len(listed) == 2


def test_empty_destinations_are_refused(two):
    value = two.run(lambda: tf.constant([1.0]) + 0)
    for destinations in ("", d.DistributedValues(())):
        for call in (
            lambda to=destinations: two.extended.reduce_to("SUM", value, to),
            lambda to=destinations: two.extended.batch_reduce_to("SUM", [(value, to)]),
            lambda to=destinations: two.extended.broadcast_to(value.values[0], to),
        ):
            with pytest.raises(ValueError, match="destinations can not be empty"):
                call()
