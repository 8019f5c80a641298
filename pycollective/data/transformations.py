"""The transformations of a dataset: one class each.

A new one writes `_iter` (its elements from those of ``self._source``) and, where they change,
`cardinality` and `_make_spec`; one that only orders rows also writes `_rows`, and is then done on
indices.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import index
from typing import Any

import numpy as np

from pycollective import _core, nest
from pycollective.data.background import Prefetcher
from pycollective.data.dataset import Dataset, as_element, as_tensors, kind
from pycollective.data.options import SHARD_HINT, Options
from pycollective.data.rows import (
    Rows,
    shuffled,
    shuffled_blocks,
)
from pycollective.data.spec import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    UNKNOWN_SPEC,
    TensorSpec,
    common_spec,
    spec_of,
)
from pycollective.dtypes import string
from pycollective.errors import FailedPreconditionError, InvalidArgumentError
from pycollective.tensor import as_tensor, random

__all__ = [
    "AssertCardinality",
    "Concatenate",
    "Enumerate",
    "Filter",
    "Interleave",
    "Map",
    "Prefetch",
    "Repeat",
    "Shard",
    "Shuffle",
    "Skip",
    "Take",
    "Transformed",
    "WithOptions",
    "Zip",
    "at_least",
]


def at_least(value: Any, least: int, name: str) -> int:
    """Return an argument as an int: an int, or an integer tensor, variable or array without axes.

    Raises
    ------
    TypeError
        If the argument is something else.
    InvalidArgumentError
        If the number is below ``least``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int of at least {least}, not {value!r}") from None
    if number < least:
        raise InvalidArgumentError(f"{name} must be at least {least}, not {number}")
    return number


def _number_or_auto(value: Any, name: str) -> int:
    """Return a number of at least 1; for AUTOTUNE the number of cores."""
    number = at_least(value, AUTOTUNE, name)
    return _core.usable_cores() if number == AUTOTUNE else at_least(number, 1, name)


class Transformed(Dataset):
    """A dataset made from one other; elements look like that one's unless said otherwise."""

    def __init__(self, source: Dataset) -> None:
        self._source = source

    def _inputs(self) -> tuple[Dataset, ...]:
        return (self._source,)

    def _with_inputs(self, inputs: Sequence[Dataset]) -> Dataset:
        return self._copy(_source=inputs[0])

    def _make_spec(self) -> Any:
        return self._source.element_spec

    def cardinality(self) -> int:
        return self._source.cardinality()

    def _batch_size(self) -> int | None:
        return self._source._batch_size()


@kind
class Shuffle(Transformed):
    """Elements in a random order."""

    def __init__(
        self, source: Dataset, buffer_size: int, seed: int | None, reshuffle: bool
    ) -> None:
        super().__init__(source)
        size = at_least(buffer_size, UNKNOWN_CARDINALITY, "buffer_size")
        if size == UNKNOWN_CARDINALITY:  # as `cardinality()` returned it
            size = sys.maxsize
        self._buffer_size = at_least(size, 1, "buffer_size")
        own = random.default_generator().integers(2**63) if seed is None else seed
        self._seed = abs(int(own))
        self._reshuffle = reshuffle
        self._iterations = itertools.count()

    def _random(self) -> np.random.Generator:
        return np.random.default_rng([self._seed, next(self._iterations) if self._reshuffle else 0])

    def _rows(self) -> Rows | None:
        rows = self._source._rows()
        if rows is None:
            return None
        blocks = rows.blocks
        return Rows(
            rows.columns, lambda: shuffled_blocks(blocks(), self._buffer_size, self._random())
        )

    def _iter(self) -> Iterator[Any]:
        return shuffled(self._source._iter(), self._buffer_size, self._random())


