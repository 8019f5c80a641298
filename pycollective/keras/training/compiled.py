"""The settings of `Model.compile`: losses and metrics of the outputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.distribute.context import created_once, current_mode
from pycollective.distribute.strategy import Strategy
from pycollective.keras import losses, metrics
from pycollective.keras.losses.functions import crossentropy_by_shape
from pycollective.keras.losses.loss import (
    Loss,
    Reduction,
    averages_of_replicas,
    broadcast_weights,
    in_loss_dtype,
)
from pycollective.keras.losses.objects import LossFunctionWrapper
from pycollective.keras.metrics.accuracies import accuracy_by_shape
from pycollective.keras.metrics.metric import Mean, MeanMetricWrapper, Metric, add_to_sums
from pycollective.keras.training.outputs import names_of, parts_of, with_missing_targets
from pycollective.keras.training.share import current_share, share_of
from pycollective.tensor import Tensor, as_tensor, ops
from pycollective.tensor.ops.reductions import sum_over


class LossTracker(Mean):
    """The mean of a loss over all examples of an epoch, from the replicas' loss shares."""

    def __init__(self, name: str = "loss") -> None:
        super().__init__(name, np.float64)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add the result of `Model.compute_loss`, which is this replica's share of the loss.

        Outside of a model's steps, and with weights, update like `Mean`.
        """
        share = current_share()
        if share is None or sample_weight is not None:
            super().update_state(values, sample_weight)
            return
        summand = as_tensor(values).array.sum(dtype=self.dtype)
        add_to_sums((self.total, self.count), (summand * share.total, float(share.rows)))


@dataclass
class _Term:
    """A loss of an output, with its weight or None, and its tracker if there are several losses."""

    loss: Loss
    weight: float | None
    tracker: LossTracker | None = None


@dataclass
class _Output:
    """The losses and metrics of one output; the name of a model's only output is None."""

    name: str | None
    losses: list[_Term]
    metrics: list[Metric]
    weighted_metrics: list[Metric]

    @property
    def needs_target(self) -> bool:
        """True if a loss or metric compares this output with a target."""
        return bool(self.losses or self.metrics or self.weighted_metrics)


@dataclass
class Compiled:
    """The settings of `Model.compile`, with objects in the place of names.

    The losses and metrics are assigned to the outputs in the first step, when the structure of the
    outputs is known. ``output_names`` are the names of the layers that compute the outputs, in the
    outputs' structure, or None if unknown. ``tracker`` is the tracker of the total loss.
    """

    strategy: Strategy
    loss: Any
    loss_weights: Any
    metrics: Any
    weighted_metrics: Any
    steps_per_execution: int
    accumulate_steps: int
    output_names: Any = None
    tracker: LossTracker = field(default_factory=LossTracker)
    _outputs: list[_Output] | None = None
    #: The outputs' names in the structure and order of ``_outputs``.
    _names: Any = None
    _reported: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loss = _mapped(loss_of, self.loss)
        self.metrics = _mapped(metric_of, self.metrics)
        self.weighted_metrics = _mapped(metric_of, self.weighted_metrics)

    # Metrics ---------------------------------------------------------------------------------

    @property
    def all_metrics(self) -> list[Metric]:
        """The tracker of the total loss, those of the outputs' losses, and each output's metrics."""
        outputs = self._outputs or ()
        terms = [term for output in outputs for term in output.losses]
        trackers = [term.tracker for term in terms if term.tracker is not None]
        by_output = [(output.metrics, output.weighted_metrics) for output in outputs]
        return [self.tracker, *trackers, *_flat(by_output or [self.metrics, self.weighted_metrics])]

    def reported(self, metric: Metric) -> str:
        """Return a metric's name in logs."""
        return self._reported.get(id(metric), metric.name)

    def update_metrics(self, y: Any, y_pred: Any, sample_weight: Any) -> None:
        """Update the metrics with a replica's predictions."""
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
        """Return a replica's shares of the global batch's losses, times their ``loss_weights``.

        As in Keras, a loss with sample weights is divided by the number of examples, not by the sum of
        the weights. Raise ``ValueError`` if ``y`` is missing or does not fit the outputs. Also raise
        it if examples have weights, but the loss returns one number for all of them.
        """
        if self.loss is None:
            return []
        shares = []
        for output, true, predicted, weight in self._each("loss", y, y_pred, sample_weight):
            for term in output.losses:
                share = _loss_share(term.loss, true, predicted, weight)
                if term.tracker is not None:
                    term.tracker.update_state(share)
                shares.append(share if term.weight is None else share * term.weight)
        return shares

    # Outputs ---------------------------------------------------------------------------------

    def _each(
        self, what: str, y: Any, y_pred: Any, sample_weight: Any
    ) -> list[tuple[_Output, Any, Any, Any]]:
        """Return each output with its targets, predictions and weights."""
        known = self._outputs
        plain = y_pred.__class__ is Tensor and y.__class__ is Tensor
        if plain and known and len(known) == 1 and sample_weight.__class__ in _SINGLE_WEIGHT_TYPES:
            # The common case: one output whose losses and metrics are known.
            return [(known[0], y, y_pred, sample_weight)]
        names = names_of(y_pred, self.output_names)
        count = len(nest.flatten(names))
        if self._outputs is None or len(self._outputs) != count:
            with self._scope(), created_once(self):
                if self._outputs is None or len(self._outputs) != count:
                    self._names = names
                    self._outputs = self._outputs_of(names)
        if nest.flatten(names) != nest.flatten(self._names):  # a dict in another order
            y_pred = nest.map_structure(lambda _, part: part, self._names, y_pred)
            names = self._names
        if y is None and any(output.needs_target for output in self._outputs):
            raise ValueError(f"the compiled {what} needs targets: give y, or datasets of (x, y)")
        if nest.is_nested(sample_weight):
            weights = parts_of("sample_weight", sample_weight, names)
        else:
            weights = [sample_weight] * count
        targets = parts_of(
            "y", with_missing_targets(y, [bool(o.losses) for o in self._outputs]), names
        )
        return list(zip(self._outputs, targets, nest.flatten(y_pred), weights, strict=True))

    def _scope(self) -> AbstractContextManager[Any]:
        return nullcontext() if current_mode() is not None else self.strategy.scope()

    def _outputs_of(self, names: Any) -> list[_Output]:
        leaves = nest.flatten(names)
        several = len(leaves) > 1
        loss = [self.loss] * len(leaves)
        if not several or nest.is_nested(self.loss):
            loss = parts_of("loss", self.loss, names, lists=True)
        factors = parts_of("loss_weights", self.loss_weights, names, lists=True)
        terms = [
            _terms(name, each, factor)
            for name, each, factor in zip(leaves, loss, factors, strict=True)
        ]
        given = [self.metrics, self.weighted_metrics]
        if several:
            plain, weighted = (
                [_flat(part) for part in parts_of(what, each, names, lists=True)]
                for what, each in zip(("metrics", "weighted_metrics"), given, strict=True)
            )
        else:
            plain, weighted = ([_flat(each)] for each in given)
        if sum(map(len, terms)) > 1:
            for name, group in zip(leaves, terms, strict=True):
                for number, term in enumerate(group):
                    term.tracker = LossTracker(
                        f"{name}_loss_{number}" if number else f"{name}_loss"
                    )
        outputs = [
            _Output(name if several else None, terms[i], plain[i], weighted[i])
            for i, name in enumerate(leaves)
        ]
        self._name(outputs)
        return outputs

    def _name(self, outputs: list[_Output]) -> None:
        """Choose a unique name in logs for each metric."""
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


