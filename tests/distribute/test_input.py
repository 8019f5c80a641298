"""Distributed datasets and loss scaling.

TensorFlow 2.21 printed the expected elements, with a logical CPU device for each replica.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from leftovers import assert_no_threads, threads
from strategies import mirrored

import pycollective as tf
from pycollective import distribute as d
from pycollective.data import Dataset, TensorSpec
from pycollective.data.experimental import AutoShardPolicy
from pycollective.data.transformations import Prefetch
from pycollective.distribute.input import PerReplicaSpec

PER_REPLICA = d.InputReplicationMode.PER_REPLICA


def steps(strategy, elements):
    return [[p.numpy().tolist() for p in strategy.experimental_local_results(x)] for x in elements]


def parts(strategy, dataset):
    return steps(strategy, strategy.experimental_distribute_dataset(dataset))


def under(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy[policy]
    return dataset.with_options(options)


class Worker(d.MirroredStrategy):
    """A strategy that reads its input as one of several workers does. Each worker is a thread."""

    def __init__(self, comm, workers, worker, replicas):
        super().__init__([f"cpu:{i}" for i in range(replicas)])
        self.workers, self.comm = workers, comm
        outer = self

        class Extended(type(self.extended)):
            input_pipeline = (workers, worker)
            num_replicas_in_sync = property(lambda self: workers * replicas, lambda self, _: None)

            def sum_over_workers(self, count):
                return int(outer.comm.all_reduce(np.array([count]))[0])

        self.extended.__class__ = Extended


def on_workers(workers, replicas, work):
    """Run ``work(strategy)`` for each worker at the same time; return the results, or the errors."""
    results = [None] * workers
    comms = tf.local_group(workers, timeout=20)

    def run(worker):
        try:
            results[worker] = work(Worker(comms[worker], workers, worker, replicas))
        except Exception as error:
            results[worker] = error
            comms[worker].abort(str(error))

    running = [threading.Thread(target=run, args=(w,)) for w in range(workers)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert not any(thread.is_alive() for thread in running)
    return results


# Elements of the replicas ------------------------------------------------------------------------


def test_example_of_the_guide_has_halves_for_each_replica(two):
    dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
    elements = list(two.experimental_distribute_dataset(dataset))
    assert len(elements) == 10
    features, labels = elements[0]
    assert [v.shape for v in features.values] == [(5, 1), (5, 1)]
    assert [v.shape for v in labels.values] == [(5, 1), (5, 1)]


def test_every_row_goes_to_one_replica_in_order(strategy):
    n = strategy.num_replicas_in_sync
    for policy in ("AUTO", "OFF"):
        for rows, batch in ((10, 4), (7, 7), (3, 3), (9, 8), (1, 4)):
            got = parts(strategy, under(tf.data.Dataset.range(rows).batch(batch), policy))
            assert [v for step in got for part in step for v in part] == list(range(rows))
            if n > 1:
                assert all(len(step) == n for step in got)
                assert all(len(part) <= -(-batch // n) for step in got for part in step)


def test_uneven_batches_give_ragged_and_empty_parts():
    assert parts(mirrored(4), tf.data.Dataset.range(6).batch(6)) == [[[0, 1], [2, 3], [4, 5], []]]
    assert parts(mirrored(3), tf.data.Dataset.range(4).batch(3)) == [[[0], [1], [2]], [[3], [], []]]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("AUTO", [[[0, 1], [2, 3]], [[4], [5]]]),
        ("DATA", [[[0, 1], [2, 3]], [[4], [5]]]),
        ("OFF", [[[0, 1], [2, 3]], [[4, 5], []]]),
        ("FILE", [[[0, 1], [2, 3]], [[4, 5], []]]),
    ],
)
def test_the_rule_that_cuts_follows_from_the_policy(two, policy, expected):
    dataset = under(Dataset.range(6).batch(4), policy)
    assert parts(two, dataset) == expected
    assert len(two.experimental_distribute_dataset(dataset)) == 2


def test_three_replicas_get_parts_of_each_batch():
    three = mirrored(3)
    ten = Dataset.range(10).batch(4)
    assert parts(three, under(ten, "OFF")) == [
        [[0, 1], [2], [3]],
        [[4, 5], [6], [7]],
        [[8, 9], [], []],
    ]
    assert parts(three, ten) == [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]]
    eleven = Dataset.range(11).batch(4, drop_remainder=True)
    assert parts(three, under(eleven, "OFF")) == [[[0, 1], [2], [3]], [[4, 5], [6], [7]]]


def test_infinite_datasets_are_distributed(two):
    endless = Dataset.range(3).batch(2).repeat()
    for policy, expected in (
        ("AUTO", [[[0], [1]], [[2], []], [[0], [1]], [[2], []]]),
        ("OFF", [[[0], [1]], [[2], [0]], [[1], [2]], [[0], [1]]]),
    ):
        dataset = two.experimental_distribute_dataset(under(endless, policy))
        iterator = iter(dataset)
        assert steps(two, [next(iterator) for _ in range(4)]) == expected
        assert dataset.cardinality == -1
        del iterator
    assert_no_threads()


def test_nests_of_tensors_are_distributed(two):
    rows = {"x": np.arange(6.0), "y": (np.arange(6), np.arange(12).reshape(6, 2))}
    dataset = Dataset.from_tensor_slices(rows).batch(4)
    distributed = two.experimental_distribute_dataset(dataset)
    first, second = distributed
    assert [v.numpy().tolist() for v in first["x"].values] == [[0, 1], [2, 3]]
    assert [v.numpy().tolist() for v in second["y"][1].values] == [[[8, 9]], [[10, 11]]]
    totals = two.run(lambda e: tf.reduce_sum(e["x"]) + tf.cast(e["y"][0][0], "float64"), (first,))
    assert [float(v) for v in totals.values] == [1.0, 7.0]


def test_one_replica_gets_plain_tensors():
    dataset = mirrored(1).experimental_distribute_dataset(tf.data.Dataset.range(3).batch(3))
    (x,) = dataset
    assert isinstance(x, tf.Tensor)
    assert isinstance(dataset, d.DistributedDataset)
    assert dataset.element_spec == TensorSpec((None,), np.int64)
    scalars = mirrored(1).experimental_distribute_dataset(tf.data.Dataset.range(3))
    assert [int(x) for x in scalars] == [0, 1, 2]


def test_the_default_strategy_changes_nothing():
    default = d.get_strategy()
    dataset = Dataset.range(6).batch(4)
    options = d.InputOptions(experimental_replication_mode=PER_REPLICA)
    assert default.experimental_distribute_dataset(dataset, options) is dataset
    assert default.distribute_datasets_from_function(lambda context: dataset, options) is dataset
    one = d.OneDeviceStrategy("cpu:0")
    assert steps(one, one.experimental_distribute_dataset(dataset)) == [[[0, 1, 2, 3]], [[4, 5]]]


# Datasets and iterators -----------------------------------------------------------------------


def test_distributed_dataset_can_be_iterated_again_and_has_a_length(two):
    dataset = two.experimental_distribute_dataset(tf.data.Dataset.range(10).batch(4))
    assert len(dataset) == len(list(dataset)) == len(list(dataset)) == 3
    assert dataset.cardinality == 3
    infinite = two.experimental_distribute_dataset(tf.data.Dataset.range(10).batch(4).repeat())
    with pytest.raises(TypeError, match="infinite"):
        len(infinite)
    assert bool(infinite)


def test_each_pass_follows_the_rules_of_the_dataset(two):
    def orders(dataset):
        distributed = two.experimental_distribute_dataset(dataset.batch(4))
        return [str(steps(two, distributed)) for _ in range(2)]

    one, other = orders(Dataset.range(40).shuffle(40, seed=1))
    assert one != other
    one, other = orders(Dataset.range(40).shuffle(40, seed=1, reshuffle_each_iteration=False))
    assert one == other


def test_element_spec_is_per_replica(two):
    dataset = Dataset.from_tensor_slices((np.zeros((8, 3)), np.zeros(8, np.int32)))
    features, labels = two.experimental_distribute_dataset(dataset.batch(4)).element_spec
    assert features == PerReplicaSpec((TensorSpec((None, 3), np.float64),) * 2)
    assert labels.value_specs[1] == TensorSpec((None,), np.int32)
    full = dataset.batch(4, drop_remainder=True)
    distributed = two.experimental_distribute_dataset(full)
    assert distributed.element_spec[1] == PerReplicaSpec((TensorSpec((2,), np.int32),) * 2)
    assert iter(distributed).element_spec == distributed.element_spec
    uneven = two.experimental_distribute_dataset(dataset.batch(3, drop_remainder=True))
    assert uneven.element_spec[1].value_specs[0].shape == (None,)
    assert repr(labels).startswith("PerReplicaSpec(TensorSpec(shape=(None,)")


def test_reduce_folds_elements(two):
    dataset = two.experimental_distribute_dataset(Dataset.range(6).batch(4))
    assert dataset.reduce(0, lambda count, x: count + 1) == 2
    total = dataset.reduce(
        0, lambda state, x: state + int(two.reduce("SUM", two.run(tf.reduce_sum, (x,)), None))
    )
    assert total == 15


def test_end_of_a_pass_raises_out_of_range_error_again_and_again(two):
    iterator = iter(two.experimental_distribute_dataset(Dataset.range(6).batch(4)))
    assert iter(iterator) is iterator
    assert steps(two, [iterator.get_next(), next(iterator)]) == [[[0, 1], [2, 3]], [[4], [5]]]
    for _ in range(2):
        with pytest.raises(tf.errors.OutOfRangeError, match="End of sequence"):
            iterator.get_next()
        with pytest.raises(StopIteration):
            next(iterator)
    nothing = iterator.get_next_as_optional()
    assert not nothing.has_value()
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not have a value"):
        nothing.get_value()


def test_get_next_as_optional_has_no_value_at_the_end(two):
    dataset = two.distribute_datasets_from_function(lambda context: Dataset.range(3).batch(1))
    iterator = iter(dataset)
    got = []
    while (element := iterator.get_next_as_optional()).has_value():
        got += steps(two, [element.get_value()])
        assert element.element_spec == dataset.element_spec
    assert got == [[[0], [1]], [[2], []]]


def test_a_replica_function_gets_elements_not_iterators(two):
    iterator = iter(two.experimental_distribute_dataset(Dataset.range(6).batch(4)))
    for ask in (iterator.__next__, iterator.get_next, iterator.get_next_as_optional):
        with pytest.raises(
            ValueError,
            match=r"next\(iterator\) should be called from outside of replica_fn. e.g. "
            r"strategy.run\(replica_fn, args=\(next\(iterator\),\)\)",
        ):
            two.run(ask)
    with two.scope():
        assert steps(two, [next(iterator)]) == [[[0, 1], [2, 3]]]


def test_distributed_dataset_has_no_transformations(two):
    distributed = two.experimental_distribute_dataset(Dataset.range(6).batch(4))
    assert not hasattr(distributed, "map")
    with pytest.raises(TypeError, match=r"expected a pycollective.data.Dataset, got Distributed"):
        two.experimental_distribute_dataset(distributed)


def test_describe_sharding_lists_rows(two):
    table = two.experimental_distribute_dataset(Dataset.range(6).batch(4)).describe_sharding()
    assert table.splitlines() == [
        "auto_shard_policy AUTO, here DATA; global batches of 4 rows, each cut by itself",
        "worker  replica  reads",
        "     0        0  rows 0 to 1 of each batch",
        "     0        1  rows 2 to 3 of each batch",
    ]
    made = two.distribute_datasets_from_function(lambda context: Dataset.range(3).batch(1))
    assert "input pipeline id 0, total: 1): 2 element(s) a step" in made.describe_sharding()


# Partial batches ------------------------------------------------------------------------------


def test_replicas_that_have_run_out_get_no_rows(two):
    def dataset_of(spec, element, count=3):
        return two.distribute_datasets_from_function(
            lambda context: Dataset.from_generator(
                lambda: iter([element] * count), output_signature=spec
            )
        )

    images = dataset_of(TensorSpec((None, None, 4)), np.zeros((2, 3, 4), np.float32))
    assert [[v.shape for v in x.values] for x in images] == [
        [(2, 3, 4), (2, 3, 4)],
        [(2, 3, 4), (0, 0, 4)],
    ]
    pairs = dataset_of(
        (TensorSpec((2, None), tf.float64), TensorSpec((), tf.int32)), (np.zeros((2, 3)), 1)
    )
    x, y = list(pairs)[1]
    assert (x.values[1].shape, x.values[1].dtype) == ((0, 0), np.float64)
    assert (y.values[1].shape, y.values[1].dtype) == ((), np.int32)
    unknown = dataset_of(None, np.zeros((2, 3), np.int8))
    assert list(unknown)[1].values[1].shape == (0, 3)
    assert list(unknown)[1].values[1].dtype == np.int8
    scalar = dataset_of(None, (np.zeros(2), 1.5))
    assert float(list(scalar)[1][1].values[1]) == 0.0
    text = dataset_of(TensorSpec((None,), tf.string), ["a", "b"])
    assert list(text)[1].values[1].numpy().tolist() == []
    assert list(dataset_of(None, np.zeros(2), count=0)) == []


def test_incomplete_steps_are_dropped_if_all_shapes_are_known(two):
    def read(dataset):
        return steps(two, two.distribute_datasets_from_function(lambda context: dataset))

    assert read(Dataset.range(10).batch(2)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], []]]
    # All shapes are known: each replica gets a whole element, and the rest is not used.
    full = Dataset.range(10).batch(2, drop_remainder=True)
    assert read(full) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert read(Dataset.range(5)) == [[0, 1], [2, 3]]
    two.extended.enable_partial_batch_handling = False
    assert read(Dataset.range(10).batch(2)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert parts(two, under(Dataset.range(6).batch(4), "OFF")) == [[[0, 1], [2, 3]]]


def test_no_row_is_lost_if_elements_have_other_shapes_than_their_spec(two):
    """A function that is tried with zeros may do something else with the elements."""
    batches = Dataset.range(8).batch(4, drop_remainder=True)
    dataset = batches.map(lambda x: x[np.flatnonzero(x.numpy() != 2).tolist()])
    assert dataset.element_spec.shape == (4,)
    for policy in ("AUTO", "OFF"):
        rows = [v for step in parts(two, under(dataset, policy)) for part in step for v in part]
        assert rows == [0, 1, 3, 4, 5, 6, 7]


# From a function ------------------------------------------------------------------------------


def test_from_function_takes_an_element_for_each_replica(two):
    seen = []

    def make(context):
        seen.append(str(context))
        return tf.data.Dataset.range(10).batch(context.get_per_replica_batch_size(4))

    distributed = two.distribute_datasets_from_function(make)
    assert steps(two, distributed) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], []]]
    assert seen == ["tf.distribute.InputContext(input pipeline id 0, total: 1)"]
    assert distributed.cardinality == 3
    with pytest.raises(TypeError, match="expected a pycollective.data.Dataset, got list"):
        two.distribute_datasets_from_function(lambda context: [1, 2])
    with pytest.warns(DeprecationWarning, match="rename to distribute_datasets_from_function"):
        old = two.experimental_distribute_datasets_from_function(make)
    assert steps(two, old) == steps(two, distributed)


def test_input_context_divides_batch_sizes():
    context = d.InputContext(2, 1, 4)
    assert str(context) == "tf.distribute.InputContext(input pipeline id 1, total: 2)"
    assert (context.num_input_pipelines, context.input_pipeline_id) == (2, 1)
    assert context.num_replicas_in_sync == 4
    assert context.get_per_replica_batch_size(8) == 2
    with pytest.raises(
        ValueError,
        match="The `global_batch_size` 6 is not divisible by `num_replicas_in_sync` 4 ",
    ):
        context.get_per_replica_batch_size(6)
    for name in ("num_input_pipelines", "input_pipeline_id", "num_replicas_in_sync"):
        with pytest.raises(AttributeError):
            setattr(context, name, 3)
    assert str(d.InputContext()) == "tf.distribute.InputContext(input pipeline id 0, total: 1)"


def test_per_replica_mode_calls_the_function_for_each_replica(two):
    seen = []

    def make(context):
        seen.append((str(context), context.num_replicas_in_sync))
        return Dataset.range(5 * (context.input_pipeline_id + 1)).batch(2)

    options = d.InputOptions(experimental_replication_mode=PER_REPLICA)
    distributed = two.distribute_datasets_from_function(make, options)
    assert seen == [
        ("tf.distribute.InputContext(input pipeline id 0, total: 2)", 2),
        ("tf.distribute.InputContext(input pipeline id 1, total: 2)", 2),
    ]
    assert steps(two, distributed) == [
        [[0, 1], [0, 1]],
        [[2, 3], [2, 3]],
        [[4], [4, 5]],
        [[], [6, 7]],
        [[], [8, 9]],
    ]
    assert distributed.cardinality == 5
    on_device = options._replace(
        experimental_fetch_to_device=False, experimental_place_dataset_on_device=True
    )
    assert_no_threads()
    for _ in two.distribute_datasets_from_function(make, on_device):
        assert not threads()


# Options --------------------------------------------------------------------------------------


def test_options_have_the_defaults_of_tensorflow():
    options = d.InputOptions()
    assert tuple(options) == (True, d.InputReplicationMode.PER_WORKER, False, 1)
    assert options == d.InputOptions(None)
    assert repr(options).startswith("InputOptions(experimental_fetch_to_device=True, ")
    assert not d.InputOptions(False).experimental_fetch_to_device
    assert [mode.value for mode in d.InputReplicationMode] == ["PER_WORKER", "PER_REPLICA"]
    assert tuple(d.RunOptions()) == (True, False, None)
    with pytest.raises(ValueError, match="experimental_per_replica_buffer_size must be at least 1"):
        d.InputOptions(experimental_per_replica_buffer_size=0)


def test_per_replica_mode_without_a_function_raises(two):
    dataset = Dataset.range(6).batch(4)
    per_replica = d.InputOptions(experimental_replication_mode=PER_REPLICA)
    for strategy in (two, d.OneDeviceStrategy("cpu:0")):
        with pytest.raises(
            NotImplementedError,
            match="InputReplicationMode.PER_REPLICA is only supported in "
            "`distribute_datasets_from_function`.",
        ):
            strategy.experimental_distribute_dataset(dataset, per_replica)
    with pytest.raises(NotImplementedError, match="of tf.distribute.MirroredStrategy"):
        d.OneDeviceStrategy("cpu:0").distribute_datasets_from_function(
            lambda context: dataset, per_replica
        )
    with pytest.raises(ValueError, match="you must also specify `PER_REPLICA` for the replication"):
        two.distribute_datasets_from_function(
            lambda context: dataset, d.InputOptions(experimental_place_dataset_on_device=True)
        )
    with pytest.raises(
        ValueError,
        match="`experimental_place_dataset_on_device` can not be set to True when "
        "experimental_fetch_to_device is True and replication mode is set to `PER_REPLICA`",
    ):
        two.distribute_datasets_from_function(
            lambda context: dataset,
            per_replica._replace(experimental_place_dataset_on_device=True),
        )
    with pytest.raises(TypeError, match=r"options must be tf.distribute.InputOptions, not dict"):
        two.experimental_distribute_dataset(dataset, {})


@pytest.mark.parametrize("size", [1, 3])
def test_buffer_size_limits_the_batches_made_ahead(two, size):
    made = []

    def count(x):
        made.append(int(x))
        return x

    def ahead(distributed, expected):
        made.clear()
        iterator = iter(distributed)
        next(iterator)
        end = time.monotonic() + 10
        while len(made) < expected and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.02)  # time for batches beyond the limit
        assert len(made) == expected
        del iterator
        assert_no_threads()

    options = d.InputOptions(experimental_per_replica_buffer_size=size)
    mapped = Dataset.range(100).map(count).batch(1)
    mapped.element_spec  # noqa: B018  calls the function once, with zeros
    on_host = d.InputOptions(experimental_fetch_to_device=False)
    # Each step takes an element for each of the two replicas; one more step may be on its way.
    make = lambda context: mapped  # noqa: E731
    ahead(two.distribute_datasets_from_function(make, options), 2 * (1 + size))
    ahead(two.distribute_datasets_from_function(make, on_host), 2)
    pairs = Dataset.range(100).map(count).batch(2)
    pairs.element_spec  # noqa: B018
    ahead(two.experimental_distribute_dataset(pairs, options), 2 * (2 + size))
    ahead(two.experimental_distribute_dataset(pairs, on_host), 4)


# Several workers ------------------------------------------------------------------------------


def test_workers_share_the_data():
    dataset = Dataset.range(15).batch(4)
    one, other = on_workers(2, 2, lambda s: parts(s, dataset))
    assert one == [[[0], [2]], [[4], [6]], [[8], [10]], [[12], [14]]]
    assert other == [[[1], [3]], [[5], [7]], [[9], [11]], [[13], []]]


def test_one_replica_of_several_workers_gets_per_replica_values():
    def work(strategy):
        distributed = strategy.experimental_distribute_dataset(Dataset.range(10).batch(6))
        (first, *_) = distributed
        return type(first).__name__, steps(strategy, distributed)

    assert on_workers(3, 1, work) == [
        ("PerReplica", [[[0, 1]], [[6, 7]]]),
        ("PerReplica", [[[2, 3]], [[8, 9]]]),
        ("PerReplica", [[[4, 5]], [[]]]),
    ]


def test_workers_of_different_length_stop_together():
    def work(strategy):
        def make(context):
            return Dataset.range(4 * context.input_pipeline_id + 1).batch(1, drop_remainder=True)

        distributed = strategy.distribute_datasets_from_function(make)
        assert distributed.element_spec == PerReplicaSpec((TensorSpec((None,), np.int64),) * 2)
        iterator = iter(distributed)
        got = []
        while (element := iterator.get_next_as_optional()).has_value():
            got += steps(strategy, [element.get_value()])
        if strategy.extended.input_pipeline[1] == 0:
            with pytest.raises(StopIteration):  # without a call to the other worker
                next(iterator)
        return got

    one, other = on_workers(2, 2, work)
    assert one == [[[0], []], [[], []], [[], []]]
    assert other == [[[0], [1]], [[2], [3]], [[4], []]]


def test_contexts_of_workers_have_pipeline_ids_and_batch_sizes():
    def work(strategy):
        seen = []

        def make(context):
            seen.append((str(context), context.get_per_replica_batch_size(12)))
            return Dataset.range(6).shard(context.num_input_pipelines, context.input_pipeline_id)

        return seen, steps(strategy, strategy.distribute_datasets_from_function(make))

    for worker, (seen, got) in enumerate(on_workers(3, 2, work)):
        assert seen == [(f"tf.distribute.InputContext(input pipeline id {worker}, total: 3)", 2)]
        assert got == [[worker, worker + 3]]


def test_infinite_data_of_workers_is_not_counted():
    def work(strategy):
        strategy.extended.__class__.sum_over_workers = None
        dataset = strategy.experimental_distribute_dataset(Dataset.range(4).batch(4).repeat())
        iterator = iter(dataset)
        return steps(strategy, [next(iterator), next(iterator)])

    assert on_workers(2, 2, work) == [[[[0], [2]]] * 2, [[[1], [3]]] * 2]


def test_worker_without_data_of_an_unknown_spec_raises():
    def work(strategy):
        worker = strategy.extended.input_pipeline[1]
        made = Dataset.from_generator(lambda: iter([np.zeros(2)] * worker))
        return list(strategy.distribute_datasets_from_function(lambda context: made))

    one, other = on_workers(2, 1, work)
    assert isinstance(one, ValueError)
    assert "output_signature" in str(one)
    assert isinstance(other, (list, tf.CollectiveError))


def test_too_few_files_are_the_same_error_on_every_worker(tmp_path):
    (tmp_path / "only.txt").write_text("1\n2\n")

    def work(strategy):
        names = Dataset.list_files(str(tmp_path / "*.txt"))
        dataset = names.interleave(tf.data.TextLineDataset).batch(2)
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            list(strategy.experimental_distribute_dataset(dataset))
        return str(caught.value)

    one, other = on_workers(2, 1, work)
    assert one == other
    assert "the dataset only has 1 file(s), which is not enough for the required 2 shards" in one
    assert_no_threads()


def test_a_worker_whose_data_fail_asks_the_others_no_more():
    asked = []

    def broken():
        yield np.zeros(2)
        raise OSError("the disk is gone")

    strategy = Worker(None, 2, 1, 1)
    strategy.extended.__class__.sum_over_workers = lambda self, count: asked.append(count) or count
    iterator = iter(
        strategy.distribute_datasets_from_function(lambda context: Dataset.from_generator(broken))
    )
    next(iterator)
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    assert asked == [1]


def test_a_worker_that_gets_nothing_is_warned_once():
    def distribute(dataset):
        strategy = Worker(None, 2, 1, 2)
        strategy.extended.__class__.sum_over_workers = lambda self, count: count
        return strategy.experimental_distribute_dataset(dataset)

    ones = Dataset.range(3).batch(1)
    with pytest.warns(
        RuntimeWarning,
        match=r"worker 1 of 2 gets empty batches only. Each global batch of 1 rows is cut into "
        r"mini-batches of 1 row\(s\), and these 1 go to workers 0 to 0",
    ):
        dataset = distribute(ones)
    for _ in range(2):  # no second warning, which would be an error here
        assert all(v.shape == (0,) for x in dataset for v in x.values)
    unknown = distribute(ones.map(lambda x: x[:2]))
    with pytest.warns(RuntimeWarning, match="got only empty batches in 3 step"):
        list(unknown)
    list(unknown)
    list(distribute(Dataset.range(4).batch(2)))
    list(distribute(under(ones, "OFF")))


def test_workers_with_other_numbers_of_replicas_raise():
    strategy = Worker(None, 2, 0, 2)
    extended = strategy.extended
    odd = {"num_replicas_in_sync": property(lambda self: 3)}
    extended.__class__ = type("Odd", (type(extended),), odd)
    with pytest.raises(
        ValueError, match="expects every worker to have the same number of replicas"
    ):
        strategy.experimental_distribute_dataset(Dataset.range(4).batch(2))


# Bad input ------------------------------------------------------------------------------------


def test_datasets_that_cannot_be_split_raise(two):
    with pytest.raises(
        ValueError,
        match=r"Perhaps your input dataset is not batched\? Call the `batch` method on the input "
        "Dataset in order to be able to split your input across 2 replicas",
    ):
        two.experimental_distribute_dataset(tf.data.Dataset.range(4))
    generated = tf.data.Dataset.from_generator(lambda: iter([1.0, 2.0]))
    with pytest.raises(ValueError, match="Perhaps your input dataset is not batched"):
        list(two.experimental_distribute_dataset(generated))
    with pytest.raises(TypeError, match=r"expected a pycollective.data.Dataset, got list"):
        two.experimental_distribute_dataset([1, 2])
    uneven = Dataset.from_generator(lambda: iter([(np.zeros(4), np.zeros(3))]))
    first, second = next(iter(two.experimental_distribute_dataset(uneven)))
    assert [v.shape for v in (*first.values, *second.values)] == [(2,), (2,), (2,), (1,)]
    batches = Dataset.zip(Dataset.range(4).batch(4), Dataset.range(3).batch(4))
    with pytest.raises(ValueError, match=r"element\[0\] has 4, element\[1\] has 3"):
        list(two.experimental_distribute_dataset(under(batches, "OFF")))


@pytest.mark.parametrize("policy", ["AUTO", "OFF"])
def test_an_error_in_the_middle_arrives_and_threads_end(two, policy):
    closed = []

    def broken():
        try:
            for _ in range(3):
                yield np.zeros(4)
            raise OSError("the disk is gone")
        finally:
            closed.append(True)

    source = Dataset.from_generator(broken, output_signature=TensorSpec((4,), tf.float64))
    for dataset in (source, source.prefetch(2), source.map(lambda x: x, num_parallel_calls=2)):
        closed.clear()
        count = 0
        distributed = two.experimental_distribute_dataset(under(dataset, policy))
        with pytest.raises(OSError, match="the disk is gone"):
            for x in distributed:
                two.run(lambda v: v, args=(x,))
                count += 1
        assert count == 3
        assert closed == [True]
        assert_no_threads()
    with pytest.raises(OSError, match="the disk is gone"):  # each pass begins anew
        list(distributed)
    wrong = Dataset.from_generator(
        lambda: iter([{"x": [1.0, 2.0]}, {"x": ["a", "b"]}]),
        output_signature={"x": TensorSpec((2,))},
    )
    with pytest.raises(TypeError, match="from_generator: element 1"):
        list(two.experimental_distribute_dataset(wrong))
    assert_no_threads()


@pytest.mark.parametrize(
    ("source", "cheap"),
    [
        (Dataset.range(8).batch(4), True),
        (Dataset.range(8).shuffle(8).repeat().batch(4).repeat(), True),
        (Dataset.from_tensors(np.zeros((1 << 18,))).repeat(4).batch(2), False),  # 4 MiB
        (Dataset.range(8).map(lambda x: x).batch(4), False),
        (Dataset.range(8).map(lambda x: x).batch(4).prefetch(1), True),
        (Dataset.range(8).map(lambda x: x).batch(4).prefetch(0), False),
    ],
)
def test_iterator_cheap_elements_starts_no_prefetch_thread(two, source, cheap):
    iterator = iter(two.experimental_distribute_dataset(source))
    next(iterator)
    ahead = [name for name in threads() if name == "pycollective-prefetch"]
    assert len(ahead) == (isinstance(source, Prefetch) if cheap else 1)
    iterator.close()
    del iterator
    assert_no_threads()


def test_threads_of_abandoned_iterators_end(two):
    endless = Dataset.range(8).batch(4).repeat()
    mapped = endless.map(lambda x: x)
    for dataset in (mapped, endless.map(lambda x: x, num_parallel_calls=2).prefetch(2)):
        distributed = two.experimental_distribute_dataset(dataset)
        for _ in distributed:
            assert threads()
            break
        assert_no_threads()
        iterator = iter(distributed)
        next(iterator)
        iterator.close()
        assert_no_threads()
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(KeyError):
            for x in distributed:
                two.run(lambda v: {}[0], (x,))
        assert_no_threads()


def test_mini_batches_are_not_copied(two):
    rows = np.arange(32.0).reshape(8, 4)
    for policy in ("AUTO", "OFF"):
        dataset = under(Dataset.from_tensors(rows), policy)
        (x,) = two.experimental_distribute_dataset(dataset)
        assert all(np.shares_memory(v.array, rows) for v in x.values)


# Loss scaling ---------------------------------------------------------------------------------


def test_average_loss_sums_to_the_global_mean(strategy):
    n = strategy.num_replicas_in_sync
    rows = np.arange(float(4 * n))
    (x,) = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(rows).batch(4 * n)
    )
    losses = strategy.run(tf.nn.compute_average_loss, args=(x,))
    assert float(strategy.reduce("SUM", losses, axis=None)) == pytest.approx(rows.mean())
    regularization = strategy.run(lambda: tf.nn.scale_regularization_loss(tf.constant([1.0, 2.0])))
    assert float(strategy.reduce("SUM", regularization, axis=None)) == pytest.approx(3.0)


def test_average_loss_of_no_example_is_zero_and_of_more_axes_is_scaled():
    empty = tf.nn.compute_average_loss(np.zeros(0, "float32"))
    assert float(empty) == 0.0
    assert empty.dtype == tf.float32
    assert float(tf.nn.compute_average_loss(np.ones((2, 3)))) == 3.0
    assert float(tf.nn.compute_average_loss([1.0, 2.0], global_batch_size=6)) == 0.5
    weighted = tf.nn.compute_average_loss(np.array([1.0, 2.0]), sample_weight=[[2.0], [0.5]])
    assert float(weighted) == 1.5
    assert weighted.dtype == tf.float64


def test_average_loss_bad_arguments_raise(two):
    with pytest.raises(ValueError, match="Expected a tensor with at least rank 1"):
        tf.nn.compute_average_loss(1.0)
    with pytest.raises(ValueError, match="global_batch_size must be scalar"):
        tf.nn.compute_average_loss([1.0], global_batch_size=[1])
    with pytest.raises(TypeError, match="global_batch_size must be an integer"):
        tf.nn.compute_average_loss([1.0], global_batch_size=1.0)
    with pytest.raises(ValueError, match="global_batch_size must be non-negative"):
        tf.nn.compute_average_loss([1.0], global_batch_size=-1)
    with pytest.raises(ValueError, match="sample_weight"):
        tf.nn.compute_average_loss([1.0, 2.0], sample_weight=[[[1.0, 2.0, 3.0]]])
    with two.scope():
        with pytest.raises(RuntimeError, match="compute_average_loss` in cross replica context"):
            tf.nn.compute_average_loss([1.0])
        with pytest.raises(RuntimeError, match="scale_regularization_loss` in cross replica"):
            tf.nn.scale_regularization_loss([1.0])
        assert float(tf.nn.compute_average_loss([1.0], global_batch_size=2)) == 0.5


def test_length_of_a_dataset_from_a_function_counts_the_steps_that_are_made():
    strategy = mirrored(2)
    for drop, steps in ((True, 1), (False, 2)):
        dataset = strategy.distribute_datasets_from_function(
            lambda context, drop=drop: Dataset.range(6).batch(2, drop_remainder=drop)
        )
        assert len(dataset) == len(list(dataset)), drop
        assert steps in (1, 2)
