"""Objects with threads: the threads end when nobody refers to the object any more."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref

import numpy as np
import pytest
from fast_cases import some_fast
from strategies import mirrored, workers
from workers import run

import pycollective as tf
from pycollective import data, distribute


@pytest.fixture(autouse=True)
def _without_garbage_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def threads():
    return {t for t in threading.enumerate() if t.name.startswith("pycollective")}


def wait_for(condition, what):
    """Wait until a condition holds: a thread that ends may hold an object for a moment."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.005)


def check_all_end(before):
    def names():
        return f"still alive: {sorted(t.name for t in threads() - before)}"

    wait_for(lambda: not threads() - before, names)


def batches():
    return data.Dataset.range(64).map(lambda x: x).batch(4)


def runs(strategy):
    strategy.run(lambda: 1)


def makes_variables(strategy):
    with strategy.scope():
        v = tf.Variable([1.0], aggregation=tf.VariableAggregation.SUM)
        on_read = tf.Variable(
            1.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    strategy.run(lambda: (v.assign_add(tf.constant([1.0])), on_read.assign_add(1.0)))
    strategy.extended.update(v, lambda component: component.assign([0.0]))


def reduces(strategy):
    def step():
        return distribute.get_replica_context().all_reduce("SUM", tf.constant([1.0, 2.0]))

    value = strategy.run(step)
    strategy.reduce("MEAN", value, axis=0)
    strategy.gather(value, 0)


def merges(strategy):
    strategy.run(lambda: distribute.get_replica_context().merge_call(lambda s: runs))


def trains(strategy):
    with strategy.scope():
        v = tf.Variable(np.ones((64, 64), np.float32))
        optimizer = tf.keras.optimizers.Adam(0.1)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * v)
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])

    strategy.run(step)
    strategy.run(step)


def reads_all(strategy):
    for batch in strategy.experimental_distribute_dataset(batches()):
        strategy.run(lambda x: x, args=(batch,))


def reads_some(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(batches().prefetch(1)))
    strategy.run(lambda x: x, args=(next(iterator),))


def reads_from_a_function(strategy):
    dataset = strategy.distribute_datasets_from_function(lambda _context: batches())
    next(iter(dataset))


def fails(strategy):
    def step():
        context = distribute.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            raise KeyError("mine")
        context.all_reduce("SUM", tf.constant(1.0))

    with pytest.raises(KeyError):
        strategy.run(step)


def is_set(strategy):
    distribute.experimental_set_strategy(strategy)
    runs(strategy)
    distribute.experimental_set_strategy(None)


def fits(strategy):
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((8, 2), np.float32)
    history = model.fit(x, x[:, :1], verbose=0)
    assert history.model is model


USES = [
    fits,
    runs,
    makes_variables,
    reduces,
    merges,
    trains,
    reads_all,
    reads_some,
    reads_from_a_function,
    fails,
    is_set,
]
STRATEGIES = {
    "mirrored": lambda: mirrored(2),
    "one device": lambda: mirrored(2, distribute.ReductionToOneDevice()),
    "hierarchical": lambda: mirrored(2, distribute.HierarchicalCopyAllReduce()),
    "central storage": lambda: distribute.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "workers": lambda: workers(2),
}


_FAST = [("mirrored", use.__name__) for use in USES] + [(name, "reduces") for name in STRATEGIES]


@pytest.mark.parametrize(
    ("name", "use"), some_fast([(n, u.__name__) for n in STRATEGIES for u in USES], _FAST)
)
def test_strategy_that_is_dropped_ends_its_threads_at_once(name, use):
    before = threads()
    strategy = STRATEGIES[name]()
    extended = weakref.ref(strategy.extended)
    globals()[use](strategy)
    dropped = weakref.ref(strategy)
    del strategy
    assert dropped() is None
    wait_for(lambda: extended() is None, lambda: "its `extended` is still there")
    check_all_end(before)


def test_many_strategies_one_after_the_other_leave_no_threads():
    before = threads()
    for _ in range(40):
        runs(mirrored(2))
    check_all_end(before)


