"""Losses, and their like, as metrics."""

from __future__ import annotations

from typing import Any

from pycollective.keras import losses
from pycollective.keras.losses.loss import matched
from pycollective.keras.metrics.metric import Mean, MeanMetricWrapper, ratio
from pycollective.tensor import Tensor, as_tensor, ops

__all__ = [
    "BinaryCrossentropy",
    "CategoricalCrossentropy",
    "CategoricalHinge",
    "CosineSimilarity",
    "Hinge",
    "KLDivergence",
    "LogCoshError",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "RootMeanSquaredError",
    "SparseCategoricalCrossentropy",
    "SquaredHinge",
]


class BinaryCrossentropy(MeanMetricWrapper):
    """The mean of `losses.binary_crossentropy`."""

    direction = "down"

    def __init__(
        self,
        name: str | None = "binary_crossentropy",
        dtype: Any = None,
        from_logits: bool = False,
        label_smoothing: float = 0,
    ) -> None:
        super().__init__(
            losses.binary_crossentropy,
            name,
            dtype,
            from_logits=bool(from_logits),
            label_smoothing=label_smoothing,
        )


class CategoricalCrossentropy(MeanMetricWrapper):
    """The mean of `losses.categorical_crossentropy`."""

    direction = "down"

    def __init__(
        self,
        name: str | None = "categorical_crossentropy",
        dtype: Any = None,
        from_logits: bool = False,
        label_smoothing: float = 0,
        axis: int = -1,
    ) -> None:
        super().__init__(
            losses.categorical_crossentropy,
            name,
            dtype,
            from_logits=bool(from_logits),
            label_smoothing=label_smoothing,
            axis=axis,
        )


class SparseCategoricalCrossentropy(MeanMetricWrapper):
    """The mean of `losses.sparse_categorical_crossentropy`."""

    direction = "down"

    def __init__(
        self,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: Any = None,
        from_logits: bool = False,
        ignore_class: int | None = None,
        axis: int = -1,
    ) -> None:
        super().__init__(
            losses.sparse_categorical_crossentropy,
            name,
            dtype,
            from_logits=bool(from_logits),
            ignore_class=ignore_class,
            axis=axis,
        )


class KLDivergence(MeanMetricWrapper):
    """The mean of `losses.kl_divergence`."""

    direction = "down"

    def __init__(self, name: str | None = "kl_divergence", dtype: Any = None) -> None:
        super().__init__(losses.kl_divergence, name, dtype)


class Poisson(MeanMetricWrapper):
    """The mean of `losses.poisson`."""

    direction = "down"

    def __init__(self, name: str | None = "poisson", dtype: Any = None) -> None:
        super().__init__(losses.poisson, name, dtype)


class MeanSquaredError(MeanMetricWrapper):
    """The mean of `losses.mean_squared_error`."""

    direction = "down"

    def __init__(self, name: str | None = "mean_squared_error", dtype: Any = None) -> None:
        super().__init__(losses.mean_squared_error, name, dtype)


class MeanAbsoluteError(MeanMetricWrapper):
    """The mean of `losses.mean_absolute_error`."""

    direction = "down"

    def __init__(self, name: str | None = "mean_absolute_error", dtype: Any = None) -> None:
        super().__init__(losses.mean_absolute_error, name, dtype)


class MeanAbsolutePercentageError(MeanMetricWrapper):
    """The mean of `losses.mean_absolute_percentage_error`."""

    direction = "down"

    def __init__(
        self, name: str | None = "mean_absolute_percentage_error", dtype: Any = None
    ) -> None:
        super().__init__(losses.mean_absolute_percentage_error, name, dtype)


class MeanSquaredLogarithmicError(MeanMetricWrapper):
    """The mean of `losses.mean_squared_logarithmic_error`."""

    direction = "down"

    def __init__(
        self, name: str | None = "mean_squared_logarithmic_error", dtype: Any = None
    ) -> None:
        super().__init__(losses.mean_squared_logarithmic_error, name, dtype)


class LogCoshError(MeanMetricWrapper):
    """The mean of `losses.log_cosh`."""

    direction = "down"

    def __init__(self, name: str | None = "logcosh", dtype: Any = None) -> None:
        super().__init__(losses.log_cosh, name, dtype)


class Hinge(MeanMetricWrapper):
    """The mean of `losses.hinge`."""

    direction = "down"

    def __init__(self, name: str | None = "hinge", dtype: Any = None) -> None:
        super().__init__(losses.hinge, name, dtype)


class SquaredHinge(MeanMetricWrapper):
    """The mean of `losses.squared_hinge`."""

    direction = "down"

    def __init__(self, name: str | None = "squared_hinge", dtype: Any = None) -> None:
        super().__init__(losses.squared_hinge, name, dtype)


class CategoricalHinge(MeanMetricWrapper):
    """The mean of `losses.categorical_hinge`."""

    direction = "down"

    def __init__(self, name: str | None = "categorical_hinge", dtype: Any = None) -> None:
        super().__init__(losses.categorical_hinge, name, dtype)


class CosineSimilarity(MeanMetricWrapper):
    """The mean cosine of the angle between vectors; the loss of this name is its negative."""

    direction = "up"

    def __init__(
        self, name: str | None = "cosine_similarity", dtype: Any = None, axis: int = -1
    ) -> None:
        super().__init__(_cosine, name, dtype, axis=axis)


def _cosine(y_true: Any, y_pred: Any, axis: int) -> Tensor:
    return -losses.cosine_similarity(y_true, y_pred, axis)


class RootMeanSquaredError(Mean):
    """The root of the mean squared difference."""

    direction = "down"

    def __init__(self, name: str | None = "root_mean_squared_error", dtype: Any = None) -> None:
        super().__init__(name, dtype)

    def update_state(  # type: ignore[override]
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> None:
        """Take a batch in; as `MeanMetricWrapper.update_state`."""
        true, predicted = matched(y_true, y_pred)
        super().update_state(ops.square(predicted - true), sample_weight)

    def result(self) -> Tensor:
        total, count = as_tensor(self.total).array, as_tensor(self.count).array
        return ops.sqrt(ratio(total, count))
