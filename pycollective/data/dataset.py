"""`Dataset`: a sequence of elements, and its transformations, as in ``tf.data``."""

from __future__ import annotations

import copy as copies
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from pycollective import nest
from pycollective.array_backend import copy, is_array
from pycollective.data.optional import NextElements
from pycollective.data.options import Options
from pycollective.data.rows import Rows
from pycollective.data.spec import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    component_names,
    signature_of,
)
from pycollective.dtypes import int64
from pycollective.errors import InvalidArgumentError
from pycollective.tensor import Tensor, TensorShape, as_tensor
from pycollective.tensor.ops.arrays import constant
from pycollective.tensor.text import as_text, is_text


def as_element(value: Any, own: bool = False) -> Any:
    """Return a nest of values as a nest of arrays; tuples and dicts are structure, lists are values.

    With ``own``, arrays are copied, because the caller may reuse their memory for the next element.
    """
    if isinstance(value, (tuple, dict)) and not isinstance(value, TensorShape):
        children = value.values() if isinstance(value, dict) else value
        return nest.rebuild(value, [as_element(v, own) for v in children])
    if isinstance(value, Dataset):  # a window
        return value
    array = as_text(value) if is_text(value) else as_tensor(value).array
    return copy(array) if own and is_array(value) else array


def as_tensors(element: Any) -> Any:
    """Return a nest of arrays as a nest of tensors; windows, which are datasets, are kept."""
    if type(element) is tuple and all(leaf.__class__ is np.ndarray for leaf in element):
        return tuple([Tensor(leaf) for leaf in element])
    return nest.map_structure(lambda a: a if isinstance(a, Dataset) else Tensor(a), element)


#: The kinds of datasets by name, for the methods of `Dataset`. This module cannot import the subclasses,
#: because their modules import it.
_kinds: dict[str, Callable[..., Dataset]] = {}
_Kind = TypeVar("_Kind", bound=Callable[..., Any])


def kind(maker: _Kind) -> _Kind:
    """Register a subclass, or a function that returns a dataset, for the methods of `Dataset`."""
    _kinds[maker.__name__] = maker
    return maker


def _made(name: str, *args: Any) -> Dataset:
    return _kinds[name](*args)


def elements(dataset: Dataset) -> Iterator[Any]:
    """Return an iterator over the elements of a dataset as nests of arrays."""
    return dataset._iter()


def is_cheap(dataset: Dataset) -> bool:
    """Return True if making an element is cheaper than handing it over from a thread."""
    return dataset._is_cheap()


