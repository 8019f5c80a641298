"""Gradient descent, with or without momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycollective.array_backend import Array
from pycollective.keras.optimizers.optimizer import Optimizer
from pycollective.nn.update import sgd_update


class SGD(Optimizer):
    """Gradient descent: ``w -= learning_rate * g``, or with momentum.

    Parameters
    ----------
    learning_rate
        A number, a `LearningRateSchedule`, or a function without arguments.
    momentum : float
        If not 0, ``velocity = momentum * velocity - learning_rate * g`` and ``w += velocity``.
    nesterov : bool
        True: ``w += momentum * velocity - learning_rate * g`` instead.
    *options, **named
        Arguments of `Optimizer`, from ``weight_decay`` on.

    Raises
    ------
    ValueError
        ``momentum`` is not in 0 to 1.
    """

    _settings = ("momentum", "nesterov")

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        *options: Any,
        **named: Any,
    ) -> None:
        super().__init__(learning_rate, *options, **named)
        if not 0 <= momentum <= 1:
            raise ValueError(f"SGD: momentum must be from 0 to 1, got {momentum}")
        self.momentum = float(momentum)
        self.nesterov = bool(nesterov)

    def slot_names(self) -> tuple[str, ...]:
        """Return ``velocity`` if the momentum is not 0."""
        return ("velocity",) if self.momentum else ()

    def _updates_rows(self) -> bool:
        own = type(self)._update_steps is SGD._update_steps
        return own and not self.momentum and self._has_plain_steps()

    def _update_steps(
        self,
        parameters: Sequence[Array],
        gradients: Sequence[Array],
        slots: Mapping[str, Sequence[Array]],
        learning_rate: float,
        step: int,
    ) -> None:
        velocities = slots.get("velocity")
        sgd_update(parameters, gradients, learning_rate, velocities, self.momentum, self.nesterov)
