"""Losses, metrics, initializers and utilities against formulas in float64."""

import math

import numpy as np
import pytest

from pycollective import distribute, keras
from pycollective.keras import initializers, losses, metrics, regularizers
from pycollective.tensor import GradientTape, Variable, as_tensor

RNG = np.random.default_rng(7)
LOGITS = 3 * RNG.standard_normal((6, 4))
LABELS = np.array([0, 3, 1, 1, 2, 3])
ONE_HOT = np.eye(4)[LABELS]
WEIGHTS = np.array([1.0, 0.0, 2.0, 0.5, 1.0, 3.0])
TARGETS = RNG.standard_normal((6, 4))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


PROBABILITIES = softmax(LOGITS)
YES = (LABELS[:, None] > np.arange(4)).astype(float)
CROSS = -np.log(PROBABILITIES[np.arange(6), LABELS])
BINARY = -(YES * np.log(sigmoid(LOGITS)) + (1 - YES) * np.log(1 - sigmoid(LOGITS))).mean(axis=1)
SMOOTH = 0.9 * ONE_HOT + 0.1 / 4

CASES = {
    "sparse, logits": (
        lambda **k: losses.SparseCategoricalCrossentropy(from_logits=True, **k),
        LABELS,
        LOGITS,
        CROSS,
    ),
    "sparse, probabilities": (losses.SparseCategoricalCrossentropy, LABELS, PROBABILITIES, CROSS),
    "categorical, logits": (
        lambda **k: losses.CategoricalCrossentropy(from_logits=True, **k),
        ONE_HOT,
        LOGITS,
        CROSS,
    ),
    "categorical, probabilities": (losses.CategoricalCrossentropy, ONE_HOT, PROBABILITIES, CROSS),
    "categorical, smoothed": (
        lambda **k: losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1, **k),
        ONE_HOT,
        LOGITS,
        -(SMOOTH * np.log(PROBABILITIES)).sum(axis=1),
    ),
    "binary, logits": (
        lambda **k: losses.BinaryCrossentropy(from_logits=True, **k),
        YES,
        LOGITS,
        BINARY,
    ),
    "binary, probabilities": (losses.BinaryCrossentropy, YES, sigmoid(LOGITS), BINARY),
    "mse": (losses.MeanSquaredError, TARGETS, LOGITS, ((LOGITS - TARGETS) ** 2).mean(axis=1)),
    "mae": (losses.MeanAbsoluteError, TARGETS, LOGITS, np.abs(LOGITS - TARGETS).mean(axis=1)),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_the_formulas(case):
    make, true, predicted, expected = CASES[case]
    none = make(reduction="none")(true, predicted).numpy()
    np.testing.assert_allclose(none, expected, rtol=1e-10)
    assert none.dtype == np.float64
    for reduction, value in (
        (losses.Reduction.SUM, expected.sum()),
        (losses.Reduction.AUTO, expected.mean()),
        ("sum_over_batch_size", expected.mean()),
    ):
        np.testing.assert_allclose(
            float(make(reduction=reduction)(true, predicted)), value, rtol=1e-10
        )
    weighted = make(reduction="none")(true, predicted, sample_weight=WEIGHTS).numpy()
    np.testing.assert_allclose(weighted, expected * WEIGHTS, rtol=1e-10)
    mean = make()(true, predicted, sample_weight=WEIGHTS[:, None])
    np.testing.assert_allclose(float(mean), (expected * WEIGHTS).mean(), rtol=1e-10)
    half = make(reduction="sum")(true, predicted, sample_weight=0.5)
    np.testing.assert_allclose(float(half), expected.sum() / 2, rtol=1e-10)
    single = make(reduction="none")(true, predicted.astype(np.float32))
    assert single.dtype == np.float32


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_equal_finite_differences(case):
    make, true, predicted, _ = CASES[case]
    loss = make(reduction="sum")
    x = as_tensor(predicted)
    with GradientTape() as tape:
        tape.watch(x)
        value = loss(true, x)
    gradient = tape.gradient(value, x).numpy()
    step = 1e-6
    for place in ((0, 0), (1, 3), (5, 2)):
        moved = [predicted.copy(), predicted.copy()]
        moved[0][place] += step
        moved[1][place] -= step
        up, down = (float(loss(true, m)) for m in moved)
        np.testing.assert_allclose(gradient[place], (up - down) / (2 * step), rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reduction", list(losses.Reduction))
def test_losses_batch_without_rows_gives_zero(case, reduction):
    make, true, predicted, _ = CASES[case]
    x = as_tensor(predicted[:0])
    with GradientTape() as tape:
        tape.watch(x)
        value = make(reduction=reduction)(true[:0], x, sample_weight=WEIGHTS[:0])
    assert np.array_equal(value.numpy(), np.zeros(value.shape))
    assert tape.gradient(value, x).shape == (0, 4)


def test_sparse_labels_of_any_dtype_and_shape_give_the_same_loss():
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    for labels in (LABELS.astype(np.uint8), LABELS[:, None], LABELS.astype(np.float32)):
        np.testing.assert_allclose(loss(labels, LOGITS).numpy(), CROSS, rtol=1e-10)
    high = loss(LABELS.reshape(2, 3), LOGITS.reshape(2, 3, 4))
    np.testing.assert_allclose(high.numpy(), CROSS.reshape(2, 3), rtol=1e-10)


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (
            [0, 3, 4, 1, 2, 3],
            r"label 4 at position \[2\] is out of range: with 4 classes, .* 0 to 3",
        ),
        ([0, 3, 1, 1, -1, 3], r"label -1 at position \[4\]"),
        ([0.0, 1.5, 0, 0, 0, 0], r"label 1.5 at position \[1\]"),
        ([0.0, 1, math.nan, 0, 0, 0], r"label nan at position \[2\]"),
        ([0, 1, 2], r"labels of shape \(3,\) .* predictions of shape \(6, 4\)"),
    ],
)
@pytest.mark.parametrize("from_logits", [True, False])
def test_sparse_label_out_of_range_raises(labels, text, from_logits):
    loss = losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    with pytest.raises(ValueError, match=text):
        loss(np.asarray(labels), PROBABILITIES)


