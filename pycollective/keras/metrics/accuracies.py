"""How often predictions are right."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycollective.array_backend import Array, asarray
from pycollective.dtypes import as_dtype
from pycollective.keras.backend import floatx
from pycollective.keras.losses.loss import matched
from pycollective.keras.metrics.metric import MeanMetricWrapper, MeanOf
from pycollective.tensor import Tensor, as_tensor

__all__ = [
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "TopKCategoricalAccuracy",
    "binary_accuracy",
    "categorical_accuracy",
    "sparse_categorical_accuracy",
    "sparse_top_k_categorical_accuracy",
    "top_k_categorical_accuracy",
]


# Functions: one value for each prediction ----------------------------------------------------------


def accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return for each number whether prediction and answer are equal."""
    true, predicted = matched(y_true, y_pred)
    return _as_floats(true.array == predicted.array)


def binary_accuracy(y_true: Any, y_pred: Any, threshold: float = 0.5) -> Tensor:
    """Return for each number whether the prediction is on the side of ``threshold`` that it should be.

    Parameters
    ----------
    y_true
        0 or 1.
    y_pred
        Predictions, of the same shape.
    threshold
        What lies above it is taken for 1.
    """
    true, predicted = matched(y_true, y_pred)
    return _as_floats((predicted.array > threshold) == true.array)


def categorical_accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return for each example whether the largest prediction stands in the right place."""
    true, predicted = matched(y_true, y_pred)
    return _as_floats(predicted.array.argmax(axis=-1) == true.array.argmax(axis=-1))


def sparse_categorical_accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return for each example whether its label has the largest prediction.

    Parameters
    ----------
    y_true
        Class numbers, of the shape of ``y_pred`` without its last axis (or with 1 there).
    y_pred
        ``[..., classes]``.
    """
    labels, predicted = _labelled(y_true, y_pred)
    return _as_floats(predicted.argmax(axis=-1) == labels)


def top_k_categorical_accuracy(y_true: Any, y_pred: Any, k: int = 5) -> Tensor:
    """Return for each example whether the right class is among the ``k`` largest predictions."""
    true, predicted = matched(y_true, y_pred)
    return _as_floats(_in_top(true.array.argmax(axis=-1), predicted.array, k))


def sparse_top_k_categorical_accuracy(
    y_true: Any, y_pred: Any, k: int = 5, from_sorted_ids: bool = False
) -> Tensor:
    """Return for each example whether its label is among the ``k`` largest predictions.

    Parameters
    ----------
    y_true
        Class numbers, of the shape of ``y_pred`` without its last axis (or with 1 there).
    y_pred
        ``[..., classes]``; or, with ``from_sorted_ids``, class numbers, the best first.
    k
        How many are looked at.
    from_sorted_ids
        What ``y_pred`` is.
    """
    labels, predicted = _labelled(y_true, y_pred)
    if from_sorted_ids:
        return _as_floats((predicted[..., :k] == labels[..., None]).any(axis=-1))
    return _as_floats(_in_top(labels, predicted, k))


def accuracy_by_shape(y_true: Any, y_pred: Any) -> Tensor:
    """Return for each example whether the prediction is right; shapes tell what is meant.

    One prediction for each example is `binary_accuracy`, one label for several predictions
    `sparse_categorical_accuracy`, everything else `categorical_accuracy`.
    """
    true, predicted = as_tensor(y_true).shape, as_tensor(y_pred).shape
    if len(predicted) < 2 or predicted[-1] == 1:
        return binary_accuracy(y_true, y_pred)
    if len(true) < len(predicted) or true[-1] == 1:
        return sparse_categorical_accuracy(y_true, y_pred)
    return categorical_accuracy(y_true, y_pred)


def _labelled(y_true: Any, y_pred: Any) -> tuple[Array, Array]:
    """Return labels and predictions, one label for each row of predictions."""
    predicted = as_tensor(y_pred).array
    labels = asarray(as_tensor(y_true).array, like=predicted)
    if labels.ndim == predicted.ndim and labels.ndim > 0 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if labels.shape != predicted.shape[:-1]:
        raise ValueError(
            f"labels of shape {labels.shape} do not fit predictions of shape {predicted.shape}: "
            "one label for each row of predictions is needed"
        )
    return labels, predicted


def _in_top(labels: Array, predicted: Array, k: int) -> Array:
    """Return for each row whether fewer than ``k`` predictions are larger than that of the label."""
    classes = predicted.shape[-1]
    places = labels.astype(np.int64)
    inside = (places >= 0) & (places < classes)
    own = np.take_along_axis(predicted, np.where(inside, places, 0)[..., None], axis=-1)
    # Neither NaN nor infinity is a rank.
    right: Array = inside & np.isfinite(own[..., 0]) & ((predicted > own).sum(axis=-1) < k)
    return right


def _as_floats(right: Any) -> Tensor:
    return Tensor(asarray(right, as_dtype(floatx())))


# Metrics ------------------------------------------------------------------------------------------


class Accuracy(MeanOf):
    """How often predictions equal the answers."""

    direction = "up"
    _of = staticmethod(accuracy)


class BinaryAccuracy(MeanMetricWrapper):
    """How often a prediction is on the right side of ``threshold``."""

    direction = "up"

    def __init__(
        self,
        name: str | None = "binary_accuracy",
        dtype: Any = None,
        threshold: float = 0.5,
    ) -> None:
        super().__init__(binary_accuracy, name, dtype, threshold=float(threshold))


class CategoricalAccuracy(MeanOf):
    """How often the largest prediction stands where the largest of ``y_true`` does."""

    direction = "up"
    _of = staticmethod(categorical_accuracy)


class SparseCategoricalAccuracy(MeanOf):
    """How often the class with the largest prediction is the label."""

    direction = "up"
    _of = staticmethod(sparse_categorical_accuracy)


class TopKCategoricalAccuracy(MeanMetricWrapper):
    """How often the right class, as the largest of ``y_true``, is among the ``k`` best ones."""

    direction = "up"

    def __init__(
        self, k: int = 5, name: str | None = "top_k_categorical_accuracy", dtype: Any = None
    ) -> None:
        super().__init__(top_k_categorical_accuracy, name, dtype, k=int(k))


class SparseTopKCategoricalAccuracy(MeanMetricWrapper):
    """How often the label is among the ``k`` best classes."""

    direction = "up"

    def __init__(
        self,
        k: int = 5,
        name: str | None = "sparse_top_k_categorical_accuracy",
        dtype: Any = None,
        from_sorted_ids: bool = False,
    ) -> None:
        super().__init__(
            sparse_top_k_categorical_accuracy,
            name,
            dtype,
            k=int(k),
            from_sorted_ids=bool(from_sorted_ids),
        )
