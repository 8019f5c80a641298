"""`fit` with several outputs, accumulated batches, types of input, and half precision."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from fitting import LABELS, STRATEGIES, TARGETS, WEIGHTS, X, dense, linear, mirrored

import pycollective as tf
from pycollective import keras

SOME = ["default", "mirrored 1", "mirrored 2", "mirrored 3", "central storage 2"]
CLASSES = LABELS.astype(np.int64)


class Two(keras.Model):
    """A classifier and a regression with a shared layer, with outputs in a list or a dict."""

    def __init__(self, named):
        super().__init__()
        random = np.random.default_rng(3)
        self.body = keras.layers.Dense(5, "tanh", dtype="float64")
        self.kind = keras.layers.Dense(4, dtype="float64")
        self.size = keras.layers.Dense(2, dtype="float64")
        self.named = named
        self(X[:1])
        self.set_weights([random.standard_normal(w.shape) for w in self.get_weights()])

    def call(self, x):
        x = self.body(x)
        outputs = {"kind": self.kind(x), "size": self.size(x)}
        return outputs if self.named else list(outputs.values())


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def two(named, **more):
    model = Two(named)
    names = ("kind", "size")

    def per_output(*values):
        return dict(zip(names, values, strict=True)) if named else list(values)

    model.compile(
        keras.optimizers.SGD(0.1),
        per_output(crossentropy(), "mse"),
        per_output(0.5, 2.0),
        metrics=per_output(["accuracy"], ["mae", "mse"]),
        weighted_metrics=per_output([], "mae"),
        **more,
    )
    return model, per_output(CLASSES, TARGETS)


def by_hand():
    """Compute the results of one epoch of batches of 8 from the formulas."""
    model = Two(True)
    optimizer = keras.optimizers.SGD(0.1)
    sums, count, weight = {}, 0, 0.0
    for first in range(0, len(X), 8):
        part = slice(first, first + 8)
        x, labels, targets, w = X[part], CLASSES[part], TARGETS[part], WEIGHTS[part]
        with tf.GradientTape() as tape:
            out = model(x)
            logs = tf.nn.log_softmax(out["kind"])
            kind = -tf.reduce_sum(logs * np.eye(4)[labels], axis=-1)
            size = tf.reduce_mean(tf.square(out["size"] - targets), axis=-1)
            losses = [tf.reduce_mean(each * w) for each in (kind, size)]
            loss = 0.5 * losses[0] + 2.0 * losses[1]
        optimizer.minimize(loss, model.trainable_variables, tape=tape)
        error = abs(out["size"].numpy() - targets).mean(-1)
        amounts = {
            "loss": len(x) * float(loss),
            "kind_loss": len(x) * float(losses[0]),
            "size_loss": len(x) * float(losses[1]),
            "kind_accuracy": (out["kind"].numpy().argmax(-1) == labels).sum(),
            "size_mae": error.sum(),
            "size_mse": float(tf.reduce_sum(size)),
            "size_weighted_mae": (error * w).sum(),
        }
        for name, amount in amounts.items():
            sums[name] = sums.get(name, 0) + amount
        count, weight = count + len(x), weight + w.sum()
    divisors = {"size_weighted_mae": weight}
    return {n: s / divisors.get(n, count) for n, s in sums.items()}, model.get_weights()


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("named", [True, False])
def test_fit_several_outputs_follow_the_formulas(name, named):
    with STRATEGIES[name]().scope():
        model, y = two(named)
    logs = model.fit(X, y, 8, shuffle=False, verbose=0, sample_weight=WEIGHTS).history
    expected, weights = by_hand()
    if not named:
        expected = {
            k.replace("kind", "output_1").replace("size", "output_2"): v
            for k, v in expected.items()
        }
    assert list(logs) == list(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(logs[key], [value], rtol=1e-6, err_msg=key)
    for found, right in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-9)
    if named:
        both = {"kind": WEIGHTS, "size": WEIGHTS}
        again = model.evaluate(X, y, sample_weight=both, verbose=0, return_dict=True)
        assert again == model.evaluate(X, y, sample_weight=WEIGHTS, verbose=0, return_dict=True)
    predicted = model.predict(X, verbose=0)
    assert (predicted["kind"] if named else predicted[0]).shape == (21, 4)


def test_fit_outputs_without_loss_are_ignored():
    model, _ = two(True)
    model.compile("sgd", {"size": "mse"}, metrics={"size": "mae"})
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        logs = model.fit(X, {"size": TARGETS}, verbose=0).history
    assert list(logs) == ["loss", "size_mae"]
    model.compile("sgd", "mse", [1.0, 3.0])
    y = {"kind": np.eye(4)[CLASSES], "size": TARGETS}
    found = model.evaluate(X, y, verbose=0, return_dict=True)
    assert found["loss"] == pytest.approx(found["kind_loss"] + 3 * found["size_loss"])


def test_evaluate_targets_for_outputs_with_loss_alone_are_enough():
    model, y = two(True)
    model.compile("sgd", [None, "mse"])
    expected = model.evaluate(X, [y["kind"], TARGETS], verbose=0)
    assert expected > 0
    assert model.evaluate(X, [TARGETS], verbose=0) == expected
    assert model.evaluate(X, TARGETS, verbose=0) == expected
    model.compile("sgd", [None, None], metrics=[None, "mse"])
    with pytest.raises(ValueError, match="but y has one"):
        model.evaluate(X, TARGETS, verbose=0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"y": TARGETS}, r"the model has 2 outputs \(kind, size\), but y has one"),
        ({"y": {"kind": CLASSES, "sise": TARGETS}}, r"y names \['sise'\]; the outputs are"),
        ({"loss": {"kind": "mse", "sise": "mse"}}, r"loss names \['sise'\]"),
        ({"loss": ["mse"] * 3}, "but loss has 3 in a list"),
        ({"metrics": ["mae"]}, "but metrics has 1 in a list"),
        ({"loss_weights": 3.0}, "but loss_weights has one"),
    ],
)
def test_fit_settings_not_matching_outputs_raise(change, text):
    model, y = two(True)
    y = change.pop("y", y)
    model.compile("sgd", **{"loss": {"kind": crossentropy(), "size": "mse"}, **change})
    with pytest.raises(ValueError, match=text):
        model.evaluate(X, y, verbose=0)


def test_compile_duplicate_metric_names_get_numbers():
    model = linear(metrics=["mae", "mae"], weighted_metrics=["mae"])
    logs = model.fit(X[:, :1], X[:, :1], verbose=0).history
    assert list(logs) == ["loss", "mae", "mae_1", "weighted_mae"]
    assert model.metrics_names == list(logs)


def test_compile_crossentropy_is_chosen_by_shape():
    labels = {"sparse": CLASSES, "column": CLASSES[:, None], "one hot": np.eye(4)[CLASSES]}
    found = set()
    for y in labels.values():
        model = keras.Sequential([dense(4, "float64"), keras.layers.Activation("softmax")])
        model.compile(loss="crossentropy", metrics=["acc"])
        found.add(tuple(np.round(model.evaluate(X, y, verbose=0), 6)))
    assert len(found) == 1


# Accumulated batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_accumulate_steps_equals_the_joined_batch(name, reduction):
    def trained(size, **more):
        with STRATEGIES[name]().scope():
            model = dense(2, "float64")
            loss = keras.losses.MeanSquaredError(reduction)
            model.compile(keras.optimizers.Adam(0.1), loss, metrics=["mae"], **more)
        logs = model.fit(
            X, TARGETS, size, epochs=2, shuffle=False, verbose=0, sample_weight=WEIGHTS
        ).history
        return model, logs

    # 21 rows make two steps of three batches: 4, 4, 4 and 4, 4, 1.
    joined, expected = trained(12)
    for more in {"steps_per_execution": 1}, {"steps_per_execution": 2}:
        model, logs = trained(4, accumulate_steps=3, **more)
        assert int(model.optimizer.iterations) == 4 == int(joined.optimizer.iterations)
        for found, right in zip(model.get_weights(), joined.get_weights(), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-7)
        np.testing.assert_allclose(logs["loss"], expected["loss"], rtol=1e-9)
        np.testing.assert_allclose(logs["mae"], expected["mae"], rtol=1e-6)


@pytest.mark.parametrize("name", SOME)
def test_accumulate_steps_overridden_train_step_accumulates(name):
    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            variables = self.trainable_variables
            gradients = tape.gradient(loss, variables)
            # The bias has a gradient in one of the two batches: in the second on even replicas, and
            # in the first on odd ones.
            replica = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
            batches[replica] += 1
            if (batches[replica] + replica) % 2:
                gradients[1] = None
            else:
                counted.append(np.asarray(x))
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return {"loss": loss}

    strategy = STRATEGIES[name]()
    batches, counted = Counter(), []
    with strategy.scope():
        model = Own([keras.layers.Dense(2, input_shape=(3,), dtype="float64")])
        model.set_weights([np.ones((3, 2)), np.zeros(2)])
        model.compile(keras.optimizers.SGD(1.0), "mse", accumulate_steps=2)
    logs = model.fit(X[:8], TARGETS[:8], 4, shuffle=False, verbose=0).history
    assert batches == dict.fromkeys(range(strategy.num_replicas_in_sync), 2)
    assert int(model.optimizer.iterations) == 1
    error = 2 * (X[:8] @ np.ones((3, 2)) - TARGETS[:8]) / 16
    of_the_bias = [(X[:8] == row).all(axis=1).argmax() for row in np.concatenate(counted)]
    assert 0 < len(of_the_bias) < 8
    kernel, bias = model.get_weights()
    np.testing.assert_allclose(kernel, 1 - X[:8].T @ error, rtol=1e-9)
    np.testing.assert_allclose(bias, -error[of_the_bias].sum(0), rtol=1e-9)
    # The log contains the mean of the replicas' shares of the last batch's loss.
    mean_share = 4 * (error[4:] ** 2).sum() / strategy.num_replicas_in_sync
    np.testing.assert_allclose(logs["loss"], mean_share, rtol=1e-9)


# Types of input -----------------------------------------------------------------------------------


class Parts(keras.utils.PyDataset):
    def __init__(self):
        super().__init__(workers=2)
        self.ends = []

    def __len__(self):
        return 3

    def __getitem__(self, i):
        part = slice(8 * i, 8 * i + 8)
        return X[part], TARGETS[part]

    def on_epoch_end(self):
        self.ends.append("end")


class Loader:
    """A loader like ``torch.utils.data.DataLoader``: it yields lists, and can be iterated again."""

    def __iter__(self):
        return ([*Parts()[i]] for i in range(3))

    def __len__(self):
        raise TypeError("object of type 'Stream' has no len()")


@pytest.mark.parametrize("name", ["default", "mirrored 2"])
def test_fit_py_dataset_and_loader_equal_arrays(name):
    def trained(make, **options):
        with STRATEGIES[name]().scope():
            model = dense(2, "float64")
            model.compile(keras.optimizers.SGD(0.1), "mse")
        return model.fit(*make, epochs=2, shuffle=False, verbose=0, **options).history["loss"]

    expected = trained((X, TARGETS), batch_size=8)
    parts = Parts()
    np.testing.assert_allclose(trained((parts,)), expected, rtol=1e-12)
    assert parts.ends == ["end", "end"]
    np.testing.assert_allclose(trained((Loader(),)), expected, rtol=1e-12)
    for given in [X], {"rows": X}:
        found = trained((given, TARGETS), batch_size=8)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    forever = (parts[i % 3] for i in range(10**9))
    np.testing.assert_allclose(trained((forever,), steps_per_epoch=3), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="`y` argument is not supported when using a Parts"):
        trained((parts, TARGETS))
    with pytest.raises(ValueError, match="`validation_split` is only supported"):
        trained((Loader(),), validation_split=0.5)


def test_py_dataset_shuffle_changes_the_batch_order():
    class Numbers(Parts):
        def __getitem__(self, i):
            order.append(i)
            return super().__getitem__(i)

    keras.utils.set_random_seed(3)
    order = []
    model = dense(2)
    model.compile("sgd", "mse")
    model.fit(Numbers(), epochs=4, verbose=0)
    epochs = [order[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(epoch) == [0, 1, 2] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


# Half precision -----------------------------------------------------------------------------------


@pytest.fixture
def policy(request):
    keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    keras.mixed_precision.set_global_policy(None)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"], indirect=True)
@pytest.mark.parametrize("count", [1, 2])
def test_fit_half_precision_policy_trains(policy, count):
    if policy.endswith("bfloat16"):
        pytest.importorskip("ml_dtypes")
    seen = []

    class Watch(keras.layers.Layer):
        def call(self, x):
            seen.append((str(x.dtype), str(first.kernel.value().dtype)))
            return x

    with mirrored(count).scope():
        first = keras.layers.Dense(5, "relu", input_shape=(3,))
        last = keras.layers.Dense(2, dtype="float32")
        model = keras.Sequential([first, Watch(), last])
        model.set_weights([np.full(w.shape, 0.1) for w in model.get_weights()])
        model.compile("sgd", "mse")
    half = policy.removeprefix("mixed_")
    assert {str(v.dtype) for v in model.weights} == {"float32"}
    assert model.dtype_policy.name == first.dtype_policy.name == policy
    assert first.compute_dtype == half and first.dtype == "float32" == last.compute_dtype
    scaled = isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    model.fit(X, TARGETS, 8, shuffle=False, verbose=0)
    assert set(seen) == {(half, half)}
    assert first.kernel.value().dtype == "float32"
    weights = model.get_weights()
    keras.mixed_precision.set_global_policy("float32")
    plain = keras.Sequential(
        [keras.layers.Dense(5, "relu", input_shape=(3,)), keras.layers.Dense(2)]
    )
    plain.set_weights([np.full(w.shape, 0.1) for w in plain.get_weights()])
    plain.compile("sgd", "mse")
    plain.fit(X, TARGETS, 8, shuffle=False, verbose=0)
    for found, right in zip(weights, plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, right, rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("count", [1, 2])
def test_fit_overflowing_step_is_skipped(count):
    with mirrored(count).scope():
        model = keras.Sequential(
            [keras.layers.Dense(1, input_shape=(1,), use_bias=False, dtype="mixed_float16")]
        )
        model.set_weights([[[1.0]]])
        model.compile(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), 2.0**15), "mse"
        )
    # 2 x² of the last example times the scale overflows float16, in one replica only.
    x = np.array([[1.0], [1.0], [1.0], [8.0]], np.float32)
    scales = []
    step = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_: scales.append(float(model.optimizer.dynamic_scale))
    )
    model.fit(x, 0 * x, verbose=0, epochs=4, callbacks=[step])
    assert scales[0] == 2**14 and scales[-1] < 2**15
    done = int(model.optimizer.iterations)
    assert done == len(scales) - sum(b < a for a, b in zip([2**15, *scales], scales, strict=False))
    np.testing.assert_allclose(
        model.get_weights()[0], [[np.prod([1 - (x**2).mean()] * done)]], rtol=0.02
    )


def test_policy_names_select_dtypes():
    mixed = keras.mixed_precision.Policy("mixed_float16")
    assert (mixed.name, mixed.compute_dtype, mixed.variable_dtype) == (
        "mixed_float16",
        "float16",
        "float32",
    )
    assert keras.DTypePolicy.from_config(mixed.get_config()) == mixed != keras.DTypePolicy()
    assert keras.mixed_precision.global_policy().name == "float32"
    with pytest.raises(ValueError, match="Cannot convert 'mixed_int8' to a mixed precision"):
        keras.mixed_precision.set_global_policy("mixed_int8")


# Order of outputs ---------------------------------------------------------------------------------


def test_predict_of_outputs_in_other_orders_keeps_the_keys():
    class InTurns(keras.Model):
        calls = 0

        def call(self, x):
            self.calls += 1
            parts = {"a": x, "b": 10.0 * x}
            return parts if self.calls % 2 else dict(reversed(parts.items()))

    model = InTurns()
    model.compile()
    found = model.predict(np.ones((4, 1), np.float32), batch_size=2, verbose=0)
    np.testing.assert_array_equal(found["a"], np.ones((4, 1)))
    np.testing.assert_array_equal(found["b"], np.full((4, 1), 10))


def test_outputs_in_another_order_in_evaluation_have_their_own_losses():
    class Reversed(keras.Model):
        def call(self, x, training=False):
            parts = {"a": x, "b": 10.0 * x}
            return parts if training else dict(reversed(parts.items()))

    x, model = np.ones((4, 1), np.float32), Reversed()
    y = {"a": np.zeros_like(x), "b": np.zeros_like(x)}
    model.compile(loss={"a": "mse", "b": "mae"}, metrics={"a": ["mae"], "b": ["mse"]})
    assert float(model.compute_loss(x, y, model(x, training=True))) == 11
    found = model.evaluate(x, y, verbose=0, return_dict=True)
    assert found == {"loss": 11, "a_loss": 1, "b_loss": 10, "a_mae": 1, "b_mse": 100}


@pytest.mark.parametrize("strategy", SOME)
def test_callbacks_of_predict_get_the_rows_of_all_replicas(strategy):
    seen = []

    class Shapes(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            seen.append({k: v.shape for k, v in logs["outputs"].items()})

    with STRATEGIES[strategy]().scope():
        model, _ = two(named=True)
    outputs = model.predict(X[:10], batch_size=6, verbose=0, callbacks=[Shapes()])
    assert seen == [{"kind": (n, 4), "size": (n, 2)} for n in (6, 4)]
    assert outputs["kind"].shape == (10, 4)


@pytest.mark.parametrize(
    ("loss", "targets", "expected"),
    [
        (["mse", "mae"], [0.0, 10.0], [8.0, 7.0, 1.0]),
        ("mse", [0.0, 10.0], [50.0, 49.0, 1.0]),
        (["mse", "mae"], {"z": 0.0, "y": 0.0}, [4.0, 3.0, 1.0]),
        ({"z": "mae", "y": "mse"}, {"z": 0.0, "y": 0.0}, [4.0, 3.0, 1.0]),
    ],
)
def test_lists_for_outputs_in_a_dict_are_in_the_order_of_the_sorted_keys(loss, targets, expected):
    """Keras 3.15 has these numbers."""
    x = keras.Input((1,))
    model = keras.Model(
        x, {"z": keras.layers.Rescaling(3.0, name="z")(x), "y": keras.layers.Identity(name="y")(x)}
    )
    model.compile("sgd", loss)
    ones = np.ones((2, 1), np.float32)
    of = (lambda v: v * ones) if not isinstance(targets, dict) else None
    y = [of(v) for v in targets] if of else {k: v * ones for k, v in targets.items()}
    assert model.evaluate(ones, y, verbose=0) == expected


def test_loss_as_a_metric_is_reported_by_its_name():
    model = keras.Sequential([keras.layers.Dense(2, input_shape=(3,))])
    named = keras.losses.MeanAbsoluteError(name="distance")
    model.compile("sgd", "mse", metrics=[keras.losses.MeanSquaredError(), named])
    logs = model.evaluate(X, TARGETS, verbose=0, return_dict=True)
    assert set(logs) == {"loss", "mean_squared_error", "distance"}


def test_metrics_are_listed_output_by_output():
    """`evaluate` returns a list, which programs read by position."""
    inputs = keras.Input((4,))
    ends = [keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")]
    model = keras.Model(inputs, ends)
    model.compile("sgd", ["mse", "mse"], [1, 2], [["mae"], ["mse"]], [["mae"], []])
    y = [np.ones((8, 1)), np.zeros((8, 1))]
    x = np.arange(32.0).reshape(8, 4)
    names = ["loss", "a_loss", "b_loss", "a_mae", "a_weighted_mae", "b_mse"]
    logs = model.evaluate(x, y, verbose=0, return_dict=True)
    assert list(logs) == names
    assert model.evaluate(x, y, verbose=0) == list(logs.values())
