"""Transformations that select and order elements."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pycollective.arguments import whole
from pycollective.data.dataset import Dataset, kind
from pycollective.data.options import SHARD_HINT
from pycollective.data.rows import Rows, shuffled, shuffled_blocks
from pycollective.data.spec import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from pycollective.data.transformed import Transformed, at_least
from pycollective.errors import FailedPreconditionError, InvalidArgumentError
from pycollective.tensor import random


class Ordered(Transformed):
    """Base class of transformations that only select and order elements: they work on row numbers."""

    def _blocks(self, source: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield blocks of row numbers, made from the source's blocks."""
        raise NotImplementedError

    def _rows(self) -> Rows | None:
        rows = self._source._rows()
        return rows and replace(rows, blocks=lambda: self._blocks(rows.blocks))


@kind
class Shuffle(Ordered):
    """Elements in a random order."""

    def __init__(
        self, source: Dataset, buffer_size: int, seed: int | None, reshuffle: bool
    ) -> None:
        super().__init__(source)
        size = at_least(buffer_size, UNKNOWN_CARDINALITY, "buffer_size")
        if size == UNKNOWN_CARDINALITY:  # as `_known_length()` returned it
            size = sys.maxsize
        self._buffer_size = at_least(size, 1, "buffer_size")
        own = random.default_generator().integers(2**63) if seed is None else seed
        # NumPy's seeds are not negative.
        self._seed = whole("seed", own, -(2**64), 2**64) % 2**65
        self._reshuffle = reshuffle
        self._iterations = itertools.count()

    def _random(self) -> np.random.Generator:
        return np.random.default_rng([self._seed, next(self._iterations) if self._reshuffle else 0])

    def _blocks(self, source: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        return shuffled_blocks(source(), self._buffer_size, self._random())

    def _iter(self) -> Iterator[Any]:
        return shuffled(self._source._iter(), self._buffer_size, self._random())


@kind
class Repeat(Ordered):
    """The elements repeated several times."""

    def __init__(self, source: Dataset, count: int | None) -> None:
        super().__init__(source)
        self._count = -1 if count is None else at_least(count, -1, "count")

    def _turns(self) -> Iterator[int]:
        return iter(range(self._count)) if self._count >= 0 else itertools.count()

    def _is_cheap(self) -> bool:
        return self._source._is_cheap()

    def _iter(self) -> Iterator[Any]:
        return self._blocks(self._source._iter)

    def _blocks(self, source: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        for _ in self._turns():
            empty = True
            for item in source():
                empty = False
                yield item
            if empty:  # an empty source repeated for ever would never end
                return

    def _known_length(self) -> int:
        count = self._source._known_length()
        if self._count == 0 or count == 0:
            return 0
        if self._count < 0:
            return INFINITE_CARDINALITY
        return count if count < 0 else count * self._count


@kind
class Take(Ordered):
    """The first elements."""

    def __init__(self, source: Dataset, count: int) -> None:
        super().__init__(source)
        self._count = at_least(count, -1, "count")

    def _takes_all(self) -> bool:
        """Return True if no element is left out."""
        return self._count < 0 or 0 <= self._source._known_length() <= self._count

    def _rows(self) -> Rows | None:
        return self._source._rows() if self._takes_all() else super()._rows()

    def _blocks(self, source: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        left = self._count
        order = source()
        while left > 0:  # asking for one more block could begin another pass of a repetition
            block = next(order, None)
            if block is None:
                return
            yield block[:left]
            left -= len(block)

    def _iter(self) -> Iterator[Any]:
        elements = self._source._iter()
        return elements if self._count < 0 else self._first(elements)

    def _first(self, elements: Iterator[Any]) -> Iterator[Any]:
        yield from itertools.islice(elements, self._count)
        if self._takes_all():
            next(elements, None)  # caches must see the end

    def _known_length(self) -> int:
        count = self._source._known_length()
        if self._count < 0:
            return count
        if count == INFINITE_CARDINALITY:
            return self._count
        return count if count < 0 else min(count, self._count)


@kind
class Skip(Ordered):
    """All but the first elements."""

    def __init__(self, source: Dataset, count: int) -> None:
        super().__init__(source)
        self._count = at_least(count, -1, "count")

    def _blocks(self, source: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        left = self._count
        for block in source() if left >= 0 else ():  # -1 skips everything, as tf.data does
            if left < len(block):
                yield block[left:]
                left = 0
            else:
                left -= len(block)

    def _iter(self) -> Iterator[Any]:
        if self._count < 0:  # -1 skips everything, as tf.data does
            return iter(())
        return itertools.islice(self._source._iter(), self._count, None)

    def _known_length(self) -> int:
        count = self._source._known_length()
        if self._count < 0:
            return 0
        return count if count < 0 else max(0, count - self._count)


@kind
class Shard(Ordered):
    """Every n-th element, for n shards."""

    def __init__(self, source: Dataset, num_shards: int, index: int) -> None:
        super().__init__(source)
        self._step = at_least(num_shards, SHARD_HINT, "num_shards")
        self._is_hint = self._step == SHARD_HINT
        if self._is_hint:
            return
        at_least(self._step, 1, "num_shards")
        self._first = at_least(index, np.iinfo(np.int64).min, "index")
        if not 0 <= self._first < self._step:
            raise InvalidArgumentError(
                f"Index must be between 0 and {self._step - 1} (currently index = {self._first})."
            )

    def _check_filled_in(self) -> None:
        if self._is_hint:
            raise FailedPreconditionError(
                "`tf.data.Dataset.shard(SHARD_HINT, ...)` can only be used in "
                "`tf.distribute.Strategy.experimental_distribute_dataset()` with "
                "`tf.data.experimental.AutoShardPolicy.HINT` policy."
            )

    def _rows(self) -> Rows | None:
        self._check_filled_in()
        return super()._rows()

    def _blocks(self, source: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        before = 0
        for block in source():
            yield block[(self._first - before) % self._step :: self._step]
            before += len(block)

    def _iter(self) -> Iterator[Any]:
        self._check_filled_in()
        return itertools.islice(self._source._iter(), self._first, None, self._step)

    def _known_length(self) -> int:
        count = self._source._known_length()
        if self._is_hint:
            return count if count == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY
        return count if count < 0 else len(range(self._first, count, self._step))
