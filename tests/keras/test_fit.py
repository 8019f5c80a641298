"""Training gives equal results under every strategy, and the results of Keras."""

from __future__ import annotations

import numpy as np
import pytest
from fitting import LABELS, STRATEGIES, TARGETS, WEIGHTS, X, dense, linear, mirrored

import pycollective as tf
from pycollective import keras

OTHERS = [name for name in STRATEGIES if name != "default"]


@pytest.fixture(params=["float64", "float32"])
def precision(request):
    keras.backend.set_floatx(request.param)
    yield {"float64": 1e-9, "float32": 1e-5}[request.param]
    keras.backend.set_floatx("float32")


def cross_entropy(**settings):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


#: Targets, and the arguments of `compile` and `fit`.
CASES = {
    "mean": lambda: (TARGETS, {"loss": "mse", "metrics": ["mae"]}, {}),
    "weights": lambda: (
        LABELS,
        {
            "loss": cross_entropy(),
            "metrics": ["accuracy"],
            "weighted_metrics": ["sparse_categorical_accuracy"],
        },
        {"sample_weight": WEIGHTS},
    ),
    "sum": lambda: (
        LABELS,
        {"loss": cross_entropy(reduction="sum"), "optimizer": "adam"},
        {
            "class_weight": {0: 1.5, 1: 0.5, 2: 2.0},
            "sample_weight": WEIGHTS,
            "validation_split": 0.3,
        },
    ),
    "several steps at once": lambda: (
        TARGETS,
        {"loss": lambda y, p: tf.square(y - p), "steps_per_execution": 2},
        {"validation_data": (X, TARGETS, WEIGHTS), "batch_size": 4},
    ),
    "one number for the batch": lambda: (
        TARGETS,
        {"loss": lambda y, p: tf.reduce_mean(tf.abs(y - p))},
        {"validation_data": (X, TARGETS), "validation_freq": 2, "batch_size": 5},
    ),
}


def trained(name, case):
    """Return all results of training under a strategy."""
    dtype = keras.backend.floatx()
    y, compiled, fit = CASES[case]()
    y = y.astype(dtype) if y.dtype.kind == "f" else y
    x = X.astype(dtype)
    with STRATEGIES[name]().scope():
        model = dense(2 if y.ndim == 2 else 4)
        model.compile(**{"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), **compiled})
    keras.utils.set_random_seed(3)  # for the order of examples
    history = model.fit(x, y, **{"batch_size": 8, "epochs": 2, "verbose": 0, **fit})
    found = {**history.history, **dict(enumerate(model.get_weights()))}
    found["evaluate"] = model.evaluate(x, y, batch_size=4, verbose=0)
    found["predict"] = model.predict(x, batch_size=4, verbose=0)
    # With one example, only one replica has an example.
    found["train one"] = model.train_on_batch(x[:1], y[:1])
    found["test one"] = model.test_on_batch(x[:1], y[:1])
    found["predict one"] = model.predict_on_batch(x[:1])
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OTHERS)
def test_fit_every_strategy_equals_one_device(name, case, precision):
    expected, found = trained("default", case), trained(name, case)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(
            found[key], value, rtol=precision, atol=precision, err_msg=str(key)
        )


@pytest.mark.parametrize("name", STRATEGIES)
def test_fit_results_equal_those_of_keras(name):
    """Expected values from TensorFlow 2.21 on one device: batches of 4, 4 and 2, weights, L2."""
    x = np.arange(10.0, dtype=np.float32).reshape(10, 1)
    y = 2 * x + 1
    with STRATEGIES[name]().scope():
        model = keras.Sequential(
            [keras.layers.Dense(1, input_shape=(1,), kernel_regularizer=keras.regularizers.L2(0.1))]
        )
        model.compile(
            keras.optimizers.SGD(0.001),
            "mse",
            metrics=["mae", keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error)],
            weighted_metrics=["mse"],
        )
    model.set_weights([[[0.5]], [0.1]])
    history = model.fit(
        x,
        y,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        sample_weight=np.linspace(0, 1, 10, dtype=np.float32),
        validation_data=(x, y),
    )
    keras_history = {
        "loss": [56.32220458984375, 38.182029724121094],
        "mae": [7.516531467437744, 6.228631019592285],
        "mean_squared_error": [73.5802001953125, 50.02518844604492],
        "mse": [112.5910415649414, 76.2372055053711],
        "val_loss": [52.45598602294922, 35.782291412353516],
        "val_mae": [6.338520050048828, 5.2614641189575195],
        "val_mean_squared_error": [52.3946647644043, 35.67916488647461],
        "val_mse": [52.3946647644043, 35.67916488647461],
    }
    assert list(history.history) == list(keras_history)
    for key, values in keras_history.items():
        np.testing.assert_allclose(history.history[key], values, rtol=1e-5, err_msg=key)
    assert history.epoch == [0, 1]
    assert history is model.history
    np.testing.assert_allclose(model.get_weights()[0], [[1.0155043601989746]], rtol=1e-5)
    np.testing.assert_allclose(model.get_weights()[1], [0.16876627504825592], rtol=1e-5)
    # Single steps, each with the results of its own batch.
    losses = [model.train_on_batch(x, y, return_dict=True)["loss"], model.train_on_batch(x, y)[0]]
    np.testing.assert_allclose(losses, [35.782291412353516, 31.77377700805664], rtol=1e-5)
    np.testing.assert_allclose(model.test_on_batch(x, y)[0], 28.22150230407715, rtol=1e-5)


