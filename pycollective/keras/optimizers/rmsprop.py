"""RMSprop (Hinton, 2012)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycollective.array_backend import Array
from pycollective.keras.optimizers.optimizer import Optimizer
from pycollective.nn.update import rmsprop_update


class RMSprop(Optimizer):
    """Steps divided by the root of a running mean of the squared gradient (Hinton, 2012).

    ``v = rho v + (1 - rho) g²``, ``w -= learning_rate g / sqrt(v + epsilon)``.

    Parameters
    ----------
    learning_rate
        A number, a `LearningRateSchedule`, or a function without arguments.
    rho : float
        The decay rate of the mean.
    momentum : float
        If not 0, ``w -= s`` with ``s = momentum s + learning_rate g / sqrt(v + epsilon)``.
    epsilon : float
        A small number that keeps the step finite.
    centered : bool
        True: subtract the square of the gradient's mean from ``v``, which gives the variance.
    *options, **named
        Arguments of `Optimizer`, from ``weight_decay`` on.

    Raises
    ------
    ValueError
        ``rho`` or ``momentum`` is not in 0 to 1.
    """

    _settings = ("rho", "momentum", "epsilon", "centered")

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        *options: Any,
        **named: Any,
    ) -> None:
        super().__init__(learning_rate, *options, **named)
        for name, value in (("rho", rho), ("momentum", momentum)):
            if not 0 <= value <= 1:
                raise ValueError(f"RMSprop: {name} must be from 0 to 1, got {value}")
        self.rho = float(rho)
        self.momentum = float(momentum)
        self.epsilon = float(epsilon)
        self.centered = bool(centered)

    def slot_names(self) -> tuple[str, ...]:
        """Return the names of the slots.

        The slots are the mean of squares, with ``momentum`` the step, and if ``centered`` the mean.
        """
        names = ["velocity"]
        if self.momentum:
            names.append("momentum")
        if self.centered:
            names.append("average_gradient")
        return tuple(names)

    def _slot_order(self) -> Sequence[Sequence[str]]:
        return [(name,) for name in self.slot_names()]

    def update_step(
        self,
        parameter: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        learning_rate: float,
        step: int,
    ) -> None:
        """Update one parameter in place."""
        rmsprop_update(
            parameter,
            gradient,
            slots["velocity"],
            learning_rate,
            self.rho,
            self.epsilon,
            slots.get("average_gradient"),
            slots.get("momentum"),
            self.momentum,
        )
