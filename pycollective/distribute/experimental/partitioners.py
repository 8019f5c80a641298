"""Partitioners: into how many shards a variable is cut along an axis.

A partitioner is called with a shape and a dtype and returns the number of shards of each axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pycollective.dtypes import as_dtype

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner:
    """Base class: one of your own overrides `shards`, or the call itself."""

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards of each axis: 1 but for one axis.

        Parameters
        ----------
        shape : sequence of int
            The variable's.
        dtype
            The variable's; ``str`` counts ``bytes_per_string`` bytes an element.
        axis : int
            The axis that is cut.

        Raises
        ------
        ValueError
            If the shape has no such axis, or an unknown or negative length.
        """
        sizes = [_length(n, shape) for n in shape]
        if not -len(sizes) <= axis < len(sizes):
            raise ValueError(f"axis {axis} is out of range for a variable of shape {sizes}")
        result = [1] * len(sizes)
        result[axis] = max(1, min(sizes[axis], self.shards(sizes, dtype, axis)))
        return result

    def shards(self, shape: Sequence[int], dtype: Any, axis: int) -> int:
        """Return into how many shards to cut ``axis``; more than its length counts as its length."""
        raise NotImplementedError(f"{type(self).__name__} must override shards()")


class FixedShardsPartitioner(Partitioner):
    """Always the same number of shards.

    Parameters
    ----------
    num_shards : int
        How many; at least 1.

    Raises
    ------
    ValueError
        If it is less than 1.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def shards(self, shape: Sequence[int], dtype: Any, axis: int) -> int:
        """Return the number."""
        return self._num_shards


class MinSizePartitioner(Partitioner):
    """As many shards as there are times ``min_shard_bytes`` in the variable, rounded up.

    Parameters
    ----------
    min_shard_bytes : int
        What a shard should have.
    max_shards : int
        No more than so many shards.
    bytes_per_string : int
        How long a string is taken to be.

    Raises
    ------
    ValueError
        If one of them is less than 1.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def shards(self, shape: Sequence[int], dtype: Any, axis: int) -> int:
        """Return the bytes over ``min_shard_bytes``, rounded up, but at most ``max_shards``."""
        size = math.prod(shape) * _item_bytes(dtype, self._bytes_per_string)
        return min(self._max_shards, -(-size // self._min_shard_bytes))


class MaxSizePartitioner(Partitioner):
    """As few shards as keep each within ``max_shard_bytes``, or of one row where a row is longer.

    Parameters
    ----------
    max_shard_bytes : int
        What a shard may have.
    max_shards : int, optional
        No more than so many shards, even if they are larger.
    bytes_per_string : int
        How long a string is taken to be.

    Raises
    ------
    ValueError
        If one of them is less than 1.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def shards(self, shape: Sequence[int], dtype: Any, axis: int) -> int:
        """Return how many shards of whole rows of ``axis`` there are, at most ``max_shards``."""
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
