"""Where elements come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.data.dataset import Dataset, as_element
from pycollective.data.rows import Rows
from pycollective.data.spec import TensorSpec, spec_of

__all__ = ["Generated", "Numbers", "SingleElement", "TensorSlices"]


class TensorSlices(Dataset):
    """The rows of arrays."""

    def __init__(self, tensors: Any) -> None:
        self._columns = as_element(tensors)
        leaves = nest.flatten(self._columns)
        if not leaves:
            raise ValueError("from_tensor_slices needs at least one array")
        for leaf in leaves:
            if leaf.ndim == 0:
                raise ValueError("from_tensor_slices needs arrays with a first axis, not scalars")
            if len(leaf) != len(leaves[0]):
                raise ValueError(
                    "from_tensor_slices: the arrays have different lengths along their first axis: "
                    f"{len(leaves[0])} (shape {leaves[0].shape}) and {len(leaf)} (shape {leaf.shape})"
                )
        self._length = len(leaves[0])

    def _rows(self) -> Rows:
        return Rows(self._columns, lambda: iter([np.arange(self._length)]))

    def _iter(self) -> Iterator[Any]:
        return self._rows().elements()

    def cardinality(self) -> int:
        """Return the length of the arrays."""
        return self._length

    def _make_spec(self) -> Any:
        return nest.map_structure(lambda a: TensorSpec(a.shape[1:], a.dtype), self._columns)


class SingleElement(Dataset):
    """One element."""

    def __init__(self, tensors: Any) -> None:
        self._element = as_element(tensors)

    def _iter(self) -> Iterator[Any]:
        yield self._element

    def cardinality(self) -> int:
        """Return 1."""
        return 1

    def _make_spec(self) -> Any:
        return spec_of(self._element)


class Generated(Dataset):
    """What a function yields."""

    def __init__(
        self, generator: Callable[..., Any], signature: Any, args: tuple[Any, ...]
    ) -> None:
        if not callable(generator):
            raise TypeError("from_generator needs a function that returns an iterator, so that it can "
                            f"begin anew; got {type(generator).__name__}")
        self._generator = generator
        self._signature = signature
        self._args = args

    def _iter(self) -> Iterator[Any]:
        for value in self._generator(*self._args):
            yield self._checked(value) if self._signature is not None else as_element(value)

    def _checked(self, value: Any) -> Any:
        def check(spec: TensorSpec, item: Any) -> Any:
            array = np.asarray(item, spec.dtype) if not hasattr(item, "dtype") else as_element(item)
            if not spec.accepts(array):
                raise TypeError(
                    f"the generator yielded {array.dtype}{list(array.shape)}, and output_signature "
                    f"says {spec}"
                )
            return array

        return nest.map_structure(check, self._signature, value)

    def _make_spec(self) -> Any:
        return super()._make_spec() if self._signature is None else self._signature


class Numbers(Dataset):
    """The numbers of a range."""

    def __init__(self, args: tuple[int, ...], output_type: Any) -> None:
        self._numbers = np.arange(*args, dtype=output_type) if args else None
        if self._numbers is None:
            raise TypeError("Dataset.range takes 1 to 3 arguments, as Python's range")

    def _rows(self) -> Rows:
        numbers = self._numbers
        assert numbers is not None
        return Rows(numbers, lambda: iter([np.arange(len(numbers))]))

    def _iter(self) -> Iterator[Any]:
        return self._rows().elements()

    def cardinality(self) -> int:
        """Return how many numbers there are."""
        assert self._numbers is not None
        return len(self._numbers)

    def _make_spec(self) -> Any:
        assert self._numbers is not None
        return TensorSpec((), self._numbers.dtype)
