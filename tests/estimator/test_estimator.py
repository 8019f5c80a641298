"""`Estimator` with a model function: variables, checkpoints, hooks, input, errors."""

import logging

import numpy as np
import pytest

import pycollective as tf

X = np.random.default_rng(0).uniform(-1, 1, (64, 1)).astype(np.float32)
Y = 3 * X + 1
TRAIN, EVAL, PREDICT = (getattr(tf.estimator.ModeKeys, m) for m in ("TRAIN", "EVAL", "PREDICT"))


def input_fn():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)


def endless():
    return input_fn().repeat()


def model_fn(features, labels, mode, params):
    model = tf.keras.Sequential([tf.keras.layers.Dense(4, "tanh"), tf.keras.layers.Dense(1)])
    guess = model(features, training=mode == TRAIN)
    if mode == PREDICT:
        return tf.estimator.EstimatorSpec(mode, {"guess": guess, "twice": guess * 2.0})
    loss = tf.reduce_mean(tf.square(labels - guess))
    if mode == EVAL:
        error = tf.keras.metrics.MeanAbsoluteError(name="error")
        error.update_state(labels, guess)
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"error": error})
    optimizer = params["optimizer"]()
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=params["minimize"](optimizer, loss))


def v1(optimizer, loss):
    return optimizer.minimize(loss, tf.compat.v1.train.get_or_create_global_step())


def make(folder, optimizer=lambda: tf.keras.optimizers.SGD(0.2), minimize=None, **settings):
    params = {"optimizer": optimizer, "minimize": minimize or (lambda optimizer, loss: optimizer)}
    config = tf.estimator.RunConfig(model_dir=str(folder), **settings)
    return tf.estimator.Estimator(model_fn, config=config, params=params)


def weights(estimator):
    return {n: estimator.get_variable_value(n) for n in estimator.get_variable_names()}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


# Training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "minimize"),
    [
        (lambda: tf.keras.optimizers.Adam(0.1), lambda optimizer, loss: optimizer),
        (lambda: tf.compat.v1.train.AdamOptimizer(0.1), v1),
        (lambda: tf.compat.v1.train.MomentumOptimizer(0.05, 0.9), v1),
        (lambda: tf.compat.v1.train.AdagradOptimizer(0.5), v1),
        (lambda: tf.compat.v1.train.RMSPropOptimizer(0.02), v1),
        (lambda: tf.compat.v1.train.FtrlOptimizer(0.5), v1),
    ],
)
def test_train_optimizers_of_model_fn_lower_the_loss(tmp_path, optimizer, minimize):
    estimator = make(tmp_path, optimizer, minimize)
    before = estimator.evaluate(input_fn)
    estimator.train(endless, steps=60)
    after = estimator.evaluate(input_fn)
    assert before["global_step"] == 0 and after["global_step"] == 60
    assert after["loss"] < before["loss"] / 5
    assert after["error"] < before["error"]


def test_train_equals_keras_fit_of_the_same_model(tmp_path):
    estimator = make(
        tmp_path, minimize=v1, optimizer=lambda: tf.compat.v1.train.GradientDescentOptimizer(0.2)
    )
    estimator.train(input_fn, steps=1)
    start = weights(estimator)
    estimator.train(lambda: endless().take(20))
    model = tf.keras.Sequential([tf.keras.layers.Dense(4, "tanh"), tf.keras.layers.Dense(1)])
    model(X)
    names = ["dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"]
    model.set_weights([start[name] for name in names])
    model.compile(tf.keras.optimizers.SGD(0.2), "mse")
    model.fit(endless(), steps_per_epoch=20, verbose=0)
    found = weights(estimator)
    for name, value in zip(names, model.get_weights(), strict=True):
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_train_input_end_or_steps_or_max_steps_ends_training(tmp_path, recwarn):
    estimator = make(tmp_path)
    assert estimator.train(input_fn) is estimator
    assert estimator.get_variable_value("global_step") == 4
    estimator.train(input_fn, steps=100)  # the input has 4 steps
    assert estimator.get_variable_value("global_step") == 8
    estimator.train(endless, max_steps=10)
    estimator.train(endless, max_steps=10)
    estimator.train(endless, steps=1)
    assert estimator.get_variable_value("global_step") == 11
    assert not [w for w in recwarn if "ran out of data" in str(w.message)]


