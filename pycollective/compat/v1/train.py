"""Optimizers and the global step, under ``tf.compat.v1.train``, for model functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycollective.estimator.hooks import (
    CheckpointSaverListener,
    LoggingTensorHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
)
from pycollective.estimator.variables import this_thread
from pycollective.keras import optimizers
from pycollective.keras.optimizers.accumulation import this_thread as this_step
from pycollective.tensor import Variable

__all__ = [
    "AdagradOptimizer",
    "AdamOptimizer",
    "CheckpointSaverListener",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "LoggingTensorHook",
    "MomentumOptimizer",
    "Optimizer",
    "RMSPropOptimizer",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StopAtStepHook",
    "get_global_step",
    "get_or_create_global_step",
]


def get_global_step() -> Variable | None:
    """Return the variable that counts training steps, in a model function; elsewhere None."""
    variables = this_thread.current
    return None if variables is None else variables.global_step


def get_or_create_global_step() -> Variable:
    """Return the variable that counts training steps.

    Raises
    ------
    RuntimeError
        The call is outside of a model function, so there is no graph with a global step.
    """
    step = get_global_step()
    if step is None:
        raise RuntimeError(
            "get_or_create_global_step() works in the model_fn of an Estimator; elsewhere make a "
            "tf.Variable, or read Estimator.get_variable_value('global_step')"
        )
    return step


class Optimizer:
    """Base class of optimizers for model functions; each has a Keras optimizer.

    The parameter ``use_locking`` of the subclasses is accepted and ignored.
    """

    def __init__(self, keras: optimizers.Optimizer) -> None:
        self._keras = keras

    def minimize(
        self,
        loss: Any,
        global_step: Variable | None = None,
        var_list: Sequence[Variable] | None = None,
    ) -> Variable:
        """Minimize the loss of a model function, once, and return the number of steps.

        Parameters
        ----------
        loss
            The loss of the batch.
        global_step : Variable, optional
            Accepted and ignored: the estimator counts each training step.
        var_list
            The variables; by default all trainable variables that the model function has used.

        Raises
        ------
        RuntimeError
            The call is outside of the training step of an estimator.
        """
        recording = this_step.recording
        if recording is None:
            raise RuntimeError(
                "minimize() of tf.compat.v1.train works in the model_fn of an Estimator, in the mode "
                "TRAIN; elsewhere use an optimizer of tf.keras.optimizers"
            )
        return self._keras.minimize(loss, recording.variables if var_list is None else var_list)


class _Momentum(optimizers.SGD):
    """``a = momentum a + g``, ``w -= learning_rate a``: unlike Keras's, the sum has no rates in it."""

    def update_step(
        self, parameter: Any, gradient: Any, slots: Any, learning_rate: float, step: int
    ) -> None:
        """Update one parameter in place."""
        total = slots.get("velocity")
        if total is None:
            total = gradient
        else:
            total *= self.momentum
            total += gradient
        parameter -= learning_rate * (gradient + self.momentum * total if self.nesterov else total)


class _RMSprop(optimizers.RMSprop):
    """The mean of squares begins with ones, unlike Keras's."""

    def _slot_start(self, name: str) -> float:
        return 1.0 if name == "velocity" else 0.0


class GradientDescentOptimizer(Optimizer):
    """Steps along the gradient."""

    def __init__(
        self, learning_rate: Any, use_locking: bool = False, name: str = "GradientDescent"
    ) -> None:
        super().__init__(optimizers.SGD(_rate(learning_rate), name=name))


class MomentumOptimizer(Optimizer):
    """Steps along a sum of gradients that decays."""

    def __init__(
        self,
        learning_rate: Any,
        momentum: float,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        rate = _rate(learning_rate)
        super().__init__(_Momentum(rate, momentum, use_nesterov, name=name))


class AdagradOptimizer(Optimizer):
    """Steps divided by the root of the sum of all squared gradients."""

    def __init__(
        self,
        learning_rate: Any,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ) -> None:
        rate = _rate(learning_rate)
        super().__init__(optimizers.Adagrad(rate, initial_accumulator_value, name=name))


class AdamOptimizer(Optimizer):
    """Adam."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        super().__init__(optimizers.Adam(_rate(learning_rate), beta1, beta2, epsilon, name=name))


class RMSPropOptimizer(Optimizer):
    """Steps divided by the root of the mean of squared gradients."""

    def __init__(
        self,
        learning_rate: Any,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        rate = _rate(learning_rate)
        super().__init__(_RMSprop(rate, decay, momentum, epsilon, centered, name=name))


class FtrlOptimizer(Optimizer):
    """Follow the regularized leader."""

    def __init__(
        self,
        learning_rate: Any,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
    ) -> None:
        super().__init__(
            optimizers.Ftrl(
                _rate(learning_rate),
                learning_rate_power,
                initial_accumulator_value,
                l1_regularization_strength,
                l2_regularization_strength,
                name=name,
            )
        )


def _rate(learning_rate: Any) -> Any:
    """Return a rate that no variable keeps, because each call of the model function gives it."""
    return learning_rate if callable(learning_rate) else lambda: learning_rate
