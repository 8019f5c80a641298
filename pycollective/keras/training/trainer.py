"""`Trainer`: the loops of training."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pycollective.distribute.parameter_server import ParameterServerStrategy
from pycollective.keras.callbacks import CallbackList, History
from pycollective.keras.optimizers.gathering import Gathering, gathered
from pycollective.keras.training.compiled import Compiled
from pycollective.keras.training.executor import Executor
from pycollective.keras.training.inputs import (
    batches_of,
    sharded_by_rows,
    share_of_element,
    split_off,
    training_batches_of,
    values_of,
    weighted_by_class,
)
from pycollective.keras.training.learner import Learner, Logs
from pycollective.keras.training.numbers import LossWatch, numbers_of
from pycollective.keras.training.share import StepShare, share_scope
from pycollective.keras.training.steps import Steps
from pycollective.keras.utils.batches import unpack_x_y_sample_weight


class Trainer(Learner):
    """Base of `Model`: the methods `fit`, `evaluate` and `predict`.

    The methods run under the strategy whose scope the model was made in. Every example has the same
    weight, also if the replicas' parts of a batch differ in size. So losses, metrics and gradients
    equal those of a single device.

    Attributes
    ----------
    stop_training, stop_evaluating, stop_predicting : bool
        Set by callbacks to end `fit`, `evaluate` or `predict` after the current step.
    history : History
        The result of the last `fit`.
    """

    _untracked = Learner._untracked | {"history"}

    stop_training = False
    stop_evaluating = False
    stop_predicting = False
    history: History
    #: The position at which interrupted training resumes; a callback sets it in ``on_train_begin``.
    _initial_epoch: int = 0
    _initial_step: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for kind in ("train", "test", "predict"):
            if f"make_{kind}_function" in cls.__dict__:
                raise TypeError(
                    f"{cls.__name__} overrides make_{kind}_function(), which pycollective never "
                    f"calls; override {kind}_step() instead"
                )

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
            Arrays or PyTorch tensors, in a list or dict for several inputs, or a source of batches
            ``(x, y)`` or ``(x, y, sample_weight)``. A source is a `Dataset`, a distributed dataset,
            a `PyDataset`, a `DatasetCreator`, an iterator, or another iterable such as PyTorch's
            ``DataLoader``. Batches are global: the replicas share each batch. With
            ``steps_per_epoch``, no more batches are read from an iterator than the epochs need.
        y, sample_weight
            Targets and a weight for each example; for arrays only.
        batch_size
            The number of examples of a step, over all replicas; for arrays only. The default is 32.
        epochs, initial_epoch
            The epochs are ``range(initial_epoch, epochs)``.
        verbose
            0: silent. 1 or ``"auto"``: a progress line on a terminal, one line for each epoch
            elsewhere. 2: one line for each epoch.
        callbacks
            A list of `Callback`, or a `CallbackList`.
        validation_split
            The fraction of the arrays, at their end, that is held out for validation.
        validation_data
            ``(x, y)``, ``(x, y, sample_weight)``, or any other ``x`` of `evaluate`.
        shuffle
            True to shuffle arrays in each epoch.
        class_weight
            The factor of the weights of a class's examples, by class number; the default is 1.
        steps_per_epoch
            The number of steps of an epoch. The next epoch continues at the next batch.
        validation_steps, validation_batch_size
            ``steps`` and ``batch_size`` of `evaluate`.
        validation_freq
            A number n, for a validation after every n-th epoch, or a list of epochs, from 1.

        Returns
        -------
        History
            The results of each epoch, also kept as ``model.history``.

        Raises
        ------
        ValueError
            For input that is inconsistent, or has no batch.

        Warns
        -----
        RuntimeWarning
            Once, with epoch and step, when the loss is not finite.
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
            epochs_left = range(initial_epoch, epochs)
            needed = _needed(steps_per_epoch, len(epochs_left))
            batches = training_batches_of(
                strategy, x, y, sample_weight, batch_size, shuffle, needed
            )
            steps = Steps(batches, steps_per_epoch, "steps_per_epoch", resumes=True)
            validation = None
            if validation_data is not None:
                held_out = _validation_parts(validation_data)
                size = validation_batch_size
                if size is None and held_out[1] is not None:
                    size = batch_size
                times = sum(_is_due(epoch, validation_freq) for epoch in epochs_left)
                needed = _needed(validation_steps, times)
                validation = Steps(
                    batches_of(strategy, *held_out, size, at_most=needed),
                    validation_steps,
                    "validation_steps",
                    # An iterator cannot start again.
                    resumes=isinstance(held_out[0], Iterator),
                )
            verbose = self._verbosity(verbose)
            callback_list = CallbackList.of(callbacks, self, True, verbose, epochs, steps.total)
            self.history = callback_list.history
            try:
                self._fit(
                    settings,
                    steps,
                    validation,
                    callback_list,
                    prepare,
                    initial_epoch,
                    validation_freq,
                )
            except BaseException as error:
                callback_list.abandon(error)
                raise
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
        together = settings.accumulate_steps
        later = self._reports_later("train_step")
        execute = self._executor(
            step if prepare is None else lambda data: step(prepare(data)), together, not later
        )
        self.stop_training = False
        watch = LossWatch()
        epoch_logs: Logs = {}
        self._initial_epoch, self._initial_step = initial_epoch, 0
        callbacks.on_train_begin()
        initial_epoch = self._initial_epoch
        done = self._initial_step
        for epoch in range(initial_epoch, callbacks.params["epochs"]):
            self.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            logs: Logs | None = None
            for first, batches in steps.epoch(settings.steps_per_execution * together, done):
                callbacks.on_train_batch_begin(first)
                logs = self._logs_of("train_step", execute(batches), later)
                last = first + len(batches) - 1
                watch.check(logs, epoch, first, last)
                callbacks.on_train_batch_end(last, logs)
                if self.stop_training:
                    break
            results = execute.finish()
            if results:
                logs = self._logs_of("train_step", results, later)
            if logs is None and done:
                # The interruption was between the last batch and the end of the epoch.
                done = 0
                continue
            done = 0
            if logs is None:
                if epoch == initial_epoch:
                    raise ValueError("fit: the input has no batch")
                warnings.warn(
                    f"there is no input left for epoch {epoch + 1}: training ends", stacklevel=4
                )
                break
            watch.check_pending()
            callbacks.params["steps"] = steps.total
            epoch_logs = dict(logs)
            if validation is not None and _is_due(epoch, validation_freq):
                found = self._evaluate(settings, validation, callbacks)
                epoch_logs.update({f"val_{name}": value for name, value in found.items()})
            callbacks.on_epoch_end(epoch, epoch_logs)
            if self.stop_training:
                break
        if self.optimizer is not None:
            self.optimizer.finalize_variable_values(self.trainable_variables)
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
            The number of batches; the default is all.
        return_dict
            True to return a dict by name.

        Returns
        -------
        float, list of float, or dict
            The loss and the metrics; without metrics, the loss alone.
        """
        settings = self._settings("evaluate")
        strategy = self.distribute_strategy
        with strategy.scope():
            needed = _needed(steps, 1)
            batches = batches_of(strategy, x, y, sample_weight, batch_size, at_most=needed)
            epoch_steps = Steps(batches, steps, "steps")
            verbose = self._verbosity(verbose)
            callback_list = CallbackList.of(callbacks, self, False, verbose, 1, epoch_steps.total)
            logs = self._evaluate(settings, epoch_steps, callback_list)
        return logs if return_dict else _in_order(logs)

    def _evaluate(self, settings: Compiled, steps: Steps, callbacks: CallbackList) -> Logs:
        later = self._reports_later("test_step")
        execute = self._executor(self.test_step, 1, not later)
        self.reset_metrics()
        logs: Logs | None = None
        self.stop_evaluating = False
        callbacks.on_test_begin()
        for first, batches in steps.epoch(settings.steps_per_execution):
            callbacks.on_test_batch_begin(first)
            logs = self._logs_of("test_step", execute(batches), later)
            callbacks.on_test_batch_end(first + len(batches) - 1, logs)
            if self.stop_evaluating:
                break
        results = execute.finish()
        if results:
            logs = self._logs_of("test_step", results, later)
        if logs is None:
            raise ValueError(
                "evaluate: the input has no batch, or is an iterator at its end; give "
                "`validation_steps` if one iterator is to serve several epochs"
            )
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
            As for `fit`; targets and weights are ignored.
        batch_size, verbose, steps, callbacks
            As for `evaluate`.
        """
        strategy = self.distribute_strategy
        at_once = 1 if self._compiled is None else self._compiled.steps_per_execution
        execute = self._executor(self.predict_step, keep_all=True)
        outputs: list[Any] = []
        with strategy.scope():
            rows = sharded_by_rows(strategy, x)
            needed = _needed(steps, 1)
            batches = batches_of(strategy, rows, batch_size=batch_size, at_most=needed)
            epoch_steps = Steps(batches, steps, "steps")
            verbose = self._verbosity(verbose)
            callback_list = CallbackList.of(callbacks, self, False, verbose, 1, epoch_steps.total)
            self.stop_predicting = False
            callback_list.on_predict_begin()
            for first, batches in epoch_steps.epoch(at_once):
                callback_list.on_predict_batch_begin(first)
                found = execute(batches)
                outputs += found
                last = first + len(batches) - 1
                ready = {"outputs": found[-1]} if found else {}  # workers may not be ready
                callback_list.on_predict_batch_end(last, ready)
                if self.stop_predicting:
                    break
            outputs += execute.finish()
            if not outputs:
                raise ValueError("predict: the input has no batch")
            callback_list.on_predict_end()
            return values_of(strategy, outputs)

    # Single batches --------------------------------------------------------------------------

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Make one step with arrays, which the replicas share.

        Return the loss and metrics of this batch alone, in the form of `evaluate`.
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
        """Evaluate one batch of arrays, with the result of `train_on_batch`."""
        self._settings("test_on_batch")
        return self._on_batch("test_step", self.test_step, (x, y, sample_weight), return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Return the outputs for one batch of arrays."""
        with self.distribute_strategy.scope():
            outputs = self._at_once(self.predict_step, self._distributed(x))
            return values_of(self.distribute_strategy, outputs)

    def _on_batch(
        self, name: str, step: Callable[[Any], Any], data: tuple[Any, Any, Any], return_dict: bool
    ) -> Any:
        with self.distribute_strategy.scope():
            self.reset_metrics()
            logs = numbers_of(name, self._at_once(step, self._distributed(*data))[-1])
        return logs if return_dict else _in_order(logs)

    def _distributed(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Return arrays as one element for the replicas."""
        strategy = self.distribute_strategy
        # A batch size larger than any array makes one batch.
        batches = batches_of(strategy, x, y, sample_weight, batch_size=sys.maxsize)
        element = next(iter(batches), None)
        if element is None:
            raise ValueError("the batch has no examples")
        return element

    # Steps -----------------------------------------------------------------------------------

    def _at_once(self, step: Callable[[Any], Any], element: Any) -> list[Any]:
        """Return the result of a step with one element, in a list."""
        execute = self._executor(step)
        return execute([element]) or execute.finish()

    def _logs_of(self, name: str, results: list[Any], later: bool) -> Logs:
        """Return the last of several results as numbers, or those of the metrics if they are known.

        While workers make the steps, the numbers are those of the steps that have ended.
        """
        if not results and not later:
            return {}
        return numbers_of(name, self._results() if later else results[-1])

    def _verbosity(self, verbose: Any) -> Any:
        """Return the argument ``verbose``; raise ValueError for what parameter servers cannot do."""
        if not isinstance(self.distribute_strategy, ParameterServerStrategy):
            return verbose
        if self.run_eagerly:
            raise ValueError(
                "When using `Model` with `ParameterServerStrategy`, `run_eagerly` is not supported."
            )
        if verbose == 1:
            raise ValueError(
                "`verbose=1` is not allowed with `ParameterServerStrategy` for performance reasons. "
                f"Received: verbose={verbose}; use 2, a line for each epoch"
            )
        return 2 if verbose == "auto" else verbose

    def _reports_later(self, step: str) -> bool:
        """Return True if a step returns exactly the result of `get_metrics_result`.

        Such a result can be read after the replicas are done, without a synchronization in the step.
        """
        own = {
            name: getattr(self, name) for name in (step, "compute_metrics", "get_metrics_result")
        }
        return all(
            getattr(method, "__func__", None) is getattr(Learner, name)
            for name, method in own.items()
        )

    def _executor(
        self,
        step: Callable[[Any], Any],
        together: int = 1,
        reports: bool = True,
        keep_all: bool = False,
    ) -> Executor:
        """Return a function that makes a step with each of several elements.

        The function returns the replicas' results. Only the steps themselves synchronize the
        replicas. Each ``together`` elements make one step of the optimizer, and one batch to the
        loss. ``reports`` is True if the steps must return the results of the metrics.
        """
        strategy = self.distribute_strategy

        def replica(work: list[tuple[Any, StepShare]]) -> list[Any]:
            results = []
            gathering = Gathering() if together > 1 else None
            for number, (data, share) in enumerate(work, 1):
                if gathering is not None:
                    gathering.last = number % together == 0 or number == len(work)
                with share_scope(share, reports), gathered(gathering):
                    results.append(step(data))
            return results

        def run(elements: list[Any]) -> list[Any]:
            shares = [share_of_element(strategy, element) for element in elements]
            shares = _joined_shares(shares, together)
            results: list[Any] = strategy.run(
                replica, args=(list(zip(elements, shares, strict=True)),)
            )
            return results

        return Executor(strategy, run, keep_all)


def _joined_shares(shares: list[StepShare], together: int) -> list[StepShare]:
    """Return the batches' shares, with the total of each ``together`` batches as one step."""
    joined = []
    for first in range(0, len(shares), together):
        step = shares[first : first + together]
        total = sum(share.total for share in step)
        joined += [StepShare(share.rows, total) for share in step]
    return joined


def _validation_parts(data: Any) -> tuple[Any, Any, Any]:
    return unpack_x_y_sample_weight(data) if isinstance(data, (tuple, list)) else (data, None, None)


def _needed(steps: int | None, times: int) -> int | None:
    """Return the number of batches that ``times`` epochs of ``steps`` steps need; None: all."""
    return None if steps is None else max(steps, 0) * times


def _is_due(epoch: int, frequency: int | Sequence[int]) -> bool:
    if isinstance(frequency, int):
        if frequency < 1:
            raise ValueError(f"validation_freq must be at least 1, got {frequency}")
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency


def _in_order(logs: Logs) -> Any:
    values = list(logs.values())
    return values[0] if len(values) == 1 else values