def test_train_another_estimator_continues_from_model_dir(tmp_path):
    adam = {"optimizer": lambda: tf.keras.optimizers.Adam(0.1)}
    whole = make(tmp_path / "whole", **adam).train(endless, steps=8)
    make(tmp_path / "parts", **adam).train(endless, steps=4)
    parts = make(tmp_path / "parts", **adam).train(endless, max_steps=8)  # slots continue too
    assert same(weights(whole), weights(parts))
    assert parts.evaluate(input_fn) == whole.evaluate(input_fn)


def test_train_seed_of_config_determines_initial_values(tmp_path):
    found = []
    for number, seed in enumerate((1, 1, 2)):
        tf.random.set_seed(number)
        found.append(
            weights(make(tmp_path / str(number), tf_random_seed=seed).train(endless, steps=1))
        )
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


def test_train_pair_of_tensors_is_used_in_every_step(tmp_path):
    estimator = make(tmp_path)
    estimator.train(lambda: (X, Y), steps=30)
    assert estimator.get_variable_value("global_step") == 30
    assert estimator.evaluate(lambda: (X, Y), steps=2)["loss"] < 0.5


def test_train_op_function_is_called_after_the_model_function(tmp_path):
    calls = []

    def own(features, labels, mode):
        value = tf.Variable(2.0, name="value")
        loss = tf.reduce_mean(value * features)
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=lambda: calls.append(float(value.assign_add(1.0)))
        )

    estimator = tf.estimator.Estimator(own, str(tmp_path))
    estimator.train(endless, steps=3)
    assert calls == [3.0, 4.0, 5.0]
    assert estimator.get_variable_names() == ["global_step", "value"]
    assert estimator.get_variable_value("value") == 5.0


def test_train_keras_optimizer_counts_global_steps_once(tmp_path):
    def counted(optimizer, loss):
        optimizer.iterations = tf.compat.v1.train.get_or_create_global_step()
        return optimizer

    estimator = make(tmp_path, minimize=counted).train(endless, steps=3)
    assert estimator.get_variable_value("global_step") == 3


def test_minimize_of_keras_without_tape_works_in_model_fn_alone(tmp_path):
    def own(features, labels, mode):
        layer = tf.keras.layers.Dense(1)
        loss = tf.reduce_mean(tf.square(layer(features) - labels))
        op = tf.keras.optimizers.SGD(0.1).minimize(loss, layer.trainable_variables)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=op)

    estimator = tf.estimator.Estimator(own, str(tmp_path)).train(endless, steps=50)
    assert abs(estimator.get_variable_value("dense/kernel") - 3).max() < 0.6
    with pytest.raises(ValueError, match="needs the tape"):
        tf.keras.optimizers.SGD().minimize(tf.constant(1.0), [])
    with pytest.raises(RuntimeError, match="model_fn of an Estimator"):
        tf.compat.v1.train.AdamOptimizer().minimize(tf.constant(1.0))
    assert tf.compat.v1.train.get_global_step() is None
    with pytest.raises(RuntimeError, match="model_fn of an Estimator"):
        tf.compat.v1.train.get_or_create_global_step()


def test_train_variable_made_outside_of_model_fn_is_refused(tmp_path):
    layer = tf.keras.layers.Dense(1)
    layer.build((None, 1))

    def own(features, labels, mode):
        loss = tf.reduce_mean(tf.square(layer(features) - labels))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.keras.optimizers.SGD(0.1))

    with pytest.raises(ValueError, match="'dense.*kernel', which was made outside of model_fn"):
        tf.estimator.Estimator(own, str(tmp_path)).train(endless, steps=1)


