"""Activation functions as layers."""

from __future__ import annotations

from typing import Any

from pycollective import nn
from pycollective.keras import activations
from pycollective.keras.layers.layer import SameShape
from pycollective.keras.layers.shapes import Shape
from pycollective.tensor import Tensor, ops

__all__ = ["ELU", "Activation", "LeakyReLU", "PReLU", "ReLU", "Softmax"]


class Activation(SameShape):
    """An activation function, given by name or as a function."""

    def __init__(self, activation: Any, **options: Any) -> None:
        super().__init__(**options)
        self.activation = activations.get(activation)

    def call(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.activation(inputs)
        return outputs


class ReLU(SameShape):
    """`activations.relu` with its parameters."""

    def __init__(
        self,
        max_value: float | None = None,
        negative_slope: float = 0.0,
        threshold: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.max_value = None if max_value is None else _not_negative("ReLU: max_value", max_value)
        self.negative_slope = _not_negative("ReLU: negative_slope", negative_slope)
        self.threshold = _not_negative("ReLU: threshold", threshold)

    def call(self, inputs: Tensor) -> Tensor:
        return activations.relu(inputs, self.negative_slope, self.max_value, self.threshold)


class LeakyReLU(SameShape):
    """``x`` if positive, else ``negative_slope * x``."""

    def __init__(self, negative_slope: float = 0.3, **options: Any) -> None:
        super().__init__(**options)
        self.negative_slope = _not_negative("LeakyReLU: negative_slope", negative_slope)

    def call(self, inputs: Tensor) -> Tensor:
        return activations.leaky_relu(inputs, self.negative_slope)


class PReLU(SameShape):
    """``x`` if positive, else ``alpha * x`` with a trained ``alpha``.

    Parameters
    ----------
    alpha_initializer, alpha_regularizer, alpha_constraint
        The settings of the variable ``alpha``, which has the shape of an example.
    shared_axes
        Axes along which all positions share one ``alpha``, such as ``[1, 2]`` for images.
    """

    def __init__(
        self,
        alpha_initializer: Any = "Zeros",
        alpha_regularizer: Any = None,
        alpha_constraint: Any = None,
        shared_axes: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._set(
            alpha_initializer=alpha_initializer,
            alpha_regularizer=alpha_regularizer,
            alpha_constraint=alpha_constraint,
        )
        self.shared_axes = [shared_axes] if isinstance(shared_axes, int) else shared_axes

    def build(self, input_shape: Any) -> None:
        """Make ``alpha`` for inputs of this shape."""
        shape = list(input_shape[1:])
        for axis in self.shared_axes or ():
            shape[axis - 1] = 1
        if None in shape:
            raise self._incompatible(
                tuple(input_shape), "known lengths of all axes that are not shared"
            )
        self.alpha = self._weight("alpha", shape)

    def call(self, inputs: Tensor) -> Tensor:
        if len(inputs.shape) != self.alpha.ndim + 1 or any(
            n not in (1, m) for n, m in zip(self.alpha.shape, inputs.shape[1:], strict=True)
        ):
            raise self._incompatible(
                inputs.shape, f"examples that fit alpha of shape {self.alpha.shape}"
            )
        return nn.prelu(inputs, self.alpha)


class ELU(SameShape):
    """``x`` if positive, else ``alpha * (exp(x) - 1)``."""

    def __init__(self, alpha: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.alpha = alpha

    def call(self, inputs: Tensor) -> Tensor:
        return activations.elu(inputs, self.alpha)


class Softmax(SameShape):
    """``exp(x)`` divided by its sum along ``axis``, which may be several axes."""

    def __init__(self, axis: Any = -1, **options: Any) -> None:
        super().__init__(**options)
        self.axis = axis

    def call(self, inputs: Tensor) -> Tensor:
        self.compute_output_shape(inputs.shape)
        if isinstance(self.axis, int):
            return activations.softmax(inputs, self.axis)
        axes = [axis % inputs.ndim for axis in self.axis]
        rest = [axis for axis in range(inputs.ndim) if axis not in axes]
        moved = ops.transpose(inputs, [*rest, *axes])
        lead = moved.shape[: len(rest)]
        size = 1
        for axis in axes:
            size *= inputs.shape[axis]
        flat = activations.softmax(ops.reshape(moved, (*lead, size)))
        back = sorted(range(inputs.ndim), key=[*rest, *axes].__getitem__)
        return ops.transpose(ops.reshape(flat, moved.shape), back)

    def compute_output_shape(self, input_shape: Any) -> Shape:
        axes = (self.axis,) if isinstance(self.axis, int) else self.axis
        rank = len(input_shape)
        if any(not -rank <= axis < rank for axis in axes):
            raise self._incompatible(tuple(input_shape), f"an axis {self.axis}")
        return tuple(input_shape)


def _not_negative(name: str, value: Any) -> float:
    """Return the value as a float; raise ``ValueError`` if it is negative, NaN or None."""
    if value is None or not value >= 0:
        raise ValueError(f"{name} must be at least 0, got {value!r}")
    return float(value)
