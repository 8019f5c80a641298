"""Layers that reshape, permute, pad or enlarge their inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pycollective import nn
from pycollective.keras.layers.core import pair_of
from pycollective.keras.layers.images import ImageLayer, data_format_of
from pycollective.keras.layers.layer import Layer
from pycollective.keras.layers.shapes import Shape
from pycollective.tensor import Tensor, ops

__all__ = ["Flatten", "Permute", "Reshape", "UpSampling2D", "ZeroPadding2D"]


class Flatten(Layer):
    """Flatten each example.

    Parameters
    ----------
    data_format : str, optional
        Must be ``"channels_last"``.
    """

    takes_one_tensor = True
    _keeps_dtype = True

    def __init__(self, data_format: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.data_format = data_format_of(data_format)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the inputs as ``[n, elements per example]``."""
        shape = inputs.array.shape
        if not shape:
            raise self._incompatible(shape, "at least one axis")
        return ops.reshape(inputs, (shape[0], math.prod(shape[1:])))

    def compute_output_shape(self, input_shape: Any) -> Shape:
        batch, *rest = input_shape
        return (batch, None if None in rest else math.prod(rest))


class Reshape(Layer):
    """Reshape each example.

    Parameters
    ----------
    target_shape : sequence of int
        The new shape of an example. A length of -1, at most one, is computed from the others.
    """

    takes_one_tensor = True
    _keeps_dtype = True

    def __init__(self, target_shape: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.target_shape = tuple(int(n) for n in target_shape)
        if self.target_shape.count(-1) > 1 or any(n < -1 for n in self.target_shape):
            raise ValueError(
                f"Reshape: target_shape {self.target_shape} must have lengths of at least 0, and "
                "at most one -1"
            )

    def call(self, inputs: Tensor) -> Tensor:
        """Return the inputs as ``[n, *target_shape]``."""
        shape = inputs.array.shape
        # ops.reshape() cannot resolve -1 for an empty batch.
        return ops.reshape(inputs, self.compute_output_shape(shape))

    def compute_output_shape(self, input_shape: Any) -> Shape:
        batch, *rest = input_shape
        target = self.target_shape
        if None in rest:
            return (batch, *(None if n == -1 else n for n in target))
        size = math.prod(rest)
        known = math.prod(n for n in target if n != -1)
        if -1 in target:
            fits = known > 0 and size % known == 0
            target = tuple(size // known if n == -1 and fits else n for n in target)
        else:
            fits = size == known
        if not fits:
            raise self._incompatible(
                tuple(input_shape), f"examples that can be reshaped to {self.target_shape}"
            )
        return (batch, *target)


class Permute(Layer):
    """Permute the axes of each example.

    Parameters
    ----------
    dims : sequence of int
        The input axis of each output axis. Axis 0 is the batch, so the axes of an example are
        counted from 1.
    """

    takes_one_tensor = True
    _keeps_dtype = True

    def __init__(self, dims: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.dims = tuple(int(n) for n in dims)
        if sorted(self.dims) != list(range(1, len(self.dims) + 1)):
            raise ValueError(
                f"Permute: dims must hold each of 1 to {len(self.dims)} once, got {self.dims}"
            )

    def call(self, inputs: Tensor) -> Tensor:
        self.compute_output_shape(inputs.shape)
        return ops.transpose(inputs, (0, *self.dims))

    def compute_output_shape(self, input_shape: Any) -> Shape:
        if len(input_shape) != len(self.dims) + 1:
            raise self._incompatible(tuple(input_shape), f"examples with {len(self.dims)} axes")
        return (input_shape[0], *(input_shape[axis] for axis in self.dims))


class ZeroPadding2D(ImageLayer):
    """Pad images with zeros.

    Parameters
    ----------
    padding
        An int, (height, width), or ((top, bottom), (left, right)), in pixels.
    data_format : str, optional
        Must be ``"channels_last"``.
    """

    _keeps_dtype = True

    def __init__(self, padding: Any = (1, 1), data_format: str | None = None, **options: Any):
        super().__init__(**options)
        sides = (padding, padding) if isinstance(padding, int) else tuple(padding)
        pairs = [(n, n) if isinstance(n, int) else tuple(n) for n in sides]
        if [len(pair) for pair in pairs] != [2, 2] or any(
            not isinstance(n, int) or n < 0 for pair in pairs for n in pair
        ):
            raise ValueError(
                "ZeroPadding2D: padding must be an int, (height, width) or ((top, bottom), (left, "
                f"right)), not negative, got {padding!r}"
            )
        self.padding = tuple(pairs)
        self.data_format = data_format_of(data_format)

    def call(self, inputs: Tensor) -> Tensor:
        self._check_images(inputs.shape)
        return ops.pad(inputs, [(0, 0), *self.padding, (0, 0)])

    def compute_output_shape(self, input_shape: Any) -> Shape:
        self._check_images(input_shape)
        n, *lengths, channels = input_shape
        height, width = (
            None if length is None else length + sum(pair)
            for length, pair in zip(lengths, self.padding, strict=True)
        )
        return (n, height, width, channels)


class UpSampling2D(ImageLayer):
    """Enlarge images by integer factors.

    Parameters
    ----------
    size
        The factors of height and width: an int, or two ints.
    data_format : str, optional
        Must be ``"channels_last"``.
    interpolation : str
        ``"nearest"``, which repeats pixels, or ``"bilinear"``.
    """

    def __init__(
        self,
        size: Any = (2, 2),
        data_format: str | None = None,
        interpolation: str = "nearest",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.size = pair_of("size", size)
        self.data_format = data_format_of(data_format)
        self.interpolation = str(interpolation).lower()
        if self.interpolation not in ("nearest", "bilinear"):
            raise ValueError(
                f"UpSampling2D: interpolation must be 'nearest' or 'bilinear', got {interpolation!r}"
            )

    def call(self, inputs: Tensor) -> Tensor:
        _, height, width, _ = self.compute_output_shape(inputs.shape)
        if self.interpolation == "nearest":
            return nn.upsample_nearest(inputs, self.size)
        assert height is not None and width is not None
        if inputs.dtype.kind not in "fV":
            inputs = ops.cast(inputs, self.compute_dtype)
        return nn.resize_bilinear(inputs, height, width)

    def compute_output_shape(self, input_shape: Any) -> Shape:
        self._check_images(input_shape)
        n, *lengths, channels = input_shape
        height, width = (
            None if length is None else length * factor
            for length, factor in zip(lengths, self.size, strict=True)
        )
        return (n, height, width, channels)
