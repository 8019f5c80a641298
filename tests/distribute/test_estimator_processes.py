"""Estimators of several processes: workers of `MultiWorkerMirroredStrategy`, and parameter servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import hangs
import numpy as np
import pytest
from workers import ended, run, start

import pycollective as tf

pytestmark = pytest.mark.slow

COMMON = """
X = np.random.default_rng(0).uniform(-1, 1, (64, 2)).astype(np.float32)
Y = (X @ [[1.0], [-2.0]] + 0.5).astype(np.float32)

def model_fn(features, labels, mode):
    model = tf.keras.Sequential([tf.keras.layers.Dense(4, "tanh"), tf.keras.layers.Dense(1)])
    guess = model(features)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, guess)
    loss = tf.reduce_mean(tf.square(labels - guess))
    error = tf.keras.metrics.MeanAbsoluteError(name="error")
    error.update_state(labels, guess)
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    return tf.estimator.EstimatorSpec(mode, guess, loss, optimizer, {"error": error})

def input_fn(mode, input_context):
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    data = data.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    data = data.batch(input_context.get_per_replica_batch_size(16))
    return data.repeat() if mode == tf.estimator.ModeKeys.TRAIN else data

def estimator_of(strategy, folder):
    config = tf.estimator.RunConfig(
        model_dir=folder, train_distribute=strategy, eval_distribute=strategy,
        save_checkpoints_steps=20,
    )
    return tf.estimator.Estimator(model_fn, config=config)
"""
WORKER = (
    COMMON
    + """
estimator = estimator_of(strategy_of(), "model")
steps = 40 if os.environ.get("PART") == "1" else 60
found, _ = tf.estimator.train_and_evaluate(
    estimator,
    tf.estimator.TrainSpec(input_fn, max_steps=steps),
    tf.estimator.EvalSpec(input_fn, steps=None, throttle_secs=0, start_delay_secs=0),
)
rows = list(estimator.predict(input_fn))
say(found=[float(found[k]) for k in ("loss", "error", "global_step")], rows=len(rows),
    kernel=estimator.get_variable_value("dense/kernel"))
"""
)


def alone(folder, steps):
    """Return the kernel and the loss after the same steps of one process."""
    names = {"np": np, "tf": tf}
    exec(COMMON, names)
    estimator = names["estimator_of"](None, str(folder))
    x, y = names["X"], names["Y"]
    order = np.concatenate([np.r_[k : k + 16 : 2, k + 1 : k + 16 : 2] for k in range(0, 64, 16)])
    data = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(16)
    estimator.train(lambda: data.repeat(), max_steps=steps)
    return estimator.get_variable_value("dense/kernel"), estimator.evaluate(lambda: data)["loss"]


def test_workers_train_evaluate_and_continue_as_one_process(tmp_path):
    kernel, loss = alone(tmp_path / "alone", 60)
    run(tmp_path, 2, WORKER, PART="1")
    said = run(tmp_path, 2, WORKER).said  # the second run continues from the checkpoint
    for one in said:
        np.testing.assert_allclose(one["kernel"], kernel, rtol=1e-4, atol=1e-5)
        assert one["found"][0] == pytest.approx(loss, rel=1e-3) and one["found"][2] == 60
    assert said[0]["found"] == said[1]["found"]
    assert [path.name for path in tmp_path.glob("model/workertemp*")] == []


def test_evaluator_task_evaluates_checkpoints_of_the_workers(tmp_path):
    tasks = [("worker", 0), ("worker", 1), ("evaluator", 0)]
    said = ended(start(tmp_path, tasks, WORKER)).said
    assert said[2]["found"] == pytest.approx(said[0]["found"], rel=1e-4)
    assert said[2]["found"][2] == 60


def test_parameter_servers_in_processes_train_evaluate_and_predict(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import json\nimport numpy as np\nimport pycollective as tf\n"
        "strategy = tf.distribute.ParameterServerStrategy()\n"
        + COMMON.replace(", momentum=0.9", "")
        + """
estimator = estimator_of(strategy, "model")
estimator.train(input_fn, max_steps=200)
found = estimator.evaluate(input_fn)
rows = np.array(list(estimator.predict(input_fn)))
values = {k: float(v) for k, v in found.items()}
error = float(np.abs(rows - Y).mean())
open("results.json", "w").write(json.dumps({**values, "by hand": error}))
"""
    )
    command = [sys.executable, "-m", "pycollective", "run", "--ps", "2", "--workers", "2"]
    done = subprocess.run(
        [*command, "--chief", str(script)],
        capture_output=True,
        text=True,
        timeout=hangs.SECONDS,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["global_step"] == 200 and found["loss"] < 0.5
    assert found["error"] == pytest.approx(found["by hand"], rel=1e-4)
