"""Ftrl: follow the regularized leader (McMahan et al., 2013)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pycollective.array_backend import Array
from pycollective.keras.optimizers.optimizer import Optimizer


class Ftrl(Optimizer):
    """Follow the regularized leader (McMahan et al., 2013); sets weights of useless features to 0.

    With ``n' = n + g²`` and ``p = -learning_rate_power``, ``z += g - (n'^p - n^p) w / learning_rate``
    and ``w = (clip(z, -l1, l1) - z) / (n'^p / learning_rate + 2 l2)``.

    Parameters
    ----------
    learning_rate
        A number, a `LearningRateSchedule`, or a function without arguments.
    learning_rate_power : float
        The power with which the sum of squared gradients ``n`` reduces steps, at most 0.
    initial_accumulator_value : float
        The initial value of ``n``.
    l1_regularization_strength, l2_regularization_strength : float
        The factors ``l1`` and ``l2`` of the penalties.
    l2_shrinkage_regularization_strength : float
        A factor of a penalty in each step: twice this factor times ``w`` is also added to ``z``.
    beta : float
        ``beta / (2 learning_rate)`` is added to ``l2``.
    *options, **named
        Arguments of `Optimizer`, from ``weight_decay`` on.

    Raises
    ------
    ValueError
        ``learning_rate_power`` is positive, or another number except ``beta`` is negative.
    """

    _settings = (
        "learning_rate_power",
        "initial_accumulator_value",
        "l1_regularization_strength",
        "l2_regularization_strength",
        "l2_shrinkage_regularization_strength",
        "beta",
    )

    def __init__(
        self,
        learning_rate: Any = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        *options: Any,
        **named: Any,
    ) -> None:
        super().__init__(learning_rate, *options, **named)
        if learning_rate_power > 0.0:
            raise ValueError(
                "`learning_rate_power` needs to be negative or zero. Received: "
                f"learning_rate_power={learning_rate_power}."
            )
        for name, value in {
            "initial_accumulator_value": initial_accumulator_value,
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
            "l2_shrinkage_regularization_strength": l2_shrinkage_regularization_strength,
        }.items():
            if not value >= 0.0:
                raise ValueError(
                    f"`{name}` needs to be positive or zero. Received: {name}={value}."
                )
        self.learning_rate_power = float(learning_rate_power)
        self.initial_accumulator_value = float(initial_accumulator_value)
        self.l1_regularization_strength = float(l1_regularization_strength)
        self.l2_regularization_strength = float(l2_regularization_strength)
        self.l2_shrinkage_regularization_strength = float(l2_shrinkage_regularization_strength)
        self.beta = float(beta)

    def slot_names(self) -> tuple[str, ...]:
        """Return the names of the sum of squared gradients ``n``, and of ``z``."""
        return ("accumulator", "linear")

    def _slot_start(self, name: str) -> float:
        return self.initial_accumulator_value if name == "accumulator" else 0.0

    def update_step(
        self,
        parameter: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        learning_rate: float,
        step: int,
    ) -> None:
        """Update one parameter in place."""
        if not learning_rate:
            return  # the limit of ever smaller steps; the formula would divide by zero
        squares, linear = slots["accumulator"], slots["linear"]
        power, l1 = -self.learning_rate_power, self.l1_regularization_strength
        l2 = self.l2_regularization_strength + self.beta / (2 * learning_rate)
        before = squares**power
        squares += gradient * gradient
        after = squares**power
        linear += gradient - (after - before) / learning_rate * parameter
        if self.l2_shrinkage_regularization_strength:
            linear += 2 * self.l2_shrinkage_regularization_strength * parameter
        parameter[...] = (np.clip(linear, -l1, l1) - linear) / (after / learning_rate + 2 * l2)
