"""Replicas that miss a merge point: the replica in the error, its time, and later runs."""

from __future__ import annotations

import copy
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from strategies import mirrored, replica_id

import pycollective as tf
from pycollective import distribute as d
from pycollective.distribute.replica_threads import ReplicaRun, ReplicaThreads


@pytest.fixture
def never():
    """Return an event that is set when the test is over, so that no thread outlives the test."""
    event = threading.Event()
    yield event
    event.set()


def total(strategy):
    got = strategy.run(lambda: d.get_replica_context().all_reduce("SUM", tf.constant(1.0)))
    return [float(v) for v in strategy.experimental_local_results(got)]


WAITS = {
    "merge_call()": lambda: d.get_replica_context().merge_call(lambda s: None),
    "all_gather": lambda: d.get_replica_context().all_gather(tf.constant([1.0]), axis=0),
    "a collective": lambda: d.get_replica_context().all_reduce("SUM", tf.constant(1.0)),
    "has finished": lambda: None,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WAITS)
def test_a_replica_that_never_returns_is_named(what, never):
    three = mirrored(3)
    assert three.extended.timeout == 600.0
    three.extended.timeout = 0.5
    begun = threading.Barrier(3)

    def replica():
        begun.wait(20)
        if replica_id() == 2:
            never.wait(60)
        else:
            WAITS[what]()

    waits = what if what == "has finished" else f"waits in {what}"
    with pytest.raises(
        tf.CollectiveTimeoutError,
        match=rf"replica 2 is still running its function and made no call in [\d.]+ s, while "
        rf"replica 0 {waits}.*; replica 1 {waits}.*\. Every replica must .*"
        r"strategy.extended.timeout \(seconds\)",
    ) as raised:
        three.run(replica)
    assert isinstance(raised.value, TimeoutError)
    # The strategy abandons the replica's thread, and makes new threads.
    three.extended.timeout = 600.0
    assert total(three) == [3.0] * 3
    never.set()
    assert total(three) == [3.0] * 3


@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "slices"])
def test_a_call_may_have_a_timeout_of_its_own(two, what, never):
    options = d.experimental.CommunicationOptions(timeout_seconds=0.1)
    value = tf.constant([1.0])

    def replica():
        context = d.get_replica_context()
        if replica_id() == 1:
            never.wait(60)
        elif what == "all_gather":
            context.all_gather(value, axis=0, options=options)
        else:
            sparse = tf.IndexedSlices(value, tf.constant([0]))
            context.all_reduce("SUM", value if what == "all_reduce" else sparse, options)

    with pytest.raises(tf.CollectiveTimeoutError, match="replica 1 is still running"):
        two.run(replica)


def test_replica_that_was_late_once_is_not_waited_for_again(never):
    two = mirrored(2)
    two.extended.timeout = 0.1

    def replica():
        if replica_id() == 1:
            never.wait(5)
            return
        try:
            d.get_replica_context().merge_call(lambda s: None)
        finally:
            d.get_replica_context()._run.timeout = 600.0

    with pytest.raises(tf.CollectiveTimeoutError, match="replica 1 is still running"):
        two.run(replica)
    assert not two.extended._threads.usable  # its thread was still busy


def test_a_replica_on_the_callers_thread_is_named_in_the_log(never, caplog):
    two = mirrored(2)
    two.extended.timeout = 0.1

    def replica():
        if replica_id() == 0:
            never.wait(20)
            return
        try:
            d.get_replica_context().merge_call(lambda s: None)
        finally:
            never.set()

    with caplog.at_level(logging.ERROR, "pycollective"):
        with pytest.raises(
            tf.CollectiveTimeoutError, match="replica 0 is still running its function"
        ):
            two.run(replica)
    assert "replica 0 is still running its function" in caplog.text
    assert total(two) == [2.0, 2.0]


def test_variable_creation_without_the_other_replicas_raises(never):
    two = mirrored(2)
    two.extended.timeout = 0.1

    def replica():
        if replica_id() == 0:
            never.wait(20)
            return
        try:
            tf.Variable(1.0)
        finally:
            never.set()

    with pytest.raises(
        tf.CollectiveTimeoutError, match="replica 1 waits for replica 0 to create a variable"
    ):
        two.run(replica)


def test_later_calls_of_a_late_replica_are_refused(never):
    two = mirrored(2)
    two.extended.timeout = 0.1
    seen = []

    def replica():
        if replica_id() == 0:
            return
        never.wait(60)
        for call in (WAITS["merge_call()"], WAITS["a collective"]):
            try:
                call()
            except tf.CollectiveTimeoutError as error:
                seen.append(str(error))

    with pytest.raises(tf.CollectiveTimeoutError, match="replica 0 has finished"):
        two.run(replica)
    two.extended.timeout = 60.0
    never.set()
    assert total(two) == [2.0, 2.0]
    until = time.monotonic() + 30
    while len(seen) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(seen) == 2
    assert "replica 1 is still running" in seen[0]


def test_long_merge_function_makes_no_replica_late():
    two = mirrored(2)
    two.extended.timeout = 0.5
    begun = threading.Barrier(2)

    def replica():
        begun.wait(20)
        return d.get_replica_context().merge_call(lambda s: time.sleep(0.7) or 5)

    assert two.run(replica) == 5


def test_error_is_raised_while_another_replica_does_not_end(never):
    two = mirrored(2)
    two.extended.timeout = 0.2

    def replica():
        if replica_id() == 0:
            raise KeyError("first")
        never.wait(60)

    with pytest.raises(KeyError, match="first"):
        two.run(replica)
    assert total(two) == [2.0, 2.0]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process")
