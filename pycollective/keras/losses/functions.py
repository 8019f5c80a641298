"""Loss functions, which return one value for each example.

A function raises ``ValueError`` if the shapes of labels and predictions do not fit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from pycollective import nn
from pycollective.array_backend import on_host
from pycollective.keras.activations import logits_of
from pycollective.keras.backend import epsilon
from pycollective.keras.losses.loss import matched
from pycollective.nn.losses import losses_of_rows
from pycollective.tensor import Tensor, as_tensor, ops
from pycollective.tensor.tape import record

__all__ = [
    "binary_crossentropy",
    "categorical_crossentropy",
    "categorical_hinge",
    "cosine_similarity",
    "hinge",
    "huber",
    "kl_divergence",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "poisson",
    "sparse_categorical_crossentropy",
    "squared_hinge",
]


def sparse_categorical_crossentropy(
    y_true: Any,
    y_pred: Any,
    from_logits: bool = False,
    ignore_class: int | None = None,
    axis: int = -1,
) -> Tensor:
    """Return the cross-entropy of class numbers and predictions.

    Parameters
    ----------
    y_true
        Class numbers from 0, ``[...]`` or ``[..., 1]``.
    y_pred
        Predictions, ``[..., classes]``.
    from_logits : bool
        True if predictions are logits, False if they are probabilities.
    ignore_class : int, optional
        Must be None.
    axis : int
        The axis of the classes in ``y_pred``.

    Raises
    ------
    ValueError
        If a label is out of range or not an integer, the shapes do not fit, or ``ignore_class`` is
        not None. On a device, a wrong label raises no error, but its loss is NaN.
    """
    if ignore_class is not None:
        raise ValueError(
            f"ignore_class={ignore_class} is not supported; give the examples of that class the "
            "sample_weight 0, and any valid label"
        )
    if hasattr(y_pred, "_logits"):
        y_pred, from_logits = _logits_of(y_pred, "softmax", from_logits, axis)
    predicted = _classes_last(as_tensor(y_pred), axis)
    labels, shape = as_tensor(y_true).array, predicted.array.shape
    if labels.ndim == len(shape) and labels.ndim > 0 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if labels.shape != shape[:-1]:
        raise ValueError(
            f"labels of shape {labels.shape} do not fit predictions of shape {shape}: "
            "one label for each row of predictions is needed"
        )
    classes = shape[-1] if shape else 0
    logits = predicted if from_logits else ops.log(_probabilities(predicted))
    if labels.dtype.kind not in "iu":
        labels = _class_numbers(labels, classes)
    try:
        return nn.sparse_softmax_cross_entropy_with_logits(Tensor(labels), logits)
    except ValueError:
        _class_numbers(labels, classes)  # raises an error that names the wrong label
        raise


def _class_numbers(labels: Any, classes: int) -> Any:
    """Return labels as integers; raise ``ValueError`` for a label on the host out of range."""
    if not on_host(labels):
        # A check would fetch labels from the device. Instead a wrong label gives the loss NaN.
        numbers = labels.astype(np.int64)
        return np.where(numbers == labels, numbers, -1)
    with np.errstate(invalid="ignore"):
        numbers = labels.astype(np.int64)
    wrong = (numbers != labels) | (numbers < 0) | (numbers >= classes)
    if not wrong.any():
        return numbers
    position = tuple(int(axis[0]) for axis in wrong.nonzero())
    raise ValueError(
        f"label {labels[position].item()} at position {list(position)} is out of range: with {classes} "
        f"classes, labels are integers from 0 to {classes - 1}"
    )


def categorical_crossentropy(
    y_true: Any,
    y_pred: Any,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    """Return the cross-entropy of distributions over classes and predictions.

    Parameters
    ----------
    y_true
        The probability of each class, ``[..., classes]``.
    y_pred
        Predictions, ``[..., classes]``.
    from_logits : bool
        True if predictions are logits, False if they are probabilities.
    label_smoothing : float
        The fraction of ``y_true`` that is distributed equally over all classes.
    axis : int
        The axis of the classes.
    """
    if hasattr(y_pred, "_logits"):
        y_pred, from_logits = _logits_of(y_pred, "softmax", from_logits, axis)
    true, predicted = (_classes_last(value, axis) for value in matched(y_true, y_pred))
    if label_smoothing:
        true = true * (1.0 - label_smoothing) + label_smoothing / true.shape[-1]
    if from_logits:
        return nn.softmax_cross_entropy_with_logits(true, predicted)
    share = predicted / ops.maximum(ops.reduce_sum(predicted, axis=-1, keepdims=True), epsilon())
    return -ops.reduce_sum(true * ops.log(_probabilities(share)), axis=-1)


def binary_crossentropy(
    y_true: Any,
    y_pred: Any,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> Tensor:
    """Return the cross-entropy of binary labels, as the mean over an axis.

    Parameters
    ----------
    y_true
        The probability of the positive class, in the shape of ``y_pred``.
    y_pred
        Predictions.
    from_logits : bool
        True if predictions are logits, False if they are probabilities.
    label_smoothing : float
        The fraction of the distance to 0.5 that labels are moved.
    axis : int
        The axis of the mean.
    """
    if hasattr(y_pred, "_logits"):
        y_pred, from_logits = _logits_of(y_pred, "sigmoid", from_logits)
    true, predicted = matched(y_true, y_pred)
    if label_smoothing:
        true = true * (1.0 - label_smoothing) + 0.5 * label_smoothing
    if from_logits:
        last = axis in (-1, predicted.array.ndim - 1)
        found = losses_of_rows("binary_crossentropy", true, predicted, 0.0) if last else None
        if found is not None:
            return found
        values = nn.sigmoid_cross_entropy_with_logits(true, predicted)
    else:
        yes = _probabilities(predicted)
        values = -(true * ops.log(yes) + (1.0 - true) * ops.log(1.0 - yes))
    return _mean_of_last(_classes_last(values, axis))


def crossentropy_by_shape(y_true: Any, y_pred: Any) -> Tensor:
    """Return the binary, sparse or categorical cross-entropy, chosen by the shapes."""
    true, predicted = as_tensor(y_true), as_tensor(y_pred)
    if predicted.shape[-1] == 1:
        return binary_crossentropy(true, predicted)
    if true.ndim < predicted.ndim or true.shape[-1] == 1:
        return sparse_categorical_crossentropy(true, predicted)
    return categorical_crossentropy(true, predicted)


def mean_squared_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean squared difference along the last axis."""
    return _by_rows(
        "mean_squared_error",
        y_true,
        y_pred,
        lambda true, predicted: _mean_of_last(ops.squared_difference(predicted, true)),
    )


