"""`Conv2D` and `MaxPooling2D`, on images ``[n, height, width, channels]``."""

from __future__ import annotations

from typing import Any

from pycollective import nn
from pycollective.keras import activations, initializers, regularizers
from pycollective.keras.layers.core import pair_of, positive
from pycollective.keras.layers.layer import Layer, Shape
from pycollective.tensor import Tensor, ops

__all__ = ["Conv2D", "MaxPooling2D"]


class Conv2D(Layer):
    """A convolution of images with filters, as ``tf.keras.layers.Conv2D``.

    Parameters
    ----------
    filters
        How many; the length of the result's last axis.
    kernel_size, strides, dilation_rate
        An int, or (height, width).
    padding
        ``"valid"``: filters stay inside the image. ``"same"``: zeros around it.
    data_format
        Only ``"channels_last"``.
    activation
        A name or function; None: none.
    use_bias
        Whether there is a bias.
    kernel_initializer, bias_initializer
        Where the variables ``kernel`` ``[height, width, channels, filters]`` and ``bias``
        ``[filters]`` start.
    kernel_regularizer, bias_regularizer
        Penalties on them.
    **options
        As for `Layer`.

    Raises
    ------
    ValueError
        If an argument is out of range; in a call, if the input's shape does not fit.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: Any,
        strides: Any = (1, 1),
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: Any = (1, 1),
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.filters = positive("filters", filters)
        self.kernel_size = pair_of("kernel_size", kernel_size)
        self.strides = pair_of("strides", strides)
        self.dilation_rate = pair_of("dilation_rate", dilation_rate)
        self.padding = _padding(padding)
        _check_data_format(data_format)
        self.activation = activations.get(activation)
        self.use_bias = bool(use_bias)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self._channels = 0

    def build(self, input_shape: Any) -> None:
        """Make ``kernel`` and ``bias`` for images of this shape."""
        if len(input_shape) != 4 or not input_shape[-1]:
            raise self._incompatible(tuple(input_shape), _IMAGES)
        self._channels = int(input_shape[-1])
        self.kernel = self.add_weight(
            "kernel",
            (*self.kernel_size, self._channels, self.filters),
            initializer=self.kernel_initializer,
            regularizer=self.kernel_regularizer,
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                "bias",
                (self.filters,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
            )

    def checked(self, inputs: Tensor) -> Tensor:
        """Return the images in the layer's dtype, if their shape fits the kernel."""
        shape = inputs.array.shape
        if len(shape) != 4 or shape[3] != self._channels:
            raise self._incompatible(
                shape,
                f"[n, height, width, {self._channels}] (the kernel has shape "
                f"{(*self.kernel_size, self._channels, self.filters)})",
            )
        _check_extent(self, shape)
        return inputs if inputs.array.dtype == self._dtype else ops.cast(inputs, self._dtype)

    def call(self, inputs: Tensor) -> Tensor:
        """Return ``[n, out height, out width, filters]``."""
        relu = self.activation is activations.relu
        outputs = nn.conv2d(
            self.checked(inputs),
            self.kernel,
            self.bias,
            strides=self.strides,
            padding=self.padding.upper(),
            dilations=self.dilation_rate,
            activation="relu" if relu else None,
        )
        if relu or self.activation is activations.linear:
            return outputs
        activated: Tensor = self.activation(outputs)
        return activated

    def compute_output_shape(self, input_shape: Any) -> Shape:
        """Return the shape of the result for images of a shape (None: any length)."""
        if len(input_shape) != 4:
            raise self._incompatible(tuple(input_shape), _IMAGES)
        _check_extent(self, input_shape)
        height, width = (
            _length(n, (k - 1) * d + 1, s, self.padding)
            for n, k, d, s in zip(
                input_shape[1:3], self.kernel_size, self.dilation_rate, self.strides, strict=True
            )
        )
        return (input_shape[0], height, width, self.filters)


class MaxPooling2D(Layer):
    """The largest number in each window, channel by channel.

    Parameters
    ----------
    pool_size
        The window: an int, or (height, width).
    strides
        The steps of the window; by default its size.
    padding
        ``"valid"``: windows stay inside the image. ``"same"``: they may reach beyond it.
    data_format
        Only ``"channels_last"``.
    **options
        As for `Layer`.
    """

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
        self.padding = _padding(padding)
        _check_data_format(data_format)

    def call(self, inputs: Tensor) -> Tensor:
        """Return ``[n, out height, out width, channels]``."""
        shape = inputs.array.shape
        if len(shape) != 4:
            raise self._incompatible(shape, _IMAGES)
        _check_extent(self, shape)
        return nn.max_pool2d(inputs, self.pool_size, self.strides, self.padding.upper())

    def compute_output_shape(self, input_shape: Any) -> Shape:
        """Return the shape of the result for images of a shape (None: any length)."""
        if len(input_shape) != 4:
            raise self._incompatible(tuple(input_shape), _IMAGES)
        _check_extent(self, input_shape)
        height, width = (
            _length(n, k, s, self.padding)
            for n, k, s in zip(input_shape[1:3], self.pool_size, self.strides, strict=True)
        )
        return (input_shape[0], height, width, input_shape[3])


_IMAGES = "images of shape [n, height, width, channels]"


def _check_extent(layer: Conv2D | MaxPooling2D, shape: Any) -> None:
    """Raise unless the window fits into images of this shape."""
    if layer.padding == "same":
        return
    if isinstance(layer, Conv2D):
        (kh, kw), (dh, dw) = layer.kernel_size, layer.dilation_rate
        height, width = (kh - 1) * dh + 1, (kw - 1) * dw + 1
    else:
        height, width = layer.pool_size
    if (shape[1] is not None and shape[1] < height) or (shape[2] is not None and shape[2] < width):
        raise layer._incompatible(
            tuple(shape),
            f"images at least as large as the window of {height} x {width} (or padding='same')",
        )


def _length(length: int | None, window: int, stride: int, padding: str) -> int | None:
    """Return how many places a window has along an axis."""
    if length is None:
        return None
    covered = length if padding == "same" else length - window + 1
    return -(-covered // stride)


def _padding(value: str) -> str:
    padding = str(value).lower()
    if padding not in ("valid", "same"):
        raise ValueError(f"padding must be 'valid' or 'same', got {value!r}")
    return padding


def _check_data_format(value: str | None) -> None:
    if value not in (None, "channels_last"):
        raise ValueError(
            f"data_format must be 'channels_last', got {value!r}; transpose images to "
            "[n, height, width, channels] first"
        )
