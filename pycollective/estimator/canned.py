"""Estimators of linear models and of dense networks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pycollective import nn
from pycollective.array_backend import on_host
from pycollective.estimator.config import RunConfig
from pycollective.estimator.estimator import Estimator
from pycollective.estimator.specs import EstimatorSpec, ModeKeys
from pycollective.estimator.variables import this_thread
from pycollective.feature_column import NumericColumn, numeric_column
from pycollective.keras import layers, losses, metrics, optimizers
from pycollective.keras.losses.loss import Reduction
from pycollective.keras.training.share import current_share
from pycollective.tensor import Tensor, Variable, as_tensor, ops

#: The learning rate of an optimizer of a linear model that is given by its name, as in TensorFlow.
_LINEAR_RATE = 0.2


class _Baseline(metrics.Mean):
    """The accuracy of a model that always predicts the more frequent of two labels."""

    def result(self) -> Tensor:
        share = super().result()
        return ops.maximum(share, 1.0 - share)


class _Head:
    """The loss, predictions and metrics of a model, from its logits."""

    def __init__(
        self,
        outputs: int,
        weight_column: str | NumericColumn | None,
        loss_reduction: Any,
        vocabulary: Sequence[str] | None = None,
    ) -> None:
        self.outputs = outputs
        #: The labels of the classes as texts, or None if labels are class numbers.
        self._vocabulary = None if vocabulary is None else [str(text) for text in vocabulary]
        if isinstance(weight_column, str):
            weight_column = numeric_column(weight_column)
        self._weights = weight_column
        self._reduction = Reduction.of(getattr(loss_reduction, "value", loss_reduction))
        if self._reduction is Reduction.NONE:
            raise ValueError(
                "Invalid loss_reduction: none. A loss for each example cannot be minimized"
            )

    def spec(
        self,
        features: Mapping[str, Any],
        labels: Any,
        mode: str,
        logits: Tensor,
        optimizer: Callable[[], Any],
    ) -> EstimatorSpec:
        """Return the result of the model function."""
        predictions = self.predictions(logits)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions)
        if labels is None:
            raise ValueError(
                "You must provide a labels Tensor. Given: None. Suggested troubleshooting steps: Check "
                "that your data contain your label feature. Check that your input_fn properly parses "
                "and returns labels."
            )
        labels = self._checked(self._numbers(labels), logits)
        each = self.losses(labels, logits)
        weights = None
        if self._weights is not None:
            column = ops.cast(self._weights.values_of(features), each.dtype)
            weights = ops.reshape(column, (each.shape[0], 1))
        loss = self._reduced(each if weights is None else each * weights)
        if mode == ModeKeys.TRAIN:
            return EstimatorSpec(mode, predictions, loss, optimizer())
        average = metrics.Mean("average_loss")
        average.update_state(each, _like(weights, each))
        found = {"average_loss": average, **self.metrics(labels, predictions, weights)}
        return EstimatorSpec(mode, predictions, loss, None, found)

    def _reduced(self, values: Tensor) -> Tensor:
        """Return the mean of the examples' losses, or their sum over all replicas' examples."""
        mean = ops.reduce_sum(values) / float(max(values.array.size, 1))
        if self._reduction is not Reduction.SUM:
            return mean
        share = current_share()
        rows = values.shape[0] if share is None else share.total
        return mean * float(rows * self.outputs_of_loss)

    def _numbers(self, labels: Any) -> Tensor:
        """Return the labels as class numbers, if they are texts of the vocabulary."""
        if self._vocabulary is None:
            return as_tensor(labels)
        texts = np.asarray(labels)
        if texts.dtype.kind not in "OSU":
            raise ValueError(
                f"Labels with label_vocabulary should be an array of texts, got dtype {texts.dtype}"
            )
        known = {text: number for number, text in enumerate(self._vocabulary)}
        found = np.empty(texts.shape, np.int64)
        for place, text in np.ndenumerate(texts):
            plain = text.decode() if isinstance(text, bytes) else str(text)
            if plain not in known:
                raise ValueError(f"the label {plain!r} is not in label_vocabulary")
            found[place] = known[plain]
        return as_tensor(found)

    def _classes(self, classes: Tensor) -> dict[str, Any]:
        """Return class numbers, and the classes' names as bytes."""
        numbers = classes.numpy()
        names = numbers.astype("S")
        if self._vocabulary is not None:
            names = np.array([text.encode() for text in self._vocabulary])[numbers]
        return {"class_ids": classes, "classes": names}

    #: The number of losses of an example.
    outputs_of_loss = 1

    def _checked(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the labels with a row for each example."""
        wanted = self.outputs_of_loss
        if labels.ndim == 1:
            labels = ops.reshape(labels, (labels.shape[0], 1))
        if tuple(labels.shape) != (logits.shape[0], wanted):
            raise ValueError(
                f"Mismatched label shape. Expected labels dimension={wanted}. Received "
                f"{labels.shape[-1] if labels.ndim else 0}, labels of shape {tuple(labels.shape)} for "
                f"{logits.shape[0]} examples. Suggested Fix:If your classifier expects one-hot "
                "encoding label, give class numbers instead"
            )
        return labels

    def predictions(self, logits: Tensor) -> dict[str, Any]:
        """Return the predictions by key."""
        raise NotImplementedError

    def losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the losses, with a row for each example."""
        raise NotImplementedError

    def metrics(
        self, labels: Tensor, predictions: Mapping[str, Any], weights: Tensor | None
    ) -> dict[str, metrics.Metric]:
        """Return metrics, updated with a batch."""
        raise NotImplementedError


class _Regression(_Head):
    @property
    def outputs_of_loss(self) -> int:  # type: ignore[override]
        return self.outputs

    def predictions(self, logits: Tensor) -> dict[str, Any]:
        return {"predictions": logits}

    def losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        return ops.square(logits - ops.cast(labels, logits.dtype))

    def metrics(
        self, labels: Tensor, predictions: Mapping[str, Any], weights: Tensor | None
    ) -> dict[str, metrics.Metric]:
        return _means(labels, predictions["predictions"], weights)


class _Binary(_Head):
    """A head for two classes, with one logit."""

    def _checked(self, labels: Tensor, logits: Tensor) -> Tensor:
        labels = super()._checked(labels, logits)
        _check_range(labels, 2)
        return labels

    def predictions(self, logits: Tensor) -> dict[str, Any]:
        logistic = nn.sigmoid(logits)
        classes = ops.cast(logits > 0.0, "int64")
        return {
            "logits": logits,
            "logistic": logistic,
            "probabilities": ops.concat([1.0 - logistic, logistic], axis=1),
            **self._classes(classes),
        }

    def losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        found = losses.binary_crossentropy(ops.cast(labels, logits.dtype), logits, from_logits=True)
        return ops.reshape(found, (logits.shape[0], 1))

    def metrics(
        self, labels: Tensor, predictions: Mapping[str, Any], weights: Tensor | None
    ) -> dict[str, metrics.Metric]:
        truth = ops.cast(labels, "float32")
        guess, classes = predictions["logistic"], ops.cast(predictions["class_ids"], "float32")
        found: dict[str, metrics.Metric] = {
            "accuracy": metrics.Accuracy("accuracy"),
            "precision": metrics.Precision(name="precision"),
            "recall": metrics.Recall(name="recall"),
            "auc": metrics.AUC(name="auc"),
            "auc_precision_recall": metrics.AUC(curve="PR", name="auc_precision_recall"),
        }
        column = None if weights is None else ops.reshape(weights, (weights.shape[0],))
        for name, metric in found.items():
            metric.update_state(truth, guess if "auc" in name else classes, sample_weight=column)
        baseline = _Baseline("accuracy_baseline")
        baseline.update_state(truth, _like(weights, truth))
        return {**found, "accuracy_baseline": baseline, **_means(truth, guess, weights)}


class _Classes(_Head):
    """A head for several classes, with a logit for each."""

    def _checked(self, labels: Tensor, logits: Tensor) -> Tensor:
        labels = super()._checked(labels, logits)
        if labels.dtype.kind not in "iu":
            raise ValueError(f"Labels dtype should be integer. Instead got {labels.dtype}.")
        _check_range(labels, self.outputs)
        return labels

    def predictions(self, logits: Tensor) -> dict[str, Any]:
        classes = ops.reshape(ops.cast(ops.argmax(logits, axis=1), "int64"), (logits.shape[0], 1))
        return {"logits": logits, "probabilities": nn.softmax(logits), **self._classes(classes)}

    def losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        flat = ops.reshape(labels, (labels.shape[0],))
        found = losses.sparse_categorical_crossentropy(flat, logits, from_logits=True)
        return ops.reshape(found, (logits.shape[0], 1))

    def metrics(
        self, labels: Tensor, predictions: Mapping[str, Any], weights: Tensor | None
    ) -> dict[str, metrics.Metric]:
        accuracy = metrics.Accuracy("accuracy")
        column = None if weights is None else ops.reshape(weights, (weights.shape[0],))
        accuracy.update_state(
            ops.cast(labels, "int64"), predictions["class_ids"], sample_weight=column
        )
        return {"accuracy": accuracy}


def _means(labels: Tensor, guess: Tensor, weights: Tensor | None) -> dict[str, metrics.Metric]:
    """Return the metrics of the means of labels and predictions."""
    found: dict[str, metrics.Metric] = {}
    for name, values in {"label/mean": labels, "prediction/mean": guess}.items():
        values = ops.cast(values, "float32")
        found[name] = metrics.Mean(name)
        found[name].update_state(values, _like(weights, values))
    return found


def _like(weights: Tensor | None, values: Tensor) -> Tensor | None:
    """Return a weight for each value."""
    return None if weights is None else ops.broadcast_to(weights, values.shape)


def _check_range(labels: Tensor, classes: int) -> None:
    array = labels.array
    if on_host(array) and array.size:
        if array.max() > classes - 1:
            raise ValueError(f"Labels must be <= {classes - 1}, got {array.max()}")
        if array.min() < 0:
            raise ValueError(f"Labels must be >= 0, got {array.min()}")


def _classes_head(n_classes: int, weight_column: Any, vocabulary: Any, reduction: Any) -> _Head:
    if isinstance(n_classes, bool) or not isinstance(n_classes, (int, np.integer)) or n_classes < 2:
        raise ValueError(f"n_classes must be > 1 for classification: given: {n_classes!r}")
    if vocabulary is not None and (
        not isinstance(vocabulary, (list, tuple)) or len(vocabulary) != n_classes
    ):
        raise ValueError(
            "label_vocabulary should be a list or a tuple with a text for each of the "
            f"{n_classes} classes. Given: {vocabulary!r}"
        )
    if n_classes == 2:
        return _Binary(1, weight_column, reduction, vocabulary)
    return _Classes(int(n_classes), weight_column, reduction, vocabulary)


def _checked_columns(feature_columns: Any) -> list[NumericColumn]:
    """Return the columns, sorted by name as in TensorFlow."""
    single = isinstance(feature_columns, NumericColumn)
    columns = [feature_columns] if single else list(feature_columns or ())
    if not columns:
        raise ValueError("feature_columns must not be empty.")
    for column in columns:
        if not isinstance(column, NumericColumn):
            raise ValueError(
                f"Items of feature_columns must be a FeatureColumn. Given (type {type(column)}): "
                f"{column!r}; make each with tf.feature_column.numeric_column"
            )
    names = [column.name for column in columns]
    if len(set(names)) != len(names):
        raise ValueError(f"Duplicate feature column name found for columns: {names}")
    return sorted(columns, key=lambda column: column.name)


def _optimizer_maker(optimizer: Any, rate: float | None = None) -> Callable[[], Any]:
    """Return a function that makes the optimizer, which counts global steps."""
    if isinstance(optimizer, str):
        named: Any = type(optimizers.get(optimizer))

        def make() -> Any:
            return named() if rate is None else named(rate)
    elif isinstance(optimizer, optimizers.Optimizer):
        kind, config = type(optimizer), optimizer.get_config()

        def make() -> Any:
            return kind.from_config(config)
    elif callable(optimizer):
        make = optimizer
    else:
        raise ValueError(
            "The given object is not a tf.keras.optimizers.Optimizer instance, a name or a function. "
            f"Given: {optimizer!r}"
        )

    def counting() -> Any:
        made = make()
        if isinstance(made, optimizers.Optimizer):
            assert this_thread.current is not None
            made.iterations = this_thread.current.global_step
        return made

    return counting


class _Canned(Estimator):
    """Base of estimators of this module: ``logits_fn(features, mode)`` returns the logits."""

    def __init__(
        self,
        head: _Head,
        logits_fn: Callable[[Mapping[str, Any], str], Tensor],
        optimizer: Callable[[], Any],
        model_dir: str | os.PathLike[str] | None,
        config: RunConfig | None,
        warm_start_from: str | None,
    ) -> None:
        def model_fn(features: Mapping[str, Any], labels: Any, mode: str) -> EstimatorSpec:
            if not isinstance(features, Mapping):
                raise ValueError(
                    f"features should be a dictionary of `Tensor`s. Given type: {type(features)}"
                )
            return head.spec(features, labels, mode, logits_fn(features, mode), optimizer)

        super().__init__(model_fn, model_dir, config, None, warm_start_from)


def _linear(
    columns: list[NumericColumn], outputs: int
) -> Callable[[Mapping[str, Any], str], Tensor]:
    def logits_of(features: Mapping[str, Any], mode: str) -> Tensor:
        start = "linear/linear_model"
        total: Tensor | None = None
        for column in columns:
            weights = Variable(
                np.zeros((column.width, outputs), np.float32), name=f"{start}/{column.name}/weights"
            )
            part = ops.matmul(ops.cast(column.values_of(features), "float32"), weights)
            total = part if total is None else total + part
        assert total is not None
        return total + Variable(np.zeros(outputs, np.float32), name=f"{start}/bias_weights")

    return logits_of


def _dense(
    columns: list[NumericColumn],
    units: Iterable[int],
    outputs: int,
    activation: Any,
    dropout: float | None,
    batch_norm: bool,
) -> Callable[[Mapping[str, Any], str], Tensor]:
    sizes = list(units)
    if dropout is not None and not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and less than 1, got {dropout}")

    def logits_of(features: Mapping[str, Any], mode: str) -> Tensor:
        training = mode == ModeKeys.TRAIN
        x = ops.concat(
            [ops.cast(column.values_of(features), "float32") for column in columns], axis=1
        )
        for number, size in enumerate(sizes):
            name = f"dnn/hiddenlayer_{number}"
            x = layers.Dense(size, activation=activation, name=name)(x)
            if dropout:
                x = layers.Dropout(dropout)(x, training=training)
            if batch_norm:
                norm = layers.BatchNormalization(momentum=0.999, name=f"{name}/batchnorm_{number}")
                x = norm(x, training=training)
        logits: Tensor = layers.Dense(outputs, name="dnn/logits")(x)
        return logits

    return logits_of


class LinearRegressor(_Canned):
    """A linear model for regression.

    Parameters
    ----------
    feature_columns : sequence of NumericColumn
        The columns that are the model's inputs; see `numeric_column`.
    model_dir, config, warm_start_from
        As for `Estimator`.
    label_dimension : int
        The number of targets of an example.
    weight_column : str or NumericColumn, optional
        The key of the feature with the examples' weights.
    optimizer : str, Optimizer or callable
        A Keras optimizer, its name, or a function that returns one.
    loss_reduction : {"sum_over_batch_size", "sum"}
        ``"sum_over_batch_size"``, a mean, or ``"sum"``.
    sparse_combiner : optional
        Ignored: there are no sparse columns.

    Notes
    -----
    Predictions have the key ``predictions``. Metrics are ``average_loss``, ``label/mean`` and
    ``prediction/mean``. The variables have TensorFlow's names.
    """

    def __init__(
        self,
        feature_columns: Any,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: str | None = None,
        loss_reduction: Any = Reduction.SUM_OVER_BATCH_SIZE,
        sparse_combiner: str = "sum",
    ) -> None:
        head = _Regression(_dimension(label_dimension), weight_column, loss_reduction)
        logits = _linear(_checked_columns(feature_columns), head.outputs)
        maker = _optimizer_maker(optimizer, _LINEAR_RATE)
        super().__init__(head, logits, maker, model_dir, config, warm_start_from)


class LinearClassifier(_Canned):
    """A linear model for classification.

    Parameters
    ----------
    feature_columns, model_dir, weight_column, optimizer, config, warm_start_from, loss_reduction
        As for `LinearRegressor`.
    n_classes : int
        The number of classes.
    label_vocabulary : list of str, optional
        The texts that are the labels of the classes in the input. Predictions have these texts
        under the key ``classes``. By default labels are class numbers, from 0 on.
    sparse_combiner : optional
        Ignored: there are no sparse columns.

    Notes
    -----
    Predictions have the keys ``logits``, ``probabilities``, ``class_ids`` and ``classes``, with two
    classes also ``logistic``. Metrics are ``accuracy`` and ``average_loss``, with two classes also
    ``accuracy_baseline``, ``auc``, ``auc_precision_recall``, ``precision``, ``recall``,
    ``label/mean`` and ``prediction/mean``.
    """

    def __init__(
        self,
        feature_columns: Any,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: str | None = None,
        loss_reduction: Any = Reduction.SUM_OVER_BATCH_SIZE,
        sparse_combiner: str = "sum",
    ) -> None:
        head = _classes_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        logits = _linear(_checked_columns(feature_columns), head.outputs)
        maker = _optimizer_maker(optimizer, _LINEAR_RATE)
        super().__init__(head, logits, maker, model_dir, config, warm_start_from)


class DNNRegressor(_Canned):
    """A network of dense layers for regression.

    Parameters
    ----------
    hidden_units : sequence of int
        The sizes of the hidden layers.
    feature_columns, model_dir, label_dimension, weight_column, optimizer, config, warm_start_from
        As for `LinearRegressor`.
    activation_fn : callable
        The activation of the hidden layers.
    dropout : float, optional
        The probability of dropping a hidden value in training.
    loss_reduction : {"sum_over_batch_size", "sum"}
        As for `LinearRegressor`.
    batch_norm : bool
        True to normalize the values of the hidden layers.

    Notes
    -----
    Predictions and metrics are those of `LinearRegressor`.
    """

    def __init__(
        self,
        hidden_units: Iterable[int],
        feature_columns: Any,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        optimizer: Any = "Adagrad",
        activation_fn: Any = nn.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | None = None,
        loss_reduction: Any = Reduction.SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
    ) -> None:
        head = _Regression(_dimension(label_dimension), weight_column, loss_reduction)
        columns = _checked_columns(feature_columns)
        logits = _dense(columns, hidden_units, head.outputs, activation_fn, dropout, batch_norm)
        maker = _optimizer_maker(optimizer)
        super().__init__(head, logits, maker, model_dir, config, warm_start_from)


class DNNClassifier(_Canned):
    """A network of dense layers for classification.

    Parameters
    ----------
    hidden_units, activation_fn, dropout, batch_norm
        As for `DNNRegressor`.
    feature_columns, model_dir, n_classes, weight_column, label_vocabulary, optimizer, config
        As for `LinearClassifier`.
    warm_start_from, loss_reduction
        As for `LinearClassifier`.

    Notes
    -----
    Predictions and metrics are those of `LinearClassifier`.
    """

    def __init__(
        self,
        hidden_units: Iterable[int],
        feature_columns: Any,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: Any = "Adagrad",
        activation_fn: Any = nn.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: str | None = None,
        loss_reduction: Any = Reduction.SUM_OVER_BATCH_SIZE,
        batch_norm: bool = False,
    ) -> None:
        head = _classes_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        columns = _checked_columns(feature_columns)
        logits = _dense(columns, hidden_units, head.outputs, activation_fn, dropout, batch_norm)
        maker = _optimizer_maker(optimizer)
        super().__init__(head, logits, maker, model_dir, config, warm_start_from)


def _dimension(label_dimension: Any) -> int:
    if label_dimension < 1:
        raise ValueError(f"Invalid label_dimension {label_dimension}.")
    return int(label_dimension)
