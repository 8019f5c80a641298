"""Partitioners: functions of a shape and a dtype that return the number of shards of each axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pycollective.dtypes import as_dtype

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner:
    """Base class; a subclass overrides `shards`, or ``__call__``."""

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards of each axis: 1 except for one axis.

        Parameters
        ----------
        shape : sequence of int
            The variable's shape.
        dtype
            The variable's dtype; an element of ``str`` counts as ``bytes_per_string`` bytes.
        axis : int
            The axis that is divided.

        Raises
        ------
        ValueError
            The shape has no such axis, or an unknown or negative length.
        """
        sizes = [_length(n, shape) for n in shape]
        if not -len(sizes) <= axis < len(sizes):
            raise ValueError(f"axis {axis} is out of range for a variable of shape {sizes}")
        result = [1] * len(sizes)
        result[axis] = max(1, min(sizes[axis], self.shards(sizes, dtype, axis)))
        return result

    def shards(self, shape: Sequence[int], dtype: Any, axis: int) -> int:
        """Return the number of shards of ``axis``; the caller limits it to the axis's length."""
        raise NotImplementedError(f"{type(self).__name__} must override shards()")


class FixedShardsPartitioner(Partitioner):
    """A fixed number of shards.

    Parameters
    ----------
    num_shards : int
        The number of shards; at least 1.

    Raises
    ------
    ValueError
        ``num_shards`` is less than 1.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def shards(self, shape: Sequence[int], dtype: Any, axis: int) -> int:
        """Return the number."""
        return self._num_shards


class MinSizePartitioner(Partitioner):
    """One shard for each ``min_shard_bytes`` of the variable, rounded up.

    Parameters
    ----------
    min_shard_bytes : int
        The size of a shard.
    max_shards : int
        The largest number of shards.
    bytes_per_string : int
        The size of a string.

    Raises
    ------
    ValueError
        An argument is less than 1.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def shards(self, shape: Sequence[int], dtype: Any, axis: int) -> int:
        """Return the variable's bytes divided by ``min_shard_bytes``, limited to ``max_shards``."""
        size = math.prod(shape) * _item_bytes(dtype, self._bytes_per_string)
        return min(self._max_shards, -(-size // self._min_shard_bytes))


class MaxSizePartitioner(Partitioner):
    """The smallest number of shards of at most ``max_shard_bytes``; a shard has at least one row.

    Parameters
    ----------
    max_shard_bytes : int
        The largest size of a shard.
    max_shards : int, optional
        The largest number of shards, even if shards are larger then.
    bytes_per_string : int
        The size of a string.

    Raises
    ------
    ValueError
        An argument is less than 1.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def shards(self, shape: Sequence[int], dtype: Any, axis: int) -> int:
        """Return the number of shards of whole rows of ``axis``, limited to ``max_shards``."""
        axis %= len(shape)
        others = math.prod(n for i, n in enumerate(shape) if i != axis)
        row = max(1, others * _item_bytes(dtype, self._bytes_per_string))
        rows = max(1, self._max_shard_bytes // row)
        shards = -(-shape[axis] // rows)
        return shards if self._max_shards is None else min(shards, self._max_shards)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"Argument `{name}` must be positive. Received: {value}")
    return value


def _length(length: Any, shape: Sequence[Any]) -> int:
    if length is None or length < 0:
        raise ValueError(f"every length of the shape must be known, got {tuple(shape)}")
    return int(length)


def _item_bytes(dtype: Any, bytes_per_string: int) -> int:
    names_text = isinstance(dtype, str) and dtype in ("str", "string")
    if names_text or dtype is str or getattr(dtype, "kind", "") in ("S", "U", "O"):
        return bytes_per_string
    return as_dtype(dtype).itemsize
