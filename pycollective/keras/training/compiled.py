"""What `Model.compile` keeps: the loss, the metrics, and how steps are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.keras import losses, metrics
from pycollective.keras.losses import Loss, Reduction, broadcast_weights
from pycollective.keras.metrics import Mean, Metric, add_to_sum
from pycollective.keras.training.share import current_share, share_of
from pycollective.tensor import Tensor, as_tensor, ops

__all__ = ["Compiled", "LossTracker", "loss_of", "loss_share", "metrics_of"]


class LossTracker(Mean):
    """The mean of the loss over all examples of an epoch, fed with each replica's summand of it."""

    def __init__(self) -> None:
        super().__init__("loss", np.float64)

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Take in what `Model.compute_loss` returned: in a step of `fit`, this replica's summand.

        Outside of one, and with weights, this is a `Mean`.
        """
        share = current_share()
        if share is None or sample_weight is not None:
            super().update_state(values, sample_weight)
            return
        summand = as_tensor(values).array.sum(dtype=self.dtype)
        add_to_sum(self.total, summand * share.total)
        add_to_sum(self.count, np.asarray(share.rows, self.dtype))


@dataclass
class Compiled:
    """The settings of `Model.compile`.

    Attributes
    ----------
    loss
        A `Loss` or a function of (y_true, y_pred); None: only `add_loss` and penalties count.
    tracker
        Of the loss.
    metrics, weighted_metrics
        Without, and with, the weights of the examples.
    steps_per_execution
        How many steps the replicas make before callbacks hear of it.
    """

    loss: Any
    tracker: LossTracker
    metrics: list[Metric]
    weighted_metrics: list[Metric]
    steps_per_execution: int

    @property
    def all_metrics(self) -> list[Metric]:
        """The tracker of the loss, and the metrics."""
        return [self.tracker, *self.metrics, *self.weighted_metrics]

    def update_metrics(self, y: Any, y_pred: Any, sample_weight: Any) -> None:
        """Take a replica's answers into the metrics."""
        if self.metrics or self.weighted_metrics:
            y = _target("metrics", y, y_pred)
        for metric in self.metrics:
            metric.update_state(y, y_pred)
        for metric in self.weighted_metrics:
            metric.update_state(y, y_pred, sample_weight)


def loss_share(loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> Tensor:
    """Return a replica's summand of the loss of the global batch.

    Parameters
    ----------
    loss
        A `Loss`; or a function, whose values are averaged.
    y, y_pred
        What should come out for this replica's examples, and what did.
    sample_weight
        A weight for each example, or None. Weighted losses are divided by the number of examples,
        not by the sum of the weights, as Keras does.

    Raises
    ------
    ValueError
        If there is no ``y``, several outputs, or one loss for all examples and weights for each.
    """
    y = _target("loss", y, y_pred)
    known = isinstance(loss, Loss)
    # Calling a Loss would average over this replica's examples only, which is why it refuses.
    values = as_tensor(loss.call(y, y_pred) if known else loss(y, y_pred))
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


def _target(what: str, y: Any, y_pred: Any) -> Any:
    """Return y, in the outputs' dtype if both are floating-point numbers."""
    if y is None:
        raise ValueError(
            f"the compiled {what} needs what should come out: give y, or datasets of (x, y)"
        )
    if nest.is_nested(y) or nest.is_nested(y_pred):
        raise ValueError(
            f"the compiled {what} takes one output and one y, got {_kind(y_pred)} of outputs and "
            f"{_kind(y)} as y; override compute_loss() and compute_metrics() for several outputs"
        )
    true, predicted = as_tensor(y), as_tensor(y_pred)
    floats = true.dtype.kind in "fV" and predicted.dtype.kind in "fV"
    return ops.cast(true, predicted.dtype) if floats and true.dtype != predicted.dtype else true


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def metrics_of(identifiers: Any) -> list[Metric]:
    """Return metrics by names, functions of (y_true, y_pred), or as they are.

    Raises
    ------
    ValueError
        For an unknown name, or two metrics of one name, of which only one could be reported.
    """
    if identifiers is None:
        return []
    if isinstance(identifiers, (list, tuple)):
        return [metric for each in identifiers for metric in metrics_of(each)]
    found = metrics.get(identifiers)
    if isinstance(found, Metric):
        return [found]
    return [metrics.MeanMetricWrapper(found)]


def loss_of(identifier: Any) -> Any:
    """Return a loss by its name, or as it is."""
    if isinstance(identifier, (list, tuple, dict)):
        raise ValueError(f"compile() takes one loss, got {_kind(identifier)} of losses")
    return losses.get(identifier)
