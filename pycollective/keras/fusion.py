"""Neighbouring layers that one operation computes together.

A `Sequential` runs steps; by default each step is a layer. Here is decided, once, which neighbours
become one step. The result and its gradients are those of the layers one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycollective.keras import activations
from pycollective.keras.layers import Conv2D, Layer, MaxPooling2D
from pycollective.nn.conv import conv2d_relu_max_pool
from pycollective.tensor import Tensor

__all__ = ["ConvReluPool", "steps_of"]


class ConvReluPool:
    """``Conv2D(activation="relu")`` and the `MaxPooling2D` behind it, in one pass."""

    def __init__(self, conv: Conv2D, pool: MaxPooling2D) -> None:
        self._conv = conv
        self._pool = pool

    @staticmethod
    def fits(first: Layer, second: Layer) -> bool:
        """Whether two layers in a row can be computed together."""
        return (
            # Subclasses may compute something else.
            type(first) is Conv2D
            and type(second) is MaxPooling2D
            and first.activation is activations.relu
            and first.groups == 1
            and first.activity_regularizer is None
            and second.activity_regularizer is None
            # Variables of another dtype are converted by the call of a layer.
            and first.variable_dtype == first.compute_dtype == second.compute_dtype
            and second.padding == "valid"
            and second.strides == second.pool_size
        )

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the pooled images."""
        conv, pool = self._conv, self._pool
        if not conv.built:
            conv._ensure_built(inputs.shape)
        return conv2d_relu_max_pool(
            conv.checked(inputs),
            conv.kernel,
            conv.bias,
            strides=conv.strides,
            padding=conv.padding.upper(),
            dilations=conv.dilation_rate,
            pool_size=pool.pool_size,
        )


def steps_of(layers: Sequence[Layer]) -> list[Any]:
    """Return what a `Sequential` of these layers calls, one after the other."""
    steps: list[Any] = []
    rest = list(layers)
    while rest:
        if len(rest) > 1 and ConvReluPool.fits(rest[0], rest[1]):
            conv, pool = rest[0], rest[1]
            assert isinstance(conv, Conv2D) and isinstance(pool, MaxPooling2D)
            steps.append(ConvReluPool(conv, pool))
            rest = rest[2:]
        else:
            steps.append(rest.pop(0))
    return steps