def test_train_dropout_drops_other_values_in_each_step(tmp_path):
    seen = []

    def own(features, labels, mode):
        dropped = tf.keras.layers.Dropout(0.5)(tf.ones([4, 8]), training=True)
        seen.append(dropped.numpy())
        loss = tf.Variable(1.0) * tf.reduce_mean(dropped)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.keras.optimizers.SGD(0.1))

    tf.estimator.Estimator(own, str(tmp_path)).train(endless, steps=2)
    assert not np.array_equal(seen[0], seen[1])


# Checkpoints --------------------------------------------------------------------------------------


def test_checkpoints_are_saved_by_steps_and_old_ones_deleted(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=2, keep_checkpoint_max=3)
    assert estimator.latest_checkpoint() is None
    estimator.train(endless, steps=9)
    names = {path.name.split(".")[1].split("-")[1] for path in tmp_path.glob("model.ckpt-*")}
    assert {int(name) for name in names} == {6, 8, 9}
    assert estimator.latest_checkpoint() == str(tmp_path / "model.ckpt-9")
    assert (
        estimator.evaluate(input_fn, checkpoint_path=str(tmp_path / "model.ckpt-6"))["global_step"]
        == 6
    )
    assert estimator.evaluate(input_fn)["global_step"] == 9


def test_checkpoints_by_seconds_are_saved_when_time_has_passed(tmp_path):
    make(tmp_path, save_checkpoints_secs=1e-9).train(endless, steps=3)
    assert (tmp_path / "checkpoint").read_text().count("model.ckpt-") == 4  # 3, and the latest


def test_warm_start_gives_trained_variables_the_values_of_a_checkpoint(tmp_path):
    first = make(tmp_path / "a", lambda: tf.keras.optimizers.SGD(0.2, momentum=0.9))
    first.train(endless, steps=3)
    still = first.params | {"optimizer": lambda: tf.keras.optimizers.SGD(0.0, momentum=0.9)}
    for number, start in enumerate([first.latest_checkpoint(), tmp_path / "a"]):
        config = tf.estimator.RunConfig(model_dir=str(tmp_path / f"b{number}"))
        warm = tf.estimator.Estimator(model_fn, None, config, still, warm_start_from=start)
        warm.train(endless, steps=1)
        assert warm.get_variable_value("global_step") == 1
        assert warm.get_variable_value("sgd/iterations") == 1
        kernel = warm.get_variable_value("dense/kernel")
        assert np.array_equal(first.get_variable_value("dense/kernel"), kernel)
        warm.train(endless, steps=1)  # from its own checkpoint, with all variables
        assert warm.get_variable_value("sgd/iterations") == 2
    empty = tf.estimator.Estimator(
        model_fn, str(tmp_path / "c"), params=still, warm_start_from=tmp_path
    )
    with pytest.raises(ValueError, match="a directory without a checkpoint"):
        empty.train(endless, steps=1)


@pytest.mark.parametrize("listens", [False, True])
def test_evaluate_and_predict_during_training_do_not_change_it(tmp_path, listens):
    def trained(folder, called):
        estimator = make(folder, save_checkpoints_steps=5)
        found = []

        class Calls(tf.estimator.SessionRunHook, tf.estimator.CheckpointSaverListener):
            steps = 0

            def begin(self):
                pass

            def end(self, *_):
                pass

            def call(self):
                oldest = estimator.latest_checkpoint() if listens else None
                if called:
                    found.append(estimator.evaluate(input_fn, checkpoint_path=oldest))
                    found.append(list(estimator.predict(input_fn)))

            def after_save(self, session, step):
                if listens and step == 10:
                    self.call()

            def after_run(self, context, values):
                self.steps += 1
                if not listens and self.steps == 9:
                    self.call()

        calls = Calls()
        estimator.train(endless, [calls], max_steps=12, saving_listeners=[calls])
        assert len(found) == 2 * called
        return weights(estimator)

    assert same(trained(tmp_path / "a", True), trained(tmp_path / "b", False))


