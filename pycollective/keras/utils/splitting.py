"""`split_dataset`: a dataset split into two."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycollective import nest
from pycollective.data import Dataset, experimental
from pycollective.data.sharding import rows_of_batches
from pycollective.data.spec import INFINITE_CARDINALITY


def split_dataset(
    dataset: Any,
    left_size: float | None = None,
    right_size: float | None = None,
    shuffle: bool = False,
    seed: int | None = None,
) -> tuple[Dataset, Dataset]:
    """Return the beginning and the end of a dataset, for example for training and testing.

    As in Keras, a `Dataset` is read once, and its elements are kept in memory. So the parts have no
    common element, also if each pass over the dataset has another order or other random numbers.

    Parameters
    ----------
    dataset
        A finite `Dataset`, an array, or a list or tuple of arrays of the same length. If the dataset
        consists of batches, their rows are split.
    left_size, right_size : float, optional
        The sizes of the parts: a fraction (float) or a number of elements (int). The default is the
        remainder.
    shuffle, seed
        True to shuffle the elements before the split, and the seed of their order.

    Returns
    -------
    tuple of Dataset
        The first ``left_size`` and the last ``right_size`` elements.

    Raises
    ------
    ValueError
        No size is given, a fraction is not between 0 and 1, or the sizes are too large. Or a part
        would be empty, or the dataset is infinite.
    """
    batch = rows_of_batches(dataset) if isinstance(dataset, Dataset) else None
    if isinstance(dataset, Dataset):
        if dataset.cardinality() == INFINITE_CARDINALITY:
            raise ValueError("split_dataset needs a finite dataset: call take(n) first")
        dataset = _kept(dataset if batch is None else dataset.unbatch())
    else:
        arrays = tuple(dataset) if isinstance(dataset, (list, tuple)) else dataset
        dataset = Dataset.from_tensor_slices(arrays)
    total = len(dataset)
    if left_size is None and right_size is None:
        raise ValueError("At least one of the `left_size` or `right_size` must be specified.")
    left, right = (_elements(size, total) for size in (left_size, right_size))
    left = total - right if left is None and right is not None else left
    right = total - left if right is None and left is not None else right
    assert left is not None and right is not None
    if left < 1 or right < 1 or left + right > total:
        raise ValueError(
            f"split_dataset: parts of {left} and {right} elements (left_size={left_size}, "
            f"right_size={right_size}) do not fit into a dataset of {total}"
        )
    if shuffle:
        dataset = dataset.shuffle(total, seed, reshuffle_each_iteration=False)
    parts = dataset.take(left), dataset.skip(total - right)
    return parts if batch is None else (parts[0].batch(batch), parts[1].batch(batch))


def _kept(dataset: Dataset) -> Dataset:
    """Return a dataset of the elements of one pass."""
    elements = list(dataset)
    if elements:
        try:
            return Dataset.from_tensor_slices(nest.map_structure(_stacked, *elements))
        except ValueError:  # the elements differ in shape
            pass
    spec = dataset.element_spec
    known = all(s.shape is not None and s.dtype is not None for s in nest.flatten(spec))
    made = Dataset.from_generator(lambda: elements, output_signature=spec if known else None)
    return made.apply(experimental.assert_cardinality(len(elements)))


def _stacked(*leaves: Any) -> Any:
    return np.stack([leaf.numpy() for leaf in leaves])


def _elements(size: int | float | None, total: int) -> int | None:
    if size is None:
        return None
    if isinstance(size, float):
        if not 0 < size < 1:
            raise ValueError(f"split_dataset: a fraction must be between 0 and 1, got {size}")
        return round(size * total)
    return int(size)
