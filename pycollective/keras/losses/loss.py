"""Losses, under the names of ``tf.keras.losses``."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pycollective import nn
from pycollective.distribute.context import has_strategy
from pycollective.keras.backend import epsilon, find, name_of_class
from pycollective.tensor import Tensor, as_tensor, ops

__all__ = [
    "BinaryCrossentropy",
    "CategoricalCrossentropy",
    "Loss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Reduction",
    "SparseCategoricalCrossentropy",
    "binary_crossentropy",
    "categorical_crossentropy",
    "get",
    "mean_absolute_error",
    "mean_squared_error",
    "sparse_categorical_crossentropy",
]


class Reduction(str, enum.Enum):
    """How a loss makes one number of its values for the examples."""

    #: As SUM_OVER_BATCH_SIZE.
    AUTO = "auto"
    #: One value per example.
    NONE = "none"
    SUM = "sum"
    #: The sum, divided by the number of values; 0 for none.
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"

    @classmethod
    def of(cls, value: Any) -> Reduction:
        """Return a reduction given as itself, by its value, or as None (`NONE`)."""
        if value is None:
            return cls.NONE
        try:
            return cls(value)
        except ValueError:
            raise ValueError(
                f"reduction must be one of {', '.join(repr(r.value) for r in cls)}, got {value!r}"
            ) from None


class Loss:
    """Base class: one of your own overrides `call`.

    Parameters
    ----------
    reduction
        How the values of the examples become one.
    name
        By default the class's name.
    """

    def __init__(self, reduction: Any = Reduction.AUTO, name: str | None = None) -> None:
        self.reduction = Reduction.of(reduction)
        self.name = name_of_class(type(self)) if name is None else name

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        """Return the loss of each example, without weights and reduction."""
        raise NotImplementedError(f"{type(self).__name__} must override call()")

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Return the loss.

        Parameters
        ----------
        y_true
            What should come out.
        y_pred
            What came out.
        sample_weight
            A weight for each example, or a scalar.

        Raises
        ------
        ValueError
            If the shapes do not fit, a label is out of range, or the loss divides by the batch
            size although a strategy is in force: one replica knows only its own part of the batch.
        """
        averaged = self.reduction in (Reduction.AUTO, Reduction.SUM_OVER_BATCH_SIZE)
        if averaged and has_strategy():
            raise ValueError(_USE_SUM_OR_NONE)
        losses = self.call(y_true, y_pred)
        if sample_weight is not None:
            losses = losses * broadcast_weights(sample_weight, losses)
        if self.reduction is Reduction.NONE:
            return losses
        total = ops.reduce_sum(losses)
        return total / float(max(1, math.prod(losses.shape))) if averaged else total


_USE_SUM_OR_NONE = (
    "Please use `tf.keras.losses.Reduction.SUM` or `tf.keras.losses.Reduction.NONE` for loss "
    "reduction when losses are used with `tf.distribute.Strategy`, except for specifying losses in "
    "`Model.compile()` for use by the built-in training looop `Model.fit()`.\nPlease see "
    "https://www.tensorflow.org/tutorials/distribute/custom_training for more details."
)


def broadcast_weights(sample_weight: Any, values: Tensor) -> Tensor:
    """Return weights in the dtype and rank of values: one for each, or one for each example.

    Raises
    ------
    ValueError
        If they do not fit.
    """
    weights = as_tensor(sample_weight, like=values)
    if weights.dtype != values.dtype:
        weights = ops.cast(weights, values.dtype)
    if weights.ndim == values.ndim + 1 and weights.shape[-1] == 1:
        weights = ops.squeeze(weights, -1)
    shape = weights.shape
    while 0 < weights.ndim < values.ndim:
        weights = ops.expand_dims(weights, -1)
    fits = weights.ndim == 0 or all(
        w in (1, n) for w, n in zip(weights.shape, values.shape, strict=False)
    )
    if weights.ndim > values.ndim or not fits:
        raise ValueError(
            f"sample_weight of shape {shape} does not fit values of shape {values.shape}"
        )
    return weights