def test_each_predict_has_the_values_of_its_checkpoint(tmp_path):
    estimator = make(tmp_path).train(endless, steps=2)
    early = estimator.latest_checkpoint()
    expected = [p["guess"].item() for p in estimator.predict(input_fn)]
    rows = estimator.predict(input_fn, checkpoint_path=early)
    found = [next(rows)["guess"].item()]
    estimator.train(endless, steps=2)
    for row, other in zip(rows, estimator.predict(input_fn), strict=False):
        found.append(row["guess"].item())
        assert row["guess"] != other["guess"]
    assert found == expected


def test_nan_loss_ends_training_with_an_error(tmp_path):
    estimator = make(tmp_path).train(endless, steps=1)

    def broken():
        return tf.data.Dataset.from_tensor_slices((X * np.nan, Y)).batch(16).repeat()

    with pytest.raises(tf.estimator.NanLossDuringTrainingError, match="NaN loss during training"):
        estimator.train(broken, steps=5)
    assert estimator.get_variable_value("global_step") == 1


def test_predictions_without_a_first_axis_are_refused(tmp_path):
    def scalar(features, mode):
        return tf.estimator.EstimatorSpec(mode, tf.reduce_sum(features))

    estimator = tf.estimator.Estimator(scalar, str(tmp_path))
    with pytest.raises(ValueError, match="predictions need a first axis"):
        next(estimator.predict(lambda: tf.data.Dataset.from_tensor_slices(X).batch(4)))


def test_model_fn_with_other_variables_than_the_checkpoint_is_refused(tmp_path):
    make(tmp_path).train(endless, steps=1)

    def other(features, labels, mode):
        loss = tf.reduce_mean(tf.keras.layers.Dense(7)(features))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.keras.optimizers.SGD(0.1))

    with pytest.raises(tf.errors.CheckpointError, match="dense/kernel: saved with shape"):
        tf.estimator.Estimator(other, str(tmp_path)).train(endless, steps=1)


def test_model_fn_with_other_shapes_in_a_later_call_is_refused(tmp_path):
    sizes = iter((1, 2))

    def own(features, labels, mode):
        loss = tf.reduce_mean(tf.keras.layers.Dense(next(sizes))(features))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.keras.optimizers.SGD(0.1))

    with pytest.raises(
        ValueError, match="Trying to share variable dense/kernel, but specified shape"
    ):
        tf.estimator.Estimator(own, str(tmp_path)).train(endless, steps=2)


def test_variables_without_a_checkpoint_are_not_found(tmp_path):
    estimator = make(tmp_path)
    with pytest.raises(ValueError, match="Could not find trained model in model_dir"):
        estimator.get_variable_names()
    estimator.train(endless, steps=1)
    with pytest.raises(ValueError, match="no variable 'kernel'; it has .*dense/kernel"):
        estimator.get_variable_value("kernel")


def test_estimator_without_model_dir_uses_a_temporary_folder(caplog):
    with caplog.at_level(logging.WARNING, "pycollective"):
        estimator = tf.estimator.Estimator(model_fn, params={})
    assert "Using temporary folder as model directory" in caplog.text
    assert estimator.model_dir == estimator.config.model_dir


# Evaluation and prediction ------------------------------------------------------------------------


def test_evaluate_is_the_mean_of_all_examples(tmp_path):
    estimator = make(tmp_path).train(endless, steps=5)
    guess = np.array([row["guess"] for row in estimator.predict(input_fn)])
    uneven = estimator.evaluate(lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(48))
    assert uneven["loss"] == pytest.approx(np.square(guess - Y).mean(), rel=1e-5)
    assert uneven["error"] == pytest.approx(np.abs(guess - Y).mean(), rel=1e-5)
    again = estimator.evaluate(input_fn)
    assert again["error"] == pytest.approx(uneven["error"], rel=1e-5)  # starts at 0 each time
    two = estimator.evaluate(input_fn, steps=2)
    assert two["loss"] == pytest.approx(np.square(guess - Y)[:32].mean(), rel=1e-5)
    assert two["error"] == pytest.approx(np.abs(guess - Y)[:32].mean(), rel=1e-5)


