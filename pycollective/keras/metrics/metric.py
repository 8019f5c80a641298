"""Metrics, under the names of ``tf.keras.metrics``.

A metric keeps running sums. Under a strategy each replica has its own sums, and `Metric.result`
adds them up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from pycollective.array_backend import Array
from pycollective.distribute.context import current_mode
from pycollective.dtypes import as_dtype
from pycollective.keras import initializers, losses
from pycollective.keras.backend import find, floatx, name_of_class, unique_name
from pycollective.keras.losses import broadcast_weights, matched
from pycollective.tensor import (
    Tensor,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    as_tensor,
)
from pycollective.train.trackable import Trackable

__all__ = [
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "Mean",
    "MeanMetricWrapper",
    "Metric",
    "SparseCategoricalAccuracy",
    "Sum",
    "accuracy",
    "binary_accuracy",
    "categorical_accuracy",
    "get",
    "sparse_categorical_accuracy",
]


class Metric(Trackable):
    """Base class of metrics.

    One of your own makes its sums with `add_weight`, and overrides `update_state` and `result`.

    Parameters
    ----------
    name
        By default the class's name with a number.
    dtype
        Of the sums and the result; by default ``floatx()``.
    """

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        self.name = unique_name(name_of_class(type(self))) if name is None else str(name)
        self._dtype = as_dtype(floatx() if dtype is None else dtype)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "result" in cls.__dict__:
            type.__setattr__(cls, "result", _for_all_replicas(cls.result))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the sums and the result."""
        return self._dtype

    def add_weight(
        self, name: str, shape: Any = (), initializer: Any = "zeros", dtype: Any = None
    ) -> Variable:
        """Make a variable whose value is the sum of the replicas' values."""
        sizes = tuple(int(n) for n in shape)
        kind = self._dtype if dtype is None else as_dtype(dtype)
        start = initializers.get(initializer)
        assert start is not None
        return self._new_variable(
            name,
            lambda: start(sizes, kind),
            label=f"{self.name}/{name}",
            shape=sizes,
            dtype=kind,
            trainable=False,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Take values in; in a replica, into that replica's sums."""
        raise NotImplementedError(f"{type(self).__name__} must override update_state()")

    def result(self) -> Tensor:
        """Return the metric of all that was taken in, by all replicas.

        In a replica function every replica must make the call.
        """
        raise NotImplementedError(f"{type(self).__name__} must override result()")

    def reset_state(self) -> None:
        """Forget what was taken in, in every replica."""
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))

    def reset_states(self) -> None:
        """Do what `reset_state` does; the older name."""
        self.reset_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Do `update_state`, and return the `result`."""
        self.update_state(*args, **kwargs)
        return self.result()

    @property
    def variables(self) -> list[Variable]:
        """The sums."""
        return list(self._variables.values())

    weights = variables

    def __repr__(self) -> str:
        return f"<{type(self).__name__} name={self.name}>"


def _for_all_replicas(result: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Let a ``result`` that is called in a replica be computed from all replicas' sums."""

    @functools.wraps(result)
    def merged(self: Metric) -> Tensor:
        mode = current_mode()
        context = None if mode is None else mode.replica_context
        if context is None or context.num_replicas_in_sync == 1:
            return result(self)
        value: Tensor = context.merge_call(lambda _strategy: result(self))
        return value

    return merged