def test_sparse_label_out_of_range_names_the_position():
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    labels = LABELS.reshape(2, 3).copy()
    labels[1, 2] = 9
    with pytest.raises(ValueError, match=r"label 9 at position \[1, 2\]"):
        loss(labels, LOGITS.reshape(2, 3, 4))


def test_losses_broadcastable_shapes_raise():
    with pytest.raises(ValueError, match=r"\(6,\).*\(6, 4\)"):
        losses.MeanSquaredError()(np.zeros(6), LOGITS)
    with pytest.raises(ValueError, match=r"sample_weight of shape \(5,\).*\(6,\)"):
        losses.MeanSquaredError()(TARGETS, LOGITS, sample_weight=np.ones(5))
    # Models with one output have predictions with a last axis of length 1, and targets without it.
    value = losses.MeanSquaredError(reduction="sum")(TARGETS[:, 0], LOGITS[:, :1])
    np.testing.assert_allclose(float(value), ((TARGETS - LOGITS)[:, 0] ** 2).sum(), rtol=1e-12)


def test_losses_certain_wrong_probability_is_finite():
    for loss in (losses.SparseCategoricalCrossentropy(), losses.CategoricalCrossentropy()):
        true = [1] if isinstance(loss, losses.SparseCategoricalCrossentropy) else [[0.0, 1.0]]
        value = float(loss(np.asarray(true), np.array([[1.0, 0.0]])))
        assert 16 < value < 17
    assert 16 < float(losses.BinaryCrossentropy()([[1.0]], np.array([[0.0]]))) < 17


