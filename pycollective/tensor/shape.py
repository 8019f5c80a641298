"""`TensorShape`: the lengths of a tensor's axes, known or unknown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import index
from typing import Any, SupportsIndex


class TensorShape(tuple[Any, ...]):
    """The lengths of the axes: a tuple with TensorFlow's methods.

    Parameters
    ----------
    dims
        The lengths, of which unknown ones are None; or None if the rank is unknown.

    Raises
    ------
    ValueError
        A length is negative.
    TypeError
        A length is not an integer.

    Notes
    -----
    As in TensorFlow, a shape is true if its rank is known, even if it is a scalar's shape. A shape
    equals a list of the same lengths.
    """

    #: A shape is one value to `pycollective.nest`, though it is a tuple.
    is_leaf_of_nests = True
    # Only a shape of unknown rank has an instance attribute.
    _known = True

    def __new__(cls, dims: Any) -> TensorShape:
        """Make a shape from lengths, one length, another shape, or None."""
        if dims is None or (isinstance(dims, TensorShape) and not dims._known):
            unknown = tuple.__new__(cls)
            unknown._known = False
            return unknown
        items = dims if isinstance(dims, Iterable) else (dims,)
        lengths = tuple(None if n is None else index(n) for n in items)
        if any(n is not None and n < 0 for n in lengths):
            raise ValueError(f"Dimension {min(n for n in lengths if n is not None)} must be >= 0")
        return tuple.__new__(cls, lengths)

    @property
    def rank(self) -> int | None:
        """The number of axes, None if unknown."""
        return tuple.__len__(self) if self._known else None

    @property
    def ndims(self) -> int | None:
        """The number of axes: another name of `rank`."""
        return self.rank

    @property
    def dims(self) -> list[int | None] | None:
        """The lengths as a list, None if the rank is unknown."""
        return list(tuple.__iter__(self)) if self._known else None

    def as_list(self) -> list[int | None]:
        """Return the lengths as a list.

        Raises
        ------
        ValueError
            The rank is unknown.
        """
        if not self._known:
            raise ValueError("as_list() is not defined on an unknown TensorShape.")
        return list(tuple.__iter__(self))

    def num_elements(self) -> int | None:
        """Return the number of elements, None if unknown."""
        return math.prod(self) if self.is_fully_defined() else None

    def is_fully_defined(self) -> bool:
        """Return True if the rank and every length are known."""
        return self._known and None not in tuple.__iter__(self)

    def is_compatible_with(self, other: Any) -> bool:
        """Return True unless two known ranks, or two known lengths of one axis, differ."""
        other = TensorShape(other)
        if not (self._known and other._known):
            return True
        if len(self) != len(other):
            return False
        pairs = zip(tuple.__iter__(self), tuple.__iter__(other), strict=True)
        return all(n is None or m is None or n == m for n, m in pairs)

    def assert_is_compatible_with(self, other: Any) -> None:
        """Raise a ValueError unless `is_compatible_with`."""
        if not self.is_compatible_with(other):
            raise ValueError(f"Shapes {self} and {TensorShape(other)} are incompatible")

    def merge_with(self, other: Any) -> TensorShape:
        """Return the shape with the known lengths of both this and another one.

        Raises
        ------
        ValueError
            The shapes are not compatible.
        """
        that = TensorShape(other)
        if not self._known:
            return that
        if not that._known:
            return self
        if not self.is_compatible_with(that):
            raise ValueError(f"Shapes {self} and {that} are not compatible")
        pairs = zip(tuple.__iter__(self), tuple.__iter__(that), strict=True)
        return TensorShape([m if n is None else n for n, m in pairs])

    def most_specific_compatible_shape(self, other: Any) -> TensorShape:
        """Return the most specific shape that is compatible with both this and another one."""
        other = TensorShape(other)
        if not (self._known and other._known) or len(self) != len(other):
            return TensorShape(None)
        pairs = zip(tuple.__iter__(self), tuple.__iter__(other), strict=True)
        return TensorShape([n if n == m else None for n, m in pairs])

    def concatenate(self, other: Any) -> TensorShape:
        """Return the lengths of this shape followed by those of another one."""
        other = TensorShape(other)
        if not (self._known and other._known):
            return TensorShape(None)
        return TensorShape([*tuple.__iter__(self), *tuple.__iter__(other)])

    def with_rank(self, rank: int) -> TensorShape:
        """Return this shape if it has this rank; else raise a ValueError.

        If the rank is unknown, return a shape of ``rank`` unknown lengths.
        """
        try:
            return self.merge_with([None] * rank)
        except ValueError:
            raise ValueError(f"Shape {self} must have rank {rank}") from None

    def with_rank_at_least(self, rank: int) -> TensorShape:
        """Return this shape unless its rank is below ``rank``; else raise a ValueError."""
        if self.rank is not None and self.rank < rank:
            raise ValueError(f"Shape {self} must have rank at least {rank}")
        return self

    def with_rank_at_most(self, rank: int) -> TensorShape:
        """Return this shape unless its rank is above ``rank``; else raise a ValueError."""
        if self.rank is not None and self.rank > rank:
            raise ValueError(f"Shape {self} must have rank at most {rank}")
        return self

    def assert_has_rank(self, rank: int) -> None:
        """Raise a ValueError unless the rank is ``rank`` or unknown."""
        self.with_rank(rank)

    def assert_same_rank(self, other: Any) -> None:
        """Raise a ValueError if the ranks of this shape and another one differ."""
        other = TensorShape(other)
        if None not in (self.rank, other.rank) and self.rank != other.rank:
            raise ValueError(f"Shapes {self} and {other} must have the same rank")

    def assert_is_fully_defined(self) -> None:
        """Raise a ValueError unless `is_fully_defined`."""
        if not self.is_fully_defined():
            raise ValueError(f"Shape {self} is not fully defined")

    def __bool__(self) -> bool:
        return self._known

    def __len__(self) -> int:
        if not self._known:
            raise ValueError("Cannot take the length of shape with unknown rank.")
        return tuple.__len__(self)

    def __iter__(self) -> Any:
        if not self._known:
            raise ValueError("Cannot iterate over a shape with unknown rank.")
        return tuple.__iter__(self)

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        if self._known:
            found = tuple.__getitem__(self, key)
            return shape_of_array(found) if isinstance(key, slice) else found
        # The number of unknown lengths: as many as the slice selects, if the slice determines it.
        if not isinstance(key, slice):
            return None
        start, stop = key.start or 0, key.stop
        if key.step is not None or stop is None or start < 0 or stop < 0:
            return TensorShape(None)
        return TensorShape([None] * max(0, stop - start))

    def __add__(self, other: Any) -> Any:
        return _joined(self, other) if isinstance(other, (tuple, list)) else self.concatenate(other)

    def __radd__(self, other: Any) -> Any:
        return _joined(other, self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TensorShape):
            return self._known is other._known and tuple.__eq__(self, other)
        if isinstance(other, tuple):
            return self._known and tuple.__eq__(self, other)
        if isinstance(other, list):
            return self._known and tuple.__eq__(self, tuple(other))
        return other is None and not self._known

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __str__(self) -> str:
        return tuple.__repr__(self) if self._known else "<unknown>"

    def __repr__(self) -> str:
        return f"TensorShape({self.dims})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorShape, (self.dims,)


def _joined(one: Any, other: Any) -> Any:
    """Return the lengths of two shapes, one after the other.

    The result is a plain tuple if a length is negative: `reshape` takes -1, a shape does not.
    """
    try:
        return TensorShape(one).concatenate(other)
    except ValueError:
        return (*one, *other)


def shape_of_array(lengths: tuple[int | None, ...]) -> TensorShape:
    """Return valid lengths, such as those of an array, as a `TensorShape`, without checks."""
    return tuple.__new__(TensorShape, lengths)
