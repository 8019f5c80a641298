"""`Trainer`: the part of `Model` that trains it."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.array_backend import Array
from pycollective.distribute.context import current_mode, get_strategy, has_strategy
from pycollective.distribute.default import default_strategy
from pycollective.distribute.strategy import Strategy
from pycollective.distribute.values import DistributedValues
from pycollective.keras import optimizers
from pycollective.keras.callbacks import CallbackList, History
from pycollective.keras.layers import Layer
from pycollective.keras.metrics import Metric
from pycollective.keras.training.compiled import (
    Compiled,
    LossTracker,
    loss_of,
    loss_share,
    metrics_of,
)
from pycollective.keras.training.inputs import (
    Steps,
    batches_of,
    share_of_element,
    split_off,
    values_of,
    weighted_by_class,
)
from pycollective.keras.training.share import Share, held, share_of
from pycollective.keras.utils.batches import unpack_x_y_sample_weight
from pycollective.tensor import GradientTape, Tensor, as_tensor, ops
from pycollective.train.trackable import children_of

__all__ = ["Trainer"]

Logs = dict[str, Any]


class Trainer(Layer):
    """What `Model` has beyond a `Layer`: `compile`, `fit`, `evaluate`, `predict`.

    All of them run under the strategy in whose scope the model was made. Every example weighs the
    same, however the batches are shared out among the replicas: losses, metrics and gradients are
    those of a single device.

    One's own training overrides `train_step`, `test_step`, `predict_step`, or only `compute_loss` or
    `compute_metrics`. Replicas call them at the same time, each with its part of the batch.

    Attributes
    ----------
    compiled : bool
        Whether `compile` was called.
    optimizer, loss
        What `compile` was given; a name has become an object.
    stop_training : bool
        Set by callbacks: `fit` ends after the present step.
    history : History
        What the last `fit` returned.
    """

    _untracked = Layer._untracked | {"_compiled", "history"}

    compiled = False
    optimizer: Any = None
    loss: Any = None
    stop_training = False
    history: History
    _compiled: Compiled | None = None

    # Settings --------------------------------------------------------------------------------

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy in whose scope the model was made."""
        return default_strategy() if self._strategy is None else self._strategy

    def compile(
        self,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: Any = "auto",
    ) -> None:
        """Say how the model is trained.

        Parameters
        ----------
        optimizer
            An `Optimizer` or its name; needed by `fit` only.
        loss
            A `Loss`, its name, or a function of (y_true, y_pred). Its reduction may be
            SUM_OVER_BATCH_SIZE, which AUTO and NONE are taken for, or SUM.
        metrics
            Metrics, their names, or functions of (y_true, y_pred), in a list. ``"accuracy"`` is the
            kind of accuracy that the shapes suggest.
        weighted_metrics
            The same, for metrics that get the weights of the examples.
        steps_per_execution
            How many steps the replicas make before callbacks hear of it.
        run_eagerly, jit_compile
            Accepted for TensorFlow's sake: nothing is traced or compiled.

        Raises
        ------
        ValueError
            For unknown names, metrics of the same name, and variables that were made under another
            strategy than the model's.
        """
        self._check_scope(optimizer, metrics, weighted_metrics)
        if steps_per_execution < 1:
            raise ValueError(f"steps_per_execution must be at least 1, got {steps_per_execution}")
        with self.distribute_strategy.scope():
            compiled = Compiled(
                loss_of(loss),
                LossTracker(),
                metrics_of(metrics),
                metrics_of(weighted_metrics),
                int(steps_per_execution),
            )
            names = [metric.name for metric in compiled.all_metrics]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"compile: several metrics are named {', '.join(twice)}")
            self.optimizer = None if optimizer is None else optimizers.get(optimizer)
        self.loss = compiled.loss
        self._compiled = compiled
        self.compiled = True

    def _check_scope(self, optimizer: Any, *metrics: Any) -> None:
        """Raise unless everything was made in the scope of the model's strategy."""
        strategy = self.distribute_strategy
        if has_strategy() and get_strategy() is not strategy:
            # Not built yet, the model has no variable to name.
            raise _not_created_in(get_strategy(), next(iter(self.variables), self))
        created = strategy.extended.variable_created_in_scope
        for variable in self.variables:
            if not created(variable):
                raise _not_created_in(strategy, variable)
        for metric in nest.flatten(metrics):
            if isinstance(metric, Metric) and not all(map(created, metric.variables)):
                raise ValueError(
                    f"Metric ({metric}) passed to `model.compile` was created inside a different "
                    "distribution strategy scope than the model. All metrics must be created in the "
                    f"same distribution strategy scope as the model (in this case {strategy}). If you "
                    "pass in a string identifier for a metric to compile, the metric will "
                    "automatically be created in the correct distribution strategy scope."
                )
        known = isinstance(optimizer, optimizers.Optimizer)
        if known and not all(map(created, optimizer.variables)):
            raise ValueError(
                f"Optimizer ({optimizer}) passed to `model.compile` was created inside a different "
                "distribution strategy scope than the model. All optimizers must be created in the "
                f"same distribution strategy scope as the model (in this case {strategy}). If you pass "
                "in a string identifier for an optimizer to compile, the optimizer will automatically "
                "be created in the correct distribution strategy scope."
            )

    def _settings(self, method: str) -> Compiled:
        if self._compiled is None:
            raise ValueError(f"You must call `compile()` before calling `{method}()`.")
        return self._compiled

    # What one's own training overrides -------------------------------------------------------

    def train_step(self, data: Any) -> Logs:
        """Make one step of training with a replica's part of a batch.

        Parameters
        ----------
        data
            ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.

        Returns
        -------
        dict
            What is reported, by name. What differs between the replicas is added up.
        """
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        if self.optimizer is None:
            raise ValueError("training needs an optimizer: compile(optimizer=...)")
        with GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
        self._settings("fit").tracker.update_state(loss)
        variables = self.trainable_variables
        if variables:
            self.optimizer.minimize(loss, variables, tape=tape)
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def test_step(self, data: Any) -> Logs:
        """Evaluate a replica's part of a batch; as `train_step`."""
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        loss = self.compute_loss(x, y, y_pred, sample_weight, training=False)
        self._settings("evaluate").tracker.update_state(loss)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def predict_step(self, data: Any) -> Any:
        """Return the outputs for a replica's part of a batch."""
        x, _, _ = unpack_x_y_sample_weight(data)
        return self(x, training=False)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Tensor:
        """Return this replica's summand of the loss of the whole batch.

        The sum over the replicas is the loss of the batch, that of their gradients its gradient:
        nothing is to be scaled any more.

        Parameters
        ----------
        x
            The inputs; not used here.
        y, y_pred
            What should come out, and what did.
        sample_weight
            A weight for each example.
        training
            Whether this is a step of training; not used here.

        Raises
        ------
        ValueError
            If neither a loss was compiled nor one added.
        """
        loss = self._settings("compute_loss").loss
        parts = [] if loss is None else [loss_share(loss, y, y_pred, sample_weight)]
        added = self.losses
        if added:
            parts.append(share_of(ops.add_n([ops.reduce_sum(value) for value in added])))
        if not parts:
            raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        """Take a replica's answers into the compiled metrics, and return `get_metrics_result`."""
        self._settings("compute_metrics").update_metrics(y, y_pred, sample_weight)
        return self.get_metrics_result()

    # Metrics ---------------------------------------------------------------------------------

    @property
    def metrics(self) -> list[Metric]:
        """The loss, the compiled metrics, and those that are attributes of the model or a layer.

        `fit` and `evaluate` let them begin anew.
        """
        found = [] if self._compiled is None else self._compiled.all_metrics
        for layer in self._flatten_layers():
            found += _metrics_in(layer)
        return list({id(metric): metric for metric in found}.values())

    @property
    def metrics_names(self) -> list[str]:
        """The names of `metrics`."""
        return [metric.name for metric in self.metrics]

    def reset_metrics(self) -> None:
        """Let all `metrics` begin anew."""
        for metric in self.metrics:
            metric.reset_state()

    def get_metrics_result(self) -> Logs:
        """Return the results of `metrics` by name; in a replica all replicas must make the call."""
        mode = current_mode()
        context = None if mode is None else mode.replica_context
        if context is None or context.num_replicas_in_sync == 1:
            return self._results()
        # One meeting for all of them; Metric.result would make one of its own in each.
        results: Logs = context.merge_call(lambda _strategy: self._results())
        return results

    def _results(self) -> Logs:
        results: Logs = {}
        for metric in self.metrics:
            value: Any = metric.result()
            results.update(value if isinstance(value, Mapping) else {metric.name: value})
        return results

    # Training --------------------------------------------------------------------------------

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
    ) -> History:
        """Train the model.

        Parameters
        ----------
        x
            Arrays, or a `Dataset`, a distributed dataset, an iterator or a `DatasetCreator` of
            batches ``(x, y)`` or ``(x, y, sample_weight)``. Batches are global ones: the replicas
            share them.
        y, sample_weight
            Targets and a weight for each example, with arrays.
        batch_size
            Examples of a step, all replicas together; 32 unless given. With arrays only.
        epochs, initial_epoch
            The epochs are ``range(initial_epoch, epochs)``.
        verbose
            0: silent. 1, which ``"auto"`` is: a live line on a terminal, one line for each epoch
            elsewhere. 2: one line for each epoch.
        callbacks
            A list of `Callback`, or a `CallbackList`.
        validation_split
            The share of arrays, their end, that is not trained with but validated on.
        validation_data
            ``(x, y)``, ``(x, y, sample_weight)``, or whatever else `evaluate` takes as ``x``.
        shuffle
            Whether arrays get a new order for each epoch.
        class_weight
            By class number, by which the weights of its examples are multiplied.
        steps_per_epoch
            With it an epoch is so many steps, and goes on where the last one stopped.
        validation_steps, validation_batch_size
            As ``steps`` and ``batch_size`` of `evaluate`.
        validation_freq
            After every so many-th epoch, or after which ones, counted from 1.

        Returns
        -------
        History
            Also kept as ``model.history``.

        Raises
        ------
        ValueError
            For input that does not fit together, or has no batch.

        Warns
        -----
        RuntimeWarning
            Once, with epoch and step, when the loss is no longer a finite number.
        """
        settings = self._settings("fit")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_off(
                x, y, sample_weight, validation_split
            )
        if class_weight is None:
            prepare = None
        else:
            prepare = weighted_by_class(class_weight)
        strategy = self.distribute_strategy
        with strategy.scope():
            batches = batches_of(strategy, x, y, sample_weight, batch_size, shuffle)
            steps = Steps(batches, steps_per_epoch, "steps_per_epoch", goes_on=True)
            validation = None
            if validation_data is not None:
                held_out = _validation_parts(validation_data)
                size = validation_batch_size
                if size is None and held_out[1] is not None:
                    size = batch_size
                validation = Steps(
                    batches_of(strategy, *held_out, size), validation_steps, "validation_steps"
                )
            heard = CallbackList.of(callbacks, self, True, verbose, epochs, steps.total)
            self.history = heard.history
            self._fit(settings, steps, validation, heard, prepare, initial_epoch, validation_freq)
        return self.history

    def _fit(
        self,
        settings: Compiled,
        steps: Steps,
        validation: Steps | None,
        callbacks: CallbackList,
        prepare: Callable[[Any], Any] | None,
        initial_epoch: int,
        validation_freq: int | Sequence[int],
    ) -> None:
        step = self.train_step
        execute = self._executor(step if prepare is None else lambda data: step(prepare(data)))
        self.stop_training = False
        finite = True
        epoch_logs: Logs = {}
        callbacks.on_train_begin()
        for epoch in range(initial_epoch, callbacks.params["epochs"]):
            self.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            logs: Logs | None = None
            for first, batches in steps.epoch(settings.steps_per_execution):
                callbacks.on_train_batch_begin(first)
                logs = _as_logs("train_step", execute(batches)[-1])
                last = first + len(batches) - 1
                if finite and not _is_finite(logs):
                    finite = False
                    _warn_of_loss(logs, epoch, first, last)
                callbacks.on_train_batch_end(last, logs)
                if self.stop_training:
                    break
            if logs is None:
                if epoch == initial_epoch:
                    raise ValueError("fit: the input has no batch")
                warnings.warn(
                    f"there is no input left for epoch {epoch + 1}: training ends", stacklevel=4
                )
                break
            callbacks.params["steps"] = steps.total
            epoch_logs = dict(logs)
            if validation is not None and _is_due(epoch, validation_freq):
                found = self._evaluate(settings, validation, callbacks)
                epoch_logs.update({f"val_{name}": value for name, value in found.items()})
            callbacks.on_epoch_end(epoch, epoch_logs)
            if self.stop_training:
                break
        callbacks.on_train_end(epoch_logs)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Return the loss and the metrics of the model on data.

        Parameters
        ----------
        x, y, batch_size, verbose, sample_weight, callbacks
            As for `fit`.
        steps
            How many batches are looked at; by default all.
        return_dict
            Whether to return a dict by name.

        Returns
        -------
        float, list of float, or dict
            The loss alone, where there are no metrics.
        """
        settings = self._settings("evaluate")
        strategy = self.distribute_strategy
        with strategy.scope():
            batches = batches_of(strategy, x, y, sample_weight, batch_size)
            looked_at = Steps(batches, steps, "steps")
            heard = CallbackList.of(callbacks, self, False, verbose, 1, looked_at.total)
            logs = self._evaluate(settings, looked_at, heard)
        return logs if return_dict else _in_order(logs)

    def _evaluate(self, settings: Compiled, steps: Steps, callbacks: CallbackList) -> Logs:
        execute = self._executor(self.test_step)
        self.reset_metrics()
        logs: Logs | None = None
        callbacks.on_test_begin()
        for first, batches in steps.epoch(settings.steps_per_execution):
            callbacks.on_test_batch_begin(first)
            logs = _as_logs("test_step", execute(batches)[-1])
            callbacks.on_test_batch_end(first + len(batches) - 1, logs)
        if logs is None:
            raise ValueError("evaluate: the input has no batch")
        callbacks.on_test_end(logs)
        return logs

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Return the outputs for all examples, in their order, as NumPy arrays.

        Parameters
        ----------
        x
            As for `fit`; targets and weights in it are not looked at.
        batch_size, verbose, steps, callbacks
            As for `evaluate`.
        """
        strategy = self.distribute_strategy
        at_once = 1 if self._compiled is None else self._compiled.steps_per_execution
        execute = self._executor(self.predict_step)
        outputs: list[Any] = []
        with strategy.scope():
            looked_at = Steps(batches_of(strategy, x, batch_size=batch_size), steps, "steps")
            heard = CallbackList.of(callbacks, self, False, verbose, 1, looked_at.total)
            heard.on_predict_begin()
            for first, batches in looked_at.epoch(at_once):
                heard.on_predict_batch_begin(first)
                found = execute(batches)
                outputs += found
                heard.on_predict_batch_end(first + len(batches) - 1, {"outputs": found[-1]})
            if not outputs:
                raise ValueError("predict: the input has no batch")
            heard.on_predict_end()
        return values_of(outputs)

    # Single batches --------------------------------------------------------------------------

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Make one step with arrays, which the replicas share; returns as `evaluate`.

        The numbers are those of this batch alone.
        """
        self._settings("train_on_batch")
        step = self.train_step
        prepare = None if class_weight is None else weighted_by_class(class_weight)
        return self._on_batch(
            "train_step",
            step if prepare is None else lambda data: step(prepare(data)),
            (x, y, sample_weight),
            return_dict,
        )

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Evaluate one batch of arrays; as `train_on_batch`, without training."""
        self._settings("test_on_batch")
        return self._on_batch("test_step", self.test_step, (x, y, sample_weight), return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Return the outputs for one batch of arrays."""
        with self.distribute_strategy.scope():
            return values_of(self._executor(self.predict_step)([self._distributed(x)]))

    def _on_batch(
        self, name: str, step: Callable[[Any], Any], data: tuple[Any, Any, Any], return_dict: bool
    ) -> Any:
        with self.distribute_strategy.scope():
            self.reset_metrics()
            logs = _as_logs(name, self._executor(step)([self._distributed(*data)])[-1])
        return logs if return_dict else _in_order(logs)

    def _distributed(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Return arrays as one element for the replicas."""
        strategy = self.distribute_strategy
        # No batch is larger than all there is.
        batches = batches_of(strategy, x, y, sample_weight, batch_size=sys.maxsize)
        element = next(iter(batches), None)
        if element is None:
            raise ValueError("the batch has no examples")
        return element

    # Steps -----------------------------------------------------------------------------------

    def _executor(self, step: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
        """Return what makes a step with each of several elements, and returns the replicas' results.

        The replicas make all of them without meeting in between, but where the steps do.
        """
        strategy = self.distribute_strategy

        def replica(work: list[tuple[Any, Share]]) -> list[Any]:
            results = []
            for data, share in work:
                with held(share):
                    results.append(step(data))
            return results

        def execute(elements: list[Any]) -> list[Any]:
            work = [(element, share_of_element(strategy, element)) for element in elements]
            results: list[Any] = strategy.run(replica, args=(work,))
            return results

        return execute


def _not_created_in(strategy: Strategy, what: Any) -> ValueError:
    return ValueError(
        f"Variable ({what!r}) was not created in the distribution strategy scope of ({strategy}). It is "
        "most likely because some layers, model, or optimizer was being created outside the "
        "distribution strategy scope. Try to make sure your code looks similar to the following.\n"
        "with strategy.scope():\n  model=_create_model()\n  model.compile(...)"
    )


def _metrics_in(value: Any) -> Iterable[Metric]:
    """Return the metrics among a layer's attributes, and in lists and dicts there."""
    for child in children_of(value).values():
        if isinstance(child, Metric):
            yield child
        elif isinstance(child, (list, tuple, dict)):
            yield from _metrics_in(child)


def _validation_parts(data: Any) -> tuple[Any, Any, Any]:
    return unpack_x_y_sample_weight(data) if isinstance(data, (tuple, list)) else (data, None, None)


def _as_logs(name: str, results: Any) -> Logs:
    """Return what a step returned as numbers."""
    if not isinstance(results, Mapping):
        raise TypeError(
            f"{name}() must return a dict of what is to be reported, got "
            f"{type(results).__name__}: {results!r}"
        )
    return {str(key): _number(value) for key, value in results.items()}


def _number(value: Any) -> Any:
    """Return a value as a float, or as an array; what differs between replicas is added up."""
    parts = value.values if isinstance(value, DistributedValues) else (value,)
    total: Array = sum(np.asarray(as_tensor(part).numpy()) for part in parts)  # type: ignore[assignment]
    return float(total) if total.size == 1 else total


def _is_finite(logs: Logs) -> bool:
    loss = logs.get("loss")
    return not isinstance(loss, float) or math.isfinite(loss)


def _warn_of_loss(logs: Logs, epoch: int, first: int, last: int) -> None:
    where = f"step {first + 1}" if first == last else f"steps {first + 1} to {last + 1}"
    warnings.warn(
        f"the loss is {logs['loss']} since {where} of epoch {epoch + 1}: the learning rate may be too "
        "high, or the input hold such numbers; keras.callbacks.TerminateOnNaN() ends training then",
        RuntimeWarning,
        stacklevel=5,
    )


def _is_due(epoch: int, frequency: int | Sequence[int]) -> bool:
    if isinstance(frequency, int):
        if frequency < 1:
            raise ValueError(f"validation_freq must be at least 1, got {frequency}")
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency


def _in_order(logs: Logs) -> Any:
    values = list(logs.values())
    return values[0] if len(values) == 1 else values
