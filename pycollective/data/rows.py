"""Rows of arrays in memory: what lets shuffling and batching work on indices alone.

As long as a dataset only orders rows of arrays that are in memory, its elements are numbers of
rows, and a batch is one ``np.take`` for each array instead of a Python loop over elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pycollective import nest
from pycollective.array_backend import array_module

__all__ = ["Rows", "regroup", "shuffled"]

Indices = Any

_DRAWS = 4096  # random numbers drawn at a time


class Rows(NamedTuple):
    """Arrays, and the order in which their rows are elements.

    Attributes
    ----------
    columns : nest of arrays
        All of the same length.
    blocks : callable
        Returns an iterator over arrays of row numbers: one after the other they are the order.
    """

    columns: Any
    blocks: Callable[[], Iterator[Indices]]

    def take(self, indices: Indices) -> Any:
        """Return the rows of these numbers as a nest of arrays."""

        def pick(column: Any) -> Any:
            return column.take(array_module(column).asarray(indices), axis=0)

        return nest.map_structure(pick, self.columns)

    def elements(self) -> Iterator[Any]:
        """Yield the rows one by one."""
        for block in self.blocks():
            for i in block:
                yield nest.map_structure(lambda column, i=i: column[i, ...], self.columns)


def regroup(blocks: Iterator[Indices], size: int, drop_remainder: bool) -> Iterator[Indices]:
    """Cut a sequence of blocks anew, into blocks of ``size`` (the last one may be shorter)."""
    kept: list[Indices] = []
    count = 0
    for block in blocks:
        begin = 0
        while begin < len(block):
            part = block[begin : begin + size - count]
            begin += len(part)
            count += len(part)
            kept.append(part)
            if count == size:
                yield kept[0] if len(kept) == 1 else np.concatenate(kept)
                kept, count = [], 0
    if kept and not drop_remainder:
        yield np.concatenate(kept)


def shuffled(items: Iterable[Any], buffer_size: int, random: np.random.Generator) -> Iterator[Any]:
    """Yield items in a random order, each drawn from the next ``buffer_size`` of them."""
    source = iter(items)
    buffer: list[Any] = []
    for item in source:
        buffer.append(item)
        if len(buffer) == buffer_size:
            break
    draws: list[int] = []
    for item in source:
        if not draws:
            draws = random.integers(buffer_size, size=_DRAWS).tolist()
        place = draws.pop()
        yield buffer[place]
        buffer[place] = item
    for place in random.permutation(len(buffer)):
        yield buffer[place]


def shuffled_blocks(
    blocks: Iterator[Indices], buffer_size: int, random: np.random.Generator
) -> Iterator[Indices]:
    """Return the order of `shuffled` for row numbers, in blocks."""
    first: list[Indices] = []
    held = 0
    for block in blocks:
        first.append(block)
        held += len(block)
        if held > buffer_size:
            break
    else:
        if first:  # everything fits: the same numbers as shuffled() gives
            together = np.concatenate(first)
            yield together[random.permutation(len(together))]
        return

    def items() -> Iterator[int]:
        for block in first:
            yield from block.tolist()
        for block in blocks:
            yield from block.tolist()

    out: list[int] = []
    for item in shuffled(items(), buffer_size, random):
        out.append(item)
        if len(out) == _DRAWS:
            yield np.asarray(out)
            out = []
    if out:
        yield np.asarray(out)
