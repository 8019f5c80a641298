"""Metrics of the confusion matrix of binary predictions, at thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pycollective.array_backend import Array, array_module, asarray, on_host, scatter_add
from pycollective.keras.backend import epsilon
from pycollective.keras.building import build_scope_of_new
from pycollective.keras.losses.loss import broadcast_weights, same_rank
from pycollective.keras.metrics.metric import Metric, add_to_sums, ratio
from pycollective.nn import sigmoid
from pycollective.tensor import Tensor, Variable, as_tensor, ops

__all__ = [
    "AUC",
    "FalseNegatives",
    "FalsePositives",
    "Precision",
    "Recall",
    "TrueNegatives",
    "TruePositives",
]

#: The four cases of a binary prediction, in the order of `counts`.
_CASES = ("true_positives", "false_positives", "true_negatives", "false_negatives")
#: Up to this many thresholds, a pass for each is faster than sorting.
_FEW = 4
#: A threshold below every prediction: with ``top_k`` alone, the best ``k`` count as positive.
_LOWEST = -1e10


def counts(
    y_true: Any,
    y_pred: Any,
    thresholds: Sequence[float],
    sample_weight: Any,
    dtype: np.dtype[Any],
    top_k: int | None = None,
    class_id: int | None = None,
    label_weights: Any = None,
    by_label: bool = False,
) -> list[Array]:
    """Return the summed weights of each of `_CASES` at each threshold.

    A prediction above a threshold is positive; a label other than 0 is positive. The last axis of the
    predictions has an index for each class. Only the ``top_k`` largest predictions along this axis
    may be positive. Only the class ``class_id`` counts. ``label_weights`` holds a weight for each
    class. The results are ``[thresholds]``, or with ``by_label`` ``[thresholds, classes]``. Raise
    ``ValueError`` if shapes do not fit.
    """
    predicted = ops.cast(y_pred, dtype)
    true, predicted = same_rank(as_tensor(y_true), predicted)
    if true.shape != predicted.shape:
        raise ValueError(
            f"y_true of shape {true.shape} does not fit y_pred of shape {predicted.shape}: they "
            "must have the same shape"
        )
    weights = _weights(predicted, sample_weight, label_weights)
    values = predicted.array
    yes = asarray(true.array, like=values) != 0
    if top_k is not None:
        values = _only_top(values, top_k)
    if class_id is not None:
        if values.ndim < 2 or not 0 <= class_id < values.shape[-1]:
            raise ValueError(
                f"class_id={class_id} is not a class of predictions of shape {values.shape}"
            )
        yes, values = (a[..., class_id : class_id + 1] for a in (yes, values))
        weights = None if weights is None else weights[..., class_id : class_id + 1]
    if not by_label:
        yes, values = yes.reshape(-1, 1), values.reshape(-1, 1)
        weights = None if weights is None else weights.reshape(-1, 1)
    elif values.ndim != 2:
        raise ValueError(
            "`y_pred` must have rank 2 when `multi_label=True`. Found rank "
            f"{values.ndim}. Full shape received for `y_pred`: {values.shape}"
        )
    columns = [
        _case_weights(
            yes[:, k],
            values[:, k],
            None if weights is None else weights[:, k],
            np.asarray(thresholds, dtype),
        )
        for k in range(values.shape[1])
    ]
    if not by_label:
        return [case.astype(dtype) for case in columns[0]]
    return [np.stack(case, axis=-1).astype(dtype) for case in zip(*columns, strict=True)]


def _weights(predicted: Tensor, sample_weight: Any, label_weights: Any) -> Array | None:
    """Return a weight for each prediction, or None if all are 1."""
    values = predicted.array
    if sample_weight is None and label_weights is None:
        return None
    weights = np.ones_like(values)
    if sample_weight is not None:
        weights = weights * broadcast_weights(sample_weight, predicted).array
    if label_weights is not None:
        per_label = asarray(np.asarray(label_weights, values.dtype), like=values)
        if values.ndim < 2 or per_label.shape != values.shape[-1:]:
            raise ValueError(
                f"label_weights of shape {per_label.shape} do not fit predictions of shape "
                f"{values.shape}"
            )
        weights = weights * per_label
    return weights


def _only_top(values: Array, k: int) -> Array:
    """Set all but the ``k`` largest values of a row to the lowest; of equal values, keep the first."""
    best_first = np.argsort(-values, axis=-1, kind="stable")
    rank = np.argsort(best_first, axis=-1, kind="stable")
    kept: Array = np.where(rank < k, values, values.dtype.type(_LOWEST))
    return kept


def _case_numbers(yes: Array, values: Array, threshold: Any) -> tuple[int, int, int, int]:
    """Return the number of predictions in each of `_CASES` at a threshold, for arrays on the host."""
    negative = ~(values > threshold)  # NaN too
    labels, negatives, missed = (
        int(np.count_nonzero(mask)) for mask in (yes, negative, negative & yes)
    )
    found = labels - missed
    return found, len(values) - negatives - found, negatives - missed, missed


def _case_weights(
    yes: Array, values: Array, weights: Array | None, thresholds: Array
) -> tuple[Array, ...]:
    """Return the summed weights of each of `_CASES` at each threshold, for one class."""
    if weights is None and len(thresholds) <= _FEW and on_host(values):
        rows = [_case_numbers(yes, values, threshold) for threshold in thresholds]
        return tuple(np.array(case, np.float64) for case in zip(*rows, strict=True))
    order = np.argsort(thresholds, kind="stable")
    # The number of thresholds below each prediction, at which the prediction is positive.
    below = np.searchsorted(asarray(thresholds[order], like=values), values, side="left")
    below = np.where(np.isnan(values), 0, below)
    positions = asarray(np.argsort(order), like=values)  # of the thresholds in their sorted order
    size = len(thresholds) + 1
    positive, all_of = [], []
    for kind in (yes, ~yes):
        amounts = (kind if weights is None else weights * kind).astype(np.float64)
        if on_host(values):
            share = np.bincount(below, amounts, size)
        else:  # CuPy's bincount would wait for the device
            share = array_module(values).zeros(size, np.float64)
            scatter_add(share, below, amounts)
        from_here = share[::-1].cumsum()[::-1]
        positive.append(from_here[1:][positions])
        all_of.append(from_here[0])
    return positive[0], positive[1], all_of[1] - positive[1], all_of[0] - positive[0]


def _thresholds(given: Any, default: float) -> list[float]:
    if given is None:
        return [default]
    found = [float(t) for t in given] if isinstance(given, (list, tuple)) else [float(given)]
    wrong = [t for t in found if not 0 <= t <= 1]
    if wrong:
        raise ValueError(f"Threshold values must be in [0, 1]. Received: {wrong}")
    return found


# Counts -------------------------------------------------------------------------------------------


class _CaseMetric(Metric):
    """Base of metrics that sum some of `_CASES` at thresholds; `_kept` names these cases."""

    _kept: tuple[str, ...]

    def __init__(
        self,
        thresholds: Any,
        top_k: int | None,
        class_id: int | None,
        name: str | None,
        dtype: Any,
    ) -> None:
        super().__init__(dtype=dtype, name=name)
        if top_k is not None and top_k < 1:
            raise ValueError(f"{self.name}: top_k must be at least 1, got {top_k}")
        self.init_thresholds = thresholds
        self.thresholds = _thresholds(thresholds, 0.5 if top_k is None else _LOWEST)
        self.top_k = top_k
        self.class_id = class_id
        for case in self._kept:
            setattr(self, case, self.add_weight((len(self.thresholds),), name=case))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch.

        Parameters
        ----------
        y_true
            Labels, 0 or 1, in the shape of ``y_pred``.
        y_pred
            Predictions.
        sample_weight
            A weight for each example, or each prediction.
        """
        options = self.dtype, self.top_k, self.class_id
        found = counts(y_true, y_pred, self.thresholds, sample_weight, *options)
        kept = [(case, a) for case, a in zip(_CASES, found, strict=True) if case in self._kept]
        add_to_sums([getattr(self, case) for case, _ in kept], [amount for _, amount in kept])

    def _by_threshold(self, values: Array) -> Tensor:
        """Return values ``[thresholds]``, or a scalar if there is a single threshold."""
        return Tensor(values.reshape(()) if len(self.thresholds) == 1 else values)


