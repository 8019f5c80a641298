"""Further losses and metrics against formulas in plain NumPy, and their configs."""

import json

import numpy as np
import pytest

from pycollective import distribute, keras
from pycollective.keras import losses, metrics
from pycollective.tensor import GradientTape, Variable, as_tensor

RNG = np.random.default_rng(12)
TRUE = RNG.standard_normal((6, 4))
PREDICTED = RNG.standard_normal((6, 4))
SHARES = RNG.dirichlet(np.ones(4), 6)
CHANCES = RNG.dirichlet(np.ones(4), 6)
YES = RNG.integers(0, 2, (6, 4))
LABELS = RNG.integers(0, 4, 6)
WEIGHTS = RNG.random(6)
D = PREDICTED - TRUE


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


FORMULAS = {
    "huber": (TRUE, PREDICTED, np.where(abs(D) <= 1, D**2 / 2, abs(D) - 0.5).mean(-1)),
    "mean_absolute_percentage_error": (TRUE, PREDICTED, 100 * abs(D / TRUE).mean(-1)),
    "mean_squared_logarithmic_error": (
        abs(TRUE),
        abs(PREDICTED),
        ((np.log(abs(PREDICTED) + 1) - np.log(abs(TRUE) + 1)) ** 2).mean(-1),
    ),
    "log_cosh": (TRUE, PREDICTED, np.log(np.cosh(D)).mean(-1)),
    "kl_divergence": (SHARES, CHANCES, (SHARES * np.log(SHARES / CHANCES)).sum(-1)),
    "poisson": (SHARES, CHANCES, (CHANCES - SHARES * np.log(CHANCES)).mean(-1)),
    "hinge": (YES, PREDICTED, np.maximum(0, 1 - (2 * YES - 1) * PREDICTED).mean(-1)),
    "squared_hinge": (
        2 * YES - 1,
        PREDICTED,
        (np.maximum(0, 1 - (2 * YES - 1) * PREDICTED) ** 2).mean(-1),
    ),
    "categorical_hinge": (
        np.eye(4)[LABELS],
        PREDICTED,
        np.maximum(
            0,
            1
            + np.where(np.eye(4)[LABELS] == 1, 0, PREDICTED).max(-1)
            - PREDICTED[np.arange(6), LABELS],
        ),
    ),
    "cosine_similarity": (TRUE, PREDICTED, -(unit(TRUE) * unit(PREDICTED)).sum(-1)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_more_losses_equal_the_formulas(name):
    true, predicted, expected = FORMULAS[name]
    function = losses.get(name)
    np.testing.assert_allclose(function(true, predicted).numpy(), expected, rtol=1e-5)
    (cls,) = {
        cls
        for cls in vars(losses).values()
        if isinstance(cls, type) and getattr(cls, "_of", None) is function
    }
    assert isinstance(losses.get(cls.__name__), cls)
    np.testing.assert_allclose(float(cls()(true, predicted)), expected.mean(), rtol=1e-6)
    weighted = cls(reduction="sum")(true, predicted, sample_weight=WEIGHTS)
    np.testing.assert_allclose(float(weighted), (expected * WEIGHTS).sum(), rtol=1e-6)
    weight = Variable(predicted)
    with GradientTape() as tape:
        total = cls(reduction="sum")(true, weight)
    gradient = tape.gradient(total, weight).numpy()
    direction = RNG.standard_normal(predicted.shape) * 1e-6
    change = float(cls(reduction="sum")(true, predicted + direction)) - float(
        cls(reduction="sum")(true, predicted - direction)
    )
    np.testing.assert_allclose((gradient * direction).sum(), change / 2, rtol=1e-4)


#: The losses that have a kernel, and the arguments of their tests.
KERNEL_LOSSES = {
    **{name: {} for name in FORMULAS},
    "categorical_crossentropy": {"from_logits": True},
    "mean_squared_error": {},
    "mean_absolute_error": {},
    "binary_crossentropy": {"from_logits": True},
}


def loss_and_gradient(function, true, predicted, options, watched):
    given = as_tensor(true), as_tensor(predicted)
    with GradientTape() as tape:
        tape.watch(given if watched else given[1])
        loss = function(*given, **options)
    return loss.numpy(), tape.gradient(loss, given[1], output_gradients=1 + loss).numpy()


# If a tape watches the targets too, the loss is composed: kernels have no gradient by the targets.
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(3, 4100), (40, 1000), (2, 3, 5), (7,), (3, 0), (0, 4)])
@pytest.mark.parametrize("name", KERNEL_LOSSES)
def test_loss_by_kernel_equals_the_composed_loss_and_its_gradient(name, shape, dtype):
    rng = np.random.default_rng(5)
    true, predicted = rng.uniform(0.05, 0.95, (2, *shape)).astype(dtype)
    if "hinge" in name:
        true, predicted = np.rint(true), 3 * predicted
    if name in ("huber", "log_cosh", "binary_crossentropy"):
        predicted = 9 * predicted - 4
    function, options = losses.get(name), KERNEL_LOSSES[name]
    if name in ("categorical_crossentropy", "categorical_hinge"):
        true /= np.maximum(true.sum(-1, keepdims=True), 1)
        if shape[-1] == 0 and name == "categorical_crossentropy":
            with pytest.raises(ValueError, match="has no classes"):
                function(true, predicted, **options)
            return
    for values in (predicted, np.where(rng.random(shape) < 0.3, true, predicted)):
        found = loss_and_gradient(function, true, values, options, False)
        expected = loss_and_gradient(function, true, values, options, True)
        accuracy = 30 * float(np.finfo(dtype).eps)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=accuracy, atol=accuracy)


