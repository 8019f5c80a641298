"""The common behaviour of strategies: one suite over all kinds and sizes, as in TensorFlow."""

from __future__ import annotations

import copy
from collections import namedtuple

import numpy as np
import pytest
from leftovers import assert_no_threads
from strategies import EVERY, mirrored, replica_id

import pycollective as tf
from pycollective import distribute as d


@pytest.fixture(params=EVERY.values(), ids=EVERY)
def strategy(request):
    return request.param()


def results(strategy, value):
    """Return the components of a value of a run; without a wrapper, the value is the only one."""
    found = strategy.experimental_local_results(value)
    assert len(found) == strategy.num_replicas_in_sync
    return found


def test_contexts_in_scope_run_and_merge_call(strategy):
    default = d.get_strategy()
    real = strategy is not default

    def facts():
        return (
            d.get_strategy() is strategy,
            d.get_replica_context() is None,
            d.in_cross_replica_context(),
            d.has_strategy(),
        )

    with strategy.scope() as entered:
        assert entered is strategy
        assert facts() == (True, real, real, real)

    def replica():
        assert facts() == (True, False, False, real)
        context = d.get_replica_context()
        assert context.strategy is strategy
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        number = context.replica_id_in_sync_group
        assert int(number) == context.local_replica_id
        if real:
            assert (type(number), number.dtype, number.shape) == (tf.Tensor, tf.int32, ())
            assert context.devices == (strategy.extended.worker_devices[int(number)],)
        else:
            assert type(number) is int
        assert context.merge_call(lambda s: (s is strategy, facts())) == (
            True,
            (True, True, True, real),
        )
        return True

    assert strategy.run(replica) is True
    assert d.get_strategy() is default


def test_run_groups_by_identity(strategy):
    Pair = namedtuple("Pair", "a b")
    shared = object()

    def replica(x, factor):
        return {"a": [x * factor, None, shared], "b": Pair(1, (replica_id(),))}

    x = strategy.experimental_distribute_values_from_function(
        lambda c: tf.constant(1.0 + c.replica_id_in_sync_group)
    )
    got = strategy.run(replica, args=(x,), kwargs={"factor": 2.0})
    assert list(got) == ["a", "b"]
    assert got["a"][1:] == [None, shared]
    assert type(got["b"]) is Pair
    assert got["b"].a == 1
    n = strategy.num_replicas_in_sync
    assert [float(v) for v in results(strategy, got["a"][0])] == [2.0 * (r + 1) for r in range(n)]
    assert results(strategy, got["b"].b[0]) == tuple(range(n))
    assert isinstance(got["a"][0], d.DistributedValues) == (n > 1)
    assert strategy.run(lambda: 1) == 1
    with pytest.raises(ValueError, match="positional args must be a list or tuple, got"):
        strategy.run(replica, args=3)


def test_run_options_change_nothing(strategy):
    options = d.RunOptions(experimental_enable_dynamic_batch_size=False)
    x = strategy.experimental_distribute_values_from_function(
        lambda c: tf.constant(1.0 + c.replica_id_in_sync_group)
    )
    for given in (options, d.RunOptions(), None):
        got = strategy.run(lambda x, y: x * y, (x,), {"y": 2.0}, options=given)
        want = [2.0 * (r + 1) for r in range(strategy.num_replicas_in_sync)]
        assert [float(v) for v in results(strategy, got)] == want


def test_values_from_a_function_are_one_for_each_replica(strategy):
    seen = []

    def make(context):
        seen.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
        return {"one": 1, "id": context.replica_id_in_sync_group}

    n = strategy.num_replicas_in_sync
    got = strategy.experimental_distribute_values_from_function(make)
    assert seen == [(r, n) for r in range(n)]
    wraps = strategy.extended.groups_values
    for value in got.values():
        assert isinstance(value, d.values.PerReplica) == wraps
    assert results(strategy, got["one"]) == (1,) * n
    assert results(strategy, got["id"]) == tuple(range(n))


