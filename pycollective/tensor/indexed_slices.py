"""`IndexedSlices`: some rows of a tensor, with their indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..array_backend import scattered, to_numpy
from .shape import TensorShape
from .tensor import Tensor, as_tensor


class IndexedSlices:
    """Rows of a large tensor that is zero elsewhere, such as the gradient of an embedding.

    An index may occur more than once: rows with equal indices add up.

    Parameters
    ----------
    values : tensor, shape (n, ...)
        The rows.
    indices : tensor of int, shape (n,)
        The index of each row along axis 0.
    dense_shape : tuple or tensor of int, optional
        The shape of the whole tensor; needed to convert to it.

    Raises
    ------
    ValueError
        The numbers of indices and of rows differ, the indices are not integers in one dimension, or
        ``dense_shape`` has no such rows.

    Notes
    -----
    The meaning is that of TensorFlow's ``tf.IndexedSlices``.
    """

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        self.values = as_tensor(values)
        self.indices = as_tensor(indices)
        self.dense_shape = (
            None if dense_shape is None else tuple(int(n) for n in np.asarray(dense_shape))
        )
        if self.indices.dtype.kind not in "iu" or self.indices.ndim != 1:
            raise ValueError(
                f"indices must be integers in one dimension, not {self.indices.dtype} of shape "
                f"{tuple(self.indices.shape)}"
            )
        if self.values.ndim < 1 or self.values.shape[0] != self.indices.shape[0]:
            raise ValueError(
                f"{self.indices.shape[0]} indices need as many rows, but values have shape "
                f"{tuple(self.values.shape)}"
            )
        row = tuple(self.values.shape[1:])
        if self.dense_shape is not None and self.dense_shape != (*self.dense_shape[:1], *row):
            raise ValueError(f"dense_shape {self.dense_shape} does not fit rows of shape {row}")

    @property
    def dtype(self) -> Any:
        """The dtype of the rows."""
        return self.values.dtype

    @property
    def shape(self) -> TensorShape:
        """The shape of the whole tensor; its first length is None if it is unknown."""
        return TensorShape(self.dense_shape or (None, *self.values.shape[1:]))

    def __tensor__(self) -> Tensor:
        """Return the whole tensor, in which rows with equal indices are added.

        Raises
        ------
        ValueError
            There is no dense shape, or an index is outside of it.
        """
        if self.dense_shape is None:
            raise ValueError("IndexedSlices without a dense_shape cannot be made a dense tensor")
        indices, rows = self.indices.array, self.values.array
        length = self.dense_shape[0]
        if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= length):
            raise ValueError(f"an index is outside the {length} rows of the dense shape")
        return Tensor(scattered(self.dense_shape, indices, rows))

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(indices={self.indices!r}, values={self.values!r}, "
            f"dense_shape={self.dense_shape})"
        )


def concatenated_slices(parts: Sequence[IndexedSlices], divided_by: int = 1) -> IndexedSlices:
    """Return the sum of several `IndexedSlices`: their rows joined one after the other, on the host.

    The rows are divided by ``divided_by``, for a mean the number of parts. Equal indices are kept,
    because their rows add up. Parts of other dtypes, row shapes or dense shapes raise ValueError.
    """
    first = parts[0]
    wholes: set[Any] = set()
    for number, part in enumerate(parts):
        wholes |= {part.dense_shape} - {None}
        if part.dtype != first.dtype or part.shape[1:] != first.shape[1:] or len(wholes) > 1:
            raise ValueError(
                f"IndexedSlices that are added must be alike: number 0 has dtype {first.dtype} and "
                f"shape {first.shape}, number {number} has {part.dtype} and {part.shape}"
            )
    rows = np.concatenate([to_numpy(part.values.array) for part in parts])
    if divided_by != 1:
        mean = rows / divided_by  # for ints a floating-point number, as in all means of ints
        rows = mean if rows.dtype.kind in "iub" else mean.astype(rows.dtype, copy=False)
    indices = np.concatenate([to_numpy(part.indices.array) for part in parts])
    return IndexedSlices(rows, indices, next(iter(wholes), None))
