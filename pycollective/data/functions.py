"""Transformations that call a function of the program: `Map`, `Filter` and `Interleave`."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.data.background import Prefetcher
from pycollective.data.by_rows import arrays_read, result_by_rows
from pycollective.data.dataset import Dataset, as_element, kind
from pycollective.data.rows import Rows
from pycollective.data.spec import (
    AUTOTUNE,
    UNKNOWN_CARDINALITY,
    UNKNOWN_SPEC,
    TensorSpec,
    common_spec,
    spec_of,
)
from pycollective.data.transformed import (
    Transformed,
    at_least,
    called,
    checked_function,
    number_or_auto,
)
from pycollective.dtypes import string
from pycollective.tensor import as_tensor, random

__all__ = ["Filter", "Interleave", "Map"]

# Handing an element to a thread and back costs about half of this, and threads take the GIL in turns.
_HAND_OVER_SECONDS = 1e-4


@kind
class Map(Transformed):
    """The results of a function for each element."""

    def __init__(
        self, source: Dataset, function: Callable[..., Any], num_parallel_calls: int | None
    ) -> None:
        super().__init__(source)
        self._function = checked_function("map", function)
        calls = 1 if num_parallel_calls is None else num_parallel_calls
        self._parallel = number_or_auto(calls, "num_parallel_calls")

    def _call(self, element: Any) -> Any:
        made = called(self._function, element)
        if isinstance(made, list):
            # As in TensorFlow, a list's items are components; stack() joins them.
            made = tuple(made)
        try:
            return as_element(made, own=True)
        except (TypeError, ValueError) as error:
            name = getattr(self._function, "__name__", repr(self._function))
            raise TypeError(f"map: {name} returned no valid element: {error}") from error

    def _rows(self) -> Rows | None:
        rows = self._source._rows()
        if rows is None:
            return None
        arrays = arrays_read(self._function)
        if arrays is None:
            return None
        mapped = replace(rows, results=(*rows.results, self._result))
        before = [array.tobytes() for array in arrays]
        computes = self._computes_rows(mapped)
        return mapped if computes and before == [array.tobytes() for array in arrays] else None

    def _result(self, rows: Any) -> Any:
        return result_by_rows(self._call, rows)

    @staticmethod
    def _computes_rows(mapped: Rows) -> bool:
        """Return True if the function computes the first two rows in one call."""
        length = len(nest.flatten(mapped.columns)[0])
        try:
            with np.errstate(all="ignore"):
                mapped.take(np.arange(min(2, length)))
        except Exception:  # calls for single rows show whether it is an error
            return False
        return True

    def _iter(self) -> Iterator[Any]:
        rows = self._rows()
        if rows is not None:
            return rows.elements()
        if self._parallel == 1:
            # map() would end silently if the function raised StopIteration.
            return (self._call(element) for element in self._source._iter())
        return self._iter_in_threads()

    def _iter_in_threads(self) -> Iterator[Any]:
        pool = ThreadPoolExecutor(self._parallel, thread_name_prefix="pycollective-map")
        waiting: deque[Future[Any]] = deque()
        failure: Exception | None = None
        source = self._source._iter()
        short = 0  # calls in succession that were too short for a thread
        try:
            while True:
                in_threads = short <= 2 * self._parallel
                while in_threads and failure is None and len(waiting) <= self._parallel:
                    try:
                        waiting.append(pool.submit(self._timed, next(source)))
                    except Exception as error:  # raised below, after the elements before it
                        failure = error
                if waiting:
                    made, seconds = waiting.popleft().result()
                elif failure is None:
                    try:
                        element = next(source)
                    except Exception as error:
                        failure = error
                        continue
                    made, seconds = self._timed(element)
                else:
                    break
                short = short + 1 if seconds < _HAND_OVER_SECONDS else 0
                yield made
            if not isinstance(failure, StopIteration):
                raise failure
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _timed(self, element: Any) -> tuple[Any, float]:
        begin = time.perf_counter()
        return self._call(element), time.perf_counter() - begin

    def _make_spec(self) -> Any:
        return _spec_of_result(
            self._source.element_spec, lambda element: spec_of(self._call(element))
        )

    def _batch_size(self) -> int | None:
        return None


def _spec_of_result(source: Any, result: Callable[[Any], Any]) -> Any:
    """Return the spec of a function's result; ``result`` calls the function and returns the spec.

    The function is called with zeros, where unknown lengths are 1, and with various numbers, where
    they are 13. Ones replace numbers that it refuses, such as indices of nothing. Lengths of the result
    that differ are unknown. If the results have different numbers of axes, which happens if the
    function drops axes of length 1, 2 replaces 1.
    """
    if any(s.shape is None or s.dtype is None for s in nest.flatten(source)):
        return UNKNOWN_SPEC

    def made_of(unknown: int, fill: Callable[[list[int], Any], Any] = _zeros) -> Any:
        def filled(s: TensorSpec) -> Any:
            return fill([unknown if n is None else n for n in s.shape or ()], s.dtype)

        return result(nest.map_structure(filled, source))

    try:
        with random.generator_scope(np.random.default_rng(0)):
            for fill in (_various, _ones, _zeros):
                try:
                    large = made_of(13, fill)
                    break
                except Exception:  # such as a table with one row
                    if fill is _zeros:
                        raise
            spec = common_spec(made_of(1), large)
            whole = all(s.shape is not None for s in nest.flatten(spec))
            return spec if whole else common_spec(made_of(2), large)
    except Exception:  # the function may fail for zeros only
        return UNKNOWN_SPEC


def _zeros(shape: list[int], dtype: Any) -> Any:
    return np.full(shape, b"" if dtype == string else 0, dtype)


def _ones(shape: list[int], dtype: Any) -> Any:
    return np.full(shape, b"1 1" if dtype == string else 1, dtype)


def _various(shape: list[int], dtype: Any) -> Any:
    """Return an array whose elements differ: 37, 74, 10, 47 …, and fractions of both signs."""
    if dtype == string:
        return np.full(shape, b"1 2 3", string)
    numbers = np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape) * 37 % 101
    if dtype == np.bool_:
        return numbers % 2 == 1
    inexact = np.issubdtype(dtype, np.inexact) or dtype.kind == "V"
    return ((numbers - 50) / 10 if inexact else numbers).astype(dtype)


@kind
class Filter(Transformed):
    """The elements for which a function returns True."""

    def __init__(self, source: Dataset, predicate: Callable[..., Any]) -> None:
        super().__init__(source)
        self._predicate = checked_function("filter", predicate)

    def _iter(self) -> Iterator[Any]:
        for element in self._source._iter():
            answer = called(self._predicate, element)
            said = as_tensor(answer)
            if said.shape != () or said.dtype != np.bool_:
                raise TypeError(f"filter: the predicate must return one bool, not {answer!r}")
            if said:
                yield element

    def _known_length(self) -> int:
        return UNKNOWN_CARDINALITY


@kind
class Interleave(Transformed):
    """Elements of several datasets in turn, each dataset made from an element."""

    def __init__(
        self,
        source: Dataset,
        function: Callable[..., Any],
        cycle_length: int | None,
        block_length: int,
        num_parallel_calls: int | None,
    ) -> None:
        super().__init__(source)
        self._function = checked_function("map_func", function)
        self._cycle = number_or_auto(
            AUTOTUNE if cycle_length is None else cycle_length, "cycle_length"
        )
        self._block = at_least(block_length, 1, "block_length")
        if num_parallel_calls is not None:
            number_or_auto(num_parallel_calls, "num_parallel_calls")
        self._ahead = num_parallel_calls is not None

    def _open(self, element: Any) -> Dataset:
        made = called(self._function, element)
        if not isinstance(made, Dataset):
            name = getattr(self._function, "__name__", repr(self._function))
            raise TypeError(
                f"`map_func` must return a `Dataset` object, {name} returned a "
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

    def _known_length(self) -> int:
        return UNKNOWN_CARDINALITY

    def _make_spec(self) -> Any:
        return _spec_of_result(
            self._source.element_spec, lambda element: self._open(element).element_spec
        )

    def _batch_size(self) -> int | None:
        return None
