"""What `Model.compile` keeps: losses and metrics of the outputs, and how steps are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.distribute.context import created_once, current_mode
from pycollective.distribute.strategy import Strategy
from pycollective.keras import losses, metrics
from pycollective.keras.losses.loss import Loss, Reduction, broadcast_weights, in_loss_dtype
from pycollective.keras.metrics.accuracies import accuracy_by_shape
from pycollective.keras.metrics.metric import Mean, MeanMetricWrapper, Metric, add_to_sums
from pycollective.keras.training.share import current_share, share_of
from pycollective.tensor import Tensor, as_tensor, ops

__all__ = ["Compiled", "LossTracker"]


class LossTracker(Mean):
    """The mean of a loss over all examples of an epoch, fed with each replica's summand of it."""

    def __init__(self, name: str = "loss") -> None:
        super().__init__(name, np.float64)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Take in what `Model.compute_loss` returned: in a step of `fit`, this replica's summand.

        Outside of one, and with weights, this is a `Mean`.
        """
        share = current_share()
        if share is None or sample_weight is not None:
            super().update_state(values, sample_weight)
            return
        summand = as_tensor(values).array.sum(dtype=self.dtype)
        add_to_sums((self.total, self.count), (summand * share.total, float(share.rows)))


@dataclass
class _Output:
    """What is asked of one output.

    Attributes
    ----------
    name
        None if there is only one.
    loss, weight
        A `Loss`, or a function whose values are averaged, or None; and by what it is multiplied.
    tracker
        Of this loss alone, if there are several.
    metrics, weighted_metrics
        Without, and with, the weights of the examples.
    """

    name: str | None
    loss: Any
    weight: float | None
    tracker: LossTracker | None
    metrics: list[Metric]
    weighted_metrics: list[Metric]

    @property
    def needs_target(self) -> bool:
        """Whether anything is compared with what should come out."""
        return self.loss is not None or bool(self.metrics or self.weighted_metrics)


@dataclass
class Compiled:
    """The settings of `Model.compile`.

    Which loss and metric belongs to which output is settled by the first outputs there are.

    Attributes
    ----------
    strategy
        That of the model.
    loss, loss_weights, metrics, weighted_metrics
        As given; names have become objects. For several outputs in a list, or by name.
    steps_per_execution
        How many steps the replicas make before callbacks hear of it.
    accumulate_steps
        How many batches make one step of the optimizer.
    output_names
        Of the model's outputs, if it knows.
    tracker
        Of the whole loss.
    """

    strategy: Strategy
    loss: Any
    loss_weights: Any
    metrics: Any
    weighted_metrics: Any
    steps_per_execution: int
    accumulate_steps: int
    output_names: Sequence[str] | None = None
    tracker: LossTracker = field(default_factory=LossTracker)
    _outputs: list[_Output] | None = None
    _reported: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loss = _mapped(loss_of, self.loss)
        self.metrics = _mapped(metric_of, self.metrics)
        self.weighted_metrics = _mapped(metric_of, self.weighted_metrics)

    # Metrics ---------------------------------------------------------------------------------

    @property
    def all_metrics(self) -> list[Metric]:
        """The tracker of the loss, those of the outputs' losses, and the metrics."""
        outputs = self._outputs or ()
        trackers = [output.tracker for output in outputs if output.tracker is not None]
        given = nest.flatten([self.metrics, self.weighted_metrics])
        return [self.tracker, *trackers, *(metric for metric in given if metric is not None)]

    def reported(self, metric: Metric) -> str:
        """Return under which name a metric is reported."""
        return self._reported.get(id(metric), metric.name)

    def update_metrics(self, y: Any, y_pred: Any, sample_weight: Any) -> None:
        """Take a replica's answers into the metrics."""
        if self.metrics is None and self.weighted_metrics is None:
            return
        for output, true, predicted, weight in self._each("metrics", y, y_pred, sample_weight):
            if not output.metrics and not output.weighted_metrics:
                continue
            pair = _target("metrics", true, predicted)
            for metric in output.metrics:
                metric.update_state(*pair)
            for metric in output.weighted_metrics:
                metric.update_state(*pair, weight)

    # Losses ----------------------------------------------------------------------------------

    def loss_shares(self, y: Any, y_pred: Any, sample_weight: Any) -> list[Tensor]:
        """Return a replica's summands of the losses of the global batch, times their weights.

        Parameters
        ----------
        y, y_pred
            What should come out for this replica's examples, and what did.
        sample_weight
            A weight for each example, or None. Weighted losses are divided by the number of
            examples, not by the sum of the weights, as Keras does.

        Raises
        ------
        ValueError
            If a ``y`` is missing, outputs and targets do not fit each other, or there is one loss
            for all examples and weights for each.
        """
        if self.loss is None:
            return []
        shares = []
        for output, true, predicted, weight in self._each("loss", y, y_pred, sample_weight):
            if output.loss is None:
                continue
            share = _loss_share(output.loss, true, predicted, weight)
            if output.tracker is not None:
                output.tracker.update_state(share)
            shares.append(share if output.weight is None else share * output.weight)
        return shares

    # Outputs ---------------------------------------------------------------------------------

    def _each(
        self, what: str, y: Any, y_pred: Any, sample_weight: Any
    ) -> list[tuple[_Output, Any, Any, Any]]:
        """Return each output with its targets, predictions and weights."""
        known = self._outputs
        plain = y_pred.__class__ is Tensor and y.__class__ is Tensor
        if plain and known and len(known) == 1 and sample_weight.__class__ in _ONE:
            # What most steps are.
            return [(known[0], y, y_pred, sample_weight)]
        names = self._names(y_pred)
        if self._outputs is None or len(self._outputs) != len(names):
            with self._scope(), created_once(self):
                if self._outputs is None or len(self._outputs) != len(names):
                    self._outputs = self._settled(names)
        if y is None and any(output.needs_target for output in self._outputs):
            raise ValueError(
                f"the compiled {what} needs what should come out: give y, or datasets of (x, y)"
            )
        several = nest.is_nested(sample_weight)
        return list(
            zip(
                self._outputs,
                _parts("y", _with_gaps(y, self._outputs), names),
                _parts("outputs", y_pred, names),
                _parts("sample_weight", sample_weight, names)
                if several
                else [sample_weight] * len(names),
                strict=True,
            )
        )

    def _scope(self) -> AbstractContextManager[Any]:
        return nullcontext() if current_mode() is not None else self.strategy.scope()

    def _names(self, y_pred: Any) -> list[str]:
        """Return the names of the outputs."""
        if isinstance(y_pred, Mapping):
            return [str(name) for name in y_pred]
        count = len(y_pred) if nest.is_nested(y_pred) else 1
        if self.output_names is not None and len(self.output_names) == count:
            return list(self.output_names)
        return [f"output_{number + 1}" for number in range(count)]

    def _settled(self, names: list[str]) -> list[_Output]:
        count = len(names)
        several = count > 1
        loss = self.loss
        if several and not nest.is_nested(loss):
            loss = [loss] * count
        each_loss = _parts("loss", loss, names)
        weights = _parts("loss_weights", self.loss_weights, names)
        if several:
            plain, weighted = (
                [_flat(part) for part in _parts(what, given, names)]
                for what, given in (
                    ("metrics", self.metrics),
                    ("weighted_metrics", self.weighted_metrics),
                )
            )
        else:
            plain, weighted = [_flat(self.metrics)], [_flat(self.weighted_metrics)]
        tracked = sum(one is not None for one in each_loss) > 1
        outputs = [
            _Output(
                name if several else None,
                each_loss[i],
                None if weights[i] is None else float(weights[i]),
                LossTracker(f"{name}_loss") if tracked and each_loss[i] is not None else None,
                plain[i],
                weighted[i],
            )
            for i, name in enumerate(names)
        ]
        self._name(outputs)
        return outputs

    def _name(self, outputs: list[_Output]) -> None:
        """Settle under which names metrics are reported: one for each."""
        self._reported.clear()
        taken: dict[str, int] = {}
        groups = [(output.name, output.metrics, "") for output in outputs]
        groups += [(output.name, output.weighted_metrics, "weighted_") for output in outputs]
        for output_name, group, prefix in groups:
            start = "" if output_name is None else f"{output_name}_"
            for metric in group:
                name = start + metric.name
                if prefix and name in taken:
                    name = f"{start}{prefix}{metric.name}"
                count = taken[name] = taken.get(name, -1) + 1
                self._reported[id(metric)] = f"{name}_{count}" if count else name


