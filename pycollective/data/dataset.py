"""`Dataset`: elements one after the other, and the transformations of them, as ``tf.data``."""

from __future__ import annotations

import copy as copies
import os
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
from pycollective.dtypes import string
from pycollective.errors import InvalidArgumentError
from pycollective.tensor import Tensor, TensorShape, as_tensor


def as_element(value: Any, own: bool = False) -> Any:
    """Return a nest of values as a nest of arrays; lists are values, tuples and dicts structure.

    With ``own``, arrays are copied: whoever made them may fill them anew for the next element.
    """
    if isinstance(value, (tuple, dict)) and not isinstance(value, TensorShape):
        children = value.values() if isinstance(value, dict) else value
        return nest.rebuild(value, [as_element(v, own) for v in children])
    if isinstance(value, Dataset):  # a window
        return value
    array = _as_text(value) if _is_text(value) else as_tensor(value).array
    return copy(array) if own and is_array(value) else array


def _is_text(value: Any) -> bool:
    """Whether a value is a string, or a list or an array of strings."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, (str, bytes)) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "SUO"
    )


def _as_text(value: Any) -> Any:
    """Return strings as an array of dtype `string`: Python's bytes, as TensorFlow has them."""
    array = np.asarray(value, string)
    items = [v.encode() if isinstance(v, str) else v for v in array.ravel().tolist()]
    for item in items:
        if not isinstance(item, bytes):
            raise TypeError(
                f"a {type(item).__name__} cannot become a tensor of strings: {item!r}; an array that "
                "is to be a tensor holds numbers or strings"
            )
    text = np.empty(len(items), string)
    text[:] = items
    return text.reshape(array.shape)


def as_tensors(element: Any) -> Any:
    """Return a nest of arrays as a nest of tensors; the datasets that are windows stay."""
    return nest.map_structure(lambda a: a if isinstance(a, Dataset) else Tensor(a), element)


#: The kinds of datasets by name. The methods of `Dataset` find them here: its subclasses are
#: defined in modules that import this one.
_kinds: dict[str, Callable[..., Dataset]] = {}
_Kind = TypeVar("_Kind", bound=Callable[..., Any])


def kind(maker: _Kind) -> _Kind:
    """Let the methods of `Dataset` find a subclass, or a function that returns a dataset."""
    _kinds[maker.__name__] = maker
    return maker


def _made(name: str, *args: Any) -> Dataset:
    return _kinds[name](*args)