def test_fit_uneven_batch_weights_examples_equally():
    """The loss of 3 examples on 2 replicas is their mean; TensorFlow averages replicas' means."""
    with mirrored(2).scope():
        model = linear()
    x = np.ones((3, 1), np.float32)
    logs = model.fit(x, [[1.0], [2.0], [6.0]], batch_size=3, shuffle=False, verbose=0).history
    assert logs["loss"] == [pytest.approx(41 / 3)]
    # The gradient of the mean of (w - y)² is -2 * mean(y) at w = 0.
    np.testing.assert_allclose(model.get_weights()[0], [[0.01 * 2 * 3]], rtol=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_fit_sum_reduction_and_weights_follow_the_formulas(name):
    y = np.array([[1], [0], [1], [1], [0]], np.float32)
    weights = np.array([1, 2, 3, 4, 5], np.float32)
    with STRATEGIES[name]().scope():
        summed = linear(2.0, loss=keras.losses.MeanSquaredError(reduction="sum"))
        summed.optimizer.learning_rate = 0.0
        weighted = linear(2.0, weighted_metrics=["mae"])
    squares = (2 - y.ravel()) ** 2
    # As in Keras, each batch is weighted by its number of examples.
    expected = (4 * squares[:4].sum() + squares[4:].sum()) / 5
    x = np.ones((5, 1), np.float32)
    logs = summed.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    assert logs["loss"] == [pytest.approx(expected)]
    classes = np.where(y.ravel() == 1, 3.0, 0.5)
    logs = weighted.train_on_batch(x, y, weights, {0: 0.5, 1: 3.0}, return_dict=True)
    both = classes * weights
    assert logs["loss"] == pytest.approx((both * squares).mean())
    assert logs["mae"] == pytest.approx((both * (2 - y.ravel())).sum() / both.sum())
    gradient = (both * 2 * (2 - y.ravel())).mean()
    np.testing.assert_allclose(weighted.get_weights()[0], [[2 - 0.01 * gradient]], rtol=1e-6)


def batches(x, y, size, kind):
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(size)
    if kind == "dataset":
        return dataset
    if kind == "distributed dataset":
        return tf.distribute.get_strategy().experimental_distribute_dataset(dataset)
    if kind == "creator":
        return keras.utils.experimental.DatasetCreator(lambda context: dataset)
    return ((x[i : i + size], y[i : i + size]) for i in range(0, len(x), size))


@pytest.mark.parametrize("kind", ["dataset", "distributed dataset", "generator", "creator"])
@pytest.mark.parametrize("name", ["default", "mirrored 1", "mirrored 3"])
def test_fit_every_input_type_gives_equal_results(name, kind):
    x, y = X.astype(np.float32), TARGETS.astype(np.float32)
    with STRATEGIES[name]().scope():
        expected, model = dense(2), dense(2)
        expected.compile("sgd", "mse")
        model.compile("sgd", "mse")
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        # The batches of a DatasetCreator are per replica, not global.
        given = batches(x, y, 8 if kind != "creator" else 9 // replicas, kind)
    size = 8 if kind != "creator" else 9
    a = expected.fit(x, y, batch_size=size, shuffle=False, verbose=0).history
    b = model.fit(given, verbose=0).history
    np.testing.assert_allclose(b["loss"], a["loss"], rtol=1e-6)
    np.testing.assert_allclose(model.get_weights()[0], expected.get_weights()[0], rtol=1e-5)
    if kind != "generator":
        np.testing.assert_allclose(
            model.evaluate(given, verbose=0), expected.evaluate(x, y, verbose=0), rtol=1e-5
        )
        found = model.predict(given, verbose=0)
        np.testing.assert_allclose(found, expected.predict(x, verbose=0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["default", "mirrored 2", "mirrored 3"])
def test_fit_iterator_next_reader_gets_the_next_batch(name):
    """Prefetching does not consume batches: the iterator's next reader gets the next batch."""
    taken = []

    def numbers():
        while True:
            taken.append(len(taken))
            yield np.full((6, 1), taken[-1], np.float32), np.zeros((6, 1), np.float32)

    with STRATEGIES[name]().scope():
        model = linear(1.0, optimizer=keras.optimizers.SGD(0.0), loss="mae")
    train, held_out = numbers(), numbers()
    logs = model.fit(train, epochs=3, initial_epoch=1, steps_per_epoch=2, verbose=0).history
    assert logs["loss"] == pytest.approx([0.5, 2.5]) and taken == [0, 1, 2, 3]
    assert model.evaluate(train, steps=2, verbose=0) == pytest.approx(4.5)
    assert model.predict(train, steps=2, verbose=0)[::6].tolist() == [[6], [7]]
    assert model.fit(train, steps_per_epoch=1, verbose=0).history["loss"] == pytest.approx([8])
    assert len(taken) == 9
    taken.clear()
    given = {"validation_data": held_out, "validation_steps": 2, "validation_freq": 2}
    zeros = np.zeros((6, 1), np.float32)
    logs = model.fit(zeros, zeros, epochs=5, verbose=0, **given).history
    assert logs["val_loss"] == pytest.approx([0.5, 2.5]) and taken == [0, 1, 2, 3]


class TwoInputs(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)

    def call(self, inputs):
        a, b = inputs
        out = self.dense(a) * b
        self.add_loss(tf.reduce_mean(tf.square(out)))
        return {"out": out, "twice": 2 * out}


class WithOwnSteps(TwoInputs):
    """A model with overridden steps, several outputs, a metric, and a result that is no metric."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Sum(name="seen")

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), weight)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        self.seen.update_state(tf.ones_like(y))
        return {"loss": loss, "seen": self.seen.result(), "constant": tf.constant(1.0)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred["out"], sample_weight, training)

    def test_step(self, data):
        (a, _), _ = data
        self.seen.update_state(a)
        return {m.name: m.result() for m in self.metrics if m is self.seen}

    def predict_step(self, data):
        return self(data[0], training=False)["twice"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_fit_overridden_steps_are_called(name):
    strategy = STRATEGIES[name]()
    with strategy.scope():
        model = WithOwnSteps()
        model.compile("sgd", "mse")
    assert [m.name for m in model.metrics] == ["loss", "seen"]
    a, b = np.arange(5, dtype=np.float32)[:, None], np.full((5, 1), 2, np.float32)
    y = np.ones((5, 1), np.float32)
    logs = model.fit((a, b), y, batch_size=3, shuffle=False, verbose=0, epochs=2).history
    # The last batch is [3, 4]: results of steps are averaged, metrics cover all replicas.
    assert logs["seen"] == [5, 5]
    assert logs["constant"] == [1, 1]
    w = 1.0
    for part in (a[:3], a[3:]):
        out = 2 * w * part
        loss = np.mean((out - 1) ** 2) + np.mean(out**2)
        w -= 0.01 * np.mean(2 * (out - 1) * 2 * part + 2 * out * 2 * part)
    mean_share = loss / strategy.num_replicas_in_sync
    np.testing.assert_allclose(logs["loss"][0], mean_share, rtol=1e-5)
    assert model.evaluate((a, b), y, verbose=0) == 10
    doubled = model.predict((a, b), verbose=0)
    assert doubled.shape == (5, 1)
    single = keras.Model.predict_step(model, ((a, b), y))["out"].numpy()
    np.testing.assert_allclose(doubled, 2 * single, rtol=1e-6)


@pytest.mark.parametrize("name", ["default", "mirrored 2"])
def test_predict_nested_outputs_keep_their_structure(name):
    with STRATEGIES[name]().scope():
        model = TwoInputs()
    a = np.arange(5, dtype=np.float32)[:, None]
    found = model.predict((a, a), batch_size=2, verbose=0)
    np.testing.assert_allclose(found["out"], a * a)
    np.testing.assert_allclose(found["twice"], 2 * a * a)


@pytest.mark.parametrize("size", [5, 2], ids=["one batch", "three batches"])
@pytest.mark.parametrize("kind", [np.asarray, np.ndarray.tolist, tf.constant, np.asfortranarray])
def test_predict_every_array_type_and_batch_size_equals_the_formula(kind, size):
    model = keras.Sequential([keras.layers.Dense(2)])
    x = np.random.default_rng(0).random((5, 3), np.float32)
    model.build((None, 3))
    expected = x @ model.layers[0].kernel.numpy()
    found = model.predict(kind(x), batch_size=size, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.flags.writeable and found.flags.owndata
    for wrong in (0, True, -1):
        with pytest.raises(ValueError, match="batch_size must be a positive integer"):
            model.predict(kind(x), batch_size=wrong, verbose=0)
    with pytest.raises(ValueError, match="predict: the input has no batch"):
        model.predict(x[:0], batch_size=size, verbose=0)
    with pytest.raises(ValueError, match="x is None"):
        model.predict(None, batch_size=size, verbose=0)


class KerasGuide(keras.Model):
    """The `train_step` of Keras's guide "Customizing what happens in fit()"."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


@pytest.mark.parametrize("name", STRATEGIES)
def test_fit_train_step_of_the_keras_guide_works(name):
    with STRATEGIES[name]().scope():
        model = KerasGuide()
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    x = np.arange(5, dtype=np.float32)[:, None]
    logs = model.fit(x, 0 * x, batch_size=4, shuffle=False, verbose=0).history
    assert logs == {"loss": [pytest.approx(6)], "mae": [pytest.approx(2)]}


def test_fit_batch_is_divided_among_replicas():
    """As in TensorFlow's tests, 100 examples in batches of 16 on 2 replicas."""
    rows = [[], []]

    class Counts(keras.Model):
        def train_step(self, data):
            x, y = data
            rows[tf.distribute.get_replica_context().replica_id_in_sync_group].append(len(x))
            assert len(y) == len(x)
            return {}

    with mirrored(2).scope():
        model = Counts()
        model.compile()
    model.fit(np.zeros((100, 3)), np.zeros(100), batch_size=16, verbose=0)
    assert rows == [[8, 8, 8, 8, 8, 8, 2]] * 2
    assert model.history.params["steps"] == 7


@pytest.mark.parametrize("saved, restored", [("default", "mirrored 2"), ("mirrored 3", "default")])
def test_checkpoint_compiled_model_includes_the_optimizer(saved, restored, tmp_path):
    x, y = X.astype(np.float32), TARGETS.astype(np.float32)
    with STRATEGIES[saved]().scope():
        model = dense(2)
        model.compile("adam", "mse")
    model.fit(x, y, verbose=0, shuffle=False)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "ckpt"))
    with STRATEGIES[restored]().scope():
        other = dense(2, seed=2)
        status = tf.train.Checkpoint(model=other).restore(path)
        other.compile("adam", "mse")
    for each in model, other:
        each.fit(x, y, verbose=0, shuffle=False)
    status.assert_existing_objects_matched()
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_fit_steps_per_epoch_continues_at_the_next_batch():
    model = linear(optimizer=keras.optimizers.SGD(0.0))
    x = np.ones((6, 1), np.float32)
    y = np.arange(6, dtype=np.float32)[:, None]
    forever = tf.data.Dataset.from_tensor_slices((x, y)).batch(1).repeat()
    # An epoch continues at the batch after the previous epoch's last.
    logs = model.fit(forever, steps_per_epoch=4, epochs=3, verbose=0).history
    np.testing.assert_allclose(logs["loss"], [14 / 4, (16 + 25 + 0 + 1) / 4, (4 + 9 + 16 + 25) / 4])
    # An epoch of the whole dataset starts at the first batch, and so does validation.
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    logs = model.fit(
        whole,
        steps_per_epoch=3,
        epochs=4,
        initial_epoch=2,
        validation_data=forever,
        validation_steps=2,
        verbose=0,
    )
    assert logs.epoch == [2, 3]
    np.testing.assert_allclose(logs.history["loss"], [55 / 6] * 2)
    np.testing.assert_allclose(logs.history["val_loss"], [0.5] * 2)
    assert model.evaluate(forever, steps=3, verbose=0) == pytest.approx(5 / 3)
    assert model.predict(forever, steps=7, verbose=0).shape == (7, 1)


def test_fit_too_few_batches_warns():
    model = linear()
    x = np.ones((5, 1), np.float32)
    with pytest.warns(UserWarning, match=r"Your input ran out of data.*step 4 of 4"):
        model.fit(x, x, batch_size=2, steps_per_epoch=4, verbose=0)
    with pytest.warns(UserWarning, match="no input left for epoch 2"):
        model.fit(((x, x) for _ in range(2)), epochs=3, verbose=0)
    assert model.history.epoch == [0]


@pytest.mark.parametrize("name", ["default", "mirrored 2"])
def test_fit_loss_not_finite_warns_with_the_step(name):
    with STRATEGIES[name]().scope():
        model = linear()
        twice = linear(steps_per_execution=2)
    x = np.ones((8, 1), np.float32)
    x[5] = np.nan
    with pytest.warns(RuntimeWarning, match="the loss is nan since step 3 of epoch 1") as caught:
        model.fit(x, x, batch_size=2, epochs=2, shuffle=False, verbose=0)
    assert len(caught) == 1
    with pytest.warns(RuntimeWarning, match="nan since steps 3 to 4 of epoch 1"):
        twice.fit(x, x, batch_size=2, shuffle=False, verbose=0)


def test_fit_shuffle_batch_keeps_the_rows_of_each_batch():
    x = np.arange(12.0, dtype=np.float32).reshape(12, 1)
    seen = []

    class Seen(keras.Model):
        def train_step(self, data):
            seen.append(sorted(data[0].numpy()[:, 0].tolist()))
            return {"loss": 0.0}

    model = Seen()
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(x, x, batch_size=4, epochs=2, shuffle="batch", verbose=0)
    assert sorted(seen) == sorted(2 * [[*map(float, range(k, k + 4))] for k in (0, 4, 8)])
    with pytest.raises(ValueError, match="shuffle must be True, False or 'batch', got 'rows'"):
        model.fit(x, x, shuffle="rows", verbose=0)


def test_fit_generator_may_yield_none_for_weights():
    x = np.arange(12.0, dtype=np.float32).reshape(12, 1)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    made = model.fit(((x, x, None) for _ in range(2)), verbose=0)
    assert len(made.history["loss"]) == 1
    assert model.predict(((x, None) for _ in range(2)), verbose=0).shape == (24, 1)


def test_fit_arrays_are_shuffled_in_each_epoch():
    seen = []

    class KeepsOrder(keras.Model):
        def train_step(self, data):
            seen.append(data[0].numpy().tolist())
            return {}

    model = KeepsOrder()
    model.compile()
    keras.utils.set_random_seed(1)
    for shuffle in True, False:
        with pytest.raises(ValueError, match="no batch"):
            model.fit(np.zeros(0), np.zeros(0), shuffle=shuffle, verbose=0)
        model.fit(np.arange(6), np.zeros(6), epochs=3, shuffle=shuffle, verbose=0)
    assert all(sorted(order) == [0, 1, 2, 3, 4, 5] for order in seen)
    assert len({tuple(order) for order in seen[:3]}) == 3
    assert seen[3:] == [[0, 1, 2, 3, 4, 5]] * 3


def test_fit_default_step_does_not_synchronize_for_metrics(monkeypatch):
    """Only an overridden step that reads the metrics synchronizes the replicas."""
    merge_calls = []
    merge = tf.distribute.ReplicaContext.merge_call

    def merge_call(self, *args, **kwargs):
        merge_calls.append(self.replica_id_in_sync_group)
        return merge(self, *args, **kwargs)

    class Own(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "twice": 2 * logs["mae"]}

    found = []
    monkeypatch.setattr(tf.distribute.ReplicaContext, "merge_call", merge_call)
    for kind in keras.Sequential, Own:
        with STRATEGIES["mirrored 2"]().scope():
            model = kind([keras.layers.Dense(2, input_shape=(3,), kernel_initializer="ones")])
            model.compile("sgd", "mse", metrics=["mae"])
        model.fit(X, TARGETS, 8, 1, shuffle=False, verbose=0)
        merge_calls.clear()
        found.append(model.fit(X, TARGETS, 8, 2, shuffle=False, verbose=0).history)
        # There are 3 steps in each of 2 epochs.
        assert sorted(merge_calls) == ([] if kind is keras.Sequential else [0] * 6 + [1] * 6)
        model.evaluate(X, TARGETS, 8, verbose=0)
        assert len(merge_calls) == (0 if kind is keras.Sequential else 12)
    for name, values in found[0].items():
        assert found[1][name] == values
    # The results of a step are averaged over the replicas.
    np.testing.assert_allclose(found[1]["twice"], 2 * np.array(found[1]["mae"]), rtol=1e-6)


def test_class_weights_of_bools_and_beside_weights_of_examples():
    from pycollective.keras.training.inputs import weighted_by_class

    x, y = np.zeros((4, 2), "f4"), np.array([0, 1, 1, 0])
    assert weighted_by_class({False: 1.0, True: 5.0})((x, y))[2].numpy().tolist() == [1, 5, 5, 1]
    columns = weighted_by_class({0: 1.0, 1: 5.0})((x, y, np.ones((4, 1), "f4")))[2]
    assert columns.numpy().ravel().tolist() == [1, 5, 5, 1]
    several = np.array([[[0], [1]], [[0], [1]]])
    weights = weighted_by_class({0: 1.0, 1: 1.0})((x[:2], several, np.array([1.0, 0.0], "f4")))[2]
    assert weights.numpy().tolist() == [[1, 1], [0, 0]]


def test_end_of_an_epoch_reaches_the_dataset_also_with_given_steps():
    class Counted(keras.utils.PyDataset):
        ends = 0

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return np.ones((4, 2), "f4"), np.ones((4, 1), "f4")

        def on_epoch_end(self):
            Counted.ends += 1

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(Counted(), epochs=4, steps_per_epoch=3, verbose=0)
    assert Counted.ends == 4


def test_log_of_one_element_is_a_number():
    class Own(keras.Model):
        def call(self, x):
            return x

        def train_step(self, data):
            return {"loss": np.ones((1,), np.float32)}

    model = Own()
    model.compile("sgd", "mse")
    ones = np.ones((4, 2), "f4")
    assert model.fit(ones, ones, verbose=0).history == {"loss": [1.0]}
