"""Initializers of weights, under the names of ``tf.keras.initializers``.

Random numbers are drawn in float64 and rounded, so that a seed gives the same weights in every
dtype, up to rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pycollective.array_backend import Array
from pycollective.dtypes import as_dtype
from pycollective.keras.backend import floatx
from pycollective.keras.configs import Configured, Kind, array_or_number, by_name
from pycollective.keras.registration import publish
from pycollective.tensor import Tensor
from pycollective.tensor.random import default_generator, truncated

__all__ = [
    "Constant",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "Identity",
    "Initializer",
    "LecunNormal",
    "LecunUniform",
    "Ones",
    "Orthogonal",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "VarianceScaling",
    "Zeros",
    "constant",
    "deserialize",
    "get",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "identity",
    "lecun_normal",
    "lecun_uniform",
    "ones",
    "orthogonal",
    "random_normal",
    "random_uniform",
    "serialize",
    "truncated_normal",
    "variance_scaling",
    "zeros",
]

Shape = tuple[int, ...]


class Initializer(Configured):
    """Base class of initializers; a subclass overrides `values`."""

    def __call__(self, shape: Any, dtype: Any = None) -> Tensor:
        """Return the initial values for a shape; the default dtype is ``floatx()``."""
        sizes = tuple(int(n) for n in shape)
        return Tensor(
            np.asarray(self.values(sizes)).astype(as_dtype(floatx() if dtype is None else dtype))
        )

    def values(self, shape: Shape) -> Array:
        """Return an array of this shape."""
        raise NotImplementedError(f"{type(self).__name__} must override values()")

    def clone(self) -> Any:
        """Return a copy of the initializer."""
        return self.from_config(self.get_config())


class Zeros(Initializer):
    """All values are 0."""

    def values(self, shape: Shape) -> Array:
        return np.zeros(shape)


class Ones(Initializer):
    """All values are 1."""

    def values(self, shape: Shape) -> Array:
        return np.ones(shape)


class Constant(Initializer):
    """All values are ``value``, which may also be an array that broadcasts to the shape."""

    def __init__(self, value: Any = 0.0) -> None:
        self.value = value

    def values(self, shape: Shape) -> Array:
        return np.broadcast_to(np.asarray(self.value), shape)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        return cls(array_or_number(config["value"]))


class Identity(Initializer):
    """``gain`` on the diagonal of a matrix, 0 elsewhere."""

    def __init__(self, gain: float = 1.0) -> None:
        self.gain = gain

    def values(self, shape: Shape) -> Array:
        if len(shape) != 2:
            raise ValueError(f"Identity needs two axes, got shape {shape}")
        return self.gain * np.eye(*shape)


class _Random(Initializer):
    """Base of random initializers; each call of one object gives the same values, as in Keras 3."""

    def __init__(self, seed: Any = None) -> None:
        # Keras stores a generator that was given as the seed as a nested config.
        self.seed: int | None = seed["config"]["seed"] if isinstance(seed, Mapping) else seed
        self._drawn: np.random.BitGenerator | None = None  # the state before the first call

    def _generator(self) -> np.random.Generator:
        if self.seed is not None:
            return np.random.default_rng(self.seed)
        if self._drawn is not None:
            return np.random.Generator(copy.deepcopy(self._drawn))
        generator = default_generator()
        self._drawn = copy.deepcopy(generator.bit_generator)
        return generator


class RandomNormal(_Random):
    """Normally distributed values."""

    def __init__(self, mean: float = 0.0, stddev: float = 0.05, seed: int | None = None) -> None:
        super().__init__(seed)
        self.mean = mean
        self.stddev = stddev

    def values(self, shape: Shape) -> Array:
        return self._generator().normal(self.mean, self.stddev, shape)


class TruncatedNormal(RandomNormal):
    """Normally distributed values, none further than two ``stddev`` from ``mean``."""

    def values(self, shape: Shape) -> Array:
        return self.mean + self.stddev * truncated(self._generator(), shape)


class RandomUniform(_Random):
    """Uniformly distributed values from ``minval`` to ``maxval``."""

    def __init__(
        self, minval: float = -0.05, maxval: float = 0.05, seed: int | None = None
    ) -> None:
        super().__init__(seed)
        self.minval = minval
        self.maxval = maxval

    def values(self, shape: Shape) -> Array:
        return self._generator().uniform(self.minval, self.maxval, shape)


class Orthogonal(_Random):
    """A matrix with orthogonal columns, or rows if it has fewer rows, each of norm ``gain``.

    The matrix is the orthogonal factor of a matrix of normally distributed numbers (Saxe et al.,
    2014). All axes except the last count as rows.
    """

    def __init__(self, gain: float = 1.0, seed: int | None = None) -> None:
        super().__init__(seed)
        self.gain = gain

    def values(self, shape: Shape) -> Array:
        if len(shape) < 2:
            raise ValueError(f"Orthogonal needs at least two axes, got shape {shape}")
        rows, columns = math.prod(shape[:-1]), shape[-1]
        draw = self._generator().standard_normal((max(rows, columns), min(rows, columns)))
        q, r = np.linalg.qr(draw)
        q = q * np.sign(np.diagonal(r))
        matrix: Array = self.gain * (q if rows >= columns else q.T)
        return matrix.reshape(shape)


_DISTRIBUTIONS = ("uniform", "truncated_normal", "untruncated_normal")


class VarianceScaling(_Random):
    """Values whose variance is ``scale`` divided by the number of inputs, outputs or their mean.

    Parameters
    ----------
    scale : float
        The numerator of the variance.
    mode : str
        ``"fan_in"``, ``"fan_out"`` or ``"fan_avg"``.
    distribution : str
        ``"uniform"``, ``"truncated_normal"`` (also called ``"normal"``) or
        ``"untruncated_normal"``.
    seed : int, optional
        With a seed, all objects with the same arguments give the same values.
    input_axes, output_axes : sequence of int, optional
        The axes of inputs and of outputs; ignored unless both are given. By default, `fans` counts
        the inputs and outputs.

    Raises
    ------
    ValueError
        If ``scale``, ``mode`` or ``distribution`` is invalid.
    """

    _config_names: tuple[str, ...] = ("scale", "mode", "distribution", "seed")

    def __init__(
        self,
        scale: float = 1.0,
        mode: str = "fan_in",
        distribution: str = "truncated_normal",
        seed: int | None = None,
        input_axes: Sequence[int] | None = None,
        output_axes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(seed)
        if scale <= 0:
            raise ValueError(f"scale must be positive, got {scale}")
        if mode not in ("fan_in", "fan_out", "fan_avg"):
            raise ValueError(f"mode must be 'fan_in', 'fan_out' or 'fan_avg', got {mode!r}")
        name = str(distribution).lower()
        name = "truncated_normal" if name == "normal" else name
        if name not in _DISTRIBUTIONS:
            raise ValueError(f"distribution must be one of {_DISTRIBUTIONS}, got {distribution!r}")
        self.scale = scale
        self.mode = mode
        self.distribution = name
        self.input_axes = input_axes
        self.output_axes = output_axes

    def values(self, shape: Shape) -> Array:
        fan_in, fan_out = fans(shape)
        if self.input_axes is not None and self.output_axes is not None:
            fan_in = math.prod(shape[axis] for axis in self.input_axes)
            fan_out = math.prod(shape[axis] for axis in self.output_axes)
        fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[self.mode]
        variance = self.scale / max(1.0, fan)
        generator = self._generator()
        if self.distribution == "uniform":
            limit = math.sqrt(3 * variance)
            return generator.uniform(-limit, limit, shape)
        if self.distribution == "untruncated_normal":
            return generator.normal(0.0, math.sqrt(variance), shape)
        # Truncation at two standard deviations reduces the variance; this factor compensates.
        stddev = math.sqrt(variance) / 0.87962566103423978
        return stddev * truncated(generator, shape)

    def get_config(self) -> dict[str, Any]:
        # Older releases of Keras 3 raise an error for these arguments, so defaults are not stored.
        axes = {"input_axes": self.input_axes, "output_axes": self.output_axes}
        given = {name: list(value) for name, value in axes.items() if value is not None}
        return {**super().get_config(), **given}


class _Scaled(VarianceScaling):
    """Base of initializers with fixed arguments of `VarianceScaling`."""

    _config_names: tuple[str, ...] = ("seed",)
    _choice: tuple[float, str, str]

    def __init__(
        self,
        seed: int | None = None,
        input_axes: Sequence[int] | None = None,
        output_axes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(*self._choice, seed, input_axes, output_axes)


class GlorotUniform(_Scaled):
    """Uniform with variance ``2 / (fan_in + fan_out)`` (Glorot and Bengio, 2010)."""

    _choice = (1.0, "fan_avg", "uniform")


class GlorotNormal(_Scaled):
    """Truncated normal with variance ``2 / (fan_in + fan_out)`` (Glorot and Bengio, 2010)."""

    _choice = (1.0, "fan_avg", "truncated_normal")


class HeUniform(_Scaled):
    """Uniform with variance ``2 / fan_in`` (He et al., 2015)."""

    _choice = (2.0, "fan_in", "uniform")


class HeNormal(_Scaled):
    """Truncated normal with variance ``2 / fan_in`` (He et al., 2015)."""

    _choice = (2.0, "fan_in", "truncated_normal")


class LecunUniform(_Scaled):
    """Uniform with variance ``1 / fan_in`` (LeCun et al., 1998)."""

    _choice = (1.0, "fan_in", "uniform")


class LecunNormal(_Scaled):
    """Truncated normal with variance ``1 / fan_in`` (LeCun et al., 1998)."""

    _choice = (1.0, "fan_in", "truncated_normal")


def fans(shape: Shape) -> tuple[int, int]:
    """Return the fan-in (inputs of one output) and the fan-out (outputs of one input).

    The last two axes of ``shape`` are inputs and outputs. Axes before them are a window, whose size
    multiplies both. A shape of one axis has this axis as both.
    """
    if len(shape) < 2:
        size = shape[0] if shape else 1
        return size, size
    window = math.prod(shape[:-2])
    return shape[-2] * window, shape[-1] * window


zeros = Zeros
ones = Ones
constant = Constant
identity = Identity
orthogonal = Orthogonal
random_normal = RandomNormal
random_uniform = RandomUniform
truncated_normal = TruncatedNormal
variance_scaling = VarianceScaling
glorot_uniform = GlorotUniform
glorot_normal = GlorotNormal
he_uniform = HeUniform
he_normal = HeNormal
lecun_uniform = LecunUniform
lecun_normal = LecunNormal

_KIND = Kind(
    "initializer",
    {
        "normal": RandomNormal,
        "one": Ones,
        "uniform": RandomUniform,
        "zero": Zeros,
        "IdentityInitializer": Identity,
        "OrthogonalInitializer": Orthogonal,
    }
    | by_name(Zeros, Ones, Constant, Identity, Orthogonal, RandomNormal, TruncatedNormal)
    | by_name(RandomUniform, VarianceScaling, GlorotUniform, GlorotNormal)
    | by_name(HeUniform, HeNormal, LecunUniform, LecunNormal),
    "a callable(shape, dtype)",
)
serialize = _KIND.serialize
deserialize = _KIND.deserialize


def get(identifier: Any) -> Callable[..., Any] | None:
    """Return an initializer, given as itself, a name such as ``"zeros"``, a config or an array.

    None stays None.

    Raises
    ------
    ValueError
        For an unknown name, and for a value that is neither a name, a config, an array nor callable.
    """
    if isinstance(identifier, (np.ndarray, Tensor)):
        return Constant(identifier)
    initializer: Callable[..., Any] | None = _KIND.get(identifier)
    return initializer


publish("keras.initializers", globals(), __all__)