class _CaseSum(_CaseMetric):
    """Base of the metrics that are the sum of one case."""

    def __init__(self, thresholds: Any = None, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(thresholds, None, None, name, dtype)

    def result(self) -> Tensor:
        return self._by_threshold(as_tensor(getattr(self, self._kept[0])).array)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "thresholds": self.init_thresholds}


class TruePositives(_CaseSum):
    """The summed weight of true positives."""

    direction = "up"
    _kept = ("true_positives",)


class FalsePositives(_CaseSum):
    """The summed weight of false positives."""

    direction = "down"
    _kept = ("false_positives",)


class TrueNegatives(_CaseSum):
    """The summed weight of true negatives."""

    direction = "up"
    _kept = ("true_negatives",)


class FalseNegatives(_CaseSum):
    """The summed weight of false negatives."""

    direction = "down"
    _kept = ("false_negatives",)


class _Ratio(_CaseMetric):
    """Base of the ratios of true positives to the sum of true positives and another case."""

    direction = "up"

    def __init__(
        self,
        thresholds: Any = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(thresholds, top_k, class_id, name, dtype)

    def result(self) -> Tensor:
        right, wrong = (as_tensor(getattr(self, case)).array for case in self._kept)
        return self._by_threshold(ratio(right, right + wrong))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "thresholds": self.init_thresholds,
            "top_k": self.top_k,
            "class_id": self.class_id,
        }


