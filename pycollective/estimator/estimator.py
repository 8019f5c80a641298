"""`Estimator`: training, evaluation and prediction with a model function."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pycollective.arguments import path_of
from pycollective.data import Dataset
from pycollective.distribute.context import has_strategy
from pycollective.distribute.coordinator import ClusterCoordinator
from pycollective.distribute.default import default_strategy
from pycollective.distribute.input_options import InputContext
from pycollective.distribute.parameter_server import ParameterServerStrategy
from pycollective.distribute.strategy import Strategy
from pycollective.estimator.config import RunConfig
from pycollective.estimator.hooks import (
    CheckpointSaverListener,
    HookRun,
    NanLossDuringTrainingError,
    SessionRunHook,
)
from pycollective.estimator.specs import EstimatorSpec, ModeKeys, check_positive, checked_hooks
from pycollective.estimator.steps import StepModel
from pycollective.keras.callbacks import Callback
from pycollective.train.files import read_files
from pycollective.train.manager import CheckpointManager
from pycollective.train.state import latest_checkpoint

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("pycollective")
_Result = TypeVar("_Result")

#: The name of the model in checkpoints, and the argument names of a model function.
_PREFIX = "model/"
_ARGUMENTS = {"features", "labels", "mode", "params", "config", "self"}


class Estimator:
    """A model function with the loops of training, evaluation and prediction.

    Parameters
    ----------
    model_fn : callable
        ``model_fn(features, labels, mode, params, config)`` returns an `EstimatorSpec`. All arguments
        but ``features`` may be left out. It is called for every batch, in every replica. It makes its
        layers, optimizers and metrics in each call; their variables are made in the first call.
    model_dir : str, optional
        The directory of the checkpoints, instead of ``config.model_dir``. Training continues from its
        newest checkpoint.
    config : RunConfig, optional
        The settings.
    params : dict, optional
        The argument ``params`` of ``model_fn`` and of input functions.
    warm_start_from : str, optional
        A checkpoint, or a directory with checkpoints. `train` gives its values to the variables that
        are trained, if ``model_dir`` has no checkpoint.

    Raises
    ------
    ValueError, TypeError
        An argument has a wrong type, ``model_fn`` has other arguments, or ``model_dir`` and
        ``config`` name different directories.
    RuntimeError
        The call is in the scope of a strategy.
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | None = None,
    ) -> None:
        if model_fn is None:
            raise ValueError("model_fn must be provided to Estimator.")
        if has_strategy():
            raise RuntimeError(
                "an Estimator enters the scope of its strategy itself: make it outside of the scope, "
                "with RunConfig(train_distribute=strategy)"
            )
        if config is not None and not isinstance(config, RunConfig):
            raise ValueError(f"`config` must be an instance of `RunConfig`, received {config!r}.")
        _check_model_fn(model_fn, params)
        self._model_fn, self._params = model_fn, dict(params or {})
        self._config = _with_directory(config or RunConfig(), model_dir)
        self._warm_start_from = warm_start_from
        # Hooks may evaluate during training, so evaluations have variables of their own.
        self._train_model = self._new_model(self._config.train_distribute)
        self._eval_model = self._new_model(self._config.eval_distribute)

    # Attributes ------------------------------------------------------------------------------

    @property
    def model_dir(self) -> str:
        """The directory of the checkpoints."""
        return str(self._config.model_dir)

    @property
    def config(self) -> RunConfig:
        """The settings."""
        return self._config

    @property
    def params(self) -> dict[str, Any]:
        """A copy of the parameters."""
        return dict(self._params)

    @property
    def model_fn(self) -> Callable[[Any, Any, str, RunConfig], EstimatorSpec]:
        """The model function, as a function of features, labels, mode and config."""
        return lambda features, labels, mode, config: self._call(features, labels, mode, config)

    def latest_checkpoint(self) -> str | None:
        """Return the path of the newest checkpoint, or None."""
        return latest_checkpoint(self.model_dir)

    def get_variable_names(self) -> list[str]:
        """Return the names of the variables of the newest checkpoint, sorted.

        Raises
        ------
        ValueError
            There is no checkpoint.
        """
        return sorted(self._saved())

    def get_variable_value(self, name: str) -> np.ndarray:
        """Return the value of a variable of the newest checkpoint.

        Raises
        ------
        ValueError
            There is no checkpoint, or no such variable.
        """
        saved = self._saved()
        if name not in saved:
            raise ValueError(
                f"the checkpoint of {self.model_dir} has no variable {name!r}; it has {sorted(saved)}"
            )
        return np.array(saved[name])

    def _saved(self) -> dict[str, Any]:
        path = self.latest_checkpoint()
        if path is None:
            raise ValueError(f"Could not find trained model in model_dir: {self.model_dir}.")
        tensors = read_files(path).tensors
        return {
            name[len(_PREFIX) :]: value
            for name, value in tensors.items()
            if name.startswith(_PREFIX)
        }

    # Training --------------------------------------------------------------------------------

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> Self:
        """Train the model, from the newest checkpoint of ``model_dir`` on.

        Parameters
        ----------
        input_fn : callable
            A function that returns a `Dataset` of ``(features, labels)`` in batches for one replica, or
            one such pair of tensors, which is used in every step. It gets those of the arguments
            ``input_context``, ``mode``, ``params`` and ``config`` that it has.
        hooks : sequence of SessionRunHook
            Objects that are called before and after each step.
        steps : int, optional
            The number of steps; by default the input ends the training.
        max_steps : int, optional
            The global step at which training ends, also counting the steps of earlier calls.
        saving_listeners : sequence of CheckpointSaverListener
            Objects that are called when a checkpoint is saved.

        Raises
        ------
        ValueError
            Both numbers are given, a number is not positive, or the input has no batch.
        NanLossDuringTrainingError
            The loss is NaN. Under a `ParameterServerStrategy` this is noticed at the end of training.
        """
        hooks = checked_hooks(hooks)
        if steps is not None and max_steps is not None:
            raise ValueError("Can not provide both steps and max_steps.")
        check_positive("steps", steps)
        check_positive("max_steps", max_steps)
        listeners = list(saving_listeners or ())
        for listener in listeners:
            if not isinstance(listener, CheckpointSaverListener):
                raise TypeError(
                    "saving_listeners must be a list of CheckpointSaverListener, given: "
                    f"{listener!r}"
                )
        self._forget_unsaved()
        model = self._train_model
        latest = self.latest_checkpoint()
        model.shared.only_trained_are_restored = latest is None
        _restore(model, latest or self._warm_start())
        if latest is None:
            model.shared.global_step.assign(0)
        if max_steps is not None:
            steps = max_steps - model.step
            if steps <= 0:
                _log.info("Skipping training since max_steps has already saved.")
                return self
        batches = self._batches(model, input_fn, ModeKeys.TRAIN)
        watcher = _Training(self._config, hooks, listeners)
        with warnings.catch_warnings():
            # The end of the input is an ordinary end of training.
            warnings.filterwarnings("ignore", "Your input ran out of data")
            warnings.filterwarnings("ignore", "the loss is nan")  # raised as an error
            model.fit(batches, steps_per_epoch=steps or sys.maxsize, callbacks=[watcher], verbose=0)
        return self

    def _warm_start(self) -> str | None:
        path = self._warm_start_from
        if path is None or not os.path.isdir(path):
            return path
        found = latest_checkpoint(path)
        if found is None:
            raise ValueError(f"warm_start_from={path!r} is a directory without a checkpoint")
        return found

    # Evaluation and prediction ---------------------------------------------------------------

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Return the loss, the metrics and the global step, by name.

        Parameters
        ----------
        input_fn
            As for `train`.
        steps : int, optional
            The number of steps; by default the input ends the evaluation.
        hooks
            As for `train`.
        checkpoint_path : str, optional
            The checkpoint; by default the newest one of ``model_dir``, or initial values without one.
        name : str, optional
            The name of the evaluation in the log.
        """
        hooks = checked_hooks(hooks)
        check_positive("steps", steps)
        return _outside_scopes(self._evaluate, input_fn, steps, hooks, checkpoint_path, name)

    def _evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None,
        hooks: Sequence[SessionRunHook],
        checkpoint_path: str | None,
        name: str | None,
    ) -> dict[str, Any]:
        model = self._eval_model
        self._restore_or_warn(model, checkpoint_path, "evaluate")
        batches = self._batches(model, input_fn, ModeKeys.EVAL)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Your input ran out of data")
            model.evaluate(
                batches,
                steps=steps or sys.maxsize,
                callbacks=[_Evaluation(hooks)],
                verbose=0,
                return_dict=True,
            )
        found = model.evaluation()
        label = "" if name is None else f" of {name!r}"
        values = ", ".join(f"{key} = {value}" for key, value in found.items())
        _log.info("Evaluation%s at global step %d: %s", label, found["global_step"], values)
        return found

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: str | Sequence[str] | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yield the predictions of each example, as arrays; labels of the input are ignored.

        The model function runs without replicas.

        Parameters
        ----------
        input_fn, hooks, checkpoint_path
            As for `evaluate`.
        predict_keys : sequence of str, optional
            The keys of the predictions to yield; by default all.
        yield_single_examples : bool
            False to yield the predictions of whole batches.

        Raises
        ------
        ValueError
            No prediction has one of the keys, or keys are given for predictions without keys.
        """
        run_hooks = checked_hooks(hooks)
        # Several iterators may be in use, each with its own checkpoint.
        model = _outside_scopes(self._new_model, None)
        self._restore_or_warn(model, checkpoint_path, "predict")
        running: HookRun | None = None
        for element in self._dataset(input_fn, ModeKeys.PREDICT, None):
            features = element[0] if isinstance(element, tuple) else element
            if running is None:
                running = HookRun(run_hooks)
            running.before()
            first = ModeKeys.PREDICT not in model.first
            found = _chosen(_outside_scopes(model.predictions, features), predict_keys)
            over = running.after({"global_step": model.step})
            if first:
                running.add(model.first[ModeKeys.PREDICT].prediction_hooks)
            yield from model.rows_of(found) if yield_single_examples else (found,)
            if over:
                break
        if running is not None:
            running.end()

    def _restore_or_warn(self, model: StepModel, path: str | None, call: str) -> None:
        path = path or self.latest_checkpoint()
        if path is None:
            _log.info(
                "Could not find trained model in model_dir: %s, running initialization to %s.",
                self.model_dir,
                call,
            )
        _outside_scopes(_restore, model, path)

    # The model function and the input --------------------------------------------------------

    def _forget_unsaved(self) -> None:
        """Begin anew if a training changed the model and failed before its first checkpoint."""
        if ModeKeys.TRAIN in self._train_model.first and self.latest_checkpoint() is None:
            self._train_model = self._new_model(self._config.train_distribute)

    def _new_model(self, strategy: Strategy | None) -> StepModel:
        with (strategy or default_strategy()).scope():
            return StepModel(self._call, self._config.tf_random_seed)

    def _call(
        self, features: Any, labels: Any, mode: str, config: RunConfig | None = None
    ) -> EstimatorSpec:
        known = {
            "labels": labels,
            "mode": mode,
            "params": self.params,
            "config": config or self._config,
        }
        wanted = inspect.signature(self._model_fn).parameters
        if "labels" not in wanted and labels is not None:
            raise ValueError("model_fn does not take labels, but input_fn returns labels.")
        given = {name: value for name, value in known.items() if name in wanted}
        return self._model_fn(features=features, **given)

    def _dataset(
        self, input_fn: Callable[..., Any], mode: str, context: InputContext | None
    ) -> Dataset:
        """Return the input as a dataset of elements for one replica."""
        if not callable(input_fn):
            raise TypeError(f"`input_fn` must be callable, given: {input_fn!r}")
        known = {
            "mode": mode,
            "params": self.params,
            "config": self._config,
            "input_context": context or InputContext(),
        }
        wanted = inspect.signature(input_fn).parameters
        found = input_fn(**{name: value for name, value in known.items() if name in wanted})
        if isinstance(found, Dataset):
            return found
        if isinstance(found, (list, tuple)) and len(found) != 2:
            raise ValueError(
                "input_fn should return (features, labels) or a Dataset, got "
                f"{len(found)} values: {found!r}"
            )
        if isinstance(found, (list, tuple)) and found[1] is None:  # no labels, as for `predict`
            found = found[0]
        return Dataset.from_tensors(tuple(found) if isinstance(found, list) else found).repeat()

    def _batches(self, model: StepModel, input_fn: Callable[..., Any], mode: str) -> Any:
        strategy = model.distribute_strategy
        if isinstance(strategy, ParameterServerStrategy):
            return self._dataset(input_fn, mode, None)
        return strategy.distribute_datasets_from_function(
            lambda context: self._dataset(input_fn, mode, context)
        )


