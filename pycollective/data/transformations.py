"""Transformations that join datasets, or that keep the elements as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.data.background import Prefetcher
from pycollective.data.dataset import Dataset, kind
from pycollective.data.options import Options
from pycollective.data.rows import Rows
from pycollective.data.spec import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    UNKNOWN_SPEC,
    TensorSpec,
    common_spec,
)
from pycollective.data.transformed import Transformed, at_least
from pycollective.errors import FailedPreconditionError


@kind
class Prefetch(Transformed):
    """Elements made ahead in a thread."""

    def __init__(self, source: Dataset, buffer_size: int) -> None:
        super().__init__(source)
        size = at_least(buffer_size, -1, "buffer_size")
        self._buffer_size = 2 if size < 0 else size

    def _is_cheap(self) -> bool:
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

    def _known_length(self) -> int:
        one, other = self._source._known_length(), self._other._known_length()
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
        self._own = Options().merge(options)  # a copy, because the caller may change its own

    def _rows(self) -> Rows | None:
        return self._source._rows()

    def _is_cheap(self) -> bool:
        return self._source._is_cheap()

    def _iter(self) -> Iterator[Any]:
        return self._source._iter()

    def options(self) -> Options:
        return self._source.options().merge(self._own)


class AssertCardinality(Transformed):
    """The same elements, with an error if their number is not the expected one."""

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

    def _known_length(self) -> int:
        return self._expected


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
        # As in TensorFlow, all inputs are read equally often; a cache needs a read past its end.
        for turn in turns[len(elements) + 1 :]:
            with contextlib.suppress(Exception):  # the element is dropped, so its error is too
                next(turn, None)

    def _known_length(self) -> int:
        counts = [d._known_length() for d in self._datasets]
        finite = [c for c in counts if c != INFINITE_CARDINALITY]
        if not finite:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in finite else min(finite)

    def _make_spec(self) -> Any:
        return nest.pack_as(self._structure, [d.element_spec for d in self._datasets])
