"""Learning rates that depend on the step, under the names of ``tf.keras.optimizers.schedules``."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pycollective.keras import configs
from pycollective.keras.backend import floatx
from pycollective.tensor import Tensor, as_tensor

__all__ = [
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
    "deserialize",
    "serialize",
]


class LearningRateSchedule:
    """Base class: one of your own overrides `__call__`, and `get_config` to be stored."""

    def __call__(self, step: Any) -> Any:
        """Return the learning rate of a step; steps are counted from 0."""
        raise NotImplementedError(f"{type(self).__name__} must override __call__()")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        raise NotImplementedError(
            f"Learning rate schedule '{type(self).__name__}' must override `get_config()` in order "
            "to be serializable."
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Return the schedule that `get_config` described."""
        return cls(**config)


class _Formula(LearningRateSchedule):
    """A schedule that is a function of one number."""

    #: The arguments of the constructor, which are attributes too.
    _arguments: tuple[str, ...]

    def __call__(self, step: Any) -> Tensor:
        """Return the learning rate of a step, or of each in a tensor of steps."""
        steps = np.asarray(as_tensor(step).numpy(), np.float64)
        rates = np.reshape([self.rate(float(s)) for s in steps.ravel()], steps.shape)
        return Tensor(np.asarray(rates, floatx()))

    def rate(self, step: float) -> float:
        """Return the learning rate of a step."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {name: getattr(self, name) for name in self._arguments}


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
    name
        What it is called in a stored description.
    """

    _arguments = ("initial_learning_rate", "decay_steps", "decay_rate", "staircase", "name")

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        decay_rate: float,
        staircase: bool = False,
        name: str = "ExponentialDecay",
    ) -> None:
        self.initial_learning_rate = float(initial_learning_rate)
        self.decay_steps = _positive("decay_steps", decay_steps)
        self.decay_rate = float(decay_rate)
        self.staircase = bool(staircase)
        self.name = name

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

    _arguments = ("boundaries", "values", "name")

    def __init__(
        self,
        boundaries: Sequence[float],
        values: Sequence[float],
        name: str = "PiecewiseConstant",
    ) -> None:
        self.name = name
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


class PolynomialDecay(_Formula):
    """From the initial rate to ``end_learning_rate``, by ``(1 - step / decay_steps) ** power``.

    Parameters
    ----------
    initial_learning_rate
        That of step 0.
    decay_steps
        How many steps the decay takes.
    end_learning_rate
        That of its end.
    power
        1 is a straight line.
    cycle
        Whether the decay is stretched to the next multiple of ``decay_steps`` beyond its end, so
        that the rate rises again; otherwise it stays.
    name
        What it is called in a stored description.
    """

    _arguments = (
        "initial_learning_rate",
        "decay_steps",
        "end_learning_rate",
        "power",
        "cycle",
        "name",
    )

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        end_learning_rate: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        name: str = "PolynomialDecay",
    ) -> None:
        self.initial_learning_rate = float(initial_learning_rate)
        self.decay_steps = _positive("decay_steps", decay_steps)
        self.end_learning_rate = float(end_learning_rate)
        self.power = float(power)
        self.cycle = bool(cycle)
        self.name = name

    def rate(self, step: float) -> float:
        """Return the learning rate of a step."""
        steps = self.decay_steps
        if self.cycle:
            steps *= max(1, math.ceil(step / steps))
        left = 1 - min(step, steps) / steps
        end = self.end_learning_rate
        return float((self.initial_learning_rate - end) * left**self.power + end)


class InverseTimeDecay(_Formula):
    """``initial_learning_rate / (1 + decay_rate * step / decay_steps)``.

    Parameters
    ----------
    initial_learning_rate
        That of step 0.
    decay_steps
        After how many steps the denominator has grown by ``decay_rate``.
    decay_rate
        By what.
    staircase
        Whether it changes only every ``decay_steps`` steps.
    name
        What it is called in a stored description.
    """

    _arguments = ("initial_learning_rate", "decay_steps", "decay_rate", "staircase", "name")

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        decay_rate: float,
        staircase: bool = False,
        name: str = "InverseTimeDecay",
    ) -> None:
        self.initial_learning_rate = float(initial_learning_rate)
        self.decay_steps = _positive("decay_steps", decay_steps)
        self.decay_rate = float(decay_rate)
        self.staircase = bool(staircase)
        self.name = name

    def rate(self, step: float) -> float:
        """Return the learning rate of a step."""
        done = step / self.decay_steps
        if self.staircase:
            done = math.floor(done)
        return self.initial_learning_rate / (1 + self.decay_rate * done)


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
    name
        What it is called in a stored description.
    warmup_target
        With it, the rate first grows from the initial one to this one, from which it decays.
    warmup_steps
        How many steps that takes.
    """

    _arguments = (
        "initial_learning_rate",
        "decay_steps",
        "alpha",
        "name",
        "warmup_target",
        "warmup_steps",
    )

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        alpha: float = 0.0,
        name: str = "CosineDecay",
        warmup_target: float | None = None,
        warmup_steps: float = 0,
    ) -> None:
        self.name = name
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


class CosineDecayRestarts(_Formula):
    """`CosineDecay` that begins anew whenever it ends (Loshchilov and Hutter, 2017).

    Parameters
    ----------
    initial_learning_rate
        That of step 0.
    first_decay_steps
        How many steps the first decay takes.
    t_mul
        By what each decay is longer than the one before.
    m_mul
        By what each decay begins higher than the one before.
    alpha
        The share of the rate that is left at the end of the first decay.
    name
        What it is called in a stored description.
    """

    _arguments = ("initial_learning_rate", "first_decay_steps", "t_mul", "m_mul", "alpha", "name")

    def __init__(
        self,
        initial_learning_rate: float,
        first_decay_steps: float,
        t_mul: float = 2.0,
        m_mul: float = 1.0,
        alpha: float = 0.0,
        name: str = "SGDRDecay",
    ) -> None:
        self.initial_learning_rate = float(initial_learning_rate)
        self.first_decay_steps = _positive("first_decay_steps", first_decay_steps)
        self.t_mul = float(t_mul)
        self.m_mul = float(m_mul)
        self.alpha = float(alpha)
        self.name = name
        if not self.t_mul >= 1:
            raise ValueError(f"t_mul must be at least 1, got {t_mul}: restarts would pile up")

    def rate(self, step: float) -> float:
        """Return the learning rate of a step."""
        # In units of the first decay.
        done, restarts, length = step / self.first_decay_steps, 0, 1.0
        if self.t_mul == 1:
            restarts = math.floor(done)
            done -= restarts
        while done >= length:
            done -= length
            length *= self.t_mul
            restarts += 1
        cosine = 0.5 * self.m_mul**restarts * (1 + math.cos(math.pi * done / length))
        return self.initial_learning_rate * ((1 - self.alpha) * cosine + self.alpha)


def serialize(learning_rate_schedule: LearningRateSchedule) -> dict[str, Any]:
    """Return a schedule as a dictionary."""
    description: dict[str, Any] = configs.serialize(learning_rate_schedule)
    return description


def deserialize(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> LearningRateSchedule:
    """Return the schedule that `serialize` described.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    schedule: LearningRateSchedule = configs.deserialize(
        config, "learning rate schedule", _KNOWN, custom_objects
    )
    return schedule


_KNOWN: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        CosineDecay,
        CosineDecayRestarts,
        ExponentialDecay,
        InverseTimeDecay,
        PiecewiseConstantDecay,
        PolynomialDecay,
    )
}


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return float(value)
