"""Losses and metrics compared with real Keras: values, gradients and descriptions."""

import json
import os

import numpy as np
import pytest

from pycollective.keras import losses, metrics
from pycollective.tensor import GradientTape, Tensor

os.environ.setdefault("KERAS_BACKEND", "jax")
theirs = pytest.importorskip("keras")
jax = pytest.importorskip("jax")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

RANDOM = np.random.default_rng(6)
TRUE = RANDOM.standard_normal((6, 4)).astype(np.float32)
PREDICTED = RANDOM.standard_normal((6, 4)).astype(np.float32)
SHARES = RANDOM.dirichlet(np.ones(4), 6).astype(np.float32)
CHANCES = RANDOM.dirichlet(np.ones(4), 6).astype(np.float32)
YES = RANDOM.integers(0, 2, (6, 4)).astype(np.float32)
LABELS = RANDOM.integers(0, 4, 6)
MAPS = RANDOM.dirichlet(np.ones(4), (6, 5)).astype(np.float32)
MAP_LABELS = RANDOM.integers(0, 4, (6, 5))
WEIGHTS = RANDOM.random(6).astype(np.float32)

LOSSES = [
    ("MeanSquaredError", {}, TRUE, PREDICTED),
    ("MeanSquaredError", {}, TRUE[:, 0], PREDICTED[:, :1]),
    ("MeanAbsoluteError", {}, TRUE, PREDICTED),
    ("MeanAbsolutePercentageError", {}, TRUE, PREDICTED),
    ("MeanSquaredLogarithmicError", {}, TRUE, PREDICTED),
    ("Huber", {}, TRUE, PREDICTED),
    ("Huber", {"delta": 0.3}, TRUE, PREDICTED),
    ("LogCosh", {}, TRUE, PREDICTED),
    ("KLDivergence", {}, SHARES, CHANCES),
    ("Poisson", {}, SHARES, CHANCES),
    ("Hinge", {}, YES, PREDICTED),
    ("Hinge", {}, 2 * YES - 1, PREDICTED),
    ("SquaredHinge", {}, YES, PREDICTED),
    ("CategoricalHinge", {}, YES, PREDICTED),
    ("CosineSimilarity", {}, TRUE, PREDICTED),
    ("BinaryCrossentropy", {}, YES, CHANCES),
    ("BinaryCrossentropy", {"from_logits": True, "label_smoothing": 0.2}, YES, PREDICTED),
    ("CategoricalCrossentropy", {}, SHARES, CHANCES),
    ("CategoricalCrossentropy", {"label_smoothing": 0.1}, SHARES, 3 * CHANCES),
    ("CategoricalCrossentropy", {"from_logits": True}, SHARES, PREDICTED),
    ("CategoricalCrossentropy", {}, MAPS[::-1], MAPS),
    ("SparseCategoricalCrossentropy", {}, LABELS, CHANCES),
    ("SparseCategoricalCrossentropy", {}, LABELS[:, None], CHANCES),
    ("SparseCategoricalCrossentropy", {"from_logits": True}, LABELS, PREDICTED),
    ("SparseCategoricalCrossentropy", {}, MAP_LABELS, MAPS),
]


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", None])
@pytest.mark.parametrize(("name", "settings", "true", "predicted"), LOSSES)
def test_loss_equals_that_of_keras(name, settings, true, predicted, reduction):
    ours = getattr(losses, name)(reduction=reduction, **settings)
    other = getattr(theirs.losses, name)(reduction=reduction, **settings)
    for weights in (None, WEIGHTS):
        own = Tensor(predicted)
        with GradientTape() as tape:
            tape.watch(own)
            found = ours(true, own, sample_weight=weights)
        if weights is not None and predicted.ndim == 3:
            weights = weights[:, None]

        def reference(values, weights=weights):
            return other(true, values, sample_weight=weights)

        expected, back = jax.vjp(reference, predicted)
        np.testing.assert_allclose(found.numpy(), np.asarray(expected), rtol=1e-5, atol=1e-6)
        upstream = np.cos(np.arange(expected.size, dtype=np.float32)).reshape(expected.shape)
        gradient = tape.gradient(found, own, Tensor(upstream)).numpy()
        (right,) = back(upstream)
        assert np.abs(right).max() > 0
        np.testing.assert_allclose(gradient, np.asarray(right), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "settings"), {str(c[:2]): c[:2] for c in LOSSES}.values())