def _restore(model: StepModel, path: str | None) -> None:
    if path is not None:
        model.checkpoint.restore(path)


def _outside_scopes(function: Callable[..., _Result], *args: Any) -> _Result:
    """Call a function outside of the scope of the training whose hook calls it, if there is one."""
    if not has_strategy():
        return function(*args)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result()


def _check_model_fn(model_fn: Callable[..., Any], params: Any) -> None:
    names = set(inspect.signature(model_fn).parameters)
    if "features" not in names:
        raise ValueError(f"model_fn ({model_fn}) must include features argument.")
    if params is not None and "params" not in names:
        raise ValueError(
            f"model_fn ({model_fn}) does not include params argument, but params ({params}) is passed "
            "to Estimator."
        )
    if names - _ARGUMENTS:
        raise ValueError(
            f"model_fn ({model_fn}) has following not expected args: {sorted(names - _ARGUMENTS)}"
        )


def _with_directory(config: RunConfig, model_dir: str | os.PathLike[str] | None) -> RunConfig:
    """Return the settings with the directory of the checkpoints."""
    if model_dir is not None:
        model_dir = path_of("model_dir", model_dir)
        if config.model_dir is not None and config.model_dir != model_dir:
            raise ValueError(
                "`model_dir` are set both in constructor and `RunConfig`, but with different values. "
                f"In constructor: '{model_dir}', in `RunConfig`: '{config.model_dir}' "
            )
    elif config.model_dir is None:
        model_dir = tempfile.mkdtemp()
        _log.warning("Using temporary folder as model directory: %s", model_dir)
    return config if model_dir is None else config.replace(model_dir=model_dir)