def test_evaluate_resets_metrics_that_training_has_updated(tmp_path):
    def own(features, labels, mode):
        mean = tf.keras.metrics.Mean("mean")
        mean.update_state(5.0 if mode == TRAIN else 1.0)
        loss = tf.Variable(1.0) * tf.reduce_mean(features)
        if mode == TRAIN:
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=lambda: None)
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"mean": mean})

    estimator = tf.estimator.Estimator(own, str(tmp_path)).train(input_fn)
    assert estimator.evaluate(input_fn)["mean"] == 1.0


def test_predict_yields_examples_in_order_or_batches(tmp_path):
    estimator = make(tmp_path).train(endless, steps=5)
    rows = list(estimator.predict(input_fn))
    assert (
        len(rows) == 64 and rows[0].keys() == {"guess", "twice"} and rows[0]["guess"].shape == (1,)
    )
    only = list(estimator.predict(lambda: tf.data.Dataset.from_tensor_slices(X).batch(64), "twice"))
    for row, other in zip(rows, only, strict=True):
        assert other.keys() == {"twice"}
        assert other["twice"] == pytest.approx(row["twice"], rel=1e-4)
    batches = list(estimator.predict(input_fn, yield_single_examples=False))
    assert [len(batch["guess"]) for batch in batches] == [16] * 4
    endless_rows = estimator.predict(endless)
    assert next(endless_rows)["guess"] == pytest.approx(rows[0]["guess"])
    with pytest.raises(
        ValueError, match="Expected to run at least one output from .*guess.*provided"
    ):
        next(estimator.predict(input_fn, ["other"]))


def test_predict_before_training_uses_initial_values(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "pycollective"):
        assert len(list(make(tmp_path).predict(input_fn))) == 64
    assert "Could not find trained model in model_dir" in caplog.text


# Input functions ----------------------------------------------------------------------------------


def test_input_fn_gets_the_arguments_that_it_has(tmp_path):
    seen = []

    def asks(input_context, mode, params, config):
        seen.append(
            (input_context.num_replicas_in_sync, mode, sorted(params), config.tf_random_seed)
        )
        return input_fn()

    estimator = make(tmp_path).train(asks)
    estimator.evaluate(asks)
    list(estimator.predict(asks))
    assert seen == [(1, mode, ["minimize", "optimizer"], 1) for mode in (TRAIN, EVAL, PREDICT)]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda: (X, Y, Y), "should return .features, labels. or a Dataset, got 3 values"),
        (lambda: tf.data.Dataset.from_tensor_slices((X, Y, Y)).batch(8), r"\(features, labels\)"),
        (lambda: input_fn().take(0), "no batch"),
    ],
)
def test_input_fn_with_a_wrong_result_is_refused(tmp_path, given, text):
    with pytest.raises(ValueError, match=text):
        make(tmp_path).train(given, steps=1)


def test_labels_that_model_fn_does_not_take_are_refused(tmp_path):
    def own(features, mode):
        return tf.estimator.EstimatorSpec(mode, loss=0.0, train_op=lambda: None)

    with pytest.raises(
        ValueError, match="model_fn does not take labels, but input_fn returns labels."
    ):
        tf.estimator.Estimator(own, str(tmp_path)).train(endless, steps=1)


# Errors -------------------------------------------------------------------------------------------


