"""Layers that merge several tensors into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pycollective import nn
from pycollective.keras.layers.layer import Layer
from pycollective.keras.layers.shapes import Shape, is_shape
from pycollective.tensor import Tensor, ops

__all__ = [
    "Add",
    "Average",
    "Concatenate",
    "Maximum",
    "Minimum",
    "Multiply",
    "Subtract",
    "add",
    "average",
    "concatenate",
    "maximum",
    "minimum",
    "multiply",
    "subtract",
]


class _Merge(Layer):
    """Base of the layers that take a list of tensors."""

    _config_names: tuple[str, ...] | None = ()

    def _shapes_of(self, input_shape: Any) -> list[Shape]:
        """Return the shapes of a list of inputs; raise ``ValueError`` for any other nest."""
        if is_shape(input_shape) or isinstance(input_shape, dict) or not input_shape:
            raise ValueError(
                f'layer "{self._name}" ({type(self).__name__}) should be called on a list of inputs, '
                f"but received input with shape {input_shape}"
            )
        return [tuple(shape) for shape in input_shape]

    def _mismatch(self, shapes: Sequence[Shape], needed: str) -> ValueError:
        return ValueError(
            f'Inputs of layer "{self._name}" ({type(self).__name__}) are incompatible: expected '
            f"{needed}, but received inputs with shapes {list(shapes)}"
        )


class _Elementwise(_Merge):
    """Base of the element-wise layers; examples broadcast, as in Keras."""

    def _merged(self, inputs: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError

    def call(self, inputs: Any) -> Tensor:
        return self._merged(self._aligned(inputs))

    def _aligned(self, inputs: Any) -> list[Tensor]:
        """Check the inputs, and return them with equal numbers of axes."""
        single = isinstance(inputs, Tensor)
        self.compute_output_shape(inputs.shape if single else [x.shape for x in inputs])
        most = max(x.ndim for x in inputs)
        # Missing axes are inserted after the batch axis, where Keras broadcasts examples.
        return [
            x
            if x.ndim == most
            else ops.reshape(x, (x.shape[0], *(1,) * (most - x.ndim), *x.shape[1:]))
            for x in inputs
        ]

    def compute_output_shape(self, input_shape: Any) -> Shape:
        shapes = self._shapes_of(input_shape)
        needed = "shapes that broadcast, and equal numbers of rows"
        batches = {shape[0] if shape else 1 for shape in shapes} - {None}
        if len(batches) > 1:
            raise self._mismatch(shapes, needed)
        most = max(len(shape) for shape in shapes)
        merged: list[int | None] = []
        for axis in range(1 - most, 0):
            lengths = {shape[axis] for shape in shapes if len(shape) > -axis} - {1}
            known = lengths - {None}
            if len(known) > 1:
                raise self._mismatch(shapes, needed)
            merged.append(None if None in lengths else known.pop() if known else 1)
        return (batches.pop() if batches else None, *merged)


def _folded(function: Callable[[Any, Any], Tensor], inputs: Sequence[Tensor]) -> Tensor:
    total = inputs[0]
    for tensor in inputs[1:]:
        total = function(total, tensor)
    return total


class Add(_Elementwise):
    """The sum of the inputs."""

    def call(self, inputs: Any, activation: str | None = None) -> Tensor:
        """Return the sum, or ``max(sum, 0)`` if ``activation`` is ``"relu"``."""
        if activation is None:
            return super().call(inputs)
        *others, last = self._aligned(inputs)
        return nn.add_relu(self._merged(others), last) if others else nn.relu(last)

    def _merged(self, inputs: Sequence[Tensor]) -> Tensor:
        return _folded(ops.add, inputs)


class Subtract(_Elementwise):
    """The first of two inputs minus the second."""

    def _merged(self, inputs: Sequence[Tensor]) -> Tensor:
        return inputs[0] - inputs[1]

    def compute_output_shape(self, input_shape: Any) -> Shape:
        shapes = self._shapes_of(input_shape)
        if len(shapes) != 2:
            raise self._mismatch(shapes, "two inputs")
        return super().compute_output_shape(input_shape)


class Multiply(_Elementwise):
    """The product of the inputs."""

    def _merged(self, inputs: Sequence[Tensor]) -> Tensor:
        return _folded(ops.multiply, inputs)


class Average(_Elementwise):
    """The mean of the inputs."""

    def _merged(self, inputs: Sequence[Tensor]) -> Tensor:
        return _folded(ops.add, inputs) / len(inputs)


class Maximum(_Elementwise):
    """The element-wise maximum of the inputs."""

    def _merged(self, inputs: Sequence[Tensor]) -> Tensor:
        return _folded(ops.maximum, inputs)


class Minimum(_Elementwise):
    """The element-wise minimum of the inputs."""

    def _merged(self, inputs: Sequence[Tensor]) -> Tensor:
        return _folded(ops.minimum, inputs)


class Concatenate(_Merge):
    """The concatenation of the inputs along ``axis``."""

    def __init__(self, axis: int = -1, **options: Any) -> None:
        super().__init__(**options)
        self.axis = int(axis)

    def call(self, inputs: Any) -> Tensor:
        single = isinstance(inputs, Tensor)
        self.compute_output_shape(inputs.shape if single else [x.shape for x in inputs])
        return ops.concat(inputs, self.axis)

    def compute_output_shape(self, input_shape: Any) -> Shape:
        shapes = self._shapes_of(input_shape)
        needed = f"shapes that differ along axis {self.axis} only"
        ranks = {len(shape) for shape in shapes}
        if len(ranks) != 1 or not -(rank := ranks.pop()) <= self.axis < rank:
            raise self._mismatch(shapes, needed)
        joined: list[int | None] = []
        for axis, lengths in enumerate(zip(*shapes, strict=True)):
            known = [n for n in lengths if n is not None]
            if axis == self.axis % rank:
                joined.append(sum(known) if len(known) == len(lengths) else None)
                continue
            if len(set(known)) > 1:
                raise self._mismatch(shapes, needed)
            joined.append(known[0] if known else None)
        return tuple(joined)


def add(inputs: Sequence[Any], **options: Any) -> Any:
    """Return ``Add(**options)(inputs)``."""
    return Add(**options)(inputs)


def subtract(inputs: Sequence[Any], **options: Any) -> Any:
    """Return ``Subtract(**options)(inputs)``."""
    return Subtract(**options)(inputs)


def multiply(inputs: Sequence[Any], **options: Any) -> Any:
    """Return ``Multiply(**options)(inputs)``."""
    return Multiply(**options)(inputs)


def average(inputs: Sequence[Any], **options: Any) -> Any:
    """Return ``Average(**options)(inputs)``."""
    return Average(**options)(inputs)


def maximum(inputs: Sequence[Any], **options: Any) -> Any:
    """Return ``Maximum(**options)(inputs)``."""
    return Maximum(**options)(inputs)


def minimum(inputs: Sequence[Any], **options: Any) -> Any:
    """Return ``Minimum(**options)(inputs)``."""
    return Minimum(**options)(inputs)


def concatenate(inputs: Sequence[Any], axis: int = -1, **options: Any) -> Any:
    """Return ``Concatenate(axis, **options)(inputs)``."""
    return Concatenate(axis, **options)(inputs)