#: Kinds of weights that are no list of them.
_ONE = frozenset((type(None), Tensor))


def _parts(what: str, value: Any, names: list[str]) -> list[Any]:
    """Return what belongs to each output.

    Raises
    ------
    ValueError
        If the numbers or the names do not fit.
    """
    count = len(names)
    if value is None:
        return [None] * count
    if not nest.is_nested(value):
        if count == 1:
            return [value]
    elif count == 1 and len(value) == 1:
        return list(value.values() if isinstance(value, Mapping) else value)
    elif isinstance(value, Mapping):
        unknown = [name for name in value if name not in names]
        if not unknown:
            return [value.get(name) for name in names]
        raise ValueError(f"{what} names {unknown}; the outputs are {names}")
    elif len(value) == count:
        return list(value)
    got = f"{len(value)} in a {type(value).__name__}" if nest.is_nested(value) else "one"
    outputs = "one output" if count == 1 else f"{count} outputs ({', '.join(names)})"
    raise ValueError(f"the model has {outputs}, but of {what} there is {got}")


def _with_gaps(y: Any, outputs: list[_Output]) -> Any:
    """Return targets with None where an output has no loss, if they were given for the others only."""
    wanted = [output.loss is not None for output in outputs]
    given = list(y) if isinstance(y, (list, tuple)) else [y]
    if y is None or isinstance(y, Mapping) or len(given) in (0, len(outputs)):
        return y
    if len(given) != sum(wanted):
        return y
    targets = iter(given)
    return [next(targets) if needed else None for needed in wanted]


