"""Accuracies: the fraction of predictions that are right.

A function raises ``ValueError`` if the shapes of labels and predictions do not fit.
"""

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
    """Return 1 for each prediction that equals its label, else 0."""
    true, predicted = matched(y_true, y_pred)
    return _as_floats(true.array == predicted.array)


def binary_accuracy(y_true: Any, y_pred: Any, threshold: float = 0.5) -> Tensor:
    """Return 1 for each prediction on its label's side of ``threshold``, else 0.

    Parameters
    ----------
    y_true
        Labels, 0 or 1.
    y_pred
        Predictions, of the same shape.
    threshold : float
        The limit above which a prediction counts as 1.
    """
    true, predicted = matched(y_true, y_pred)
    return _as_floats((predicted.array > threshold) == true.array)


def categorical_accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return 1 for each example whose class has the largest prediction, else 0.

    ``y_true`` and ``y_pred`` are ``[..., classes]``. The class is the maximum of ``y_true``.
    """
    true, predicted = matched(y_true, y_pred)
    return _as_floats(predicted.array.argmax(axis=-1) == true.array.argmax(axis=-1))


def sparse_categorical_accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return 1 for each example whose label has the largest prediction, else 0.

    Parameters
    ----------
    y_true
        Class numbers, ``[...]`` or ``[..., 1]``.
    y_pred
        Predictions, ``[..., classes]``.
    """
    labels, predicted = _labelled(y_true, y_pred)
    return _as_floats(predicted.argmax(axis=-1) == labels)


def top_k_categorical_accuracy(y_true: Any, y_pred: Any, k: int = 5) -> Tensor:
    """Return 1 for each example whose class is among the ``k`` largest predictions, else 0.

    ``y_true`` and ``y_pred`` are ``[..., classes]``. The class is the maximum of ``y_true``.
    """
    true, predicted = matched(y_true, y_pred)
    return _as_floats(_in_top(true.array.argmax(axis=-1), predicted.array, k))


def sparse_top_k_categorical_accuracy(
    y_true: Any, y_pred: Any, k: int = 5, from_sorted_ids: bool = False
) -> Tensor:
    """Return 1 for each example whose label is among the ``k`` largest predictions, else 0.

    Parameters
    ----------
    y_true
        Class numbers, ``[...]`` or ``[..., 1]``.
    y_pred
        Predictions, ``[..., classes]``.
    k : int
        The number of predictions that count.
    from_sorted_ids : bool
        True if ``y_pred`` holds class numbers, sorted from the best.
    """
    labels, predicted = _labelled(y_true, y_pred)
    if from_sorted_ids:
        return _as_floats((predicted[..., :k] == labels[..., None]).any(axis=-1))
    return _as_floats(_in_top(labels, predicted, k))


def accuracy_by_shape(y_true: Any, y_pred: Any) -> Tensor:
    """Return the accuracy of each example, of the kind that the shapes choose.

    The kind is `binary_accuracy` for one prediction per example, `sparse_categorical_accuracy` for
    one label and several predictions per example, and `categorical_accuracy` otherwise.
    """
    true, predicted = as_tensor(y_true).shape, as_tensor(y_pred).shape
    if len(predicted) < 2 or predicted[-1] == 1:
        return binary_accuracy(y_true, y_pred)
    if len(true) < len(predicted) or true[-1] == 1:
        return sparse_categorical_accuracy(y_true, y_pred)
    return categorical_accuracy(y_true, y_pred)


def _labelled(y_true: Any, y_pred: Any) -> tuple[Array, Array]:
    """Return labels and predictions, with one label for each row of predictions."""
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
    """Return True for each row with fewer than ``k`` predictions above the label's prediction."""
    classes = predicted.shape[-1]
    indices = labels.astype(np.int64)
    inside = (indices >= 0) & (indices < classes)
    at_label = np.take_along_axis(predicted, np.where(inside, indices, 0)[..., None], axis=-1)
    # As in Keras, a row with a prediction that is NaN or infinite is wrong.
    above = (predicted > at_label).sum(axis=-1)
    right: Array = inside & np.isfinite(predicted).all(axis=-1) & (above < k)
    return right


def _as_floats(right: Any) -> Tensor:
    return Tensor(asarray(right, as_dtype(floatx())))


# Metrics ------------------------------------------------------------------------------------------


class Accuracy(MeanOf):
    """The fraction of predictions that equal their labels."""

    direction = "up"
    _of = staticmethod(accuracy)


class BinaryAccuracy(MeanMetricWrapper):
    """The fraction of predictions on their label's side of ``threshold``."""

    direction = "up"

    def __init__(
        self,
        name: str | None = "binary_accuracy",
        dtype: Any = None,
        threshold: float = 0.5,
    ) -> None:
        super().__init__(binary_accuracy, name, dtype, threshold=float(threshold))


class CategoricalAccuracy(MeanOf):
    """The fraction of examples whose class, the maximum of ``y_true``, has the largest prediction."""

    direction = "up"
    _of = staticmethod(categorical_accuracy)


class SparseCategoricalAccuracy(MeanOf):
    """The fraction of examples whose label has the largest prediction."""

    direction = "up"
    _of = staticmethod(sparse_categorical_accuracy)


class TopKCategoricalAccuracy(MeanMetricWrapper):
    """The fraction of examples whose class, the maximum of ``y_true``, is among the best ``k``."""

    direction = "up"

    def __init__(
        self, k: int = 5, name: str | None = "top_k_categorical_accuracy", dtype: Any = None
    ) -> None:
        super().__init__(top_k_categorical_accuracy, name, dtype, k=int(k))


class SparseTopKCategoricalAccuracy(MeanMetricWrapper):
    """The fraction of examples whose label is among the best ``k`` classes."""

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
