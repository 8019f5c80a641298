"""Losses as objects: functions with fixed arguments and a reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pycollective.keras.losses import functions
from pycollective.keras.losses.loss import LOSSES, Loss, Reduction
from pycollective.tensor import Tensor

__all__ = [
    "BinaryCrossentropy",
    "CategoricalCrossentropy",
    "CategoricalHinge",
    "CosineSimilarity",
    "Hinge",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "LossFunctionWrapper",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "SparseCategoricalCrossentropy",
    "SquaredHinge",
]

_AVERAGE = Reduction.SUM_OVER_BATCH_SIZE


class LossFunctionWrapper(Loss):
    """A loss made from a function with fixed arguments.

    Parameters
    ----------
    fn : callable
        A function ``fn(y_true, y_pred, **kwargs)`` that returns a value for each example.
    reduction, name, dtype
        As for `Loss`.
    **kwargs
        Further arguments of ``fn``.
    """

    def __init__(
        self,
        fn: Callable[..., Tensor],
        reduction: Any = _AVERAGE,
        name: str | None = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name, reduction, dtype)
        self.fn = fn
        # This package's functions convert labels themselves, because class numbers must stay integers.
        known = getattr(fn, "__module__", None) == functions.__name__
        self._takes_any_labels = known and type(self).call is LossFunctionWrapper.call
        self._settings = kwargs

    def call(self, y_true: Any, y_pred: Any) -> Tensor:
        return self.fn(y_true, y_pred, **self._settings)

    def get_config(self) -> dict[str, Any]:
        own = {} if isinstance(self, _LossOf) else {"fn": LOSSES.serialize(self.fn)}
        return {**super().get_config(), **own, **self._settings}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        arguments = dict(config)
        if "fn" in arguments:
            arguments["fn"] = LOSSES.deserialize(arguments["fn"])
        return cls(**arguments)


class _LossOf(LossFunctionWrapper):
    """Base of the losses whose function is fixed, with the function's name as the default name."""

    #: The function.
    _of: Callable[..., Tensor]

    def __init__(
        self, reduction: Any = _AVERAGE, name: str | None = None, dtype: Any = None, **kwargs: Any
    ) -> None:
        function = type(self)._of
        super().__init__(
            function, reduction, function.__name__ if name is None else name, dtype, **kwargs
        )


class SparseCategoricalCrossentropy(_LossOf):
    """`sparse_categorical_crossentropy` as a loss."""

    _of = staticmethod(functions.sparse_categorical_crossentropy)

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        reduction: Any = _AVERAGE,
        axis: int = -1,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            reduction,
            name,
            dtype,
            from_logits=bool(from_logits),
            ignore_class=ignore_class,
            axis=axis,
        )


class _Smoothed(_LossOf):
    """Base of the cross-entropies whose labels can be smoothed."""

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: Any = _AVERAGE,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            reduction,
            name,
            dtype,
            from_logits=bool(from_logits),
            label_smoothing=float(label_smoothing),
            axis=axis,
        )


class CategoricalCrossentropy(_Smoothed):
    """`categorical_crossentropy` as a loss."""

    _of = staticmethod(functions.categorical_crossentropy)


class BinaryCrossentropy(_Smoothed):
    """`binary_crossentropy` as a loss."""

    _of = staticmethod(functions.binary_crossentropy)


class Huber(_LossOf):
    """`huber` as a loss."""

    _of = staticmethod(functions.huber)

    def __init__(
        self,
        delta: float = 1.0,
        reduction: Any = _AVERAGE,
        name: str | None = "huber_loss",
        dtype: Any = None,
    ) -> None:
        super().__init__(reduction, name, dtype, delta=float(delta))


class CosineSimilarity(_LossOf):
    """`cosine_similarity` as a loss."""

    _of = staticmethod(functions.cosine_similarity)

    def __init__(
        self,
        axis: int = -1,
        reduction: Any = _AVERAGE,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(reduction, name, dtype, axis=axis)


class MeanSquaredError(_LossOf):
    """`mean_squared_error` as a loss."""

    _of = staticmethod(functions.mean_squared_error)


class MeanAbsoluteError(_LossOf):
    """`mean_absolute_error` as a loss."""

    _of = staticmethod(functions.mean_absolute_error)


class MeanAbsolutePercentageError(_LossOf):
    """`mean_absolute_percentage_error` as a loss."""

    _of = staticmethod(functions.mean_absolute_percentage_error)


class MeanSquaredLogarithmicError(_LossOf):
    """`mean_squared_logarithmic_error` as a loss."""

    _of = staticmethod(functions.mean_squared_logarithmic_error)


class LogCosh(_LossOf):
    """`log_cosh` as a loss."""

    _of = staticmethod(functions.log_cosh)


class KLDivergence(_LossOf):
    """`kl_divergence` as a loss."""

    _of = staticmethod(functions.kl_divergence)


class Poisson(_LossOf):
    """`poisson` as a loss."""

    _of = staticmethod(functions.poisson)


class Hinge(_LossOf):
    """`hinge` as a loss."""

    _of = staticmethod(functions.hinge)


class SquaredHinge(_LossOf):
    """`squared_hinge` as a loss."""

    _of = staticmethod(functions.squared_hinge)


class CategoricalHinge(_LossOf):
    """`categorical_hinge` as a loss."""

    _of = staticmethod(functions.categorical_hinge)
