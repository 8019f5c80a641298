"""Variants of Adam: Adamax (Kingma and Ba, 2015) and Nadam (Dozat, 2015)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pycollective.array_backend import Array
from pycollective.keras.optimizers.adam import check_betas
from pycollective.keras.optimizers.copies import with_arrays
from pycollective.keras.optimizers.optimizer import Optimizer
from pycollective.nn.update import updated
from pycollective.tensor import Variable

#: Nadam's momentum is ``beta_1 * (1 - 0.5 * _GROWTH**step)``.
_GROWTH = 0.96


class _TwoMeans(Optimizer):
    """Base class with the constructor of both variants."""

    _settings = ("beta_1", "beta_2", "epsilon")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *options: Any,
        **named: Any,
    ) -> None:
        super().__init__(learning_rate, *options, **named)
        check_betas(self, beta_1, beta_2)
        self.beta_1 = float(beta_1)
        self.beta_2 = float(beta_2)
        self.epsilon = float(epsilon)


class Adamax(_TwoMeans):
    """`Adam` with a decaying maximum of the gradient instead of its mean square.

    ``m += (g - m)(1 - beta_1)``, ``u = max(beta_2 u, |g|)``,
    ``w -= learning_rate m / ((1 - beta_1**t)(u + epsilon))`` in step ``t`` = 1, 2, …

    Parameters
    ----------
    learning_rate, beta_1, beta_2, epsilon
        See `Adam`.
    *options, **named
        Arguments of `Optimizer`, from ``weight_decay`` on.
    """

    def slot_names(self) -> tuple[str, ...]:
        """Return the names of the mean and of the maximum."""
        return ("m", "u")

    def update_step(
        self,
        parameter: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        learning_rate: float,
        step: int,
    ) -> None:
        """Update one parameter in place."""
        m, u = slots["m"], slots["u"]
        rate = learning_rate / (1 - self.beta_1**step)
        numbers = (rate, 1 - self.beta_1, self.beta_2, self.epsilon)
        if updated("adamax", parameter, gradient, (m, u), numbers):
            return
        m += (gradient - m) * (1 - self.beta_1)
        u *= self.beta_2
        np.maximum(u, np.abs(gradient), out=u)
        parameter -= rate * m / (u + self.epsilon)


class Nadam(_TwoMeans):
    """`Adam` with Nesterov's momentum (Dozat, 2015).

    Parameters
    ----------
    learning_rate, beta_1, beta_2, epsilon
        See `Adam`.
    *options, **named
        Arguments of `Optimizer`, from ``weight_decay`` on.
    """

    _product: Variable | None = None

    def slot_names(self) -> tuple[str, ...]:
        """Return the names of the two means."""
        return ("m", "v")

    def build(self, var_list: Iterable[Variable]) -> None:
        """Create the missing slots of these variables."""
        variables = list(var_list)
        super().build(variables)
        with self._creation(self):
            if self._product is None and variables:
                self._product = self._make_like(variables[0], "u_product", (), 1.0)

    def _momentum(self, step: int) -> float:
        return self.beta_1 * (1 - 0.5 * _GROWTH**step)

    def _update(self, gradients: list[Array], variables: list[Variable]) -> None:
        if self._product is None:
            # Another replica has created the slots, but not yet this variable.
            self.build(variables)
        assert self._product is not None
        factor = self._momentum(int(self.iterations) + 1)

        def multiply(arrays: list[Array]) -> None:
            arrays[0] *= factor

        with_arrays([self._product], multiply)
        super()._update(gradients, variables)

    def update_step(
        self,
        parameter: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        learning_rate: float,
        step: int,
    ) -> None:
        """Update one parameter in place."""
        assert self._product is not None
        product = float(self._product)
        now, after = self._momentum(step), self._momentum(step + 1)
        m, v = slots["m"], slots["v"]
        of_mean = learning_rate * after / (1 - product * after)
        of_gradient = learning_rate * (1 - now) / (1 - product)
        unbiased = 1 / (1 - self.beta_2**step)
        rests = 1 - self.beta_1, 1 - self.beta_2
        numbers = (of_mean, of_gradient, *rests, unbiased, self.epsilon)
        if updated("nadam", parameter, gradient, (m, v), numbers):
            return
        m += (gradient - m) * rests[0]
        v += (gradient * gradient - v) * rests[1]
        mean = of_mean * m + of_gradient * gradient
        parameter -= mean / (np.sqrt(v * unbiased) + self.epsilon)