@pytest.mark.parametrize("name", KERNEL_LOSSES)
def test_loss_by_kernel_of_special_numbers_equals_the_composed_loss(name):
    limits = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 1.0, -1.0], np.float32)
    predicted = np.repeat(limits[:, None], 3, axis=1)
    true = np.broadcast_to(np.array([0.25, 0.5, 1.0], np.float32), predicted.shape)
    function, options = losses.get(name), KERNEL_LOSSES[name]
    with np.errstate(all="ignore"):
        found = loss_and_gradient(function, true, predicted, options, False)[0]
        expected = loss_and_gradient(function, true, predicted, options, True)[0]
    if name == "log_cosh":
        expected = np.where(
            limits == -np.inf, np.inf, expected
        )  # the composed loss computes -inf + inf
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_crossentropy_of_classes_along_another_axis_is_the_same():
    for loss, true in (
        (losses.categorical_crossentropy, SHARES),
        (losses.binary_crossentropy, YES),
    ):
        expected = loss(true, CHANCES).numpy()
        if loss is losses.binary_crossentropy:
            expected = loss(true.T, CHANCES.T).numpy()
            found = loss(true, CHANCES, axis=0)
        else:
            found = loss(true.T, CHANCES.T, axis=0)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    sparse = losses.sparse_categorical_crossentropy
    np.testing.assert_allclose(
        sparse(LABELS, CHANCES.T, axis=0).numpy(), sparse(LABELS, CHANCES).numpy(), rtol=1e-12
    )
    with pytest.raises(ValueError, match="ignore_class=3 is not supported"):
        sparse(LABELS, CHANCES, ignore_class=3)


def test_losses_of_one_prediction_per_example_ignore_the_last_axis():
    one, column = TRUE[:, 0], PREDICTED[:, :1]
    expected = (TRUE[:, 0] - PREDICTED[:, 0]) ** 2
    for true, predicted in ((one, column), (one[:, None], column[:, 0])):
        np.testing.assert_allclose(losses.mean_squared_error(true, predicted), expected)


def test_losses_half_precision_computes_in_float32():
    predicted = np.array([[60000.0, 1.0]], np.float16)
    loss = losses.MeanSquaredError()(np.zeros((1, 2)), predicted)
    assert loss.dtype == np.float32 and np.isfinite(float(loss))
    assert (
        losses.MeanSquaredError(dtype="float64")(TRUE, predicted[:, :1] + TRUE).dtype == "float64"
    )


# Counts and curves --------------------------------------------------------------------------------

SCORES = np.round(RNG.random((40, 3)), 2)
ANSWERS = RNG.random((40, 3)) < SCORES
ROW_WEIGHTS = RNG.random(40)


def counted(thresholds, answers=ANSWERS, scores=SCORES, weights=None):
    """Count the four cases in a loop over single predictions."""
    weights = np.ones_like(scores) if weights is None else np.broadcast_to(weights, scores.shape)
    cases = np.zeros((4, len(thresholds)))
    for j, t in enumerate(thresholds):
        for answer, score, weight in zip(
            answers.ravel(), scores.ravel(), weights.ravel(), strict=True
        ):
            yes = np.float32(score) > np.float32(t)
            cases[(0 if answer else 1) if yes else (3 if answer else 2), j] += weight
    return cases


