"""Rows of arrays in memory, which shuffling and batching handle by index.

While a dataset only orders rows of arrays in memory, its elements are row numbers. A batch is then one
``np.take`` for each array instead of a Python loop over elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.array_backend import array_module
from pycollective.data.spec import component_names
from pycollective.errors import InvalidArgumentError

Indices = Any

_DRAWS = 4096  # random numbers drawn at a time
# A block of this many bytes stays in a core's cache from one operation to the next.
_BLOCK_BYTES = 256 << 10


@dataclass(frozen=True)
class Rows:
    """Arrays ``columns`` of one length, and the order of their rows.

    ``blocks()`` returns an iterator of arrays of row numbers, which joined give the order. ``results``
    are functions that change a nest of rows, one after the other.
    """

    columns: Any
    blocks: Callable[[], Iterator[Indices]]
    results: tuple[Callable[[Any], Any], ...] = ()

    def take(self, indices: Indices) -> Any:
        """Return the rows with these numbers as a nest of arrays."""

        def pick(column: Any) -> Any:
            return column.take(array_module(column).asarray(indices), axis=0)

        taken = nest.map_structure(pick, self.columns)
        for result in self.results:
            taken = result(taken)
        return taken

    def bytes_of_a_row(self) -> int:
        """Return the number of bytes of a row of the columns."""
        return sum(column[:1].nbytes for column in nest.flatten(self.columns))

    def elements(self) -> Iterator[Any]:
        """Yield the rows one by one."""
        size = 1 if self.results else _DRAWS
        for block in self.blocks():
            begin = 0
            while begin < len(block):
                indices = block[begin : begin + size]
                begin += len(indices)
                if not self.results:
                    yield from _rows_at(self.columns, indices)
                    continue
                try:
                    taken = self.take(indices)
                except Exception:  # raised again below, after the rows before it
                    for i in range(len(indices)):
                        yield from _rows_at(self.take(indices[i : i + 1]), range(1))
                    continue
                yield from _rows_at(taken, range(len(indices)))
                row_bytes = sum(leaf[:1].nbytes for leaf in nest.flatten(taken))
                size = max(1, min(_DRAWS, _BLOCK_BYTES // max(1, row_bytes)))


def _rows_at(columns: Any, indices: Iterable[int]) -> Iterator[Any]:
    leaves = nest.flatten(columns)
    flat = type(columns) is tuple and not any(map(nest.is_nested, columns))
    for i in indices:
        row = [leaf[i, ...] for leaf in leaves]
        yield tuple(row) if flat else nest.pack_as(columns, row)


def regroup(blocks: Iterator[Indices], size: int, drop_remainder: bool) -> Iterator[Indices]:
    """Cut a sequence of blocks into blocks of ``size``; the last one may be shorter."""
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
    """Yield items in a random order, each drawn from a buffer of the next ``buffer_size`` items."""
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
    """Yield row numbers in the order of `shuffled`, in blocks."""
    first: list[Indices] = []
    held = 0
    for block in blocks:
        first.append(block)
        held += len(block)
        if held > buffer_size:
            break
    else:
        if first:  # all rows fit into the buffer: shuffled() gives this same order
            together = np.concatenate(first)
            yield together[random.permutation(len(together))]
        return

    def items() -> Iterator[int]:
        nonlocal held
        for block in first:
            yield from block.tolist()
        for block in blocks:
            held += len(block)
            yield from block.tolist()

    out: list[int] = []
    for made, item in enumerate(shuffled(items(), buffer_size, random), 1):
        out.append(item)
        # A reader that needs no more rows must not end the source: a cache would be full then.
        if len(out) == _DRAWS or made == held - buffer_size:
            yield np.asarray(out)
            out = []
    if out:
        yield np.asarray(out)


def number_of_rows(batch: Any) -> int:
    """Return the number of rows of a batch; raise an error if its arrays differ in it."""
    leaves = nest.flatten(batch)
    if leaves[0].ndim and all(leaf.shape[:1] == leaves[0].shape[:1] for leaf in leaves):
        return len(leaves[0])
    lengths = {}
    for name, leaf in zip(nest.flatten(component_names(batch)), leaves, strict=True):
        if leaf.ndim == 0:
            raise InvalidArgumentError(
                "All components must have at least one dimension. Perhaps your input dataset is not "
                f"batched? Component {name} is scalar."
            )
        lengths[name] = len(leaf)
    counts = ", ".join(f"{name} has {n}" for name, n in lengths.items())
    raise InvalidArgumentError(
        f"All components of a batch must have the same number of rows (first axis): {counts}"
    )


def rebatched(batches: Iterator[Any], sizes: Iterable[int], drop_remainder: bool) -> Iterator[Any]:
    """Yield batches of the given numbers of rows, made from batches of any numbers of rows.

    Arrays are only copied if a new batch spans two old ones.
    """
    kept: list[Any] = []  # remaining rows of old batches
    have = 0
    for size in sizes:
        while have < size or not kept:
            batch = next(batches, None)
            if batch is None:
                if have and not drop_remainder:
                    yield _joined(kept)
                return
            rows = number_of_rows(batch)
            if rows or not kept:
                kept = [batch] if not have else [*kept, batch]
                have += rows
        parts: list[Any] = []
        wanted = size
        while True:
            first = kept[0]
            rows = len(nest.flatten(first)[0])
            take = min(wanted, rows)
            parts.append(first if take == rows else _rows_of(first, 0, take))
            wanted -= take
            have -= take
            # Keep the last batch even without rows: it is the pattern of an empty batch.
            kept[0] = _rows_of(first, take, rows) if take else first
            if not wanted:
                break
            del kept[0]
        yield _joined(parts)


def _rows_of(batch: Any, begin: int, end: int) -> Any:
    return nest.map_structure(lambda a: a[begin:end], batch)


def _joined(batches: list[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    return nest.map_structure(_join_rows, component_names(batches[0]), *batches)


def _join_rows(name: str, *arrays: Any) -> Any:
    kinds = {(a.shape[1:], a.dtype) for a in arrays}
    if len(kinds) > 1:
        found = " and ".join(sorted(f"{shape} of {dtype}" for shape, dtype in kinds))
        raise InvalidArgumentError(f"cannot join rows of different kinds: {name} has {found}")
    return np.concatenate(arrays)