@kind
class Repeat(Transformed):
    """The elements several times over."""

    def __init__(self, source: Dataset, count: int | None) -> None:
        super().__init__(source)
        self._count = -1 if count is None else at_least(count, -1, "count")

    def _turns(self) -> Iterator[int]:
        return iter(range(self._count)) if self._count >= 0 else itertools.count()

    def _rows(self) -> Rows | None:
        rows = self._source._rows()
        if rows is None:
            return None
        source = rows.blocks
        return Rows(rows.columns, lambda: self._again(source))

    def _is_at_hand(self) -> bool:
        return self._source._is_at_hand()

    def _iter(self) -> Iterator[Any]:
        return self._again(self._source._iter)

    def _again(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        for _ in self._turns():
            empty = True
            for item in start():
                empty = False
                yield item
            if empty:  # nothing, for ever, would never end
                return

    def cardinality(self) -> int:
        count = self._source.cardinality()
        if self._count == 0 or count == 0:
            return 0
        if self._count < 0:
            return INFINITE_CARDINALITY
        return count if count < 0 else count * self._count


@kind
class Take(Transformed):
    """The first elements."""

    def __init__(self, source: Dataset, count: int) -> None:
        super().__init__(source)
        self._count = at_least(count, -1, "count")

    def _takes_all(self) -> bool:
        """Return True if no element is left out; then the end is looked for, as caches need it."""
        return self._count < 0 or 0 <= self._source.cardinality() <= self._count

    def _rows(self) -> Rows | None:
        rows = self._source._rows()
        if rows is None or self._takes_all():
            return rows
        source = rows.blocks

        def blocks() -> Iterator[Any]:
            left = self._count
            order = source()
            while left > 0:  # asking for one block more could begin another turn of a repetition
                block = next(order, None)
                if block is None:
                    return
                yield block[:left]
                left -= len(block)

        return Rows(rows.columns, blocks)

    def _iter(self) -> Iterator[Any]:
        elements = self._source._iter()
        return elements if self._takes_all() else itertools.islice(elements, self._count)

    def cardinality(self) -> int:
        count = self._source.cardinality()
        if self._count < 0:
            return count
        if count == INFINITE_CARDINALITY:
            return self._count
        return count if count < 0 else min(count, self._count)


@kind
class Skip(Transformed):
    """All but the first elements."""

    def __init__(self, source: Dataset, count: int) -> None:
        super().__init__(source)
        self._count = at_least(count, -1, "count")

    def _rows(self) -> Rows | None:
        rows = self._source._rows()
        if rows is None:
            return None
        if self._count < 0:  # -1 skips everything, as tf.data does
            return Rows(rows.columns, lambda: iter(()))
        source = rows.blocks

        def blocks() -> Iterator[Any]:
            left = self._count
            for block in source():
                if left < len(block):
                    yield block[left:]
                    left = 0
                else:
                    left -= len(block)

        return Rows(rows.columns, blocks)

    def _iter(self) -> Iterator[Any]:
        if self._count < 0:  # -1 skips everything, as tf.data does
            return iter(())
        return itertools.islice(self._source._iter(), self._count, None)

    def cardinality(self) -> int:
        count = self._source.cardinality()
        if self._count < 0:
            return 0
        return count if count < 0 else max(0, count - self._count)


@kind
class Shard(Transformed):
    """Every so many-th element."""

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
        rows = self._source._rows()
        if rows is None:
            return None
        source = rows.blocks

        def blocks() -> Iterator[Any]:
            before = 0
            for block in source():
                yield block[(self._first - before) % self._step :: self._step]
                before += len(block)

        return Rows(rows.columns, blocks)

    def _iter(self) -> Iterator[Any]:
        self._check_filled_in()
        return itertools.islice(self._source._iter(), self._first, None, self._step)

    def cardinality(self) -> int:
        count = self._source.cardinality()
        if self._is_hint:
            return count if count == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY
        return count if count < 0 else len(range(self._first, count, self._step))


@kind
class Map(Transformed):
    """A function of every element."""

    def __init__(
        self, source: Dataset, function: Callable[..., Any], num_parallel_calls: int | None
    ) -> None:
        super().__init__(source)
        if not callable(function):
            raise TypeError(f"map needs a function, not {type(function).__name__}")
        self._function = function
        calls = 1 if num_parallel_calls is None else num_parallel_calls
        self._parallel = _number_or_auto(calls, "num_parallel_calls")

    def _call(self, element: Any) -> Any:
        value = as_tensors(element)
        made = self._function(*value) if type(value) is tuple else self._function(value)
        if isinstance(made, list):
            made = tuple(made)  # components, as in TensorFlow; `stack` makes one tensor of them
        try:
            return as_element(made, own=True)
        except (TypeError, ValueError) as error:
            name = getattr(self._function, "__name__", repr(self._function))
            raise TypeError(f"map: what {name} returned is no element: {error}") from error

    def _iter(self) -> Iterator[Any]:
        if self._parallel == 1:
            # Not map(): a StopIteration from the function would end it without a word.
            return (self._call(element) for element in self._source._iter())
        return self._iter_in_threads()

    def _iter_in_threads(self) -> Iterator[Any]:
        pool = ThreadPoolExecutor(self._parallel, thread_name_prefix="pycollective-map")
        waiting: deque[Future[Any]] = deque()
        failure: Exception | None = None
        source = self._source._iter()
        try:
            while failure is None or waiting:
                while failure is None and len(waiting) <= self._parallel:
                    try:
                        waiting.append(pool.submit(self._call, next(source)))
                    except Exception as error:  # its turn comes after the elements before it
                        failure = error
                if waiting:
                    yield waiting.popleft().result()
            if not isinstance(failure, StopIteration):
                assert failure is not None
                raise failure
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _make_spec(self) -> Any:
        return _spec_of_result(
            self._source.element_spec, lambda element: spec_of(self._call(element))
        )

    def _batch_size(self) -> int | None:
        return None


def _spec_of_result(source: Any, result: Callable[[Any], Any]) -> Any:
    """Return the spec of what a function makes of zeros, by ``result``, which returns a spec.

    Unknown lengths are tried with two values: those of the result that differ are unknown. One of the
    two is 1, since no part of a tensor is shorter; where axes of that length are dropped, it is 2.
    """
    if any(s.shape is None or s.dtype is None for s in nest.flatten(source)):
        return UNKNOWN_SPEC

    def made_of(unknown: int) -> Any:
        def zeros(s: TensorSpec) -> Any:
            shape = [unknown if n is None else n for n in s.shape or ()]
            return np.full(shape, b"", string) if s.dtype == string else np.zeros(shape, s.dtype)

        return result(nest.map_structure(zeros, source))

    try:
        with random.generator_scope(np.random.default_rng(0)):
            large = made_of(3)
            spec = common_spec(made_of(1), large)
            whole = all(s.shape is not None for s in nest.flatten(spec))
            return spec if whole else common_spec(made_of(2), large)
    except Exception:  # it may well do with its elements, if not with zeros
        return UNKNOWN_SPEC


@kind
class Filter(Transformed):
    """The elements for which a function is true."""

    def __init__(self, source: Dataset, predicate: Callable[..., Any]) -> None:
        super().__init__(source)
        if not callable(predicate):
            raise TypeError(f"filter needs a function, not {type(predicate).__name__}")
        self._predicate = predicate

    def _iter(self) -> Iterator[Any]:
        for element in self._source._iter():
            value = as_tensors(element)
            answer = self._predicate(*value) if type(value) is tuple else self._predicate(value)
            said = as_tensor(answer)
            if said.shape != () or said.dtype != np.bool_:
                raise TypeError(f"filter: the predicate must return one bool, not {answer!r}")
            if said:
                yield element

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY


@kind
class Prefetch(Transformed):
    """Elements made ahead in a thread."""

    def __init__(self, source: Dataset, buffer_size: int) -> None:
        super().__init__(source)
        size = at_least(buffer_size, -1, "buffer_size")
        self._buffer_size = 2 if size < 0 else size

    def _is_at_hand(self) -> bool:
        return self._buffer_size > 0

    def _iter(self) -> Iterator[Any]:
        if self._buffer_size == 0:
            return self._source._iter()
        return iter(Prefetcher(self._source._iter, self._buffer_size))


@kind
class Concatenate(Transformed):
    """One dataset after another."""

    def __init__(self, source: Dataset, other: Dataset) -> None:
        super().__init__(source)
        if not isinstance(other, Dataset):
            raise TypeError(f"concatenate needs a dataset, not {type(other).__name__}")
        self._other = other
        one, two = source.element_spec, other.element_spec
        try:
            mixed = nest.flatten(common_spec(one, two))
        except ValueError:
            mixed = []
        known = UNKNOWN_SPEC not in (*nest.flatten(one), *nest.flatten(two))
        if known and (not mixed or any(s.dtype is None for s in mixed)):
            raise TypeError(f"concatenate: the elements differ in kind: {one} and {two}")

    def _inputs(self) -> tuple[Dataset, ...]:
        return (self._source, self._other)

    def _with_inputs(self, inputs: Sequence[Dataset]) -> Dataset:
        return self._copy(_source=inputs[0], _other=inputs[1])

    def _make_spec(self) -> Any:
        one, two = self._source.element_spec, self._other.element_spec
        known = UNKNOWN_SPEC not in (*nest.flatten(one), *nest.flatten(two))
        return common_spec(one, two) if known else UNKNOWN_SPEC

    def _batch_size(self) -> int | None:
        one, two = self._source._batch_size(), self._other._batch_size()
        return one if one == two else None

    def _iter(self) -> Iterator[Any]:
        yield from self._source._iter()
        yield from self._other._iter()

    def cardinality(self) -> int:
        one, other = self._source.cardinality(), self._other.cardinality()
        if INFINITE_CARDINALITY in (one, other):
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in (one, other) else one + other


@kind
class Enumerate(Transformed):
    """Elements with their numbers."""

    def __init__(self, source: Dataset, start: int) -> None:
        super().__init__(source)
        self._start = at_least(start, np.iinfo(np.int64).min, "start")

    def _iter(self) -> Iterator[Any]:
        for number, element in enumerate(self._source._iter(), start=self._start):
            yield np.asarray(number, np.int64), element

    def _make_spec(self) -> Any:
        return TensorSpec((), np.int64), self._source.element_spec


@kind
class WithOptions(Transformed):
    """The same elements, with options."""

    def __init__(self, source: Dataset, options: Options) -> None:
        super().__init__(source)
        if not isinstance(options, Options):
            raise TypeError(f"with_options needs tf.data.Options, not {type(options).__name__}")
        self._own = Options().merge(options)  # a copy: theirs may be changed later

    def _rows(self) -> Rows | None:
        return self._source._rows()

    def _is_at_hand(self) -> bool:
        return self._source._is_at_hand()

    def _iter(self) -> Iterator[Any]:
        return self._source._iter()

    def options(self) -> Options:
        return self._source.options().merge(self._own)


class AssertCardinality(Transformed):
    """The same elements, of which there must be so many."""

    def __init__(self, source: Dataset, expected: int) -> None:
        super().__init__(source)
        self._expected = at_least(expected, INFINITE_CARDINALITY, "expected_cardinality")

    def _iter(self) -> Iterator[Any]:
        count = 0
        for count, element in enumerate(self._source._iter(), start=1):
            if count > self._expected != INFINITE_CARDINALITY:
                raise FailedPreconditionError(
                    f"Input dataset was expected to contain {self._expected} elements but contained at "
                    f"least {count} elements."
                )
            yield element
        if count != self._expected:
            infinite = self._expected == INFINITE_CARDINALITY
            wanted = "an infinite number of" if infinite else self._expected
            raise FailedPreconditionError(
                f"Input dataset was expected to contain {wanted} elements but contained only {count} "
                "elements."
            )

    def cardinality(self) -> int:
        return self._expected


@kind
class Interleave(Transformed):
    """Elements of several datasets in turn, each made of an element."""

    def __init__(
        self,
        source: Dataset,
        function: Callable[..., Any],
        cycle_length: int | None,
        block_length: int,
        num_parallel_calls: int | None,
    ) -> None:
        super().__init__(source)
        if not callable(function):
            raise TypeError(f"interleave needs a function, not {type(function).__name__}")
        self._function = function
        self._cycle = _number_or_auto(
            AUTOTUNE if cycle_length is None else cycle_length, "cycle_length"
        )
        self._block = at_least(block_length, 1, "block_length")
        if num_parallel_calls is not None:
            _number_or_auto(num_parallel_calls, "num_parallel_calls")
        self._ahead = num_parallel_calls is not None

    def _open(self, element: Any) -> Dataset:
        value = as_tensors(element)
        made = self._function(*value) if type(value) is tuple else self._function(value)
        if not isinstance(made, Dataset):
            name = getattr(self._function, "__name__", repr(self._function))
            raise TypeError(
                f"interleave: `map_func` must return a `Dataset` object, {name} returned a "
                f"{type(made).__name__}"
            )
        return made

    def _start(self, element: Any) -> Iterator[Any]:
        made = self._open(element)
        return iter(Prefetcher(made._iter, self._block)) if self._ahead else made._iter()

    def _iter(self) -> Iterator[Any]:
        source = self._source._iter()
        turns: list[Iterator[Any] | None] = [None] * self._cycle
        more = True
        place = 0
        while more or any(turn is not None for turn in turns):
            turn = turns[place]
            if turn is None and more:
                try:
                    element = next(source)
                except StopIteration:
                    more = False
                    continue
                turn = turns[place] = self._start(element)
            if turn is not None:
                got = 0
                for item in itertools.islice(turn, self._block):
                    got += 1
                    yield item
                if got < self._block:
                    turns[place] = turn = None
            place = (place + 1) % self._cycle

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def _make_spec(self) -> Any:
        return _spec_of_result(
            self._source.element_spec, lambda element: self._open(element).element_spec
        )

    def _batch_size(self) -> int | None:
        return None


_END = object()


@kind
class Zip(Dataset):
    """Elements of several datasets side by side."""

    def __init__(self, datasets: Any) -> None:
        self._structure = datasets
        self._datasets = nest.flatten(datasets)
        if not self._datasets:
            raise TypeError("Must pass at least one dataset to `zip`: it needs datasets")
        if not all(isinstance(d, Dataset) for d in self._datasets):
            raise TypeError(f"zip needs datasets, in tuples and dicts, not {datasets!r}")
        if isinstance(datasets, list):
            raise TypeError(
                "Invalid input to `zip`. Inputs are expected to be (nested) structures of "
                "`tf.data.Dataset` objects. Python `list` is not supported and you should use `tuple` "
                "instead."
            )

    def _inputs(self) -> tuple[Dataset, ...]:
        return tuple(self._datasets)

    def _with_inputs(self, inputs: Sequence[Dataset]) -> Dataset:
        return self._copy(_datasets=list(inputs))

    def _batch_size(self) -> int | None:
        sizes = {d._batch_size() for d in self._datasets}
        return sizes.pop() if len(sizes) == 1 else None

    def _iter(self) -> Iterator[Any]:
        turns = [d._iter() for d in self._datasets]
        while True:
            elements: list[Any] = []
            for turn in turns:
                element = next(turn, _END)
                if element is _END:
                    break
                elements.append(element)
            if len(elements) < len(turns):
                break
            yield nest.pack_as(self._structure, elements)
        # All are asked equally often, as in TensorFlow: a cache is complete when its end was seen.
        for turn in turns[len(elements) + 1 :]:
            with contextlib.suppress(Exception):  # of an element that nobody gets
                next(turn, None)

    def cardinality(self) -> int:
        counts = [d.cardinality() for d in self._datasets]
        finite = [c for c in counts if c != INFINITE_CARDINALITY]
        if not finite:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in finite else min(finite)

    def _make_spec(self) -> Any:
        return nest.pack_as(self._structure, [d.element_spec for d in self._datasets])
