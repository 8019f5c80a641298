"""The results and settings that estimators exchange with programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pycollective.estimator.hooks import SessionRunHook
from pycollective.keras.metrics import Metric
from pycollective.tensor import Tensor, as_tensor


class ModeKeys:
    """The values of a model function's argument ``mode``."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


class _EstimatorSpec(NamedTuple):
    mode: str
    predictions: Any
    loss: Tensor | None
    train_op: Any
    eval_metric_ops: Mapping[str, Metric]
    training_hooks: tuple[SessionRunHook, ...]
    training_chief_hooks: tuple[SessionRunHook, ...]
    evaluation_hooks: tuple[SessionRunHook, ...]
    prediction_hooks: tuple[SessionRunHook, ...]


class EstimatorSpec(_EstimatorSpec):
    """The result of a model function for one batch.

    Attributes
    ----------
    mode : str
        A value of `ModeKeys`.
    predictions
        A tensor, or a dict of tensors, with a row for each example; needed by PREDICT.
    loss : Tensor
        The mean loss of the batch, a scalar; needed by TRAIN and EVAL.
    train_op
        The result of an optimizer's ``minimize``, an optimizer, which then minimizes the loss, or a
        function without arguments, which is called; needed by TRAIN.
    eval_metric_ops : dict
        Metrics by name, which the model function has updated with the batch.
    training_hooks, evaluation_hooks, prediction_hooks : sequence of SessionRunHook
        Further hooks. They begin after the first step, and are those of the first call.
    training_chief_hooks : sequence of SessionRunHook
        Training hooks that run only in the process for which `RunConfig.is_chief` is True. They must
        not end the training of several workers, because the other workers would continue.

    Raises
    ------
    ValueError, TypeError
        A part that the mode needs is missing, or has the wrong type.
    """

    __slots__ = ()

    def __new__(
        cls,
        mode: str,
        predictions: Any = None,
        loss: Any = None,
        train_op: Any = None,
        eval_metric_ops: Mapping[str, Metric] | None = None,
        training_hooks: Sequence[SessionRunHook] | None = None,
        training_chief_hooks: Sequence[SessionRunHook] | None = None,
        evaluation_hooks: Sequence[SessionRunHook] | None = None,
        prediction_hooks: Sequence[SessionRunHook] | None = None,
    ) -> EstimatorSpec:
        """Return the result; see the class."""
        if mode not in (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT):
            raise ValueError(f"mode must be a value of tf.estimator.ModeKeys, given: {mode!r}")
        if loss is None and mode != ModeKeys.PREDICT:
            raise ValueError("Missing loss.")
        if train_op is None and mode == ModeKeys.TRAIN:
            raise ValueError("Missing train_op.")
        if predictions is None and mode == ModeKeys.PREDICT:
            raise ValueError("Missing predictions.")
        if loss is not None:
            loss = as_tensor(loss)
            if loss.array.size != 1:
                raise ValueError(f"Loss must be scalar, given: {loss}")
        metrics = {} if eval_metric_ops is None else eval_metric_ops
        if not isinstance(metrics, Mapping):
            raise TypeError(f"eval_metric_ops must be a dict, given: {metrics!r}")
        for name, metric in metrics.items():
            if name in ("loss", "global_step"):
                raise ValueError(
                    f'Metric with name "{name}" is not allowed, because Estimator already defines a '
                    "default metric with the same name."
                )
            if not isinstance(metric, Metric):
                raise TypeError(
                    "Values of eval_metric_ops must be tf.keras.metrics.Metric objects, given: "
                    f"{metric!r} for key: {name}; there are no (metric_value, update_op) tuples"
                )
        hooks = [
            checked_hooks(given)
            for given in (training_hooks, training_chief_hooks, evaluation_hooks, prediction_hooks)
        ]
        return super().__new__(cls, mode, predictions, loss, train_op, dict(metrics), *hooks)


def checked_hooks(hooks: Sequence[SessionRunHook] | None) -> tuple[SessionRunHook, ...]:
    """Return hooks as a tuple; raise TypeError if one is no `SessionRunHook`."""
    found = tuple(hooks or ())
    for hook in found:
        if not isinstance(hook, SessionRunHook):
            raise TypeError(f"All hooks must be `SessionRunHook` instances, given: {hook!r}")
    return found


