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
        own = {} if isinstance(self, _Known) else {"fn": LOSSES.serialize(self.fn)}
        return {**super().get_config(), **own, **self._settings}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        arguments = dict(config)
        if "fn" in arguments:
            arguments["fn"] = LOSSES.deserialize(arguments["fn"])
        return cls(**arguments)


class _Known(LossFunctionWrapper):
    """Base of the losses of a fixed function."""

    #: The function, whose name is also the loss's name.
    _of: Callable[..., Tensor]

    def __init__(
        self, reduction: Any = _AVERAGE, name: str | None = None, dtype: Any = None, **kwargs: Any
    ) -> None:
        function = type(self)._of
        super().__init__(
            function, reduction, function.__name__ if name is None else name, dtype, **kwargs
        )


class SparseCategoricalCrossentropy(_Known):
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


class CategoricalCrossentropy(_Known):
    """`categorical_crossentropy` as a loss."""

    _of = staticmethod(functions.categorical_crossentropy)

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


class BinaryCrossentropy(_Known):
    """`binary_crossentropy` as a loss."""

    _of = staticmethod(functions.binary_crossentropy)

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


class Huber(_Known):
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


class CosineSimilarity(_Known):
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


class MeanSquaredError(_Known):
    """`mean_squared_error` as a loss."""

    _of = staticmethod(functions.mean_squared_error)


class MeanAbsoluteError(_Known):
    """`mean_absolute_error` as a loss."""

    _of = staticmethod(functions.mean_absolute_error)


class MeanAbsolutePercentageError(_Known):
    """`mean_absolute_percentage_error` as a loss."""

    _of = staticmethod(functions.mean_absolute_percentage_error)


class MeanSquaredLogarithmicError(_Known):
    """`mean_squared_logarithmic_error` as a loss."""

    _of = staticmethod(functions.mean_squared_logarithmic_error)


class LogCosh(_Known):
    """`log_cosh` as a loss."""

    _of = staticmethod(functions.log_cosh)


class KLDivergence(_Known):
    """`kl_divergence` as a loss."""

    _of = staticmethod(functions.kl_divergence)


class Poisson(_Known):
    """`poisson` as a loss."""

    _of = staticmethod(functions.poisson)


class Hinge(_Known):
    """`hinge` as a loss."""

    _of = staticmethod(functions.hinge)


class SquaredHinge(_Known):
    """`squared_hinge` as a loss."""

    _of = staticmethod(functions.squared_hinge)


class CategoricalHinge(_Known):
    """`categorical_hinge` as a loss."""

    _of = staticmethod(functions.categorical_hinge)
