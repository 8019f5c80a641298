"""Pooling layers, over windows or over whole images."""

from __future__ import annotations

from typing import Any

from pycollective import nn
from pycollective.keras.layers.core import pair_of
from pycollective.keras.layers.images import (
    ImageLayer,
    data_format_of,
    padding_of,
    window_positions,
)
from pycollective.keras.layers.shapes import Shape
from pycollective.tensor import Tensor, ops

__all__ = [
    "AveragePooling2D",
    "GlobalAveragePooling2D",
    "GlobalMaxPooling2D",
    "MaxPooling2D",
]


class _Pooling(ImageLayer):
    """Base of the layers that pool windows."""

    def __init__(
        self,
        pool_size: Any = (2, 2),
        strides: Any = None,
        padding: str = "valid",
        data_format: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pool_size = pair_of("pool_size", pool_size)
        self.strides = self.pool_size if strides is None else pair_of("strides", strides)
        self.padding = padding_of(padding)
        self.data_format = data_format_of(data_format)

    def compute_output_shape(self, input_shape: Any) -> Shape:
        self._check_extent(input_shape, *self.pool_size, self.padding)
        height, width = (
            window_positions(n, k, s, self.padding)
            for n, k, s in zip(input_shape[1:3], self.pool_size, self.strides, strict=True)
        )
        return (input_shape[0], height, width, input_shape[3])


class MaxPooling2D(_Pooling):
    """The largest number in each window, channel by channel.

    Parameters
    ----------
    pool_size
        The window: an int, or (height, width).
    strides
        The strides of the window; the default is the window's size.
    padding
        ``"valid"``: windows stay inside the image. ``"same"``: windows may cross its border.
    data_format
        Must be ``"channels_last"``.
    """

    def call(self, inputs: Tensor) -> Tensor:
        """Return ``[n, out height, out width, channels]``."""
        self._check_extent(inputs.array.shape, *self.pool_size, self.padding)
        return nn.max_pool2d(inputs, self.pool_size, self.strides, self.padding.upper())


class AveragePooling2D(_Pooling):
    """The mean of each window, channel by channel; parameters as for `MaxPooling2D`.

    Pixels outside of the image do not count.
    """

    def call(self, inputs: Tensor) -> Tensor:
        """Return ``[n, out height, out width, channels]``."""
        self._check_extent(inputs.array.shape, *self.pool_size, self.padding)
        if inputs.dtype.kind not in "fV":
            inputs = ops.cast(inputs, self._dtype)
        return nn.avg_pool2d(inputs, self.pool_size, self.strides, self.padding.upper())


class _GlobalPooling(ImageLayer):
    """Base of the layers that pool whole images."""

    def __init__(
        self, data_format: str | None = None, keepdims: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self.data_format = data_format_of(data_format)
        self.keepdims = bool(keepdims)

    def _check_pixels(self, shape: Any) -> None:
        self._check_extent(shape, 1, 1, "valid")

    def compute_output_shape(self, input_shape: Any) -> Shape:
        self._check_pixels(input_shape)
        middle = (1, 1) if self.keepdims else ()
        return (input_shape[0], *middle, input_shape[3])


class GlobalAveragePooling2D(_GlobalPooling):
    """The mean of all pixels, channel by channel.

    Parameters
    ----------
    data_format
        Must be ``"channels_last"``.
    keepdims
        True to keep the axes of height and width, with length 1.
    """

    def call(self, inputs: Tensor) -> Tensor:
        """Return ``[n, channels]``, or ``[n, 1, 1, channels]`` with ``keepdims``."""
        self._check_pixels(inputs.array.shape)
        if inputs.dtype.kind not in "fV":
            inputs = ops.cast(inputs, self._dtype)
        return ops.reduce_mean(inputs, axis=[1, 2], keepdims=self.keepdims)


class GlobalMaxPooling2D(_GlobalPooling):
    """The maximum of all pixels, channel by channel.

    The parameters are those of `GlobalAveragePooling2D`.
    """

    def call(self, inputs: Tensor) -> Tensor:
        """Return ``[n, channels]``, or ``[n, 1, 1, channels]`` with ``keepdims``."""
        self._check_pixels(inputs.array.shape)
        return ops.reduce_max(inputs, axis=[1, 2], keepdims=self.keepdims)