@pytest.mark.parametrize("reduction", ["auto", "sum_over_batch_size"])
def test_losses_averaging_under_a_strategy_raises(reduction):
    strategy = distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        loss = losses.MeanSquaredError(reduction=reduction)
        with pytest.raises(ValueError, match=r"Please use `tf.keras.losses.Reduction.SUM` or"):
            loss(TARGETS, LOGITS)
    with pytest.raises(ValueError, match="built-in training looop"):
        strategy.run(lambda: loss(TARGETS, LOGITS))
    assert loss(TARGETS, LOGITS).shape == ()
    allowed = losses.MeanSquaredError(reduction="none")
    assert strategy.run(lambda: allowed(TARGETS, LOGITS)).values[1].shape == (6,)


def test_losses_have_reductions_and_names_or_raise():
    assert losses.Reduction.NONE == "none" and losses.Reduction.of(None) is losses.Reduction.NONE
    with pytest.raises(ValueError, match="'average'"):
        losses.MeanSquaredError(reduction="average")
    assert losses.get("mse") is losses.mean_squared_error
    assert isinstance(losses.get("MeanSquaredError"), losses.MeanSquaredError)
    assert losses.MeanSquaredError().name == "mean_squared_error"
    with pytest.raises(ValueError, match="unknown loss 'hing'"):
        losses.get("hing")

    class Half(losses.Loss):
        def call(self, y_true, y_pred):
            return losses.mean_squared_error(y_true, y_pred) / 2.0

    expected = ((LOGITS - TARGETS) ** 2).mean() / 2
    np.testing.assert_allclose(float(Half()(TARGETS, LOGITS)), expected, rtol=1e-12)


# Metrics ------------------------------------------------------------------------------------------


def test_mean_and_sum_metrics_use_weights():
    mean, total = metrics.Mean(dtype="float64"), metrics.Sum(dtype="float64")
    assert float(mean.result()) == 0
    for values, weight in (([1.0, 2.0], None), (5.0, None), ([[1.0, 2.0], [3.0, 4.0]], [2, 0])):
        mean.update_state(values, sample_weight=weight)
        total.update_state(values, sample_weight=weight)
    assert float(total.result()) == 14
    # As in Keras 3, the two values of the example with weight 2 count as their mean.
    assert float(mean.result()) == (1 + 2 + 5 + 2 * 1.5) / (1 + 1 + 1 + 2)
    assert mean(6.0).numpy() == 17 / 6
    mean.reset_state()
    assert float(mean.result()) == 0
    mean.update_state(np.float64(0.1))
    assert float(mean.result()) == 0.1
    mean.reset_states()
    assert [float(v) for v in mean.variables] == [0, 0]
    assert [v.name for v in mean.weights] == ["mean/total", "mean/count"]


def test_metric_result_does_not_change_later():
    mean = metrics.Mean()
    total = metrics.Sum()
    for metric in (mean, total):
        metric.update_state([2.0])
        result = metric.result()
        metric.update_state([100.0])
        assert float(result) == 2


@pytest.mark.parametrize(
    ("metric", "true", "predicted", "right"),
    [
        (metrics.SparseCategoricalAccuracy, LABELS, LOGITS, LOGITS.argmax(1) == LABELS),
        (metrics.SparseCategoricalAccuracy, LABELS[:, None], LOGITS, LOGITS.argmax(1) == LABELS),
        (metrics.CategoricalAccuracy, ONE_HOT, LOGITS, LOGITS.argmax(1) == LABELS),
        (metrics.BinaryAccuracy, YES, sigmoid(LOGITS), ((LOGITS > 0) == YES).mean(axis=1)),
        (
            lambda: metrics.BinaryAccuracy(threshold=0.9),
            YES,
            sigmoid(LOGITS),
            ((sigmoid(LOGITS) > 0.9) == YES).mean(axis=1),
        ),
    ],
)
def test_accuracy_metrics_equal_the_share_of_right_predictions(metric, true, predicted, right):
    value = metric()
    value.update_state(true, predicted)
    np.testing.assert_allclose(float(value.result()), np.mean(right), rtol=1e-6)
    value.update_state(true[:0], predicted[:0])
    np.testing.assert_allclose(float(value.result()), np.mean(right), rtol=1e-6)
    value.reset_state()
    value.update_state(true, predicted, sample_weight=WEIGHTS)
    expected = np.sum(right * WEIGHTS) / WEIGHTS.sum()
    np.testing.assert_allclose(float(value.result()), expected, rtol=1e-6)
    empty = metric()
    empty.update_state(true[:0], predicted[:0])
    assert float(empty.result()) == 0


