"""Adagrad (Duchi et al., 2011) and Adadelta (Zeiler, 2012)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pycollective.array_backend import Array
from pycollective.keras.optimizers.optimizer import Optimizer
from pycollective.nn.update import adagrad_update, updated


class Adagrad(Optimizer):
    """Steps divided by the root of the sum of all squared gradients (Duchi et al., 2011).

    ``a += g²``, ``w -= learning_rate g / sqrt(a + epsilon)``.

    Parameters
    ----------
    learning_rate
        A number, a `LearningRateSchedule`, or a function without arguments.
    initial_accumulator_value : float
        The initial value of the sum.
    epsilon : float
        A small number that keeps the step finite.
    *options, **named
        Arguments of `Optimizer`, from ``weight_decay`` on.

    Raises
    ------
    ValueError
        ``initial_accumulator_value`` is negative.
    """

    _settings = ("initial_accumulator_value", "epsilon")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        *options: Any,
        **named: Any,
    ) -> None:
        super().__init__(learning_rate, *options, **named)
        if not initial_accumulator_value >= 0:
            raise ValueError(
                "Adagrad: initial_accumulator_value must be at least 0, got "
                f"{initial_accumulator_value}"
            )
        self.initial_accumulator_value = float(initial_accumulator_value)
        self.epsilon = float(epsilon)

    def slot_names(self) -> tuple[str, ...]:
        """Return the name of the sum of squared gradients."""
        return ("accumulator",)

    def _slot_start(self, name: str) -> float:
        return self.initial_accumulator_value if name == "accumulator" else 0.0

    def _updates_rows(self) -> bool:
        return type(self).update_step is Adagrad.update_step and self._has_plain_steps()

    def update_step(
        self,
        parameter: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        learning_rate: float,
        step: int,
    ) -> None:
        """Update one parameter in place."""
        adagrad_update(parameter, gradient, slots["accumulator"], learning_rate, self.epsilon)


class Adadelta(Optimizer):
    """Steps scaled by the running means of squared gradients and of squared steps (Zeiler, 2012).

    ``a = rho a + (1 - rho) g²``, ``d = g sqrt(b + epsilon) / sqrt(a + epsilon)``,
    ``b = rho b + (1 - rho) d²``, ``w -= learning_rate d``.

    Parameters
    ----------
    learning_rate
        A number, a `LearningRateSchedule`, or a function without arguments; the paper uses 1.
    rho : float
        The decay rate of the means.
    epsilon : float
        A small number that keeps the step finite, and makes the first step larger than 0.
    *options, **named
        Arguments of `Optimizer`, from ``weight_decay`` on.
    """

    _settings = ("rho", "epsilon")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        *options: Any,
        **named: Any,
    ) -> None:
        super().__init__(learning_rate, *options, **named)
        self.rho = float(rho)
        self.epsilon = float(epsilon)

    def slot_names(self) -> tuple[str, ...]:
        """Return the names of the means of squared gradients and of squared steps."""
        return ("accumulated_grad", "accumulated_delta_var")

    def update_step(
        self,
        parameter: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        learning_rate: float,
        step: int,
    ) -> None:
        """Update one parameter in place."""
        gradients, deltas = slots["accumulated_grad"], slots["accumulated_delta_var"]
        numbers = (learning_rate, self.rho, 1 - self.rho, self.epsilon)
        if updated("adadelta", parameter, gradient, (gradients, deltas), numbers):
            return
        gradients *= self.rho
        gradients += (1 - self.rho) * gradient * gradient
        delta = np.sqrt(deltas + self.epsilon) * gradient / np.sqrt(gradients + self.epsilon)
        deltas *= self.rho
        deltas += (1 - self.rho) * delta * delta
        parameter -= learning_rate * delta
