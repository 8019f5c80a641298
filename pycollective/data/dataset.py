"""`Dataset`: elements one after the other, and the transformations of them, as ``tf.data``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pycollective import nest
from pycollective.array_backend import copy, is_array
from pycollective.data.rows import Rows
from pycollective.data.spec import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from pycollective.tensor import Tensor, as_tensor

__all__ = ["Dataset", "DatasetIterator", "as_element", "as_tensors"]


def as_element(value: Any, own: bool = False) -> Any:
    """Return a nest of values as a nest of arrays; lists are values, tuples and dicts structure.

    With ``own``, arrays are copied: whoever made them may fill them anew for the next element.
    """
    if isinstance(value, (tuple, dict)):
        children = value.values() if isinstance(value, dict) else value
        return nest.rebuild(value, [as_element(v, own) for v in children])
    array = as_tensor(value).array
    return copy(array) if own and is_array(value) else array


def as_tensors(element: Any) -> Any:
    """Return a nest of arrays as a nest of tensors."""
    return nest.map_structure(Tensor, element)


class DatasetIterator:
    """One pass over a dataset; `close`, or dropping it, ends the threads that work for it."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        return as_tensors(next(self._elements))

    def get_next(self) -> Any:
        """Return the next element; at the end raises StopIteration."""
        return next(self)

    def close(self) -> None:
        """End the pass."""
        self._elements = iter(())


class Dataset:
    """A sequence of elements: nests (tuples, dicts) of tensors.

    Iterating starts from the beginning each time. Make one with `from_tensor_slices`,
    `from_tensors`, `from_generator` or `range`; every transformation returns a new dataset and
    leaves this one as it was.

    A new transformation is a class in ``transformations.py`` with two methods.
    """

    # What a kind of dataset writes --------------------------------------------------------------

    def _iter(self) -> Iterator[Any]:
        """Yield the elements as nests of arrays."""
        raise NotImplementedError

    def cardinality(self) -> int:
        """Return the number of elements; -1: infinite, -2: unknown."""
        return UNKNOWN_CARDINALITY

    def _rows(self) -> Rows | None:
        """Return the elements as rows of arrays that are in memory, if that is what they are."""
        return None

    def _make_spec(self) -> Any:
        """Return the spec of the elements, without making any: a pass has effects."""
        raise NotImplementedError

    def _batch_size(self) -> int | None:
        """Return the number of rows of each element but perhaps the last, if it is known."""
        return None

    # For everyone -------------------------------------------------------------------------------

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self._iter())

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Yield the elements as nests of NumPy arrays."""
        for element in self._iter():
            yield nest.map_structure(lambda a: Tensor(a).numpy(), element)

    @property
    def element_spec(self) -> Any:
        """Shape and dtype of each tensor of an element, in the elements' structure.

        One `TensorSpec` of unknown shape and dtype where not even the structure is known: after
        `from_generator` without a signature, and after `map` with a function that fails on zeros.
        """
        if not hasattr(self, "_spec"):
            self._spec = self._make_spec()
        return self._spec

    def __len__(self) -> int:
        count = self.cardinality()
        if count == INFINITE_CARDINALITY:
            raise TypeError("The dataset is infinite.")
        if count == UNKNOWN_CARDINALITY:
            raise TypeError("The dataset length is unknown.")
        return count

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lstrip('_')} dataset of {self.cardinality()} elements>"

    # Sources ------------------------------------------------------------------------------------

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """Return a dataset whose elements are the rows of arrays, along their first axis.

        The arrays are shared, not copied: do not write to them as long as the dataset is in use.

        Raises
        ------
        ValueError
            If an array has no axis, or the arrays differ in length.
        """
        return sources.TensorSlices(tensors)

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """Return a dataset of one element."""
        return sources.SingleElement(tensors)

    @staticmethod
    def from_generator(
        generator: Callable[..., Any], output_signature: Any = None, args: tuple[Any, ...] = ()
    ) -> Dataset:
        """Return a dataset of what ``generator(*args)`` yields, called anew for each iteration.

        With ``output_signature``, a nest of `TensorSpec`, Python's numbers and arrays are converted
        where that loses nothing, and elements that do not fit raise a TypeError. Arrays are copied.
        """
        return sources.Generated(generator, output_signature, args)

    @staticmethod
    def range(*args: int, output_type: Any = "int64") -> Dataset:
        """Return a dataset of the numbers of Python's ``range(*args)``."""
        return sources.Numbers(args, output_type)

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Return a dataset of tuples of elements; it ends with the shortest of ``datasets``."""
        return transformations.Zip(datasets[0] if len(datasets) == 1 else datasets)

    # Transformations ----------------------------------------------------------------------------

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Dataset:
        """Return the elements in a random order.

        Each is drawn from a buffer of the next ``buffer_size`` elements; a buffer as large as the
        dataset gives every order the same chance. Every iteration has another order unless
        ``reshuffle_each_iteration`` is False; equal seeds give equal orders.
        """
        return transformations.Shuffle(self, buffer_size, seed, reshuffle_each_iteration)

    def batch(
        self, batch_size: int, drop_remainder: bool = False, num_parallel_calls: Any = None
    ) -> Dataset:
        """Join ``batch_size`` elements at a time along a new first axis."""
        return transformations.Batch(self, batch_size, drop_remainder)

    def repeat(self, count: int | None = None) -> Dataset:
        """Return the dataset ``count`` times over; None or -1: for ever."""
        return transformations.Repeat(self, count)

    def prefetch(self, buffer_size: int) -> Dataset:
        """Make elements ahead in a thread, ``buffer_size`` of them (-1: two)."""
        return transformations.Prefetch(self, buffer_size)

    def map(self, map_func: Callable[..., Any], num_parallel_calls: int | None = None) -> Dataset:
        """Apply a function to every element; tuples become its arguments.

        With ``num_parallel_calls`` (-1: one for each core) it runs in threads; the order stays.
        Arrays that the function returns are copied. `element_spec` calls it with zeros.
        """
        return transformations.Map(self, map_func, num_parallel_calls)

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Keep the elements for which ``predicate`` is true."""
        return transformations.Filter(self, predicate)

    def cache(self) -> Dataset:
        """Keep the elements in memory when they have been made once."""
        return transformations.Cache(self)

    def take(self, count: int) -> Dataset:
        """Return the first ``count`` elements; -1: all."""
        return transformations.Take(self, count)

    def skip(self, count: int) -> Dataset:
        """Return all but the first ``count`` elements; -1: none."""
        return transformations.Skip(self, count)

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return every ``num_shards``-th element, beginning with number ``index``."""
        return transformations.Shard(self, num_shards, index)

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Return this dataset's elements, then another's."""
        return transformations.Concatenate(self, dataset)

    def enumerate(self, start: int = 0) -> Dataset:
        """Return pairs of a number and an element."""
        return transformations.Enumerate(self, start)

    def unbatch(self) -> Dataset:
        """Return the rows of every element."""
        return transformations.Unbatch(self)


# The methods above need these modules, whose classes are kinds of `Dataset`.
from pycollective.data import sources, transformations  # noqa: E402