def mean_absolute_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean absolute difference along the last axis."""
    return _by_rows(
        "mean_absolute_error",
        y_true,
        y_pred,
        lambda true, predicted: _mean_of_last(ops.abs(predicted - true)),
    )


def mean_absolute_percentage_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return 100 times the mean of ``|y_true - y_pred| / |y_true|`` along the last axis."""

    def composed(true: Tensor, predicted: Tensor) -> Tensor:
        share = ops.abs((true - predicted) / ops.maximum(ops.abs(true), epsilon()))
        return 100.0 * _mean_of_last(share)

    return _by_rows("mean_absolute_percentage_error", y_true, y_pred, composed, epsilon())


def mean_squared_logarithmic_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of ``(log(y_pred + 1) - log(y_true + 1))²`` along the last axis.

    Values below ``epsilon()`` count as ``epsilon()``.
    """

    def composed(true: Tensor, predicted: Tensor) -> Tensor:
        logs = [ops.log1p(ops.maximum(value, epsilon())) for value in (predicted, true)]
        return _mean_of_last(ops.square(logs[0] - logs[1]))

    return _by_rows("mean_squared_logarithmic_error", y_true, y_pred, composed, epsilon())


def huber(y_true: Any, y_pred: Any, delta: float = 1.0) -> Tensor:
    """Return the mean of the Huber loss along the last axis.

    The loss of a difference ``d`` is ``d² / 2`` if ``|d| <= delta``, and ``delta |d| - delta² / 2``
    otherwise (Huber, 1964).
    """

    def composed(true: Tensor, predicted: Tensor) -> Tensor:
        error = predicted - true
        a = error.array
        slope = a.clip(-delta, delta)
        # Both cases are ``slope * (error - slope / 2)``.
        values = slope * (a - a.dtype.type(0.5) * slope)
        return _mean_of_last(record(values, (error,), lambda g, _need: (g * slope,)))

    return _by_rows("huber", y_true, y_pred, composed, delta)


def log_cosh(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of ``log(cosh(y_pred - y_true))`` along the last axis."""

    def composed(true: Tensor, predicted: Tensor) -> Tensor:
        size = ops.abs(predicted - true)
        return _mean_of_last(size + nn.softplus(-2.0 * size) - math.log(2))

    return _by_rows("log_cosh", y_true, y_pred, composed)


def kl_divergence(y_true: Any, y_pred: Any) -> Tensor:
    """Return ``sum(y_true * log(y_true / y_pred))`` along the last axis."""

    def composed(*pair: Tensor) -> Tensor:
        true, predicted = (ops.clip_by_value(value, epsilon(), 1.0) for value in pair)
        return ops.reduce_sum(true * ops.log(true / predicted), axis=-1)

    return _by_rows("kl_divergence", y_true, y_pred, composed, epsilon())