class DatasetIterator(NextElements):
    """One pass over a dataset; `close`, or dropping it, ends the threads that work for it."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._elements = dataset._iter()

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        return as_tensors(next(self._elements))

    @property
    def element_spec(self) -> Any:
        return self._dataset.element_spec

    def close(self) -> None:
        """End the pass."""
        self._elements = iter(())


class Dataset:
    """A sequence of elements: nests (tuples, dicts) of tensors.

    Iterating starts from the beginning each time. Make one with `from_tensor_slices`,
    `from_tensors`, `from_generator` or `range`; every transformation returns a new dataset and
    leaves this one as it was.

    A new transformation is a subclass of `Transformed` with two methods.
    """

    # What a kind of dataset writes --------------------------------------------------------------

    def _iter(self) -> Iterator[Any]:
        """Yield the elements as nests of arrays."""
        raise NotImplementedError

    def cardinality(self) -> int:
        """Return the number of elements; -1: infinite, -2: unknown."""
        return UNKNOWN_CARDINALITY

    def _is_at_hand(self) -> bool:
        """Whether an element costs less than handing it over from a thread that makes it ahead."""
        return False

    def _rows(self) -> Rows | None:
        """Return the elements as rows of arrays that are in memory, if that is what they are."""
        return None

    def _make_spec(self) -> Any:
        """Return the spec of the elements, without making any: a pass has effects."""
        raise NotImplementedError

    def _batch_size(self) -> int | None:
        """Return the number of rows of each element but perhaps the last, if it is known."""
        return None

    def _inputs(self) -> tuple[Dataset, ...]:
        """Return the datasets that this one is made from."""
        return ()

    def _with_inputs(self, inputs: Sequence[Dataset]) -> Dataset:
        """Return the same as this, made from other datasets."""
        raise NotImplementedError

    def _copy(self, **changed: Any) -> Dataset:
        """Return a copy with some attributes changed, for `_with_inputs`."""
        other = copies.copy(self)
        vars(other).update(changed)
        return other

    # For everyone -------------------------------------------------------------------------------

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self)

    def options(self) -> Options:
        """Return the options of this dataset, and of those that it is made from."""
        merged = Options()
        for dataset in self._inputs():
            merged = merged.merge(dataset.options())
        return merged

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return ``reduce_func(state, element)`` of all elements, one after the other.

        Raises
        ------
        InvalidArgumentError
            If the function returns another number of tensors than the state has.
        TypeError
            If it changes the dtype of the state.
        """
        state = nest.map_structure(as_tensor, initial_state)
        for element in self:
            new = nest.map_structure(as_tensor, reduce_func(state, element))
            one, two = nest.flatten(state), nest.flatten(new)
            if len(one) != len(two):
                raise InvalidArgumentError(
                    "The number of components of the initial state and the reduce function output does "
                    f"not match. (initial_state={len(one)}, output={len(two)})."
                )
            for name, before, after in zip(
                nest.flatten(component_names(state, "state")), one, two, strict=True
            ):
                if before.dtype != after.dtype:
                    raise TypeError(
                        f"reduce: {name} was {before.dtype}, and reduce_func made it {after.dtype}"
                    )
            state = new
        return state

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return what a function makes of this dataset."""
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
                    "call it for each of these"
                )
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
        """
        return _made("TensorSlices", tensors)

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """Return a dataset of one element."""
        return _made("SingleElement", tensors)

    @staticmethod
    def from_generator(
        generator: Callable[..., Any],
        output_types: Any = None,
        output_shapes: Any = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Any = None,
    ) -> Dataset:
        """Return a dataset of what ``generator(*args)`` yields, called anew for each iteration.

        With ``output_signature``, a nest of `TensorSpec`, Python's numbers and arrays are converted
        where that loses nothing, and elements that do not fit raise a TypeError. Older programs give
        ``output_types`` and ``output_shapes`` instead. Without any of them elements are taken as they
        come. Arrays are copied; tensors among ``args`` are handed over as NumPy arrays.
        """
        signature = signature_of(output_types, output_shapes, output_signature)
        return _made("Generated", generator, signature, args or ())

    @staticmethod
    def range(*args: int, output_type: Any = "int64") -> Dataset:
        """Return a dataset of the numbers of Python's ``range(*args)``."""
        return _made("Range", args, output_type)

    @staticmethod
    def list_files(
        file_pattern: Any, shuffle: bool | None = None, seed: int | None = None
    ) -> Dataset:
        """Return a dataset of the names of the files that match patterns.

        Parameters
        ----------
        file_pattern : str or list of str
            As `glob` takes them.
        shuffle : bool, optional
            Give the names in a random order, another one for each iteration, unless this is False;
            then they are sorted.
        seed : int, optional
            As in `shuffle`. Workers that are to agree on the order need one.
        """
        names = _made("matching_files", file_pattern)
        return names if shuffle is False else names.shuffle(len(names), seed)

    @staticmethod
    def zip(*args: Any, datasets: Any = None) -> Dataset:
        """Return a dataset of tuples of elements; it ends with the shortest of the datasets.

        Takes the datasets one by one, or a tuple or dict of them: then elements have its structure.
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
    ) -> Dataset:
        """Return the elements in a random order.

        Each is drawn from a buffer of the next ``buffer_size`` elements; a buffer as large as the
        dataset gives every order the same chance. Every iteration has another order unless
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
    ) -> Dataset:
        """Join ``batch_size`` elements at a time along a new first axis."""
        return _made("Batch", self, batch_size, drop_remainder)

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Join elements of different shapes, filled up to the longest of each batch.

        Parameters
        ----------
        batch_size : int
            How many elements are joined.
        padded_shapes : nest of shapes, optional
            The shapes to fill up to; None or -1 in them: to the longest of the batch, as without.
        padding_values : number or nest of numbers, optional
            What to fill up with; zero unless given.
        drop_remainder : bool
            Leave out a last batch of fewer elements.

        Raises
        ------
        DataLossError
            If an element is larger than its padded shape.
        ValueError
            If a padded shape has another number of axes than the elements.
        TypeError
            If a padding value cannot be of the elements' dtype.
        """
        return _made("PaddedBatch", self, batch_size, padded_shapes, padding_values, drop_remainder)

    def rebatch(self, batch_size: Any, drop_remainder: bool = False) -> Dataset:
        """Cut the rows of batches anew, into batches of another number of rows.

        ``batch_size`` may be a list of numbers, which are used in turn; 0 gives an empty batch.
        """
        return _made("Rebatch", self, batch_size, drop_remainder)

    def repeat(self, count: int | None = None) -> Dataset:
        """Return the dataset ``count`` times over; None or -1: for ever."""
        return _made("Repeat", self, count)

    def prefetch(self, buffer_size: int) -> Dataset:
        """Make elements ahead in a thread, ``buffer_size`` of them (-1: two)."""
        return _made("Prefetch", self, buffer_size)

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Apply a function to every element; tuples become its arguments.

        With ``num_parallel_calls`` (-1: one for each core) it runs in threads; the order stays.
        A list that the function returns is a tuple of components, as in TensorFlow. Arrays that the
        function returns are copied. `element_spec` calls it with zeros.
        """
        return _made("Map", self, map_func, num_parallel_calls)

    def flat_map(self, map_func: Callable[..., Any]) -> Dataset:
        """Return the elements of the dataset that a function makes of each element."""
        return _made("Interleave", self, map_func, 1, 1, None)

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Make a dataset of each element, and take elements of several of these in turn.

        Parameters
        ----------
        map_func : callable
            Returns a dataset; say, the lines of the file whose name it is given.
        cycle_length : int, optional
            How many datasets take turns; by default (and -1) one for each core.
        block_length : int
            How many elements each gives before the next one's turn.
        num_parallel_calls : int, optional
            Let the datasets be read ahead, each in a thread of its own. The order stays.
        deterministic : bool, optional
            Accepted for TensorFlow's sake: the order never depends on timing.
        """
        return _made("Interleave", self, map_func, cycle_length, block_length, num_parallel_calls)

    def with_options(self, options: Options) -> Dataset:
        """Return the same elements with options, which are put over those there are."""
        return _made("WithOptions", self, options)

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Keep the elements for which ``predicate`` is true."""
        return _made("Filter", self, predicate)

    def cache(self, filename: str | os.PathLike[str] = "") -> Dataset:
        """Keep the elements when they have been made once.

        Parameters
        ----------
        filename
            A file to keep them in, which a later program reads instead of making them anew; by default
            they are kept in memory. It is written by the first pass that comes to its end.

        Raises
        ------
        DataLossError, InvalidArgumentError
            When the elements are read: if the file is not whole, or is another dataset's.
        """
        return _made("FileCache", self, filename) if filename else _made("Cache", self)

    def take(self, count: int) -> Dataset:
        """Return the first ``count`` elements; -1: all."""
        return _made("Take", self, count)

    def skip(self, count: int) -> Dataset:
        """Return all but the first ``count`` elements; -1: none."""
        return _made("Skip", self, count)

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return every ``num_shards``-th element, beginning with number ``index``.

        ``shard(SHARD_HINT, SHARD_HINT)`` is filled in by a strategy, under `AutoShardPolicy.HINT`.
        """
        return _made("Shard", self, num_shards, index)

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Return this dataset's elements, then another's."""
        return _made("Concatenate", self, dataset)

    def enumerate(self, start: int = 0) -> Dataset:
        """Return pairs of a number and an element."""
        return _made("Enumerate", self, start)

    def window(
        self, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False
    ) -> Dataset:
        """Return datasets of ``size`` elements each, one for each component of the elements.

        Parameters
        ----------
        size : int
            How many elements a window has; the last ones may have fewer.
        shift : int, optional
            How many elements further the next window begins; by default ``size``.
        stride : int
            How many elements further the next element of a window is.
        drop_remainder : bool
            Leave out windows of fewer elements.
        """
        return _made("Window", self, size, shift, stride, drop_remainder)

    def unbatch(self) -> Dataset:
        """Return the rows of every element."""
        return _made("Unbatch", self)