def test_local_results_are_the_components(strategy):
    n = strategy.num_replicas_in_sync
    assert strategy.experimental_local_results(5) == (5,)
    assert strategy.experimental_local_results([5, 6]) == ([5, 6],)
    assert strategy.unwrap(5) == (5,)
    value = d.values.PerReplica(list(range(n)))
    if strategy.extended.groups_values:
        assert strategy.experimental_local_results(value) == tuple(range(n))
        assert strategy.experimental_local_results({"a": value, "b": 7}) == tuple(
            {"a": r, "b": 7} for r in range(n)
        )
    else:
        assert strategy.experimental_local_results(value) == (value,)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_reduce_of_many_halves_keeps_small_summands(strategy, dtype):
    n = strategy.num_replicas_in_sync
    ones = strategy.run(lambda: tf.ones([5000], dtype))
    total, mean = (strategy.reduce(op, ones, axis=0) for op in ("sum", "mean"))
    assert total.dtype == mean.dtype == dtype
    np.testing.assert_allclose(float(total), 5000 * n, rtol=2.0**-7)
    assert (
        float(
            strategy.reduce("mean", strategy.run(lambda: tf.fill([5000], tf.cast(100, dtype))), 0)
        )
        == 100
    )
    assert float(mean) == 1


def test_collectives_of_dicts_in_other_orders_keep_the_keys(strategy):
    def step():
        parts = {"a": tf.constant([1.0]), "b": tf.constant([10.0])}
        if replica_id() % 2:
            parts = dict(reversed(parts.items()))
        context = d.get_replica_context()
        return context.all_reduce("sum", parts), context.all_gather(parts, axis=0)

    n = strategy.num_replicas_in_sync
    summed, gathered = strategy.run(step)
    for key, number in (("a", 1.0), ("b", 10.0)):
        for total in results(strategy, summed[key]):
            np.testing.assert_array_equal(total, [n * number])
        for rows in results(strategy, gathered[key]):
            np.testing.assert_array_equal(rows, [number] * n)


@pytest.mark.parametrize("op", ["SUM", "mean", d.ReduceOp.SUM])
def test_reduce_and_gather_join_the_rows_of_all_replicas(strategy, op):
    n = strategy.num_replicas_in_sync
    ragged = strategy.run(lambda: tf.constant(np.arange(2.0 * replica_id() + 1)))
    rows = np.concatenate([np.arange(2.0 * r + 1) for r in range(n)])
    want = rows.mean() if op == "mean" else rows.sum()
    for axis in (0, -1, [0], (0,)):
        total = strategy.reduce(op, ragged, axis=axis)
        assert type(total) is tf.Tensor
        assert float(total) == pytest.approx(want)
    gathered = strategy.gather(ragged, axis=0)
    assert type(gathered) is tf.Tensor
    np.testing.assert_array_equal(gathered.numpy(), rows)
    ids = strategy.run(lambda: {"r": tf.constant([1.0 * replica_id(), 2.0])})
    total = strategy.reduce(op, ids, axis=None)["r"].numpy()
    scale = n if op == "mean" else 1
    np.testing.assert_allclose(total, [sum(range(n)) / scale, 2.0 * n / scale])


@pytest.mark.parametrize("axis", [None, 0])
def test_reduce_sum_of_bools_raises_and_their_mean_counts(strategy, axis):
    bools = strategy.run(lambda: tf.constant([True, False]))
    with pytest.raises(TypeError, match="needs numbers, got bool"):
        strategy.reduce("sum", bools, axis)
    assert np.mean(strategy.reduce("mean", bools, axis).numpy()) == 0.5


def test_reduce_wrong_arguments_raise(strategy):
    x = strategy.run(lambda: tf.constant([1.0]))
    with pytest.raises(TypeError):
        strategy.reduce("SUM", x)
    with pytest.raises(TypeError, match="Expected `reduce_op` to be a `tf.distribute.ReduceOp`"):
        strategy.reduce("MAX", x, axis=None)
    with pytest.raises(ValueError, match="`axis` = 1 out of range for `value` with rank 1"):
        strategy.reduce("SUM", x, axis=1)
    with pytest.raises(ValueError, match="`axis` = -2 out of range for `value` with rank 1"):
        strategy.reduce("SUM", x, axis=[0, -2])
    for axis in ("0", 1.0, True, [0, None]):
        with pytest.raises(TypeError, match="axis must be"):
            strategy.reduce("SUM", x, axis=axis)
    with pytest.raises(ValueError, match="`axis` = 1 out of range for `value` with rank 1"):
        strategy.gather(x, axis=1)
    with pytest.raises(TypeError, match="axis must be an int"):
        strategy.gather(x, axis=None)