def spec(**parts):
    return tf.estimator.EstimatorSpec(**parts)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: spec(mode=TRAIN, train_op=1), ValueError, "Missing loss."),
        (lambda: spec(mode=EVAL), ValueError, "Missing loss."),
        (lambda: spec(mode=TRAIN, loss=1.0), ValueError, "Missing train_op."),
        (lambda: spec(mode=PREDICT), ValueError, "Missing predictions."),
        (lambda: spec(mode="test"), ValueError, "mode must be a value of tf.estimator.ModeKeys"),
        (lambda: spec(mode=EVAL, loss=[1.0, 2.0]), ValueError, "Loss must be scalar, given: "),
        (
            lambda: spec(mode=EVAL, loss=1.0, eval_metric_ops=[1]),
            TypeError,
            "eval_metric_ops must be a dict",
        ),
        (
            lambda: spec(mode=EVAL, loss=1.0, eval_metric_ops={"a": (1, 2)}),
            TypeError,
            "Values of eval_metric_ops must be .* for key: a",
        ),
        (
            lambda: spec(mode=EVAL, loss=1.0, evaluation_hooks=[1]),
            TypeError,
            "All hooks must be `SessionRunHook` instances, given: 1",
        ),
        (lambda: tf.estimator.Estimator(None), ValueError, "model_fn must be provided"),
        (
            lambda: tf.estimator.Estimator(lambda labels: 1),
            ValueError,
            "must include features argument",
        ),
        (
            lambda: tf.estimator.Estimator(lambda features: 1, params={"a": 1}),
            ValueError,
            "does not include params argument",
        ),
        (
            lambda: tf.estimator.Estimator(lambda features, x: 1),
            ValueError,
            "has following not expected args: .'x'.",
        ),
        (
            lambda: tf.estimator.Estimator(lambda features: 1, config={}),
            ValueError,
            "`config` must be an instance of `RunConfig`, received {}.",
        ),
        (
            lambda: tf.estimator.Estimator(
                lambda features: 1, "a", tf.estimator.RunConfig(model_dir="b")
            ),
            ValueError,
            "`model_dir` are set both in constructor and `RunConfig`, but with different values",
        ),
        (
            lambda: tf.estimator.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1),
            ValueError,
            "save_checkpoints_steps and save_checkpoints_secs",
        ),
        (lambda: tf.estimator.RunConfig(save_checkpoints_steps=-2), ValueError, ">= 0, got -2"),
        (lambda: tf.estimator.RunConfig(keep_checkpoint_max=-1), ValueError, ">= 0, got -1"),
        (lambda: tf.estimator.RunConfig(tf_random_seed=1.5), ValueError, "must be integer"),
        (lambda: tf.estimator.RunConfig(model_dir=""), ValueError, "should be non-empty"),
        (lambda: tf.estimator.RunConfig(train_distribute=1), TypeError, "tf.distribute.Strategy"),
        (
            lambda: tf.estimator.RunConfig().replace(other=1),
            ValueError,
            "Replacing other is not supported. Allowed properties are .*model_dir",
        ),
        (lambda: tf.estimator.TrainSpec(1), TypeError, "`input_fn` must be callable, given: 1"),
        (lambda: tf.estimator.TrainSpec(input_fn, 0), ValueError, "Must specify max_steps > 0"),
        (lambda: tf.estimator.EvalSpec(input_fn, 0), ValueError, "Must specify steps > 0"),
        (
            lambda: tf.estimator.EvalSpec(input_fn, throttle_secs=-1),
            ValueError,
            "Must specify throttle_secs >= 0, given: -1",
        ),
        (
            lambda: tf.estimator.EvalSpec(input_fn, exporters=[1]),
            TypeError,
            "`exporters` must be an Exporter",
        ),
        (
            lambda: tf.estimator.train_and_evaluate(1, 2, 3),
            TypeError,
            "`estimator` must have type `tf.estimator.Estimator`",
        ),
    ],
)
def test_wrong_arguments_raise_tensorflows_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_train_wrong_numbers_and_hooks_raise_tensorflows_errors(tmp_path):
    estimator = make(tmp_path)
    with pytest.raises(ValueError, match="Can not provide both steps and max_steps."):
        estimator.train(endless, steps=1, max_steps=1)
    with pytest.raises(ValueError, match="Must specify steps > 0, given: 0"):
        estimator.train(endless, steps=0)
    with pytest.raises(ValueError, match="Must specify max_steps > 0, given: -1"):
        estimator.train(endless, max_steps=-1)
    with pytest.raises(TypeError, match="All hooks must be `SessionRunHook` instances"):
        estimator.train(endless, [1], steps=1)
    with pytest.raises(TypeError, match="saving_listeners must be"):
        estimator.train(endless, steps=1, saving_listeners=[1])
    with pytest.raises(TypeError, match="`input_fn` must be callable"):
        estimator.train(1, steps=1)