@pytest.mark.parametrize("thresholds", [None, 0.25, [0.9, 0.1, 0.5], [0.0, 0.5, 1.0]])
@pytest.mark.parametrize("weights", [None, ROW_WEIGHTS])
def test_confusion_counts_equal_the_definition(thresholds, weights):
    at = np.atleast_1d(0.5 if thresholds is None else thresholds)
    column = None if weights is None else weights[:, None]
    tp, fp, tn, fn = counted(at, weights=column)
    for cls, expected in (
        (metrics.TruePositives, tp),
        (metrics.FalsePositives, fp),
        (metrics.TrueNegatives, tn),
        (metrics.FalseNegatives, fn),
        (metrics.Precision, tp / np.maximum(tp + fp, 1e-30)),
        (metrics.Recall, tp / (tp + fn)),
    ):
        metric = cls(thresholds)
        for part in (slice(0, 15), slice(15, 15), slice(15, 40)):
            metric.update_state(
                ANSWERS[part], SCORES[part], None if weights is None else weights[part]
            )
        found = metric.result().numpy()
        assert np.shape(found) == (() if np.ndim(thresholds or 0) == 0 else (3,))
        np.testing.assert_allclose(found, expected if np.ndim(found) else expected[0], rtol=1e-5)
        metric.reset_state()
        assert not metric.result().numpy().any()


def test_precision_and_recall_select_top_k_and_class_id():
    top = np.argsort(-SCORES, axis=1, kind="stable")[:, :2]
    chosen = np.zeros_like(ANSWERS)
    np.put_along_axis(chosen, top, True, axis=1)
    precision, recall = metrics.Precision(top_k=2), metrics.Recall(top_k=2, class_id=1)
    precision.update_state(ANSWERS, SCORES)
    recall.update_state(ANSWERS, SCORES)
    np.testing.assert_allclose(float(precision.result()), ANSWERS[chosen].mean(), rtol=1e-6)
    np.testing.assert_allclose(
        float(recall.result()), chosen[:, 1][ANSWERS[:, 1]].mean(), rtol=1e-6
    )
    with pytest.raises(ValueError, match="class_id=3 is not a class"):
        metrics.Precision(class_id=3).update_state(ANSWERS, SCORES)


def area(cases, curve, method):
    tp, fp, tn, fn = cases
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = np.nan_to_num(tp / (tp + fn))
        x = np.nan_to_num(fp / (fp + tn)) if curve == "ROC" else recall
        y = recall if curve == "ROC" else np.nan_to_num(tp / (tp + fp))
    pick = {
        "interpolation": lambda a, b: (a + b) / 2,
        "majoring": np.maximum,
        "minoring": np.minimum,
    }
    return ((x[:-1] - x[1:]) * pick[method](y[:-1], y[1:])).sum()


@pytest.mark.parametrize(
    ("curve", "method"),
    [
        ("ROC", "interpolation"),
        ("ROC", "majoring"),
        ("PR", "minoring"),
        ("PR", "majoring"),
    ],
)
def test_auc_equals_the_definition(curve, method):
    for settings, at in (
        ({"num_thresholds": 11}, np.linspace(0, 1, 11)[1:-1]),
        ({"thresholds": [0.7, 0.2, 0.25]}, [0.2, 0.25, 0.7]),
    ):
        metric = metrics.AUC(curve=curve, summation_method=method, **settings)
        metric.update_state(ANSWERS, SCORES, ROW_WEIGHTS)
        cases = counted([-1, *at, 2], weights=ROW_WEIGHTS[:, None])
        np.testing.assert_allclose(float(metric.result()), area(cases, curve, method), rtol=1e-5)


def test_auc_pr_interpolation_equals_the_integral():
    metric = metrics.AUC(curve="PR", num_thresholds=6)
    metric.update_state(ANSWERS, SCORES)
    tp, fp, _, fn = counted([-1, 0.2, 0.4, 0.6, 0.8, 2])
    expected = 0.0
    for i in range(5):
        # True positives and positives are linear between two thresholds.
        way = (np.arange(100_000) + 0.5) / 100_000
        right, yes = (a[i + 1] + way * (a[i] - a[i + 1]) for a in (tp, tp + fp))
        expected += (right / yes).mean() * (tp[i] - tp[i + 1]) / (tp[i + 1] + fn[i + 1])
    np.testing.assert_allclose(float(metric.result()), expected, rtol=1e-4)


