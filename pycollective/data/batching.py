"""Batches: join elements, cut rows into other batches, and split batches into rows."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.data.dataset import Dataset, kind
from pycollective.data.rows import Rows, number_of_rows, rebatched, regroup
from pycollective.data.spec import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    UNKNOWN_SPEC,
    TensorSpec,
    component_names,
)
from pycollective.data.transformed import Transformed, at_least
from pycollective.dtypes import string
from pycollective.errors import DataLossError, InvalidArgumentError

# Copying this many bytes of rows takes about 50 µs, as long as handing a batch over from a thread.
_CHEAP_BATCH_BYTES = 512 << 10


@kind
class Batch(Transformed):
    """Batches of elements joined along a new first axis."""

    def __init__(self, source: Dataset, batch_size: int, drop_remainder: bool) -> None:
        super().__init__(source)
        self._size = at_least(batch_size, 1, "batch_size")
        self._drop = drop_remainder

    def _is_cheap(self) -> bool:
        rows = self._source._rows()
        if rows is None:
            return False
        return not rows.results and self._size * rows.bytes_of_a_row() <= _CHEAP_BATCH_BYTES

    def _iter(self) -> Iterator[Any]:
        rows = self._source._rows()
        if rows is not None:
            for indices in regroup(rows.blocks(), self._size, self._drop):
                yield rows.take(indices)
            return
        if isinstance(self._source, Unbatch):
            yield from rebatched(
                self._source._source._iter(), itertools.repeat(self._size), self._drop
            )
            return
        for batch in _lists(self._source._iter(), self._size, self._drop):
            yield nest.map_structure(_stack, component_names(batch[0]), *batch)

    def _known_length(self) -> int:
        return _number_of_batches(self._source._known_length(), self._size, self._drop)

    def _make_spec(self) -> Any:
        rows = self._size if self._drop else None
        return nest.map_structure(
            lambda s: TensorSpec(None if s.shape is None else (rows, *s.shape), s.dtype),
            self._source.element_spec,
        )

    def _batch_size(self) -> int | None:
        return self._size


def _number_of_batches(elements: int, size: int, drop_remainder: bool) -> int:
    if elements < 0:
        return elements
    return elements // size if drop_remainder else -(-elements // size)


def _lists(elements: Iterator[Any], size: int, drop_remainder: bool) -> Iterator[list[Any]]:
    """Yield lists of ``size`` elements."""
    while batch := list(itertools.islice(elements, size)):
        if len(batch) < size and drop_remainder:
            return
        yield batch


def _stack(name: str, *arrays: Any) -> Any:
    first = arrays[0]
    if isinstance(first, Dataset):
        raise TypeError(
            f"cannot batch datasets: {name} is one, as after window(); batch the elements of each with "
            "flat_map(lambda w: w.batch(n))"
        )
    for number, other in enumerate(arrays):
        _check_alike(name, first, other)
        if other.shape != first.shape:
            raise InvalidArgumentError(
                f"cannot batch elements of different shapes: {name} has shape {first.shape} and "
                f"{other.shape}. Cannot batch tensors with different shapes in component {name}. First "
                f"element had shape {[*first.shape]} and element {number} had shape {[*other.shape]}; "
                "padded_batch() pads them"
            )
    return np.stack(arrays)


def _check_alike(name: str, one: Any, other: Any) -> None:
    if nest.is_nested(other):
        raise ValueError(
            f"cannot batch elements of different structures: {name} is a tensor and a "
            f"{type(other).__name__}"
        )
    if other.dtype != one.dtype:
        raise TypeError(
            f"cannot batch elements of different dtypes: {name} is {one.dtype} and {other.dtype}; "
            "cast() them in map(), or give from_generator an output_signature"
        )


@kind
class PaddedBatch(Transformed):
    """Batches of elements padded to one shape and joined along a new first axis."""

    def __init__(
        self, source: Dataset, batch_size: int, shapes: Any, values: Any, drop_remainder: bool
    ) -> None:
        super().__init__(source)
        self._size = at_least(batch_size, 1, "batch_size")
        self._shapes = shapes
        self._values = values
        self._drop = drop_remainder
        self._check(source.element_spec)

    def _check(self, spec: Any) -> None:
        """Raise errors about shapes and values early, if the elements' spec is known."""
        if spec == UNKNOWN_SPEC:
            return
        for name, leaf, shape, value in self._components(spec):
            if leaf.shape is not None:
                _padded_shape(name, [leaf.shape], shape)
            if leaf.dtype is not None:
                _padding_value(name, value, leaf.dtype)

    def _components(self, like: Any) -> list[tuple[str, Any, Any, Any]]:
        """Return each component's name, the component, its padded shape, and its padding value."""
        leaves = nest.flatten(like)
        shapes = [None] * len(leaves) if self._shapes is None else _spread(like, self._shapes)
        whole = not nest.is_nested(self._values) and np.ndim(self._values) == 0
        values = [self._values] * len(leaves) if whole else _spread(like, self._values)
        return list(zip(nest.flatten(component_names(like)), leaves, shapes, values, strict=True))

    def _iter(self) -> Iterator[Any]:
        for batch in _lists(self._source._iter(), self._size, self._drop):
            # Functions may return dicts whose keys are in another order.
            alike = (nest.map_structure(lambda _, leaf: leaf, batch[0], e) for e in batch)
            columns = zip(*map(nest.flatten, alike), strict=True)
            parts = zip(self._components(batch[0]), columns, strict=True)
            yield nest.pack_as(batch[0], [self._join(*c, arrays) for c, arrays in parts])

    def _join(self, name: str, first: Any, shape: Any, value: Any, arrays: Any) -> Any:
        for other in arrays:
            _check_alike(name, first, other)
        wanted = [
            max(a.shape[axis] for a in arrays) if length is None else length
            for axis, length in enumerate(_padded_shape(name, [a.shape for a in arrays], shape))
        ]
        out = np.full((len(arrays), *wanted), _padding_value(name, value, first.dtype), first.dtype)
        for target, array in zip(out, arrays, strict=True) if wanted else ():
            target[tuple(slice(n) for n in array.shape)] = array
        return out if wanted else np.stack(arrays)

    def _known_length(self) -> int:
        return _number_of_batches(self._source._known_length(), self._size, self._drop)

    def _make_spec(self) -> Any:
        spec = self._source.element_spec
        if spec == UNKNOWN_SPEC:
            return UNKNOWN_SPEC

        def padded(name: str, leaf: TensorSpec, shape: Any, _value: Any) -> TensorSpec:
            if leaf.shape is None and shape is None:
                return TensorSpec(None, leaf.dtype)
            known_shapes = [leaf.shape] if leaf.shape is not None else []
            lengths = _padded_shape(name, known_shapes, shape)
            if shape is None:
                # Elements are padded to the longest one, whose lengths are those of the spec.
                lengths = list(leaf.shape or ())
            return TensorSpec((self._size if self._drop else None, *lengths), leaf.dtype)

        return nest.pack_as(spec, [padded(*component) for component in self._components(spec)])

    def _batch_size(self) -> int | None:
        return self._size