def test_methods_of_all_replicas_are_refused_in_one(strategy):
    def calls():
        return {
            "reduce": lambda: strategy.reduce("SUM", 1.0, axis=None),
            "run": lambda: strategy.run(lambda: 0),
            "reduce_to": lambda: strategy.extended.reduce_to("SUM", 1.0, "cpu:0"),
            "batch_reduce_to": lambda: strategy.extended.batch_reduce_to("SUM", []),
            "broadcast_to": lambda: strategy.extended.broadcast_to(1, "cpu:0"),
            "call": lambda: strategy.extended.call_for_each_replica(lambda: 0),
        }

    for name in calls():
        with pytest.raises(RuntimeError, match="Method requires being in cross-replica context"):
            strategy.run(lambda name=name: calls()[name]())
    with pytest.raises(
        RuntimeError, match=r"gather method requires cross-replica context, use get_replica_context"
    ):
        strategy.run(lambda: strategy.gather(tf.constant([1.0]), axis=0))
    with mirrored(2).scope():
        for call in [*calls().values(), lambda: strategy.gather(tf.constant([1.0]), axis=0)]:
            with pytest.raises(RuntimeError, match="Mixing different"):
                call()


def test_collectives_of_nests_have_the_right_values_and_gradients(strategy):
    n = strategy.num_replicas_in_sync

    def replica():
        r = replica_id()
        context = d.get_replica_context()
        x = tf.constant(np.full((r + 1, 2), 2.0 + r))
        y = tf.constant(np.array([1.0 + r]))
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            gathered = context.all_gather({"x": x * x, "id": tf.constant([r])}, axis=0)
            summed = context.all_reduce("MEAN", [y * y])
            loss = tf.reduce_sum(gathered["x"]) * (1.0 + r) + tf.reduce_sum(summed[0])
        return gathered, tape.gradient(loss, [x, y])

    weights = n * (n + 1) / 2
    for r, (gathered, (gx, gy)) in enumerate(results(strategy, strategy.run(replica))):
        rows = [2.0 + q for q in range(n) for _ in range(q + 1)]
        np.testing.assert_array_equal(gathered["x"].numpy()[:, 1], np.square(rows))
        assert gathered["id"].numpy().tolist() == list(range(n))
        # The loss of every replica depends on every x.
        np.testing.assert_allclose(gx.numpy(), np.full((r + 1, 2), 2 * (2.0 + r) * weights))
        np.testing.assert_allclose(gy.numpy(), [2 * (1.0 + r)])


def test_variables_belong_to_their_strategy(strategy):
    with strategy.scope():
        v = tf.Variable([1.0, 2.0], name="v")
    assert v.name == "v"
    assert strategy.extended.variable_created_in_scope(v)
    v.assign([3.0, 4.0])
    v.assign_add([1.0, 1.0])
    np.testing.assert_array_equal(v.numpy(), [4.0, 5.0])
    read = strategy.run(lambda: v + 0.0)
    for component in results(strategy, read):
        np.testing.assert_array_equal(component.numpy(), [4.0, 5.0])
    np.testing.assert_array_equal(strategy.extended.read_var(v).numpy(), [4.0, 5.0])
    with strategy.extended.colocate_vars_with(v):
        pass
    for wrong in (3, None):
        with pytest.raises(
            ValueError,
            match=r"`colocate_vars_with` must only be passed a variable created in this "
            r"tf.distribute.Strategy.scope\(\), not",
        ):
            with strategy.extended.colocate_vars_with(wrong):
                pass


def test_update_reaches_each_component_once(strategy):
    with strategy.scope():
        v = tf.Variable(1.0)
    seen = []

    def add(component, amount, note=None):
        seen.append((d.in_cross_replica_context(), d.get_replica_context(), note))
        component.assign_add(amount)
        return component.read_value()

    amounts = strategy.experimental_distribute_values_from_function(lambda c: 2.0)
    result = strategy.extended.update(v, add, args=(amounts,), kwargs={"note": "x"})
    assert set(seen) == {(True, None, "x")}
    assert float(v) == 3.0
    assert float(result) == 3.0
    listed = strategy.extended.update(v, lambda c: float(c), group=False)
    assert listed == [3.0] * len(seen)


def test_update_non_slot_returns_the_result_of_the_function(strategy):
    with strategy.scope():
        v = tf.Variable(1.0, name="b")
        w = tf.Variable(1.0, name="a")
    places = strategy.extended.non_slot_devices([v, w])
    assert strategy.extended.update_non_slot(places, lambda x: x, args=(5,)) == 5
    if strategy is d.get_strategy():
        assert places is w


