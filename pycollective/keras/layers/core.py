"""Layers without windows: `Dense`, `Flatten`, `Reshape`, `Dropout`, `Activation`, and `Input`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycollective import nn
from pycollective.distribute.context import current_mode, get_strategy
from pycollective.keras import activations, initializers, regularizers
from pycollective.keras.layers.layer import Layer, Shape
from pycollective.nn.dense import dense
from pycollective.tensor import Tensor, ops
from pycollective.tensor.random import default_generator, generator_scope

__all__ = ["Activation", "Dense", "Dropout", "Flatten", "Input", "InputLayer", "Reshape"]


class Dense(Layer):
    """``activation(x @ kernel + bias)`` along the last axis.

    Parameters
    ----------
    units
        The length of the result's last axis.
    activation
        A name or function; None: none.
    use_bias
        Whether there is a bias.
    kernel_initializer, bias_initializer
        Where the variables ``kernel`` ``[inputs, units]`` and ``bias`` ``[units]`` start.
    kernel_regularizer, bias_regularizer
        Penalties on them.
    **options
        As for `Layer`; ``input_dim=n`` means ``input_shape=(n,)``.

    Raises
    ------
    ValueError
        If ``units`` is not positive; in a call, if the last axis does not fit the kernel.
    """

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        input_dim: int | None = None,
        **options: Any,
    ) -> None:
        if input_dim is not None:
            options["input_shape"] = (input_dim,)
        super().__init__(**options)
        self.units = positive("units", units)
        self.activation = activations.get(activation)
        self.use_bias = bool(use_bias)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self._inputs = 0

    def build(self, input_shape: Any) -> None:
        """Make ``kernel`` and ``bias`` for inputs of this shape."""
        if not input_shape or not input_shape[-1]:
            raise self._incompatible(
                tuple(input_shape), "a last axis of a known length of at least 1"
            )
        self._inputs = int(input_shape[-1])
        self.kernel = self.add_weight(
            "kernel",
            (self._inputs, self.units),
            initializer=self.kernel_initializer,
            regularizer=self.kernel_regularizer,
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                "bias",
                (self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
            )

    def call(self, inputs: Tensor) -> Tensor:
        """Compute the result: the input's shape with ``units`` as its last length."""
        shape = inputs.array.shape
        if not shape or shape[-1] != self._inputs:
            raise self._incompatible(
                shape,
                f"axis -1 of input shape to have value {self._inputs} (the kernel has shape "
                f"{(self._inputs, self.units)})",
            )
        if inputs.array.dtype != self._dtype:
            inputs = ops.cast(inputs, self._dtype)
        rows = inputs
        if len(shape) != 2:
            rows = ops.reshape(inputs, (math.prod(shape[:-1]), self._inputs))
        relu = self.activation is activations.relu
        outputs = dense(rows, self.kernel, self.bias, "relu" if relu else None)
        if len(shape) != 2:
            outputs = ops.reshape(outputs, (*shape[:-1], self.units))
        if relu or self.activation is activations.linear:
            return outputs
        activated: Tensor = self.activation(outputs)
        return activated

    def compute_output_shape(self, input_shape: Any) -> Shape:
        """Return the input's shape with ``units`` as its last length."""
        return (*input_shape[:-1], self.units)


class Flatten(Layer):
    """Joins all axes but the first."""

    def call(self, inputs: Tensor) -> Tensor:
        """Return the inputs as ``[n, numbers per example]``."""
        shape = inputs.array.shape
        if not shape:
            raise self._incompatible(shape, "at least one axis")
        return ops.reshape(inputs, (shape[0], math.prod(shape[1:])))

    def compute_output_shape(self, input_shape: Any) -> Shape:
        """Return the batch and the product of the other lengths."""
        batch, *rest = input_shape
        return (batch, None if None in rest else math.prod(rest))


class Reshape(Layer):
    """Gives each example another shape.

    Parameters
    ----------
    target_shape
        The shape of an example; one length may be -1 and follows from the others.
    **options
        As for `Layer`.
    """

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
        # Not left to reshape(): an empty batch does not say what -1 stands for.
        return ops.reshape(inputs, self.compute_output_shape(shape))

    def compute_output_shape(self, input_shape: Any) -> Shape:
        """Return the batch and the target shape, with -1 replaced."""
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