def test_descriptions_of_losses_go_both_ways(name, settings):
    ours, other = getattr(losses, name)(**settings), getattr(theirs.losses, name)(**settings)
    mine, reference = losses.serialize(ours), theirs.losses.serialize(other)
    for key, value in reference["config"].items():
        assert mine["config"][key] == value, key
    assert (mine["module"], mine["class_name"]) == (reference["module"], reference["class_name"])
    there = theirs.losses.deserialize(json.loads(json.dumps(mine)))
    here = losses.deserialize(json.loads(json.dumps(theirs.losses.serialize(there))))
    # Keras does not store the delta of a Huber loss.
    for key in reference["config"]:
        assert here.get_config()[key] == ours.get_config()[key]


BATCHES = [slice(0, 3), slice(3, 6)]
SCORES = RANDOM.random((60, 3)).astype(np.float32)
ANSWERS = (RANDOM.random((60, 3)) < SCORES).astype(np.float32)
ROW_WEIGHTS = RANDOM.random(60).astype(np.float32)
HALVES = [slice(0, 30), slice(30, 60)]

METRICS = [
    ("Accuracy", {}, LABELS[:, None], (LABELS * (WEIGHTS > 0.4))[:, None]),
    ("BinaryAccuracy", {}, YES, CHANCES),
    ("BinaryAccuracy", {"threshold": 0.2}, YES, CHANCES),
    ("CategoricalAccuracy", {}, SHARES, CHANCES),
    ("CategoricalAccuracy", {}, MAPS[::-1], MAPS),
    ("SparseCategoricalAccuracy", {}, LABELS, CHANCES),
    ("SparseCategoricalAccuracy", {}, LABELS[:, None], CHANCES),
    ("TopKCategoricalAccuracy", {"k": 2}, SHARES, CHANCES),
    ("SparseTopKCategoricalAccuracy", {"k": 2}, LABELS, CHANCES),
    ("MeanSquaredError", {}, TRUE, PREDICTED),
    ("RootMeanSquaredError", {}, TRUE, PREDICTED),
    ("MeanAbsoluteError", {}, TRUE, PREDICTED),
    ("MeanAbsolutePercentageError", {}, TRUE, PREDICTED),
    ("MeanSquaredLogarithmicError", {}, TRUE, PREDICTED),
    ("LogCoshError", {}, TRUE, PREDICTED),
    ("CosineSimilarity", {}, TRUE, PREDICTED),
    ("KLDivergence", {}, SHARES, CHANCES),
    ("Poisson", {}, SHARES, CHANCES),
    ("Hinge", {}, YES, PREDICTED),
    ("SquaredHinge", {}, YES, PREDICTED),
    ("CategoricalHinge", {}, YES, PREDICTED),
    ("BinaryCrossentropy", {"from_logits": True}, YES, PREDICTED),
    ("CategoricalCrossentropy", {"label_smoothing": 0.1}, SHARES, CHANCES),
    ("SparseCategoricalCrossentropy", {}, LABELS, CHANCES),
    ("Precision", {}, ANSWERS, SCORES),
    ("Precision", {"thresholds": [0.8, 0.3, 0.55]}, ANSWERS, SCORES),
    ("Precision", {"thresholds": [0.0, 0.5, 1.0]}, ANSWERS, SCORES),
    ("Precision", {"top_k": 2}, ANSWERS, SCORES),
    ("Recall", {"top_k": 1, "class_id": 2}, ANSWERS, SCORES),
    ("Recall", {"class_id": 0, "thresholds": 0.6}, ANSWERS, SCORES),
    ("Recall", {}, ANSWERS[:, 0], SCORES[:, :1]),
    ("TruePositives", {"thresholds": [0.2, 0.7]}, ANSWERS, SCORES),
    ("FalsePositives", {}, ANSWERS, SCORES),
    ("TrueNegatives", {}, ANSWERS, SCORES),
    ("FalseNegatives", {}, ANSWERS, SCORES),
    *[
        ("AUC", {"curve": curve, "summation_method": method}, ANSWERS, SCORES)
        for curve in ("ROC", "PR")
        for method in ("interpolation", "majoring", "minoring")
    ],
    ("AUC", {"num_thresholds": 7}, ANSWERS[:, 0], SCORES[:, 0]),
    ("AUC", {"thresholds": [0.1, 0.7, 0.75]}, ANSWERS, SCORES),
    ("AUC", {"multi_label": True, "num_labels": 3, "curve": "PR"}, ANSWERS, SCORES),
    ("AUC", {"multi_label": True, "label_weights": [1.0, 2.0, 0.5]}, ANSWERS, SCORES),
    ("AUC", {"label_weights": [1.0, 2.0, 0.5]}, ANSWERS, SCORES),
    ("AUC", {"from_logits": True}, ANSWERS, 4 * SCORES - 2),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("name", "settings", "true", "predicted"), METRICS)
