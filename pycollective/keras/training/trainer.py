"""`Trainer`: the loops of training."""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pycollective.arguments import whole
from pycollective.distribute.context import current_mode
from pycollective.distribute.coordinator import ClusterCoordinator
from pycollective.distribute.parameter_server import ParameterServerStrategy
from pycollective.errors import FailedPreconditionError, NotFoundError
from pycollective.keras.callbacks import CallbackList, History
from pycollective.keras.optimizers.accumulation import GradientSums, accumulated
from pycollective.keras.training.compiled import Compiled
from pycollective.keras.training.executor import Executor
from pycollective.keras.training.inputs import (
    batches_of,
    divided_among_replicas,
    first_of,
    of_local_replicas,
    rows_of_element,
    sharded_by_rows,
    single_batch,
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
from pycollective.tensor.function import Function
from pycollective.tensor.tape import eagerly

if TYPE_CHECKING:
    from typing_extensions import Self


class Trainer(Learner):
    """Base of `Model`: the methods `fit`, `evaluate` and `predict`.

    The methods run under the strategy whose scope the model was made in. Every example has the same
    weight, also if the replicas' parts of a batch differ in size. So losses, metrics and gradients
    equal those of a single device. After an exception of a method, no step of the method runs.

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

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls, *args, **kwargs)
        _models[next(_count)] = self
        return self

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
        shuffle: bool | str = True,
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
            ``steps_per_epoch``, `fit` reads no more batches from an iterator than the epochs need.
        y, sample_weight
            Targets and a weight for each example; for arrays only.
        batch_size : int, optional
            The number of examples of a step, over all replicas; for arrays only. The default is 32.
        epochs, initial_epoch : int
            The epochs are ``range(initial_epoch, epochs)``.
        verbose
            0: silent. 1 or ``"auto"``: a progress line on a terminal, one line for each epoch
            elsewhere. 2: one line for each epoch. With parameter servers, ``"auto"`` means 2.
        callbacks
            A list of `Callback`, or a `CallbackList`.
        validation_split : float
            The fraction of the arrays, at their end, that is held out for validation.
        validation_data
            ``(x, y)``, ``(x, y, sample_weight)``, or any other ``x`` of `evaluate`.
        shuffle : bool or "batch"
            True to shuffle arrays in each epoch. With ``"batch"``, each batch keeps its rows.
        class_weight
            The factor of the weights of a class's examples, by class number; the default is 1.
        steps_per_epoch : int, optional
            The number of steps of an epoch. The next epoch continues at the next batch.
        validation_steps, validation_batch_size : int, optional
            ``steps`` and ``batch_size`` of `evaluate`.
        validation_freq : int or sequence of int
            A number n, for a validation after every n-th epoch, or a list of epochs, counted from 1.

        Returns
        -------
        History
            The results of each epoch, also kept as ``model.history``.

        Raises
        ------
        ValueError
            For input that is inconsistent, or has no batch. With parameter servers, also for
            ``verbose=1``, and for a model that was compiled with ``run_eagerly=True``.

        Warns
        -----
        RuntimeWarning
            Once, with epoch and step, when the loss is not finite.
        """
        settings = self._settings("fit")
        epochs = whole("epochs", epochs)
        initial_epoch = whole("initial_epoch", initial_epoch)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_off(
                x, y, sample_weight, validation_split
            )
        if class_weight is not None:
            weighted_by_class(class_weight)  # raises the error for wrong classes
        strategy = self.distribute_strategy
        with strategy.scope():
            epochs_left = range(initial_epoch, epochs)
            needed = _needed(steps_per_epoch, len(epochs_left))
            x = self._prepare_workers(
                "train_step", x, y, sample_weight, batch_size, training_batches_of
            )
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
                    class_weight,
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
        class_weight: Mapping[int, float] | None,
        initial_epoch: int,
        validation_freq: int | Sequence[int],
    ) -> None:
        together = settings.accumulate_steps
        later = self._reports_later("train_step")
        execute = self._executor("train_step", together, not later, class_weight=class_weight)
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
            with execute:
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
        steps : int, optional
            The number of batches; the default is all.
        return_dict : bool
            True to return a dict by name.

        Returns
        -------
        float, list of float, or dict
            The loss and the metrics; without metrics, the loss alone.

        Raises
        ------
        ValueError
            As for `fit`.
        """
        settings = self._settings("evaluate")
        strategy = self.distribute_strategy
        with strategy.scope():
            needed = _needed(steps, 1)
            x = self._prepare_workers("test_step", x, y, sample_weight, batch_size)
            batches = batches_of(strategy, x, y, sample_weight, batch_size, at_most=needed)
            epoch_steps = Steps(batches, steps, "steps")
            verbose = self._verbosity(verbose)
            callback_list = CallbackList.of(callbacks, self, False, verbose, 1, epoch_steps.total)
            logs = self._evaluate(settings, epoch_steps, callback_list)
        return logs if return_dict else _in_order(logs)

    def _evaluate(self, settings: Compiled, steps: Steps, callbacks: CallbackList) -> Logs:
        later = self._reports_later("test_step")
        execute = self._executor("test_step", 1, not later)
        self.reset_metrics()
        logs: Logs | None = None
        self.stop_evaluating = False
        callbacks.on_test_begin()
        with execute:
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

        Returns
        -------
        ndarray, or a nest of ndarrays
            The outputs of all examples, along the first axis. Every worker gets all of them. Those of
            a distributed dataset are in the order of its steps, and of the replicas in each.

        Raises
        ------
        ValueError
            As for `fit`.
        """
        strategy = self.distribute_strategy
        per_execution = 1 if self._compiled is None else self._compiled.steps_per_execution
        outputs: list[Any] = []
        self.stop_predicting = False
        with strategy.scope():
            if callbacks is None and steps is None and verbose == 0:
                # A loop over one batch would cost more than a small model.
                batch = single_batch(strategy, x, batch_size=batch_size)
                if batch is not None:
                    found = self._make_steps([batch], "predict_step", 1, True, None)
                    return values_of(strategy, found)
            x = self._prepare_workers("predict_step", x, batch_size=batch_size)
            execute = self._executor("predict_step", keep_all=True)
            rows = sharded_by_rows(strategy, x)
            needed = _needed(steps, 1)
            batches = batches_of(strategy, rows, batch_size=batch_size, at_most=needed)
            epoch_steps = Steps(batches, steps, "steps")
            verbose = self._verbosity(verbose)
            callback_list = CallbackList.of(callbacks, self, False, verbose, 1, epoch_steps.total)
            callback_list.on_predict_begin()
            with execute:
                for first, batches in epoch_steps.epoch(per_execution):
                    callback_list.on_predict_batch_begin(first)
                    found = execute(batches)
                    outputs += found
                    last = first + len(batches) - 1
                    ready = {}
                    if found:  # workers may not be ready
                        ready["outputs"] = of_local_replicas(found[-1]) if callbacks else found[-1]
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
        """Make one training step with one batch of arrays, which the replicas share.

        Parameters
        ----------
        x, y, sample_weight, class_weight
            As for `fit`, but arrays only.
        return_dict : bool
            True to return a dict by name.

        Returns
        -------
        float, list of float, or dict
            The loss and the metrics of this batch alone, in the form of `evaluate`.

        Raises
        ------
        ValueError
            If the arrays are inconsistent, or have no examples.
        """
        self._settings("train_on_batch")
        return self._on_batch("train_step", (x, y, sample_weight), return_dict, class_weight)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Evaluate one batch of arrays; parameters, result and errors are as for `train_on_batch`."""
        self._settings("test_on_batch")
        return self._on_batch("test_step", (x, y, sample_weight), return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Return the outputs for one batch of arrays as NumPy arrays, like `predict`."""
        with self.distribute_strategy.scope():
            self._prepare_workers("predict_step", x)
            outputs = self._at_once("predict_step", self._distributed(x))
            return values_of(self.distribute_strategy, outputs)

    def _on_batch(
        self,
        name: str,
        data: tuple[Any, Any, Any],
        return_dict: bool,
        class_weight: Mapping[int, float] | None = None,
    ) -> Any:
        with self.distribute_strategy.scope():
            self._prepare_workers(name, *data)
            element = self._distributed(*data)
            self.reset_metrics()
            logs = numbers_of(name, self._at_once(name, element, class_weight)[-1])
        return logs if return_dict else _in_order(logs)

    def _distributed(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Return arrays as one element for the replicas."""
        strategy = self.distribute_strategy
        # A batch size larger than any array makes one batch.
        element = single_batch(strategy, x, y, sample_weight, sys.maxsize)
        if element is None:
            batches = batches_of(strategy, x, y, sample_weight, batch_size=sys.maxsize)
            element = next(iter(batches), None)
        if element is None:
            raise ValueError("the batch has no examples")
        return element

    # Steps -----------------------------------------------------------------------------------

    def _at_once(
        self, step: str, element: Any, class_weight: Mapping[int, float] | None = None
    ) -> list[Any]:
        """Return the result of a step with one element, in a list."""
        with self._executor(step, class_weight=class_weight) as execute:
            return execute([element]) or execute.finish()

    def _logs_of(self, name: str, results: list[Any], later: bool) -> Logs:
        """Return the numbers to report after steps, by name.

        With ``later``, compute the numbers from the metrics now; while workers make the steps, the
        metrics include only the steps that have ended. Otherwise return the last of the results.
        """
        if not results and not later:
            return {}
        return numbers_of(name, self._results() if later else results[-1])

    def _verbosity(self, verbose: Any) -> Any:
        """Return the level of output; raise ``ValueError`` if parameter servers do not support it.

        ``run_eagerly`` also raises ``ValueError`` with parameter servers.
        """
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
        """Return True if the model does not override the step or the methods that report metrics.

        The step then returns the result of `get_metrics_result`. This result can be computed after
        the step, so the replicas need no synchronization in the step.
        """
        methods = {
            name: getattr(self, name) for name in (step, "compute_metrics", "get_metrics_result")
        }
        return all(
            getattr(method, "__func__", None) is getattr(Learner, name)
            for name, method in methods.items()
        )

    def _executor(
        self,
        step: str,
        together: int = 1,
        reports: bool = True,
        keep_all: bool = False,
        class_weight: Mapping[int, float] | None = None,
    ) -> Executor:
        """Return an `Executor` that calls the method named ``step`` with each of several elements.

        Each ``together`` elements make one step of the optimizer, and count as one batch in the loss.
        ``reports`` is True if the steps must return the results of the metrics.
        """
        weights = None if class_weight is None else dict(class_weight)
        settings = step, together, reports, weights
        strategy = self.distribute_strategy
        if isinstance(strategy, ParameterServerStrategy):
            in_processes = strategy.extended.tasks is not None
            model = _number_of(self), *(self._state_of_program(step) if in_processes else [])
            return Executor(strategy, _steps, (model, *settings), keep_all)
        return Executor(strategy, self._make_steps, settings, keep_all)

    def _state_of_program(self, step: str) -> list[Any]:
        """Return the part of a step's state that a worker of a cluster does not learn from the chief.

        This is the number of calls of `compile`, and for each variable True if it is trained.
        """
        if step == "predict_step":
            return []
        trained = set(map(id, self.trainable_variables))
        return [self._compilations, [id(variable) in trained for variable in self.variables]]

    def _make_steps(
        self,
        elements: list[Any],
        step: str,
        together: int,
        reports: bool,
        class_weight: Mapping[int, float] | None,
    ) -> list[Any]:
        """Call the method named ``step`` with each element, in all replicas; return the results."""
        strategy, make = self.distribute_strategy, getattr(self, step)
        if isinstance(strategy, ParameterServerStrategy):
            elements = [divided_among_replicas(strategy, element) for element in elements]
        if self.run_eagerly:
            make = eagerly(make)
        prepare = None if class_weight is None else weighted_by_class(class_weight)
        rows = [rows_of_element(strategy, element) for element in elements]

        def replica(batches: list[Any]) -> list[Any]:
            results = []
            mode = current_mode()
            place = 0 if mode is None else mode.replica or 0
            sums = GradientSums() if together > 1 else None
            for number, data in enumerate(batches):
                first = number - number % together
                total = sum([count for _, count in rows[first : first + together]])
                if sums is not None:
                    sums.last = number + 1 in (first + together, len(batches))
                counts, _ = rows[number]
                # An element that is not a `DistributedValues` has one part, which every replica gets.
                share = StepShare(counts[place] if len(counts) > 1 else counts[0], total)
                with share_scope(share, reports), accumulated(sums):
                    results.append(make(data if prepare is None else prepare(data)))
            return results

        results: list[Any] = strategy.run(replica, args=(elements,))
        return results

    def _prepare_workers(
        self,
        step: str,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        batches_for: Callable[..., Any] = batches_of,
    ) -> Any:
        """Create a step's variables in a cluster with parameter servers; return the input.

        The chief and the workers make the step once with the first batch, which creates the variables
        of the step in each process. The variables then get back their earlier values. In a worker's
        process, this method runs the functions that the chief schedules, and does not return.
        """
        strategy = self.distribute_strategy
        if not isinstance(strategy, ParameterServerStrategy) or strategy.extended.tasks is None:
            return x
        coordinator = ClusterCoordinator(strategy)
        if step not in self._steps_with_variables:
            sample = x
            if isinstance(x, Iterator):
                first = list(itertools.islice(x, 1))
                sample, x = iter(first), itertools.chain(first, x)
            batches = batches_for(strategy, sample, y, sample_weight, batch_size, False, 1)
            element = first_of(batches)
            if element is not None:
                coordinator.create_variables(
                    lambda: self._make_steps([element], step, 1, True, None)
                )
                self._steps_with_variables |= {step}
        coordinator.become_worker()
        return x


#: All models, by the order of their creation, which is the same in all processes of a program.
_models: weakref.WeakValueDictionary[int, Trainer] = weakref.WeakValueDictionary()
_count = itertools.count()


def _number_of(model: Trainer) -> int:
    return next(number for number, found in list(_models.items()) if found is model)


@partial(Function, checked=False)  # the models of later calls may create variables
def _steps(elements: list[Any], of_chief: tuple[Any, ...], step: str, *settings: Any) -> list[Any]:
    """Make a step of a model with each element, or with the next batch of a worker's iterator."""
    number, *state = of_chief
    model = _models.get(number)
    if model is None:
        raise NotFoundError(
            f"model {number} is not known to the worker: make all models before the first call of "
            "`fit`, `evaluate`, `predict` or ClusterCoordinator.schedule(), and keep them"
        )
    if state and state != model._state_of_program(step):
        raise FailedPreconditionError(
            f"the chief has called compile() of the model {model.name!r}, or changed `trainable` of its "
            "layers, after the workers began. A worker runs the program up to the first call of `fit`, "
            "`evaluate`, `predict` or ClusterCoordinator.schedule(). Make these changes before that call"
        )
    elements = [next(e) if isinstance(e, Iterator) else e for e in elements]
    return model._make_steps(elements, step, *settings)


def _validation_parts(data: Any) -> tuple[Any, Any, Any]:
    return unpack_x_y_sample_weight(data) if isinstance(data, (tuple, list)) else (data, None, None)


def _needed(steps: int | None, times: int) -> int | None:
    """Return the number of batches that ``times`` epochs of ``steps`` steps need; None: all."""
    return None if steps is None else max(int(steps), 0) * times


def _is_due(epoch: int, frequency: int | Sequence[int]) -> bool:
    if isinstance(frequency, int):
        if frequency < 1:
            raise ValueError(f"validation_freq must be at least 1, got {frequency}")
        return (epoch + 1) % frequency == 0
    return epoch + 1 in frequency


def _in_order(logs: Logs) -> Any:
    values = list(logs.values())
    return values[0] if len(values) == 1 else values
