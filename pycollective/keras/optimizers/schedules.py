"""Learning rates that depend on the step, under the names of ``tf.keras.optimizers.schedules``."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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
    """Base class of schedules; a subclass overrides `__call__`, and `get_config` for serialization."""

    def __call__(self, step: Any) -> Any:
        """Return the learning rate of a step; the first step is 0."""
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


@dataclass(eq=False, repr=False)
class _Formula(LearningRateSchedule):
    """A schedule that is a function of one number; its fields are the constructor's arguments."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("float", "float | None") and value is not None:
                setattr(self, field.name, float(value))
            elif field.type == "bool":
                setattr(self, field.name, bool(value))
            if field.name.endswith("decay_steps") and not value > 0:
                raise ValueError(f"{field.name} must be positive, got {value}")

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
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(eq=False, repr=False)
class ExponentialDecay(_Formula):
    """``initial_learning_rate * decay_rate ** (step / decay_steps)``.

    Parameters
    ----------
    initial_learning_rate : float
        The rate of step 0.
    decay_steps : float
        The number of steps in which the rate is multiplied by ``decay_rate``.
    decay_rate : float
        The factor.
    staircase : bool
        True: the rate changes only every ``decay_steps`` steps.
    name : str
        The name in a serialized description.

    Raises
    ------
    ValueError
        ``decay_steps`` is not positive.
    """

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False
    name: str = "ExponentialDecay"

    def rate(self, step: float) -> float:
        """Return the learning rate of a step."""
        power = step / self.decay_steps
        return self.initial_learning_rate * self.decay_rate ** (
            math.floor(power) if self.staircase else power
        )


@dataclass(eq=False, repr=False)
class PiecewiseConstantDecay(_Formula):
    """``values[i]`` while the step is at most ``boundaries[i]``, then the last value.

    Parameters
    ----------
    boundaries : sequence of float
        Numbers of steps, in increasing order.
    values : sequence of float
        The learning rates, one more than the boundaries.
    name : str
        The name in a serialized description.

    Raises
    ------
    ValueError
        ``values`` does not have one item more than ``boundaries``, or the boundaries do not increase.
    """

    boundaries: Sequence[float]
    values: Sequence[float]
    name: str = "PiecewiseConstant"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.boundaries = [float(b) for b in self.boundaries]
        self.values = [float(v) for v in self.values]
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


@dataclass(eq=False, repr=False)
class PolynomialDecay(_Formula):
    """A rate from the initial rate to ``end_learning_rate``, by ``(1 - step / decay_steps) ** power``.

    Parameters
    ----------
    initial_learning_rate : float
        The rate of step 0.
    decay_steps : float
        The number of steps of the decay.
    end_learning_rate : float
        The last rate.
    power : float
        The exponent; 1 is a linear decay.
    cycle : bool
        True: after its end the decay is extended to the next multiple of ``decay_steps``, so that the
        rate rises again. False: the rate stays at the last one.
    name : str
        The name in a serialized description.

    Raises
    ------
    ValueError
        ``decay_steps`` is not positive.
    """

    initial_learning_rate: float
    decay_steps: float
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False
    name: str = "PolynomialDecay"

    def rate(self, step: float) -> float:
        """Return the learning rate of a step."""
        steps = self.decay_steps
        if self.cycle:
            steps *= max(1, math.ceil(step / steps))
        left = 1 - min(step, steps) / steps
        end = self.end_learning_rate
        return float((self.initial_learning_rate - end) * left**self.power + end)


@dataclass(eq=False, repr=False)
class InverseTimeDecay(_Formula):
    """``initial_learning_rate / (1 + decay_rate * step / decay_steps)``.

    Parameters
    ----------
    initial_learning_rate : float
        The rate of step 0.
    decay_steps : float
        The number of steps in which the denominator grows by ``decay_rate``.
    decay_rate : float
        The growth.
    staircase : bool
        True: the rate changes only every ``decay_steps`` steps.
    name : str
        The name in a serialized description.

    Raises
    ------
    ValueError
        ``decay_steps`` is not positive.
    """

    initial_learning_rate: float
    decay_steps: float
    decay_rate: float
    staircase: bool = False
    name: str = "InverseTimeDecay"

    def rate(self, step: float) -> float:
        """Return the learning rate of a step."""
        done = step / self.decay_steps
        if self.staircase:
            done = math.floor(done)
        return self.initial_learning_rate / (1 + self.decay_rate * done)


@dataclass(eq=False, repr=False)
class CosineDecay(_Formula):
    """Half a period of a cosine, from the initial rate down to ``alpha`` times it.

    Parameters
    ----------
    initial_learning_rate : float
        The rate of step 0.
    decay_steps : float
        The number of steps of the decay.
    alpha : float
        The last rate as a share of the rate where the decay begins.
    name : str
        The name in a serialized description.
    warmup_target : float, optional
        The rate at the end of a warmup from the initial rate, where the decay begins.
    warmup_steps : float
        The number of steps of the warmup.

    Raises
    ------
    ValueError
        ``decay_steps`` is not positive.
    """

    initial_learning_rate: float
    decay_steps: float
    alpha: float = 0.0
    name: str = "CosineDecay"
    warmup_target: float | None = None
    warmup_steps: float = 0

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


@dataclass(eq=False, repr=False)
class CosineDecayRestarts(_Formula):
    """`CosineDecay` with restarts (Loshchilov and Hutter, 2017).

    Parameters
    ----------
    initial_learning_rate : float
        The rate of step 0.
    first_decay_steps : float
        The number of steps of the first decay.
    t_mul : float
        The length of each decay divided by the length of the decay before it.
    m_mul : float
        The first rate of each decay divided by that of the decay before it, if ``alpha`` is 0.
    alpha : float
        The last rate of each decay as a share of ``initial_learning_rate``.
    name : str
        The name in a serialized description.

    Raises
    ------
    ValueError
        ``first_decay_steps`` is not positive, or ``t_mul`` is below 1.
    """

    initial_learning_rate: float
    first_decay_steps: float
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0
    name: str = "SGDRDecay"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.t_mul >= 1:
            raise ValueError(
                f"t_mul must be at least 1, got {self.t_mul}: decays that become shorter would restart "
                "infinitely often in a finite number of steps"
            )

    def rate(self, step: float) -> float:
        """Return the learning rate of a step."""
        # `done` and `length` are in units of the first decay.
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
        The name is unknown.
    """
    schedule: LearningRateSchedule = configs.deserialize(
        config, "learning rate schedule", _KNOWN, custom_objects
    )
    return schedule


_KNOWN: dict[str, Any] = {cls.__name__: cls for cls in _Formula.__subclasses__()}
