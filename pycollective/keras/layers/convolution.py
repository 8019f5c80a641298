"""Convolutions of images ``[n, height, width, channels]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycollective import nn
from pycollective.keras import activations
from pycollective.keras.layers.core import pair_of, positive
from pycollective.keras.layers.images import (
    IMAGES,
    ImageLayer,
    data_format_of,
    padding_of,
    window_positions,
)
from pycollective.keras.layers.shapes import Shape
from pycollective.nn.transposed import spread_conv2d
from pycollective.tensor import Tensor, Variable, ops

__all__ = ["Conv2D", "Conv2DTranspose", "DepthwiseConv2D"]


class _Convolution(ImageLayer):
    """Base of the convolutions: the window, the bias and the activation."""

    _fixed = (("lora_rank", None), ("lora_alpha", None))

    kernel: Variable
    bias: Variable | None
    activation: Callable[[Any], Any]

    def __init__(
        self,
        kernel_size: Any,
        strides: Any,
        padding: str,
        data_format: str | None,
        dilation_rate: Any,
        use_bias: bool,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.kernel_size = pair_of("kernel_size", kernel_size)
        self.strides = pair_of("strides", strides)
        self.padding = padding_of(padding)
        self.data_format = data_format_of(data_format)
        self.dilation_rate = pair_of("dilation_rate", dilation_rate)
        self.use_bias = bool(use_bias)
        self._channels = 0

    def _channels_of(self, input_shape: Any) -> int:
        """Return the number of channels of images of this shape."""
        if len(input_shape) != 4 or not input_shape[-1]:
            raise self._incompatible(tuple(input_shape), IMAGES)
        return int(input_shape[-1])

    def _make_weights(self, kernel: tuple[int, int], length: int, settings: str = "kernel") -> None:
        """Make the kernel ``[*kernel_size, *kernel]``, and the bias ``[length]``."""
        self.kernel = self._weight("kernel", (*self.kernel_size, *kernel), settings)
        self.bias = self._weight("bias", (length,)) if self.use_bias else None

    def _window(self) -> tuple[int, int]:
        """Return the height and width that the dilated filters cover."""
        (height, width), (down, across) = self.kernel_size, self.dilation_rate
        return (height - 1) * down + 1, (width - 1) * across + 1

    def _must_fit(self, shape: Any) -> None:
        """Raise ``ValueError`` unless the filters fit into images of this shape."""
        self._check_extent(shape, *self._window(), self.padding)

    def checked(self, inputs: Tensor) -> Tensor:
        """Return the images in the layer's dtype; raise ``ValueError`` if the kernel does not fit."""
        shape = inputs.array.shape
        if len(shape) != 4 or shape[3] != self._channels:
            raise self._incompatible(
                shape,
                f"[n, height, width, {self._channels}] (the kernel has shape "
                f"{tuple(self.kernel.shape)})",
            )
        if shape[1:] != self.__dict__.get("_fitting"):
            self._must_fit(shape)
            # Set through __dict__: an ordinary assignment counts as a change of the layer.
            self.__dict__["_fitting"] = shape[1:]
        return inputs if inputs.array.dtype == self._dtype else ops.cast(inputs, self._dtype)

    def _finished(self, outputs: Tensor) -> Tensor:
        """Add the bias, and apply the activation."""
        if self.bias is not None:
            outputs = nn.bias_add(outputs, self.bias)
        activated: Tensor = self.activation(outputs)
        return activated

    def _output_shape_of(self, input_shape: Any, filters: int) -> Shape:
        """Return the output shape for images of a shape; None is any length."""
        self._must_fit(input_shape)
        height, width = (
            window_positions(n, k, s, self.padding)
            for n, k, s in zip(input_shape[1:3], self._window(), self.strides, strict=True)
        )
        return (input_shape[0], height, width, filters)


