"""`Loss`: the base of losses, with the reduction of the examples' values."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from pycollective.distribute.context import has_strategy
from pycollective.dtypes import as_dtype
from pycollective.keras.backend import floatx, name_of_class, unique_name
from pycollective.keras.configs import Kind
from pycollective.tensor import Tensor, as_tensor, ops
from pycollective.tensor.ops.reductions import sum_over

#: The losses by name, to which `pycollective.keras.losses` adds its own.
LOSSES = Kind("loss", {}, "a callable(y_true, y_pred)")


class Reduction(str, enum.Enum):
    """The reduction of a loss's values for the examples."""

    #: As SUM_OVER_BATCH_SIZE.
    AUTO = "auto"
    #: No reduction: one value per example.
    NONE = "none"
    SUM = "sum"
    #: The sum, divided by the number of values; 0 for none.
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"
    #: As SUM_OVER_BATCH_SIZE.
    MEAN = "mean"

    @classmethod
    def of(cls, value: Any) -> Reduction:
        """Return a reduction, given as itself, its value, or None (`NONE`)."""
        if value is None:
            return cls.NONE
        try:
            return cls(value)
        except ValueError:
            raise ValueError(
                f"reduction must be one of {', '.join(repr(r.value) for r in cls)}, got {value!r}"
            ) from None


class _Thread(threading.local):
    #: True inside `averages_of_replicas`.
    averages = False


_thread = _Thread()


@contextmanager
def averages_of_replicas() -> Iterator[None]:
    """Allow losses to average over the examples of one replica inside the block.

    The caller weights the averages by the replicas' numbers of examples.
    """
    before, _thread.averages = _thread.averages, True
    try:
        yield
    finally:
        _thread.averages = before


class Loss:
    """Base class of losses; a subclass overrides `call`, which gets labels in the predictions' dtype.

    Parameters
    ----------
    name : str, optional
        The name; the default is the class's name with a number.
    reduction
        The reduction of the examples' values.
    dtype
        The dtype that predictions are converted to. The default converts float16 and bfloat16 to
        ``floatx()``, and keeps other dtypes.

    Raises
    ------
    ValueError
        If ``reduction`` is unknown.
    """

    def __init__(
        self,
        name: str | None = None,
        reduction: Any = Reduction.SUM_OVER_BATCH_SIZE,
        dtype: Any = None,
    ) -> None:
        self.reduction = Reduction.of(reduction)
        self.name = unique_name(name_of_class(type(self))) if name is None else name
        self._dtype = None if dtype is None else as_dtype(dtype)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype that the constructor got, or else ``floatx()``."""
        return as_dtype(floatx()) if self._dtype is None else self._dtype

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        """Return the loss of each example, without weights and reduction."""
        raise NotImplementedError(f"{type(self).__name__} must override call()")

    #: True if `call` gets labels in their own dtype, False to convert them to the predictions' dtype.
    _takes_any_labels = False

    def values(self, y_true: Any, y_pred: Any) -> Tensor:
        """Return the result of `call` in the dtype of the loss."""
        predicted = in_loss_dtype(y_pred, self._dtype)
        if not self._takes_any_labels:
            y_true = as_tensor(y_true, like=predicted)
            if y_true.dtype != predicted.dtype and predicted.dtype.kind in "fV":
                y_true = ops.cast(y_true, predicted.dtype)
        return as_tensor(self.call(y_true, predicted))

    @property
    def averages(self) -> bool:
        """True if the reduction averages."""
        return self.reduction not in (Reduction.NONE, Reduction.SUM)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        reduction = self.reduction
        if reduction is Reduction.AUTO:
            reduction = Reduction.SUM_OVER_BATCH_SIZE
        return {"name": self.name, "reduction": reduction.value}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Return the loss from the result of `get_config`."""
        return cls(**config)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Return the reduced loss of predictions.

        Parameters
        ----------
        y_true, y_pred, sample_weight
            Targets, predictions, and a weight for each example, or a scalar.

        Raises
        ------
        ValueError
            If the shapes do not fit, or a label is out of range. If the reduction averages in the
            scope of a strategy, because a replica knows only its own part of the batch.
        """
        averages = self.averages
        if averages and has_strategy() and not _thread.averages:
            raise ValueError(_USE_SUM_OR_NONE)
        losses = self.values(y_true, y_pred)
        if sample_weight is not None:
            losses = losses * broadcast_weights(sample_weight, losses)
        if averages:
            return sum_over(losses, float(max(1, losses.array.size)))
        return losses if self.reduction is Reduction.NONE else ops.reduce_sum(losses)


_USE_SUM_OR_NONE = (
    "Please use `tf.keras.losses.Reduction.SUM` or `tf.keras.losses.Reduction.NONE` for loss "
    "reduction when losses are used with `tf.distribute.Strategy`, except for specifying losses in "
    "`Model.compile()` for use by the built-in training looop `Model.fit()`.\nPlease see "
    "https://www.tensorflow.org/tutorials/distribute/custom_training for more details."
)


def broadcast_weights(sample_weight: Any, values: Tensor) -> Tensor:
    """Return weights in the dtype of the values, in a shape that broadcasts to that of the values.

    Raise ``ValueError`` unless there is one weight for all values, for each example or for each value.
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


def in_loss_dtype(y_pred: Any, dtype: np.dtype[Any] | None = None) -> Tensor:
    """Return predictions in the dtype of a loss.

    If ``dtype`` is None, float16 and bfloat16 become ``floatx()``, and other dtypes do not change.
    """
    predicted = as_tensor(y_pred)
    if dtype is None:
        kind = predicted.array.dtype
        if kind.kind not in "fV" or kind.itemsize >= 4:
            return predicted
        dtype = as_dtype(floatx())
    if predicted.array.dtype == dtype:
        return predicted
    found = ops.cast(predicted, dtype)
    if (made := getattr(predicted, "_logits", None)) is not None:
        name, logits, axis = made
        found._logits = name, ops.cast(logits, dtype), axis
    return found


def same_rank(true: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors with equal ranks, if one has an additional last axis of length 1.

    If the other tensor has one axis, it gets a last axis of length 1 too. Otherwise, the additional
    axis is removed. If the ranks differ in any other way, nothing changes.
    """
    if true.ndim == predicted.ndim + 1 and true.shape[-1] == 1:
        if predicted.ndim == 1:
            return true, ops.expand_dims(predicted, -1)
        return ops.squeeze(true, -1), predicted
    if predicted.ndim == true.ndim + 1 and predicted.shape[-1] == 1:
        if true.ndim == 1:
            return ops.expand_dims(true, -1), predicted
        return true, ops.squeeze(predicted, -1)
    return true, predicted


def matched(y_true: Any, y_pred: Any) -> tuple[Tensor, Tensor]:
    """Return both as tensors of the same floating-point dtype and the same shape.

    One of them may have an additional last axis of length 1; see `same_rank`. Raise ``ValueError`` if
    the shapes differ otherwise.
    """
    predicted = as_tensor(y_pred)
    if predicted.array.dtype.kind not in "fV":
        predicted = ops.cast(predicted, np.float32)
    true = as_tensor(y_true, like=predicted)
    if true.array.dtype != predicted.array.dtype:
        true = ops.cast(true, predicted.array.dtype)
    if true.array.shape == predicted.array.shape:
        return true, predicted
    true, predicted = same_rank(true, predicted)
    if true.shape != predicted.shape:
        raise ValueError(
            f"y_true of shape {true.shape} does not fit y_pred of shape {predicted.shape}: they "
            "must have the same shape"
        )
    return true, predicted
