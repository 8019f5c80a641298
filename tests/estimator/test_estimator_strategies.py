"""Estimators under every strategy, in one process."""

import threading

import numpy as np
import pytest

import pycollective as tf

RNG = np.random.default_rng(5)
X = RNG.uniform(-1, 1, (60, 3)).astype(np.float32)
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.25).astype(np.float32)
STRATEGIES = {
    "none": lambda: None,
    "one device": lambda: tf.distribute.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]),
    "workers": lambda: tf.distribute.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]),
    "central storage": lambda: tf.distribute.experimental.CentralStorageStrategy(
        ["cpu:0", "cpu:1"]
    ),
    "parameter servers": lambda: tf.distribute.ParameterServerStrategy(
        variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    ),
}


def model_fn(features, labels, mode):
    model = tf.keras.Sequential(
        [
            tf.keras.Input((3,)),
            tf.keras.layers.Dense(4, "tanh"),
            tf.keras.layers.BatchNormalization(momentum=0.9),
            tf.keras.layers.Dense(1),
        ]
    )
    guess = model(features["x"], training=mode == tf.estimator.ModeKeys.TRAIN)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, guess)
    loss = tf.reduce_mean(tf.square(labels - guess))
    error = tf.keras.metrics.MeanAbsoluteError(name="error")
    error.update_state(labels, guess)
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.5)
    if mode == tf.estimator.ModeKeys.EVAL:
        optimizer = None
    return tf.estimator.EstimatorSpec(mode, None, loss, optimizer, {"error": error})


def batches(size, repeat=False):
    found = tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).batch(size)
    return found.repeat() if repeat else found


def make(folder, strategy, evaluation="same", **settings):
    config = tf.estimator.RunConfig(
        model_dir=str(folder),
        train_distribute=strategy,
        eval_distribute=strategy if evaluation == "same" else evaluation,
        **settings,
    )
    return tf.estimator.Estimator(model_fn, config=config)


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


def test_train_evaluate_predict_work_under_every_strategy(tmp_path, strategy):
    estimator = make(tmp_path, strategy, save_checkpoints_steps=20)
    before = estimator.evaluate(lambda: batches(10))
    estimator.train(lambda: batches(10, repeat=True), steps=80)
    after = estimator.evaluate(lambda: batches(7))  # the last batch is smaller
    assert after["global_step"] == 80 and after["loss"] < before["loss"] / 3
    guess = np.array(list(estimator.predict(lambda: batches(16))))
    assert guess.shape == (60, 1)
    assert after["loss"] == pytest.approx(np.square(guess - Y).mean(), rel=1e-4)
    assert after["error"] == pytest.approx(np.abs(guess - Y).mean(), rel=1e-4)
    alone = make(tmp_path, None)  # without a strategy, from the same checkpoints
    assert alone.evaluate(lambda: batches(7))["loss"] == pytest.approx(after["loss"], rel=1e-5)
    alone.train(lambda: batches(10, repeat=True), steps=1)
    assert alone.get_variable_value("global_step") == 81
    assert not [name for name in alone.get_variable_names() if "error" in name or "part_" in name]


def test_checkpoint_without_a_strategy_continues_under_every_strategy(tmp_path, strategy):
    first = make(tmp_path, None).train(lambda: batches(10, repeat=True), steps=30)
    expected = first.evaluate(lambda: batches(60))["loss"]
    estimator = make(tmp_path, strategy)
    assert estimator.evaluate(lambda: batches(60))["loss"] == pytest.approx(expected, rel=1e-5)
    estimator.train(lambda: batches(10, repeat=True), max_steps=40)
    assert estimator.get_variable_value("global_step") == 40
    assert estimator.get_variable_value("dense/kernel").shape == (3, 4)


def test_initial_values_are_the_same_under_every_strategy(tmp_path, strategy):
    def two_layers(features, labels, mode):
        parts = [tf.keras.layers.Dense(2)(features["x"]) for _ in range(2)]
        loss = tf.reduce_mean(tf.square(parts[0] + parts[1] - labels))
        return tf.estimator.EstimatorSpec(mode, parts[0], loss, train_op=lambda: None)

    def kernels(folder, strategy):
        config = tf.estimator.RunConfig(model_dir=str(tmp_path / folder), train_distribute=strategy)
        found = tf.estimator.Estimator(two_layers, config=config)
        found.train(lambda: batches(10), steps=1)
        return [found.get_variable_value(f"{name}/kernel") for name in ("dense", "dense_1")]

    first, second = kernels("a", strategy)
    assert not np.array_equal(first, second)
    assert np.array_equal([first, second], kernels("b", None))


def linear(features, labels, mode):
    guess = tf.keras.layers.Dense(1)(features["x"])
    loss = tf.reduce_mean(tf.square(labels - guess))
    return tf.estimator.EstimatorSpec(mode, guess, loss, tf.keras.optimizers.SGD(0.1))