def matched(y_true: Any, y_pred: Any) -> tuple[Tensor, Tensor]:
    """Return both as tensors of one floating-point dtype and shape.

    A last axis of length 1 that only one has does not count.

    Raises
    ------
    ValueError
        If the shapes differ; broadcasting would pair examples with the answers of others.
    """
    predicted = as_tensor(y_pred)
    if predicted.dtype.kind not in "fV":
        predicted = ops.cast(predicted, np.float32)
    true = as_tensor(y_true, like=predicted)
    if true.dtype != predicted.dtype:
        true = ops.cast(true, predicted.dtype)
    if true.ndim == predicted.ndim + 1 and true.shape[-1] == 1:
        true = ops.squeeze(true, -1)
    elif predicted.ndim == true.ndim + 1 and predicted.shape[-1] == 1:
        predicted = ops.squeeze(predicted, -1)
    if true.shape != predicted.shape:
        raise ValueError(
            f"y_true of shape {true.shape} does not fit y_pred of shape {predicted.shape}: they "
            "must have the same shape"
        )
    return true, predicted


# Functions: one value per example -----------------------------------------------------------------


def sparse_categorical_crossentropy(y_true: Any, y_pred: Any, from_logits: bool = False) -> Tensor:
    """Return the cross-entropy of class numbers and predictions.

    Parameters
    ----------
    y_true
        Class numbers from 0, of the shape of ``y_pred`` without its last axis (or with 1 there).
    y_pred
        ``[..., classes]``.
    from_logits
        Whether predictions are logits; otherwise they are probabilities.

    Raises
    ------
    ValueError
        If a label is out of range or no whole number, or the shapes do not fit.
    """
    predicted = as_tensor(y_pred)
    labels = as_tensor(y_true).array
    if labels.ndim == predicted.ndim and labels.ndim > 0 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if labels.shape != predicted.shape[:-1]:
        raise ValueError(
            f"labels of shape {labels.shape} do not fit predictions of shape {predicted.shape}: "
            "one label for each row of predictions is needed"
        )
    classes = predicted.shape[-1] if predicted.ndim else 0
    numbers = _class_numbers(labels, classes)
    logits = predicted if from_logits else ops.log(_probabilities(predicted))
    return nn.sparse_softmax_cross_entropy_with_logits(Tensor(numbers), logits)


def _class_numbers(labels: Any, classes: int) -> Any:
    """Return labels as integers, each of which has been seen to be in range."""
    if labels.dtype.kind in "iu":
        if not labels.size or (labels.min() >= 0 and labels.max() < classes):
            return labels
        wrong = (labels < 0) | (labels >= classes)
    else:
        with np.errstate(invalid="ignore"):
            numbers = labels.astype(np.int64)
        wrong = (numbers != labels) | (numbers < 0) | (numbers >= classes)
        if not wrong.any():
            return numbers
    place = tuple(int(axis[0]) for axis in wrong.nonzero())
    raise ValueError(
        f"label {labels[place].item()} at position {list(place)} is out of range: with {classes} "
        f"classes labels are whole numbers from 0 to {classes - 1}"
    )


def categorical_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, label_smoothing: float = 0.0
) -> Tensor:
    """Return the cross-entropy of distributions over classes and predictions.

    Parameters
    ----------
    y_true
        The probability of each class, in the shape of ``y_pred``.
    y_pred
        ``[..., classes]``.
    from_logits
        Whether predictions are logits; otherwise they are probabilities.
    label_smoothing
        The share of ``y_true`` that is spread over all classes.
    """
    true, predicted = matched(y_true, y_pred)
    if label_smoothing:
        true = true * (1.0 - label_smoothing) + label_smoothing / true.shape[-1]
    if from_logits:
        return nn.softmax_cross_entropy_with_logits(true, predicted)
    share = predicted / ops.maximum(ops.reduce_sum(predicted, axis=-1, keepdims=True), epsilon())
    return -ops.reduce_sum(true * ops.log(_probabilities(share)), axis=-1)


def binary_crossentropy(
    y_true: Any, y_pred: Any, from_logits: bool = False, label_smoothing: float = 0.0
) -> Tensor:
    """Return the cross-entropy of yes-or-no answers, as the mean over the last axis.

    Parameters
    ----------
    y_true
        The probability of yes, in the shape of ``y_pred``.
    y_pred
        Predictions.
    from_logits
        Whether predictions are logits; otherwise they are probabilities.
    label_smoothing
        How far answers are moved towards one half.
    """
    true, predicted = matched(y_true, y_pred)
    if label_smoothing:
        true = true * (1.0 - label_smoothing) + 0.5 * label_smoothing
    if from_logits:
        values = nn.sigmoid_cross_entropy_with_logits(true, predicted)
    else:
        yes = _probabilities(predicted)
        values = -(true * ops.log(yes) + (1.0 - true) * ops.log(1.0 - yes))
    return _mean_of_last(values)


