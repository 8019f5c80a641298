"""`ClusterCoordinator`: scheduled functions, their results, their errors, and lost workers."""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
import time
import weakref

import hangs
import numpy as np
import pytest
from strategies import mirrored

import pycollective as tf
from pycollective.distribute import function_queue
from pycollective.distribute.coordinator import (
    ClosureInputError,
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValue,
    experimental_get_current_worker_index,
)


def cluster(workers=2, **options):
    return ClusterCoordinator(tf.distribute.ParameterServerStrategy(num_workers=workers, **options))


@pytest.fixture
def coordinator():
    return cluster()


@tf.function
def plus_one(x):
    return x + 1


class Gate:
    """A scheduled function that waits; `opened` lets it end."""

    def __init__(self):
        self.started = threading.Semaphore(0)
        self.opened = threading.Event()
        self.function = tf.function(self.wait)

    def wait(self, result=None):
        self.started.release()
        assert self.opened.wait(30)
        return result

    def started_times(self, count):
        for _ in range(count):
            assert self.started.acquire(timeout=30)


@pytest.fixture
def gate():
    found = Gate()
    yield found
    found.opened.set()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"args": 5}, TypeError, "args must be a list or a tuple of arguments, not 5"),
        ({"args": "ab"}, TypeError, "args must be a list or a tuple of arguments, not 'ab'"),
        ({"args": np.ones(2)}, TypeError, "args must be a list or a tuple"),
        ({"kwargs": [1]}, TypeError, "kwargs must be a dict of arguments"),
        ({"steps_per_call": 1.5}, TypeError, "steps_per_call must be a whole number, not 1.5"),
        ({"args": (PerWorkerValues([1]),)}, ValueError, "each of the 2 workers, and has 1"),
    ],
)
def test_schedule_wrong_arguments_raise(coordinator, options, error, text):
    with pytest.raises(error, match=text):
        coordinator.schedule(plus_one, **options)
    assert coordinator.schedule(plus_one, args=[1]).fetch() == 2


def test_wrong_values_and_timeout_raise(coordinator):
    with pytest.raises(TypeError, match="a value for each worker, not 5"):
        PerWorkerValues(5)
    with pytest.raises(TypeError, match="timeout must be a number, not 'soon'"):
        coordinator.join("soon")


def test_lost_worker_whose_thread_polled_for_functions_leaves_no_function_waiting():
    coordinator = cluster(workers=2)
    queue = coordinator._queue
    deadline = time.monotonic() + hangs.SECONDS
    while queue._poller is None:  # a thread polls after a function has run in this thread
        coordinator.schedule(plus_one, args=(1,)).fetch()
        assert time.monotonic() < deadline
    lost = queue._poller
    with queue._work:  # no thread of a worker runs
        lost.retired = True
        queue._own_thread_ran_at = time.monotonic()
        queue._work.notify_all()
    while queue._poller is lost:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    coordinator.schedule(plus_one, args=(1,))
    coordinator.join(hangs.SECONDS)


# Results ------------------------------------------------------------------------------------------


def test_schedule_returns_a_remote_value_with_the_result(coordinator):
    value = coordinator.schedule(plus_one, args=(tf.constant([1.0, 2.0]),))
    assert isinstance(value, RemoteValue)
    fetched = value.fetch()
    assert isinstance(fetched, np.ndarray) and fetched.tolist() == [2, 3]
    assert isinstance(value.get(), tf.Tensor)


def test_schedule_concrete_function_checks_and_completes_its_arguments(coordinator):
    @tf.function
    def scaled(x, factor=2.0):
        return x * factor

    concrete = scaled.get_concrete_function(tf.TensorSpec((None,), tf.float32), 3.0)
    fetched = coordinator.schedule(concrete, args=(tf.constant([1.0, 2.0]),)).fetch()
    assert fetched.tolist() == [3, 6]
    with pytest.raises(TypeError, match="x must fit"):
        coordinator.schedule(concrete, args=(1.0,))


