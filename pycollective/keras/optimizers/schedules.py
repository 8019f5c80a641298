"""Learning rates that depend on the step, under the names of ``tf.keras.optimizers.schedules``."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycollective.keras.backend import floatx
from pycollective.tensor import Tensor, as_tensor

__all__ = [
    "CosineDecay",
    "ExponentialDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
]


class LearningRateSchedule:
    """Base class: one of your own overrides `__call__`."""

    def __call__(self, step: Any) -> Any:
        """Return the learning rate of a step; steps are counted from 0."""
        raise NotImplementedError(f"{type(self).__name__} must override __call__()")


class _Formula(LearningRateSchedule):
    """A schedule that is a function of one number."""

    def __call__(self, step: Any) -> Tensor:
        """Return the learning rate of a step, or of each in a tensor of steps."""
        steps = np.asarray(as_tensor(step).numpy(), np.float64)
        rates = np.reshape([self.rate(float(s)) for s in steps.ravel()], steps.shape)
        return Tensor(np.asarray(rates, floatx()))

    def rate(self, step: float) -> float:
        """Return the learning rate of a step."""
        raise NotImplementedError


class ExponentialDecay(_Formula):
    """``initial_learning_rate * decay_rate ** (step / decay_steps)``.

    Parameters
    ----------
    initial_learning_rate
        That of step 0.
    decay_steps
        After how many steps it has been multiplied by ``decay_rate``.
    decay_rate
        The factor.
    staircase
        Whether it changes only every ``decay_steps`` steps.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        decay_rate: float,
        staircase: bool = False,
    ) -> None:
        self.initial_learning_rate = float(initial_learning_rate)
        self.decay_steps = _positive("decay_steps", decay_steps)
        self.decay_rate = float(decay_rate)
        self.staircase = bool(staircase)

    def rate(self, step: float) -> float:
        """Return the learning rate of a step."""
        power = step / self.decay_steps
        return self.initial_learning_rate * self.decay_rate ** (
            math.floor(power) if self.staircase else power
        )


class PiecewiseConstantDecay(_Formula):
    """``values[i]`` while the step is at most ``boundaries[i]``, then the last value.

    Raises
    ------
    ValueError
        If there is not one value more than boundaries, or the boundaries do not increase.
    """

    def __init__(self, boundaries: Sequence[float], values: Sequence[float]) -> None:
        self.boundaries = [float(b) for b in boundaries]
        self.values = [float(v) for v in values]
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                "PiecewiseConstantDecay needs one value more than boundaries, got "
                f"{len(self.values)} values and {len(self.boundaries)} boundaries"
            )
        if sorted(set(self.boundaries)) != self.boundaries:
            raise ValueError(f"boundaries must increase, got {self.boundaries}")

    def rate(self, step: float) -> float:
        """Return the learning rate of a step."""
        return self.values[bisect_left(self.boundaries, step)]


class CosineDecay(_Formula):
    """Half a period of a cosine, from the initial rate down to ``alpha`` times it.

    Parameters
    ----------
    initial_learning_rate
        That of step 0.
    decay_steps
        How many steps the decay takes.
    alpha
        The share of the rate that is left at the end.
    warmup_target
        With it, the rate first grows from the initial one to this one, from which it decays.
    warmup_steps
        How many steps that takes.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        alpha: float = 0.0,
        warmup_target: float | None = None,
        warmup_steps: float = 0,
    ) -> None:
        self.initial_learning_rate = float(initial_learning_rate)
        self.decay_steps = _positive("decay_steps", decay_steps)
        self.alpha = float(alpha)
        self.warmup_target = None if warmup_target is None else float(warmup_target)
        self.warmup_steps = float(warmup_steps)

    def rate(self, step: float) -> float:
        """Return the learning rate of a step."""
        top = self.initial_learning_rate
        if self.warmup_target is not None:
            if step < self.warmup_steps:
                return top + (self.warmup_target - top) * step / self.warmup_steps
            top = self.warmup_target
            step -= self.warmup_steps
        share = min(step, self.decay_steps) / self.decay_steps
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        return top * ((1 - self.alpha) * cosine + self.alpha)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return float(value)