def test_accuracy_wrong_shapes_raise():
    with pytest.raises(ValueError, match=r"labels of shape \(5,\)"):
        metrics.SparseCategoricalAccuracy().update_state(LABELS[:5], LOGITS)


def test_mean_metric_wrapper_averages_the_function():
    metric = metrics.MeanMetricWrapper(losses.binary_crossentropy, from_logits=True)
    metric.update_state(YES, LOGITS)
    np.testing.assert_allclose(float(metric.result()), BINARY.mean(), rtol=1e-6)
    assert metric.name == "binary_crossentropy"
    assert metrics.get("Mean").__class__ is metrics.Mean


def test_metrics_sum_over_replicas():
    strategy = distribute.MirroredStrategy([f"cpu:{i}" for i in range(3)])
    with strategy.scope():
        mean = metrics.Mean(dtype="float64")

    def step():
        replica = int(distribute.get_replica_context().replica_id_in_sync_group)
        # The replicas have different numbers of values, and replica 0 has none.
        mean.update_state(np.arange(replica, dtype=float))
        return mean.result()

    inside = strategy.run(step)
    parts = inside.values if hasattr(inside, "values") else [inside]
    assert [float(part) for part in parts] == [1 / 3] * len(parts)
    assert float(mean.result()) == 1 / 3
    # A metric also accepts values outside of the replicas.
    mean.update_state([5.0])
    with strategy.scope():
        mean.update_state([6.0])
    assert float(mean.result()) == 12 / 5
    mean.reset_state()
    assert float(mean.result()) == 0
    assert all(float(c) == 0 for v in mean.variables for c in v.values)


def test_custom_metric_updates_and_resets():
    class Largest(metrics.Metric):
        def __init__(self):
            super().__init__()
            self.best = self.add_weight((2,), name="best", initializer=initializers.Constant(1.0))

        def update_state(self, values):
            self.best.assign(np.maximum(self.best.numpy(), values))

        def result(self):
            return as_tensor(self.best)

    metric = Largest()
    np.testing.assert_array_equal(metric([3.0, 0.0]).numpy(), [3, 1])
    assert metric.name.startswith("largest") and len(metric.variables) == 1
    metric.reset_state()
    assert float(metric.best[0]) == 0


# Initializers, regularizers, helpers --------------------------------------------------------------

SHAPE = (5, 5, 30, 40)
FAN_IN, FAN_OUT = 750, 1000


@pytest.mark.parametrize(
    ("name", "variance", "limit"),
    [
        ("glorot_uniform", 2 / (FAN_IN + FAN_OUT), math.sqrt(6 / (FAN_IN + FAN_OUT))),
        ("glorot_normal", 2 / (FAN_IN + FAN_OUT), None),
        ("he_uniform", 2 / FAN_IN, math.sqrt(6 / FAN_IN)),
        ("he_normal", 2 / FAN_IN, None),
        ("LecunNormal", 1 / FAN_IN, None),
        ("random_normal", 0.05**2, None),
        ("RandomUniform", 0.1**2 / 12, 0.05),
        ("zeros", 0.0, 0.0),
    ],
)
def test_initializers_have_the_variance_they_say(name, variance, limit):
    keras.utils.set_random_seed(11)
    values = initializers.get(name)(SHAPE, "float64").numpy()
    assert values.shape == SHAPE and values.dtype == np.float64
    np.testing.assert_allclose(values.var(), variance, rtol=0.02)
    assert abs(values.mean()) <= 0.01 * math.sqrt(variance)
    if limit is not None:
        assert np.abs(values).max() <= limit
    elif "random" not in name:
        assert np.abs(values).max() <= 2 * math.sqrt(variance) / 0.8796 + 1e-12