def test_schedule_kwargs_and_nested_results_keep_their_structure(coordinator):
    @tf.function
    def function(a, b):
        return {"sum": a + b, "rest": (tf.constant(1), None, 2.5, "text")}

    found = coordinator.schedule(function, args=[tf.constant(1)], kwargs={"b": 2}).fetch()
    assert found == {"sum": 3, "rest": (1, None, 2.5, "text")}


def test_fetch_of_a_nest_replaces_remote_values_only(coordinator):
    values = [coordinator.schedule(plus_one, args=(tf.constant(n),)) for n in range(3)]
    assert coordinator.fetch({"a": values, "b": 7}) == {"a": [1, 2, 3], "b": 7}


def test_result_of_a_variable_is_its_value_at_that_time(coordinator):
    with coordinator.strategy.scope():
        v = tf.Variable([1.0, 2.0])
    value = coordinator.schedule(tf.function(lambda: v))
    coordinator.join()
    v.assign([5.0, 6.0])
    assert value.fetch().tolist() == [1, 2]


READS = {
    "variable": lambda v: v,
    "read_value": lambda v: v.read_value(),
    "convert_to_tensor": tf.convert_to_tensor,
    "identity": tf.identity,
    "array of the tensor": lambda v: v.read_value().array,
    "view": lambda v: tf.reshape(v, (2, 1)),
    "nest": lambda v: {"a": [tf.convert_to_tensor(v)]},
    "slices": lambda v: tf.IndexedSlices(v, tf.constant([0, 1])),
}


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("consistency", ["locked", "hogwild"])
@pytest.mark.parametrize("read", READS)
def test_result_that_reads_a_variable_keeps_its_value_after_an_update(read, consistency, dtype):
    coordinator = cluster(consistency=consistency)
    with coordinator.strategy.scope():
        v = tf.Variable(np.array([1, 2], dtype))
    value = coordinator.schedule(tf.function(lambda: READS[read](v)))
    coordinator.join()
    v.assign_add(np.array([4, 4], dtype))
    found = value.get()
    if read == "nest":
        (found,) = found["a"]
    elif read == "slices":
        assert found.indices.numpy().tolist() == [0, 1] and found.dense_shape is None
        found = found.values
    assert np.ravel(found).tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["array", "view", "tensor", "tensor of a view", "slices"])
def test_result_in_an_array_that_the_program_reuses_keeps_its_value(coordinator, kind):
    buffer = np.zeros((2, 1), np.float32)
    given = {
        "array": lambda: buffer,
        "view": lambda: [buffer[1:]],
        "tensor": lambda: {"a": tf.convert_to_tensor(buffer)},
        "tensor of a view": lambda: tf.convert_to_tensor(buffer[1:]),
        "slices": lambda: tf.IndexedSlices(buffer, [0, 1]),
    }[kind]

    @tf.function
    def count():
        buffer[:] += 1
        return given()

    values = []
    for _ in range(2):
        values.append(coordinator.schedule(count))
        coordinator.join()
    first, second = (value.fetch() for value in values)
    if kind == "slices":
        first, second = first.values, second.values
    elif kind == "tensor":
        first, second = first["a"], second["a"]
    assert (np.unique(first).tolist(), np.unique(second).tolist()) == ([1], [2])


def test_result_that_is_no_array_raises(coordinator):
    value = coordinator.schedule(tf.function(lambda: [object()]))
    with pytest.raises(TypeError, match="returned a object, which cannot be sent from a worker"):
        coordinator.join()
    with pytest.raises(TypeError, match="returned a object"):
        value.fetch()


def test_method_decorated_by_function_can_be_scheduled(coordinator):
    class Model:
        @tf.function
        def double(self, x):
            return 2 * x

    assert coordinator.schedule(Model().double, args=(3,)).fetch() == 6


def test_join_waits_for_all_functions_and_done_tells_their_end(coordinator, gate):
    coordinator.schedule(gate.function)
    gate.started_times(1)
    assert not coordinator.done()
    gate.opened.set()
    coordinator.join()
    assert coordinator.done()
    coordinator.join()


