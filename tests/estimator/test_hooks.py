"""Hooks, listeners, and `train_and_evaluate`."""

import json
import logging
import os

import numpy as np
import pytest

import pycollective as tf

X = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]


def endless():
    return tf.data.Dataset.from_tensor_slices(({"x": X}, 2 * X)).batch(8).repeat()


def once():
    return tf.data.Dataset.from_tensor_slices(({"x": X}, 2 * X)).batch(8)


def regressor(folder, **settings):
    columns = [tf.feature_column.numeric_column("x")]
    config = tf.estimator.RunConfig(model_dir=str(folder), **settings)
    return tf.estimator.LinearRegressor(columns, optimizer="SGD", config=config)


class Recorder(tf.estimator.SessionRunHook):
    def __init__(self, fetches=("loss", "global_step"), stop_after=None):
        self.calls, self.values = [], []
        self._fetches, self._stop_after = fetches, stop_after

    def begin(self):
        self.calls.append("begin")

    def after_create_session(self, session, coord):
        self.calls.append("session")

    def before_run(self, run_context):
        self.calls.append("before")
        return tf.estimator.SessionRunArgs(self._fetches)

    def after_run(self, run_context, run_values):
        self.calls.append("after")
        self.values.append(run_values.results)
        if self._stop_after is not None and len(self.values) >= self._stop_after:
            run_context.request_stop()

    def end(self, session):
        self.calls.append("end")


def test_hooks_are_called_around_each_step_of_training(tmp_path):
    hook = Recorder()
    regressor(tmp_path).train(endless, [hook], steps=2)
    assert hook.calls == ["begin", "session", "before", "after", "before", "after", "end"]
    assert [step for _, step in hook.values] == [1, 2]
    assert hook.values[0][0] == pytest.approx(np.square(2 * X[:8]).mean())
    assert hook.values[1][0] != hook.values[0][0]


def test_hooks_are_called_in_evaluation_and_prediction_and_can_stop(tmp_path):
    estimator = regressor(tmp_path).train(endless, steps=1)
    hooks = [Recorder("global_step", stop_after=2) for _ in range(3)]
    estimator.train(endless, [hooks[0]])
    estimator.evaluate(endless, hooks=[hooks[1]])
    rows = list(estimator.predict(endless, hooks=[hooks[2]]))
    assert len(rows) == 16
    assert [hook.values for hook in hooks] == [[2, 3], [3, 3], [3, 3]]
    assert all(hook.calls[-1] == "end" for hook in hooks)


def test_hooks_fetch_nests_of_variables_and_functions(tmp_path):
    own = tf.Variable(5.0)
    hook = Recorder({"own": own, "more": [lambda: own * 2.0, None]})
    regressor(tmp_path).train(endless, [hook], steps=1)
    assert hook.values == [{"own": 5.0, "more": [10.0, None]}]


def test_hooks_with_a_wrong_request_are_refused(tmp_path):
    with pytest.raises(ValueError, match="asks for 'accuracy'; steps have the values"):
        regressor(tmp_path).train(endless, [Recorder("accuracy")], steps=1)

    class Feeds(tf.estimator.SessionRunHook):
        def before_run(self, run_context):
            return tf.estimator.SessionRunArgs("loss", feed_dict={1: 2})

    with pytest.raises(ValueError, match="Feeds.before_run: there are no placeholders"):
        regressor(tmp_path).train(endless, [Feeds()], steps=1)


def test_hooks_of_a_spec_begin_after_the_first_step(tmp_path):
    hooks = {mode: Recorder("global_step") for mode in ("training", "evaluation", "prediction")}

    def model_fn(features, labels, mode):
        value = tf.Variable(1.0) * tf.ones([8])
        parts = {f"{name}_hooks": [hook] for name, hook in hooks.items()}
        return tf.estimator.EstimatorSpec(mode, value, tf.reduce_mean(value), lambda: None, **parts)

    estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
    estimator.train(endless, steps=3)
    estimator.evaluate(endless, steps=3)
    next(estimator.predict(endless))
    assert hooks["training"].values == [2, 3]
    assert hooks["evaluation"].values == [3, 3]
    estimator.train(endless, steps=1)
    assert hooks["training"].values == [2, 3, 4]


@pytest.mark.parametrize("worker", [0, 1])
def test_chief_hooks_of_a_spec_run_on_the_chief_alone(tmp_path, monkeypatch, worker):
    task = {"type": "worker", "index": worker}
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    chief, every = Recorder("global_step"), Recorder("global_step")

    def model_fn(features, labels, mode):
        value = tf.Variable(1.0) * tf.ones([8])
        hooks = {"training_hooks": [every], "training_chief_hooks": [chief]}
        return tf.estimator.EstimatorSpec(mode, value, tf.reduce_mean(value), lambda: None, **hooks)

    tf.estimator.Estimator(model_fn, str(tmp_path)).train(endless, steps=3)
    assert every.values == [2, 3]
    assert chief.values == ([] if worker else [2, 3])