def test_initializer_seed_repeats_values():
    one = initializers.GlorotUniform(seed=4)
    np.testing.assert_array_equal(one((3, 2)).numpy(), one((3, 2)).numpy())
    single, double = one((3, 2), "float32").numpy(), one((3, 2), "float64").numpy()
    np.testing.assert_array_equal(single, double.astype(np.float32))
    draws = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        draws.append((initializers.HeNormal()((2, 3)).numpy().tolist(), np.random.rand()))  # noqa: NPY002
    assert draws[0] == draws[1] and draws[0] != draws[2]
    unseeded = initializers.HeNormal()
    np.testing.assert_array_equal(unseeded((3, 2)).numpy(), unseeded((3, 2)).numpy())
    assert (unseeded((3, 2)).numpy() != initializers.HeNormal()((3, 2)).numpy()).all()
    with pytest.raises(ValueError, match="seed must be an int"):
        keras.utils.set_random_seed(-1)


def test_constant_initializers_give_their_values():
    assert initializers.Ones()((2,)).numpy().tolist() == [1, 1]
    assert initializers.Constant([1, 2])((3, 2)).numpy().tolist() == [[1, 2]] * 3
    own = initializers.get(lambda shape, dtype: np.zeros(shape, dtype))
    assert own((1,), "float32").shape == (1,)
    assert initializers.fans((7,)) == (7, 7) and initializers.fans(()) == (1, 1)
    with pytest.raises(ValueError, match="5 is no initializer"):
        initializers.get(5)
    with pytest.raises(ValueError, match="scale must be positive"):
        initializers.VarianceScaling(0)


def test_regularizers_equal_the_formulas():
    weight = Variable(np.array([[1.0, -2.0], [3.0, 0.0]]))
    for regularizer, value in (
        (regularizers.L2(0.5), 7.0),
        (regularizers.l2(0.5), 7.0),
        (regularizers.L1(0.5), 3.0),
        (regularizers.L1L2(0.5, 0.25), 6.5),
        (regularizers.get("l1_l2"), 0.2),
        (regularizers.L1L2(), 0.0),
    ):
        result = regularizer(weight)
        assert result.dtype == np.float64 and result.shape == ()
        np.testing.assert_allclose(float(result), value, rtol=1e-14)
    with pytest.raises(ValueError, match=r"l2 must be at least 0 and finite, got -1"):
        regularizers.L2(-1)


def test_to_categorical_returns_one_hot_rows():
    np.testing.assert_array_equal(
        keras.utils.to_categorical([0, 2, 1]), np.eye(3, dtype=np.float32)[[0, 2, 1]]
    )
    assert keras.utils.to_categorical([[1], [0]], 5).shape == (2, 5)
    assert keras.utils.to_categorical([], 3).shape == (0, 3)
    with pytest.raises(ValueError, match=r"3 at position \(1,\) is not an integer from 0 to 2"):
        keras.utils.to_categorical([0, 3], 3)


def test_activations_are_found_by_name():
    get = keras.activations.get
    x = np.array([-1.0, 2.0])
    np.testing.assert_array_equal(get(None)(x).numpy(), x)
    np.testing.assert_array_equal(get("relu")(x).numpy(), [0, 2])
    np.testing.assert_allclose(get("softmax")(x).numpy(), softmax(x), rtol=1e-14)
    with pytest.raises(ValueError, match="3 is no activation"):
        get(3)


def test_keras_namespace_has_all_modules():
    import pycollective.keras as module

    for name in module.__all__:
        if name != "datasets":
            assert getattr(module, name) is not None
    assert "losses" in dir(module)
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018