def _spread(like: Any, values: Any) -> list[Any]:
    """Return the part of ``values`` for each leaf of ``like``; both have the same structure."""
    if not nest.is_nested(like):
        return [values]
    keys = list(like) if isinstance(like, dict) else range(len(like))
    fits = set(values) == set(keys) if isinstance(values, dict) else not isinstance(like, dict)
    if not fits or not hasattr(values, "__getitem__") or len(values) != len(like):
        raise ValueError(
            f"padded_batch: {values!r} does not have the structure of the elements, which have "
            f"{len(like)} components: {component_names(like)!r}"
        )
    return [v for k in keys for v in _spread(like[k], values[k])]


def _padded_shape(
    name: str, found: Sequence[tuple[int | None, ...]], shape: Any
) -> list[int | None]:
    """Return the padded lengths; None means as long as the longest element."""
    if shape is None:
        shape = [None] * len(found[0])
    elif np.ndim(shape) == 0:  # one axis
        shape = [shape]
    lengths = [None if n is None or int(n) == -1 else int(n) for n in shape]
    for one in found:
        if len(one) != len(lengths):
            raise ValueError(
                f"The padded shape {tuple(lengths)} is not compatible with the shape {one} of the "
                f"corresponding input component, {name}."
            )
        if any(
            n is not None and m is not None and m > n for n, m in zip(lengths, one, strict=True)
        ):
            raise DataLossError(
                f"Attempted to pad to a smaller size than the input element: {name} has shape {one}, "
                f"its padded shape is {tuple(lengths)}."
            )
    return lengths


def _padding_value(name: str, value: Any, dtype: Any) -> Any:
    if value is None:
        return b"" if dtype == string else np.zeros((), dtype)
    if dtype == string and isinstance(value, (str, bytes)):
        return value.encode() if isinstance(value, str) else value
    given = np.asarray(value)
    with np.errstate(invalid="ignore"):
        made = given.astype(dtype) if given.dtype.kind in "biuf" and dtype != string else given
    if made.dtype != dtype or (dtype.kind in "biu" and made != given):
        raise TypeError(
            f"Invalid `padding_values`. `padding_values` values type {given.dtype} does not match type "
            f"{dtype} of the corresponding input component, {name}: {value!r}"
        )
    return made