def test_auc_multi_label_averages_the_labels():
    metric = metrics.AUC(num_thresholds=11, multi_label=True, label_weights=[1, 2, 0])
    known = metrics.AUC(num_thresholds=11, multi_label=True, num_labels=3)
    assert float(metric.result()) == 0
    for each in (metric, known):
        each.update_state(ANSWERS[:20], SCORES[:20])
        each.update_state(ANSWERS[20:], SCORES[20:])
    at = np.linspace(0, 1, 11)
    at[[0, -1]] = -1, 2
    areas = [
        area(counted(at, ANSWERS[:, k], SCORES[:, k]), "ROC", "interpolation") for k in range(3)
    ]
    expected = (areas[0] + 2 * areas[1]) / 3
    np.testing.assert_allclose(float(metric.result()), expected, rtol=1e-5)
    np.testing.assert_allclose(float(known.result()), np.mean(areas), rtol=1e-5)


def test_auc_of_perfect_predictions_is_1_and_of_inverted_ones_0():
    answers, scores = np.array([0, 0, 1, 1]), np.array([0.1, 0.2, 0.8, 0.9])
    for curve in ("ROC", "PR"):
        metric = metrics.AUC(curve=curve)
        metric.update_state(answers, scores)
        np.testing.assert_allclose(float(metric.result()), 1, atol=1e-6)
    logits = metrics.AUC(from_logits=True)
    logits.update_state(answers, -np.log(scores / (1 - scores)))
    np.testing.assert_allclose(float(logits.result()), 0, atol=1e-6)


def test_top_k_accuracy_rmse_and_cosine_metrics_equal_the_definition():
    scores = RNG.random((8, 4))
    labels = RNG.integers(0, 4, 8)
    rank = (scores > scores[np.arange(8), labels][:, None]).sum(1)
    for cls, true in (
        (metrics.SparseTopKCategoricalAccuracy, labels),
        (metrics.TopKCategoricalAccuracy, np.eye(4)[labels]),
    ):
        for k in (1, 2, 4):
            metric = cls(k=k)
            metric.update_state(true, scores)
            np.testing.assert_allclose(float(metric.result()), (rank < k).mean(), rtol=1e-6)
    ids = np.argsort(-scores, axis=1)
    for other in (np.nan, np.inf, -np.inf):  # as in Keras, the whole row is wrong
        metric = metrics.SparseTopKCategoricalAccuracy(2)
        metric.update_state([0, 0], [[0.9, other, 0.1], [0.9, 0.0, 0.1]])
        assert float(metric.result()) == 0.5
    metric = metrics.SparseTopKCategoricalAccuracy(2, from_sorted_ids=True)
    metric.update_state(labels, ids)
    np.testing.assert_allclose(float(metric.result()), (rank < 2).mean(), rtol=1e-6)
    equal = metrics.Accuracy()
    equal.update_state([[1], [2], [3], [4]], [[0], [2], [3], [4]])
    assert float(equal.result()) == 0.75
    root = metrics.RootMeanSquaredError()
    root.update_state([[0, 1], [0, 0]], [[1, 1], [0, 0]], [1, 0])
    np.testing.assert_allclose(float(root.result()), np.sqrt(0.5), rtol=1e-6)
    cosine = metrics.CosineSimilarity()
    cosine.update_state(TRUE, PREDICTED)
    expected = (unit(TRUE) * unit(PREDICTED)).sum(-1).mean()
    np.testing.assert_allclose(float(cosine.result()), expected, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: metrics.AUC(num_thresholds=20, curve="PR"),
        lambda: metrics.AUC(num_thresholds=20, multi_label=True),
        lambda: metrics.Precision([0.2, 0.6]),
        lambda: metrics.RootMeanSquaredError(),
        lambda: metrics.TopKCategoricalAccuracy(2),
    ],
    ids=["auc", "auc by label", "precision", "root", "top k"],
)
def test_metrics_of_replicas_equal_one_device(count, make):
    alone = make()
    strategy = distribute.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    with strategy.scope():
        metric = make()

    def step():
        replica = int(distribute.get_replica_context().replica_id_in_sync_group)
        # The first replica has most of the examples.
        part = slice(0, 30) if replica == 0 else slice(30 + 3 * replica, 33 + 3 * replica)
        metric.update_state(ANSWERS[part], SCORES[part], ROW_WEIGHTS[part])
        return metric.result()

    inside = strategy.run(step)
    for replica in range(count):
        part = slice(0, 30) if replica == 0 else slice(30 + 3 * replica, 33 + 3 * replica)
        alone.update_state(ANSWERS[part], SCORES[part], ROW_WEIGHTS[part])
    expected = alone.result().numpy()
    for found in (metric.result(), *getattr(inside, "values", [inside])):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)


