"""`Dense`, `Embedding` and `Identity`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pycollective.distribute.sharded import embedding_lookup
from pycollective.keras import activations
from pycollective.keras.layers.layer import Layer
from pycollective.keras.layers.shapes import Shape
from pycollective.nn.dense import dense
from pycollective.tensor import Tensor, ops

__all__ = ["Dense", "Embedding", "Identity"]


class Dense(Layer):
    """``activation(x @ kernel + bias)`` along the last axis.

    Parameters
    ----------
    units : int
        The length of the output's last axis.
    activation
        A name or function; the default is no activation.
    use_bias : bool
        True to add a bias.
    kernel_initializer, bias_initializer
        Initializers of ``kernel`` ``[inputs, units]`` and ``bias`` ``[units]``.
    kernel_regularizer, bias_regularizer, activity_regularizer
        Regularizers of the variables and of the output.
    kernel_constraint, bias_constraint
        Constraints that an optimizer applies after each step.
    **options
        The parameters of `Layer`; ``input_dim=n`` means ``input_shape=(n,)``.
    """

    takes_one_tensor = True

    _config_names = tuple(
        (
            "units activation use_bias kernel_initializer bias_initializer kernel_regularizer "
            "bias_regularizer kernel_constraint bias_constraint"
        ).split()
    )
    _fixed = (("lora_rank", None), ("lora_alpha", None), ("quantization_config", None))

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        input_dim: int | None = None,
        **options: Any,
    ) -> None:
        if input_dim is not None:
            options["input_shape"] = (input_dim,)
        super().__init__(activity_regularizer=activity_regularizer, **options)
        self.units = positive("units", units)
        self.activation = activations.get(activation)
        self.use_bias = bool(use_bias)
        self._set(kernel_initializer=kernel_initializer, bias_initializer=bias_initializer)
        self._set(kernel_regularizer=kernel_regularizer, bias_regularizer=bias_regularizer)
        self._set(kernel_constraint=kernel_constraint, bias_constraint=bias_constraint)
        self._inputs = 0

    def build(self, input_shape: Any) -> None:
        """Make ``kernel`` and ``bias`` for inputs of this shape."""
        if len(input_shape) == 0 or not input_shape[-1]:
            raise self._incompatible(
                tuple(input_shape), "a last axis of a known length of at least 1"
            )
        self._inputs = int(input_shape[-1])
        self.kernel = self._weight("kernel", (self._inputs, self.units))
        self.bias = self._weight("bias", (self.units,)) if self.use_bias else None

    def call(self, inputs: Tensor) -> Tensor:
        """Return the output, which has the input's shape with ``units`` as its last length."""
        shape = inputs.array.shape
        if len(shape) < 2:
            raise self._incompatible(shape, "at least two axes, the first of which is the batch")
        if shape[-1] != self._inputs:
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
        return (*input_shape[:-1], self.units)


class Embedding(Layer):
    """A lookup table from integers to vectors.

    Parameters
    ----------
    input_dim : int
        The number of rows of the table: inputs are 0 to ``input_dim - 1``.
    output_dim : int
        The length of a row.
    embeddings_initializer, embeddings_regularizer, embeddings_constraint
        The initializer, regularizer and constraint of ``embeddings`` ``[input_dim, output_dim]``.
    mask_zero : bool
        Must be False: masks are not supported.
    weights
        The table, or a list that holds only the table.

    Raises
    ------
    IndexError
        In a call, if an input is not the number of a row.
    """

    takes_one_tensor = True

    _config_names = tuple(
        (
            "input_dim output_dim embeddings_initializer embeddings_regularizer "
            "activity_regularizer embeddings_constraint mask_zero"
        ).split()
    )
    _fixed = (("lora_rank", None), ("lora_alpha", None), ("quantization_config", None))
    _converts = False

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        weights: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.input_dim = positive("input_dim", input_dim)
        self.output_dim = positive("output_dim", output_dim)
        self._set(
            embeddings_initializer=embeddings_initializer,
            embeddings_regularizer=embeddings_regularizer,
            embeddings_constraint=embeddings_constraint,
        )
        if mask_zero:
            raise ValueError(
                "Embedding: mask_zero=True is not supported, because layers and losses have no "
                "masks; give sample_weight instead"
            )
        self.mask_zero = False
        if weights is not None:
            self.build()
            self.set_weights(weights if isinstance(weights, (list, tuple)) else [weights])

    def build(self, input_shape: Any = None) -> None:
        """Make ``embeddings``; the input shape is ignored."""
        self.embeddings = self._weight("embeddings", (self.input_dim, self.output_dim))

    def call(self, inputs: Tensor) -> Tensor:
        """Return the rows ``[*inputs.shape, output_dim]``."""
        if inputs.dtype.kind not in "iu":
            inputs = ops.cast(inputs, np.int32)
        try:
            return embedding_lookup(self.embeddings, inputs)
        except IndexError as error:
            raise IndexError(
                f'layer "{self._name}": the table has rows 0 to {self.input_dim - 1} ({error})'
            ) from None

    def compute_output_shape(self, input_shape: Any) -> Shape:
        return (*input_shape, self.output_dim)


class Identity(Layer):
    """A layer that returns its inputs."""

    _config_names = ()
    _keeps_dtype = True

    def call(self, inputs: Any) -> Any:
        return inputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


def positive(name: str, value: Any) -> int:
    """Return the value as a positive int, or raise ``ValueError``."""
    try:
        number = 0 if isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number < 1 or number != value:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return number


def pair_of(name: str, value: Any) -> tuple[int, int]:
    """Return two positive ints; one int counts for both."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(values) != 2:
        raise ValueError(f"{name} must be one integer or two, got {value!r}")
    return positive(name, values[0]), positive(name, values[1])