@kind
class Rebatch(Transformed):
    """The rows of batches in batches of other sizes, which are used in turn."""

    def __init__(self, source: Dataset, sizes: Any, drop_remainder: bool) -> None:
        super().__init__(source)
        one = np.ndim(sizes) == 0
        least = 1 if one else 0
        self._sizes = [at_least(n, least, "batch_size") for n in ([sizes] if one else sizes)]
        if not any(self._sizes):
            raise ValueError(
                f"batch_size must be a number above 0, or a list with such a number, not {sizes!r}"
            )
        self._drop = drop_remainder
        for leaf in nest.flatten(source.element_spec):
            if leaf.shape == ():
                raise ValueError(
                    "Invalid `batch_sizes`. Expected dataset with rank of >= 1 but found a dataset with "
                    "scalar elements. Fix the issue by adding the `batch` transformation to the "
                    "dataset."
                )

    def _is_cheap(self) -> bool:
        return self._source._is_cheap()

    def _iter(self) -> Iterator[Any]:
        return rebatched(self._source._iter(), itertools.cycle(self._sizes), self._drop)

    def _known_length(self) -> int:
        count = self._source._known_length()
        return count if count == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY

    def _make_spec(self) -> Any:
        size = self._sizes[0] if len(set(self._sizes)) == 1 else None

        def cut(s: TensorSpec) -> TensorSpec:
            if s.shape is None:
                return s
            whole = self._drop or (
                size is not None and s.shape[0] is not None and not s.shape[0] % size
            )
            return TensorSpec((size if whole else None, *s.shape[1:]), s.dtype)

        return nest.map_structure(cut, self._source.element_spec)

    def _batch_size(self) -> int | None:
        return None


class RebatchByBatch(Transformed):
    """Each batch cut into equal parts, the last ones shorter or empty, each component by itself."""

    def __init__(self, source: Dataset, parts: int) -> None:
        super().__init__(source)
        self._parts = parts

    def _is_cheap(self) -> bool:
        return self._source._is_cheap()

    def _iter(self) -> Iterator[Any]:
        for batch in self._source._iter():
            if 0 in map(operator.attrgetter("ndim"), nest.flatten(batch)):
                self._raise_unbatched(batch)
            for part in range(self._parts):
                yield nest.map_structure(partial(self._cut, part), batch)

    def _raise_unbatched(self, batch: Any) -> None:
        names = zip(nest.flatten(component_names(batch)), nest.flatten(batch), strict=True)
        scalar = next(name for name, leaf in names if leaf.ndim == 0)
        raise InvalidArgumentError(
            "Cannot rebatch dataset: All components must have at least one dimension. Perhaps your "
            f"input dataset is not batched? Component {scalar} is scalar. Call the `batch` method on "
            "the input Dataset in order to be able to split your input across "
            f"{self._parts} replicas."
        )

    def _cut(self, part: int, array: Any) -> Any:
        size = -(-len(array) // self._parts)
        return array[part * size : (part + 1) * size]

    def _known_length(self) -> int:
        count = self._source._known_length()
        return count if count < 0 else count * self._parts

    def _make_spec(self) -> Any:
        def cut(s: TensorSpec) -> TensorSpec:
            if s.shape is None:
                return s
            rows = s.shape[0]
            part = None if rows is None or rows % self._parts else rows // self._parts
            return TensorSpec((part, *s.shape[1:]), s.dtype)

        return nest.map_structure(cut, self._source.element_spec)

    def _batch_size(self) -> int | None:
        return None


@kind
class Unbatch(Transformed):
    """The rows of all elements."""

    def __init__(self, source: Dataset) -> None:
        super().__init__(source)
        spec = source.element_spec
        for name, leaf in zip(nest.flatten(component_names(spec)), nest.flatten(spec), strict=True):
            if leaf.shape == ():
                raise ValueError(
                    f"Cannot unbatch an input with scalar components: {name} has no first axis"
                )

    def _rows(self) -> Rows | None:
        batches = self._source
        rows = batches._source._rows() if isinstance(batches, Batch) else None
        if rows is None or not isinstance(batches, Batch):
            return None
        if not batches._drop:
            return rows
        source = rows.blocks
        return replace(rows, blocks=lambda: regroup(source(), batches._size, True))

    def _iter(self) -> Iterator[Any]:
        for batch in self._source._iter():
            for i in range(number_of_rows(batch)):
                yield nest.map_structure(lambda a, i=i: a[i, ...], batch)

    def _known_length(self) -> int:
        count = self._source._known_length()
        if count <= 0:
            return count
        if isinstance(self._source, Batch) and not self._source._drop:
            return self._source._source._known_length()
        lengths = {
            s.shape[0] if s.shape is not None and len(s.shape) else None
            for s in nest.flatten(self._source.element_spec)
        }
        length = lengths.pop() if len(lengths) == 1 else None
        return UNKNOWN_CARDINALITY if length is None else count * length

    def _make_spec(self) -> Any:
        return nest.map_structure(
            lambda s: TensorSpec(s.shape and s.shape[1:], s.dtype), self._source.element_spec
        )

    def _batch_size(self) -> int | None:
        return None
