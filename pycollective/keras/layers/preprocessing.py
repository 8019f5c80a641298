"""Layers that preprocess inputs: scaling and random image augmentation."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from pycollective import nn
from pycollective.array_backend import Array, asarray
from pycollective.keras.backend import epsilon
from pycollective.keras.configs import array_or_number
from pycollective.keras.layers.core import positive
from pycollective.keras.layers.images import ImageLayer, data_format_of
from pycollective.keras.layers.layer import Layer, SameShape
from pycollective.keras.layers.seeded import Seeded
from pycollective.keras.layers.shapes import Shape
from pycollective.tensor import Tensor, Variable, ops, random

__all__ = ["Normalization", "RandomCrop", "RandomFlip", "Rescaling"]


class Rescaling(Layer):
    """``inputs * scale + offset``, in the layer's dtype.

    Parameters
    ----------
    scale, offset
        Numbers, or arrays that broadcast against the inputs.
    """

    takes_one_tensor = True

    def __init__(self, scale: Any, offset: Any = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.scale = array_or_number(scale)
        self.offset = array_or_number(offset)

    def _check(self, shape: Any) -> None:
        for name, value in (("scale", self.scale), ("offset", self.offset)):
            lengths = np.shape(value)
            pairs = zip(reversed(lengths), reversed(shape), strict=False)
            if len(lengths) > len(shape) or any(n != 1 and m not in (n, None) for n, m in pairs):
                raise self._incompatible(tuple(shape), f"axes for {name} of shape {lengths}")

    def call(self, inputs: Tensor) -> Tensor:
        self._check(inputs.shape)
        x = ops.cast(inputs, self._dtype)
        scaled = x * Tensor(asarray(self.scale, self._dtype, like=x.array))
        if np.ndim(self.offset) == 0 and self.offset == 0:
            return scaled
        return scaled + Tensor(asarray(self.offset, self._dtype, like=x.array))

    def compute_output_shape(self, input_shape: Any) -> Shape:
        self._check(input_shape)
        return tuple(input_shape)


class Normalization(SameShape):
    """``(inputs - mean) / sqrt(variance)``, with the mean and the variance of given data.

    Parameters
    ----------
    axis
        The axis, or axes, along which each index has its own mean and variance. None: one mean and
        one variance for all elements.
    mean, variance
        The statistics of the data. Without them, `adapt` computes them; until then the layer returns
        its inputs.
    invert : bool
        True to compute the inverse, ``mean + inputs * sqrt(variance)``.
    """

    _config_names = ("axis", "invert")

    def __init__(
        self,
        axis: Any = -1,
        mean: Any = None,
        variance: Any = None,
        invert: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.axis = () if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
        if (mean is None) != (variance is None):
            raise ValueError("Normalization needs both mean and variance, or neither")
        self.input_mean = None if mean is None else np.asarray(mean)
        self.input_variance = None if variance is None else np.asarray(variance)
        self.invert = bool(invert)
        self._rank = 0
        self._kept: tuple[int, ...] = ()
        self._lengths: tuple[int, ...] = ()
        self._adapted: list[Variable] = []

    def get_config(self) -> dict[str, Any]:
        mean, variance = (
            None if value is None else value.tolist()
            for value in (self.input_mean, self.input_variance)
        )
        return {**super().get_config(), "mean": mean, "variance": variance}

    def _lengths_of(self, shape: Any) -> tuple[int, ...]:
        rank = len(shape)
        if any(not -rank <= axis < rank or shape[axis] is None for axis in self.axis):
            raise self._incompatible(tuple(shape), f"known lengths of axes {self.axis}")
        return tuple(int(shape[axis]) for axis in sorted(axis % rank for axis in self.axis))

    def build(self, input_shape: Any) -> None:
        """Make ``mean``, ``variance`` and ``count``, unless the mean and variance are given."""
        self._lengths = self._lengths_of(input_shape)
        self._rank = len(input_shape)
        self._kept = tuple(sorted(axis % self._rank for axis in self.axis))
        for name, value in (("mean", self.input_mean), ("variance", self.input_variance)):
            if value is not None and self._spread(value) is None:
                raise self._incompatible(
                    tuple(input_shape), f"axes {self.axis} for {name} of shape {value.shape}"
                )
        if self.input_mean is None:
            # `count` stays 0: Keras's files store this variable, so the layer must have it.
            self._adapted = [
                self.add_weight("mean", self._lengths, initializer="zeros", trainable=False),
                self.add_weight("variance", self._lengths, initializer="ones", trainable=False),
                self.add_weight("count", (), np.int32, initializer="zeros", trainable=False),
            ]

    def adapt(self, data: Any) -> None:
        """Compute the mean and variance of data.

        Parameters
        ----------
        data
            An array, or batches of inputs such as a `Dataset`. If a batch is a tuple, its first item
            is the inputs.

        Raises
        ------
        ValueError
            If the layer was made with a mean and variance, if the data is empty, or if its shape does
            not fit the layer.
        """
        if self.input_mean is not None:
            raise ValueError(
                f'layer "{self._name}" was made with mean and variance; it has nothing to adapt'
            )
        batches = [data] if hasattr(data, "shape") else data
        count, mean, squares = 0, np.zeros(()), np.zeros(())
        for batch in batches:
            values = np.asarray(batch[0] if isinstance(batch, tuple) else batch, np.float64)
            self.ensure_built(values.shape)
            if self._lengths_of(values.shape) != self._lengths:
                raise self._incompatible(values.shape, f"axes {self.axis} to have {self._lengths}")
            axes = tuple(i for i in range(values.ndim) if i not in self._kept)
            rows = int(np.prod([values.shape[i] for i in axes]))
            if not rows:
                continue
            here = values.mean(axis=axes)
            # Chan et al., 1979: merges the squared deviations from two means.
            delta = here - mean
            total = count + rows
            squares = squares + values.var(axis=axes) * rows + delta**2 * (count * rows / total)
            mean = mean + delta * (rows / total)
            count = total
        if not count:
            raise ValueError(f'layer "{self._name}": there is no data to adapt to')
        for variable, value in zip(self._adapted, (mean, squares / count), strict=False):
            variable.assign(value)

    @property
    def mean(self) -> Tensor:
        """The mean, in a shape that broadcasts against the inputs."""
        return self._wide(0, self.input_mean)

    @property
    def variance(self) -> Tensor:
        """The variance, in a shape that broadcasts against the inputs."""
        return self._wide(1, self.input_variance)

    def _wide(self, place: int, given: Array | None) -> Tensor:
        if not self.built:
            raise AttributeError(f'layer "{self._name}" has no statistics until it is built')
        value = self._adapted[place] if given is None else self._spread(given)
        return ops.reshape(ops.cast(value, self._dtype), self._wide_shape())

    def _wide_shape(self) -> list[int]:
        shape = [1] * self._rank
        for axis, length in zip(self._kept, self._lengths, strict=True):
            shape[axis] = length
        return shape

    def _spread(self, value: Array) -> Array | None:
        """Return a given mean or variance, broadcast to the lengths of ``axis``; None if impossible."""
        for shape in (self._lengths, tuple(self._wide_shape())):
            with contextlib.suppress(ValueError):
                return np.broadcast_to(value, shape).reshape(self._lengths)
        return None

    def _statistics(self, inputs: Tensor) -> list[Tensor]:
        """Return mean and standard deviation in shapes that broadcast against the inputs."""
        # The inputs may have another number of axes than those that the layer was built for.
        kept = {axis % inputs.ndim for axis in self.axis}
        shape = [n if i in kept else 1 for i, n in enumerate(inputs.shape)]
        if self.input_mean is None:
            values = [ops.cast(variable, self._dtype) for variable in self._adapted[:2]]
        else:
            values = [
                Tensor(asarray(self._spread(value), self._dtype, like=inputs.array))
                for value in (self.input_mean, self.input_variance)
                if value is not None
            ]
        mean, variance = (ops.reshape(value, shape) for value in values)
        return [mean, ops.maximum(ops.sqrt(variance), epsilon())]

    def call(self, inputs: Tensor) -> Tensor:
        if self._lengths_of(inputs.shape) != self._lengths:
            raise self._incompatible(inputs.shape, f"axes {self.axis} to have {self._lengths}")
        x = ops.cast(inputs, self._dtype)
        mean, deviation = self._statistics(x)
        return mean + x * deviation if self.invert else (x - mean) / deviation


_MODES = ("horizontal_and_vertical", "horizontal", "vertical")


class RandomFlip(Seeded, ImageLayer):
    """Flip each image with probability 1/2 in training; the default is ``training=True``.

    Inputs are images ``[n, height, width, channels]``.

    Parameters
    ----------
    mode : str
        ``"horizontal"``: exchange left and right. ``"vertical"``: exchange top and bottom.
        ``"horizontal_and_vertical"``: exchange both or neither.
    seed : int, optional
        The seed, from which each replica derives its own random numbers.
    data_format : str, optional
        Must be ``"channels_last"``.
    """

    def __init__(
        self,
        mode: str = "horizontal_and_vertical",
        seed: int | None = None,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, **options)
        if mode not in _MODES:
            raise ValueError(f"RandomFlip: mode must be one of {_MODES}, got {mode!r}")
        self.mode = mode
        self.data_format = data_format_of(data_format)

    def call(self, inputs: Tensor, training: bool = True) -> Tensor:
        self._check_images(inputs.shape)
        x = ops.cast(inputs, self._dtype)
        if not training:
            return x
        with self._drawing():
            drawn = random.uniform((x.shape[0], 1, 1, 1)).array
        flips = Tensor(asarray(drawn <= 0.5, like=x.array))
        if self.mode != "vertical":
            x = ops.where(flips, x[:, :, ::-1], x)
        return x if self.mode == "horizontal" else ops.where(flips, x[:, ::-1], x)


class RandomCrop(Seeded, ImageLayer):
    """Crop images: at a random position in training, to the center otherwise.

    Inputs are images ``[n, height, width, channels]``.

    All images of a batch get the same window. Images smaller than the window, and all images outside
    of training, are cropped to their largest centered part with the window's proportions. This part
    is resized to the window. The default is ``training=True``.

    Parameters
    ----------
    height, width : int
        The size of the window, in pixels.
    seed : int, optional
        The seed, from which each replica derives its own random numbers.
    data_format : str, optional
        Must be ``"channels_last"``.
    """

    def __init__(
        self,
        height: int,
        width: int,
        seed: int | None = None,
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(seed, **options)
        self.height = positive("height", height)
        self.width = positive("width", width)
        self.data_format = data_format_of(data_format)

    def call(self, inputs: Tensor, training: bool = True) -> Tensor:
        """Return images ``[n, self.height, self.width, channels]``."""
        self._check_extent(inputs.shape, 1, 1, "valid")
        x = ops.cast(inputs, self._dtype)
        _, height, width, _ = x.shape
        if training and height >= self.height and width >= self.width:
            with self._drawing():
                down, across = random.uniform((2,)).numpy().tolist()
            top = int(down * (height - self.height + 1))
            left = int(across * (width - self.width + 1))
            return x[:, top : top + self.height, left : left + self.width]
        high = max(min(height, width * self.height // self.width), 1)
        wide = max(min(width, height * self.width // self.height), 1)
        top, left = (height - high) // 2, (width - wide) // 2
        middle = x[:, top : top + high, left : left + wide]
        return nn.resize_bilinear(middle, self.height, self.width)

    def compute_output_shape(self, input_shape: Any) -> Shape:
        self._check_images(input_shape)
        return (input_shape[0], self.height, self.width, input_shape[3])
