"""`Metric`: running sums, one set for each replica, which `Metric.result` adds up."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from pycollective.array_backend import Array, beside, on_host
from pycollective.distribute.context import current_mode
from pycollective.dtypes import as_dtype
from pycollective.keras import initializers
from pycollective.keras.backend import floatx, name_of_class, unique_name
from pycollective.keras.configs import Kind
from pycollective.keras.copying import CopiedByConfig
from pycollective.keras.losses.loss import broadcast_weights
from pycollective.tensor import (
    Tensor,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    as_tensor,
)
from pycollective.tensor.variable import update_together
from pycollective.train.trackable import Trackable, parts_of

#: The metrics and metric functions by name, to which `pycollective.keras.metrics` adds its own.
METRICS = Kind("metric", {}, "a Metric")


class Metric(CopiedByConfig, Trackable):
    """Base class of metrics.

    A subclass makes its sums with `add_weight`, and overrides `update_state` and `result`.
    `reset_state` also resets attributes that are metrics, or lists, tuples and dicts of metrics.

    Parameters
    ----------
    dtype
        The dtype of the sums and the result; the default is ``floatx()``.
    name : str, optional
        The name; the default is the class's name with a number.
    """

    #: ``"up"`` if larger is better, ``"down"`` if smaller is better; for callbacks.
    direction: str | None = None

    def __init__(self, dtype: Any = None, name: str | None = None) -> None:
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

    def add_variable(
        self,
        shape: Any,
        initializer: Any = "zeros",
        dtype: Any = None,
        aggregation: str = "sum",
        name: str | None = None,
    ) -> Variable:
        """Make a variable whose value is the sum of the replicas' values.

        Parameters
        ----------
        shape
            The shape.
        dtype
            The dtype; the default is the metric's.
        initializer
            The initializer of the value.
        aggregation : str
            Must be ``"sum"``.
        name : str, optional
            The variable's name inside the metric.

        Raises
        ------
        ValueError
            ``aggregation`` has another value.
        """
        if aggregation != "sum":
            raise ValueError(
                f"metric {self.name!r}: aggregation must be 'sum', got {aggregation!r}: results are "
                "computed from the sums of the replicas' variables"
            )
        name = "variable" if name is None else name
        sizes = tuple(int(n) for n in shape)
        kind = self._dtype if dtype is None else as_dtype(dtype)
        start = initializers.get("zeros" if initializer is None else initializer)
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

    def add_weight(
        self,
        shape: Any = (),
        initializer: Any = "zeros",
        dtype: Any = None,
        name: str | None = None,
    ) -> Variable:
        """Make a variable; parameters as for `add_variable`."""
        return self.add_variable(shape, initializer, dtype, name=name)

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add values; in a replica, to that replica's sums."""
        raise NotImplementedError(f"{type(self).__name__} must override update_state()")

    def result(self) -> Tensor:
        """Return the metric over all values that all replicas have added.

        In a replica function, every replica must make this call.
        """
        raise NotImplementedError(f"{type(self).__name__} must override result()")

    def reset_state(self) -> None:
        """Set the sums to zero in every replica, and reset nested metrics."""
        for part in self._parts():
            if isinstance(part, Metric):
                part.reset_state()
            else:
                part.assign(np.zeros(part.shape, part.dtype))

    def reset_states(self) -> None:
        """Call `reset_state`, under its older name."""
        self.reset_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call `update_state`, and return the `result`."""
        self.update_state(*args, **kwargs)
        return self.result()

    def _parts(self) -> list[Variable | Metric]:
        """Return the metric's own variables and its direct nested metrics, each once."""
        found = {id(part): part for part in parts_of(self)}
        parts = [part for part in found.values() if isinstance(part, (Variable, Metric))]
        for part in parts:
            if isinstance(part, Variable) and _loses_counts(part):
                raise ValueError(
                    f"metric {self.name!r} has the variable {part.name!r} with aggregation NONE: each "
                    "replica would add to its own copy, and only the first copy would be read. "
                    "Make the variable with add_weight()"
                )
        return parts

    @property
    def variables(self) -> list[Variable]:
        """The metric's own variables, then the variables of nested metrics."""
        parts = self._parts()
        own = [part for part in parts if isinstance(part, Variable)]
        inside = [v for part in parts if isinstance(part, Metric) for v in part.variables]
        return list({id(variable): variable for variable in [*own, *inside]}.values())

    weights = variables

    def _beside_sums(self) -> AbstractContextManager[Any]:
        """Return a context that computes the result on the device of the sums."""
        first = next(iter(self._variables.values()), None)
        if first is None:
            return nullcontext()
        copy = first.values[0] if hasattr(first, "values") else first
        return beside(copy.current().array)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"name": self.name, "dtype": str(self._dtype)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Return the metric from the result of `get_config`."""
        return cls(**config)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} name={self.name}>"


def _loses_counts(variable: Variable) -> bool:
    """Return True if reading a variable does not sum the replicas' copies."""
    strategy = variable.distribute_strategy
    return (
        strategy is not None
        and strategy.num_replicas_in_sync > 1
        and variable.aggregation is VariableAggregation.NONE
        and variable.synchronization is not VariableSynchronization.ON_READ
    )