def _chosen(predictions: Any, keys: str | Sequence[str] | None) -> Any:
    """Return the predictions of the given keys."""
    if not keys:
        return predictions
    if not isinstance(predictions, Mapping):
        raise ValueError("predict_keys argument is not valid in case of non-dict predictions.")
    wanted = [keys] if isinstance(keys, str) else list(keys)
    found = {name: value for name, value in predictions.items() if name in wanted}
    if not found:
        raise ValueError(
            f"Expected to run at least one output from {list(predictions)}, provided {wanted}."
        )
    return found


class _Training(Callback):
    """The checkpoints, log lines and hooks of one training."""

    def __init__(
        self,
        config: RunConfig,
        hooks: Sequence[SessionRunHook],
        listeners: Sequence[CheckpointSaverListener],
    ) -> None:
        super().__init__()
        self._config, self._given, self._listeners = config, hooks, listeners
        self._logged_at = self._saved_at = time.monotonic()
        self._loss: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        model: StepModel = self.model
        self._step = self._saved_step = self._logged_step = self._begun = model.step
        self._manager = CheckpointManager(
            model.checkpoint,
            str(self._config.model_dir),
            self._config.keep_checkpoint_max or None,
            "model.ckpt",
        )
        self._known = ModeKeys.TRAIN in model.first
        self._hooks = HookRun(self._given)
        if self._known:
            self._add_hooks_of_spec()
        for listener in self._listeners:
            listener.begin()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._hooks.before()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step = self._begun + batch + 1
        self._loss = (logs or {}).get("loss", self._loss)
        self._check_loss()
        if self._hooks.after({"loss": self._loss, "global_step": self._step}):
            self.model.stop_training = True
        if not self._known and ModeKeys.TRAIN in self.model.first:
            self._known = True
            self._add_hooks_of_spec()
        every = self._config.log_step_count_steps
        if every is not None and self._step - self._logged_step >= every:
            now = time.monotonic()
            rate = (self._step - self._logged_step) / max(now - self._logged_at, 1e-9)
            _log.info("loss = %s, step = %d (%.4g steps/s)", self._loss, self._step, rate)
            self._logged_step, self._logged_at = self._step, now
        if self._save_is_due():
            self._save()

    def _check_loss(self) -> None:
        if self._loss is not None and np.isnan(self._loss):
            raise NanLossDuringTrainingError

    def _add_hooks_of_spec(self) -> None:
        spec: EstimatorSpec = self.model.first[ModeKeys.TRAIN]
        self._hooks.add(spec.training_hooks)
        if self._config.is_chief:
            self._hooks.add(spec.training_chief_hooks)

    def _save_is_due(self) -> bool:
        """Return True on every worker if it is time for a checkpoint."""
        steps, seconds = self._config.save_checkpoints_steps, self._config.save_checkpoints_secs
        if steps:
            return self._step - self._saved_step >= steps
        if not seconds:
            return False
        due = time.monotonic() - self._saved_at >= seconds
        workers = self.model.distribute_strategy.extended.workers
        return due if workers.count == 1 else bool(workers.from_first(np.asarray(int(due))))

    def _save(self) -> None:
        model: StepModel = self.model
        strategy = model.distribute_strategy
        if isinstance(strategy, ParameterServerStrategy):
            # Wait, so that the checkpoint has all steps that were scheduled.
            ClusterCoordinator(strategy).join()
        step = model.step
        for listener in self._listeners:
            listener.before_save(None, step)
        path = self._manager.save(step)
        _log.info("Saved the checkpoint %s", path)
        self._saved_step, self._saved_at = self._step, time.monotonic()
        if any([listener.after_save(None, step) for listener in self._listeners]):
            model.stop_training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._loss = (logs or {}).get("loss", self._loss)
        self._check_loss()  # under a ParameterServerStrategy, the loss is not known earlier
        if self._saved_step != self._step:
            self._save()
        _log.info("Loss for final step: %s.", self._loss)
        self._hooks.end()
        for listener in self._listeners:
            listener.end(None, self.model.step)


class _Evaluation(Callback):
    """The hooks of one evaluation."""

    def __init__(self, hooks: Sequence[SessionRunHook]) -> None:
        super().__init__()
        self._given = hooks

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._known = ModeKeys.EVAL in self.model.first
        self._hooks = HookRun(self._given)
        if self._known:
            self._hooks.add(self.model.first[ModeKeys.EVAL].evaluation_hooks)

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._hooks.before()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._hooks.after({"global_step": self.model.step}):
            self.model.stop_evaluating = True
        if not self._known and ModeKeys.EVAL in self.model.first:
            self._known = True
            self._hooks.add(self.model.first[ModeKeys.EVAL].evaluation_hooks)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._hooks.end()