def test_join_deadline_passes_raises_and_functions_go_on(coordinator, gate):
    value = coordinator.schedule(gate.function, args=(3,))
    gate.started_times(1)
    with pytest.raises(tf.errors.DeadlineExceededError, match="1 functions run and 0 wait"):
        coordinator.join(timeout=0.01)
    gate.opened.set()
    coordinator.join(timeout=30)
    assert value.fetch() == 3


def test_functions_of_two_workers_run_at_the_same_time(coordinator, gate):
    for _ in range(2):
        coordinator.schedule(gate.function)
    gate.started_times(2)
    gate.opened.set()
    coordinator.join()


def test_functions_of_one_worker_run_in_their_order():
    seen = []
    coordinator = cluster(workers=1)
    for n in range(50):
        coordinator.schedule(tf.function(seen.append), args=(n,))
    coordinator.join()
    assert seen == list(range(50))


def test_schedule_full_queue_waits_for_a_worker(coordinator, gate, monkeypatch):
    monkeypatch.setattr(function_queue, "_QUEUE_SIZE", 1)
    for _ in range(3):
        coordinator.schedule(gate.function)  # two run, one waits
        gate.started.acquire(timeout=0.05)
    more = threading.Thread(target=coordinator.schedule, args=(gate.function,))
    more.start()
    more.join(0.05)
    assert more.is_alive()
    gate.opened.set()
    more.join(30)
    assert not more.is_alive()
    coordinator.join()


def test_function_runs_in_the_strategy_scope(coordinator):
    strategy = coordinator.strategy

    def here():
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.in_cross_replica_context()
        return strategy.run(lambda x: x + 1, args=(tf.constant(2),))

    assert coordinator.schedule(tf.function(here)).fetch() == 3


# Wrong calls --------------------------------------------------------------------------------------


def test_coordinator_of_a_strategy_is_one_object(coordinator):
    strategy = coordinator.strategy
    assert ClusterCoordinator(strategy) is coordinator
    assert tf.distribute.experimental.coordinator.ClusterCoordinator(strategy) is coordinator
    other = ClusterCoordinator(copy.deepcopy(strategy))
    assert other is not coordinator and other.strategy is not strategy


def test_coordinator_of_another_strategy_raises():
    with pytest.raises(ValueError, match="Only `tf.distribute.experimental.ParameterServerStr"):
        ClusterCoordinator(mirrored(2))


def test_schedule_plain_function_raises(coordinator):
    with pytest.raises(TypeError, match="only accepts a `tf.function` or a concrete function"):
        coordinator.schedule(lambda: 1)


def test_schedule_arguments_that_the_function_does_not_accept_raise(coordinator):
    for args, text in (((), "missing a required argument: 'x'"), ((1, 2, 3), "too many")):
        with pytest.raises(TypeError, match=rf"plus_one\(\): {text}"):
            coordinator.schedule(plus_one, args=args)
    coordinator.join()  # nothing was scheduled


def test_schedule_remote_value_as_argument_raises(coordinator):
    value = coordinator.schedule(plus_one, args=(1,))
    with pytest.raises(ValueError, match="RemoteValue` used as an input to scheduled function"):
        coordinator.schedule(plus_one, kwargs={"x": [value]})


@pytest.mark.parametrize("call", ["schedule", "join", "done", "get"])
def test_calls_in_a_scheduled_function_raise_instead_of_waiting(coordinator, call):
    value = coordinator.schedule(plus_one, args=(1,))
    calls = {
        "schedule": lambda: coordinator.schedule(plus_one),
        "join": coordinator.join,
        "done": coordinator.done,
        "get": value.get,
    }
    coordinator.schedule(tf.function(calls[call]))
    with pytest.raises(RuntimeError, match="in a scheduled function, where it could wait for it"):
        coordinator.join()