def test_a_process_that_was_stopped_blames_no_replica(tmp_path):
    program = """
import time
import pycollective.distribute as d
strategy = d.MirroredStrategy(["cpu:0", "cpu:1"])
strategy.extended.timeout = 2

def replica():
    context = d.get_replica_context()
    if context.local_replica_id == 1:
        print("begun", flush=True)
        for _ in range(100):
            time.sleep(0.01)
    return context.merge_call(lambda strategy: 3)

print(strategy.run(replica))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
    ) as process:
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "3\n"


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_timeout_is_positive(two, seconds):
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        two.extended.timeout = seconds


def test_ctrl_c_while_a_replica_still_works_is_raised(two, never, ctrl_c):
    started = threading.Event()

    def replica():
        if replica_id() == 1:
            started.set()
            never.wait(60)

    def interrupt():
        started.wait(10)
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        two.run(replica)
    thread.join(10)
    assert total(two) == [2.0, 2.0]


# Calls that do not match ----------------------------------------------------------------------


def test_merge_calls_of_different_functions_raise(two):
    def first(strategy):
        return None

    def second(strategy):
        return None

    with pytest.raises(RuntimeError, match=r"replica 1 is in merge_call\(\) of another function"):
        two.run(lambda: d.get_replica_context().merge_call([first, second][replica_id()]))
    with pytest.raises(
        RuntimeError, match=r"replica 0 is in merge_call\(\), while replica 1 is in all"
    ):
        two.run(lambda: list(WAITS.values())[replica_id()]())
    assert two.run(lambda: d.get_replica_context().merge_call(lambda s: 3)) == 3


def test_no_tape_records_in_a_merge_function(two):
    def replica():
        x = tf.constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = d.get_replica_context().merge_call(lambda s, v: v.values[0] * 3.0, args=(x,))
            loss = x * y
        return tape.gradient(loss, x)

    assert [float(g) for g in two.run(replica).values] == [6.0, 6.0]


def test_run_in_a_replica_or_a_merge_function_raises(two):
    with pytest.raises(
        RuntimeError, match="Method requires being in cross-replica context, use get_"
    ):
        two.run(lambda: two.run(lambda: 0))
    with pytest.raises(RuntimeError, match=r"strategy.run\(\) was called in a merge function"):
        two.run(lambda: d.get_replica_context().merge_call(lambda s: s.run(lambda: 0)))
    with two.scope():
        v = tf.Variable(1.0)
    two.extended.update(v, lambda c: total(two))  # no replica waits, so this works
    assert total(two) == [2.0, 2.0]


# User threads ---------------------------------------------------------------------------------


def test_runs_of_several_user_threads_do_not_mix():
    three = mirrored(3)
    with three.scope():
        v = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    errors = []

    def replica(x):
        context = d.get_replica_context()
        summed = context.all_reduce("SUM", tf.constant(x))
        gathered = context.all_gather(tf.constant([x + replica_id()]), axis=0)
        v.assign_add(tf.constant(1.0))
        made = tf.Variable(x)
        return summed, gathered, float(made)

    def user(x):
        try:
            for _ in range(10):
                summed, gathered, made = three.run(replica, args=(x,))
                assert [float(s) for s in summed.values] == [3 * x] * 3
                assert gathered.values[1].numpy().tolist() == [x, x + 1, x + 2]
                assert float(three.reduce("SUM", summed, axis=None)) == 9 * x
                assert three.gather(gathered, axis=0).shape == (9,)
                with three.scope():
                    assert float(tf.Variable(x)) == x
                assert three.experimental_local_results(made)[0] == x
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=user, args=(float(i),)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    assert not errors
    assert float(v) == 4 * 10 * 3


@pytest.mark.parametrize("shared", [False, True])
def test_models_train_in_several_user_threads(shared):
    rng = np.random.default_rng(0)
    x, y = rng.random((24, 5)).astype("float32"), rng.random((24, 2)).astype("float32")
    different = [mirrored(2), mirrored(3), d.OneDeviceStrategy("cpu:0"), d.get_strategy()]
    losses = {}

    def train(number, strategy):
        with strategy.scope():
            uniform = tf.keras.initializers.GlorotUniform(seed=number)
            model = tf.keras.Sequential([tf.keras.layers.Dense(2, kernel_initializer=uniform)])
            model.compile(tf.keras.optimizers.Adam(0.01), "mse")
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        losses.setdefault(number, []).append(history.history["loss"])

    strategies = different[:1] * len(different) if shared else different
    for number, strategy in enumerate(strategies):
        train(number, strategy)
    threads = [threading.Thread(target=train, args=a) for a in enumerate(strategies)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    for alone, together in losses.values():  # the second is missing if the thread failed
        np.testing.assert_allclose(together, alone, rtol=1e-5)


def test_a_deep_copy_runs_at_the_same_time(two):
    total(two)
    other = copy.deepcopy(two)
    meet = threading.Barrier(4, timeout=20)
    got = []
    thread = threading.Thread(target=lambda: got.append(other.run(lambda: meet.wait() >= 0)))
    thread.start()
    assert two.run(lambda: meet.wait() >= 0) is True
    thread.join(20)
    assert got == [True]


def test_cause_is_raised_instead_of_its_earlier_consequence():
    """A replica that fails may end the calls of the others before it reports its own error."""
    run = ReplicaRun(ReplicaThreads(2), lambda reason: None, timeout=10)
    run.fail(tf.AbortedError("replica 1 could not go on"))
    run.fail(ZeroDivisionError("in replica 1"))
    run.fail(tf.AbortedError("another one"))
    with pytest.raises(ZeroDivisionError, match="in replica 1"):
        run.raise_error()
