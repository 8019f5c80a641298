"""Shapes of tensors, and nests of shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Shape = tuple[int | None, ...]


def is_shape(value: Any) -> bool:
    """Return True if ``value`` is the shape of one tensor, not a nest of shapes."""
    return isinstance(value, (list, tuple)) and all(
        n is None or isinstance(n, (int, np.integer)) for n in value
    )


def map_shapes(function: Callable[[Shape], Any], shapes: Any) -> Any:
    """Apply ``function`` to each shape in a nest of shapes."""
    if is_shape(shapes):
        return function(tuple(shapes))
    if isinstance(shapes, Mapping):
        return {key: map_shapes(function, shape) for key, shape in shapes.items()}
    return [map_shapes(function, shape) for shape in shapes]


def shapes_of(values: Any) -> Any:
    """Return the shapes of the tensors in a nest."""
    if isinstance(values, Mapping):
        return {key: shapes_of(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [shapes_of(value) for value in values]
    return tuple(np.shape(values) if not hasattr(values, "shape") else values.shape)


def without_batch(shape: Shape) -> Shape:
    """Return a shape with None as its batch size."""
    return (None, *shape[1:]) if shape else ()
