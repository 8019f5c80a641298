"""`Learner`: how a model is compiled, and what it does in a step."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from pycollective import nest
from pycollective.distribute.context import current_mode, get_strategy, has_strategy
from pycollective.distribute.default import default_strategy
from pycollective.distribute.strategy import Strategy
from pycollective.keras import optimizers
from pycollective.keras.layers import Layer
from pycollective.keras.metrics import Metric
from pycollective.keras.serialization import deserialize_keras_object, serialize_keras_object
from pycollective.keras.training.compiled import Compiled
from pycollective.keras.training.share import reports, share_of
from pycollective.keras.utils.batches import unpack_x_y_sample_weight
from pycollective.tensor import GradientTape, Tensor, ops

#: Numbers by name.
Logs = dict[str, Any]


class Learner(Layer):
    """A layer that is compiled, and knows what to do with a batch.

    One's own training overrides `train_step`, `test_step`, `predict_step`, or only `compute_loss` or
    `compute_metrics`. Replicas call them at the same time, each with its part of the batch.

    Attributes
    ----------
    compiled : bool
        Whether `compile` was called.
    optimizer, loss
        What `compile` was given; a name has become an object.
    run_eagerly, jit_compile
        What `compile` was given. They may be set; nothing is traced or compiled in any case.
    """

    _untracked = Layer._untracked | {"_compiled", "compile_arguments"}

    compiled = False
    optimizer: Any = None
    loss: Any = None
    run_eagerly: bool = False
    jit_compile: Any = "auto"
    #: Whether `compute_loss` takes an argument ``training``.
    _loss_takes_training = True
    _compiled: Compiled | None = None
    #: What `compile` was given, for files.
    compile_arguments: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        parameters = inspect.signature(cls.compute_loss).parameters
        cls._loss_takes_training = "training" in parameters

    # Settings --------------------------------------------------------------------------------

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy in whose scope the model was made."""
        return default_strategy() if self._strategy is None else self._strategy

    @property
    def steps_per_execution(self) -> int:
        """How many steps the replicas make before callbacks hear of it.

        Setting it changes what `compile` was given.
        """
        return 1 if self._compiled is None else self._compiled.steps_per_execution

    @steps_per_execution.setter
    def steps_per_execution(self, value: int) -> None:
        self._settings("steps_per_execution").steps_per_execution = _at_least_one(
            "steps_per_execution", value
        )

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: Any = "auto",
        auto_scale_loss: bool = True,
        accumulate_steps: int = 1,
    ) -> None:
        """Say how the model is trained.

        Parameters
        ----------
        optimizer
            An `Optimizer` or its name; needed by `fit` only.
        loss
            A `Loss`, its name, or a function of (y_true, y_pred), which gets ``y_true`` in the dtype
            of ``y_pred``. Its reduction may be SUM_OVER_BATCH_SIZE, which AUTO and NONE are taken
            for, or SUM. ``"crossentropy"`` is the kind that the shapes suggest. For several outputs a
            list, or a dict by their names (of ``output_1``, … without names), with None for those
            without a loss, and with a list where an output has several losses, which are added up;
            one for all is used for each. For outputs in a nest a nest of the same structure.
        loss_weights
            By what the outputs' losses are multiplied: a list, dict or nest.
        metrics
            Metrics, their names, or functions of (y_true, y_pred), in a list. ``"accuracy"`` is the
            kind of accuracy that the shapes suggest. For several outputs a list with an item, or a
            list of them, for each output, or a dict.
        weighted_metrics
            The same, for metrics that get the weights of the examples.
        steps_per_execution
            How many steps the replicas make before callbacks hear of it.
        run_eagerly, jit_compile
            Accepted for TensorFlow's sake: nothing is traced or compiled.
        auto_scale_loss
            Whether a model of the policy ``mixed_float16`` gets a `LossScaleOptimizer` around its
            optimizer.
        accumulate_steps
            How many batches make one step of the optimizer: their gradients are those of the joined
            batch. At the end of an epoch fewer may be left, which make a step as well.

        Raises
        ------
        ValueError
            For unknown names, metrics of the same name, and variables that were made under another
            strategy than the model's.
        """
        self._check_scope(optimizer, metrics, weighted_metrics)
        steps_per_execution = _at_least_one("steps_per_execution", steps_per_execution)
        accumulate_steps = _at_least_one("accumulate_steps", accumulate_steps)
        with self.distribute_strategy.scope():
            compiled = Compiled(
                self.distribute_strategy,
                loss,
                loss_weights,
                metrics,
                weighted_metrics,
                steps_per_execution,
                accumulate_steps,
                self._layers_of_outputs(),
            )
            found = optimizers.get(optimizer)
            halves = auto_scale_loss and self.dtype_policy.name == "mixed_float16"
            if halves and not (found is None or isinstance(found, optimizers.LossScaleOptimizer)):
                found = optimizers.LossScaleOptimizer(found, name="loss_scale_optimizer")
            self.optimizer = found
        self.loss = compiled.loss
        self._compiled = compiled
        arguments = {
            "optimizer": self.optimizer,
            "loss": loss,
            "loss_weights": loss_weights,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
            "run_eagerly": run_eagerly,
            "steps_per_execution": steps_per_execution,
            "jit_compile": jit_compile,
        }
        # Keras never notes the one, and does not know the other: only where they say something.
        if not auto_scale_loss:
            arguments["auto_scale_loss"] = False
        if accumulate_steps != 1:
            arguments["accumulate_steps"] = accumulate_steps
        self.compile_arguments = arguments
        self.run_eagerly, self.jit_compile = bool(run_eagerly), jit_compile
        self.compiled = True

    def get_compile_config(self) -> dict[str, Any]:
        """Return what `compile` was given, as what JSON can hold."""
        return {
            name: serialize_keras_object(value) for name, value in self.compile_arguments.items()
        }

    def compile_from_config(self, config: Mapping[str, Any]) -> None:
        """Compile with what `get_compile_config` returned, here or in Keras."""
        known = inspect.signature(self.compile).parameters
        given = {
            name: deserialize_keras_object(value)
            for name, value in config.items()
            if name in known or value is not None
        }
        self.compile(**given)
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

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

    def _layers_of_outputs(self) -> Any:
        """Return the names of the layers that compute the outputs, in their structure, if known."""
        return None

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
            loss = self._compute_loss(x, y, y_pred, sample_weight, training=True)
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
        loss = self._compute_loss(x, y, y_pred, sample_weight, training=False)
        self._settings("evaluate").tracker.update_state(loss)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def predict_step(self, data: Any) -> Any:
        """Return the outputs for a replica's part of a batch."""
        x, _, _ = unpack_x_y_sample_weight(data)
        return self(x, training=False)

    def _compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Call `compute_loss`, with ``training`` if it takes that."""
        options = {"training": training} if self._loss_takes_training else {}
        return self.compute_loss(x, y, y_pred, sample_weight, **options)

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
        parts = self._settings("compute_loss").loss_shares(y, y_pred, sample_weight)
        added = self.losses
        if added:
            parts.append(share_of(ops.add_n([ops.reduce_sum(value) for value in added])))
        if not parts:
            raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
        dtype = parts[0].dtype
        return parts[0] if len(parts) == 1 else ops.add_n([ops.cast(p, dtype) for p in parts])

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
        compiled = [] if self._compiled is None else self._compiled.all_metrics
        found = [*compiled, *self._own_metrics()]
        return list({id(metric): metric for metric in found}.values())

    @property
    def metrics_names(self) -> list[str]:
        """The names of `metrics`."""
        return [self.reported_name(metric) for metric in self.metrics]

    def reported_name(self, metric: Metric) -> str:
        """Return the name that a metric has in logs."""
        return metric.name if self._compiled is None else self._compiled.reported(metric)

    def reset_metrics(self) -> None:
        """Let all `metrics` begin anew."""
        for metric in self.metrics:
            metric.reset_state()

    def get_metrics_result(self) -> Logs:
        """Return the results of `metrics` by name; in a replica all replicas must make the call."""
        if not reports():
            return {}
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
            name = self.reported_name(metric)
            results.update(value if isinstance(value, Mapping) else {name: value})
        return results


def _not_created_in(strategy: Strategy, what: Any) -> ValueError:
    return ValueError(
        f"Variable ({what!r}) was not created in the distribution strategy scope of ({strategy}). It is "
        "most likely because some layers, model, or optimizer was being created outside the "
        "distribution strategy scope. Try to make sure your code looks similar to the following.\n"
        "with strategy.scope():\n  model=_create_model()\n  model.compile(...)"
    )


def _at_least_one(name: str, value: Any) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)
