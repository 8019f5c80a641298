"""SIGTERM to workers in the middle of a step: all save that step, and new workers continue from it."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import pytest
from workers import ended, start

import pycollective as tf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sends signals"),
]

# Worker 0 comes late to a step, in which the others wait for it.
_LATE = """
import time, pathlib
me = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
LATE = int(os.environ["LATE"])
def late(step):
    if step == LATE and not me:
        pathlib.Path("in step").touch()
        until = time.monotonic() + 30
        while not os.path.exists("go on") and time.monotonic() < until:
            time.sleep(0.01)
"""
_LOOP = """
strategy = strategy_of()
with strategy.scope():
    v = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
handler = tf.distribute.experimental.PreemptionCheckpointHandler(
    strategy.cluster_resolver, tf.train.Checkpoint(v=v), "saved")
def step():
    late(handler.total_run_calls + 1)
    strategy.run(lambda: v.assign_add(1.0))  # the mean of all workers: they wait for each other
while handler.total_run_calls < 12:
    handler.run(step)
say(done=float(v))
"""
_FIT = """
def data():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(41, 4))
    return x, x[:, :1] - 2 * x[:, 1:2]
def model_of():
    tf.keras.backend.set_floatx("float64")
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, "tanh"), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    model.build((None, 4))
    rng = np.random.default_rng(7)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    return model
def fit(model, *callbacks):
    x, y = data()
    return model.fit(
        x, y, batch_size=12, epochs=3, shuffle=False, verbose=0, callbacks=list(callbacks),
        validation_data=(x, y))
"""
_FITS = """
class Late(tf.keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        late(int(self.model.optimizer.iterations) + 1)
    def on_test_begin(self, logs=None):  # after the last step
        late(-int(self.model.optimizer.iterations))
strategy = strategy_of()
with strategy.scope():
    model = model_of()
history = fit(model, Late(), tf.keras.callbacks.BackupAndRestore(
    "backup", save_freq=None, save_before_preemption=True))
say(epochs=history.epoch, weights=np.concatenate([np.ravel(w) for w in model.get_weights()]),
    **{name: values for name, values in history.history.items()})
"""


def preempt_in_step(tmp_path, body, late, workers, preempted, **more):
    """Send SIGTERM to workers that are in a step; return the ended processes."""
    tasks = [("worker", index) for index in range(workers)]
    processes = start(tmp_path, tasks, _LATE + body, LATE=str(late), **more)
    in_step, until = tmp_path / "in step", time.monotonic() + 40
    while not in_step.exists() and time.monotonic() < until:
        assert all(p.poll() is None for p in processes), ended(processes)
        time.sleep(0.01)
    time.sleep(0.1)  # the others are in the collective by then
    for worker in preempted:
        os.kill(processes[worker].pid, signal.SIGTERM)
        time.sleep(0.02)  # two signals that are pending at once become one
    (tmp_path / "go on").touch()
    done = ended(processes)
    for name in ("in step", "go on"):
        (tmp_path / name).unlink()
    return done


def test_current_step_of_all_workers_is_saved_once(tmp_path):
    """All workers get the signal, and two of them twice."""
    done = preempt_in_step(tmp_path, _LOOP, 5, 3, [1, 0, 2, 1, 0])
    assert done.codes == [42] * 3, done
    assert sorted(os.listdir(tmp_path / "saved")) == [
        "checkpoint",
        "ckpt-1.index.json",
        "ckpt-1.safetensors",
    ]
    for error in done.errors:
        assert error.count("saved after step 5, because a worker is preempted") == 1, done
    saved = tf.train.Checkpoint(v=tf.Variable(0.0), total_run_calls=tf.Variable(np.int64(0)))
    saved.restore(tf.train.latest_checkpoint(tmp_path / "saved"))
    assert (float(saved.v), int(saved.total_run_calls)) == (5.0, 5)


def test_fit_preempted_twice_continues_with_other_numbers_of_workers(tmp_path):
    """The signals come in an epoch, then after the last step; there are 2 workers, then 3, then 1."""
    first = preempt_in_step(tmp_path, _FIT + _FITS, 6, 2, [1, 0, 1])
    assert first.codes == [42, 42], first
    # 3 epochs of 4 steps: the signal comes in the validation after the last step.
    second = preempt_in_step(tmp_path, _FIT + _FITS, -12, 3, [2])
    assert second.codes == [42] * 3, second
    assert (tmp_path / "backup").exists()
    before = tf.keras.backend.floatx()
    here = {"np": np, "tf": tf}
    exec(_FIT, here)
    try:
        last, straight = here["model_of"](), here["model_of"]()
        backup = tf.keras.callbacks.BackupAndRestore(
            tmp_path / "backup", save_freq=None, save_before_preemption=True
        )
        # No step is left: fit returns at once.
        assert here["fit"](last, backup).epoch == []
        here["fit"](straight)
    finally:
        tf.keras.backend.set_floatx(before)
    assert not (tmp_path / "backup").exists()
    for found, right in zip(last.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-12)


_KILLED = """
class Dies(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == int(os.environ["DIES"]) and me:
            os.kill(os.getpid(), 9)
me = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
strategy = strategy_of()
with strategy.scope():
    model = model_of()
history = fit(model, tf.keras.callbacks.BackupAndRestore("backup", save_freq=2), Dies())
say(weights=np.concatenate([np.ravel(w) for w in model.get_weights()]),
    **{name: values for name, values in history.history.items()})
"""


def test_a_backup_in_an_epoch_is_restored_by_more_workers(tmp_path):
    """The logs of the interrupted epoch are those of all its batches."""
    tasks = [("worker", index) for index in range(3)]
    body = _FIT + _KILLED
    first = ended(start(tmp_path, tasks[:2], body, DIES="7"))
    assert first.codes == [1, -9], first
    said = ended(start(tmp_path, tasks, body, DIES="0")).said
    assert all(own == said[0] for own in said)
    floatx = tf.keras.backend.floatx()
    here = {"np": np, "tf": tf}
    exec(_FIT, here)
    try:
        model = here["model_of"]()
        expected = here["fit"](model).history
    finally:
        tf.keras.backend.set_floatx(floatx)
    for name, values in expected.items():  # from epoch 2 on, 2 batches of which were saved
        np.testing.assert_allclose(said[0][name], values[1:], rtol=1e-9, err_msg=name)
    weights = np.concatenate([np.ravel(w) for w in model.get_weights()])
    np.testing.assert_allclose(said[0]["weights"], weights, rtol=1e-9, atol=1e-12)
    assert not (tmp_path / "backup").exists()
