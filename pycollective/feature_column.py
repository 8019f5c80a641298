"""Feature columns, under the path of ``tf.feature_column``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pycollective.dtypes import as_dtype, float32
from pycollective.tensor import Tensor, as_tensor, ops

__all__ = ["NumericColumn", "numeric_column"]


class NumericColumn(NamedTuple):
    """A feature of numbers; the result of `numeric_column`."""

    key: str
    shape: tuple[int, ...]
    default_value: Any
    dtype: Any
    normalizer_fn: Callable[[Tensor], Tensor] | None

    @property
    def name(self) -> str:
        """The name of the column, its key."""
        return self.key

    @property
    def width(self) -> int:
        """The number of values of an example."""
        return math.prod(self.shape)

    def values_of(self, features: Mapping[str, Any]) -> Tensor:
        """Return the column of a batch, with a row of floats for each example.

        Raises
        ------
        ValueError
            The features are no mapping, have no such key, or have rows of another size.
        """
        if not isinstance(features, Mapping):
            raise ValueError(
                f"features should be a dictionary of `Tensor`s. Given type: {type(features)}"
            )
        if self.key not in features:
            raise ValueError(f"Feature {self.key} is not in features dictionary.")
        values = ops.cast(as_tensor(features[self.key]), self.dtype)
        rows = values.shape[0] if values.ndim else 0
        if not values.ndim or math.prod(values.shape[1:]) != self.width:
            raise ValueError(
                f"feature {self.key!r} has shape {tuple(values.shape)}; the column has the shape "
                f"{self.shape} for each example, after the axis of the batch"
            )
        if self.normalizer_fn is not None:
            values = as_tensor(self.normalizer_fn(values))
        return ops.reshape(values, (rows, self.width))


def numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    default_value: Any = None,
    dtype: Any = float32,
    normalizer_fn: Callable[[Tensor], Tensor] | None = None,
) -> NumericColumn:
    """Return a column for a feature of numbers.

    Parameters
    ----------
    key : str
        The key of the feature.
    shape : int or sequence of int
        The shape of an example's values.
    default_value
        Must be None: it is for features in serialized examples, which are not implemented.
    dtype : dtype-like
        The floating-point type of the values. An integer type stands for float32.
    normalizer_fn : callable, optional
        A function of the batch's values, such as ``lambda x: (x - 3.0) / 4.2``.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type or value.
    """
    if not isinstance(key, str):
        raise ValueError(f"key in feature_column must be a string. key: {key!r}")
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise TypeError(f"shape dimensions must be integer. shape: {sizes}, key: {key}")
        if size < 1:
            raise ValueError(f"shape dimensions must be greater than 0. shape: {sizes}, key: {key}")
    kind = as_dtype(dtype)
    if kind.kind not in "fiu":
        raise ValueError(f"dtype must be convertible to float. dtype: {kind}, key: {key}")
    if normalizer_fn is not None and not callable(normalizer_fn):
        raise TypeError(f"normalizer_fn must be a callable. Given: {normalizer_fn!r}")
    if default_value is not None:
        raise ValueError(
            f"numeric_column({key!r}): default_value must be None, because there are no serialized "
            "examples in which a value may be missing"
        )
    return NumericColumn(
        key, tuple(map(int, sizes)), None, kind if kind.kind == "f" else float32, normalizer_fn
    )