def test_extended_flags_are_tensorflows(strategy):
    extended = strategy.extended
    assert extended.should_checkpoint is True
    assert extended.should_save_summary is True
    assert extended.experimental_should_init is True
    multi_worker = isinstance(strategy, d.MultiWorkerMirroredStrategy)
    assert extended.experimental_between_graph is multi_worker
    assert extended.experimental_require_static_shapes is False
    assert extended.enable_partial_batch_handling is True
    if strategy is not d.get_strategy():
        extended.experimental_enable_get_next_as_optional = False
        assert extended.enable_partial_batch_handling is False
    assert (strategy.cluster_resolver is not None) is multi_worker


def test_strategy_copies_only_deeply(strategy):
    with pytest.raises(RuntimeError, match="Must only deepcopy DistributionStrategy."):
        copy.copy(strategy)
    if strategy is d.get_strategy():
        for one in (strategy, strategy.extended):
            with pytest.raises(
                RuntimeError, match="single instance of _DefaultDistributionStrategy"
            ):
                copy.deepcopy(one)
        return
    strategy.run(replica_id)
    other = copy.deepcopy(strategy)
    assert other.extended.strategy is other
    assert other.extended is not strategy.extended
    with strategy.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        with other.scope():
            pass
    n = strategy.num_replicas_in_sync
    for one in (strategy, other):
        total = one.run(lambda: d.get_replica_context().all_reduce("SUM", tf.constant(1.0)))
        assert [float(v) for v in results(one, total)] == [n] * n


def test_an_exception_of_a_replica_arrives(strategy):
    def replica():
        raise KeyError(replica_id())

    with pytest.raises(KeyError):
        strategy.run(replica)
    assert not d.has_strategy()


def test_indexed_slices_are_concatenated(strategy):
    n = strategy.num_replicas_in_sync

    def slices(r):
        rows = tf.constant(np.full((r + 1, 2), 1.0 + r))
        return tf.IndexedSlices(rows, tf.constant(np.arange(r + 1)), (4, 2))

    whole = np.zeros((4, 2))
    for r in range(n):
        whole[: r + 1] += 1.0 + r
    for op, scale in (("SUM", 1), ("MEAN", n)):
        got = strategy.run(
            lambda op=op: d.get_replica_context().all_reduce(
                op, {"s": slices(replica_id()), "d": tf.constant(1.0)}
            )
        )
        for one in results(strategy, got):
            s = one["s"]
            assert isinstance(s, tf.IndexedSlices)
            assert s.dense_shape == (4, 2)
            assert s.indices.numpy().tolist() == [i for r in range(n) for i in range(r + 1)]
            np.testing.assert_allclose(tf.convert_to_tensor(s).numpy(), whole / scale)
        value = strategy.run(lambda: slices(replica_id()))
        reduced = strategy.reduce(op, value, axis=None)
        np.testing.assert_allclose(tf.convert_to_tensor(reduced).numpy(), whole / scale)
        pairs = [(value, "cpu:0"), (strategy.run(lambda: tf.constant([2.0])), "cpu:0")]
        batched = strategy.extended.batch_reduce_to(op, pairs)
        np.testing.assert_allclose(tf.convert_to_tensor(batched[0]).numpy(), whole / scale)
        assert float(tf.convert_to_tensor(batched[1])[0]) == 2.0 * n / scale
    with pytest.raises(NotImplementedError, match="gather does not support IndexedSlices"):
        strategy.gather(value, axis=0)
    with pytest.raises(NotImplementedError, match="all_gather does not support IndexedSlices"):
        strategy.run(lambda: d.get_replica_context().all_gather([slices(0)], axis=0))


def test_fit_error_of_a_dataset_in_an_epoch_is_raised_and_closes_it(strategy):
    closed = []

    def rows():
        try:
            for _ in range(3):
                yield np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
            raise OSError("the disk is gone")
        finally:
            closed.append(True)

    spec = tf.TensorSpec((4, 2), tf.float32), tf.TensorSpec((4, 1), tf.float32)
    dataset = tf.data.Dataset.from_generator(rows, output_signature=spec)
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    steps = []

    def loop():
        for x, _ in strategy.experimental_distribute_dataset(dataset):
            steps.append(strategy.run(model, args=(x,)))

    counted = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: steps.append(b))
    for run in (loop, lambda: model.fit(dataset, epochs=2, verbose=0, callbacks=[counted])):
        steps.clear()
        closed.clear()
        with pytest.raises(OSError, match="the disk is gone"):
            run()
        assert len(steps) == 3
        assert closed == [True]
        assert_no_threads()
    assert float(tf.reduce_sum(model(np.ones((1, 2), "float32")))) == pytest.approx(
        float(model.predict(np.ones((1, 2), "float32"), verbose=0)[0, 0])
    )