@pytest.mark.parametrize("name", ["mirrored", "workers", "central storage"])
@pytest.mark.parametrize("canned", [True, False])
@pytest.mark.parametrize("rows", [60, 50, 45])
def test_replicas_give_the_gradients_of_one_replica_with_their_batches(
    tmp_path, name, canned, rows
):
    # The batches have 10 rows, and two replicas take two of them. The last step has 20, 10 or 5 rows.
    strategy = STRATEGIES[name]()

    def take(size):
        return tf.data.Dataset.from_tensor_slices(({"x": X[:rows]}, Y[:rows])).batch(size)

    def weights(strategy, size, folder):
        config = tf.estimator.RunConfig(model_dir=str(tmp_path / folder), train_distribute=strategy)
        if canned:
            column = tf.feature_column.numeric_column("x", 3)
            found = tf.estimator.LinearRegressor(column, optimizer="SGD", config=config)
        else:
            found = tf.estimator.Estimator(linear, config=config)
        found.train(lambda: take(size))
        return {n: found.get_variable_value(n) for n in found.get_variable_names()}

    one, two = weights(None, 20, "one"), weights(strategy, 10, "two")
    assert one.keys() == two.keys() and one["global_step"] == two["global_step"] == 3
    for key in one:
        np.testing.assert_allclose(one[key], two[key], rtol=1e-5, atol=1e-6)


def test_sum_reduction_adds_the_losses_of_all_replicas(tmp_path):
    def weights(strategy, size, folder):
        config = tf.estimator.RunConfig(model_dir=str(tmp_path / folder), train_distribute=strategy)
        column = tf.feature_column.numeric_column("x", 3)
        sgd = tf.keras.optimizers.SGD(0.001)
        found = tf.estimator.LinearRegressor(
            column, optimizer=sgd, config=config, loss_reduction="sum"
        )
        found.train(lambda: batches(size))
        return found.get_variable_value("linear/linear_model/x/weights")

    one = weights(None, 20, "one")
    assert np.abs(one).max() > 0.01
    np.testing.assert_allclose(one, weights(STRATEGIES["mirrored"](), 10, "two"), rtol=1e-5)


def test_eval_distribute_may_be_another_strategy(tmp_path):
    estimator = make(
        tmp_path,
        STRATEGIES["mirrored"](),
        STRATEGIES["central storage"](),
        save_checkpoints_steps=5,
    )
    result, _ = tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(lambda: batches(10, repeat=True), max_steps=20),
        tf.estimator.EvalSpec(lambda: batches(10), steps=None, throttle_secs=0),
    )
    assert result["global_step"] == 20
    again = make(tmp_path, None).evaluate(lambda: batches(60))
    assert result["loss"] == pytest.approx(again["loss"], rel=1e-5)


def test_nan_loss_raises_and_is_not_saved(tmp_path, strategy):
    estimator = make(tmp_path, strategy)

    def broken():
        return tf.data.Dataset.from_tensor_slices(({"x": X * np.nan}, Y)).batch(10).repeat()

    with pytest.raises(tf.estimator.NanLossDuringTrainingError):
        estimator.train(broken, steps=4)
    assert estimator.latest_checkpoint() is None


def test_input_context_counts_replicas_and_pipelines(tmp_path):
    seen = []

    def input_fn(input_context):
        seen.append((input_context.num_input_pipelines, input_context.num_replicas_in_sync))
        return batches(input_context.get_per_replica_batch_size(20))

    estimator = make(tmp_path, STRATEGIES["mirrored"]())
    estimator.train(input_fn)
    assert seen == [(1, 2)]
    assert estimator.get_variable_value("global_step") == 3


def test_parameter_servers_end_all_steps_before_a_checkpoint(tmp_path):
    strategy = STRATEGIES["parameter servers"]()
    steps = []

    class Listener(tf.estimator.CheckpointSaverListener):
        def before_save(self, session, global_step_value):
            steps.append(global_step_value)

    estimator = make(tmp_path, strategy, save_checkpoints_steps=16)
    estimator.train(lambda: batches(10, repeat=True), steps=48, saving_listeners=[Listener()])
    assert steps == [16, 32, 48]  # all scheduled steps have ended
    estimator.train(lambda: batches(10))  # the coordinator reads each batch once
    assert estimator.get_variable_value("global_step") == 54
    with pytest.raises(ValueError, match="wrong step"):

        def fails(features, labels, mode):
            raise ValueError("wrong step")

        config = tf.estimator.RunConfig(train_distribute=strategy)
        tf.estimator.Estimator(fails, str(tmp_path / "b"), config).train(
            lambda: batches(10), steps=1
        )


def test_train_input_error_under_parameter_servers_leaves_no_step_running(tmp_path):
    begun, opened = threading.Semaphore(0), threading.Event()

    def slow(features, labels, mode):
        begun.release()
        assert opened.wait(30)
        return model_fn(features, labels, mode)

    def elements():
        for first in (0, 10, 20):
            yield {"x": X[first : first + 10]}, Y[first : first + 10]
        assert begun.acquire(timeout=30)
        threading.Timer(0.1, opened.set).start()
        raise OSError("bad input")

    def bad():
        spec = {"x": tf.TensorSpec((10, 3), tf.float32)}, tf.TensorSpec((10, 1), tf.float32)
        return tf.data.Dataset.from_generator(elements, output_signature=spec)

    strategy = tf.distribute.ParameterServerStrategy()
    config = tf.estimator.RunConfig(model_dir=str(tmp_path), train_distribute=strategy)
    estimator = tf.estimator.Estimator(slow, config=config)
    with pytest.raises(OSError, match="bad input"):
        estimator.train(bad, steps=5)
    assert opened.is_set() and tf.distribute.coordinator.ClusterCoordinator(strategy).done()
    estimator.train(lambda: batches(10, repeat=True), steps=5)
    assert estimator.get_variable_value("global_step") == 5