def poisson(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of ``y_pred - y_true * log(y_pred)`` along the last axis."""

    def composed(true: Tensor, predicted: Tensor) -> Tensor:
        return _mean_of_last(predicted - true * ops.log(predicted + epsilon()))

    return _by_rows("poisson", y_true, y_pred, composed, epsilon())


def hinge(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of ``max(0, 1 - y_true * y_pred)`` along the last axis.

    Labels are -1 and 1. If all labels are 0 or 1, a 0 counts as -1.
    """
    return _by_rows("hinge", y_true, y_pred, lambda *pair: _mean_of_last(_below_margin(*pair)))


def squared_hinge(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean of ``max(0, 1 - y_true * y_pred)²`` along the last axis.

    The labels are as for `hinge`.
    """

    def composed(*pair: Tensor) -> Tensor:
        return _mean_of_last(ops.square(_below_margin(*pair)))

    return _by_rows("squared_hinge", y_true, y_pred, composed)


def _below_margin(true: Tensor, predicted: Tensor) -> Tensor:
    # The condition is for `where`, because an `if` would fetch it from the device.
    zeros_and_ones = ((true.array == 0) | (true.array == 1)).all()
    true = ops.where(Tensor(zeros_and_ones), 2.0 * true - 1.0, true)
    return ops.maximum(1.0 - true * predicted, 0.0)


def categorical_hinge(y_true: Any, y_pred: Any) -> Tensor:
    """Return ``max(0, 1 + other - right)`` for each example.

    ``right`` is the prediction of the right class, for which ``y_true`` is 1. ``other`` is the largest
    prediction of the other classes.
    """

    def composed(true: Tensor, predicted: Tensor) -> Tensor:
        right = ops.reduce_sum(true * predicted, axis=-1)
        other = ops.reduce_max((1.0 - true) * predicted, axis=-1)
        return ops.maximum(other - right + 1.0, 0.0)

    return _by_rows("categorical_hinge", y_true, y_pred, composed)


def cosine_similarity(y_true: Any, y_pred: Any, axis: int = -1) -> Tensor:
    """Return the negative cosine of the angle between vectors along an axis."""

    def unit(value: Tensor) -> Tensor:
        square = ops.reduce_sum(ops.square(value), axis=-1, keepdims=True)
        return value * ops.rsqrt(ops.maximum(square, epsilon() ** 2))

    def composed(true: Tensor, predicted: Tensor) -> Tensor:
        return -ops.reduce_sum(unit(true) * unit(predicted), axis=-1)

    return _by_rows("cosine_similarity", y_true, y_pred, composed, epsilon() ** 2, axis)


def _by_rows(
    kernel: str,
    y_true: Any,
    y_pred: Any,
    composed: Callable[[Tensor, Tensor], Tensor],
    number: float = 0.0,
    axis: int = -1,
) -> Tensor:
    """Return a loss by the kernel of this name, or composed of operations if there is no kernel."""
    true, predicted = matched(y_true, y_pred)
    if axis != -1:
        true, predicted = _classes_last(true, axis), _classes_last(predicted, axis)
    found = losses_of_rows(kernel, true, predicted, number)
    return composed(true, predicted) if found is None else found


def _classes_last(values: Tensor, axis: int) -> Tensor:
    """Move an axis to the end."""
    if axis in (-1, values.array.ndim - 1):
        return values
    order = list(range(values.ndim))
    order.append(order.pop(axis))
    return ops.transpose(values, order)


def _mean_of_last(values: Tensor) -> Tensor:
    shape = values.array.shape
    if not shape:
        return values
    # The mean of no elements would be NaN.
    return ops.reduce_mean(values, axis=-1) if shape[-1] else ops.reduce_sum(values, axis=-1)


def _logits_of(
    predicted: Tensor, name: str, from_logits: bool, axis: int = -1
) -> tuple[Tensor, bool]:
    """Return the logits and True if the activation ``name`` computed the predictions from them.

    The logarithm of a probability near 0 has no accurate value and no gradient. Otherwise return the
    arguments.
    """
    logits = logits_of(predicted, name, axis)
    if logits is None:
        return predicted, from_logits
    if from_logits:
        warnings.warn(
            f"from_logits=True, but {name} has computed the predictions: the loss uses the logits that "
            f"{name} got. Remove the activation, or from_logits=True",
            stacklevel=3,
        )
    return logits, True


def _probabilities(values: Tensor) -> Tensor:
    """Keep probabilities away from 0 and 1, whose logarithms would be infinite."""
    return ops.clip_by_value(values, epsilon(), 1.0 - epsilon())