def _for_all_replicas(result: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Wrap a ``result`` method so that a call in a replica uses the sums of all replicas."""

    @functools.wraps(result)
    def merged(self: Metric) -> Tensor:
        mode = current_mode()
        context = None if mode is None else mode.replica_context
        if context is None or context.num_replicas_in_sync == 1:
            with self._beside_sums():
                return result(self)
        value: Tensor = context.merge_call(lambda _strategy: result(self))
        return value

    return merged


class Sum(Metric):
    """The sum of the values, each times its weight."""

    def __init__(self, name: str | None = "sum", dtype: Any = None) -> None:
        super().__init__(dtype=dtype, name=name)
        self.total = self.add_weight(name="total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values.

        Parameters
        ----------
        values
            Values of any shape.
        sample_weight
            A weight for each value, for each example (first axis), or for all.
        """
        total, _ = _weighted_sum(values, sample_weight, self._dtype)
        add_to_sums((self.total,), (total,))

    def result(self) -> Tensor:
        return as_tensor(self.total)


class Mean(Metric):
    """The weighted mean of the values; 0 without values.

    Parameters
    ----------
    name, dtype
        As for `Metric`.
    """

    def __init__(self, name: str | None = "mean", dtype: Any = None) -> None:
        super().__init__(dtype=dtype, name=name)
        self.total = self.add_weight(name="total")
        self.count = self.add_weight(name="count")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values; parameters as for `Sum.update_state`.

        Several values of an example count as their mean, as in Keras 3. With a single weight, all
        values count as their mean.
        """
        values = as_tensor(values)
        total, count = _weighted_sum(values, sample_weight, self._dtype)
        shape = values.array.shape
        one_weight = sample_weight is not None and not as_tensor(sample_weight).ndim
        each = math.prod(shape if one_weight else shape[1:])
        if each > 1:
            total, count = total / total.dtype.type(each), count / each
        add_to_sums((self.total, self.count), (total, count))

    def result(self) -> Tensor:
        total, count = as_tensor(self.total).array, as_tensor(self.count).array
        return Tensor(ratio(total, count))


class MeanMetricWrapper(Mean):
    """The mean of a function of targets and predictions.

    Parameters
    ----------
    fn : callable
        A function ``fn(y_true, y_pred, **kwargs)`` that returns a value for each example.
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
        name = getattr(fn, "__name__", "mean").strip("<>") if name is None else name
        super().__init__(name, dtype)
        self._fn = fn
        self._fn_kwargs = kwargs

    def update_state(  # type: ignore[override]
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> None:
        """Add a batch.

        Parameters
        ----------
        y_true
            Targets.
        y_pred
            Predictions.
        sample_weight
            A weight for each example.
        """
        super().update_state(self._fn(y_true, y_pred, **self._fn_kwargs), sample_weight)

    def get_config(self) -> dict[str, Any]:
        own = {"fn": METRICS.serialize(self._fn)} if type(self) is MeanMetricWrapper else {}
        return {**super().get_config(), **own, **self._fn_kwargs}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        arguments = dict(config)
        if "fn" in arguments:
            arguments["fn"] = METRICS.deserialize(arguments["fn"])
        return cls(**arguments)


class MeanOf(MeanMetricWrapper):
    """Base of the means of a fixed function of targets and predictions."""

    direction = "down"
    #: The function, and the metric's name if it differs from the function's.
    _of: Callable[..., Any]
    _called: str | None = None

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(type(self)._of, self._called if name is None else name, dtype)


def _weighted_sum(
    values: Any, sample_weight: Any, dtype: np.dtype[Any]
) -> tuple[Array, Array | float]:
    """Return the sum of values times weights, and the sum of the weights."""
    array = as_tensor(values).array
    if sample_weight is None:
        return array.sum(dtype=dtype), float(array.size)
    value = Tensor(array.astype(dtype))
    weights = np.broadcast_to(broadcast_weights(sample_weight, value).array, array.shape)
    return (value.array * weights).sum(dtype=dtype), weights.sum(dtype=dtype)


def ratio(numerator: Array, denominator: Array) -> Array:
    """Return the quotient, or 0 where the denominator is 0."""
    if not numerator.ndim and not denominator.ndim and on_host(denominator):
        # Ufuncs of scalars take several times as long as a division of scalars.
        one, other = numerator[()], denominator[()]
        return np.asarray(one / other if other else 0, numerator.dtype)
    nothing = denominator == 0
    return np.where(nothing, 0, numerator / np.where(nothing, 1, denominator)).astype(
        numerator.dtype, copy=False
    )


def add_to_sums(variables: Sequence[Variable], amounts: Sequence[Array | float]) -> None:
    """Add amounts to this replica's sums, or outside of the replicas to the first replica's.

    Adding a float copies nothing to the device.
    """
    mode = current_mode()
    inside = mode is not None and mode.replica_context is not None
    targets = [v.local() if inside else getattr(v, "values", (v,))[0] for v in variables]
    fitting = [
        amount if isinstance(amount, (float, np.generic)) else target.checked(amount, "assign_add")
        for target, amount in zip(targets, amounts, strict=True)
    ]

    def add(arrays: list[Array]) -> None:
        for total, amount in zip(arrays, fitting, strict=True):
            if total.ndim or not on_host(total):
                with beside(total):
                    np.add(total, amount, out=total)
            else:
                # A scalar addition is faster than a ufunc, whose code has left the caches by now.
                total[()] = total[()] + total.dtype.type(amount)

    update_together(targets, add)
