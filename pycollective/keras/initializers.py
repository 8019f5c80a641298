"""Where weights start, under the names of ``tf.keras.initializers``.

Random numbers are drawn in float64 and rounded, so that a seed gives the same weights in every
dtype, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pycollective.array_backend import Array
from pycollective.dtypes import as_dtype
from pycollective.keras.backend import find, floatx, name_of_class
from pycollective.tensor import Tensor
from pycollective.tensor.random import default_generator

__all__ = [
    "Constant",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "Initializer",
    "LecunNormal",
    "LecunUniform",
    "Ones",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "VarianceScaling",
    "Zeros",
    "constant",
    "get",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "ones",
    "random_normal",
    "random_uniform",
    "zeros",
]

Shape = tuple[int, ...]


class Initializer:
    """Base class: one of your own overrides `values`."""

    def __call__(self, shape: Any, dtype: Any = None) -> Tensor:
        """Return the values to start from.

        Parameters
        ----------
        shape
            The lengths of the axes.
        dtype
            By default ``floatx()``.
        """
        sizes = tuple(int(n) for n in shape)
        return Tensor(
            np.asarray(self.values(sizes)).astype(as_dtype(floatx() if dtype is None else dtype))
        )

    def values(self, shape: Shape) -> Array:
        """Return an array of this shape."""
        raise NotImplementedError(f"{type(self).__name__} must override values()")


class Zeros(Initializer):
    """All values are 0."""

    def values(self, shape: Shape) -> Array:
        """Return zeros."""
        return np.zeros(shape)


class Ones(Initializer):
    """All values are 1."""

    def values(self, shape: Shape) -> Array:
        """Return ones."""
        return np.ones(shape)


class Constant(Initializer):
    """All values are ``value``, which may also be an array that broadcasts to the shape."""

    def __init__(self, value: Any = 0.0) -> None:
        self.value = value

    def values(self, shape: Shape) -> Array:
        """Return the value in each place."""
        return np.broadcast_to(np.asarray(self.value), shape)


class _Random(Initializer):
    """Base of what draws; with a seed each call gives the same values, as in Keras 3."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def _generator(self) -> np.random.Generator:
        return default_generator() if self.seed is None else np.random.default_rng(self.seed)


class RandomNormal(_Random):
    """Normally distributed values."""

    def __init__(self, mean: float = 0.0, stddev: float = 0.05, seed: int | None = None) -> None:
        super().__init__(seed)
        self.mean = mean
        self.stddev = stddev

    def values(self, shape: Shape) -> Array:
        """Draw."""
        return self._generator().normal(self.mean, self.stddev, shape)


class TruncatedNormal(RandomNormal):
    """Normally distributed values, none further than two ``stddev`` from ``mean``."""

    def values(self, shape: Shape) -> Array:
        """Draw, and draw again what is outside."""
        return self.mean + self.stddev * _truncated(self._generator(), shape)


class RandomUniform(_Random):
    """Values that are equally likely from ``minval`` to ``maxval``."""

    def __init__(
        self, minval: float = -0.05, maxval: float = 0.05, seed: int | None = None
    ) -> None:
        super().__init__(seed)
        self.minval = minval
        self.maxval = maxval

    def values(self, shape: Shape) -> Array:
        """Draw."""
        return self._generator().uniform(self.minval, self.maxval, shape)


