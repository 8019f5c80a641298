"""A program of a cluster with parameter servers: each function checks a statement about them.

`test_parameter_server_statements.py` runs it with servers and workers as threads, and as processes with
mapped variables and with TCP. The functions run in their order.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback

import numpy as np

import pycollective as tf

SHARDED, SHARDS = (7, 2), 3
FEW_ROWS = (2, 3)
logged: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("pycollective").addHandler(handler)


def partitioner(shape, dtype):
    if tuple(shape) == (5, 5):
        return [2, 2]
    if tuple(shape) == FEW_ROWS:
        return [5, 1]
    return [SHARDS if tuple(shape) == SHARDED else 1, *[1] * (len(shape) - 1)]


strategy = tf.distribute.ParameterServerStrategy(
    variable_partitioner=partitioner, num_workers=2, num_ps=2
)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
PerWorkerValues = tf.distribute.experimental.coordinator.PerWorkerValues


def first_rows(partition_shape, partition_offset):
    return np.full(partition_shape, partition_offset[0], np.float32)


with strategy.scope():
    scalars = [tf.Variable(float(n), name=f"scalar_{n}") for n in range(3)]
    with tf.device("CPU:0"):
        elsewhere = tf.Variable(3.0, name="elsewhere")
    table = tf.Variable(np.arange(14, dtype=np.float32).reshape(SHARDED), name="table")
    with strategy.extended.colocate_vars_with(scalars[1]):
        beside = tf.Variable(np.zeros(SHARDED, np.float32), name="beside")
    calls = tf.Variable(0, per_worker_variable=True, name="calls")
    count = tf.Variable(0, name="count")
    scattered = {
        (name, rows): tf.Variable(np.full((rows, 4), 3, np.float32), name=f"{name}_{rows}")
        for name in ("add", "sub", "mul", "div", "min", "max", "update")
        for rows in (4, 2048)
    }
    extreme = tf.Variable(np.array([np.inf, np.nan, 1e8, 0], np.float32), name="extreme")
    large = tf.Variable(np.full((2048, 4), 1e8, np.float32), name="large")
    few = tf.Variable(np.zeros(FEW_ROWS, np.float32), name="few")
    by_parts = tf.Variable(first_rows, shape=SHARDED, dtype=tf.float32, name="by_parts")
    metric = tf.keras.metrics.Mean()
outside = tf.Variable(1.0, name="outside")


def worker_index():
    return tf.distribute.coordinator.experimental_get_current_worker_index()


@tf.function
def echo(value, **more):
    return {"value": value, **more} if more else value


@tf.function
def fail(text):
    raise ValueError(text)


@tf.function
def fail_slowly(text):
    time.sleep(0.5)  # so that the other worker runs the function at the same time
    raise ValueError(text)


@tf.function
def scaled(x, factor=2.0):
    return x * factor


@tf.function
def update_metric(value):
    metric.update_state(value)


@tf.function
def slowly(value):
    time.sleep(0.02)
    return worker_index(), value


@tf.function
def add(amount):
    count.assign_add(amount)


@tf.function
def count_call():
    calls.assign_add(1)
    return worker_index()


@tf.function
def next_of(iterator):
    return worker_index(), next(iterator)


@tf.function
def replicas():
    return strategy.run(lambda: tf.constant(1.0)), strategy.num_replicas_in_sync


@tf.function
def lookup(ids):
    return tf.nn.embedding_lookup(table, ids)


@tf.function
def scatter():
    for (name, _), variable in scattered.items():
        rows = tf.IndexedSlices(np.full((3, 4), 5, np.float32), np.array([2, 0, 2]))
        getattr(variable, f"scatter_{name}")(rows)
    time.sleep(0.3)  # so that the other worker runs the function at the same time


@tf.function
def change_extremes():
    extreme.assign_add([0.0, 0.0, 0.0, 1.0])
    extreme.scatter_update(tf.IndexedSlices(np.float32([2, 0.1]), np.array([1, 2])))
    large.scatter_update(tf.IndexedSlices(np.full((1, 4), 0.1, np.float32), np.array([7])))
    return extreme.numpy(), tf.gather(large, [7, 8])[:, 0], large.numpy()[7, 0]


@tf.function
def objects():
    return [object()]


@tf.function
def late_iterator():
    return iter(dataset)


def range_after_check(context):
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.num_replicas_in_sync == 1
    return tf.data.Dataset.range(4)


def broken():
    raise ValueError("no file")


def with_variable():
    tf.Variable(1.0)
    return tf.data.Dataset.range(3)


dataset = coordinator.create_per_worker_dataset(
    lambda: strategy.distribute_datasets_from_function(range_after_check)
)
distributed = coordinator.create_per_worker_dataset(
    strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
)
failing = coordinator.create_per_worker_dataset(broken)
creating = coordinator.create_per_worker_dataset(with_variable)
concrete = scaled.get_concrete_function(tf.TensorSpec((None,), tf.float32), 3.0)


def raised(call, kind, *texts):
    """Return the error of a call, after a check of its class and text."""
    try:
        call()
    except kind as error:
        for text in texts:
            assert text in str(error), str(error)
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def failed(function, *args, kind, text):
    """Check the error of a scheduled function: in fetch, and once in join."""
    value = coordinator.schedule(function, args=args)
    raised(value.fetch, kind, text)
    error = raised(coordinator.join, kind, text)
    coordinator.join()
    return error


# Variables: these statements hold before the first schedule() -----------------------------------------


def server_of(variable):
    return int(variable.device.split("task:")[1].split("/")[0])


def variables_are_placed_in_turn_in_the_order_of_their_creation():
    assert [server_of(v) for v in scalars] == [0, 1, 0]


def the_strategy_has_precedence_over_a_device_scope():
    assert server_of(elsewhere) == 1


def a_variable_outside_of_the_scope_is_on_the_coordinator():
    assert outside.device is None and float(outside) == 1.0


def shards_are_placed_in_turn_and_the_first_ones_have_a_row_more():
    assert [len(part) for part in table.variables] == [3, 2, 2]
    assert [server_of(part) for part in table.variables] == [0, 1, 0]
    assert [part.name for part in table.variables] == [f"table/part_{n}" for n in range(3)]
    assert list(table) == table.variables


def a_variable_has_at_most_a_shard_for_each_row_and_a_scalar_has_none():
    assert [tuple(part.shape) for part in few.variables] == [(1, 3), (1, 3)]
    assert not any(hasattr(scalar, "variables") for scalar in scalars)


def an_initializer_of_parts_makes_the_rows_of_each_shard():
    assert by_parts.numpy()[:, 1].tolist() == [0, 0, 0, 3, 3, 5, 5]


def a_colocated_variable_has_no_shards():
    assert not hasattr(beside, "variables") and server_of(beside) == server_of(scalars[1])


def an_iterator_outside_of_the_workers_raises():
    raised(
        lambda: iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(3))),
        ValueError,
        "pass this dataset to ClusterCoordinator.create_per_worker_dataset",
    )


def run_and_reduce_outside_of_the_workers_warn():
    assert float(strategy.run(lambda: tf.constant(2.0))) == 2.0
    assert float(strategy.reduce("SUM", tf.constant(2.0), axis=None)) == 2.0
    assert any("executed locally on the coordinator" in text for text in logged)


def a_strategy_has_one_coordinator_and_a_mirrored_strategy_raises():
    assert tf.distribute.coordinator.ClusterCoordinator(strategy) is coordinator
    raised(
        lambda: tf.distribute.coordinator.ClusterCoordinator(
            tf.distribute.MirroredStrategy(["CPU:0"])
        ),
        ValueError,
        "Only `tf.distribute.experimental.ParameterServerStrategy` is supported",
    )


def the_worker_index_is_unknown_on_the_coordinator():
    raised(worker_index, RuntimeError, "Cannot retrieve the worker index")


# Functions ------------------------------------------------------------------------------------------


def fetch_returns_arrays_and_get_tensors():
    value = coordinator.schedule(echo, args=(tf.constant([1.5, 2.0]),))
    assert isinstance(value.fetch(), np.ndarray) and value.fetch().tolist() == [1.5, 2.0]
    assert isinstance(value.get(), tf.Tensor)


def results_keep_their_structure_and_may_be_none():
    nested = {"a": [1, (2.5, None)], "b": "text"}
    assert coordinator.schedule(echo, args=(nested,)).fetch() == nested
    assert coordinator.schedule(echo, args=(1,), kwargs={"plus": 2}).fetch() == {
        "value": 1,
        "plus": 2,
    }
    assert coordinator.schedule(echo, args=(None,)).fetch() is None


def join_waits_for_all_functions():
    before = int(count)
    for _ in range(10):
        coordinator.schedule(add, args=(1,))
    coordinator.join()
    assert coordinator.done() and int(count) == before + 10


def fetch_of_a_nest_replaces_remote_values():
    values = [coordinator.schedule(echo, args=(n,)) for n in range(3)]
    assert coordinator.fetch({"a": values, "b": 7}) == {"a": [0, 1, 2], "b": 7}


def functions_run_on_all_workers():
    found = coordinator.fetch([coordinator.schedule(slowly, args=(n,)) for n in range(20)])
    assert {worker for worker, _ in found} == {0, 1}
    assert [value for _, value in found] == list(range(20))


def steps_per_call_calls_a_function_several_times():
    before = int(count)
    coordinator.schedule(add, args=(1,), steps_per_call=5)
    coordinator.join()
    assert int(count) == before + 5


def a_concrete_function_gets_its_other_arguments():
    assert coordinator.schedule(concrete, args=(tf.constant([1.0, 2.0]),)).fetch().tolist() == [
        3,
        6,
    ]


def a_plain_function_raises():
    raised(lambda: coordinator.schedule(lambda: 1), TypeError, "only accepts a `tf.function`")


def a_remote_value_as_argument_raises():
    value = coordinator.schedule(echo, args=(1,))
    raised(
        lambda: coordinator.schedule(echo, args=([value],)),
        ValueError,
        "RemoteValue` used as an input to scheduled function is not yet supported",
    )


def per_worker_values_are_replaced_by_the_workers_own():
    values = PerWorkerValues([10, 11])
    found = coordinator.fetch([coordinator.schedule(slowly, args=(values,)) for _ in range(12)])
    assert set(found) == {(0, 10), (1, 11)}


def run_in_a_function_has_one_replica():
    assert coordinator.schedule(replicas).fetch() == (1.0, 1)


def a_result_that_cannot_be_sent_raises():
    failed(objects, kind=TypeError, text="returned a object, which cannot be sent from a worker")


# Errors ---------------------------------------------------------------------------------------------


def the_first_error_is_raised_once_and_the_coordinator_is_usable_again():
    for call in (coordinator.join, coordinator.done, lambda: coordinator.schedule(echo, args=(1,))):
        raised(coordinator.schedule(fail, args=("first",)).fetch, ValueError, "first")
        raised(call, ValueError, "first")
        coordinator.join()
        assert coordinator.schedule(echo, args=(2,)).fetch() == 2


def functions_after_an_error_are_cancelled():
    coordinator.schedule(fail, args=("first",))
    try:
        values = [coordinator.schedule(slowly, args=(n,)) for n in range(100)]
    except ValueError:  # the first function has failed meanwhile
        return
    raised(coordinator.join, ValueError, "first")
    raised(
        lambda: coordinator.fetch(values),
        tf.errors.CancelledError,
        "The corresponding function is cancelled. Please reschedule the function.",
    )


def errors_after_the_first_are_dropped():
    values = [coordinator.schedule(fail_slowly, args=(text,)) for text in ("one", "other")]
    raised(values[0].fetch, ValueError, "one")
    raised(values[1].fetch, ValueError, "other")
    raised(coordinator.join, ValueError)
    coordinator.join()


# Datasets -------------------------------------------------------------------------------------------


def every_worker_reads_all_elements():
    iterator, found = iter(dataset), {0: [], 1: []}
    for _ in range(100):
        if all(len(elements) == 4 for elements in found.values()):
            break
        try:
            worker, element = coordinator.schedule(next_of, args=(iterator,)).fetch()
            found[worker].append(int(element))
        except tf.errors.OutOfRangeError:
            raised(coordinator.join, tf.errors.OutOfRangeError)
            break
    assert [0, 1, 2, 3] in found.values()


def a_distributed_dataset_has_an_iterator_for_each_worker():
    _, elements = coordinator.schedule(next_of, args=(iter(distributed),)).fetch()
    assert elements.tolist() == [0, 1]


def the_element_spec_is_known():
    assert dataset.element_spec.dtype == np.int64


def the_end_of_a_dataset_is_an_out_of_range_error():
    empty = iter(coordinator.create_per_worker_dataset(tf.data.Dataset.range(0)))
    failed(next_of, empty, kind=tf.errors.OutOfRangeError, text="End of sequence")


def the_coordinator_cannot_iterate():
    raised(lambda: next(iter(dataset)), NotImplementedError, "the coordinator cannot iterate")


def an_iterator_in_a_function_raises():
    failed(late_iterator, kind=RuntimeError, text="not supported inside of a scheduled function")


def a_dataset_that_fails_is_an_input_error_where_it_is_used():
    iterator = iter(failing)
    coordinator.schedule(echo, args=(1,))
    coordinator.join()  # nobody uses the iterator
    kind = tf.distribute.coordinator.ClosureInputError
    error = failed(next_of, iterator, kind=kind, text="Input has an error, the original exception")
    assert isinstance(error.original_exception, ValueError)
    assert "no file" in str(error.original_exception)


def a_dataset_function_must_not_create_variables():
    kind = tf.distribute.coordinator.ClosureInputError
    text = "Creating variables in `dataset_fn` is not allowed"
    failed(next_of, iter(creating), kind=kind, text=text)


# Variables in functions -----------------------------------------------------------------------------


def per_worker_variables_have_a_value_for_each_worker():
    workers = coordinator.fetch([coordinator.schedule(count_call) for _ in range(8)])
    assert [int(v) for v in calls.read_all()] == [workers.count(0), workers.count(1)]


def metrics_have_the_updates_of_all_workers():
    metric.reset_state()
    for value in range(20):
        coordinator.schedule(update_metric, args=(float(value),))
    coordinator.join()
    assert float(metric.result()) == 9.5 and float(metric.count) == 20


def scatters_of_two_workers_equal_those_one_after_the_other():
    for _ in range(2):
        coordinator.schedule(scatter)
    coordinator.join()
    for (name, rows), variable in scattered.items():
        plain = tf.Variable(np.full((rows, 4), 3, np.float32))
        for _ in range(2):
            changes = tf.IndexedSlices(np.full((3, 4), 5, np.float32), np.array([2, 0, 2]))
            getattr(plain, f"scatter_{name}")(changes)
        assert np.allclose(variable.numpy(), plain.numpy()), (name, rows)


def updates_of_infinite_undefined_and_large_values_are_exact():
    expected = np.float32([np.inf, 2, 0.1, 1])
    found, rows, row = coordinator.schedule(change_extremes).fetch()
    assert np.array_equal(found, expected), found
    assert np.array_equal(rows, np.float32([0.1, 1e8])) and row == np.float32(0.1)
    assert np.array_equal(extreme.numpy(), expected)
    assert large.numpy()[6:9, 0].tolist() == np.float32([1e8, 0.1, 1e8]).tolist()


def a_lookup_reads_the_rows_of_shards():
    found = coordinator.schedule(lookup, args=(np.array([6, 0, 3]),)).fetch()
    assert found.tolist() == [[12, 13], [0, 1], [6, 7]]


def sharded_variables_are_read_and_written_as_a_whole():
    before = table.numpy()
    table.assign(before + 1)
    table.assign_sub(np.ones(SHARDED, np.float32))
    assert np.array_equal(table.numpy(), before)
    assert np.array_equal(table[-2:1:-2].numpy(), before[-2:1:-2])
    assert np.array_equal(table.sparse_read([5, 1]).numpy(), before[[5, 1]])
    raised(lambda: table[7], IndexError, "out of bounds")
    raised(lambda: table[tf.constant(1)], TypeError, "tensor cannot index")
    mask = table.numpy() > table.numpy().mean()
    np.testing.assert_array_equal(table[tf.constant(mask)].numpy(), table.numpy()[mask])
    table.scatter_add(tf.IndexedSlices(np.ones((2, 2), np.float32), np.array([0, 6])))
    table.scatter_sub(tf.IndexedSlices(np.ones((2, 2), np.float32), np.array([0, 6])))
    assert np.array_equal(table.numpy(), before)


def a_checkpoint_restores_with_another_number_of_shards():
    path = tf.train.Checkpoint(v=table).save(os.path.join(os.getcwd(), "checkpoint"))
    plain = tf.Variable(np.zeros(SHARDED, np.float32))
    tf.train.Checkpoint(v=plain).restore(path)
    assert np.array_equal(plain.numpy(), table.numpy())
    before = plain.numpy()
    plain.assign(before + 1)
    path = tf.train.Checkpoint(v=plain).save(os.path.join(os.getcwd(), "checkpoint"))
    tf.train.Checkpoint(v=table).restore(path)
    assert np.array_equal(table.numpy(), before + 1)


# Wrong variables ------------------------------------------------------------------------------------


def a_partitioner_with_a_wrong_result_raises():
    with strategy.scope():
        raised(
            lambda: tf.Variable(np.zeros((5, 5), np.float32)),
            ValueError,
            "must return a list/tuple whose elements are 1 besides the first element (non-zero)",
        )


def a_variable_without_an_initial_value_raises():
    with strategy.scope():
        raised(tf.Variable, ValueError, "without specifying `initial_value`")


def main():
    names = list(globals())
    first = names.index("variables_are_placed_in_turn_in_the_order_of_their_creation")
    found = {}
    for name in names[first:]:
        statement = globals()[name]
        if name == "main" or not callable(statement):
            continue
        try:
            statement()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            try:
                coordinator.join()
            except Exception:
                found[name] += "\n" + traceback.format_exc()
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