class Sum(Metric):
    """The sum of the values, each times its weight."""

    def __init__(self, name: str | None = "sum", dtype: Any = None) -> None:
        super().__init__(name, dtype)
        self.total = self.add_weight("total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values.

        Parameters
        ----------
        values
            Any shape.
        sample_weight
            A weight for each, for each example (first axis), or for all.
        """
        total, _ = _weighted_sum(values, sample_weight, self._dtype)
        add_to_sum(self.total, total)

    def result(self) -> Tensor:
        """Return the sum: a scalar."""
        return as_tensor(self.total)


class Mean(Metric):
    """The weighted mean of the values; 0 before there are any.

    Parameters
    ----------
    name, dtype
        As for `Metric`.
    """

    def __init__(self, name: str | None = "mean", dtype: Any = None) -> None:
        super().__init__(name, dtype)
        self.total = self.add_weight("total")
        self.count = self.add_weight("count")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Take values in; parameters as those of `Sum.update_state`."""
        total, count = _weighted_sum(values, sample_weight, self._dtype)
        add_to_sum(self.total, total)
        add_to_sum(self.count, count)

    def result(self) -> Tensor:
        """Return the mean: a scalar."""
        total, count = as_tensor(self.total).array, as_tensor(self.count).array
        return Tensor(np.asarray(total / count if count != 0 else np.zeros_like(total)))


class MeanMetricWrapper(Mean):
    """The mean of a function of what should come out and what did.

    Parameters
    ----------
    fn
        ``fn(y_true, y_pred, **kwargs)`` returns a value for each example.
    name, dtype
        As for `Metric`.
    **kwargs
        Further arguments of ``fn``.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(getattr(fn, "__name__", "mean") if name is None else name, dtype)
        self._fn = fn
        self._fn_kwargs = kwargs

    def update_state(  # type: ignore[override]
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> None:
        """Take a batch in.

        Parameters
        ----------
        y_true
            What should come out.
        y_pred
            What came out.
        sample_weight
            A weight for each example.
        """
        super().update_state(self._fn(y_true, y_pred, **self._fn_kwargs), sample_weight)


class SparseCategoricalAccuracy(MeanMetricWrapper):
    """How often the class with the largest prediction is the label."""

    def __init__(self, name: str | None = "sparse_categorical_accuracy", dtype: Any = None) -> None:
        super().__init__(sparse_categorical_accuracy, name, dtype)


class CategoricalAccuracy(MeanMetricWrapper):
    """How often the largest prediction stands where the largest of ``y_true`` does."""

    def __init__(self, name: str | None = "categorical_accuracy", dtype: Any = None) -> None:
        super().__init__(categorical_accuracy, name, dtype)


class BinaryAccuracy(MeanMetricWrapper):
    """How often a prediction is on the right side of ``threshold``."""

    def __init__(
        self,
        name: str | None = "binary_accuracy",
        dtype: Any = None,
        threshold: float = 0.5,
    ) -> None:
        super().__init__(binary_accuracy, name, dtype, threshold=float(threshold))


def sparse_categorical_accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return for each example whether its label has the largest prediction.

    Parameters
    ----------
    y_true
        Class numbers, of the shape of ``y_pred`` without its last axis (or with 1 there).
    y_pred
        ``[..., classes]``.

    Raises
    ------
    ValueError
        If the shapes do not fit.
    """
    labels, predicted = as_tensor(y_true).array, as_tensor(y_pred).array
    if labels.ndim == predicted.ndim and labels.ndim > 0 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if labels.shape != predicted.shape[:-1]:
        raise ValueError(
            f"labels of shape {labels.shape} do not fit predictions of shape {predicted.shape}: "
            "one label for each row of predictions is needed"
        )
    return Tensor(np.asarray(predicted.argmax(axis=-1) == labels))


def categorical_accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return for each example whether the largest prediction stands in the right place."""
    true, predicted = matched(y_true, y_pred)
    return Tensor(np.asarray(predicted.array.argmax(axis=-1) == true.array.argmax(axis=-1)))


def binary_accuracy(y_true: Any, y_pred: Any, threshold: float = 0.5) -> Tensor:
    """Return for each example the share of predictions on the right side of ``threshold``."""
    true, predicted = matched(y_true, y_pred)
    right = (predicted.array > threshold) == (true.array > 0.5)
    if not right.ndim or not right.shape[-1]:
        return Tensor(np.asarray(right))
    return Tensor(np.asarray(right.mean(axis=-1, dtype=predicted.dtype)))


def accuracy(y_true: Any, y_pred: Any) -> Tensor:
    """Return for each example whether the prediction is right; shapes tell what is meant.

    One prediction for each example is `binary_accuracy`, one label for several predictions
    `sparse_categorical_accuracy`, everything else `categorical_accuracy`.
    """
    true, predicted = np.shape(as_tensor(y_true).array), np.shape(as_tensor(y_pred).array)
    if len(predicted) < 2 or predicted[-1] == 1:
        return binary_accuracy(y_true, y_pred)
    if len(true) < len(predicted) or true[-1] == 1:
        return sparse_categorical_accuracy(y_true, y_pred)
    return categorical_accuracy(y_true, y_pred)


def _weighted_sum(values: Any, sample_weight: Any, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the sum of values times weights, and the sum of the weights."""
    array = as_tensor(values).array
    if sample_weight is None:
        return array.sum(dtype=dtype), np.asarray(array.size, dtype)
    value = Tensor(array.astype(dtype))
    weights = np.broadcast_to(broadcast_weights(sample_weight, value).array, array.shape)
    return (value.array * weights).sum(dtype=dtype), weights.sum(dtype=dtype)


def add_to_sum(variable: Variable, amount: Array) -> None:
    """Add to a sum: to this replica's, or outside of the replicas to the first one's."""
    mode = current_mode()
    inside = mode is not None and mode.replica_context is not None
    target = variable._local() if inside else getattr(variable, "values", (variable,))[0]
    target.assign_add(amount)


#: Losses whose mean is a metric.
_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": losses.mean_squared_error,
    "mae": losses.mean_absolute_error,
    "mean_squared_error": losses.mean_squared_error,
    "mean_absolute_error": losses.mean_absolute_error,
    "binary_crossentropy": losses.binary_crossentropy,
    "categorical_crossentropy": losses.categorical_crossentropy,
    "sparse_categorical_crossentropy": losses.sparse_categorical_crossentropy,
}

_KNOWN: dict[str, Any] = {
    "sparse_categorical_accuracy": SparseCategoricalAccuracy,
    "categorical_accuracy": CategoricalAccuracy,
    "binary_accuracy": BinaryAccuracy,
    "accuracy": functools.partial(MeanMetricWrapper, accuracy, "accuracy"),
    "acc": functools.partial(MeanMetricWrapper, accuracy, "acc"),
    **{name: functools.partial(MeanMetricWrapper, fn, name) for name, fn in _LOSSES.items()},
    "SparseCategoricalAccuracy": SparseCategoricalAccuracy,
    "CategoricalAccuracy": CategoricalAccuracy,
    "BinaryAccuracy": BinaryAccuracy,
    "mean": Mean,
    "sum": Sum,
    "Mean": Mean,
    "Sum": Sum,
}


def get(identifier: Any) -> Any:
    """Return a metric: itself, or one by its name.

    Raises
    ------
    ValueError
        For an unknown name, or what is neither a name nor callable.
    """
    if isinstance(identifier, str):
        return find("metric", _KNOWN, identifier)()
    if identifier is None or callable(identifier):
        return identifier
    raise ValueError(f"{identifier!r} is no metric; give a name or a Metric")