def test_estimator_in_a_scope_or_with_a_wrong_result_is_refused(tmp_path):
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        with pytest.raises(RuntimeError, match="RunConfig.train_distribute=strategy."):
            tf.estimator.Estimator(model_fn)
    estimator = tf.estimator.Estimator(lambda features, labels: 1, str(tmp_path))
    with pytest.raises(ValueError, match="model_fn should return an EstimatorSpec, got 1"):
        estimator.train(endless, steps=1)


def test_run_config_tells_the_task_of_tf_config(monkeypatch):
    config = tf.estimator.RunConfig()
    assert (config.task_type, config.task_id, config.is_chief) == ("worker", 0, True)
    strategy = tf.distribute.MirroredStrategy(["cpu:0"])
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": ["a:1", "b:1"]}), task_type="worker", task_id=1
    )
    monkeypatch.setattr(type(strategy), "cluster_resolver", resolver)
    launched = config.replace(train_distribute=strategy)
    assert (launched.task_type, launched.task_id, launched.is_chief) == ("worker", 1, False)
    assert config.save_checkpoints_secs == 600 and config.save_checkpoints_steps is None
    assert config.replace(save_checkpoints_steps=5).save_checkpoints_secs is None
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}',
    )
    assert (config.task_type, config.task_id, config.is_chief) == ("worker", 0, False)


def test_training_that_failed_before_its_first_checkpoint_leaves_initial_values(tmp_path):
    def own(features, labels, mode):
        guess = tf.keras.layers.Dense(1, kernel_initializer="zeros")(features)
        loss = tf.reduce_mean(tf.square(guess - labels))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.keras.optimizers.SGD(0.1))

    def batches(count, fails=False):
        def generate():
            for _ in range(count):
                yield np.ones((4, 1), np.float32), np.ones((4, 1), np.float32)
            if fails:
                raise RuntimeError("broken")

        spec = tf.TensorSpec((4, 1), "float32")
        return lambda: tf.data.Dataset.from_generator(generate, output_signature=(spec, spec))

    estimator = tf.estimator.Estimator(own, str(tmp_path))
    with pytest.raises(RuntimeError, match="broken"):
        estimator.train(batches(5, fails=True))
    assert estimator.latest_checkpoint() is None
    assert estimator.evaluate(batches(1)) == {"loss": 1.0, "global_step": 0}
    estimator.train(batches(1))
    assert estimator.evaluate(batches(1))["loss"] == pytest.approx(0.36)


@pytest.mark.parametrize("name", ["loss", "global_step"])
def test_metric_with_the_name_of_a_default_is_refused(name):
    metric = tf.keras.metrics.Mean()
    with pytest.raises(ValueError, match=f'Metric with name "{name}" is not allowed'):
        tf.estimator.EstimatorSpec("eval", loss=1.0, eval_metric_ops={name: metric})


@pytest.mark.parametrize(
    ("make", "rates", "expected"),
    [
        (lambda o, rate: o.RMSPropOptimizer(rate), [0.1] * 3, [-0.1, -0.2, -0.3]),
        (
            lambda o, rate: o.MomentumOptimizer(rate, 0.9),
            [0.1, 0.01, 0.001],
            [-0.1, -0.119, -0.12171],
        ),
        (
            lambda o, rate: o.MomentumOptimizer(rate, 0.9, use_nesterov=True),
            [0.1, 0.01, 0.001],
            [-0.19, -0.2171, -0.22054],
        ),
    ],
)
def test_old_optimizers_take_the_steps_of_tensorflow(make, rates, expected):
    """Each gradient is 1, and the learning rate differs from step to step."""
    present, variable, found = [0.0], tf.Variable(0.0), []
    optimizer = make(tf.compat.v1.train, lambda: present[0])
    for present[0] in rates:
        optimizer._keras.apply_gradients([(tf.constant(1.0), variable)])
        found.append(float(variable))
    assert found == pytest.approx(expected, rel=1e-4)
