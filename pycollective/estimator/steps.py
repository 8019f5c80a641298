"""`StepModel`: a Keras model whose steps call a model function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.distribute.context import current_mode
from pycollective.estimator.specs import EstimatorSpec, ModeKeys
from pycollective.estimator.variables import ModelVariables
from pycollective.keras.losses.loss import averages_of_replicas
from pycollective.keras.metrics import Mean, Metric
from pycollective.keras.models import Model
from pycollective.keras.optimizers.accumulation import Recording, recorded
from pycollective.keras.optimizers.copies import count_one, with_arrays
from pycollective.keras.training.share import current_share, share_of
from pycollective.keras.utils.batches import unpack_x_y_sample_weight
from pycollective.tensor import GradientTape, as_tensor
from pycollective.tensor.random import generator_scope
from pycollective.train.checkpoint import Checkpoint


class StepModel(Model):
    """A Keras model whose steps call a model function; make it in the scope of its strategy."""

    _untracked = Model._untracked | {"shared", "checkpoint", "eval_metrics"}

    def __init__(
        self, model_fn: Callable[[Any, Any, str], EstimatorSpec], seed: int | None
    ) -> None:
        super().__init__()
        self._model_fn, self._seed = model_fn, seed
        #: The variables of the model function.
        self.shared = ModelVariables(seed)
        self.checkpoint = Checkpoint(model=self.shared)
        self._mean_loss = Mean("loss")
        #: The metrics of the last evaluation by name.
        self.eval_metrics: Mapping[str, Metric] = {}
        #: The results of the first calls of the model function by mode.
        self.first: dict[str, EstimatorSpec] = {}
        self.compile(optimizer=None)

    @property
    def step(self) -> int:
        """The number of training steps."""
        return int(self.shared.global_step.numpy())

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Prepare a call of the model function.

        Calls share variables. Random numbers depend on the step and the replica.
        """
        random: Any = nullcontext()
        if self._seed is not None:
            mode = current_mode()
            context = None if mode is None else mode.replica_context
            replica = 0
            if context is not None:
                replica = context.strategy.extended.first_replica + context.local_replica_id
            step = int(self.shared.global_step.local().current().array)
            random = generator_scope(np.random.default_rng([self._seed, step, replica]))
        with self.shared.shared(), random, averages_of_replicas():
            yield

    def _call(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        spec = self._model_fn(features, labels, mode)
        if not isinstance(spec, EstimatorSpec):
            raise ValueError(f"model_fn should return an EstimatorSpec, got {spec!r}")
        return spec

    def train_step(self, data: Any) -> dict[str, Any]:
        """Call the model function with a replica's batch, and minimize its loss."""
        features, labels = _parts(data)
        with GradientTape() as tape:
            recording = Recording(tape, share_of, lambda: self.shared.trainable(tape))
            with recorded(recording), self._calling():
                spec = self._call(features, labels, ModeKeys.TRAIN)
                if hasattr(spec.train_op, "minimize"):
                    spec.train_op.minimize(spec.loss, var_list=recording.variables)
                elif callable(spec.train_op):
                    spec.train_op()
        if ModeKeys.TRAIN not in self.first:
            recording.variables()  # raises the error for variables that no checkpoint would have
            self.first[ModeKeys.TRAIN] = spec
        step = self.shared.global_step
        if _counts() and all(each.iterations is not step for each in recording.optimizers):
            with_arrays([step], count_one)
        return {"loss": share_of(as_tensor(spec.loss))}

    def test_step(self, data: Any) -> dict[str, Any]:
        """Call the model function with a replica's batch, which updates its metrics."""
        features, labels = _parts(data)
        with self._calling():
            spec = self._call(features, labels, ModeKeys.EVAL)
        share = current_share()
        rows = 1 if share is None else share.rows
        if rows:
            self._mean_loss.update_state(spec.loss, sample_weight=float(rows))
        self.eval_metrics = spec.eval_metric_ops
        self.first.setdefault(ModeKeys.EVAL, spec)
        return {}

    def reset_metrics(self) -> None:
        """Reset the loss and the model function's metrics."""
        super().reset_metrics()
        for variable in self.shared.sums.values():
            variable.assign(np.zeros(variable.shape, variable.dtype))

    def evaluation(self) -> dict[str, Any]:
        """Return the results of the last evaluation by name."""
        found = {name: metric.result().numpy() for name, metric in self.eval_metrics.items()}
        found["loss"] = self._mean_loss.result().numpy()
        return {
            **{name: value[()] for name, value in sorted(found.items())},
            "global_step": self.step,
        }

    def predictions(self, features: Any) -> Any:
        """Return the predictions for a batch as arrays, computed in this thread."""
        with self.distribute_strategy.scope(), self._calling():
            spec = self._call(features, None, ModeKeys.PREDICT)
            self.first.setdefault(ModeKeys.PREDICT, spec)
            return nest.map_structure(
                lambda leaf: leaf if isinstance(leaf, np.ndarray) else as_tensor(leaf).numpy(),
                spec.predictions,
            )

    @staticmethod
    def rows_of(predictions: Any) -> Iterator[Any]:
        """Yield the predictions of each example."""
        leaves = nest.flatten(predictions)
        if not all(np.ndim(leaf) for leaf in leaves):
            raise ValueError("predictions need a first axis, with an element for each example")
        sizes = {len(leaf) for leaf in leaves}
        if len(sizes) != 1:
            raise ValueError(
                "Batch length of predictions should be same. Sizes of the predictions: "
                f"{sorted(sizes)}"
            )
        for row in range(sizes.pop()):
            yield nest.pack_as(predictions, [leaf[row] for leaf in leaves])


def _counts() -> bool:
    """Return True unless another replica counts the step in a variable that all replicas share."""
    mode = current_mode()
    context = None if mode is None else mode.replica_context
    if context is None or not context.strategy.extended.updates_variables_once:
        return True
    return context.local_replica_id == 0


def _parts(data: Any) -> tuple[Any, Any]:
    features, labels, weights = unpack_x_y_sample_weight(data)
    if weights is not None:
        raise ValueError("input_fn should return (features, labels), or features alone")
    return features, labels
