"""Adam (Kingma and Ba, 2015), and AdamW (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pycollective.arguments import number_of
from pycollective.array_backend import Array
from pycollective.keras.optimizers.optimizer import Optimizer
from pycollective.nn.update import adam_update


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), in the form of Keras.

    ``m += (g - m)(1 - beta_1)``, ``v += (g² - v)(1 - beta_2)``,
    ``w -= alpha m / (sqrt(v) + epsilon)`` with
    ``alpha = learning_rate sqrt(1 - beta_2**t) / (1 - beta_1**t)`` in step ``t`` = 1, 2, …

    Parameters
    ----------
    learning_rate
        A number, a `LearningRateSchedule`, or a function without arguments.
    beta_1, beta_2 : float
        The decay rates of the means of the gradient and of its square.
    epsilon : float
        A small number that keeps the step finite.
    amsgrad : bool
        True: use the largest ``v`` of all steps (Reddi et al., 2018).
    *options, **named
        Arguments of `Optimizer`, from ``weight_decay`` on.

    Raises
    ------
    ValueError
        ``beta_1`` or ``beta_2`` is not at least 0 and below 1.
    """

    _settings = ("beta_1", "beta_2", "epsilon", "amsgrad")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        *options: Any,
        **named: Any,
    ) -> None:
        super().__init__(learning_rate, *options, **named)
        check_betas(self, beta_1, beta_2)
        self.beta_1 = float(beta_1)
        self.beta_2 = float(beta_2)
        self.epsilon = float(epsilon)
        self.amsgrad = bool(amsgrad)

    def slot_names(self) -> tuple[str, ...]:
        """Return the names of the two means, and with ``amsgrad`` of the largest ``v``."""
        return ("m", "v", "largest_v") if self.amsgrad else ("m", "v")

    def _slot_order(self) -> Sequence[Sequence[str]]:
        return [("m", "v"), ("largest_v",)] if self.amsgrad else [("m", "v")]

    def _update_steps(
        self,
        parameters: Sequence[Array],
        gradients: Sequence[Array],
        slots: Mapping[str, Sequence[Array]],
        learning_rate: float,
        step: int,
    ) -> None:
        alpha = learning_rate * math.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step)
        ms, vs = slots["m"], slots["v"]
        if not self.amsgrad:
            adam_update(
                parameters, gradients, ms, vs, alpha, self.beta_1, self.beta_2, self.epsilon
            )
            return
        rows = zip(parameters, gradients, ms, vs, slots["largest_v"], strict=True)
        for parameter, gradient, m, v, largest in rows:
            m += (gradient - m) * (1 - self.beta_1)
            v += (gradient * gradient - v) * (1 - self.beta_2)
            np.maximum(largest, v, out=largest)
            parameter -= alpha * m / (np.sqrt(largest) + self.epsilon)


class AdamW(Adam):
    """`Adam` with decoupled weight decay (Loshchilov and Hutter, 2019).

    Parameters
    ----------
    weight_decay
        See `Optimizer`; it must not be None.
    learning_rate, beta_1, beta_2, epsilon, amsgrad
        See `Adam`.
    *options, **named
        Arguments of `Optimizer`, from ``clipnorm`` on.

    Raises
    ------
    ValueError
        ``weight_decay`` is None.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        *options: Any,
        **named: Any,
    ) -> None:
        if weight_decay is None:
            raise ValueError("Argument `weight_decay` must be a float. Received: weight_decay=None")
        super().__init__(
            learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay, *options, **named
        )


def check_betas(optimizer: Optimizer, *betas: float) -> None:
    """Raise an error unless ``beta_1`` and ``beta_2`` are at least 0 and below 1."""
    for number, beta in enumerate(betas, 1):
        if not 0 <= number_of(f"{type(optimizer).__name__}: beta_{number}", beta) < 1:
            raise ValueError(
                f"{type(optimizer).__name__}: beta_{number} must be at least 0 and below 1, got {beta}"
            )
