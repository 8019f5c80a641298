"""Losses and other errors as metrics."""

from __future__ import annotations

from typing import Any

from pycollective.keras import losses
from pycollective.keras.losses.loss import matched
from pycollective.keras.metrics.metric import Mean, MeanMetricWrapper, MeanOf, ratio
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


class KLDivergence(MeanOf):
    """The mean of `losses.kl_divergence`."""

    _of = staticmethod(losses.kl_divergence)


class Poisson(MeanOf):
    """The mean of `losses.poisson`."""

    _of = staticmethod(losses.poisson)


class MeanSquaredError(MeanOf):
    """The mean of `losses.mean_squared_error`."""

    _of = staticmethod(losses.mean_squared_error)


class MeanAbsoluteError(MeanOf):
    """The mean of `losses.mean_absolute_error`."""

    _of = staticmethod(losses.mean_absolute_error)


class MeanAbsolutePercentageError(MeanOf):
    """The mean of `losses.mean_absolute_percentage_error`."""

    _of = staticmethod(losses.mean_absolute_percentage_error)


class MeanSquaredLogarithmicError(MeanOf):
    """The mean of `losses.mean_squared_logarithmic_error`."""

    _of = staticmethod(losses.mean_squared_logarithmic_error)


class LogCoshError(MeanOf):
    """The mean of `losses.log_cosh`."""

    _of = staticmethod(losses.log_cosh)
    _called = "logcosh"


class Hinge(MeanOf):
    """The mean of `losses.hinge`."""

    _of = staticmethod(losses.hinge)


class SquaredHinge(MeanOf):
    """The mean of `losses.squared_hinge`."""

    _of = staticmethod(losses.squared_hinge)


class CategoricalHinge(MeanOf):
    """The mean of `losses.categorical_hinge`."""

    _of = staticmethod(losses.categorical_hinge)


class CosineSimilarity(MeanMetricWrapper):
    """The mean cosine of the angle between vectors; the loss of the same name is its negative."""

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
        """Add a batch; parameters as for `MeanMetricWrapper.update_state`."""
        true, predicted = matched(y_true, y_pred)
        super().update_state(ops.squared_difference(predicted, true), sample_weight)

    def result(self) -> Tensor:
        total, count = as_tensor(self.total).array, as_tensor(self.count).array
        return ops.sqrt(ratio(total, count))
