"""`Learner`: the compilation of a model, and its steps."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from pycollective import nest
from pycollective.arguments import whole
from pycollective.distribute.context import current_mode, has_strategy
from pycollective.distribute.default import default_strategy, get_strategy
from pycollective.distribute.strategy import Strategy
from pycollective.keras import optimizers
from pycollective.keras.layers import Layer
from pycollective.keras.metrics import Metric
from pycollective.keras.serialization import deserialize_keras_object, serialize_keras_object
from pycollective.keras.training.compiled import Compiled
from pycollective.keras.training.share import reports, share_of
from pycollective.keras.utils.batches import unpack_x_y_sample_weight
from pycollective.tensor import GradientTape, Tensor, ops

#: Results of a step, by name.
Logs = dict[str, Any]


class Learner(Layer):
    """A layer with a `compile` method, and with the steps of training and evaluation.

    Custom training overrides `train_step`, `test_step`, `predict_step`, or only `compute_loss` or
    `compute_metrics`. Replicas call these methods concurrently, each with its part of the batch.

    Attributes
    ----------
    compiled : bool
        True after `compile`.
    optimizer, loss
        The arguments of `compile`, with objects in the place of names.
    run_eagerly
        True if the model's steps run each layer from Python, and replay no recorded kernels.
    jit_compile
        The argument of `compile`, which may be set but has no effect.
    """

    _untracked = Layer._untracked | {"_compiled", "_steps_with_variables", "compile_arguments"}

    compiled = False
    optimizer: Any = None
    loss: Any = None
    run_eagerly: bool = False
    jit_compile: Any = "auto"
    #: True if `compute_loss` has a parameter ``training``.
    _loss_takes_training = True
    _compiled: Compiled | None = None
    #: The number of calls of `compile`.
    _compilations = 0
    #: The steps that have created their variables, in a cluster with parameter servers.
    _steps_with_variables: frozenset[str] = frozenset()
    #: The arguments of `compile`, which files store.
    compile_arguments: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        parameters = inspect.signature(cls.compute_loss).parameters
        cls._loss_takes_training = "training" in parameters

    # Settings --------------------------------------------------------------------------------

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy in whose scope the model was made."""
        own: Any = self._strategy
        strategy: Strategy = default_strategy() if own is None else own
        return strategy

    @property
    def steps_per_execution(self) -> int:
        """The number of steps between calls of the batch callbacks.

        An assignment changes the setting of `compile`.
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
        """Configure the model for training.

        Parameters
        ----------
        optimizer
            An `Optimizer` or its name; needed by `fit` only.
        loss
            A `Loss`, its name, or a function of (y_true, y_pred), which gets ``y_true`` in the dtype
            of ``y_pred``. The reduction SUM sums over the batch; all others average over it. For
            ``"crossentropy"``, the shapes choose the kind.
            Several outputs take a list, a dict by output name (``output_1``, … for outputs without
            names), or a nest of the outputs' structure. In it None means no loss, and a list means
            the sum of several losses. A single loss applies to each output.
        loss_weights
            The factors of the outputs' losses: a list, dict or nest.
        metrics
            A list of metrics, names, or functions of (y_true, y_pred). For ``"accuracy"``, the shapes
            choose the kind. Several outputs take a dict, or a list with a metric or a list of metrics
            for each output.
        weighted_metrics
            Metrics that get the weights of the examples, in the form of ``metrics``.
        steps_per_execution : int
            The number of steps between calls of the batch callbacks.
        run_eagerly
            True to run each layer from Python in the model's steps. Else the kernels of consecutive
            layers are recorded once, and then replayed.
        jit_compile
            Accepted for compatibility with TensorFlow and ignored.
        auto_scale_loss : bool
            True to wrap the optimizer of a model with the policy ``mixed_float16`` in a
            `LossScaleOptimizer`.
        accumulate_steps : int
            The number of batches in one step of the optimizer, whose gradients are those of the
            joined batch. The last step of an epoch may have fewer batches.

        Raises
        ------
        ValueError
            A name is unknown, ``steps_per_execution`` or ``accumulate_steps`` is below 1, or a variable
            was made under another strategy than the model's.
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
        self._compiled, self._steps_with_variables = compiled, frozenset()
        self._compilations += 1
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
        # Keras does not store auto_scale_loss, and has no accumulate_steps. Files hold these two only
        # if they differ from the defaults, so that Keras can load all other models.
        if not auto_scale_loss:
            arguments["auto_scale_loss"] = False
        if accumulate_steps != 1:
            arguments["accumulate_steps"] = accumulate_steps
        self.compile_arguments = arguments
        self.run_eagerly, self.jit_compile = bool(run_eagerly), jit_compile
        self.compiled = True

    def get_compile_config(self) -> dict[str, Any]:
        """Return the arguments of `compile` as JSON values."""
        return {
            name: serialize_keras_object(value) for name, value in self.compile_arguments.items()
        }

    def compile_from_config(self, config: Mapping[str, Any]) -> None:
        """Compile with the result of `get_compile_config`, of this package or of Keras."""
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
        """Raise ``ValueError`` unless all variables were made in the model's strategy's scope."""
        strategy = self.distribute_strategy
        if has_strategy() and get_strategy() is not strategy:
            # A model that is not built has no variable that the message could name.
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
        """Return the names of the layers that compute the outputs, in the outputs' structure."""
        return None

    # Methods that custom training overrides --------------------------------------------------

    def train_step(self, data: Any) -> Logs:
        """Make one step of training with a replica's part of a batch.

        Parameters
        ----------
        data
            ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.

        Returns
        -------
        dict
            The values to report, by name. Each is averaged over the replicas. The mean of the
            replicas' shares of a loss is a fraction of it: report the result of a metric instead.
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
        """Evaluate a replica's part of a batch, with the argument and result of `train_step`."""
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        loss = self._compute_loss(x, y, y_pred, sample_weight, training=False)
        self._settings("evaluate").tracker.update_state(loss)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def predict_step(self, data: Any) -> Any:
        """Return the outputs for a replica's part of a batch."""
        x, _, _ = unpack_x_y_sample_weight(data)
        return self(x, training=False)

    def _compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
        """Call `compute_loss`, with ``training`` if it has that parameter."""
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
        """Return this replica's share of the loss of the global batch.

        The sum of the shares over the replicas is the loss of the batch, and the sum of the
        replicas' gradients is its gradient. So no further scaling is needed.

        Parameters
        ----------
        x
            The inputs; ignored here.
        y, y_pred
            The targets and the predictions.
        sample_weight
            A weight for each example.
        training : bool
            True in a training step; ignored here.

        Raises
        ------
        ValueError
            If `compile` got no loss and no layer added one.
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
        """Update the compiled metrics with a replica's predictions, and return their results."""
        self._settings("compute_metrics").update_metrics(y, y_pred, sample_weight)
        return self.get_metrics_result()

    # Metrics ---------------------------------------------------------------------------------

    @property
    def metrics(self) -> list[Metric]:
        """The loss, the compiled metrics, and the metrics that are attributes of the model or a layer.

        `fit` and `evaluate` reset them.
        """
        compiled = [] if self._compiled is None else self._compiled.all_metrics
        found = [*compiled, *self._own_metrics()]
        return list({id(metric): metric for metric in found}.values())

    @property
    def metrics_names(self) -> list[str]:
        """The names of `metrics`."""
        return [self.reported_name(metric) for metric in self.metrics]

    def reported_name(self, metric: Metric) -> str:
        """Return a metric's name in logs."""
        return metric.name if self._compiled is None else self._compiled.reported(metric)

    def reset_metrics(self) -> None:
        """Reset all `metrics`."""
        for metric in self.metrics:
            metric.reset_state()

    def get_metrics_result(self) -> Logs:
        """Return the results of `metrics` by name; in replicas, all replicas must call this."""
        if not reports():
            return {}
        mode = current_mode()
        context = None if mode is None else mode.replica_context
        if context is None or context.num_replicas_in_sync == 1:
            return self._results()
        # A single merge_call, because Metric.result would make one for each metric.
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
    number = whole(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number