def test_metric_equals_that_of_keras(name, settings, true, predicted, weighted):
    ours, other = getattr(metrics, name)(**settings), getattr(theirs.metrics, name)(**settings)
    many = len(true) == 60
    for part in HALVES if many else BATCHES:
        weights = ((ROW_WEIGHTS if many else WEIGHTS)[part],) if weighted else ()
        ours.update_state(true[part], predicted[part], *weights)
        other.update_state(true[part], predicted[part], *weights)
        np.testing.assert_allclose(
            ours.result().numpy(), np.asarray(other.result()), rtol=2e-5, atol=1e-6
        )
    ours.reset_state()
    other.reset_state()
    np.testing.assert_allclose(ours.result().numpy(), np.asarray(other.result()))


@pytest.mark.parametrize(("name", "settings"), {str(c[:2]): c[:2] for c in METRICS}.values())
def test_descriptions_of_metrics_go_both_ways(name, settings):
    ours, other = getattr(metrics, name)(**settings), getattr(theirs.metrics, name)(**settings)
    mine, reference = metrics.serialize(ours), theirs.metrics.serialize(other)
    for description in (mine, reference):
        if "name" not in settings and name not in ("BinaryAccuracy",):
            description["config"].pop("name")
    for key, value in reference["config"].items():
        if key != "label_weights" or value is None:
            assert mine["config"][key] == value, key
    assert (mine["module"], mine["class_name"]) == (reference["module"], reference["class_name"])
    there = theirs.metrics.deserialize(json.loads(json.dumps(mine)))
    assert type(there).__name__ == name


def test_sum_of_updates_equals_that_of_keras():
    ours, other = metrics.Sum(), theirs.metrics.Sum()
    for values, weights in (
        (TRUE, None),
        (TRUE, WEIGHTS),
        (3.0, None),
        (TRUE, YES),
        (MAPS, WEIGHTS),
    ):
        ours.update_state(values, weights)
        other.update_state(values, weights)
        np.testing.assert_allclose(float(ours.result()), float(other.result()), rtol=1e-5)


def test_mean_of_one_update_equals_that_of_keras():
    ours, other = metrics.Mean(), theirs.metrics.Mean()
    for values, weights in ((TRUE, None), (TRUE, WEIGHTS), (TRUE, YES), (MAPS, WEIGHTS)):
        ours.reset_state()
        other.reset_state()
        ours.update_state(values, weights)
        other.update_state(values, weights)
        np.testing.assert_allclose(float(ours.result()), float(other.result()), rtol=1e-5)