def check_positive(name: str, value: int | None) -> None:
    """Raise ValueError unless a number of steps is None or positive."""
    if value is not None and value <= 0:
        raise ValueError(f"Must specify {name} > 0, given: {value}")


class _TrainSpec(NamedTuple):
    input_fn: Callable[..., Any]
    max_steps: int | None
    hooks: tuple[SessionRunHook, ...]
    saving_listeners: tuple[Any, ...]


class TrainSpec(_TrainSpec):
    """The training of `train_and_evaluate`; the parameters are those of `Estimator.train`."""

    __slots__ = ()

    def __new__(
        cls,
        input_fn: Callable[..., Any],
        max_steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> TrainSpec:
        """Return the settings; see the class."""
        _check_input_fn(input_fn)
        check_positive("max_steps", max_steps)
        return super().__new__(
            cls, input_fn, max_steps, checked_hooks(hooks), tuple(saving_listeners or ())
        )


class Exporter:
    """Base class of objects that export an estimator after its evaluations.

    A subclass overrides both members. There are no SavedModels: an exporter writes files of its own,
    such as a copy of the checkpoint.
    """

    @property
    def name(self) -> str:
        """The name of the exporter, which is the last part of its path."""
        raise NotImplementedError(f"{type(self).__name__} must define name")

    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Any:
        """Export an evaluated checkpoint; `train_and_evaluate` returns the results of the last call.

        Parameters
        ----------
        estimator
            The `Estimator`.
        export_path : str
            The directory for this exporter's files: ``export`` and its name in ``model_dir``.
        checkpoint_path : str
            The checkpoint that was evaluated.
        eval_result : dict
            The results of the evaluation.
        is_the_final_export : bool
            True after the end of training.
        """
        raise NotImplementedError(f"{type(self).__name__} must override export()")


class _EvalSpec(NamedTuple):
    input_fn: Callable[..., Any]
    steps: int | None
    name: str | None
    hooks: tuple[SessionRunHook, ...]
    exporters: tuple[Exporter, ...]
    start_delay_secs: float
    throttle_secs: float


class EvalSpec(_EvalSpec):
    """The evaluations of `train_and_evaluate`.

    Attributes
    ----------
    input_fn, steps, name, hooks
        The parameters of `Estimator.evaluate`; the default of ``steps`` is 100.
    exporters : Exporter, or sequence of Exporter
        Objects that are called after each evaluation, in one process.
    start_delay_secs : float
        The seconds that an evaluator task waits before its first evaluation.
    throttle_secs : float
        The least number of seconds between two evaluations.
    """

    __slots__ = ()

    def __new__(
        cls,
        input_fn: Callable[..., Any],
        steps: int | None = 100,
        name: str | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        exporters: Exporter | Sequence[Exporter] | None = None,
        start_delay_secs: float = 120,
        throttle_secs: float = 600,
    ) -> EvalSpec:
        """Return the settings; see the class."""
        _check_input_fn(input_fn)
        check_positive("steps", steps)
        found = (exporters,) if isinstance(exporters, Exporter) else tuple(exporters or ())
        for exporter in found:
            if not isinstance(exporter, Exporter):
                raise TypeError(
                    "`exporters` must be an Exporter, an iterable of Exporter, or `None`, found "
                    f"{exporter!r}"
                )
        names = [exporter.name for exporter in found]
        if len(set(names)) < len(names):
            raise ValueError(
                f"`exporters` must have unique names. Such a name cannot be used twice: {names}"
            )
        for label, seconds in {
            "start_delay_secs": start_delay_secs,
            "throttle_secs": throttle_secs,
        }.items():
            if seconds < 0:
                raise ValueError(f"Must specify {label} >= 0, given: {seconds}")
        return super().__new__(
            cls, input_fn, steps, name, checked_hooks(hooks), found, start_delay_secs, throttle_secs
        )


def _check_input_fn(input_fn: Any) -> None:
    if not callable(input_fn):
        raise TypeError(f"`input_fn` must be callable, given: {input_fn!r}")