#: The types of sample weights for a single output.
_SINGLE_WEIGHT_TYPES = frozenset((type(None), Tensor))


def _flat(given: Any) -> list[Any]:
    return [leaf for leaf in nest.flatten(given) if leaf is not None]


def _terms(name: str, loss: Any, weight: Any) -> list[_Term]:
    """Return the losses of one output with their weights; raise if their numbers differ."""
    losses = nest.flatten(loss)
    weights = nest.flatten(weight) if nest.is_nested(weight) else [weight] * len(losses)
    if len(weights) != len(losses):
        raise ValueError(
            f"output {name!r} has {len(losses)} losses, but {len(weights)} loss_weights; give one "
            "weight for each loss, or one for all"
        )
    return [
        _Term(
            each if isinstance(each, Loss) else LossFunctionWrapper(each),
            None if factor is None else float(factor),
        )
        for each, factor in zip(losses, weights, strict=True)
        if each is not None
    ]


def _mapped(function: Callable[[Any], Any], given: Any) -> Any:
    """Apply a function to the leaves of a structure; None stays None."""
    return None if given is None else nest.map_structure(function, given)


def _target(what: str, y: Any, y_pred: Any) -> tuple[Tensor, Tensor]:
    """Return targets and predictions, in one dtype if both are floating-point numbers."""
    if y is None:
        raise ValueError(f"the compiled {what} needs targets: give y, or datasets of (x, y)")
    true, predicted = as_tensor(y), in_loss_dtype(y_pred)
    floats = true.dtype.kind in "fV" and predicted.dtype.kind in "fV"
    if floats and true.dtype != predicted.dtype:
        true = ops.cast(true, predicted.dtype)
    return true, predicted


def _loss_share(loss: Loss, y: Any, y_pred: Any, sample_weight: Any) -> Tensor:
    """Return a replica's share of one loss of the global batch."""
    true, predicted = _target("loss", y, y_pred)
    with averages_of_replicas():
        if type(loss).__call__ is not Loss.__call__:
            values = as_tensor(loss(true, predicted, sample_weight))
        else:
            # Calling the loss would average over this replica's examples only.
            values = loss.values(true, predicted)
            if sample_weight is not None:
                values = values * _weights(sample_weight, values)
    if loss.reduction is Reduction.SUM:
        return ops.reduce_sum(values)
    return share_of(sum_over(values, float(max(1, values.array.size))))


def _weights(sample_weight: Any, values: Tensor) -> Tensor:
    if not values.ndim:
        raise ValueError(
            "the examples have weights, but the compiled loss returns one number for all of them; "
            "it must return one number for each example"
        )
    return broadcast_weights(sample_weight, values)


def metric_of(identifier: Any) -> Metric | None:
    """Return the metric for a name, a function of (y_true, y_pred), or a metric."""
    if isinstance(identifier, str) and identifier.lower() in ("accuracy", "acc"):
        return MeanMetricWrapper(accuracy_by_shape, identifier)
    found = metrics.get(identifier)
    if found is None:
        return None
    # A loss has a name, a function a name in Python.
    metric = (
        found
        if isinstance(found, Metric)
        else MeanMetricWrapper(found, getattr(found, "name", None))
    )
    if isinstance(identifier, str):
        metric.name = identifier
    return metric


def loss_of(identifier: Any) -> Any:
    """Return the loss for a name or loss; for ``"crossentropy"``, shapes choose the kind."""
    if isinstance(identifier, str) and identifier.lower() in ("crossentropy", "ce"):
        return crossentropy_by_shape
    return losses.get(identifier)
