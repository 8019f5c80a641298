"""`train_and_evaluate`: training with evaluations of its checkpoints."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import numpy as np

from pycollective.estimator.estimator import Estimator
from pycollective.estimator.hooks import CheckpointSaverListener
from pycollective.estimator.specs import EvalSpec, TrainSpec

_log = logging.getLogger("pycollective")

#: Seconds between two searches of an evaluator task for a new checkpoint.
_POLL = 1.0


class _Evaluator(CheckpointSaverListener):
    """A listener that evaluates saved checkpoints, at most every ``throttle_secs`` seconds."""

    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self._evaluated_at = -np.inf
        self._evaluated_step: int | None = None
        self.results: dict[str, Any] | None = None
        #: The results of the last exports.
        self.exported: list[Any] = []

    def begin(self) -> None:
        self._evaluated_at = time.monotonic()

    def after_save(self, session: None, global_step_value: int) -> None:
        due = time.monotonic() - self._evaluated_at >= self._spec.throttle_secs
        strategy = self._estimator.config.train_distribute
        if strategy is not None:
            workers = strategy.extended.workers
            if workers.count > 1:  # all workers evaluate, or none
                due = bool(workers.from_first(np.asarray(int(due))))
        if due:
            self._evaluate(global_step_value)
            self._export(False)

    def end(self, session: None, global_step_value: int) -> None:
        if self._evaluated_step != global_step_value:
            self._evaluate(global_step_value)
        self._export(True)

    def _export(self, final: bool) -> None:
        if self._estimator.config.is_chief:
            path = self._estimator.latest_checkpoint()
            self.exported = _exported(self._estimator, self._spec, path, self.results, final)

    def _evaluate(self, step: int) -> None:
        spec = self._spec
        self.results = self._estimator.evaluate(
            spec.input_fn, spec.steps, spec.hooks, None, spec.name
        )
        self._evaluated_step, self._evaluated_at = step, time.monotonic()


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any] | None, list[Any]]:
    """Train an estimator, and evaluate its checkpoints.

    Every task of a cluster makes this call. Checkpoints are evaluated when they are saved, by all
    workers, if ``throttle_secs`` seconds have passed; the last one always is. The evaluator task of
    ``TF_CONFIG`` does not train: it evaluates each new checkpoint of ``model_dir``.

    Parameters
    ----------
    estimator : Estimator
        The estimator.
    train_spec, eval_spec
        The input and the number of steps of training and of each evaluation.

    Returns
    -------
    tuple
        The results of the last evaluation, and those of the exporters of ``eval_spec``, in the process
        that calls them: the evaluator task, or the chief.

    Raises
    ------
    TypeError
        An argument has another type.
    ValueError
        This is an evaluator task, and ``train_spec`` has no ``max_steps`` at which to end.
    """
    for name, value, kind in (
        ("estimator", estimator, Estimator),
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
    ):
        if not isinstance(value, kind):
            raise TypeError(
                f"`{name}` must have type `tf.estimator.{kind.__name__}`, given {type(value)}"
            )
    if estimator.config.task_type == "evaluator":
        return _evaluate_checkpoints(estimator, train_spec, eval_spec)
    evaluator = _Evaluator(estimator, eval_spec)
    estimator.train(
        train_spec.input_fn,
        train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=[*train_spec.saving_listeners, evaluator],
    )
    return evaluator.results, evaluator.exported


def _exported(
    estimator: Estimator, spec: EvalSpec, path: str | None, results: Any, final: bool
) -> list[Any]:
    """Call the exporters after an evaluation, and return their results."""
    return [
        exporter.export(
            estimator,
            os.path.join(estimator.model_dir, "export", exporter.name),
            path,
            results,
            final,
        )
        for exporter in spec.exporters
        if path is not None
    ]


def _evaluate_checkpoints(
    estimator: Estimator, train_spec: TrainSpec, spec: EvalSpec
) -> tuple[dict[str, Any] | None, list[Any]]:
    """Evaluate new checkpoints until the one of ``max_steps``; return the last results and exports."""
    if train_spec.max_steps is None:
        raise ValueError(
            "an evaluator needs TrainSpec(max_steps=...), at which its evaluations end"
        )
    time.sleep(spec.start_delay_secs)
    evaluated: str | None = None
    while True:
        begun, path = time.monotonic(), estimator.latest_checkpoint()
        if path is not None and path != evaluated:
            found = estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, path, spec.name)
            final = bool(found["global_step"] >= train_spec.max_steps)
            exported = _exported(estimator, spec, path, found, final)
            if final:
                return found, exported
            evaluated = path
            time.sleep(max(spec.throttle_secs - (time.monotonic() - begun), 0))
        else:
            time.sleep(_POLL)