class DatasetIterator(NextElements):
    """One pass over a dataset; `close`, or deleting it, ends the threads that work for it.

    Several threads may take elements from one iterator; each element goes to one of them.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._elements = dataset._iter()
        self._lock = threading.RLock()  # generators refuse a second thread

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        with self._lock:
            element = next(self._elements)
        return as_tensors(element)

    @property
    def element_spec(self) -> Any:
        return self._dataset.element_spec

    def close(self) -> None:
        """End the pass."""
        self._elements = iter(())


class Dataset:
    """A sequence of elements, which are nests (tuples, dicts) of tensors.

    Each iteration starts from the beginning. Make a dataset with `from_tensor_slices`, `from_tensors`,
    `from_generator` or `range`. Every transformation returns a new dataset and leaves this one
    unchanged. To add a transformation, derive a subclass from `Transformed`.
    """

    # Methods that a subclass defines ------------------------------------------------------------

    def _iter(self) -> Iterator[Any]:
        """Yield the elements as nests of arrays."""
        raise NotImplementedError

    def _known_length(self) -> int:
        """Return the number of elements, -1 if infinite, -2 if unknown."""
        return UNKNOWN_CARDINALITY

    def _is_cheap(self) -> bool:
        """Return True if making an element is cheaper than handing it over from a thread."""
        return False

    def _rows(self) -> Rows | None:
        """Return the elements as rows of arrays in memory, or None if they are not such rows."""
        return None

    def _make_spec(self) -> Any:
        """Return the elements' spec, without making elements, because a pass has side effects."""
        raise NotImplementedError

    def _batch_size(self) -> int | None:
        """Return the number of rows of each element (the last may have fewer), or None if unknown."""
        return None

    def _inputs(self) -> tuple[Dataset, ...]:
        """Return the datasets from which this one is made."""
        return ()

    def _with_inputs(self, inputs: Sequence[Dataset]) -> Dataset:
        """Return this dataset made from other datasets."""
        raise NotImplementedError

    def _copy(self, **changed: Any) -> Dataset:
        """Return a copy with some attributes changed, for `_with_inputs`."""
        other = copies.copy(self)
        vars(other).update(changed)
        return other

    # Public methods -----------------------------------------------------------------------------

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self)

    def options(self) -> Options:
        """Return the merged options of this dataset and its inputs."""
        merged = Options()
        for dataset in self._inputs():
            merged = merged.merge(dataset.options())
        return merged

    def reduce(
        self, initial_state: Any, reduce_func: Callable[[Any, Any], Any], name: str | None = None
    ) -> Any:
        """Fold the elements: replace the state by ``reduce_func(state, element)`` for each one.

        Raises
        ------
        InvalidArgumentError
            The function returns another number of tensors than the state has.
        TypeError
            The function changes the dtype of the state.
        """
        if not callable(reduce_func):
            raise TypeError(f"reduce needs a function, not {type(reduce_func).__name__}")
        state = nest.map_structure(as_tensor, initial_state)
        for element in self:
            new = nest.map_structure(as_tensor, reduce_func(state, element))
            one, two = nest.flatten(state, by_key=True), nest.flatten(new, by_key=True)
            if len(one) != len(two):
                raise InvalidArgumentError(
                    "The number of components of the initial state and the reduce function output does "
                    f"not match. (initial_state={len(one)}, output={len(two)})."
                )
            names = nest.flatten(component_names(state, "state"), by_key=True)
            for name, before, after in zip(names, one, two, strict=True):
                if before.dtype != after.dtype:
                    raise TypeError(
                        f"reduce: {name} was {before.dtype}, but reduce_func returned {after.dtype}"
                    )
            state = new
        return state

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return the result of a function of this dataset."""
        made = transformation_func(self)
        if not isinstance(made, Dataset):
            raise TypeError(
                f"`transformation_func` must return a `tf.data.Dataset` object. Got {type(made)}."
            )
        return made

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Yield the elements as nests of NumPy arrays."""
        for element in self._iter():
            if any(isinstance(leaf, Dataset) for leaf in nest.flatten(element)):
                raise TypeError(
                    "as_numpy_iterator() is not supported for datasets whose elements are datasets; "
                    "call it for each of these datasets"
                )
            yield nest.map_structure(lambda a: Tensor(a).numpy(), element)

    @property
    def element_spec(self) -> Any:
        """Shape and dtype of each tensor of an element, in the elements' structure.

        If the structure is unknown, the result is a single `TensorSpec` of unknown shape and dtype.
        Examples are `from_generator` without a signature, and `map` with a function that fails for
        zeros.
        """
        if not hasattr(self, "_spec"):
            self._spec = self._make_spec()
        return self._spec

    def cardinality(self) -> Tensor:
        """Return the number of elements as int64, -1 if infinite, -2 if unknown."""
        return constant(self._known_length(), int64)

    def __len__(self) -> int:
        count = self._known_length()
        if count == INFINITE_CARDINALITY:
            raise TypeError("The dataset is infinite.")
        if count == UNKNOWN_CARDINALITY:
            raise TypeError("The dataset length is unknown.")
        return count

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lstrip('_')} dataset of {self._known_length()} elements>"

    # Sources ------------------------------------------------------------------------------------

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> Dataset:
        """Return a dataset whose elements are the rows of arrays, along their first axis.

        Arrays in C order are shared, not copied: do not write to them while the dataset is in use.
        """
        return _made("TensorSlices", tensors)

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> Dataset:
        """Return a dataset of one element."""
        return _made("SingleElement", tensors)

    @staticmethod
    def from_generator(
        generator: Callable[..., Any],
        output_types: Any = None,
        output_shapes: Any = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Any = None,
        name: str | None = None,
    ) -> Dataset:
        """Return a dataset of the elements that ``generator(*args)`` yields; each pass calls it again.

        With ``output_signature``, a nest of `TensorSpec`, numbers and arrays are converted if that
        loses nothing, and other elements raise a TypeError. Older programs give ``output_types`` and
        ``output_shapes`` instead. Without a signature, elements keep their dtypes and shapes. Arrays are
        copied; the generator gets tensors among ``args`` as NumPy arrays.
        """
        signature = signature_of(output_types, output_shapes, output_signature)
        return _made("Generated", generator, signature, args or ())

    @staticmethod
    def range(*args: int, output_type: Any = "int64") -> Dataset:
        """Return a dataset of the numbers of Python's ``range(*args)``."""
        return _made("Range", args, output_type)

    @staticmethod
    def list_files(
        file_pattern: Any,
        shuffle: bool | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Return a dataset of the names of the files that match patterns.

        Parameters
        ----------
        file_pattern : str or list of str
            Patterns of `glob`.
        shuffle : bool, optional
            False: the names are sorted. By default they are in a random order, a new one for each
            iteration.
        seed : int, optional
            As in `shuffle`. Workers need a seed to have the same order.

        Raises
        ------
        InvalidArgumentError
            If no file matches.
        """
        names = _made("matching_files", file_pattern)
        return names if shuffle is not None and not shuffle else names.shuffle(len(names), seed)

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """Return a dataset of tuples of elements; it ends with the shortest of the datasets.

        The arguments are datasets, or one tuple or dict of datasets. The elements then have its
        structure.
        """
        if args and datasets is not None:
            raise TypeError("Both `*args` and `datasets` cannot be set.")
        if datasets is None:
            datasets = args[0] if len(args) == 1 else args
        return _made("Zip", datasets)

    # Transformations ----------------------------------------------------------------------------

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Return the elements in a random order.

        Each element is drawn from a buffer of the next ``buffer_size`` elements. With a buffer as large
        as the dataset all orders are equally likely. Every iteration has a new order unless
        ``reshuffle_each_iteration`` is False; equal seeds give equal orders.
        """
        again = reshuffle_each_iteration is None or reshuffle_each_iteration
        return _made("Shuffle", self, buffer_size, seed, again)

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: Any = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Join ``batch_size`` elements at a time along a new first axis.

        With ``drop_remainder``, a last batch with fewer elements is left out. The other parameters
        are ignored, for TensorFlow's programs.
        """
        return _made("Batch", self, batch_size, drop_remainder)

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Join elements of different shapes, padded to the longest of each batch.

        Parameters
        ----------
        batch_size : int
            Number of elements of a batch.
        padded_shapes : nest of shapes, optional
            The padded shapes; None or -1, the default, means the longest of the batch.
        padding_values : number or nest of numbers, optional
            The padding, by default zero.
        drop_remainder : bool
            Leave out a last batch with fewer elements.

        Raises
        ------
        DataLossError
            An element is larger than its padded shape.
        ValueError
            A padded shape has another number of axes than the elements.
        TypeError
            A padding value cannot be converted to the elements' dtype.
        """
        return _made("PaddedBatch", self, batch_size, padded_shapes, padding_values, drop_remainder)

    def rebatch(
        self, batch_size: Any, drop_remainder: bool = False, name: str | None = None
    ) -> Dataset:
        """Cut the rows of batches into batches of another number of rows.

        ``batch_size`` may be a list of numbers, which are used in turn. A 0 in the list gives an
        empty batch.
        """
        return _made("Rebatch", self, batch_size, drop_remainder)

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """Repeat the dataset ``count`` times; None or -1: for ever."""
        return _made("Repeat", self, count)

    def prefetch(self, buffer_size: int, name: str | None = None) -> Dataset:
        """Make up to ``buffer_size`` elements ahead in a thread (-1: two)."""
        return _made("Prefetch", self, buffer_size)

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Apply a function to every element; tuples become its arguments.

        With ``num_parallel_calls`` (-1: one for each core) calls longer than 0.1 ms run in threads, and
        the order stays the same. A list that the function returns is a tuple of components, as in
        TensorFlow. Returned arrays are copied. `element_spec`, `padded_batch` and `cache` with a file
        call the function with zeros and with other numbers.

        The function keeps the values that its variables have now. Objects stay shared: the function
        sees a change in an array or a list.

        A function of rows in memory is called once for a block of rows if the results have the same
        bits. The function must have no effect but its result. It computes each element or moves
        elements, as ``x / 255`` and ``one_hot(y, 10)`` do. The function sees a change of an array
        outside of it at the next block.
        """
        return _made("Map", self, map_func, num_parallel_calls)

    def flat_map(self, map_func: Callable[..., Any], name: str | None = None) -> Dataset:
        """Return the elements of the datasets that a function makes from each element."""
        return _made("Interleave", self, map_func, 1, 1, None)

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Make a dataset from each element, and take elements of several of these in turn.

        Parameters
        ----------
        map_func : callable
            A function that returns a dataset, such as the lines of the file with the given name.
        cycle_length : int, optional
            Number of datasets that take turns; by default (and for -1) one for each core.
        block_length : int
            Number of elements that each dataset gives in its turn.
        num_parallel_calls : int, optional
            Read the datasets ahead, each in a thread of its own. The order stays the same.
        deterministic : bool, optional
            Ignored, for TensorFlow's programs: the order never depends on timing.
        """
        return _made("Interleave", self, map_func, cycle_length, block_length, num_parallel_calls)

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """Return the same elements with these options merged over the present ones."""
        return _made("WithOptions", self, options)

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """Keep the elements for which ``predicate`` returns True."""
        return _made("Filter", self, predicate)

    def cache(self, filename: str | os.PathLike[str] = "", name: str | None = None) -> Dataset:
        """Keep the elements after the first pass.

        Parameters
        ----------
        filename : path
            A file for the elements, which a later program reads instead of making them again; by default
            they are kept in memory. The first pass that reaches the end writes the file.

        Raises
        ------
        DataLossError, InvalidArgumentError
            While elements are read: the file is incomplete, or belongs to another dataset.
        """
        return _made("FileCache", self, filename) if filename else _made("Cache", self)

    def take(self, count: int, name: str | None = None) -> Dataset:
        """Return the first ``count`` elements; -1: all."""
        return _made("Take", self, count)

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """Return all elements after the first ``count``; -1: none."""
        return _made("Skip", self, count)

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Return every ``num_shards``-th element, beginning with number ``index``.

        A strategy with `AutoShardPolicy.HINT` replaces the values of ``shard(SHARD_HINT, SHARD_HINT)``.
        """
        return _made("Shard", self, num_shards, index)

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """Return this dataset's elements, followed by another dataset's."""
        return _made("Concatenate", self, dataset)

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Return pairs of a number and an element."""
        return _made("Enumerate", self, start)

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Return datasets of ``size`` elements each, one for each component of the elements.

        Parameters
        ----------
        size : int
            Number of elements of a window; the last windows may have fewer.
        shift : int, optional
            Distance between the first elements of two windows; by default ``size``.
        stride : int
            Distance between the elements of a window.
        drop_remainder : bool
            Leave out windows with fewer elements.
        """
        return _made("Window", self, size, shift, stride, drop_remainder)

    def unbatch(self, name: str | None = None) -> Dataset:
        """Return the rows of all elements."""
        return _made("Unbatch", self)