# Configs ------------------------------------------------------------------------------------------

LOSSES = [
    losses.SparseCategoricalCrossentropy(True),
    losses.CategoricalCrossentropy(label_smoothing=0.1, reduction="sum"),
    losses.BinaryCrossentropy(True, 0.2, name="mine"),
    losses.Huber(2.0),
    losses.MeanSquaredError(),
    losses.LossFunctionWrapper(losses.huber, delta=0.5),
]
METRICS = [
    metrics.Mean(),
    metrics.BinaryAccuracy(threshold=0.25),
    metrics.TopKCategoricalAccuracy(2),
    metrics.Precision([0.1, 0.5], class_id=1),
    metrics.Recall(top_k=2, dtype="float64"),
    metrics.AUC(thresholds=[0.5, 0.2], curve="PR", label_weights=[1, 2, 3]),
    metrics.CategoricalCrossentropy(label_smoothing=0.1),
    metrics.MeanMetricWrapper(losses.huber, "mine", delta=0.5),
    metrics.FalseNegatives(0.75),
]


@pytest.mark.parametrize("each", [*LOSSES, *METRICS], ids=lambda each: type(each).__name__)
def test_loss_and_metric_configs_survive_json(each):
    module = metrics if isinstance(each, metrics.Metric) else losses
    description = json.loads(json.dumps(module.serialize(each)))
    assert description["module"] == module.__name__.removeprefix("pycollective.")
    for same in (module.deserialize(description), module.get(description)):
        assert type(same) is type(each) and same.get_config() == each.get_config()
    if isinstance(each, losses.LossFunctionWrapper) and not isinstance(
        each, losses.SparseCategoricalCrossentropy
    ):
        np.testing.assert_array_equal(
            same.call(as_tensor(SHARES), as_tensor(CHANCES)).numpy(),
            each.call(as_tensor(SHARES), as_tensor(CHANCES)).numpy(),
        )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: metrics.Precision(1.5), r"must be in \[0, 1\]. Received: \[1.5\]"),
        (lambda: metrics.Recall(top_k=0), "top_k must be at least 1"),
        (lambda: metrics.AUC(num_thresholds=1), "must be an integer > 1"),
        (lambda: metrics.AUC(curve="ROCK"), "Invalid AUC curve value: 'ROCK'"),
        (lambda: metrics.AUC(num_labels=3), "only when `multi_label` is True"),
        (lambda: metrics.AUC().update_state([1, 0], [0.5, 0.5, 0.5]), "must have the same shape"),
        (lambda: metrics.get("AUD"), "unknown metric 'AUD'"),
        (lambda: losses.deserialize({"class_name": "Nothing"}), "unknown loss 'Nothing'"),
        (lambda: losses.get(3), "3 is no loss"),
    ],
)
def test_metrics_wrong_arguments_raise_with_reason(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_loss_and_metric_names_equal_those_of_keras():
    assert keras.losses.Huber().name == "huber_loss"
    assert keras.metrics.get("mse").name == "mean_squared_error"


@pytest.mark.parametrize("weight", [None, [1.0, 1.0, 1.0]])
def test_predictions_that_are_nan_are_negative(weight):
    labels, scores = [0.0, 1.0, 1.0], np.array([0.3, np.nan, 0.2], np.float32)
    for kind, expected in [
        (metrics.TruePositives, 0.0),
        (metrics.FalseNegatives, 2.0),
        (metrics.Precision, 0.0),
        (metrics.Recall, 0.0),
        (metrics.AUC, 0.0),
    ]:
        metric = kind()
        metric.update_state(labels, scores, sample_weight=weight)
        assert float(metric.result()) == expected
