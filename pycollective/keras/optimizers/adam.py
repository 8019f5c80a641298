"""Adam (Kingma and Ba, 2015)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pycollective.array_backend import Array
from pycollective.keras.optimizers.optimizer import Optimizer
from pycollective.nn.update import adam_update

__all__ = ["Adam"]


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), in the form of Keras.

    ``m += (g - m)(1 - beta_1)``, ``v += (g² - v)(1 - beta_2)``,
    ``w -= alpha m / (sqrt(v) + epsilon)`` with
    ``alpha = learning_rate sqrt(1 - beta_2**t) / (1 - beta_1**t)`` in step ``t`` = 1, 2, …

    Parameters
    ----------
    learning_rate
        A number, a `LearningRateSchedule`, or a function without arguments.
    beta_1, beta_2
        How slowly the means of gradient and squared gradient change.
    epsilon
        What keeps the step finite.
    **options
        As for `Optimizer`.

    Raises
    ------
    ValueError
        If ``beta_1`` or ``beta_2`` is not in 0 to 1, without 1.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        for name, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= beta < 1:
                raise ValueError(f"Adam: {name} must be at least 0 and below 1, got {beta}")
        self.beta_1 = float(beta_1)
        self.beta_2 = float(beta_2)
        self.epsilon = float(epsilon)

    def slot_names(self) -> tuple[str, ...]:
        """Return the two running means."""
        return ("m", "v")

    def update_step(
        self,
        parameter: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        learning_rate: float,
        step: int,
    ) -> None:
        """Update one parameter in place."""
        alpha = learning_rate * math.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step)
        adam_update(
            parameter,
            gradient,
            slots["m"],
            slots["v"],
            alpha,
            self.beta_1,
            self.beta_2,
            self.epsilon,
        )