def test_worker_index_is_known_in_scheduled_functions_only(coordinator, gate):
    def index():
        gate.wait()
        return experimental_get_current_worker_index()

    values = [coordinator.schedule(tf.function(index)) for _ in range(2)]
    gate.started_times(2)
    gate.opened.set()
    assert sorted(coordinator.fetch(values)) == [0, 1]
    with pytest.raises(RuntimeError, match="Cannot retrieve the worker index"):
        experimental_get_current_worker_index()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork()")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_schedule_in_a_forked_process_raises(coordinator):
    child = os.fork()
    if not child:
        try:
            coordinator.schedule(plus_one, args=(1,))
        except RuntimeError as error:
            os._exit(0 if "make a new strategy" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Errors of functions ------------------------------------------------------------------------------


def fail(text):
    raise ValueError(text)


FAIL = tf.function(fail)


@pytest.mark.parametrize("call", ["schedule", "join", "done"])
def test_error_of_a_function_is_raised_once_by_the_next_call(coordinator, call):
    value = coordinator.schedule(FAIL, args=("first",))
    with pytest.raises(ValueError, match="first"):
        value.fetch()
    with pytest.raises(ValueError, match="first"):
        if call == "schedule":
            coordinator.schedule(plus_one, args=(1,))
        else:
            getattr(coordinator, call)()
    coordinator.join()
    assert coordinator.done()
    assert coordinator.schedule(plus_one, args=(1,)).fetch() == 2


def test_error_cancels_functions_that_wait_and_waits_for_those_that_run(gate):
    coordinator = cluster(workers=1)
    ended = []

    def first():
        gate.wait()
        ended.append(True)
        fail("first")

    coordinator.schedule(tf.function(first))
    waiting = [coordinator.schedule(tf.function(gate.wait), args=(n,)) for n in range(3)]
    gate.started_times(1)
    running = threading.Timer(0.05, gate.opened.set)
    running.start()
    with pytest.raises(ValueError, match="first"):
        coordinator.join()
    assert ended
    # The worker may have taken some of the waiting functions before the call of join().
    for number, value in enumerate(waiting):
        try:
            assert value.fetch() == number
        except tf.errors.CancelledError as error:
            assert "is cancelled" in str(error)
    assert coordinator.done()


def test_cancelled_function_fetch_raises_cancelled_error(gate):
    coordinator = cluster(workers=2)
    failed = coordinator.schedule(FAIL, args=("first",))
    with pytest.raises(ValueError):
        failed.fetch()
    # Both workers are busy, so that the third function waits when the error is raised.
    queue = coordinator._queue
    with queue._changed:
        error, queue._error = queue._error, None
    running = [coordinator.schedule(gate.function, args=(n,)) for n in range(2)]
    gate.started_times(2)
    waiting = coordinator.schedule(plus_one, args=(1,))
    with queue._changed:
        queue._error = error
    threading.Timer(0.05, gate.opened.set).start()
    with pytest.raises(ValueError, match="first"):
        coordinator.join()
    assert gate.opened.is_set()
    assert coordinator.fetch(running) == [0, 1]
    with pytest.raises(tf.errors.CancelledError, match="is cancelled. Please reschedule"):
        waiting.fetch()


def test_errors_after_the_first_are_dropped(coordinator):
    values = [coordinator.schedule(FAIL, args=("first",))]
    with pytest.raises(ValueError, match="first"):
        values[0].fetch()
    queue = coordinator._queue
    assert "first" in str(queue._error)
    with queue._changed:
        error, queue._error = queue._error, None
    values.append(coordinator.schedule(FAIL, args=("second",)))
    with queue._changed:
        queue._error = error
    with pytest.raises(ValueError, match="first"):
        coordinator.join()
    coordinator.join()


def test_end_of_a_dataset_is_an_out_of_range_error(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(tf.data.Dataset.range(0)))
    coordinator.schedule(tf.function(next), args=(iterator,))
    with pytest.raises(tf.errors.OutOfRangeError, match="End of sequence"):
        coordinator.join()


def test_random_errors_never_hang_and_all_functions_end():
    generator = random.Random(3)
    coordinator, raised, values = cluster(workers=3), 0, []
    for n in range(300):
        function = FAIL if generator.random() < 0.1 else plus_one
        try:
            values.append(
                coordinator.schedule(function, args=(n,) if function is plus_one else ("x",))
            )
            if generator.random() < 0.1:
                coordinator.join()
        except ValueError:
            raised += 1
    try:
        coordinator.join()
    except ValueError:
        raised += 1
    assert raised
    assert all(value._done for value in values)
    assert coordinator.done()


# Per-worker values --------------------------------------------------------------------------------


def read(iterator):
    return [int(next(iterator)) for _ in range(3)]


def test_per_worker_dataset_gives_every_worker_all_elements(coordinator, gate):
    iterator = iter(coordinator.create_per_worker_dataset(tf.data.Dataset.range(3)))

    def both(iterator):
        gate.wait()
        return read(iterator)

    values = [coordinator.schedule(tf.function(both), args=(iterator,)) for _ in range(2)]
    gate.started_times(2)
    gate.opened.set()
    assert coordinator.fetch(values) == [[0, 1, 2]] * 2


def test_per_worker_dataset_from_a_function_is_made_on_each_worker(coordinator, gate):
    def dataset_fn(context):
        assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
        assert context.num_replicas_in_sync == 1
        worker = experimental_get_current_worker_index()
        return tf.data.Dataset.from_tensors(np.int64(worker)).repeat()

    strategy = coordinator.strategy
    per_worker = coordinator.create_per_worker_dataset(
        tf.function(lambda: strategy.distribute_datasets_from_function(dataset_fn))
    )
    assert per_worker.element_spec.dtype == np.int64
    iterator = iter(per_worker)

    def both(iterator):
        gate.wait()
        return experimental_get_current_worker_index(), next(iterator)

    values = [coordinator.schedule(tf.function(both), args=(iterator,)) for _ in range(2)]
    gate.started_times(2)
    gate.opened.set()
    assert sorted(coordinator.fetch(values)) == [(0, 0), (1, 1)]


def test_per_worker_iterator_goes_on_where_the_worker_stopped():
    coordinator = cluster(workers=1)
    dataset = coordinator.strategy.experimental_distribute_dataset(
        tf.data.Dataset.range(4).batch(1)
    )
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    values = [coordinator.schedule(tf.function(next), args=(iterator,)) for _ in range(4)]
    assert np.concatenate(coordinator.fetch(values)).tolist() == [0, 1, 2, 3]


def test_distributed_dataset_without_a_coordinator_raises(coordinator):
    dataset = coordinator.strategy.experimental_distribute_dataset(
        tf.data.Dataset.range(4).batch(2)
    )
    with pytest.raises(ValueError, match="pass this dataset to ClusterCoordinator.create_per_work"):
        iter(dataset)


def test_per_worker_iterator_next_on_the_coordinator_raises(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(tf.data.Dataset.range(3)))
    assert iter(iterator) is iterator
    for call in (iterator.get_next, lambda: next(iterator)):
        with pytest.raises(
            NotImplementedError, match="the coordinator cannot iterate over a per-w"
        ):
            call()


def test_per_worker_dataset_iter_in_a_scheduled_function_raises(coordinator):
    dataset = coordinator.create_per_worker_dataset(tf.data.Dataset.range(3))
    coordinator.schedule(tf.function(lambda: iter(dataset)))
    with pytest.raises(RuntimeError, match="not supported inside of a scheduled function"):
        coordinator.join()


def test_per_worker_dataset_of_something_else_raises(coordinator):
    with pytest.raises(TypeError, match=r"needs a Dataset.*, got \[1, 2\]"):
        coordinator.create_per_worker_dataset([1, 2])


def test_per_worker_dataset_that_fails_is_an_input_error_only_where_it_is_used(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(lambda: fail("no file")))
    coordinator.schedule(plus_one, args=(1,))
    coordinator.join()
    coordinator.schedule(tf.function(next), args=(iterator,))
    with pytest.raises(ClosureInputError) as caught:
        coordinator.join()
    original = caught.value.original_exception
    assert isinstance(original, ValueError) and str(original) == "no file"
    assert str(caught.value) == (
        "Input has an error, the original exception is ValueError('no file'), error message is "
        "no file."
    )
    assert ClosureInputError(caught.value).original_exception is original


def test_per_worker_dataset_function_that_makes_a_variable_raises(coordinator):
    def dataset_fn():
        tf.Variable(1.0)
        return tf.data.Dataset.range(3)

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    coordinator.schedule(tf.function(next), args=(iterator,))
    with pytest.raises(
        ClosureInputError, match="Creating variables in `dataset_fn` is not allowed"
    ):
        coordinator.join()


def test_per_worker_values_are_replaced_by_the_workers_own(coordinator):
    values = tf.distribute.experimental.coordinator.PerWorkerValues([10, 11])

    def both(v):
        return experimental_get_current_worker_index(), v["a"][0]

    for _ in range(5):
        index, own = coordinator.schedule(tf.function(both), args=({"a": [values]},)).fetch()
        assert own == 10 + index


# Lost workers -------------------------------------------------------------------------------------


def test_lost_worker_function_runs_again_on_another(coordinator, gate):
    runs = []

    def function():
        runs.append(experimental_get_current_worker_index())
        if len(runs) == 1:
            gate.wait()
        return len(runs)

    value = coordinator.schedule(tf.function(function))
    gate.started_times(1)
    coordinator.simulate_worker_loss(runs[0])
    coordinator.join(timeout=30)
    assert len(runs) == 2
    gate.opened.set()  # the lost worker ends its function, whose result nobody gets
    assert value.fetch() == 2


def test_lost_worker_makes_its_iterator_again():
    coordinator = cluster(workers=1)
    iterator = iter(coordinator.create_per_worker_dataset(tf.data.Dataset.range(3)))
    following = tf.function(next)
    assert coordinator.schedule(following, args=(iterator,)).fetch() == 0
    assert coordinator.schedule(following, args=(iterator,)).fetch() == 1
    coordinator.simulate_worker_loss(0)
    assert coordinator.schedule(following, args=(iterator,)).fetch() == 0


def test_busy_worker_does_not_delay_functions_of_the_other_worker(coordinator, gate):
    coordinator.schedule(gate.function)
    gate.started_times(1)
    for n in range(20):
        assert coordinator.schedule(plus_one, args=(n,)).fetch() == n + 1
    gate.opened.set()
    coordinator.join()


def test_simulate_worker_loss_of_no_worker_raises(coordinator):
    with pytest.raises(ValueError, match="there is no worker 2; there are 0 to 1"):
        coordinator.simulate_worker_loss(2)


def test_random_losses_run_each_function_at_least_once_and_count_the_repeats():
    """The counter lies between the number of functions and the sum of functions and losses."""
    generator = random.Random(5)
    coordinator = cluster(workers=3)
    with coordinator.strategy.scope():
        counter = tf.Variable(0)
    count = tf.function(lambda: counter.assign_add(1) and None)
    functions = losses = 0
    for _ in range(200):
        for _ in range(generator.randrange(4)):
            coordinator.schedule(count)
            functions += 1
        if generator.random() < 0.5:
            coordinator.simulate_worker_loss(generator.randrange(3))
            losses += 1
    coordinator.join(timeout=60)
    assert losses > 50
    assert functions <= int(counter) <= functions + losses


def test_coordinator_that_is_deleted_ends_its_threads():
    coordinator = cluster()
    names = {f"pycollective-worker-{n}" for n in range(2)}
    queue = weakref.ref(coordinator._queue)
    threads = [t for t in threading.enumerate() if t.name in names]
    own = [t for t in threads if getattr(t._target, "__self__", None) is queue()]
    assert len(own) == 2
    assert coordinator.schedule(plus_one, args=(1,)).fetch() == 2
    del coordinator
    gc.collect()
    for thread in own:
        thread.join(30)
        assert not thread.is_alive()


def test_per_worker_dataset_that_nobody_uses_is_released(coordinator):
    dataset = weakref.ref(coordinator.create_per_worker_dataset(tf.data.Dataset.range(3)))
    gc.collect()
    assert dataset() is None
