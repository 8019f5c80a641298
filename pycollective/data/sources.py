"""Sources of elements: arrays, generators and ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pycollective import nest
from pycollective.arguments import whole
from pycollective.array_backend import Array, array_module, copy, is_array
from pycollective.data.dataset import Dataset, as_element, kind
from pycollective.data.rows import Rows
from pycollective.data.spec import UNKNOWN_SPEC, TensorSpec, component_names, spec_of
from pycollective.dtypes import as_dtype, string
from pycollective.tensor import Tensor, as_tensor


@kind
class TensorSlices(Dataset):
    """The rows of arrays."""

    def __init__(self, tensors: Any) -> None:
        columns = as_element(tensors)
        leaves = nest.flatten(columns)
        if not leaves:
            raise ValueError("from_tensor_slices needs at least one array")
        for leaf in leaves:
            if isinstance(leaf, Dataset):
                raise TypeError(f"from_tensor_slices needs arrays, not a dataset: {leaf!r}")
            if leaf.ndim == 0:
                raise ValueError("from_tensor_slices needs arrays with a first axis, not scalars")
            if len(leaf) != len(leaves[0]):
                raise ValueError(
                    "from_tensor_slices: the arrays have different lengths along their first axis: "
                    f"{len(leaves[0])} (shape {leaves[0].shape}) and {len(leaf)} (shape "
                    f"{leaf.shape})"
                )
        self._length = len(leaves[0])
        # Without this copy, NumPy would copy an array that is not in C order at each take.
        self._columns = nest.map_structure(lambda a: array_module(a).ascontiguousarray(a), columns)

    def _rows(self) -> Rows | None:
        return Rows(self._columns, lambda: iter([np.arange(self._length)]))

    def _iter(self) -> Iterator[Any]:
        return Rows(self._columns, lambda: iter([np.arange(self._length)])).elements()

    def _known_length(self) -> int:
        return self._length

    def _make_spec(self) -> Any:
        return nest.map_structure(lambda a: TensorSpec(a.shape[1:], a.dtype), self._columns)


@kind
class SingleElement(Dataset):
    """One element."""

    def __init__(self, tensors: Any) -> None:
        self._element = as_element(tensors)

    def _iter(self) -> Iterator[Any]:
        yield self._element

    def _known_length(self) -> int:
        return 1

    def _make_spec(self) -> Any:
        return spec_of(self._element)


@kind
class Generated(Dataset):
    """The elements that a function yields."""

    def __init__(
        self, generator: Callable[..., Any], signature: Any, args: tuple[Any, ...]
    ) -> None:
        if not callable(generator):
            raise TypeError(
                "from_generator needs a function that returns an iterator, so that each pass can "
                f"start again; got {type(generator).__name__}"
            )
        for spec in [] if signature is None else nest.flatten(signature):
            if not isinstance(spec, TensorSpec):
                raise TypeError(
                    f"from_generator: output_signature must be made of TensorSpec, not {spec!r}"
                )
        self._generator = generator
        self._signature = signature
        self._args = args

    def _iter(self) -> Iterator[Any]:
        args = [a.numpy() if isinstance(a, Tensor) else a for a in self._args]
        for number, value in enumerate(self._generator(*args)):
            try:
                yield as_element(value, own=True) if self._signature is None else self._fit(value)
            except (TypeError, ValueError) as error:
                raise TypeError(f"from_generator: element {number}: {error}") from error

    def _fit(self, value: Any) -> Any:
        def fit(name: str, spec: TensorSpec, item: Any) -> Any:
            array = as_element(item) if spec.dtype == string else as_tensor(item, spec.dtype).array
            if not spec.accepts(array):
                raise TypeError(
                    f"{name}: `generator` yielded an element of shape {array.shape} and dtype "
                    f"{array.dtype} where an element of shape {spec.shape} was expected: {spec}"
                )
            return copy(array) if is_array(item) else array

        return nest.map_structure(fit, component_names(self._signature), self._signature, value)

    def _make_spec(self) -> Any:
        return UNKNOWN_SPEC if self._signature is None else self._signature


#: A longer range is not kept in memory, but made in parts by each pass.
_KEPT_NUMBERS, _NUMBERS_AT_ONCE = 1 << 22, 1 << 16


@kind
class Range(TensorSlices):
    """The numbers of a range."""

    def __init__(self, args: tuple[int, ...], output_type: Any) -> None:
        numbers = range(*(whole("a number of Dataset.range", n, -(2**63), 2**63 - 1) for n in args))
        dtype = as_dtype(output_type)
        for number in numbers[:1], numbers[-1:]:
            if dtype.kind == "b" or np.array(number, np.int64).astype(dtype).tolist() != [*number]:
                raise ValueError(f"Dataset.range{args}: {[*number]} does not fit dtype {dtype}")
        self._numbers, self._dtype = numbers, dtype
        self._is_long = len(numbers) > _KEPT_NUMBERS
        super().__init__(self._part(numbers[:1] if self._is_long else numbers))
        self._length = len(numbers)

    def _part(self, numbers: range) -> Array:
        part = np.arange(numbers.start, numbers.stop, numbers.step, dtype=np.int64)
        return part.astype(self._dtype)

    def _rows(self) -> Rows | None:
        return None if self._is_long else super()._rows()

    def _iter(self) -> Iterator[Any]:
        if not self._is_long:
            yield from super()._iter()
            return
        for begin in range(0, self._length, _NUMBERS_AT_ONCE):
            yield from TensorSlices(
                self._part(self._numbers[begin : begin + _NUMBERS_AT_ONCE])
            )._iter()