class VarianceScaling(_Random):
    """Values whose variance is ``scale`` divided by the number of inputs, outputs or their mean.

    Parameters
    ----------
    scale
        What is divided.
    mode
        ``"fan_in"``, ``"fan_out"`` or ``"fan_avg"``.
    distribution
        ``"uniform"`` or ``"truncated_normal"``.
    seed
        With a seed each call gives the same values.

    Raises
    ------
    ValueError
        For an unknown mode or distribution, or a scale that is not positive.
    """

    def __init__(
        self,
        scale: float = 1.0,
        mode: str = "fan_in",
        distribution: str = "truncated_normal",
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        if scale <= 0:
            raise ValueError(f"scale must be positive, got {scale}")
        if mode not in ("fan_in", "fan_out", "fan_avg"):
            raise ValueError(f"mode must be 'fan_in', 'fan_out' or 'fan_avg', got {mode!r}")
        if distribution not in ("uniform", "truncated_normal"):
            raise ValueError(
                f"distribution must be 'uniform' or 'truncated_normal', got {distribution!r}"
            )
        self.scale = scale
        self.mode = mode
        self.distribution = distribution

    def values(self, shape: Shape) -> Array:
        """Draw."""
        fan_in, fan_out = fans(shape)
        fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[self.mode]
        variance = self.scale / max(1.0, fan)
        if self.distribution == "uniform":
            limit = math.sqrt(3 * variance)
            return self._generator().uniform(-limit, limit, shape)
        # What is cut off beyond two standard deviations is missing from the variance.
        stddev = math.sqrt(variance) / 0.87962566103423978
        return stddev * _truncated(self._generator(), shape)


class GlorotUniform(VarianceScaling):
    """Uniform with variance ``2 / (fan_in + fan_out)`` (Glorot and Bengio, 2010)."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(1.0, "fan_avg", "uniform", seed)


class GlorotNormal(VarianceScaling):
    """Truncated normal with variance ``2 / (fan_in + fan_out)`` (Glorot and Bengio, 2010)."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(1.0, "fan_avg", "truncated_normal", seed)


class HeUniform(VarianceScaling):
    """Uniform with variance ``2 / fan_in`` (He et al., 2015)."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(2.0, "fan_in", "uniform", seed)


class HeNormal(VarianceScaling):
    """Truncated normal with variance ``2 / fan_in`` (He et al., 2015)."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(2.0, "fan_in", "truncated_normal", seed)


class LecunUniform(VarianceScaling):
    """Uniform with variance ``1 / fan_in``."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(1.0, "fan_in", "uniform", seed)


class LecunNormal(VarianceScaling):
    """Truncated normal with variance ``1 / fan_in``."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(1.0, "fan_in", "truncated_normal", seed)


def fans(shape: Shape) -> tuple[int, int]:
    """Return how many inputs an output of these weights has, and how many outputs an input."""
    if len(shape) < 2:
        size = shape[0] if shape else 1
        return size, size
    window = math.prod(shape[:-2])
    return shape[-2] * window, shape[-1] * window


def _truncated(generator: np.random.Generator, shape: Shape) -> Array:
    draw = np.asarray(generator.standard_normal(shape))
    outside = np.abs(draw) > 2
    while outside.any():
        draw[outside] = generator.standard_normal(int(outside.sum()))
        outside = np.abs(draw) > 2
    return draw


zeros = Zeros
ones = Ones
constant = Constant
random_normal = RandomNormal
random_uniform = RandomUniform
glorot_uniform = GlorotUniform
glorot_normal = GlorotNormal
he_uniform = HeUniform
he_normal = HeNormal

_KNOWN: dict[str, Any] = {}
for _class in (
    Zeros,
    Ones,
    Constant,
    RandomNormal,
    TruncatedNormal,
    RandomUniform,
    VarianceScaling,
    GlorotUniform,
    GlorotNormal,
    HeUniform,
    HeNormal,
    LecunUniform,
    LecunNormal,
):
    _KNOWN[_class.__name__] = _KNOWN[name_of_class(_class)] = _class


def get(identifier: Any) -> Callable[..., Any] | None:
    """Return an initializer: itself, or one by its name (``"glorot_uniform"``, ``"Zeros"``).

    Raises
    ------
    ValueError
        For an unknown name, or what is neither a name nor callable.
    """
    if isinstance(identifier, str):
        initializer: Callable[..., Any] = find("initializer", _KNOWN, identifier)()
        return initializer
    if isinstance(identifier, type) and issubclass(identifier, Initializer):
        return identifier()
    if identifier is None or callable(identifier):
        found: Callable[..., Any] | None = identifier
        return found
    raise ValueError(f"{identifier!r} is no initializer; give a name or a callable(shape, dtype)")