class Conv2D(_Convolution):
    """A convolution of images with filters, as ``tf.keras.layers.Conv2D``.

    Parameters
    ----------
    filters : int
        The number of filters, which is the length of the output's last axis.
    kernel_size, strides, dilation_rate
        An int, or (height, width).
    padding : str
        ``"valid"``: filters stay inside the image. ``"same"``: the image is padded with zeros.
    data_format : str, optional
        Must be ``"channels_last"``.
    groups : int
        The number of groups of channels and filters. A filter reads its own group's channels only.
    activation
        A name or function; the default is no activation.
    use_bias : bool
        True to add a bias.
    kernel_initializer, bias_initializer
        Initializers of ``kernel`` ``[height, width, channels / groups, filters]`` and of ``bias``
        ``[filters]``.
    kernel_regularizer, bias_regularizer, activity_regularizer
        Regularizers of the variables and of the output.
    kernel_constraint, bias_constraint
        Constraints that an optimizer applies after each step.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: Any,
        strides: Any = (1, 1),
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: Any = (1, 1),
        groups: int = 1,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            kernel_size,
            strides,
            padding,
            data_format,
            dilation_rate,
            use_bias,
            activity_regularizer=activity_regularizer,
            **options,
        )
        self._set(activation=activation)
        self._set(kernel_initializer=kernel_initializer, bias_initializer=bias_initializer)
        self._set(kernel_regularizer=kernel_regularizer, bias_regularizer=bias_regularizer)
        self._set(kernel_constraint=kernel_constraint, bias_constraint=bias_constraint)
        self.filters = positive("filters", filters)
        self.groups = positive("groups", groups)
        if self.filters % self.groups:
            raise ValueError(f"filters ({filters}) must be divisible by groups ({groups})")

    def build(self, input_shape: Any) -> None:
        """Make ``kernel`` and ``bias`` for images of this shape."""
        channels = self._channels_of(input_shape)
        if channels % self.groups:
            raise self._incompatible(
                tuple(input_shape), f"a number of channels divisible by groups={self.groups}"
            )
        self._channels = channels
        self._make_weights((channels // self.groups, self.filters), self.filters)

    def call(self, inputs: Tensor) -> Tensor:
        """Return ``[n, out height, out width, filters]``."""
        relu = self.activation is activations.relu
        images = self.checked(inputs)
        options: dict[str, Any] = {
            "strides": self.strides,
            "padding": self.padding.upper(),
            "dilations": self.dilation_rate,
            "activation": "relu" if relu else None,
        }
        if self.groups == 1:
            outputs = nn.conv2d(images, self.kernel, bias=self.bias, **options)
        else:
            outputs = nn.grouped_conv2d(images, self.kernel, self.groups, self.bias, **options)
        if relu or self.activation is activations.linear:
            return outputs
        activated: Tensor = self.activation(outputs)
        return activated

    def compute_output_shape(self, input_shape: Any) -> Shape:
        return self._output_shape_of(input_shape, self.filters)


class DepthwiseConv2D(_Convolution):
    """A convolution of each channel with its own filters.

    Parameters
    ----------
    kernel_size, strides, padding, data_format, dilation_rate, activation, use_bias
        As for `Conv2D`.
    depth_multiplier : int
        The number of filters of a channel.
    depthwise_initializer, depthwise_regularizer, depthwise_constraint
        The settings of ``kernel`` ``[height, width, channels, depth_multiplier]``.
    bias_initializer, bias_regularizer, bias_constraint
        The settings of ``bias`` ``[channels * depth_multiplier]``.
    activity_regularizer
        The regularizer of the output.
    """

    def __init__(
        self,
        kernel_size: Any,
        strides: Any = (1, 1),
        padding: str = "valid",
        depth_multiplier: int = 1,
        data_format: str | None = None,
        dilation_rate: Any = (1, 1),
        activation: Any = None,
        use_bias: bool = True,
        depthwise_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        depthwise_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        depthwise_constraint: Any = None,
        bias_constraint: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            kernel_size,
            strides,
            padding,
            data_format,
            dilation_rate,
            use_bias,
            activity_regularizer=activity_regularizer,
            **options,
        )
        self._set(activation=activation)
        self._set(depthwise_initializer=depthwise_initializer, bias_initializer=bias_initializer)
        self._set(depthwise_regularizer=depthwise_regularizer, bias_regularizer=bias_regularizer)
        self._set(depthwise_constraint=depthwise_constraint, bias_constraint=bias_constraint)
        self.depth_multiplier = positive("depth_multiplier", depth_multiplier)

    def build(self, input_shape: Any) -> None:
        """Make ``kernel`` and ``bias`` for images of this shape."""
        self._channels = self._channels_of(input_shape)
        lengths = self._channels, self.depth_multiplier
        self._make_weights(lengths, self._channels * self.depth_multiplier, "depthwise")

    def call(self, inputs: Tensor) -> Tensor:
        """Return ``[n, out height, out width, channels * depth_multiplier]``."""
        outputs: Tensor = self.activation(
            nn.depthwise_conv2d(
                self.checked(inputs),
                self.kernel,
                self.strides,
                self.padding.upper(),
                dilations=self.dilation_rate,
                bias=self.bias,
            )
        )
        return outputs

    def compute_output_shape(self, input_shape: Any) -> Shape:
        channels = self._channels_of(input_shape)
        return self._output_shape_of(input_shape, channels * self.depth_multiplier)


class Conv2DTranspose(_Convolution):
    """The transpose of a convolution: it maps the convolution's output shape to its input shape.

    Parameters
    ----------
    filters, data_format, activation, use_bias
        As for `Conv2D`.
    kernel_size, strides, dilation_rate
        The parameters of the convolution: an int, or (height, width). Strides and dilations cannot
        both be larger than 1.
    padding : str
        The padding of the convolution. With ``"same"`` and the default ``output_padding``, the
        output is ``strides`` times as large as the input.
    output_padding
        The number of pixels added to the smallest possible output: an int, or (height, width), less
        than the strides. The default follows from the other parameters.
    kernel_initializer, kernel_regularizer, kernel_constraint
        The settings of ``kernel`` ``[height, width, filters, channels]``.
    bias_initializer, bias_regularizer, bias_constraint
        The settings of ``bias`` ``[filters]``.
    activity_regularizer
        The regularizer of the output.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: Any,
        strides: Any = (1, 1),
        padding: str = "valid",
        output_padding: Any = None,
        data_format: str | None = None,
        dilation_rate: Any = (1, 1),
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            kernel_size,
            strides,
            padding,
            data_format,
            dilation_rate,
            use_bias,
            activity_regularizer=activity_regularizer,
            **options,
        )
        self._set(activation=activation)
        self._set(kernel_initializer=kernel_initializer, bias_initializer=bias_initializer)
        self._set(kernel_regularizer=kernel_regularizer, bias_regularizer=bias_regularizer)
        self._set(kernel_constraint=kernel_constraint, bias_constraint=bias_constraint)
        self.filters = positive("filters", filters)
        self.output_padding = _output_padding(output_padding, self.strides)
        if max(self.strides) > 1 and max(self.dilation_rate) > 1:
            raise ValueError(
                f"Conv2DTranspose: strides {self.strides} and dilation_rate {self.dilation_rate} "
                "cannot both be larger than 1"
            )

    def build(self, input_shape: Any) -> None:
        """Make ``kernel`` and ``bias`` for images of this shape."""
        self._channels = self._channels_of(input_shape)
        self._make_weights((self.filters, self._channels), self.filters)

    def _must_fit(self, shape: Any) -> None:
        # The transpose exists for images of any size except 0.
        self._check_extent(shape, 1, 1, "valid")

    def _sides(self) -> list[tuple[int, int]]:
        """Return (top, bottom) and (left, right): the numbers of zeros around the spread input."""
        sides = []
        extras = (None, None) if self.output_padding is None else self.output_padding
        for extent, stride, extra in zip(self._window(), self.strides, extras, strict=True):
            if self.padding == "valid":
                more = max(stride - extent, 0) if extra is None else extra
                sides.append((extent - 1, extent - 1 + more))
                continue
            both = extent + (stride - 2 if extra is None else extent % 2 - 2 + extra)
            before = min(-(-both // 2), extent - 1)
            sides.append((before, both - before))
        return sides

    def call(self, inputs: Tensor) -> Tensor:
        """Return ``[n, out height, out width, filters]``."""
        images = self.checked(inputs)
        sides = self._sides()
        return self._finished(
            spread_conv2d(images, self.kernel, self.strides, sides, self.dilation_rate)
        )

    def compute_output_shape(self, input_shape: Any) -> Shape:
        self._must_fit(input_shape)
        height, width = (
            None if n is None else (n - 1) * stride + 1 + sum(zeros) - extent + 1
            for n, stride, zeros, extent in zip(
                input_shape[1:3], self.strides, self._sides(), self._window(), strict=True
            )
        )
        return (input_shape[0], height, width, self.filters)


def _output_padding(value: Any, strides: tuple[int, int]) -> tuple[int, int] | None:
    """Return two ints below the strides, or None; one int stands for both."""
    if value is None:
        return None
    pair = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(pair) != 2 or any(
        not isinstance(n, int) or not 0 <= n < stride
        for n, stride in zip(pair, strides, strict=True)
    ):
        raise ValueError(
            f"output_padding must be one integer or two, at least 0 and below the strides {strides}, "
            f"got {value!r}"
        )
    return pair[0], pair[1]