class Activation(Layer):
    """Applies an activation function, given by name or as a function."""

    def __init__(self, activation: Any, **options: Any) -> None:
        super().__init__(**options)
        self.activation = activations.get(activation)

    def call(self, inputs: Tensor) -> Tensor:
        """Return the activation of the inputs."""
        outputs: Tensor = self.activation(inputs)
        return outputs

    def compute_output_shape(self, input_shape: Any) -> Shape:
        """Return the same shape."""
        return tuple(input_shape)


class Dropout(Layer):
    """In training, sets elements to 0 by chance and divides the others by ``1 - rate``.

    Parameters
    ----------
    rate
        The share of elements that become 0.
    seed
        Where the random numbers start. Each replica draws its own, which follow from the seed and
        the replica's number, so that a run can be repeated.
    **options
        As for `Layer`.

    Raises
    ------
    ValueError
        If ``rate`` is not in 0 to 1, without 1.
    """

    def __init__(self, rate: float, seed: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if not 0 <= float(rate) < 1:
            raise ValueError(f"Dropout: rate must be at least 0 and below 1, got {rate}")
        self.rate = float(rate)
        self.seed = seed
        self._generators: dict[int, np.random.Generator] = {}
        self._entropy = seed

    def build(self, input_shape: Any) -> None:
        """Settle the seed, if none was given, by the default generator."""
        if self._entropy is None:
            self._entropy = int(default_generator().integers(0, 2**63))

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """Return the inputs, with elements dropped if ``training``."""
        if not training or self.rate == 0:
            return inputs
        mode = current_mode()
        context = None if mode is None else mode.replica_context
        replica = 0 if context is None else int(context.replica_id_in_sync_group)
        generator = self._generators.get(replica)
        if generator is None:
            assert self._entropy is not None
            generator = np.random.default_rng([self._entropy, replica])
            self._generators[replica] = generator
        with generator_scope(generator):
            return nn.dropout(inputs, self.rate)

    def compute_output_shape(self, input_shape: Any) -> Shape:
        """Return the same shape."""
        return tuple(input_shape)


class InputLayer(Layer):
    """Says the shape of a `Sequential`'s examples; it does nothing else.

    A ``batch_size`` is only looked at: batches may have any number of examples.

    Raises
    ------
    ValueError
        If there is no shape, or the replicas of the strategy in force cannot share a batch equally.
    """

    def __init__(
        self,
        input_shape: Sequence[int | None] | None = None,
        shape: Sequence[int | None] | None = None,
        dtype: Any = None,
        name: str | None = None,
        batch_size: int | None = None,
    ) -> None:
        shape = input_shape if shape is None else shape
        if shape is None:
            raise ValueError("InputLayer needs the shape of an example, such as shape=(28, 28, 1)")
        replicas = get_strategy().num_replicas_in_sync
        if batch_size is not None and batch_size % replicas:
            raise ValueError(
                f"The `batch_size` argument ({batch_size}) must be divisible by the number of "
                f"replicas ({replicas})"
            )
        super().__init__(dtype=dtype, name=name, input_shape=shape)
        self._output_shape = self._input_shape

    def call(self, inputs: Tensor) -> Tensor:
        """Return the inputs."""
        return inputs

    def compute_output_shape(self, input_shape: Any) -> Shape:
        """Return the same shape."""
        return tuple(input_shape)


def Input(
    shape: Sequence[int | None],
    batch_size: int | None = None,
    dtype: Any = None,
    name: str | None = None,
) -> InputLayer:
    """Return the `InputLayer` of a `Sequential` whose examples have this shape."""
    return InputLayer(shape=shape, dtype=dtype, name=name, batch_size=batch_size)


def positive(name: str, value: Any) -> int:
    """Return an int of at least 1, or raise ``ValueError``."""
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def pair_of(name: str, value: Any) -> tuple[int, int]:
    """Return one int for both, or two ints, as two positive ints."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(values) != 2:
        raise ValueError(f"{name} must be one integer or two, got {value!r}")
    return positive(name, values[0]), positive(name, values[1])