def _flat(given: Any) -> list[Any]:
    return [leaf for leaf in nest.flatten(given) if leaf is not None]


def _mapped(function: Callable[[Any], Any], given: Any) -> Any:
    """Apply a function to the leaves of a structure."""
    return None if given is None else nest.map_structure(function, given)


def _target(what: str, y: Any, y_pred: Any) -> tuple[Tensor, Tensor]:
    """Return what should come out and what did, in one dtype if both are floating-point numbers."""
    if y is None:
        raise ValueError(
            f"the compiled {what} needs what should come out: give y, or datasets of (x, y)"
        )
    if y_pred.__class__ is not Tensor and nest.is_nested(y_pred):
        raise ValueError(
            f"the compiled {what} takes a tensor for each output, got a {type(y_pred).__name__} in "
            "one of them; override compute_loss() and compute_metrics()"
        )
    true, predicted = as_tensor(y), in_loss_dtype(y_pred)
    floats = true.dtype.kind in "fV" and predicted.dtype.kind in "fV"
    if floats and true.dtype != predicted.dtype:
        true = ops.cast(true, predicted.dtype)
    return true, predicted


def _loss_share(loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> Tensor:
    """Return a replica's summand of one loss of the global batch."""
    true, predicted = _target("loss", y, y_pred)
    known = isinstance(loss, Loss)
    # Calling a Loss would average over this replica's examples only, which is why it refuses.
    values = loss.values(true, predicted) if known else as_tensor(loss(true, predicted))
    if sample_weight is not None:
        if not values.ndim:
            raise ValueError(
                "the examples have weights, but the compiled loss returns one number for all of them; "
                "it must return one for each"
            )
        values = values * broadcast_weights(sample_weight, values)
    total = ops.reduce_sum(values)
    if known and loss.reduction is Reduction.SUM:
        return total
    return share_of(total / float(max(1, math.prod(values.shape))))


def metric_of(identifier: Any) -> Metric | None:
    """Return a metric by its name, of a function of (y_true, y_pred), or as it is.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if isinstance(identifier, str) and identifier.lower() in ("accuracy", "acc"):
        return MeanMetricWrapper(accuracy_by_shape, identifier)
    found = metrics.get(identifier)
    if found is None:
        return None
    metric = found if isinstance(found, Metric) else MeanMetricWrapper(found)
    if isinstance(identifier, str):
        metric.name = identifier
    return metric


def loss_of(identifier: Any) -> Any:
    """Return a loss by its name, or as it is; ``"crossentropy"`` is the kind that shapes suggest."""
    if isinstance(identifier, str) and identifier.lower() in ("crossentropy", "ce"):
        return _crossentropy
    return losses.get(identifier)


def _crossentropy(y_true: Tensor, y_pred: Tensor) -> Tensor:
    if y_pred.shape[-1] == 1:
        return losses.binary_crossentropy(y_true, y_pred)
    if y_true.ndim < y_pred.ndim or y_true.shape[-1] == 1:
        return losses.sparse_categorical_crossentropy(y_true, y_pred)
    return losses.categorical_crossentropy(y_true, y_pred)
