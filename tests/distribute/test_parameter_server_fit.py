"""`fit`, `evaluate` and `predict` under `ParameterServerStrategy`."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import pycollective as tf
from pycollective.distribute.coordinator import (
    ClusterCoordinator,
    experimental_get_current_worker_index,
)

P = tf.distribute.experimental.partitioners
X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = X @ np.array([[1], [-2], [3], [0.5]], np.float32) + 0.25


def model_of(strategy, rate=0.05, layers=(), **options):
    tf.keras.utils.set_random_seed(3)
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((4,)), *layers, tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(rate), "mse", metrics=["mae"], **options)
    return model


def servers(workers=2, **options):
    return tf.distribute.ParameterServerStrategy(num_workers=workers, **options)


def creator(repeats=True):
    def dataset_fn(context):
        assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(60)
        return (dataset.repeat() if repeats else dataset).batch(16)

    return tf.keras.utils.experimental.DatasetCreator(dataset_fn)


@pytest.mark.parametrize("shards", [1, 2])
def test_fit_with_a_dataset_creator_trains_on_the_workers(shards):
    strategy = servers(3, variable_partitioner=P.FixedShardsPartitioner(shards))
    model = model_of(strategy)
    history = model.fit(creator(), epochs=6, steps_per_epoch=20, verbose=0).history
    assert int(model.optimizer.iterations) == 120
    assert len(history["loss"]) == 6
    assert history["loss"][-1] < 0.05 * history["loss"][0]
    assert model.evaluate(X, Y, verbose=0)[0] < 0.05


def test_fit_steps_run_on_worker_threads_with_their_own_datasets():
    seen, both = set(), threading.Barrier(2, timeout=30)

    class Model(tf.keras.Sequential):
        def train_step(self, data):
            if len(seen) < 2:
                seen.add(experimental_get_current_worker_index())
                both.wait()
            return super().train_step(data)

    strategy = servers()
    with strategy.scope():
        model = Model([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    logs = model.fit(creator(), steps_per_epoch=4, verbose=0).history
    assert seen == {0, 1}
    assert list(logs) == ["loss"] and np.isfinite(logs["loss"][0])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_fit_with_one_worker_and_arrays_equals_fit_without_a_strategy(steps, accumulate):
    options = {"steps_per_execution": steps, "accumulate_steps": accumulate}
    found = []
    for strategy in (servers(1), tf.distribute.get_strategy()):
        model = model_of(strategy, **options)
        logs = model.fit(
            X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0, validation_split=0.2
        ).history
        found.append((logs, [w.numpy() for w in model.weights]))
    (logs, weights), (plain, plain_weights) = found
    assert logs == plain
    for a, b in zip(weights, plain_weights, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", ["arrays", "dataset", "iterator", "creator"])
def test_fit_gives_every_batch_of_the_coordinator_to_one_worker(kind):
    model = model_of(servers(3))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(7)
    steps = 9
    if kind == "arrays":
        model.fit(X, Y, batch_size=7, verbose=0)
    elif kind == "dataset":
        model.fit(dataset, verbose=0)
    elif kind == "iterator":
        model.fit(iter(dataset), verbose=0)
    else:
        history = model.fit(
            creator(), steps_per_epoch=9, verbose=0, validation_data=creator(repeats=False)
        ).history
        # The coordinator reads the validation data, so that each example counts once.
        expected = model.evaluate(X, Y, verbose=0)[0]
        assert history["val_loss"] == pytest.approx([expected], rel=1e-5)
    assert int(model.optimizer.iterations) == steps


@pytest.mark.parametrize("rows", [60, 53])
@pytest.mark.parametrize("source", ["arrays", "creator"])
def test_evaluate_and_predict_use_each_example_once_and_in_order(rows, source):
    plain = model_of(tf.distribute.get_strategy())
    model = model_of(servers(3))
    arrays = (X[:rows], Y[:rows])

    def dataset_fn(context):
        return tf.data.Dataset.from_tensor_slices(arrays).batch(8)

    if source == "creator":
        given, options = (tf.keras.utils.experimental.DatasetCreator(dataset_fn),), {}
    else:
        given, options = arrays, {"batch_size": 8}
    found = model.evaluate(*given, verbose=0, **options)
    expected = plain.evaluate(*arrays, batch_size=8, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    predicted = model.predict(given[0], verbose=0, **options)
    np.testing.assert_array_equal(predicted, plain.predict(X[:rows], batch_size=8, verbose=0))


def test_single_batches_are_steps_of_a_worker():
    model, plain = model_of(servers()), model_of(tf.distribute.get_strategy())
    for one in (model, plain):
        one.train_on_batch(X, Y)
    assert model.test_on_batch(X, Y) == plain.test_on_batch(X, Y)
    assert np.array_equal(model.predict_on_batch(X), plain.predict_on_batch(X))
    assert int(model.optimizer.iterations) == 1


def test_fit_with_dropout_and_batch_normalization_keeps_finite_statistics():
    layers = [
        tf.keras.layers.Dense(8, activation="relu"),
        tf.keras.layers.BatchNormalization(),
        tf.keras.layers.Dropout(0.1),
    ]
    model = model_of(servers(4), layers=layers)
    history = model.fit(creator(), epochs=3, steps_per_epoch=30, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert all(np.isfinite(w.numpy()).all() for w in model.weights)


def test_fit_callbacks_get_the_whole_epoch_at_its_end(tmp_path):
    ends, batches = [], []

    class Watch(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append(batch)

        def on_epoch_end(self, epoch, logs=None):
            ends.append((ClusterCoordinator(strategy).done(), float(self.model.metrics[0].count)))

    strategy = servers(3)
    model = model_of(strategy)
    saving = tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "ckpt"), save_weights_only=True)
    model.fit(creator(), epochs=2, steps_per_epoch=5, verbose=0, callbacks=[Watch(), saving])
    assert batches == [0, 1, 2, 3, 4] * 2
    assert ends == [(True, 80.0)] * 2  # five batches of 16 rows
    other = model_of(tf.distribute.get_strategy())
    tf.train.Checkpoint(model=other).read(str(tmp_path / "ckpt"))
    assert np.array_equal(other.weights[0].numpy(), model.weights[0].numpy())


class Ends(tf.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyError("preempted")


def test_fit_continues_from_its_backup_with_another_number_of_shards(tmp_path):
    def fit(shards, *more):
        backup = tf.keras.callbacks.BackupAndRestore(tmp_path / f"backup{len(more)}")
        model = model_of(servers(1, variable_partitioner=P.FixedShardsPartitioner(shards)))
        options = {"epochs": 4, "shuffle": False, "verbose": 0, "callbacks": [backup, *more]}
        return model.fit(X, Y, **options).history["loss"]

    expected = fit(1)
    with pytest.raises(KeyError, match="preempted"):
        fit(2, Ends())
    (tmp_path / "backup1").rename(tmp_path / "backup0")
    assert fit(3) == pytest.approx(expected[2:], rel=1e-5)


def test_fit_error_of_a_step_is_raised_and_the_model_can_train_again():
    class Model(tf.keras.Sequential):
        broken = True

        def train_step(self, data):
            if self.broken and int(self.optimizer.iterations) >= 3:
                raise ValueError("broken step")
            return super().train_step(data)

    with servers().scope():
        model = Model([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="broken step"):
        model.fit(X, Y, batch_size=2, verbose=0)
    model.broken = False
    model.fit(X, Y, batch_size=20, verbose=0)


def test_fit_end_of_a_workers_dataset_raises():
    model = model_of(servers())
    with pytest.raises(tf.errors.OutOfRangeError, match="has no more elements; repeat"):
        model.fit(creator(repeats=False), steps_per_epoch=50, verbose=0)


def test_fit_wrong_arguments_raise():
    model = model_of(servers())
    with pytest.raises(ValueError, match="`steps_per_epoch` must be provided in `Model.fit`"):
        model.fit(creator(), verbose=0)
    with pytest.raises(ValueError, match="`verbose=1` is not allowed with `ParameterServerStrat"):
        model.fit(X, Y, verbose=1)
    with pytest.raises(ValueError, match="specify a `validation_steps` value"):
        model.fit(X, Y, validation_data=creator(), verbose=0)
    with pytest.raises(ValueError, match="`y` argument is not supported when using a DatasetCr"):
        model.fit(creator(), Y, steps_per_epoch=2, verbose=0)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    distributed = model.distribute_strategy.experimental_distribute_dataset(dataset)
    with pytest.raises(NotImplementedError, match="Only `tf.keras.utils.experimental.DatasetCr"):
        model.fit(distributed, verbose=0)
    model.run_eagerly = True
    with pytest.raises(ValueError, match="`run_eagerly` is not supported"):
        model.evaluate(X, Y)


def test_fit_verbose_auto_prints_a_line_for_each_epoch(capsys):
    model_of(servers()).fit(X, Y, batch_size=20, epochs=2)
    printed = capsys.readouterr().out
    assert "Epoch 1/2" in printed and "loss:" in printed and "\r" not in printed


def test_fit_keeps_few_batches_in_memory():
    read, trained = [], []
    most = 0

    class Model(tf.keras.Sequential):
        def train_step(self, data):
            trained.append(1)
            return super().train_step(data)

    def batches():
        nonlocal most
        for begin in range(0, 60, 2):
            read.append(1)
            most = max(most, len(read) - len(trained))
            yield X[begin : begin + 2], Y[begin : begin + 2]

    with servers(2).scope():
        model = Model([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(batches(), verbose=0)
    assert len(trained) == 30 and most <= 9


class Gated(tf.keras.Sequential):
    """A model whose steps wait; a timer starts when `stop` has seen the first step."""

    def __init__(self, fails=False):
        self._fails = fails
        self._seen, self._opened = threading.Semaphore(0), threading.Event()
        self._begun, self._ended = [], []
        super().__init__([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
        self.compile("sgd", "mse")

    def _wait(self, step, data):
        self._begun.append(1)
        self._seen.release()
        assert self._opened.wait(30)
        try:
            if self._fails:
                raise ValueError("error of a step")
            return step(data)
        finally:
            self._ended.append(1)

    def train_step(self, data):
        return self._wait(super().train_step, data)

    def test_step(self, data):
        return self._wait(super().test_step, data)

    def predict_step(self, data):
        return self._wait(super().predict_step, data)

    def stop(self):
        """Wait until a step runs, and let it end a little later."""
        assert self._seen.acquire(timeout=30)
        threading.Timer(0.1, self._opened.set).start()

    def has_ended(self):
        """Return True if one step has run to its end, and no step runs or waits."""
        weights, done = self.get_weights(), ClusterCoordinator(self.distribute_strategy).done()
        time.sleep(0.05)
        same = all(map(np.array_equal, weights, self.get_weights()))
        return done and same and len(self._begun) == len(self._ended) == 1


def gated(**options):
    with servers(1).scope():
        return Gated(**options)


class Stop(tf.keras.callbacks.Callback):
    """Call a function at the end of the third batch."""

    def __init__(self, call):
        super().__init__()
        self._call = call

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self._call()

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_error_of_a_callback_leaves_no_step_running(method, error, fails):
    model = gated(fails=fails)

    def stop():
        model.stop()
        raise error("callback")

    with pytest.raises(error, match="callback"):
        getattr(model, method)(
            X, *[Y][method == "predict" :], batch_size=10, callbacks=[Stop(stop)]
        )
    assert model.has_ended()
    model._fails = False
    model.fit(X, Y, batch_size=30, verbose=0)
    assert int(model.optimizer.iterations) == 2 + (method == "fit" and not fails)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_error_of_the_input_leaves_no_step_running(method):
    model = gated()

    def batches():
        yield from [(X[:10], Y[:10])] * 3
        model.stop()
        raise OSError("bad input")

    with pytest.raises(OSError, match="bad input"):
        getattr(model, method)(batches(), verbose=0)
    assert model.has_ended()


def interrupted_in_join(monkeypatch):
    """Return a model whose wait for the workers is interrupted."""
    model = gated()

    def join(self, timeout=None):
        model.stop()
        raise KeyboardInterrupt("join")

    monkeypatch.setattr(ClusterCoordinator, "join", join)
    return model


def test_fit_interrupt_in_the_wait_for_an_epoch_leaves_no_step_running(monkeypatch):
    model = interrupted_in_join(monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="join"):
        model.fit(X, Y, batch_size=20, verbose=0)
    assert model.has_ended()


@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch", "predict_on_batch"])
def test_single_batch_interrupt_leaves_no_step_running(monkeypatch, method):
    model = interrupted_in_join(monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="join"):
        getattr(model, method)(X, *[Y][method == "predict_on_batch" :])
    assert model.has_ended()


def test_fit_error_before_a_step_does_not_cancel_other_functions():
    model = gated()
    gate = threading.Event()
    value = ClusterCoordinator(model.distribute_strategy).schedule(tf.function(gate.wait), (30,))
    other = ClusterCoordinator(model.distribute_strategy).schedule(tf.function(lambda: 5))

    def batches():
        raise OSError("bad input")
        yield

    with pytest.raises(OSError, match="bad input"):
        model.fit(batches(), verbose=0)
    gate.set()
    assert (value.fetch(), other.fetch()) == (True, 5)


@pytest.mark.parametrize("batch_size", [20, 10])
def test_fit_whose_steps_a_callback_cancels_raises_cancelled_error(batch_size):
    model = gated()

    def cancel():
        model.stop()
        ClusterCoordinator(model.distribute_strategy).cancel()

    with pytest.raises(tf.errors.CancelledError, match="is cancelled"):
        model.fit(X, Y, batch_size=batch_size, verbose=0, callbacks=[Stop(cancel)])
    assert ClusterCoordinator(model.distribute_strategy).done()