def mean_squared_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean squared difference along the last axis."""
    true, predicted = matched(y_true, y_pred)
    return _mean_of_last(ops.square(predicted - true))


def mean_absolute_error(y_true: Any, y_pred: Any) -> Tensor:
    """Return the mean absolute difference along the last axis."""
    true, predicted = matched(y_true, y_pred)
    return _mean_of_last(ops.abs(predicted - true))


def _mean_of_last(values: Tensor) -> Tensor:
    if not values.ndim:
        return values
    return ops.reduce_sum(values, axis=-1) / float(max(1, values.shape[-1]))


def _probabilities(values: Tensor) -> Tensor:
    """Keep probabilities away from 0 and 1, whose logarithms would be infinite."""
    return ops.clip_by_value(values, epsilon(), 1.0 - epsilon())


# Classes ------------------------------------------------------------------------------------------


class _FunctionLoss(Loss):
    """A loss that is a function with settled arguments."""

    def __init__(
        self, function: Callable[..., Tensor], reduction: Any, name: str | None, **settings: Any
    ) -> None:
        super().__init__(reduction, name)
        self._function = function
        self._settings = settings

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        """Return the loss of each example."""
        return self._function(y_true, y_pred, **self._settings)


class SparseCategoricalCrossentropy(_FunctionLoss):
    """`sparse_categorical_crossentropy` as a loss."""

    def __init__(
        self, from_logits: bool = False, reduction: Any = Reduction.AUTO, name: str | None = None
    ) -> None:
        super().__init__(
            sparse_categorical_crossentropy, reduction, name, from_logits=bool(from_logits)
        )


class CategoricalCrossentropy(_FunctionLoss):
    """`categorical_crossentropy` as a loss."""

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        reduction: Any = Reduction.AUTO,
        name: str | None = None,
    ) -> None:
        super().__init__(
            categorical_crossentropy,
            reduction,
            name,
            from_logits=bool(from_logits),
            label_smoothing=float(label_smoothing),
        )


class BinaryCrossentropy(_FunctionLoss):
    """`binary_crossentropy` as a loss."""

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        reduction: Any = Reduction.AUTO,
        name: str | None = None,
    ) -> None:
        super().__init__(
            binary_crossentropy,
            reduction,
            name,
            from_logits=bool(from_logits),
            label_smoothing=float(label_smoothing),
        )


class MeanSquaredError(_FunctionLoss):
    """`mean_squared_error` as a loss."""

    def __init__(self, reduction: Any = Reduction.AUTO, name: str | None = None) -> None:
        super().__init__(mean_squared_error, reduction, name)


class MeanAbsoluteError(_FunctionLoss):
    """`mean_absolute_error` as a loss."""

    def __init__(self, reduction: Any = Reduction.AUTO, name: str | None = None) -> None:
        super().__init__(mean_absolute_error, reduction, name)


_KNOWN: dict[str, Any] = {
    "mse": MeanSquaredError,
    "mae": MeanAbsoluteError,
    "sparse_categorical_crossentropy": SparseCategoricalCrossentropy,
    "categorical_crossentropy": CategoricalCrossentropy,
    "binary_crossentropy": BinaryCrossentropy,
    "mean_squared_error": MeanSquaredError,
    "mean_absolute_error": MeanAbsoluteError,
    "SparseCategoricalCrossentropy": SparseCategoricalCrossentropy,
    "CategoricalCrossentropy": CategoricalCrossentropy,
    "BinaryCrossentropy": BinaryCrossentropy,
    "MeanSquaredError": MeanSquaredError,
    "MeanAbsoluteError": MeanAbsoluteError,
}


def get(identifier: Any) -> Any:
    """Return a loss: itself, or one by its name (``"mse"``).

    Raises
    ------
    ValueError
        For an unknown name, or what is neither a name nor callable.
    """
    if isinstance(identifier, str):
        return find("loss", _KNOWN, identifier)()
    if identifier is None or callable(identifier):
        return identifier
    raise ValueError(f"{identifier!r} is no loss; give a name or a callable(y_true, y_pred)")