@pytest.mark.parametrize(("options", "steps"), [({"num_steps": 3}, 3), ({"last_step": 2}, 2)])
def test_stop_at_step_hook_ends_training(tmp_path, options, steps):
    estimator = regressor(tmp_path)
    estimator.train(endless, [tf.estimator.StopAtStepHook(**options)])
    assert estimator.get_variable_value("global_step") == steps
    with pytest.raises(ValueError, match="One of num_steps or last_step"):
        tf.estimator.StopAtStepHook()
    with pytest.raises(ValueError, match="Only one of num_steps or last_step"):
        tf.estimator.StopAtStepHook(1, 1)


def test_logging_hook_and_log_steps_write_lines(tmp_path, caplog):
    hook = tf.estimator.LoggingTensorHook({"step": "global_step"}, every_n_iter=2)
    own = tf.estimator.LoggingTensorHook(
        ["global_step"], every_n_secs=0, formatter=lambda v: f"now {v['global_step']}"
    )
    with caplog.at_level(logging.INFO, "pycollective"):
        regressor(tmp_path, log_step_count_steps=2).train(endless, [hook, own], steps=4)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if line.startswith("step =")] == ["step = 1", "step = 3"]
    assert [line for line in lines if line.startswith("now")] == [f"now {n}" for n in (1, 2, 3, 4)]
    assert [line.split("step = ")[1][0] for line in lines if line.startswith("loss")] == ["2", "4"]
    with pytest.raises(ValueError, match="exactly one of every_n_iter and every_n_secs"):
        tf.estimator.LoggingTensorHook([])


def test_listeners_are_called_around_each_checkpoint_and_can_stop(tmp_path):
    calls = []

    class Listener(tf.estimator.CheckpointSaverListener):
        def begin(self):
            calls.append("begin")

        def before_save(self, session, global_step_value):
            calls.append(("before", global_step_value))

        def after_save(self, session, global_step_value):
            calls.append(("after", global_step_value))
            return global_step_value == 4

        def end(self, session, global_step_value):
            calls.append(("end", global_step_value))

    regressor(tmp_path, save_checkpoints_steps=2).train(endless, saving_listeners=[Listener()])
    saved = [(when, step) for step in (2, 4) for when in ("before", "after")]
    assert calls == ["begin", *saved, ("end", 4)]


# train_and_evaluate -------------------------------------------------------------------------------


def test_train_and_evaluate_evaluates_the_last_checkpoint(tmp_path):
    seen = Recorder("global_step")
    result, exports = tf.estimator.train_and_evaluate(
        regressor(tmp_path, save_checkpoints_steps=2),
        tf.estimator.TrainSpec(endless, max_steps=6),
        tf.estimator.EvalSpec(once, steps=None, hooks=[seen]),
    )
    assert result["global_step"] == 6 and result["loss"] < 1 and exports == []
    assert seen.values == [6] * 4


class Exporter(tf.estimator.Exporter):
    name = "weights"

    def __init__(self):
        self.calls = []

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        os.makedirs(export_path, exist_ok=True)
        self.calls.append((eval_result["global_step"], is_the_final_export))
        assert checkpoint_path.endswith(f"-{eval_result['global_step']}")
        return export_path


def test_train_and_evaluate_calls_exporters_after_evaluations(tmp_path):
    exporter = Exporter()
    _, exports = tf.estimator.train_and_evaluate(
        regressor(tmp_path, save_checkpoints_steps=2),
        tf.estimator.TrainSpec(endless, max_steps=4),
        tf.estimator.EvalSpec(once, exporters=exporter, throttle_secs=0),
    )
    assert exporter.calls == [(2, False), (4, False), (4, True)]
    assert exports == [str(tmp_path / "export" / "weights")] and os.path.isdir(exports[0])
    with pytest.raises(ValueError, match="must have unique names"):
        tf.estimator.EvalSpec(once, exporters=[Exporter(), Exporter()])


def test_train_and_evaluate_without_throttle_evaluates_each_checkpoint(tmp_path):
    seen = Recorder("global_step")
    estimator = regressor(tmp_path, save_checkpoints_steps=2)
    tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(endless, max_steps=6),
        tf.estimator.EvalSpec(once, steps=1, hooks=[seen], throttle_secs=0),
    )
    assert seen.values == [2, 4, 6]
    plain = regressor(tmp_path / "plain").train(endless, steps=6)  # evaluation changes nothing
    for name in plain.get_variable_names():
        assert np.array_equal(plain.get_variable_value(name), estimator.get_variable_value(name))


@pytest.mark.parametrize("servers", [False, True])
def test_train_and_evaluate_of_an_evaluator_evaluates_checkpoints(tmp_path, monkeypatch, servers):
    regressor(tmp_path).train(endless, steps=3)
    monkeypatch.setenv(
        "TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}'
    )
    strategy = tf.distribute.ParameterServerStrategy() if servers else None
    estimator, exporter = regressor(tmp_path, train_distribute=strategy), Exporter()
    evaluation = tf.estimator.EvalSpec(once, start_delay_secs=0, exporters=[exporter])
    result, exports = tf.estimator.train_and_evaluate(
        estimator, tf.estimator.TrainSpec(endless, max_steps=3), evaluation
    )
    assert result["global_step"] == 3 and len(exports) == 1 and exporter.calls == [(3, True)]
    with pytest.raises(ValueError, match="an evaluator needs TrainSpec"):
        tf.estimator.train_and_evaluate(estimator, tf.estimator.TrainSpec(endless), evaluation)
