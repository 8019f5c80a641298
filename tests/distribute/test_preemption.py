"""`PreemptionCheckpointHandler` in one process: what it is made of, and when it saves and ends."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import pycollective as tf
from pycollective.cluster import ClusterSpec, SimpleClusterResolver

E = tf.distribute.experimental


class Ended(Exception):
    """What the tests' own ``exit_fn`` raises."""


def end():
    raise Ended


@pytest.fixture(autouse=True)
def _sigterm():
    """Give the signal back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def handler_of(v, folder, **config):
    config.setdefault("exit_fn", end)
    return E.PreemptionCheckpointHandler(
        None, tf.train.Checkpoint(v=v), folder, E.TerminationConfig(**config)
    )


def test_a_signal_saves_after_the_step_and_ends(tmp_path):
    v = tf.Variable(0.0)
    handler = handler_of(v, tmp_path, exit_fn=None)

    def step(amount, told=False):
        v.assign_add(amount)
        if told:
            os.kill(os.getpid(), signal.SIGTERM)
        return float(v)

    assert [handler.run(step, 1.0), handler.run(step, amount=2.0)] == [1.0, 3.0]
    assert handler.total_run_calls == 2
    assert os.listdir(tmp_path) == []
    with pytest.raises(SystemExit) as ended:
        handler.run(step, 4.0, told=True)
    assert ended.value.code == 42
    # Begun again, the program goes on where it was.
    again = tf.Variable(0.0)
    other = handler_of(again, tmp_path)
    assert (float(again), other.total_run_calls) == (7.0, 3)


def test_within_its_grace_period_training_goes_on(tmp_path):
    """It is saved when the signal comes, and once more before the period is over."""
    v = tf.Variable(0.0)
    saved = []
    handler = handler_of(v, tmp_path, grace_period=0.2, save_fn=lambda: saved.append(float(v)))

    def step():
        v.assign_add(1.0)
        time.sleep(0.01)
        if float(v) == 2.0:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Ended):
        while float(v) < 1000:
            handler.run(step)
    assert saved[0] == 2.0
    assert len(saved) == 2
    assert saved[1] == float(v) == handler.total_run_calls > 2


def test_a_function_may_say_when_to_end(tmp_path):
    v = tf.Variable(0.0)
    asked = threading.Event()
    handler = handler_of(v, tmp_path, termination_watcher_fn=lambda: asked.set() or True)
    assert asked.wait(20)
    with pytest.raises(Ended):
        for _ in range(1000):
            handler.run(v.assign_add, 1.0)
            time.sleep(0.001)  # the watcher's thread has asked, and is about to tell
    again = tf.Variable(0.0)
    handler_of(again, tmp_path)
    assert float(again) == float(v)


def test_an_error_in_a_step_is_the_programs(tmp_path):
    handler = handler_of(tf.Variable(0.0), tmp_path)
    with pytest.raises(ZeroDivisionError):
        handler.run(lambda: 1 / 0)
    assert handler.total_run_calls == 0


def test_a_manager_is_used_as_it_is(tmp_path):
    v = tf.Variable(3.0)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(v=v), tmp_path, max_to_keep=2)
    handler = E.PreemptionCheckpointHandler(
        None, manager, termination_config=E.TerminationConfig(exit_fn=end)
    )
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Ended), handler.watch_preemption_scope():
        handler.save_checkpoint_if_preempted()
    assert manager.latest_checkpoint is not None


def test_what_cannot_be_handled(tmp_path):
    checkpoint = tf.train.Checkpoint(v=tf.Variable(0.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="a checkpoint_dir must be passed"):
        E.PreemptionCheckpointHandler(None, checkpoint)
    with pytest.raises(TypeError, match="expected a Checkpoint or a CheckpointManager"):
        E.PreemptionCheckpointHandler(None, tmp_path)
    spec = ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]})
    with pytest.raises(NotImplementedError, match="does not support usage with .*ParameterServer"):
        E.PreemptionCheckpointHandler(SimpleClusterResolver(spec), checkpoint, tmp_path)