def test_copy_of_a_strategy_that_is_dropped_ends_its_threads_at_once():
    before = threads()
    strategy = mirrored(2)
    runs(strategy)
    copied = copy.deepcopy(strategy)
    runs(copied)
    del strategy
    runs(copied)
    assert copied.extended.strategy is copied
    del copied
    check_all_end(before)


def test_variable_keeps_its_strategy():
    strategy = mirrored(2)
    with strategy.scope():
        v = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
    del strategy
    v.assign(2.0)
    assert v.numpy() == 2.0


def test_extended_without_its_strategy_raises_runtime_error():
    extended = mirrored(2).extended
    assert len(extended.worker_devices) == 2
    with pytest.raises(RuntimeError, match="keep a reference to the strategy"):
        extended.call_for_each_replica(lambda: 1)


def fails_in_the_pipeline():
    def third(x):
        if x == 3:
            raise KeyError("mine")
        return x

    iterator = iter(data.Dataset.range(9).map(third, num_parallel_calls=2).prefetch(2))
    with pytest.raises(KeyError):
        for _ in iterator:
            pass
    return iterator


PIPELINES = {
    "prefetch": lambda d: d.prefetch(2),
    "map": lambda d: d.map(lambda x: x, num_parallel_calls=2),
    "several": lambda d: d.map(lambda x: x, num_parallel_calls=2).prefetch(2).batch(2).prefetch(1),
    "interleave": lambda d: d.interleave(
        lambda x: data.Dataset.range(9).prefetch(1), cycle_length=3, num_parallel_calls=2
    ),
    "zip": lambda d: data.Dataset.zip(d.prefetch(2), d.prefetch(2)),
    "cache": lambda d: d.prefetch(2).cache(),
    "repeat": lambda d: d.prefetch(2).repeat(),
}


@pytest.mark.parametrize("name", some_fast(PIPELINES, ["prefetch", "several", "zip"]))
@pytest.mark.parametrize("as_numpy", [False, True])
def test_iterator_that_is_dropped_ends_its_threads_at_once(name, as_numpy):
    before = threads()
    dataset = PIPELINES[name](data.Dataset.range(100).map(lambda x: x))
    iterator = dataset.as_numpy_iterator() if as_numpy else iter(dataset)
    next(iterator)
    del iterator
    check_all_end(before)


def test_iterator_that_failed_ends_its_threads_at_once():
    before = threads()
    fails_in_the_pipeline()
    check_all_end(before)


def test_preemption_handler_that_is_dropped_ends_its_thread_at_once(tmp_path):
    before = threads()
    handler = distribute.experimental.PreemptionCheckpointHandler(
        None,
        tf.train.Checkpoint(v=tf.Variable(1.0)),
        tmp_path,
        distribute.experimental.TerminationConfig(lambda: False),
    )
    dropped = weakref.ref(handler)
    del handler
    wait_for(lambda: dropped() is None, lambda: "the handler is still there")
    check_all_end(before)


DROPS = """
import gc, threading, time, weakref
gc.disable()
strategy = strategy_of()
with strategy.scope():
    v = tf.Variable(np.ones((64, 64), np.float32))
    optimizer = tf.keras.optimizers.SGD(0.1)
strategy.extended.sums_during_backward = True

def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v * v)
    optimizer.minimize(loss, [v], tape)

strategy.run(step)
began = any(strategy.extended._threads.reducers)
strategy.extended.workers.total(1)  # no worker ends while another one needs it
dropped = weakref.ref(strategy)
del strategy, v, optimizer, step
def left():
    return [t.name for t in threading.enumerate() if t.name.startswith("pycollective")]
end = time.monotonic() + 20
while left() and time.monotonic() < end:
    time.sleep(0.01)
say(began=began, gone=dropped() is None, left=left())
"""


@pytest.mark.slow
def test_strategy_of_several_workers_that_is_dropped_ends_its_threads_at_once(tmp_path):
    for said in run(tmp_path, 2, DROPS, replicas=2).said:
        assert said == {"began": True, "gone": True, "left": []}