class Precision(_Ratio):
    """The fraction of positive predictions that are right.

    Parameters
    ----------
    thresholds
        The limit above which a prediction is positive, or several limits, each with a result. The
        default is 0.5.
    top_k
        The number of largest predictions of an example that may be positive. Without thresholds, all
        of these are positive.
    class_id
        The only class that counts.
    name, dtype
        As for `Metric`.

    Raises
    ------
    ValueError
        If a threshold is not from 0 to 1, or ``top_k`` is below 1.
    """

    _kept = ("true_positives", "false_positives")


class Recall(_Ratio):
    """The fraction of positive labels with a positive prediction.

    Parameters and errors are as for `Precision`.
    """

    _kept = ("true_positives", "false_negatives")


# Curves -------------------------------------------------------------------------------------------


class AUC(Metric):
    """The area under a curve of points at thresholds, as a Riemann sum.

    Parameters
    ----------
    num_thresholds : int
        The number of thresholds, which are evenly spaced from 0 to 1.
    curve : str
        ``"ROC"``: the true positive rate over the false positive rate. ``"PR"``: precision over
        recall.
    summation_method : str
        ``"interpolation"``: trapezoids (for ``"PR"`` the formula of Davis and Goadrich, 2006).
        ``"majoring"``, ``"minoring"``: upper and lower rectangles.
    name, dtype
        As for `Metric`.
    thresholds : sequence of float, optional
        The thresholds, instead of ``num_thresholds``; 0 and 1 are added to them.
    multi_label : bool
        True to give each label its own curve; the result is the mean of their areas.
    num_labels : int, optional
        The number of labels, to make the variables before the first batch.
    label_weights : sequence of float, optional
        The weight of each label's area with ``multi_label``, else of each label's predictions.
    from_logits : bool
        True if predictions are logits, False if they are probabilities.

    Raises
    ------
    ValueError
        If ``curve`` or ``summation_method`` is unknown, ``num_thresholds`` is below 2, a threshold
        is not from 0 to 1, or ``num_labels`` is given without ``multi_label``.
    """

    direction = "up"

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = None,
        dtype: Any = None,
        thresholds: Sequence[float] | None = None,
        multi_label: bool = False,
        num_labels: int | None = None,
        label_weights: Sequence[float] | None = None,
        from_logits: bool = False,
    ) -> None:
        super().__init__(dtype=dtype, name=name)
        self.curve = _one_of("curve", str(curve).upper(), ("ROC", "PR"))
        self.summation_method = _one_of(
            "summation_method",
            str(summation_method).lower(),
            ("interpolation", "majoring", "minoring"),
        )
        self._given = thresholds is not None
        if thresholds is not None:
            inner = sorted(_thresholds(list(thresholds), 0.5))
        else:
            if num_thresholds <= 1:
                raise ValueError(
                    "Argument `num_thresholds` must be an integer > 1. Received: num_thresholds="
                    f"{num_thresholds}"
                )
            inner = [(i + 1) / (num_thresholds - 1) for i in range(num_thresholds - 2)]
        self.thresholds = [-epsilon(), *inner, 1 + epsilon()]
        self.num_thresholds = len(self.thresholds)
        if num_labels and not multi_label:
            raise ValueError("`num_labels` is needed only when `multi_label` is True.")
        self.multi_label = bool(multi_label)
        self.num_labels = num_labels
        self.label_weights = None if label_weights is None else [float(w) for w in label_weights]
        self.from_logits = bool(from_logits)
        self._creation = build_scope_of_new()
        if not multi_label or num_labels:
            self._build(num_labels)

    def _build(self, labels: int | None) -> None:
        shape = (self.num_thresholds,) if labels is None else (self.num_thresholds, labels)
        made = {case: self.add_weight(shape, name=case) for case in _CASES}
        # Set the first variable last, because other replicas take it as the sign that all exist.
        for case in reversed(_CASES):
            setattr(self, case, made[case])

    true_positives: Variable | None = None

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch.

        Parameters
        ----------
        y_true
            Labels, 0 or 1, in the shape of ``y_pred``.
        y_pred
            Predictions.
        sample_weight
            A weight for each example.
        """
        predicted = as_tensor(y_pred)
        if self.true_positives is None:
            with self._creation(self):
                if self.true_positives is None:
                    self._build(predicted.shape[-1])
        # Rounding may have moved a probability slightly out of [0, 1].
        chances = sigmoid(predicted) if self.from_logits else predicted
        found = counts(
            y_true,
            Tensor(np.clip(chances.array, 0, 1)),
            self.thresholds,
            sample_weight,
            self.dtype,
            label_weights=None if self.multi_label else self.label_weights,
            by_label=self.multi_label,
        )
        add_to_sums([getattr(self, case) for case in _CASES], found)

    def result(self) -> Tensor:
        if self.true_positives is None:
            return Tensor(np.zeros((), self.dtype))
        found = (as_tensor(getattr(self, case)).array for case in _CASES)
        area = self._area(*found).sum(axis=0)
        if self.multi_label:
            given = np.ones(area.shape) if self.label_weights is None else self.label_weights
            weights = asarray(np.asarray(given, area.dtype), like=area)
            area = (area * weights).sum() / weights.sum()
        return Tensor(asarray(area, self.dtype))

    def _area(self, tp: Array, fp: Array, tn: Array, fn: Array) -> Array:
        """Return the area between each threshold and the next."""
        recall = ratio(tp, tp + fn)
        if self.curve == "ROC":
            x, y = ratio(fp, fp + tn), recall
        elif self.summation_method == "interpolation":
            return _interpolated(tp, fp, fn)
        else:
            x, y = recall, ratio(tp, tp + fp)
        if self.summation_method == "interpolation":
            height = (y[:-1] + y[1:]) / 2
        else:
            pick = np.minimum if self.summation_method == "minoring" else np.maximum
            height = pick(y[:-1], y[1:])
        area: Array = (x[:-1] - x[1:]) * height
        return area

    def get_config(self) -> dict[str, Any]:
        config = {
            **super().get_config(),
            "num_thresholds": self.num_thresholds,
            "curve": self.curve,
            "summation_method": self.summation_method,
            "multi_label": self.multi_label,
            "num_labels": self.num_labels,
            "label_weights": self.label_weights,
            "from_logits": self.from_logits,
        }
        if self._given:
            config["thresholds"] = self.thresholds[1:-1]
        return config


def _interpolated(tp: Array, fp: Array, fn: Array) -> Array:
    """Return the areas between thresholds under precision over recall (Davis and Goadrich, 2006).

    Between two thresholds, true positives are assumed to grow linearly with positives.
    """
    positives = tp + fp
    more = tp[:-1] - tp[1:]
    slope = ratio(more, np.maximum(positives[:-1] - positives[1:], 0))
    intercept = tp[1:] - slope * positives[1:]
    both = (positives[:-1] > 0) & (positives[1:] > 0)
    grown = np.where(both, ratio(positives[:-1], np.maximum(positives[1:], 0)), 1)
    return ratio(slope * (more + intercept * np.log(grown)), np.maximum(tp[1:] + fn[1:], 0))


def _one_of(what: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"Invalid AUC {what} value: {value!r}. Expected values are {list(known)}")
    return value
